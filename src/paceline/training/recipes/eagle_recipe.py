"""EAGLE: one layer learns to go on from the target's features, and from its own (training-time test)."""

from __future__ import annotations

import copy
import os
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.common.errors import InputError
from paceline.common.limits import limited
from paceline.core.contracts import Drafter
from paceline.drafters.heads.eagle import Eagle, EagleHead
from paceline.training.data.corpus import Corpus
from paceline.training.losses import Distance
from paceline.training.recipes.base import RECIPES, Recipe, Sizes, chosen, later
from paceline.training.teacher import Lesson, Teacher


@RECIPES.register("eagle")
class EagleCourse(Recipe):
    """Train one layer that writes ahead in the target's own hidden states (EAGLE-3)."""

    @dataclass(frozen=True)
    class Options(Sizes):
        # tokens that it can say, the most frequent of the data (None: all)
        vocabulary: int | None = limited(8192, most=2**24)
        own_output: bool = True  # it learns how to say them; else the target's own rows say them, and are not stored
        steps: int = limited(5, most=256)  # places it learns to go on by itself
        heads: int = limited(0, 0, 4096)  # of attention; 0: as many as fit 64 numbers each
        kv_heads: int = limited(0, 0, 4096)  # 0: as many as heads
        inner: int = limited(0, 0, 2**20)  # of the feed-forward part; 0: three times the width
        fade: float = limited(0.9, 0, 1)  # how much less each further step counts
        regression: float = limited(0.0, 0)  # weight of how far its features are from the target's

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.steps < 1 or (self.vocabulary is not None and self.vocabulary < 8):
                raise InputError(
                    f"eagle learns at least 1 step and 8 tokens, got steps={self.steps}, vocabulary={self.vocabulary}."
                )

    def __init__(self, teacher: Teacher, corpus: Corpus, loss: str, options: Options) -> None:
        super().__init__(teacher, corpus, loss, options)
        lm = teacher.lm
        sizes = EagleHead.sizes(lm)
        heads = options.heads or sizes.heads
        said = None if options.vocabulary is None or options.vocabulary >= lm.vocabulary else options.vocabulary
        sizes = replace(sizes, heads=heads, kv_heads=options.kv_heads or heads, inner=options.inner or sizes.inner,
                        draft_vocabulary=said, own_output=options.own_output, rope_theta=_theta(lm))  # fmt: skip
        self.head = EagleHead.random(lm, int(torch.initial_seed() % 2**31), sizes).to(teacher.numbers)
        self.taps, self.depth = sizes.taps, options.steps
        self._begin(corpus, said)

    def _begin(self, corpus: Corpus, said: int | None) -> None:
        """Its output begins as the target's own, for the tokens it can say."""
        output = self.teacher.lm.model.get_output_embeddings().weight.detach().to(self.teacher.numbers)
        if said is not None:
            ids = torch.tensor(corpus.frequent(said, self.teacher.lm.eos))
            if len(ids) < said:  # the data have fewer different tokens: those that come first are filled up with
                rest = torch.ones(self.teacher.lm.vocabulary, dtype=torch.bool).index_fill(0, ids, False).nonzero()
                ids = torch.cat([ids, rest.squeeze(1)[: said - len(ids)]]).sort().values
            assert self.head.d2t is not None
            self.head.d2t.copy_(ids)
            output = output[self.head.d2t]
        self.given()
        if self.options.own_output and output.shape == self.head.output.weight.shape:
            with torch.no_grad():
                self.head.output.weight.copy_(output)

    def given(self) -> None:
        """The tokens it can say may be others: its distance knows them, and rows of the target's that say them."""
        if not self.head.config.own_output:
            self.head.output = None
            self.head.borrow(self.teacher.lm)
        self._tell()

    def _tell(self) -> None:
        if self.head.d2t is not None:
            self.distance = Distance(self.distance.name, self.teacher.logits, self.head.d2t)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Where it moves, the ids that its distance knows move along."""
        module = super()._apply(fn, recurse)
        self._tell()
        return module

    def forward(self, lesson: Lesson) -> Tensor:
        embedded, taps = self._seen(lesson)
        rows, places = chosen(lesson, 2)
        last, tokens = lesson.last[rows, places + 1], lesson.ids[rows, places + 2]
        laws = self.distance.wanted(last)
        total = torch.zeros((), device=lesson.ids.device)
        fused = self.head.fuse(torch.cat(taps, -1)).detach() if self.options.regression else None
        weights = (self.head.norm.weight, self.head.output.weight)
        for step, features in enumerate(self.head.unrolled(embedded, taps, self.options.steps)):
            mine = features[rows, places]
            loss = self.distance(self._say, mine, last, tokens, laws, weights)
            if fused is not None:
                true = later_states(fused)[rows, places]
                loss = loss + self.options.regression * F.smooth_l1_loss(mine, true)
            total = total + self.options.fade**step * loss
        return total

    def _seen(self, lesson: Lesson) -> tuple[Tensor, list[Tensor]]:
        """Entry t is made of the state at t and the token after it; the last place has no such token."""
        return self.teacher.embed(lesson.ids[:, 1:]), [tap[:, :-1] for tap in lesson.taps]

    def _say(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head.output(self.head.norm(features))
        return logits if self.head.d2t is not None else logits[..., : self.teacher.lm.vocabulary]

    def guesses(self, lesson: Lesson) -> Tensor:
        embedded, taps = self._seen(lesson)
        found = []
        for step, features in enumerate(self.head.unrolled(embedded, taps, self.options.steps)):
            best = torch.stack([self._say(row).argmax(-1) for row in features])
            if self.head.d2t is not None:
                best = self.head.d2t[best]
            found.append(later(F.pad(best, (0, 1), value=-1), step))
        return torch.stack(found)

    def save(self, folder: str | os.PathLike[str], numbers: str) -> None:
        self.head.save(folder, numbers)

    def own(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return asdict(self.head.config), self.head.own_weights()

    def drafter(self, **options: Any) -> Drafter:
        return Eagle(Eagle.Options(head=copy.deepcopy(self.head), **options))


def later_states(states: Tensor) -> Tensor:
    """[R,T,D]: entry t is what stood at t+1; the last stays as it is."""
    return torch.cat([states[:, 1:], states[:, -1:]], 1)


def _theta(lm: Any) -> float:
    """The target's own base of rotary positions, where it has one."""
    config = lm.model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    found = rope.get("rope_theta") if isinstance(rope, dict) else None
    return float(found or getattr(config, "rope_theta", None) or 10000.0)
