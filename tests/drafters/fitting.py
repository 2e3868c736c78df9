"""Heads fitted in seconds to the greedy text of a tiny target: enough to see whether they look at the right places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline import LanguageModel, SpeculativeDecoder
from paceline.drafters.heads.eagle import EagleHead
from paceline.drafters.heads.medusa import MedusaHead
from paceline.drafters.heads.prophet import ProphetHead

from ..toys import llama

PROMPTS = [[1, 7, 9, 4, 7], [3, 3, 8], [6, 21, 30, 2], [13, 5], [17, 22, 35, 11, 9, 4], [28]]
NEW = 32
AHEAD = 4  # tokens that heads learn to guess


@dataclass(frozen=True)
class Lesson:
    """Texts [R,T] of the target, padded at the end, with its hidden states at every place, and where to look [R,T]."""

    target: LanguageModel
    texts: Tensor
    states: tuple[Tensor, ...]
    real: Tensor

    @property
    def embedded(self) -> Tensor:
        embedded: Tensor = self.target.model.get_input_embeddings()(self.texts)
        return embedded.detach()


@cache
def target() -> LanguageModel:
    return LanguageModel(llama(0))


@cache
def lesson() -> Lesson:
    """What the target writes greedily after each of the prompts."""
    lm = target()
    outs = SpeculativeDecoder(lm, draft=None).generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)
    written = [prompt + out.tokens for prompt, out in zip(PROMPTS, outs, strict=True)]
    most = max(map(len, written))
    texts = torch.tensor([text + [0] * (most - len(text)) for text in written])
    real = torch.tensor([[place < len(text) for place in range(most)] for text in written])
    with torch.no_grad():
        states = lm.model(input_ids=texts, output_hidden_states=True).hidden_states
    return Lesson(lm, texts, states, real)


def _surprise(logits: Tensor, at: int, school: Lesson) -> Tensor:
    """How little logits [R,Q,V] expect the tokens of the places at, at+1, ...: those of the texts, not of the pads."""
    Q = min(logits.shape[1], school.texts.shape[1] - at)
    tokens = school.texts[:, at : at + Q].where(school.real[:, at : at + Q], -100)
    return F.cross_entropy(logits[:, :Q].flatten(0, 1), tokens.flatten())


def _fit(head: Any, loss: Callable[[], Tensor], steps: int, rate: float) -> Any:
    optimizer = torch.optim.Adam(head.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        total = loss()
        total.backward()
        optimizer.step()
    return head


def medusa(steps: int = 300) -> MedusaHead:
    """Head k learns, from the state of place t, the token of place t+2+k."""
    school = lesson()
    head = MedusaHead.random(school.target, 1, replace(MedusaHead.sizes(school.target), heads=AHEAD))
    shared = school.target.model.get_output_embeddings()

    def loss() -> Tensor:
        logits = head(school.states[-1], shared, AHEAD)
        return torch.stack([_surprise(logits[k], 2 + k, school) for k in range(AHEAD)]).sum()

    return _fit(head, loss, steps, 0.02)


def eagle(steps: int = 150, draft_vocabulary: int | None = None, own_output: bool = True) -> EagleHead:
    """Entry t, made of the state of place t and the token of place t+1, learns the token of place t+2."""
    school = lesson()
    sizes = replace(EagleHead.sizes(school.target), heads=4, kv_heads=2, draft_vocabulary=draft_vocabulary,
                    own_output=own_output)  # fmt: skip
    head = EagleHead.random(school.target, 1, sizes)
    layers = [round(share * school.target.layers) for share in sizes.taps]
    if head.d2t is not None:  # the most frequent tokens of the texts
        often = torch.bincount(school.texts[school.real], minlength=sizes.vocabulary).argsort(descending=True)
        head.d2t.copy_(often[:draft_vocabulary].sort().values)
    head.borrow(school.target)

    def loss() -> Tensor:
        taps = [school.states[layer][:, :-1] for layer in layers]
        every = head(school.embedded[:, 1:], taps, AHEAD)
        return torch.stack(
            [_surprise(logits[:, s:].clamp(min=-1e3), 2 + s, school) for s, logits in enumerate(every)]
        ).sum()

    return _fit(head, loss, steps, 0.005)


def prophet(steps: int = 150) -> ProphetHead:
    """From the state of place t and the tokens from t+1 on, it learns those from t+2 on."""
    school = lesson()
    head = ProphetHead.random(school.target, 1)
    places = school.texts.shape[1] - 1 - AHEAD
    hidden = school.states[-1][:, :places].flatten(0, 1).unsqueeze(1)
    embedded = torch.stack([school.embedded[:, t + 1 : t + 1 + AHEAD] for t in range(places)], 1).flatten(0, 1)
    tokens = school.texts.where(school.real, -100).unfold(1, AHEAD, 1)[:, 2 : 2 + places].flatten(0, 1)

    def loss() -> Tensor:
        return F.cross_entropy(head(hidden, embedded).flatten(0, 1), tokens.flatten())

    return _fit(head, loss, steps, 0.005)
