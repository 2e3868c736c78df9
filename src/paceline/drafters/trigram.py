"""A trigram model drafts: as little as a language model can be (Spector & Ré 2023, arXiv 2308.04623; Katz 1987)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.contracts import DRAFTERS, Budget, Reading, RowsView
from paceline.core.errors import InputError, UnsupportedError
from paceline.core.growth import Expand, Grower, TreeOptions
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict
from paceline.models.head_files import warn_of_other_weights

from .host import HostDrafter
from .katz import TrigramTable, train_trigram
from .shipped import made_for, shipped, weights_of


@DRAFTERS.register("trigram")
class Trigram(HostDrafter[TrigramTable]):
    """Let a trigram model write ahead: trained on texts or on the target's own samples, else on the prompt."""

    @dataclass(frozen=True)
    class Options(TreeOptions):
        file: str | None = None  # a model written by train_trigram(...).save(path)
        table: Any = None  # or the model itself, a TrigramTable; without both, what comes along, else of the prompt

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.file is not None and self.table is not None:
                raise InputError("A trigram model is given by file or by table; leave one of them out.")
            if self.table is not None and not isinstance(self.table, TrigramTable):
                raise InputError(f"table must be a TrigramTable, got {type(self.table).__name__}.")

        @classmethod
        def conformance_variants(cls) -> list[dict[str, Any]]:
            """A tiny one, made for the target."""

            def trained(lm: Any) -> TrigramTable:
                texts = torch.randint(0, lm.vocabulary, (12, 60), generator=torch.Generator().manual_seed(1))
                return train_trigram(texts.tolist(), lm.vocabulary)

            return [{"table": trained}, {"table": trained, "tree": "best-first"}]

    def __init__(self, options: Options | None = None) -> None:
        self.options = options = options or self.Options()
        self._given: TrigramTable | None = options.table
        self._file = options.file
        if options.file is not None:
            self._given = TrigramTable.load(options.file)
        self._grower = Grower(options)

    @classmethod
    def beyond_text(cls, options: Any) -> str | None:
        return None

    def describe(self) -> str:
        shape = "" if self.options.tree == "chain" else f", tree {self.options.tree}"
        return f"trigram {'of the prompt' if self._given is None else self.options.file or 'table'}{shape}"

    def anew(self) -> Trigram:
        return Trigram(replace(self.options, file=None, table=self._given))

    def check(self, target: Any) -> None:
        if self._given is None and self.name in shipped(target):
            self._file = weights_of(self.name, shipped(target)[self.name])["file"]
            self._given = TrigramTable.load(self._file)
        if self._given is not None and self._given.vocabulary != target.vocabulary:
            raise UnsupportedError(
                f"The trigram model has {self._given.vocabulary} tokens and {target.name} has {target.vocabulary}; "
                "train one with the target's tokenizer."
            )
        trained_on = None if self._file is None else made_for(self.name, Path(self._file).parent)
        if trained_on is not None:
            warn_of_other_weights(self.name, trained_on, target)

    def open(self, target: Any, rows: RowsView) -> None:
        super().open(target, rows)
        self._vocabulary: int = target.vocabulary

    def begin(self, rows: RowsView, row: int) -> TrigramTable:
        """Where no model is given, one of the prompt alone."""
        return self._given or train_trigram([rows.histories[row]], self._vocabulary)

    def reorder(self, rows: RowsView, source: Sequence[int]) -> bool:
        self._grower.reorder(source)
        return True

    def keep(self, rows: RowsView, verdict: Verdict, reading: Reading) -> None:
        self._grower.judged(verdict)  # it measures which ranks are accepted

    # ---- drafting

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        first = rows.choice(slice(0, 1))
        plain = not rows.needs_path and (first.batch.deterministic or budget.draw == "certain")
        if plain and self.options.tree == "chain":
            known = zip(self._states, rows.histories, budget.limits, strict=True)
            return TokenTree.from_chains([_likeliest(*each, budget.depth) for each in known], "cpu")
        return self._grower.run(rows, budget, self._expand(rows))

    def _expand(self, rows: RowsView) -> Expand:
        """The laws after the text, and then after drafted tokens. Only the last two tokens of a path matter."""
        asked: list[list[list[int]]] = [[text[-2:]] for text in rows.histories]  # per row: the text, then every node

        def expand(tokens: Tensor | None, parents: Tensor | None) -> Tensor:
            start = 0
            if tokens is not None:
                known, above = tokens.tolist(), None if parents is None else parents.tolist()
                start = len(asked[0])
                for row, paths in enumerate(asked):
                    for i, token in enumerate(known[row]):
                        before = paths[-1] if above is None else paths[above[row][i] + 1]
                        paths.append([*before, token][-2:])
            laws = [[self._states[row].logits(path) for path in paths[start:]] for row, paths in enumerate(asked)]
            return torch.stack([torch.stack(of_row) for of_row in laws]).to(rows.text.device)

        return expand


def _likeliest(table: TrigramTable, text: list[int], limit: int, depth: int) -> list[int]:
    """The likeliest tokens one after the other, without a whole law for each."""
    words = text[-2:]
    for _ in range(min(limit, depth)):
        words.append(table.best(words[-2:]))
    return words[len(text[-2:]) :]
