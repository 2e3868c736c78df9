"""The places where a token is about to be chosen, and everything needed to choose it.

A `Choice` binds the settings of the rows to R x Q places of their texts. Rules and drafters see logits only through it:
`law` and `pick` for what the target (or a coupled draft) does there, `coin` and `draw` for the random steps of a rule.
The conformance suite replaces `coin` and `draw` to enumerate every random branch.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import Literal

import torch
from torch import Tensor

from paceline.core.device_ops import QUICK
from paceline.core.law import Law, LazyLaws, Prefix, SamplingBatch
from paceline.core.noise import Purpose, exponential, uniform
from paceline.core.tree import TokenTree
from paceline.core.tree_shape import best, first_best
from paceline.core.verdict import BROKEN, Verdict

# How a draft is drawn. coupled: with the target's own noise, so that the same seed gives the same text. certain: the
# likeliest tokens, without noise. independent: with noise of the draft's own, siblings without replacement, with the
# laws they were drawn from, for rules that judge by a ratio. iid: the same, but siblings do not look at each other.
Draw = Literal["coupled", "certain", "independent", "iid"]
_BRANCH = 1 << 40  # added to a position it names another place, far beyond any text


@cache
def _steps(start: int, stop: int, wide: int, device: torch.device) -> Tensor:
    """The numbers start..stop-1, `wide` apart: a constant, so that a round does not make it anew."""
    return torch.arange(start, stop, device=device) * wide


class NoiseTable:
    """Exponential noise for the whole vocabulary at the next few positions of every row, made once per round.

    Draft steps and verification ask for the same numbers (that is what couples them), so they are computed once.
    """

    def __init__(self, batch: SamplingBatch, length: Tensor, depths: int, position: Tensor | None = None) -> None:
        """position [R,D]: the next positions of every row, where somebody knows them already."""
        self.batch = batch
        self.length, self._depths = length, depths
        if position is not None:
            self.position = position
        self._made: dict[tuple[Purpose, int], Tensor] = {}

    @cached_property
    def position(self) -> Tensor:
        """[R,D]: the next positions of every row."""
        return self.length + _steps(0, self._depths, 1, self.length.device)

    @cached_property
    def own(self) -> Tensor:
        """[R,D]: places of this round alone, where the tokens of a chain are drawn that a ratio judges."""
        return self.length + _steps(1, self._depths + 1, _BRANCH, self.length.device)

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
    """R rows x Q places at `depth` tokens past the committed text (a slice of depths, a tensor [R,Q], or the text and
    every node of a tree). How deep a tree's nodes are is worked out when somebody looks: the best token is the best
    anywhere."""

    def __init__(
        self, batch: SamplingBatch, table: NoiseTable, depth: Tensor | slice | TokenTree, prefix: Prefix | None = None
    ) -> None:
        self.batch = batch
        self.table = table
        self.prefix = prefix
        self._depth = depth

    @property
    def depth(self) -> Tensor | slice:
        return self._depth.after if isinstance(self._depth, TokenTree) else self._depth

    @property
    def position(self) -> Tensor:
        """[R,Q] absolute positions of the tokens to be chosen."""
        return self._here(self.table.position)

    def _here(self, by_depth: Tensor) -> Tensor:
        depth = self.depth
        return by_depth[:, depth] if isinstance(depth, slice) else by_depth.gather(1, depth)

    def law(self, logits: Tensor) -> Law:
        return self.batch.law(logits, self.position if self.batch.shakes else None, self.prefix)

    def pick(self, logits: Tensor) -> Tensor:
        """[R,Q]: the target's token at each place, or BROKEN where none can be chosen."""
        quick = self._quick(logits) if QUICK else None
        if quick is not None:
            return quick
        if self.batch.deterministic:
            scores = self.batch.edit(logits, self.prefix)
            index = first_best(scores)
            value = scores.gather(-1, index.unsqueeze(-1)).squeeze(-1)
            return torch.where(value - value == 0, index, BROKEN)
        return self._race(self.law(logits), logits.shape[-1], Purpose.TARGET)

    def _quick(
        self, logits: Tensor, purpose: Purpose = Purpose.TARGET, broken: int = BROKEN, into: Tensor | None = None
    ) -> Tensor | None:
        """The same token by the race of its device, where that has one and nothing else is asked for but heat."""
        quick = QUICK.get(logits.device.type)
        if quick is None or self.prefix is not None or logits.dtype == torch.float64:
            return None
        done = self.batch.zeros(logits.shape[0] * logits.shape[1])
        if self.batch.deterministic:
            return quick.race(logits, None, None, None, broken, into, done)
        if not self.batch.only_heat:
            return None
        position = self.position if purpose == Purpose.TARGET else self._here(self.table.own)
        heat = self.batch.column("temperature", torch.float32)
        return quick.race(logits, heat, self.batch.key(purpose), position, broken, into, done)

    def judged(self, tree: TokenTree, logits: Tensor) -> Verdict | None:
        """What rule `ratio` says to a chain, by the judge of its device, where that has one and nothing else is asked
        for but heat; the draft's laws must not be written down yet. None: by the laws, then."""
        quick, laws = QUICK.get(logits.device.type), tree.laws
        if quick is None or self.prefix is not None or logits.dtype == torch.float64 or tree.parents is not None:
            return None
        if not self.batch.only_heat:
            return None
        drafts = None
        if tree.drawn != "certain" and laws is not None:
            if not isinstance(laws, LazyLaws) or laws.batch is not self.batch or laws.shape[-1] != logits.shape[-1]:
                return None
            drafts = laws.logits
        keys = (self.batch.key(Purpose.ACCEPT), self.batch.key(Purpose.FINAL))
        heat = self.batch.column("temperature", torch.float32)
        emitted, accepted = quick.judge(logits, tree.tokens, drafts, tree.count, heat, keys, self.table.length)
        return Verdict(emitted[:, : tree.reach + 1], accepted)

    def greedy(self, draw: Draw) -> bool:
        """Is a drafted token the likeliest, whatever the noise?"""
        return self.batch.deterministic or draw == "certain"

    def guess(self, logits: Tensor, draw: Draw, into: Tensor | None = None) -> tuple[Tensor, Law | None]:
        """[R,Q]: one drafted token per place, and the law it was drawn from (None: a point mass; of a coupled draft
        nobody looks at it). The tokens may be written to `into` [R,Q], which is then what is returned."""
        if QUICK and draw != "certain":
            quick = self._quick(logits, Purpose.TARGET if draw == "coupled" else Purpose.DRAFT, 0, into)
            if quick is not None and self.batch.deterministic:
                return quick, None
            if quick is not None:
                return quick, Law(logits if draw == "coupled" else LazyLaws(logits, self.batch))
        if self.greedy(draw):
            return first_best(self.batch.edit(logits, self.prefix)), None
        law = self.law(logits)
        if draw == "coupled":
            noise = self._noise(law, logits.shape[-1], Purpose.TARGET)
        else:
            # of this round alone: rules that judge a chain from its end look at tokens they then reject, and the next
            # round drafts those places again
            lanes = logits.shape[-1] if law.ids is None else law.ids
            noise = exponential(self.batch.key(Purpose.DRAFT), self._here(self.table.own), lanes)
        return _named((law.weights / noise).argmax(-1), law), law

    def siblings(
        self, logits: Tensor, k: int, draw: Draw, branch: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """k drafted tokens per place [R,Q,k], the logarithm (float64) of how sure the draft is of each [R,Q,k], and the
        dense law [R,Q,V] they were drawn from in that order (None: point masses).

        Greedy rows take the most probable tokens and are as sure as those are probable. Sampled rows take the winners
        of the race p/E, so when coupled the first is what the target would pick from the same law; they are as sure as
        the winner is ahead, for that is how likely a slightly different law has the same winner.

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

    def racing(self, logits: Tensor, draw: Draw) -> tuple[bool, tuple[Tensor, Tensor] | None]:
        """Can `siblings` be chosen by a trunk of its device? And with which heats and keys (None: without noise)?"""
        if draw not in ("coupled", "certain") or self.prefix is not None or logits.dtype == torch.float64:
            return False, None
        if self.greedy(draw):
            return True, None
        heat = self.batch.column("temperature", torch.float32)
        return self.batch.only_heat, (heat, self.batch.key(Purpose.TARGET))

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

    def _race(self, law: Law, vocabulary: int, purpose: Purpose) -> Tensor:
        """argmax(p / E): a sample of the law that depends on nothing but seed, position and the law."""
        ahead = (law.weights / self._noise(law, vocabulary, purpose)).max(-1)
        return torch.where(ahead.values > 0, _named(ahead.indices, law), BROKEN)


def _named(where: Tensor, law: Law) -> Tensor:
    """The token ids of the entries `where` [R,Q] of a law."""
    return where if law.ids is None else law.ids.gather(-1, where.unsqueeze(-1)).squeeze(-1)
