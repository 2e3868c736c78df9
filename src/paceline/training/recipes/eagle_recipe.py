"""EAGLE: one layer learns to predict from the target's hidden states, and from its own (training-time test)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.common.errors import InputError
from paceline.common.limits import Limited, limited
from paceline.drafters.heads.eagle import Eagle, EagleHead
from paceline.training.corpus import Corpus
from paceline.training.distillation import Batch, DistillationLoss, Teacher
from paceline.training.recipes.base import RECIPES, HeadRecipe, learned_positions, shift_left


@RECIPES.register("eagle")
class EagleRecipe(HeadRecipe):
    """Train one layer that continues the target's hidden states (EAGLE-3)."""

    drafter_class = Eagle

    @dataclass(frozen=True)
    class Options(Limited):
        # tokens of its vocabulary, the most frequent ones of the data (None: all)
        vocabulary: int | None = limited(8192, most=2**24)
        own_output: bool = True  # a trained output layer; else rows of the target's output layer, which are not saved
        steps: int = limited(5, most=256)  # tokens that it learns to draft in a row
        heads: int = limited(0, 0, 4096)  # of attention; 0: as many as fit with a width of 64
        kv_heads: int = limited(0, 0, 4096)  # 0: as many as heads
        inner: int = limited(0, 0, 2**20)  # width of the feed-forward part; 0: three times the width
        fade: float = limited(0.9, 0, 1)  # weight of a step relative to the step before
        regression: float = limited(0.0, 0)  # weight of the distance between its features and the target's

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
        vocabulary = None if options.vocabulary is None or options.vocabulary >= lm.vocabulary else options.vocabulary
        sizes = replace(sizes, heads=heads, kv_heads=options.kv_heads or heads, inner=options.inner or sizes.inner,
                        draft_vocabulary=vocabulary, own_output=options.own_output, rope_theta=_theta(lm))  # fmt: skip
        self.head = EagleHead.random(lm, int(torch.initial_seed() % 2**31), sizes).to(teacher.dtype)
        self.taps, self.depth = sizes.taps, options.steps
        self._init_output(corpus, vocabulary)

    def _init_output(self, corpus: Corpus, vocabulary: int | None) -> None:
        """Choose the tokens of the vocabulary, and start from the target's rows of the output layer."""
        output = self.teacher.lm.model.get_output_embeddings().weight.detach().to(self.teacher.dtype)
        if vocabulary is not None:
            ids = torch.tensor(corpus.frequent(vocabulary, self.teacher.lm.eos))
            if len(ids) < vocabulary:  # the data have fewer different tokens, so the lowest other ids are added
                rest = torch.ones(self.teacher.lm.vocabulary, dtype=torch.bool).index_fill(0, ids, False).nonzero()
                ids = torch.cat([ids, rest.squeeze(1)[: vocabulary - len(ids)]]).sort().values
            assert self.head.d2t is not None
            self.head.d2t.copy_(ids)
            output = output[self.head.d2t]
        self.after_load()
        if self.options.own_output and output.shape == self.head.output.weight.shape:
            with torch.no_grad():
                self.head.output.weight.copy_(output)

    def after_load(self) -> None:
        """Update the loss and the rows of the target's output layer, because the vocabulary may have changed."""
        if not self.head.config.own_output:
            self.head.output = None
            self.head.borrow(self.teacher.lm)
        self._update_loss()

    def _update_loss(self) -> None:
        if self.head.d2t is not None:
            self.loss = DistillationLoss(self.loss.name, self.teacher.logits, self.head.d2t)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the ids of the loss to the device of the module."""
        module = super()._apply(fn, recurse)
        self._update_loss()
        return module

    def forward(self, batch: Batch) -> Tensor:
        embedded, taps = self._inputs(batch)
        rows, positions = learned_positions(batch, 2)
        last, tokens = batch.last[rows, positions + 1], batch.ids[rows, positions + 2]
        teacher = self.loss.teacher_logits(last)
        total = torch.zeros((), device=batch.ids.device)
        fused = None  # the features of the next positions; the last one stays
        if self.options.regression:
            features = self.head.fuse(torch.cat(taps, -1)).detach()
            fused = torch.cat([features[:, 1:], features[:, -1:]], 1)
        weights = (self.head.norm.weight, self.head.output.weight)
        for step, features in enumerate(self.head.unrolled(embedded, taps, self.options.steps)):
            own = features[rows, positions]
            loss = self.loss(self._logits, own, last, tokens, teacher, weights)
            if fused is not None:
                loss = loss + self.options.regression * F.smooth_l1_loss(own, fused[rows, positions])
            total = total + self.options.fade**step * loss
        return total

    def _inputs(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Return embeddings and taps: entry t has the token t+1 and the state at t. The last position has no entry."""
        return self.teacher.embed(batch.ids[:, 1:]), [tap[:, :-1] for tap in batch.taps]

    def _logits(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head.output(self.head.norm(features))
        return logits if self.head.d2t is not None else logits[..., : self.teacher.lm.vocabulary]

    def predictions(self, batch: Batch) -> Tensor:
        embedded, taps = self._inputs(batch)
        predictions = []
        for step, features in enumerate(self.head.unrolled(embedded, taps, self.options.steps)):
            best = torch.stack([self._logits(row).argmax(-1) for row in features])
            if self.head.d2t is not None:
                best = self.head.d2t[best]
            predictions.append(shift_left(F.pad(best, (0, 1), value=-1), step))
        return torch.stack(predictions)


def _theta(lm: Any) -> float:
    """Return the base of the target's rotary embedding, or the usual one."""
    config = lm.model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    return float(theta or getattr(config, "rope_theta", None) or 10000.0)
