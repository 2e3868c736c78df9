"""A smaller model writes ahead: a chain, or a tree grown where the draft itself is most sure."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.common.errors import InputError, PacelineWarning
from paceline.common.limits import limited
from paceline.core.contracts import DRAFTERS, Budget, Drafter, Reading, RowsView
from paceline.core.protocols import DraftsOnDevice, Graphable, Reorderable, Rewindable, RunsModel
from paceline.core.tree import TokenTree
from paceline.core.tree_growth import Expand, Grower, TreeOptions
from paceline.core.verdict import Verdict
from paceline.models.heads.subset_head import SubsetHead
from paceline.models.language_model import LanguageModel
from paceline.models.runtime import check_quantization, quantize_as
from paceline.models.tokenizers.translation import check_same_vocabulary

_TREE = -1
_STEADY = -2
_FEWEST = 8  # tokens that a draft model must be able to say


class ModelDrafter(RunsModel, Rewindable):
    """A drafter that runs a smaller model: what its kinds have in common."""

    Options: ClassVar[type]
    prior_acceptance = 0.7

    def __init__(self, options: Any = None) -> None:
        self.options = options or self.Options()
        if not isinstance(self.options.model, LanguageModel):
            raise InputError(
                f"{self.name} needs a model: SpeculativeDecoder(target, '{self.name}', options={{'model': 'name or "
                "folder of a smaller model'})."
            )
        self.lm: LanguageModel = self.options.model
        self._warned = False

    def describe(self) -> str:
        return f"{self.name} {self.lm.name}"

    def check(self, target: LanguageModel) -> None:
        check_same_vocabulary(target, self.lm)

    def outgrown(self, lengths: list[int], depth: int) -> bool:
        """Is there no room left in the draft model's context, for any row? Said once."""
        if min(lengths) + depth <= self.lm.context:
            return False
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"The text has outgrown the context of {self.lm.name} ({self.lm.context} tokens); "
                "plain decoding goes on.",
                PacelineWarning,
                stacklevel=2,
            )
        return True


def over_vocabulary(logits: Tensor, vocabulary: int) -> Tensor:
    """Over the target's vocabulary: padded ids are impossible on both sides."""
    extra = logits.shape[-1] - vocabulary
    if extra > 0:
        return logits[..., :vocabulary]
    return logits if extra == 0 else torch.nn.functional.pad(logits, (0, -extra), value=float("-inf"))


@DRAFTERS.register("draft-model")
class DraftModel(ModelDrafter, DraftsOnDevice, Graphable, Reorderable):
    """Let a smaller model with the same vocabulary write ahead, as a chain or as a tree."""

    @dataclass(frozen=True)
    class Options(TreeOptions):
        model: Any = None  # a LanguageModel, or anything `paceline.load` takes
        quantize: str | None = None  # the model in int8, int4 or bfloat16

        # tokens it can say: the usual ones and those of the texts at hand (None: all)
        vocabulary: int | None = limited(None, most=2**24)

        def __post_init__(self) -> None:
            super().__post_init__()
            check_quantization(self.quantize)
            if self.vocabulary is not None and self.vocabulary < _FEWEST:
                raise InputError(f"vocabulary must be at least {_FEWEST} tokens, got {self.vocabulary}; try 8000.")

        @classmethod
        def conformance_variants(cls) -> list[Mapping[str, Any]]:
            return [{"tree": "chain", "vocabulary": 12}]

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self.lm = quantize_as(self.lm, self.options.quantize)
        self._read: list[int] = []  # per row, how many committed tokens the draft's memory holds
        self._drafted_at: list[int] = []  # per row, its length when the last draft was made
        self._grower = Grower(self.options)
        self._words: SubsetHead | None = None  # where it can say some tokens only
        self._heard: list[int] = []  # per row, the tokens that were looked at for new ones

    def describe(self) -> str:
        shape = "" if self.options.tree == "chain" else f", tree {self.options.tree}"
        some = "" if self.options.vocabulary is None else f", {self.options.vocabulary} tokens"
        return f"draft-model {self.lm.name}{some}{shape}"

    @property
    def learns(self) -> bool:
        """From a text, for those that come after it."""
        return self._words is not None or self.options.tree == "optimal"

    def reset_copy(self) -> Drafter:
        return type(self)(self.options) if self.learns else self

    # ---- rows come and go

    def open(self, target: LanguageModel, rows: RowsView) -> None:
        self.vocabulary = target.vocabulary
        some = self.options.vocabulary
        if self._words is not None:
            self._words.forget()
        elif some is not None and some < min(self.lm.vocabulary, target.vocabulary):
            self._words = SubsetHead(self.lm, some, (token for token in target.eos if token < target.vocabulary))
        self._reader = self.lm.reader() if self._words is None else self._words.lm.reader()
        if self.lm.vocabulary < target.vocabulary:
            self._reader.max_token_id = self.lm.vocabulary - 1
        self._read, self._drafted_at, self._heard = [], [], []
        self._fed: int | None = None

    def admit(self, rows: RowsView, first: int) -> None:
        self._settle(rows.lengths[:first])
        self._heard[first:] = [0] * (rows.count - first)
        rest = self._reader.begin(rows, first, rows.room)
        self._read[first:] = [length - rest for length in rows.lengths[first:]]

    def release(self, row: int, last: int, length: int) -> None:
        self._reader.release(row, last, length)
        for state in (self._read, self._drafted_at, self._heard):
            if last < len(state):
                state[row] = state[last]
                del state[last]

    def _settle(self, lengths: list[int]) -> None:
        """Once the last round is known on the host: what was accepted is in memory, as far as the draft model read it.

        `_fed` is the number of drafted tokens it read of a chain; of a tree it read all of a path but perhaps its leaf,
        and in a captured program, tree or chain, all but the last two tokens at worst.
        """
        if self._fed == _STEADY:
            self._read = [max(0, length - 2) for length in lengths]
            self._fed = None
        for row, length in enumerate(lengths if self._fed is not None else []):
            start = self._drafted_at[row]
            in_place = length - 2 if self._fed == _TREE else start + self._fed  # type: ignore[operator]
            self._read[row] = max(start, min(length - 1, in_place))
        self._fed = None

    def keep(self, rows: RowsView, verdict: Verdict, reading: Reading) -> None:
        # an accepted leaf was never read: what is copied for it is read anew in the next round
        self._reader.keep(rows, self._grower.kept(verdict))

    def reorder(self, rows: RowsView, source: Sequence[int]) -> bool:
        self._reader.reorder(rows, source)
        # a memory that is put together from two rows reaches as far as both of them did
        self._read = [min(self._read[row], self._read[other]) for row, other in enumerate(source)]
        if self._fed is not None:
            self._drafted_at = [self._drafted_at[other] for other in source]
        self._grower.reorder(source)
        return True

    def rewind(self, lengths: list[int]) -> None:
        self._settle(lengths)
        self._read = [min(read, length - 1) for read, length in zip(self._read, lengths, strict=True)]

    # ---- drafting

    def graphable(self, longest: int) -> bool:
        fixed = self._words is None and self.options.tree != "optimal"
        return fixed and self._reader.capturable and longest <= self.lm.context

    @property
    def storage_version(self) -> int:
        return self._reader.storage_version

    def on_replay(self) -> None:
        self._fed = _STEADY

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        if rows.bound is not None:  # it has read all but the last two tokens, or more; of those it reads one again
            self._reader.forget()  # where capturing has failed, half a round may be left
            return self._grower.run(rows, budget, self._expand(rows, 2))
        self._settle(rows.lengths)
        if self.outgrown(rows.lengths, budget.depth):
            return TokenTree.empty(rows.count, rows.text.device)
        width = max(length - read for length, read in zip(rows.lengths, self._read, strict=True))
        if width > min(rows.lengths):  # a newcomer is shorter than what the others have to catch up
            self._reader.prefill(rows, 0, [length - 1 for length in rows.lengths])
            width = 1
        self._drafted_at = list(rows.lengths)
        self._hear(rows)
        tree = self._grower.run(rows, budget, self._expand(rows, width))
        self._fed = self._grower.fed if self._grower.slots is None else _TREE
        return tree

    def _hear(self, rows: RowsView) -> None:
        """Where it can say some tokens only: those that have come up since are among them."""
        if self._words is None:
            return
        for row, (text, settled) in enumerate(zip(rows.histories, rows.settled, strict=True)):
            self._words.learn([t for t in text[self._heard[row] : settled] if t < self.lm.vocabulary])
            self._heard[row] = max(self._heard[row], settled)

    def _expand(self, rows: RowsView, width: int) -> Expand:
        """What the draft model says after the text, and then after drafted tokens."""

        def expand(tokens: Tensor | None, parents: Tensor | None) -> Tensor:
            said = self._reader.extend(rows, width if tokens is None else 0, tokens, parents).logits
            if self._words is not None:
                return self._words.spread(said, self.vocabulary)
            return over_vocabulary(said, self.vocabulary)

        return expand
