"""Draft with a smaller model: a chain, or a tree that grows at its most probable nodes."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.common.errors import InputError, PacelineWarning
from paceline.common.limits import limited
from paceline.core.contracts import DRAFTERS, Budget, Drafter, Reading, ReadsPieces, RowsView
from paceline.core.per_row import PerRow, ReadCursor
from paceline.core.protocols import CatchesUp, DraftsOnDevice, Graphable, Reorderable, Rewindable, RunsModel
from paceline.core.tree import TokenTree
from paceline.core.tree_growth import Expand, Grower, TreeOptions
from paceline.core.verdict import Verdict
from paceline.models.heads.head_layers import SubsetHead
from paceline.models.language_model import LanguageModel
from paceline.models.runtime import check_quantization, quantize_as
from paceline.models.translation import check_same_vocabulary

_FEWEST = 8  # the smallest output vocabulary of a draft model
_GRAPH_WIDTH = 2  # a draft inside a CUDA graph first reads this number of tokens; the KV cache holds all others


class ModelDrafter(RunsModel, Rewindable):
    """The base of drafters that run a smaller model."""

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
        """Return whether a draft of this depth exceeds the context of the draft model in every row. Warn once."""
        if min(lengths) + depth <= self.lm.context:
            return False
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"The text is longer than the context of {self.lm.name} ({self.lm.context} tokens); "
                "plain decoding continues.",
                PacelineWarning,
                stacklevel=2,
            )
        return True


def over_vocabulary(logits: Tensor, vocabulary: int) -> Tensor:
    """Return the logits cut or padded to the target's vocabulary. Padded ids have -inf."""
    extra = logits.shape[-1] - vocabulary
    if extra > 0:
        return logits[..., :vocabulary]
    return logits if extra == 0 else torch.nn.functional.pad(logits, (0, -extra), value=float("-inf"))


@DRAFTERS.register("draft-model")
class DraftModel(ModelDrafter, CatchesUp, DraftsOnDevice, Graphable, Reorderable):
    """Draft a chain or a tree with a smaller model that has the same vocabulary."""

    @dataclass(frozen=True)
    class Options(TreeOptions):
        model: Any = None  # a LanguageModel, or an argument of `paceline.load`
        quantize: str | None = None  # the dtype of its weights: int8, int4 or bfloat16

        # size of its output vocabulary: the most frequent tokens and the tokens of the texts (None: all)
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
        self._read = ReadCursor()  # committed tokens in the draft's KV cache
        self._drafted_at = PerRow[int]()  # the length of the sequence when the last draft was made
        self._drafted = False  # a draft was made after the last `_settle`
        self._fed: int | None = None  # drafted tokens of a chain that it read; None: the draft is a tree
        self._grower = Grower(self.options)
        self._subset: SubsetHead | None = None  # its output layer, if it has logits only for some tokens
        self._learned = PerRow[int]()  # tokens of the text that the subset has learned

    def describe(self) -> str:
        shape = "" if self.options.tree == "chain" else f", tree {self.options.tree}"
        subset = "" if self.options.vocabulary is None else f", {self.options.vocabulary} tokens"
        return f"draft-model {self.lm.name}{subset}{shape}"

    @property
    def learns(self) -> bool:
        """Return whether it has state that it learned from earlier texts."""
        return self._subset is not None or self.options.tree == "optimal"

    def reset_copy(self) -> Drafter:
        return type(self)(self.options) if self.learns else self

    # ---- rows come and go

    def open(self, target: LanguageModel, rows: RowsView) -> None:
        self.vocabulary = target.vocabulary
        size = self.options.vocabulary
        if self._subset is not None:
            self._subset.forget()
        elif size is not None and size < min(self.lm.vocabulary, target.vocabulary):
            self._subset = SubsetHead(self.lm, size, (token for token in target.eos if token < target.vocabulary))
        self._reader = self.lm.reader() if self._subset is None else self._subset.lm.reader()
        if self.lm.vocabulary < target.vocabulary:
            self._reader.max_token_id = self.lm.vocabulary - 1
        self._read.reset()
        self._drafted_at, self._learned, self._drafted = PerRow(), PerRow(), False

    def admit(self, rows: RowsView, first: int) -> None:
        self._settle(rows.lengths[:first])
        self._learned[first:] = [0] * (rows.count - first)
        rest = self._reader.begin(rows, first, rows.room)
        self._read[first:] = [length - rest for length in rows.lengths[first:]]

    @property
    def catches_up(self) -> bool:
        return isinstance(self._reader, ReadsPieces)

    def admit_unread(self, rows: RowsView, first: int) -> None:
        self._settle(rows.lengths[:first])
        self._learned[first:] = [0] * (rows.count - first)
        self._reader.begin(rows, first, rows.room, prefilled=True)
        self._read.admit_late(first, rows.count)

    def catch_up(self, rows: RowsView, row: int, stop: int) -> None:
        """Read whole pieces of the grid of the reader, and at the end what is left."""
        if row not in self._read.late:
            return
        last, reader = rows.lengths[row] - 1, self._reader
        start, end = self._read[row], last if stop >= last else stop // reader.grid * reader.grid
        for at in range(start, end, reader.piece):
            reader.read_piece(row, rows.text[row : row + 1, at : min(at + reader.piece, end)], at)
        self._read.catch_up(row, max(start, end), done=stop >= last)

    def release(self, row: int, last: int, length: int) -> None:
        self._reader.release(row, last, length)
        for state in (self._read, self._drafted_at, self._learned):
            state.release(row, last)

    def _settle(self, lengths: list[int]) -> None:
        """Update `_read` after the last round was committed: the KV cache has the accepted tokens that the draft model
        read. Of the accepted path of a tree, it read all tokens except possibly the last one."""
        self._read.settle(lengths)
        for row, length in enumerate(lengths if self._drafted else []):
            if row in self._read.late:
                continue
            start = self._drafted_at[row]
            read = length - 2 if self._fed is None else start + self._fed
            self._read[row] = max(start, min(length - 1, read))
        self._drafted = False

    def keep(self, rows: RowsView, verdict: Verdict, reading: Reading) -> None:
        # the draft model may not have read an accepted leaf: the next round reads it again
        self._reader.keep(rows, self._grower.kept(verdict))

    def reorder(self, rows: RowsView, source: Sequence[int]) -> bool:
        self._reader.reorder(rows, source)
        # a KV cache made from two rows is right up to the shorter of their two lengths
        self._read[:] = [min(self._read[row], self._read[other]) for row, other in enumerate(source)]
        if self._drafted:
            self._drafted_at.reorder(source)
        self._grower.reorder(source)
        return True

    def rewind(self, lengths: list[int]) -> None:
        self._settle(lengths)
        self._read.rewind(lengths)

    # ---- drafting

    def graphable(self, longest: int) -> bool:
        fixed = self._subset is None and self.options.tree != "optimal"
        return fixed and self._reader.capturable and longest <= self.lm.context

    @property
    def storage_version(self) -> Hashable:
        return self._reader.storage_version

    def on_replay(self) -> None:
        self._read.replayed(_GRAPH_WIDTH)
        self._drafted = False

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        if rows.bound is not None:
            self._reader.forget()  # a failed capture may leave drafted tokens of an incomplete round
            return self._grower.run(rows, budget, self._expand(rows, _GRAPH_WIDTH))
        self._settle(rows.lengths)
        if self.outgrown(rows.lengths, budget.depth):
            return TokenTree.empty(rows.count, rows.text.device)
        late, width = self._read.late, self._read.most_missing(rows.lengths)
        if width > min(rows.lengths):  # a new row is shorter than the number of tokens that another row must read
            self._reader.prefill(rows, 0, [0 if row in late else each - 1 for row, each in enumerate(rows.lengths)])
            width = 1
        self._drafted_at[:] = rows.lengths
        self._learn_tokens(rows)
        tree = self._grower.run(rows, budget, self._expand(rows, width))
        self._drafted, self._fed = True, self._grower.fed if self._grower.slots is None else None
        return tree

    def _learn_tokens(self, rows: RowsView) -> None:
        """Add the new tokens of the texts to the subset of the vocabulary with logits."""
        if self._subset is None:
            return
        for row, (text, settled) in enumerate(zip(rows.histories, rows.settled, strict=True)):
            self._subset.learn([t for t in text[self._learned[row] : settled] if t < self.lm.vocabulary])
            self._learned[row] = max(self._learned[row], settled)

    def _expand(self, rows: RowsView, width: int) -> Expand:
        """Return the function that computes logits after the text, reading its last `width` tokens, and after nodes."""

        def expand(tokens: Tensor | None, parents: Tensor | None) -> Tensor:
            logits = self._reader.extend(rows, width if tokens is None else 0, tokens, parents).logits
            if self._subset is not None:
                return self._subset.spread(logits, self.vocabulary)
            return over_vocabulary(logits, self.vocabulary)

        return expand
