"""A causal language model of Hugging Face, unmodified, with its tokenizer and the facts about its architecture."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.contracts import Reader
from paceline.core.costs import Costs
from paceline.core.device_ops import DeviceOps
from paceline.models.architecture import is_tested, refuse_dropout, study
from paceline.models.cpu.cpu_forward import ops_for
from paceline.models.loading.catalogue import UNKNOWN, Weights
from paceline.models.probe import probe
from paceline.models.reader import SlotReader
from paceline.models.readers.strict import StrictReader

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class ModelRecord:
    """Objects made from a model, and measurements of it. All copies of a `LanguageModel` share one record."""

    quantized: dict[str, LanguageModel] = field(default_factory=dict)  # by dtype
    split_depths: set[int] = field(default_factory=set)  # layers after which it can be cut (early exit)
    costs: dict[str, Costs] = field(default_factory=dict)  # seconds of its passes, by `pass_timing.costs_key`
    busy: set[str] = field(default_factory=set)  # keys of the costs that were measured on a busy machine
    grammars: dict[int, Any] = field(default_factory=dict)  # the `GrammarCompiler`, by the size of the vocabulary
    warned: set[str] = field(default_factory=set)  # warnings that were given, one for any number of decoders


class LanguageModel:
    """A model to decode with. It holds no sequences: its readers do, and any number of readers can share one model.

    The transformers model and its config are never edited.
    """

    max_token_id: int | None = None  # the last token it knows, if `vocabulary` is that of a larger model
    strict: bool = False  # a token has the same bits in every pass
    weights: Weights = UNKNOWN  # where they come from, and in which form
    runner: str = "auto"  # how passes run (see `runtime.RUNNERS`)

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, name: str | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.record = ModelRecord()
        self.architecture = study(model)
        self.name = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
        config = model.config.get_text_config(decoder=True)
        self.vocabulary = _usable_vocabulary(config.vocab_size, tokenizer)
        self.context = self.architecture.context
        self.layers = len(self.architecture.kinds)
        if not is_tested(model):
            probe(self)

    @property
    def title(self) -> str:
        """The class of the model and its architecture, for messages."""
        return f"{type(self.model).__name__} ({self.architecture.name})"

    @property
    def core(self) -> PreTrainedModel:
        """The module that readers run. `model` is the one that other code gets."""
        return self.model

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def ops(self) -> DeviceOps:
        """The operations of its device between forward passes."""
        return ops_for(self)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def numbers(self) -> str:
        """The form and source of the weights, and their dtype in memory."""
        return self.weights.read_as(self.dtype)

    @property
    def eos(self) -> tuple[int, ...]:
        """The token ids that end a sequence: of the generation config, else the config, else the tokenizer."""
        generation = getattr(self.model, "generation_config", None)
        for source in (generation, self.model.config, self.tokenizer):
            ids = getattr(source, "eos_token_id", None)
            if ids is not None:
                return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
        return ()

    @property
    def usual_temperature(self) -> float | None:
        """The temperature of the generation config, if it has one."""
        given = getattr(getattr(self.model, "generation_config", None), "temperature", None)
        return None if given is None else float(given)

    @property
    def logits(self) -> int:
        """The number of logits of a pass. It is below `vocabulary` if the model does not know all of those tokens."""
        return self.vocabulary if self.max_token_id is None else self.max_token_id + 1

    def with_vocabulary_of(self, target: LanguageModel) -> LanguageModel:
        """Return the model with the vocabulary of a target. It reads tokens that it does not know as its last one, and
        gives no logits for them."""
        if self.vocabulary == target.vocabulary:
            return self
        other = copy.copy(self)
        other.tokenizer, other.vocabulary = target.tokenizer, target.vocabulary
        other.max_token_id = self.vocabulary - 1 if self.vocabulary < target.vocabulary else None
        return other

    def reader(self, taps: Sequence[float] = ()) -> SlotReader:
        """Return a reader of a batch. taps: relative depths of the hidden states that its readings contain."""
        refuse_dropout(self.model)
        reader = SlotReader(self, taps)
        # kernels give a token the same bits in every pass by themselves
        return StrictReader(self, taps) if self.strict and reader.kernels is None else reader

    def reader_around(self, shared: Reader) -> Reader:
        """Return the reader to decode with if a drafter shares its reader (early exit)."""
        return shared

    def __repr__(self) -> str:
        return f"LanguageModel({self.name!r}, {self.architecture.name}, {self.numbers}, {self.device})"


def _usable_vocabulary(size: int, tokenizer: Any) -> int:
    """Return the size of the vocabulary without ids that only pad the weights, which have no text."""
    if tokenizer is None:
        return size
    try:
        return min(size, max(len(tokenizer), max(tokenizer.get_vocab().values(), default=0) + 1))
    except (AttributeError, NotImplementedError, TypeError):
        return size
