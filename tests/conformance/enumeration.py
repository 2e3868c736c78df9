"""Exact laws of acceptance rules, by following every random branch with its probability.

A `World` is a target and a draft model given as tables. A rule sees them through a `Choice` whose coins and draws are
not drawn: each asks for every outcome in turn, and the weight of each row of the batch is multiplied by the probability
of that outcome. What is emitted, continued with the target's own law to a fixed horizon, must be its joint law.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.choice import Choice, NoiseTable
from paceline.core.contracts import Rule
from paceline.core.law import SamplingBatch
from paceline.core.sampling import Sampling
from paceline.core.tree import Drawn, TokenTree
from paceline.core.verdict import BROKEN, NOTHING

from .trees import path_to

Table = list[Tensor]  # [k]: the laws after k tokens, [V, ..., V] with k+1 axes


@dataclass(frozen=True)
class World:
    """Laws of a target and of a draft after every text shorter than `horizon`."""

    vocabulary: int
    horizon: int
    target: Table
    draft: Table

    @staticmethod
    def random(vocabulary: int, horizon: int, seed: int, likeness: float = 0.5, holes: float = 0.0) -> World:
        """Peaked random laws; the draft resembles the target, and a share of the probabilities is exactly 0."""
        generator = torch.Generator().manual_seed(seed)

        def table() -> Table:
            made = []
            for k in range(horizon):
                scores = 1.5 * torch.randn([vocabulary] * (k + 1), generator=generator, dtype=torch.float64)
                gone = torch.rand(scores.shape, generator=generator) < holes
                best = scores.argmax(-1, keepdim=True)
                scores = scores.masked_fill(gone.scatter(-1, best, False), float("-inf"))
                made.append(scores.softmax(-1))
            return made

        target, noise = table(), table()
        draft = [likeness * p + (1 - likeness) * q for p, q in zip(target, noise, strict=True)]
        return World(vocabulary, horizon, target, draft)

    def greedy(self) -> World:
        """The same world at temperature 0: the target is a point mass."""
        sharp = [torch.zeros_like(p).scatter_(-1, p.argmax(-1, keepdim=True), 1.0) for p in self.target]
        return World(self.vocabulary, self.horizon, sharp, self.draft)

    def joint(self) -> Tensor:
        """[V, ..., V]: the probability of every text of `horizon` tokens."""
        total = self.target[0]
        for law in self.target[1:]:
            total = total.unsqueeze(-1) * law
        return total


def law_after(table: Table, text: Tensor) -> Tensor:
    """[R,V]: the laws after texts [R,k]."""
    return table[text.shape[1]][tuple(text.T)] if text.shape[1] else table[0].expand(text.shape[0], -1)


# ---- every draft, with its probability


@dataclass(frozen=True)
class Drafts:
    """All drafts of one topology: as a tree of R rows, and the probability of each row."""

    tree: TokenTree
    weight: Tensor  # [R]


Law = Callable[[Tensor, list[int]], Tensor]  # (draft law [V], tokens of the elder siblings) -> law of this sibling


def iid(law: Tensor, elders: list[int]) -> Tensor:
    return law


def without_replacement(law: Tensor, elders: list[int]) -> Tensor:
    """What is left of a law once the elder siblings are out; where nothing is left, the first token not yet taken."""
    law = law.clone()
    law[elders] = 0.0
    if law.sum() > 0:
        return law / law.sum()
    free = next(token for token in range(len(law)) if token not in elders)
    return torch.zeros_like(law).index_fill_(0, torch.tensor(free), 1.0)


def enumerate_drafts(
    world: World, parents: list[int], drawn: Drawn, draw: Law, declare: Law | None = None, chain: bool = False
) -> Drafts:
    """Every draft that `draw` makes, with the laws that `declare` says it was drawn from (None: the truth)."""
    rows: list[tuple[list[int], float, list[Tensor]]] = [([], 1.0, [])]
    for node, parent in enumerate(parents):
        longer = []
        for tokens, weight, laws in rows:
            elders = [tokens[n] for n in range(node) if parents[n] == parent]
            text = torch.tensor([[tokens[n] for n in path_to(parent, parents)]], dtype=torch.int64)
            base = law_after(world.draft, text)[0]
            law = draw(base, elders)
            said = law if declare is None else declare(base, elders)
            for token in law.nonzero().flatten().tolist():
                longer.append(([*tokens, token], weight * float(law[token]), [*laws, said]))
        rows = longer
    tree = TokenTree(
        torch.tensor([tokens for tokens, _, _ in rows]).view(len(rows), len(parents)),
        None if chain else torch.tensor(parents).expand(len(rows), len(parents)),
        drawn=drawn,
        laws=None if drawn in ("certain", "coupled") else torch.stack([torch.stack(laws) for _, _, laws in rows]),
    )
    return Drafts(tree, torch.tensor([weight for _, weight, _ in rows], dtype=torch.float64))


# ---- every random decision of a rule


class Dice:
    """One run through the decisions: those of `script` first, then the first outcome of each further one."""

    def __init__(self, script: tuple[int, ...], weight: Tensor) -> None:
        self.script, self.weight = script, weight
        self.taken: list[int] = []
        self.outcomes: list[int] = []  # how many outcomes each decision had

    def decide(self, weights: list[Tensor]) -> int:
        """The number of an outcome; `weights` [R] are the probabilities of each, in every row."""
        possible = [number for number, weight in enumerate(weights) if bool((self.weight * weight > 0).any())]
        at = len(self.taken)
        which = self.script[at] if at < len(self.script) else 0
        self.taken.append(which)
        self.outcomes.append(len(possible))
        self.weight = self.weight * weights[possible[which]]
        return possible[which]


def every_branch(weight: Tensor, run: Callable[[Dice], None]) -> None:
    todo: list[tuple[int, ...]] = [()]
    while todo:
        dice = Dice(todo.pop(), weight)
        run(dice)
        for at in range(len(dice.script), len(dice.taken)):
            todo += [(*dice.taken[:at], other) for other in range(1, dice.outcomes[at])]


class Enumerated(Choice):
    """A choice whose random steps are decided by dice."""

    dice: Dice

    def coin(self, probability: Tensor, depth: Tensor, lane: int) -> Tensor:
        real = self.dice.weight > 0
        assert bool(((probability >= 0) & (probability <= 1))[real].all()), f"a coin was asked for {probability}"
        heads = self.dice.decide([1 - probability, probability]) == 1
        return torch.full_like(depth, heads, dtype=torch.bool)

    def draw(self, weights: Tensor, depth: Tensor) -> Tensor:
        total = weights.sum(-1, keepdim=True)
        real = self.dice.weight > 0
        assert bool((weights >= 0)[real].all() and (total > 0)[real].all()), f"nothing can be drawn from {weights}"
        law = torch.where(real[:, None], weights / total, 1.0 / weights.shape[-1])
        return torch.full_like(depth, self.dice.decide(list(law.T)))

    def pick(self, logits: Tensor) -> Tensor:
        """The target's own token at every place, each on its own."""
        law = self.law(logits).dense(logits.shape[-1])
        picks = [self.dice.decide(list(law[:, place].T)) for place in range(logits.shape[1])]
        return torch.tensor(picks).expand(logits.shape[0], -1)


# ---- the check itself


def emitted_law(rule: Rule, world: World, drafts: Drafts, temperature: float, apart: bool = False) -> Tensor:
    """[1 or R, V, ..., V]: the joint law of `horizon` tokens when `rule` judges these drafts; `apart`: a law for each
    draft, else of their mixture."""
    tree, V, H = drafts.tree, world.vocabulary, world.horizon
    R = tree.rows
    soft = world.target  # logits are what the model says; the temperature is the rule's business
    after = [law_after(soft, tree.tokens[:, :0])]
    parents = list(range(-1, tree.nodes - 1)) if tree.parents is None else tree.parents[0].tolist()
    after += [law_after(soft, tree.tokens[:, path_to(node, parents)]) for node in range(tree.nodes)]
    logits = torch.stack(after, 1).log()
    batch = SamplingBatch([Sampling(temperature=temperature)] * R, [()] * R, "cpu")
    depth = torch.nn.functional.pad(tree.depth + 1, (1, 0))
    table = NoiseTable(batch, torch.zeros(R, 1, dtype=torch.int64), tree.nodes + 1)
    found = torch.zeros(R if apart else 1, (V + 1) ** H, dtype=torch.float64)

    def run(dice: Dice) -> None:
        choice = Enumerated(batch, table, depth)
        choice.dice = dice
        verdict = rule.verify(tree, logits, choice)
        emitted = torch.nn.functional.pad(verdict.emitted, (0, max(0, H - verdict.emitted.shape[1])), value=NOTHING)
        assert not bool((emitted == BROKEN).any())
        code = torch.zeros(R, dtype=torch.int64)
        for at in range(H):
            code = code * (V + 1) + emitted[:, at] + 1
        weight = dice.weight if apart else torch.zeros((V + 1) ** H, dtype=torch.float64)
        if apart:
            found[torch.arange(R), code] += weight
        else:
            found[0] += weight.index_add(0, code, dice.weight)

    weight = torch.ones_like(drafts.weight) if apart else drafts.weight
    every_branch(weight, run)
    return _continued(found, world if temperature > 0 else world.greedy())


def _continued(found: Tensor, world: World) -> Tensor:
    """From the law of what was emitted to the law of `horizon` tokens."""
    V, H = world.vocabulary, world.horizon
    joint = found.view(-1, *[V + 1] * H)
    # text so far of k tokens: the axes beyond k are "nothing" (0), and the target goes on from there
    total = torch.zeros(found.shape[0], *[V] * H, dtype=torch.float64)
    for k in range(1, H + 1):
        part = joint[(slice(None), *[slice(1, None)] * k, *[0] * (H - k))]
        for law in world.target[k:]:
            part = part.unsqueeze(-1) * law
        total += part
    return total


def total_variation(rule: Rule, world: World, drafts: Drafts, temperature: float = 1.0, apart: bool = False) -> float:
    """The largest distance between what is emitted and the target's joint law."""
    law = emitted_law(rule, world, drafts, temperature, apart)
    wanted = (world if temperature > 0 else world.greedy()).joint()
    return float((law - wanted).abs().flatten(1).sum(1).max() / 2)
