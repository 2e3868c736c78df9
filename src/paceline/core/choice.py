"""The places where a token is about to be chosen, and everything needed to choose it.

A `Choice` binds the settings of the rows to R x Q places of their texts. Rules and drafters see logits only through it:
`law` and `pick` for what the target (or a coupled draft) does there, `coin` and `draw` for the random steps of a rule.
The conformance suite replaces `coin` and `draw` to enumerate every random branch.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from paceline.core.device_ops import multiples
from paceline.core.law import Law, Prefix, SamplingBatch
from paceline.core.noise import Purpose, exponential, uniform
from paceline.core.ranking import best
from paceline.core.tree import TokenTree
from paceline.core.verdict import BROKEN

# How a draft is drawn. coupled: with the target's own noise, so that the same seed gives the same text. certain: the
# likeliest tokens, without noise. independent: with noise of the draft's own, siblings without replacement, with the
# laws they were drawn from, for rules that judge by a ratio. iid: the same, but siblings do not look at each other.
Draw = Literal["coupled", "certain", "independent", "iid"]
_BRANCH = 1 << 40  # offset of a position: noise of a branch never equals noise of a real position


class NoiseTable:
    """Exponential noise for the whole vocabulary at the next few positions of every row, made once per round.

    Draft steps and verification ask for the same numbers (that is what couples them), so they are computed once.
    """

    def __init__(self, batch: SamplingBatch, length: Tensor, depths: int, position: Tensor | None = None) -> None:
        """position [R,D]: the next positions of every row, where they are known already."""
        self.batch = batch
        self.length, self._depths = length, depths
        if position is not None:
            self.position = position
        self._made: dict[tuple[Purpose, int], Tensor] = {}

    @cached_property
    def position(self) -> Tensor:
        """[R,D]: the next positions of every row."""
        return self.length + multiples(0, self._depths, 1, self.length.device)

    @cached_property
    def own(self) -> Tensor:
        """[R,D]: places of this round alone, where the tokens of a chain are drawn that a ratio judges."""
        return self.length + multiples(1, self._depths + 1, _BRANCH, self.length.device)

    def at(self, depth: Tensor | slice, vocabulary: int, purpose: Purpose) -> Tensor:
        """[R,Q,V] for depths given as a slice (the same for all rows) or as [R,Q]."""
        table = self._made.get((purpose, vocabulary))
        if table is None:
            table = exponential(self.batch.key(purpose), self.position, vocabulary)
            self._made[(purpose, vocabulary)] = table
        if isinstance(depth, slice):
            return table[:, depth]
        return table.gather(1, depth.unsqueeze(-1).expand(*depth.shape, vocabulary))


class Choice:
    """R rows x Q positions at `depth` tokens past the committed text: a slice of depths, a tensor [R,Q], or the
    text and every node of a tree."""

    def __init__(
        self, batch: SamplingBatch, table: NoiseTable, depth: Tensor | slice | TokenTree, prefix: Prefix | None = None
    ) -> None:
        self.batch = batch
        self.table = table
        self.prefix = prefix
        self._depth = depth

    @property
    def depth(self) -> Tensor | slice:
        """Those of a tree are computed when they are needed: the best token is the best at any depth."""
        if isinstance(self._depth, TokenTree):
            self._depth = self.batch.ops.depths(self._depth)
        return self._depth

    @property
    def position(self) -> Tensor:
        """[R,Q] absolute positions of the tokens to be chosen."""
        if isinstance(self._depth, slice):
            return self.table.position[:, self._depth]
        return self.at_depth(self.table.position)

    def at_depth(self, by_depth: Tensor) -> Tensor:
        """[R,Q]: of numbers by depth [R,D] those of these positions."""
        depth = self.depth
        return by_depth[:, depth] if isinstance(depth, slice) else by_depth.gather(1, depth)

    def law(self, logits: Tensor) -> Law:
        return self.batch.law(logits, self.position if self.batch.uses_noise else None, self.prefix)

    def pick(self, logits: Tensor) -> Tensor:
        """[R,Q]: the target's token at each position, or BROKEN where none can be chosen."""
        return self.batch.ops.pick(self, logits)

    def guess(self, logits: Tensor, draw: Draw, into: Tensor | None = None) -> tuple[Tensor, Law | None]:
        """See `DeviceOps.guess`."""
        return self.batch.ops.guess(self, logits, draw, into)

    def greedy(self, draw: Draw) -> bool:
        """Is a drafted token the likeliest, whatever the noise?"""
        return self.batch.deterministic or draw == "certain"

    def can_fuse(self, logits: Tensor, draw: Draw = "coupled") -> bool:
        """Can a kernel choose from the logits themselves? Only where settings ask for nothing but a temperature."""
        if self.prefix is not None or logits.dtype == torch.float64:
            return False
        return self.batch.only_temperature or self.greedy(draw)

    def gumbel_argmax(self, law: Law, vocabulary: int) -> Tensor:
        """argmax(p / E): a sample of the law that depends on nothing but seed, position and the law."""
        ahead = (law.weights / self._noise(law, vocabulary, Purpose.TARGET)).max(-1)
        return torch.where(ahead.values > 0, _named(ahead.indices, law), BROKEN)

    def sample(self, law: Law, vocabulary: int, purpose: Purpose) -> Tensor:
        """[R,Q]: a drafted token. Its noise is the target's, or (Purpose.DRAFT) of this round alone: rules that judge a
        chain from its end look at tokens they then reject, and the next round drafts those positions again."""
        if purpose == Purpose.TARGET:
            noise = self._noise(law, vocabulary, purpose)
        else:
            lanes = vocabulary if law.ids is None else law.ids
            noise = exponential(self.batch.key(purpose), self.at_depth(self.table.own), lanes)
        return _named((law.weights / noise).argmax(-1), law)

    def siblings(
        self, logits: Tensor, k: int, draw: Draw, branch: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """k drafted tokens per place [R,Q,k], the logarithm (float64) of how sure the draft is of each [R,Q,k], and the
        dense law [R,Q,V] they were drawn from in that order (None: point masses).

        Greedy rows take the most probable tokens and are as sure as those are probable. Sampled rows take the winners
        of the race p/E, so when coupled the first is what the target would pick from the same law. Their confidence
        is the share of p/E: it estimates how likely a slightly different law picks the same token.

        `branch` [R,Q] gives each place noise of its own, of this round alone. A draft judged by a ratio needs it:
        where a tree grows is decided after looking at races, and noise that was looked at is no longer noise.
        """
        if self.greedy(draw):
            scores = self.batch.edit(logits, self.prefix)
            scores = scores if scores.dtype == torch.float64 else scores.to(torch.float32)  # a guess of how sure it is
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
            share = torch.where(greedy, self.batch.edit(logits, self.prefix).to(torch.float64).softmax(-1), share)
        ahead = share.topk(k, dim=-1)
        return ahead.indices, ahead.values.to(torch.float64).log(), dense

    def _independent(self, dense: Tensor, k: int, branch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Siblings that do not look at each other: k races at every place; twins may come out."""
        V = dense.shape[-1]
        races = dense.unsqueeze(-2) / self._fresh(branch, k * V).unflatten(-1, (k, V))
        tokens = races.argmax(-1)
        return tokens, dense.gather(-1, tokens).to(torch.float64).log(), dense

    def _fresh(self, branch: Tensor, vocabulary: int) -> Tensor:
        """[R,Q,V]: noise of this round's own for the places `branch` [R,Q]."""
        return exponential(self.batch.key(Purpose.DRAFT), self.table.length + branch * _BRANCH, vocabulary)

    def coin(self, probability: Tensor, depth: Tensor, lane: int) -> Tensor:
        """[R] bool: true with the given probability; `u < p` strictly, so that probability 0 is never accepted."""
        lanes = torch.full((1, 1, 1), lane, device=depth.device)
        position = self.table.position.gather(1, depth.unsqueeze(1))
        return uniform(self.batch.key(Purpose.ACCEPT), position, lanes).view(-1) < probability

    def draw(self, weights: Tensor, depth: Tensor) -> Tensor:
        """[R]: a sample of the law `weights` [R,V] at `depth` [R], from the stream of final tokens."""
        position = self.table.position.gather(1, depth.unsqueeze(1))
        noise = exponential(self.batch.key(Purpose.FINAL), position, weights.shape[-1]).squeeze(1)
        ahead = (weights / noise).max(-1)
        return torch.where(ahead.values > 0, ahead.indices, BROKEN)

    def _noise(self, law: Law, vocabulary: int, purpose: Purpose) -> Tensor:
        if law.ids is None:
            return self.table.at(self.depth, vocabulary, purpose)
        return exponential(self.batch.key(purpose), self.position, law.ids)


def _named(where: Tensor, law: Law) -> Tensor:
    """The token ids of the entries `where` [R,Q] of a law."""
    return where if law.ids is None else law.ids.gather(-1, where.unsqueeze(-1)).squeeze(-1)
