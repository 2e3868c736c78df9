"""Choose tokens at given positions of the rows, from logits, settings and noise.

A `Choice` joins the settings of R rows to Q positions of each row. Rules and drafters see logits only through it: `law`
and `pick` return the law and the token of the target (or of a coupled draft), `coin` and `draw` make the random steps
of a rule. The conformance suite replaces `coin` and `draw` to enumerate every random branch.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from paceline.core.device_ops import multiples
from paceline.core.law import Law, Prefix, edited, law_of
from paceline.core.noise import Purpose, uniform
from paceline.core.ranking import best
from paceline.core.sampling import SamplingBatch
from paceline.core.tree import TokenTree
from paceline.core.verdict import BROKEN

# How a draft is drawn. coupled: with the target's own noise, so that the same seed gives the same text. certain: the
# likeliest tokens, without noise. independent: with noise for drafts only, siblings without replacement; the tree has
# the laws that the tokens were drawn from, for rules that use p/q. iid: as independent, but siblings with replacement.
Draw = Literal["coupled", "certain", "independent", "iid"]
_BRANCH = 1 << 40  # added to a position, so that the noise of a branch is not the noise of a position of the text


class NoiseTable:
    """Exponential noise for the whole vocabulary at the next positions of every row, computed once per round.

    Coupled draft steps and the verification use the same numbers.
    """

    def __init__(self, batch: SamplingBatch, length: Tensor, depths: int, position: Tensor | None = None) -> None:
        """position [R,D]: the next positions of every row, if they are known already."""
        self.batch = batch
        self.length, self._depths = length, depths
        if position is not None:
            self.position = position
        self._made: dict[tuple[Purpose, int], Tensor] = {}

    @cached_property
    def position(self) -> Tensor:
        """Return [R,D]: the next positions of every row."""
        return self.length + multiples(0, self._depths, 1, self.length.device)

    @cached_property
    def own(self) -> Tensor:
        """Return [R,D]: noise positions that no other round uses, for chains that a rule judges by p/q."""
        return self.length + multiples(1, self._depths + 1, _BRANCH, self.length.device)

    def at(self, depth: Tensor | slice, vocabulary: int, purpose: Purpose) -> Tensor:
        """Return the noise [R,Q,V] at the depths, given as a slice (for all rows) or as [R,Q]."""
        table = self._made.get((purpose, vocabulary))
        if table is None:
            table = self.batch.ops.exponential(self.batch.key(purpose), self.position, vocabulary)
            self._made[(purpose, vocabulary)] = table
        if isinstance(depth, slice):
            return table[:, depth]
        return table.gather(1, depth.unsqueeze(-1).expand(*depth.shape, vocabulary))


class Choice:
    """Chooses tokens for R rows at Q positions, each `depth` tokens past the committed text. The depths are a slice, a
    tensor [R,Q], or those after the text and after every node of a tree."""

    def __init__(
        self, batch: SamplingBatch, table: NoiseTable, depth: Tensor | slice | TokenTree, prefix: Prefix | None = None
    ) -> None:
        self.batch = batch
        self.table = table
        self.prefix = prefix
        self._depth = depth

    @property
    def depth(self) -> Tensor | slice:
        """Return the depths. Those of a tree are computed only when they are needed: greedy decoding needs none."""
        if isinstance(self._depth, TokenTree):
            self._depth = self.batch.ops.depths(self._depth)
        return self._depth

    @property
    def position(self) -> Tensor:
        """Return [R,Q]: the absolute positions of the tokens to choose."""
        if isinstance(self._depth, slice):
            return self.table.position[:, self._depth]
        return self.at_depth(self.table.position)

    def at_depth(self, by_depth: Tensor) -> Tensor:
        """Return [R,Q]: the entries of `by_depth` [R,D] at the depths of this choice."""
        depth = self.depth
        return by_depth[:, depth] if isinstance(depth, slice) else by_depth.gather(1, depth)

    def law(self, logits: Tensor) -> Law:
        return law_of(self.batch, logits, self.position if self.batch.uses_noise else None, self.prefix)

    def edited(self, logits: Tensor) -> Tensor:
        """Return the logits after all controls that are not samplers."""
        return edited(self.batch, logits, self.prefix)

    def pick(self, logits: Tensor) -> Tensor:
        """Return [R,Q]: the target's token at each position, or BROKEN where no token can be chosen."""
        return self.batch.ops.pick(self, logits)

    def guess(self, logits: Tensor, draw: Draw, into: Tensor | None = None) -> tuple[Tensor, Law | None]:
        """See `DeviceOps.guess`."""
        return self.batch.ops.guess(self, logits, draw, into)

    def greedy(self, draw: Draw) -> bool:
        """Return whether drafted tokens are the likeliest ones and do not depend on noise."""
        return self.batch.deterministic or draw == "certain"

    def can_fuse(self, logits: Tensor, draw: Draw = "coupled") -> bool:
        """Return whether a kernel can choose from raw logits: the only control of the rows is the temperature."""
        if self.prefix is not None or logits.dtype == torch.float64:
            return False
        return self.batch.only_temperature or self.greedy(draw)

    def gumbel_argmax(self, law: Law, vocabulary: int) -> Tensor:
        """Return [R,Q]: argmax(p / E), a sample of the law. It depends only on the seed, the position and the law."""
        ahead = (law.weights / self._noise(law, vocabulary, Purpose.TARGET)).max(-1)
        return torch.where(ahead.values > 0, _named(ahead.indices, law), BROKEN)

    def sample(self, law: Law, vocabulary: int, purpose: Purpose) -> Tensor:
        """Return [R,Q]: drafted tokens, drawn with the target's noise or (Purpose.DRAFT) with noise of this round only.
        Block verification depends on rejected tokens too, and the next round drafts their positions again."""
        if purpose == Purpose.TARGET:
            noise = self._noise(law, vocabulary, purpose)
        else:
            lanes = vocabulary if law.ids is None else law.ids
            noise = self.batch.ops.exponential(self.batch.key(purpose), self.at_depth(self.table.own), lanes)
        return _named((law.weights / noise).argmax(-1), law)

    def siblings(
        self, logits: Tensor, k: int, draw: Draw, branch: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return k drafted tokens per position [R,Q,k], their log-confidences [R,Q,k] in float64, and the dense law
        [R,Q,V] that they were drawn from in this order (None: point masses).

        Greedy rows take the most probable tokens; the confidence is the probability. Sampled rows take the tokens with
        the largest p/E, so the first token of a coupled draft is the target's pick from the same law. The confidence is
        the token's part of the sum of p/E: it estimates the probability that a slightly different law picks it too.

        `branch` [R,Q] selects noise for each position that only this round uses. Drafts for rules that use p/q need it:
        p/E decides where the tree grows, so its noise is no longer independent of the tree.
        """
        if self.greedy(draw):
            scores = self.edited(logits)
            scores = scores if scores.dtype == torch.float64 else scores.to(torch.float32)  # precise enough
            values, tokens = best(scores, k)
            return tokens, values.to(torch.float64) - scores.logsumexp(-1, keepdim=True), None
        dense = self.law(logits).dense(logits.shape[-1])
        if draw == "iid":
            assert branch is not None
            return self._independent(dense, k, branch)
        if branch is None:
            noise = self.table.at(self.depth, logits.shape[-1], Purpose.TARGET if draw == "coupled" else Purpose.DRAFT)
        else:
            noise = self._fresh(branch, logits.shape[-1])
        race = dense / noise
        share = race / race.sum(-1, keepdim=True)
        if self.batch.mixed:
            greedy = self.batch.column("temperature", torch.float64) == 0
            share = torch.where(greedy, self.edited(logits).to(torch.float64).softmax(-1), share)
        ahead = share.topk(k, dim=-1)
        return ahead.indices, ahead.values.to(torch.float64).log(), dense

    def _independent(self, dense: Tensor, k: int, branch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, log-confidences and law (see `siblings`) of k independent draws. Two tokens can be equal."""
        V = dense.shape[-1]
        races = dense.unsqueeze(-2) / self._fresh(branch, k * V).unflatten(-1, (k, V))
        tokens = races.argmax(-1)
        return tokens, dense.gather(-1, tokens).to(torch.float64).log(), dense

    def _fresh(self, branch: Tensor, vocabulary: int) -> Tensor:
        """Return [R,Q,V]: noise that only this round uses, for the branches [R,Q]."""
        return self.batch.ops.exponential(
            self.batch.key(Purpose.DRAFT), self.table.length + branch * _BRANCH, vocabulary
        )

    def coin(self, probability: Tensor, depth: Tensor, lane: int) -> Tensor:
        """Return [R] bool: true with the given probability. `u < p` is strict, so that probability 0 is never true."""
        lanes = torch.full((1, 1, 1), lane, device=depth.device)
        position = self.table.position.gather(1, depth.unsqueeze(1))
        return uniform(self.batch.key(Purpose.ACCEPT), position, lanes).view(-1) < probability

    def draw(self, weights: Tensor, depth: Tensor) -> Tensor:
        """Return [R]: a sample of the law `weights` [R,V] at `depth` [R], with the noise of final tokens."""
        position = self.table.position.gather(1, depth.unsqueeze(1))
        noise = self.batch.ops.exponential(self.batch.key(Purpose.FINAL), position, weights.shape[-1]).squeeze(1)
        ahead = (weights / noise).max(-1)
        return torch.where(ahead.values > 0, ahead.indices, BROKEN)

    def _noise(self, law: Law, vocabulary: int, purpose: Purpose) -> Tensor:
        if law.ids is None:
            return self.table.at(self.depth, vocabulary, purpose)
        return self.batch.ops.exponential(self.batch.key(purpose), self.position, law.ids)


def _named(where: Tensor, law: Law) -> Tensor:
    """Return the token ids of the entries `where` [R,Q] of a law."""
    return where if law.ids is None else law.ids.gather(-1, where.unsqueeze(-1)).squeeze(-1)
