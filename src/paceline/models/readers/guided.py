"""Targets made of two branches: classifier-free guidance and contrastive decoding.

To the engine such a target is a LanguageModel like any other. Its reader runs two readers, the second on sequences of
its own, and combines their logits. Drafters and rules need no special code for it.
"""

from __future__ import annotations

import math
import operator
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.common.errors import InputError, UnsupportedError
from paceline.core.contracts import PromptTaps, Reader, Reading, RowsView
from paceline.models.language_model import LanguageModel, ModelRecord
from paceline.models.reader import SlotReader
from paceline.models.readers.scratch_reader import ScratchRows
from paceline.models.translation import check_same_vocabulary


class TwoBranches(LanguageModel):
    """A model whose logits combine those of two branches. Tokenizer, end tokens and hidden states are the first's."""

    def __init__(self, first: LanguageModel, second: LanguageModel, name: str, context: int) -> None:
        self.first, self.second, self.record = first, second, ModelRecord()
        self.model, self.tokenizer, self.architecture = first.model, first.tokenizer, first.architecture
        self.vocabulary, self.layers = first.vocabulary, first.layers
        self.name, self.context, self.weights = name, context, first.weights

    @abstractmethod
    def other_prompt(self, prompt: list[int]) -> list[int]:
        """Return the prompt of the second branch. The new tokens are the same for both."""

    @abstractmethod
    def combine(self, first: Tensor, second: Tensor) -> Tensor:
        """Return logits [R,Q,V] from the log-probabilities [R,Q,V] of the branches."""

    def reader(self, taps: Sequence[float] = ()) -> Any:
        return BranchReader(self, self.first.reader(taps), self.second.reader())

    def reader_around(self, shared: Reader) -> Reader:
        return BranchReader(self, self.first.reader_around(shared), self.second.reader())


class BranchReader:
    """Two readers of one sequence. The second one has its own prompt."""

    def __init__(self, lm: TwoBranches, first: Any, second: SlotReader) -> None:
        self.lm = lm
        self.prompt_taps: list[PromptTaps] = []
        self._first, self._second = first, second
        self._rows = ScratchRows(lm.device)
        self._prompts: list[tuple[int, int]] = []  # per row, the length of the prompt in each branch

    @property
    def max_token_id(self) -> int | None:
        return self._first.max_token_id

    @max_token_id.setter
    def max_token_id(self, token: int | None) -> None:
        self._first.max_token_id = self._second.max_token_id = token

    # ---- reading

    capturable = False  # the second sequence is kept on the host

    @property
    def branches(self) -> bool:
        return bool(self._first.branches)

    @property
    def storage_version(self) -> Hashable:
        return self._first.storage_version, self._second.storage_version

    def begin(self, rows: RowsView, first: int, room: int) -> int:
        del self._prompts[first:]
        self._rows.drop(first)
        self._follow(rows)
        prompts = [self.lm.other_prompt(text) for text in rows.histories[first:]]
        self._rows.admit(prompts)
        self._prompts += [(length, len(other)) for length, other in zip(rows.lengths[first:], prompts, strict=True)]
        rest: int = self._first.begin(rows, first, room)
        self.prompt_taps = self._first.prompt_taps
        longer = max(other - length for length, other in self._prompts)
        self._second.begin(self._rows, first, room + max(0, longer))
        return rest

    def extend(
        self, rows: RowsView, width: int, tokens: Tensor | None = None, parents: Tensor | None = None
    ) -> Reading:
        reading: Reading = self._first.extend(rows, width, tokens, parents)
        other = self._second.extend(self._rows, self._width(rows, width) if width else 0, tokens, parents)
        return Reading(self._combined(reading.logits, other.logits), reading.taps)

    def _width(self, rows: RowsView, width: int) -> int:
        self._follow(rows)
        if width <= min(self._rows.lengths):
            return width
        # the other prompt may be shorter than the tokens that are new
        self._second.prefill(self._rows, 0, [length - 1 for length in self._rows.lengths])
        return 1

    def prefill(self, rows: RowsView, first: int, upto: Sequence[int]) -> None:
        """See `SlotReader.prefill`. For drafters with such a model."""
        self._first.prefill(rows, first, upto)
        self._follow(rows)
        ends = zip(upto, self._prompts[first:], strict=True)
        self._second.prefill(self._rows, first, [end + other - length for end, (length, other) in ends])

    def _follow(self, rows: RowsView) -> None:
        """Update the second sequences: other prompts, then the same tokens."""
        starts, tails = [], []
        for text, mine, (length, other) in zip(rows.histories, self._rows.histories, self._prompts, strict=False):
            known = mine[other:]
            same = text[length : length + len(known)] == known
            starts.append(len(mine) if same else other)
            tails.append(text[length + len(known) :] if same else text[length:])
        if any(tails) or starts != self._rows.lengths:
            self._rows.rewrite(starts, tails)

    def _combined(self, first: Tensor, second: Tensor) -> Tensor:
        V = self.lm.vocabulary
        wide = torch.float64 if first.dtype == torch.float64 else torch.float32
        logs = [each[..., :V].to(wide).log_softmax(-1) for each in (first, second)]
        return self.lm.combine(*logs)

    # ---- keeping and discarding

    def keep(self, rows: RowsView, path: Tensor | None) -> None:
        self._first.keep(rows, path)
        self._second.keep(self._rows, path)

    def reorder(self, rows: RowsView, source: Sequence[int]) -> None:
        self._first.reorder(rows, source)
        self._second.reorder(self._rows, source)
        self._rows.reorder(source)
        self._prompts = [self._prompts[other] for other in source]

    def release(self, row: int, last: int, length: int) -> None:
        prompt, other = self._prompts[last]
        self._first.release(row, last, length)
        self._second.release(row, last, length - prompt + other)
        self._rows.release(row, last)
        self._prompts[row] = self._prompts[last]
        del self._prompts[last]


class Guided(TwoBranches):
    """Classifier-free guidance: moves logits away from those without the prompt, or after a negative prompt."""

    def __init__(self, lm: LanguageModel, scale: float, negative: list[int]) -> None:
        context = lm.context - max(0, len(negative) - 1)  # the second sequence may be longer by this
        super().__init__(lm, lm, f"{lm.name} guided by {scale:g}", context)
        self.scale, self.negative = scale, negative

    def other_prompt(self, prompt: list[int]) -> list[int]:
        return self.negative or prompt[-1:]

    def combine(self, first: Tensor, second: Tensor) -> Tensor:
        mixed = self.scale * (first - second) + second
        return mixed.masked_fill(first == -math.inf, -math.inf)  # -inf minus -inf is NaN


class Contrast(TwoBranches):
    """Contrastive decoding: tokens that an expert finds plausible, and an amateur less plausible."""

    def __init__(self, expert: LanguageModel, amateur: LanguageModel, alpha: float, beta: float | None) -> None:
        name = f"{expert.name} against {amateur.name}"
        super().__init__(expert, amateur, name, min(expert.context, amateur.context))
        self.alpha, self.beta = alpha, beta

    def other_prompt(self, prompt: list[int]) -> list[int]:
        return list(prompt)

    def combine(self, first: Tensor, second: Tensor) -> Tensor:
        floor = math.log(self.alpha) + first.amax(-1, keepdim=True) if self.alpha > 0 else -math.inf
        score = first - second if self.beta is None else (1 + self.beta) * first - self.beta * second
        return score.masked_fill((first < floor) | (first == -math.inf), -math.inf)


def guided(model: Any, scale: float = 1.5, negative_prompt: str | Sequence[int] = "") -> LanguageModel:
    """Return a target with classifier-free guidance, as `guidance_scale` of transformers (Sanchez et al. 2023, arXiv
    2306.17806): log-probabilities negative + scale * (prompt - negative).

    negative_prompt: a text or token ids that the second branch reads instead of the prompt; without one it reads the
    last token of the prompt alone. A scale of 1 returns the model itself.
    """
    lm = _loaded(model)
    if not _is_number(scale):
        raise InputError(f"The guidance scale must be a number, got {scale!r}.")
    if isinstance(negative_prompt, str):
        if negative_prompt and lm.tokenizer is None:
            raise InputError(f"{lm.name} has no tokenizer, so a negative prompt must be token ids.")
        negative = list(lm.tokenizer.encode(negative_prompt)) if negative_prompt else []
    else:
        try:
            negative = [operator.index(token) for token in negative_prompt]
        except TypeError:
            raise InputError(
                f"The negative prompt must be a text or a list of token ids, got {negative_prompt!r}."
            ) from None
    for token in negative:
        if not 0 <= token < lm.vocabulary:
            raise InputError(f"The negative prompt has token id {token}, outside the vocabulary of {lm.vocabulary}.")
    if len(negative) >= lm.context:
        raise InputError(
            f"The negative prompt has {len(negative)} tokens, and the context of {lm.name} ends at {lm.context}; "
            "shorten it."
        )
    return lm if scale == 1 else Guided(lm, float(scale), negative)


def contrast(expert: Any, amateur: Any, alpha: float = 0.1, beta: float | None = 0.5) -> LanguageModel:
    """Return a target with contrastive decoding (Li et al. 2022, arXiv 2210.15097).

    Of the tokens that the expert gives at least `alpha` times the probability of its best one, the score is
    (1 + beta) * log expert - beta * log amateur (O'Brien & Lewis 2023, arXiv 2309.09117); with beta=None it is the
    original's log expert - log amateur. All other tokens are impossible.
    """
    expert, amateur = _loaded(expert), _loaded(amateur)
    if not (_is_number(alpha) and 0 <= alpha <= 1):
        raise InputError(f"alpha must be a number between 0 and 1, got {alpha!r}.")
    if beta is not None and not (_is_number(beta) and beta >= 0):
        raise InputError(f"beta must be a number from 0 up, or None, got {beta!r}.")
    check_same_vocabulary(expert, amateur)
    if amateur.vocabulary < expert.vocabulary:
        raise UnsupportedError(
            f"{amateur.name} has {amateur.vocabulary} tokens and {expert.name} {expert.vocabulary}; "
            "an amateur needs every token of the expert."
        )
    return Contrast(expert, amateur, alpha, beta)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _loaded(model: Any) -> LanguageModel:
    from paceline.models import load

    return load(model)
