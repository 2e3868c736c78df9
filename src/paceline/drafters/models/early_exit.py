"""Draft with the first layers of the target. The verification runs only the other layers, on their output."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.common.errors import InputError, shown
from paceline.common.limits import limited
from paceline.core.contracts import DRAFTERS, Reader
from paceline.core.protocols import SharesReader
from paceline.core.tree_growth import TreeOptions
from paceline.drafters.heads.head_files import check_target, fingerprint, load_head, save_head
from paceline.drafters.models.wrapper import Ahead, SelfDraft
from paceline.drafters.shipped import shipped
from paceline.models.cpu.cpu_linear import drafting
from paceline.models.heads.head_layers import Norm
from paceline.models.language_model import LanguageModel
from paceline.models.loading.weight_check import built, reading
from paceline.models.module_views import without_layers
from paceline.models.readers.drafting_ahead import Head, Split, SplitReader, check_split

KIND = "early-exit"


class ExitHead(nn.Module):
    """A trained exit: an optional extra block, a norm, and an output layer (its own, or that of the target).

    In a new head the block adds zeros, so only the norm differs from the target.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """config: `layers` before the exit, `block` (inner width of the extra block, 0: none), `own_output`, and the
        fingerprint of the `target`."""
        super().__init__()
        self.config = dict(config)
        width, block = config["target"]["hidden"], config["block"]
        self.norm = Norm(width, eps=1e-6)
        self.enter = Norm(width, eps=1e-6) if block else None
        self.up = nn.Linear(width, block, bias=False) if block else None
        self.down = nn.Linear(block, width, bias=False) if block else None
        self.output = nn.Linear(width, config["target"]["vocabulary"], bias=False) if config["own_output"] else None
        if self.down is not None:
            nn.init.zeros_(self.down.weight)

    @classmethod
    def fresh(cls, target: LanguageModel, layers: int, block: int = 0, own_output: bool = False) -> ExitHead:
        """Return an untrained head."""
        return cls({"layers": layers, "block": block, "own_output": own_output, "target": fingerprint(target)})

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> ExitHead:
        config, tensors = load_head(folder, KIND)
        with reading("The early-exit head in", folder):
            if type(config["layers"]) is not int:
                raise ValueError(f"'layers' in its config.json is {shown(config['layers'])}")
            head = built(lambda: cls(config), tensors, folder)
            head.load_state_dict(tensors)
        return head

    def save(self, folder: str | os.PathLike[str], numbers: str | None = None) -> None:
        save_head(folder, KIND, self.config, self.state_dict(), numbers)

    def states(self, hidden: Tensor) -> Tensor:
        """Return the input [...,D] of the output layer, from hidden states [...,D] after the last layer that runs."""
        if self.enter is not None and self.up is not None and self.down is not None:
            hidden = hidden + self.down(nn.functional.silu(self.up(self.enter(hidden))))
        return self.norm(hidden)  # type: ignore[no-any-return]

    def forward(self, hidden: Tensor, output: Callable[[Tensor], Tensor]) -> Tensor:
        """Return logits [R,Q,V] from hidden [R,Q,D]. output: the target's output layer, for a head without its own."""
        return (self.output or output)(self.states(hidden))


@DRAFTERS.register("early-exit")
class EarlyExit(SelfDraft, SharesReader):
    """Draft with the target's first layers; the verification runs only the layers after them."""

    @dataclass(frozen=True)
    class Options(TreeOptions):
        # the number of layers before the exit; 0: the number that the head was trained with, else a third of them
        layers: int = limited(0, most=10_000)
        skip: tuple[int, ...] = ()  # instead of an exit: draft with all layers except these
        head: Any = None  # an ExitHead, or its folder; None: the shipped head, unless `layers` is given

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.layers < 0:
                raise InputError(f"layers must be at least 1, or 0 for a third of them, got {self.layers}.")
            if not isinstance(self.skip, (list, tuple)) or any(type(layer) is not int for layer in self.skip):
                raise InputError(f"skip must be a list of layers, counted from 0, got {shown(self.skip)}.")
            if self.head is not None and not isinstance(self.head, (str, Path, ExitHead)):
                raise InputError(f"head must be a folder or an ExitHead, got {shown(self.head)}.")
            if self.skip and (self.layers or self.head is not None):
                raise InputError("early-exit takes either an exit (layers, head) or skip, and got both; leave one out.")

        @classmethod
        def conformance_variants(cls) -> list[dict[str, Any]]:
            return [{"skip": (0,), "tree": "levels"}, {"head": _random_head, "tree": "static"}]

    kept_by_copies = ("_made", "_head", "_fitted")

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        given = self.options.head
        self._head: ExitHead | None = ExitHead.load(given) if isinstance(given, (str, Path)) else given
        self._fitted: tuple[LanguageModel, ExitHead] | None = (
            None  # the target, and a copy of the head on its device and in its dtype
        )
        self._depth = self.options.layers

    def describe(self) -> str:
        if self.options.skip:
            return f"early-exit without layers {', '.join(map(str, self.options.skip))}{self.shape}"
        trained = " by a trained head" if self._head else ""
        return f"early-exit after {self._depth or 'a third of the'} layers{trained}{self.shape}"

    # ---- the layers that draft

    def check(self, target: LanguageModel) -> None:
        if self.options.skip:
            _check_skip(target, self.options.skip)
            return
        if self._head is None and not self.options.layers and KIND in shipped(target):
            self._head = ExitHead.load(shipped(target)[KIND])
        self._depth = self._exit_of(target)
        check_split(target, self._depth)
        self._head_for(target)

    def _exit_of(self, target: LanguageModel) -> int:
        trained = None if self._head is None else int(self._head.config["layers"])
        if trained and self.options.layers and trained != self.options.layers:
            raise InputError(f"This exit head was trained for {trained} layers, but layers is {self.options.layers}.")
        return trained or self.options.layers or max(1, round(target.layers / 3))

    def _head_for(self, target: LanguageModel) -> Head | None:
        if self._head is None:
            return None
        if self._fitted is None or self._fitted[0] is not target:
            check_target(KIND, self._head.config["target"], target)
            self._fitted = (target, copy.deepcopy(self._head).to(target.device, target.dtype).eval())
        head, output = drafting(self._fitted[1]), cache(lambda: drafting(target.model.get_output_embeddings()))
        return lambda hidden: head(hidden, lambda states: output()(states))

    # ---- the draft model

    def reader(self, target: LanguageModel) -> Reader | None:
        if self.options.skip:
            return None
        reader = SplitReader(target, self._exit_of(target), self._head_for(target))
        self._inner = Ahead(reader, self.options)
        return reader

    def made_from(self, target: LanguageModel) -> LanguageModel:
        """Return a model of some layers with its own KV cache: to skip layers, or if the loop shares no reader."""
        head, depth = (None, 0) if self.options.skip else (self._head_for(target), self._exit_of(target))
        if head is None:  # only layers of the target, so that kernels can run them
            part = without_layers(target, self.options.skip or range(depth, target.layers))
        else:
            part = Split(target, depth, head).lower
        return LanguageModel(part, name=f"part of {target.name}")


def _check_skip(target: LanguageModel, skip: tuple[int, ...]) -> None:
    wrong = [layer for layer in skip if not 0 <= layer < target.layers]
    if wrong or len(set(skip)) >= target.layers:
        raise InputError(
            f"skip must be some of the layers 0 to {target.layers - 1} of {target.name}, not all, got {list(skip)}."
        )


def _random_head(target: LanguageModel) -> ExitHead:
    """Return a head with random weights, for the conformance suite."""
    generator = torch.Generator().manual_seed(3)
    head = ExitHead.fresh(target, 1, block=8)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.3)
    return head
