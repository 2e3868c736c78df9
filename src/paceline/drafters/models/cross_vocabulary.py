"""Draft with a model that has another tokenizer, by common tokens or by text (Timor et al. 2025, arXiv 2502.05202)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.common.errors import UnsupportedError
from paceline.common.limits import Limited
from paceline.core.choice import Draw
from paceline.core.contracts import DRAFTERS, Budget, RowsView
from paceline.core.per_row import PerRow
from paceline.core.tree import TokenTree
from paceline.core.tree_growth import Grower, TreeOptions
from paceline.drafters.models.draft_model import ModelDrafter
from paceline.models.language_model import LanguageModel
from paceline.models.readers.scratch_reader import ScratchReader, ScratchRows
from paceline.models.translation import Transcript, Translation

_MOST_STEPS = 4  # the largest number of draft tokens per token of the target


@DRAFTERS.register("cross-vocabulary")
class CrossVocabulary(ModelDrafter):
    """Draft with a smaller model with another tokenizer, by the tokens that both models have or by text.

    The draft model reads the text in its own tokens. When the text grows, only its end is encoded again, and the KV
    cache of the other tokens stays valid.
    """

    @dataclass(frozen=True)
    class Options(Limited):
        model: Any = None  # a LanguageModel, or an argument of `paceline.load`
        mode: Literal["intersection", "text"] = "intersection"  # draft common tokens, or text that is encoded again

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self._grower = Grower(TreeOptions())
        self._translated: tuple[LanguageModel, Translation] | None = None

    def describe(self) -> str:
        return f"cross-vocabulary {self.lm.name} by {self.options.mode}"

    def reset_copy(self) -> CrossVocabulary:
        fresh = CrossVocabulary(self.options)
        fresh._translated = self._translated
        return fresh

    # ---- rows come and go

    def check(self, target: LanguageModel) -> None:
        if self.options.mode == "intersection" and self._translation(target).shared == 0:
            raise UnsupportedError(
                f"{self.lm.name} and {target.name} have no token in common; use mode 'text', or another draft model."
            )

    def _translation(self, target: LanguageModel) -> Translation:
        """Return the translation for this target. It is made once, because it compares whole vocabularies."""
        if self._translated is None or self._translated[0] is not target:
            self._translated = (target, Translation(target, self.lm))
        return self._translated[1]

    def open(self, target: LanguageModel, rows: RowsView) -> None:
        self.words = self._translation(target)
        self.book = ScratchReader(self.lm.reader(), ScratchRows(self.lm.device))
        self._transcripts = PerRow[Transcript]()

    def admit(self, rows: RowsView, first: int) -> None:
        new = [Transcript(self.words, (*self.lm.eos, 0)[0]) for _ in range(first, rows.count)]
        for transcript, text in zip(new, rows.histories[first:], strict=True):
            transcript.follow(text)
        self._transcripts[first:] = new
        self.book.admit([transcript.ids for transcript in new])

    def release(self, row: int, last: int, length: int) -> None:
        self.book.release(row, last)
        self._transcripts.release(row, last)

    def rewind(self, lengths: list[int]) -> None:
        for transcript, length in zip(self._transcripts, lengths, strict=True):
            transcript.rewind(length)

    # ---- drafting

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        same = [transcript.follow(text) for transcript, text in zip(self._transcripts, rows.histories, strict=True)]
        self.book.rewrite([transcript.ids for transcript in self._transcripts], same)
        by_text = self.options.mode == "text"
        steps = self._steps(rows, budget.depth) if by_text else budget.depth
        if self.outgrown(self.book.rows.lengths, steps):
            return TokenTree.empty(rows.count, rows.text.device)
        return self._by_text(rows, budget, steps) if by_text else self._by_tokens(rows, budget)

    def _by_tokens(self, rows: RowsView, budget: Budget) -> TokenTree:
        """Return a draft from the distribution over the tokens that both models have."""

        def expand(tokens: Tensor | None, parents: Tensor | None) -> Tensor:
            if tokens is None:
                return self.words.logits(self.book.extend().logits)
            return self.words.logits(self.book.reader.extend(self.book.rows, 0, self.words.to_draft[tokens]).logits)

        tree = self._grower.run(rows, budget, expand)
        self.book.add(self.words.to_draft[tree.tokens].tolist(), self._grower.fed)
        if all(transcript.complete for transcript in self._transcripts):
            return tree
        # the text ends inside a character, which the draft model cannot encode
        whole = [transcript.complete for transcript in self._transcripts]
        counts = [max(0, min(limit, tree.nodes)) * ok for limit, ok in zip(budget.limits, whole, strict=True)]
        return replace(tree, count=torch.tensor(counts, device=tree.tokens.device))

    def _steps(self, rows: RowsView, depth: int) -> int:
        """Return the number of draft tokens to write: one more than needed, because the last can be incomplete."""
        if self.words.pieces is None:
            return depth
        lengths = zip(self._transcripts, rows.lengths, strict=True)
        ratio = max(len(transcript.ids) / length for transcript, length in lengths)
        return math.ceil((depth + 1) * min(max(ratio, 1.0), _MOST_STEPS))

    def _by_text(self, rows: RowsView, budget: Budget, steps: int) -> TokenTree:
        """Return as the draft the text that the draft model writes, encoded in tokens of the target."""
        logits = self.book.extend().logits
        sampler = _DraftSampler(rows, budget, self.words)
        written = [sampler.draw(logits)]
        for _ in range(steps - 1):
            logits = self.book.reader.extend(self.book.rows, 0, written[-1]).logits
            written.append(sampler.draw(logits))
        lines: list[list[int]] = torch.cat(written, 1).tolist()
        self.book.add(lines, steps - 1)
        chains = []
        for text, transcript, line, limit in zip(rows.histories, self._transcripts, lines, budget.limits, strict=True):
            most = max(0, min(limit, budget.depth))
            chains.append(self.words.decode(text, line)[:most] if transcript.complete else [])
        return TokenTree.from_chains(chains, rows.text.device)


class _DraftSampler:
    """Selects tokens of the draft model, one at a time.

    While all tokens exist in both vocabularies, it draws with the target's noise. After that it selects the likeliest
    token.
    """

    def __init__(self, rows: RowsView, budget: Budget, words: Translation) -> None:
        self._rows, self._budget, self._words = rows, budget, words
        self._guesses: list[Tensor] = []  # [R,1] each, in the target's ids
        self._aligned = torch.ones(rows.count, 1, dtype=torch.bool, device=rows.text.device)

    def draw(self, logits: Tensor) -> Tensor:
        """Return the next tokens [R,1] as ids of the draft model."""
        own = logits.argmax(-1)
        step = len(self._guesses)
        if step >= self._budget.depth:
            return own
        path = None
        if self._rows.needs_path and step:
            before = torch.cat(self._guesses, 1)
            path = (before, torch.ones_like(before, dtype=torch.bool).unsqueeze(1))
        choice = self._rows.choice(slice(step, step + 1), path)
        draw: Draw = "coupled" if self._budget.draw == "coupled" else "certain"
        guess, _ = choice.guess(self._words.logits(logits), draw)
        self._guesses.append(guess)
        self._aligned = self._aligned & self._words.known[own]
        return torch.where(self._aligned, self._words.to_draft[guess], own)
