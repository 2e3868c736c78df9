"""Synthetic acceptance: a script decides the tokens of a model, while its passes run in full.

To time speculation one needs a target and a draft model that agree, and trained pairs are rare. Here the weights may be
random: all layers and the output layer run, and then one logit per position is raised so that the script's token wins.
That is one lookup and one write per position, without a host read.

The script is a function of the last token: a walk through the whole vocabulary, every token once. So it does not depend
on positions, batches or caches. A sequence repeats nothing until it is as long as the vocabulary, and sequences that
start differently continue differently, so rows of a batch do not accept in step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.common.errors import InputError, UnsupportedError
from paceline.core.contracts import Reading, RowsView
from paceline.core.costs import accepted_of
from paceline.models.architecture import refuse_dropout
from paceline.models.language_model import LanguageModel, ModelRecord
from paceline.models.module_views import detach_hooks, shell
from paceline.models.reader import SlotReader

LOUD = 1e4  # a logit that wins over all others at any temperature, and that every floating-point type can hold


@dataclass(frozen=True)
class Script:
    """Per token of the vocabulary: the next token, the token of a wrong draft, and a random number from 0 to 1."""

    after: Tensor  # [V]
    wrong: Tensor  # [V]
    coin: Tensor  # [V]

    @staticmethod
    def written(vocabulary: int, avoid: Iterable[int] = (), seed: int = 0) -> Script:
        """A random walk through all tokens but those to `avoid` (which end a sequence, or have no text)."""
        generator = torch.Generator().manual_seed(seed)
        walk = torch.randperm(vocabulary, generator=generator)
        walk = walk[~torch.isin(walk, torch.tensor(sorted(set(avoid)), dtype=torch.int64))]
        if len(walk) < 3:
            raise InputError(f"A script needs at least 3 tokens, this vocabulary has {len(walk)} that may be written.")
        after, wrong = walk[torch.arange(vocabulary) % len(walk)], walk[(torch.arange(vocabulary) + 1) % len(walk)]
        after[walk], wrong[walk] = walk.roll(-1), walk.roll(-(len(walk) // 2 + 1))
        return Script(after, wrong, torch.rand(vocabulary, generator=generator, dtype=torch.float64))

    def tokens(self, rates: Sequence[float]) -> Tensor:
        """[V,D]: the token after each token, right with probability rates[d]."""
        right = self.coin.unsqueeze(1) < torch.tensor(rates, dtype=torch.float64)
        return torch.where(right, self.after.unsqueeze(1), self.wrong.unsqueeze(1))

    def text(self, last: int, count: int) -> list[int]:
        """The `count` tokens that the target writes after the token `last`."""
        tokens = [last]
        for _ in range(count):
            tokens.append(int(self.after[tokens[-1]]))
        return tokens[1:]


def even_rate(rates: Sequence[float], gamma: int) -> float:
    """The one rate at which drafts of γ tokens are accepted as far, on average, as with these rates (the last of them
    holds for all that follow)."""
    each = [rates[min(step, len(rates) - 1)] for step in range(gamma)]
    if min(each) == max(each):
        return each[0]
    wanted = accepted_of(each)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted_of([middle] * gamma) < wanted else (low, middle)
    return low


class ScriptedModel(LanguageModel):
    """A model that writes a script: always, or, as a draft model, as often as its rates say.

    `rates[i]` is for the i-th token of a draft, given that those before it are right; the last one holds for all that
    follow. `model` is a transformers model, so other libraries' loops meet the same script; they do not tell it where a
    draft begins, so there every token has one rate: `even_rate` of these. The model it was made of is not edited.
    """

    def __init__(self, lm: LanguageModel, script: Script, rates: Sequence[float] = (1.0,), gamma: int = 5) -> None:
        if lm.architecture.alibi:
            raise UnsupportedError(f"{lm.name} ({lm.architecture.name}) is not run as a whole, so it takes no script.")
        if not rates or not all(0 <= rate <= 1 for rate in rates):
            raise InputError(f"Rates of a scripted draft must be from 0 to 1, at least one of them, got {list(rates)}.")
        self.__dict__.update(lm.__dict__)
        self.rates, self.record = tuple(rates), ModelRecord()
        self._plain = lm.model
        self._tokens = script.tokens(rates).to(lm.device)  # [V,D]
        one = script.tokens([even_rate(rates, gamma)])[:, 0]
        self.model = _module(lm.model, one.to(lm.device))

    @property
    def core(self) -> Any:
        return self._plain

    def reader(self, taps: Sequence[float] = ()) -> SlotReader:
        refuse_dropout(self.model)
        return _ScriptReader(self, taps, self._tokens)


class _ScriptReader(SlotReader):
    """Runs the model and then raises the logit of the script's token, which depends on how far into a draft it is."""

    def __init__(self, lm: ScriptedModel, taps: Sequence[float], script: Tensor) -> None:
        super().__init__(lm, taps, lm.core)
        self._script = script  # [V,D]
        self._base = torch.empty(0)  # [R,1]: the tokens of each sequence that are no draft

    def extend(
        self, rows: RowsView, width: int, tokens: Tensor | None = None, parents: Tensor | None = None
    ) -> Reading:
        settled = rows.settled  # a draft may be written inside another (`staged`)
        self._base = (
            rows.length if settled == rows.lengths else torch.tensor(settled, device=self.lm.device).view(-1, 1)
        )
        plan = self._plan(rows, width, tokens, parents)
        reading, _ = self._executor(self.cache, plan)
        self.ops.say(reading.logits, self._script, plan.ids, plan.positions, self._base, LOUD)
        return reading


def _raise_logits(logits: Tensor, tokens: Tensor) -> None:
    """Make the logits [R,Q,V] of `tokens` [R,Q] the largest, in place."""
    logits.scatter_(-1, tokens.unsqueeze(-1), LOUD)


def _module(model: Any, script: Tensor) -> Any:
    """The same weights in a module of a class of its own, whose forward also says the script."""
    fresh = detach_hooks(shell(model))
    cls: Any = type(model)
    fresh.__class__ = _class(cls)
    fresh.__dict__.update(script=script, whole=dict(model._modules))
    return fresh


@functools.lru_cache(256)
def _class(cls: Any) -> Any:
    """A subclass with the module and the signature of its parent."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **named: Any) -> Any:
        if self._modules != self.whole:  # a draft made out of the target would always be right
            raise UnsupportedError(
                "A part of a scripted model cannot draft, since it would say the script too; use agreement by "
                "construction for drafters that are made out of the target."
            )
        output = cls.forward(self, *args, **named)
        ids = args[0] if args else named["input_ids"]
        _raise_logits(output.logits, self.script[ids[:, -output.logits.shape[1] :]])
        return output

    return type(f"Scripted{cls.__name__}", (cls,), {"forward": forward, "__module__": cls.__module__})
