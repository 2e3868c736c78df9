"""Compute the exact distribution (law) of the tokens that a rule emits, by enumeration of all random outcomes.

A `World` is a target and a draft model as tables. A rule reads them through a `Choice` whose coins and draws are not
random: each row of a large batch has different outcomes, and a weight, the probability of these outcomes. The emitted
tokens, continued with the target's law up to a fixed horizon, must have the target's joint law.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from paceline.common.errors import UnsupportedError
from paceline.common.progress import Progress
from paceline.core.choice import Choice, NoiseTable
from paceline.core.contracts import Rule
from paceline.core.sampling import Sampling, SamplingBatch
from paceline.core.tree import Drawn, TokenTree
from paceline.core.verdict import BROKEN, NOTHING, Verdict

Table = list[Tensor]  # entry k: the laws after all texts of k tokens, [V, ..., V] with k+1 axes


def path_to(node: int, parents: list[int]) -> list[int]:
    """Return the nodes from the root to `node`, including both."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@dataclass(frozen=True)
class World:
    """The laws of a target and of a draft after every text shorter than `horizon`."""

    vocabulary: int
    horizon: int
    target: Table
    draft: Table

    @staticmethod
    def random(vocabulary: int, horizon: int, seed: int, likeness: float = 0.5, holes: float = 0.0) -> World:
        """Return peaked random laws. likeness: the part of the target in the draft; holes: the share of zeros."""
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
        """Return the world at temperature 0: all laws of the target are point masses."""
        sharp = [torch.zeros_like(p).scatter_(-1, p.argmax(-1, keepdim=True), 1.0) for p in self.target]
        return World(self.vocabulary, self.horizon, sharp, self.draft)

    def joint(self) -> Tensor:
        """Return [V, ..., V]: the probability of every text of `horizon` tokens."""
        total = self.target[0]
        for law in self.target[1:]:
            total = total.unsqueeze(-1) * law
        return total


def law_after(table: Table, text: Tensor) -> Tensor:
    """Return the laws [R,V] after the texts [R,k]."""
    return table[text.shape[1]][tuple(text.T)] if text.shape[1] else table[0].expand(text.shape[0], -1)


# ---- all drafts, with their probabilities


@dataclass(frozen=True)
class Drafts:
    """All drafts of one shape: a tree of R rows, one row per draft, and the probability of each row."""

    tree: TokenTree
    weight: Tensor  # [R]


Law = Callable[[Tensor, list[int]], Tensor]  # (draft law [V], tokens of earlier siblings) -> law of this sibling


def iid(law: Tensor, elders: list[int]) -> Tensor:
    return law


def without_replacement(law: Tensor, elders: list[int]) -> Tensor:
    """Return the law without the tokens of earlier siblings. If no probability is left: the first other token."""
    law = law.clone()
    law[elders] = 0.0
    if law.sum() > 0:
        return law / law.sum()
    free = next(token for token in range(len(law)) if token not in elders)
    return torch.zeros_like(law).index_fill_(0, torch.tensor(free), 1.0)


def enumerate_drafts(
    world: World, parents: list[int], drawn: Drawn, draw: Law, declare: Law | None = None, chain: bool = False
) -> Drafts:
    """Return all drafts that `draw` can make. declare: the laws that the tree states; None: those of `draw`."""
    rows: list[tuple[list[int], float, list[Tensor]]] = [([], 1.0, [])]
    for node, parent in enumerate(parents):
        longer = []
        for tokens, weight, laws in rows:
            elders = [tokens[n] for n in range(node) if parents[n] == parent]
            text = torch.tensor([[tokens[n] for n in path_to(parent, parents)]], dtype=torch.int64)
            base = law_after(world.draft, text)[0]
            law = draw(base, elders)
            declared = law if declare is None else declare(base, elders)
            for token in law.nonzero().flatten().tolist():
                longer.append(([*tokens, token], weight * float(law[token]), [*laws, declared]))
        rows = longer
    tree = TokenTree(
        torch.tensor([tokens for tokens, _, _ in rows]).view(len(rows), len(parents)),
        None if chain else torch.tensor(parents).expand(len(rows), len(parents)),
        drawn=drawn,
        laws=None if drawn in ("certain", "coupled") else torch.stack([torch.stack(laws) for _, _, laws in rows]),
    )
    return Drafts(tree, torch.tensor([weight for _, weight, _ in rows], dtype=torch.float64))


# ---- all random decisions of a rule


class Dice:
    """The outcomes of all decisions of R rows: the digits of `branch[i]` are the outcomes of row i."""

    def __init__(self, branch: Tensor, weight: Tensor) -> None:
        self.weight = weight  # [R]: the probability of the outcomes of each row so far
        self.outcomes: list[int] = []  # the number of outcomes of each decision
        self._rest = branch

    def decide(self, law: Tensor) -> Tensor:
        """Return the outcome of every row [R]. law [R,M]: the probabilities of the M outcomes."""
        which = self._rest % law.shape[1]
        self._rest = self._rest // law.shape[1]
        self.outcomes.append(law.shape[1])
        self.weight = self.weight * law.gather(1, which[:, None]).squeeze(1)
        return which


class Enumerated(Choice):
    """A choice whose random decisions come from `Dice`."""

    dice: Dice

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self._asked: list[tuple[Tensor, int]] = []

    def coin(self, probability: Tensor, depth: Tensor, lane: int) -> Tensor:
        real = self.dice.weight > 0
        assert bool(((probability >= 0) & (probability <= 1))[real].all()), f"a coin has the probability {probability}"
        again = [bool((depth == before).any()) for before, same in self._asked if same == lane]
        assert not any(again), f"the rule uses the coin of lane {lane} twice: both results would be equal"
        self._asked.append((depth, lane))
        return self.dice.decide(torch.stack([1 - probability, probability], 1).where(real[:, None], 0.0)) == 1

    def draw(self, weights: Tensor, depth: Tensor) -> Tensor:
        total = weights.sum(-1, keepdim=True)
        real = self.dice.weight > 0
        assert bool((weights >= 0)[real].all() and (total > 0)[real].all()), f"{weights} is not a law to draw from"
        return self.dice.decide((weights / total).where(real[:, None], 0.0))

    def pick(self, logits: Tensor) -> Tensor:
        """Return the target's token at every position, with an independent decision for each."""
        law = self.law(logits).dense(logits.shape[-1])
        return torch.stack([self.dice.decide(law[:, position]) for position in range(logits.shape[1])], 1)


_AT_ONCE = 40_000  # rows in one call of a rule


def every_branch(
    rule: Rule, world: World, drafts: Drafts, temperature: float, see: Callable[[Tensor, Tensor, Verdict], None]
) -> None:
    """Call `see(row, weight, verdict)` with all outcomes of all decisions, for many rows [B] of the drafts at once. The
    weight is the probability of the outcomes. A rule makes no host read, so its decisions are always the same ones."""
    tree = drafts.tree
    after = [law_after(world.target, tree.tokens[:, :0])]
    above = list(range(-1, tree.nodes - 1)) if tree.parents is None else tree.parents[0].tolist()
    after += [law_after(world.target, tree.tokens[:, path_to(node, above)]) for node in range(tree.nodes)]
    logits = torch.stack(after, 1).log()  # the rule divides them by the temperature
    batch = SamplingBatch([Sampling(temperature=temperature)], [()], "cpu")  # one row of settings for all rows

    def run(row: Tensor, branch: Tensor) -> tuple[Dice, Verdict]:
        parents, count, laws = (None if of is None else of[row] for of in (tree.parents, tree.count, tree.laws))
        part = TokenTree(tree.tokens[row], parents, count, tree.drawn, laws, tree.deepest)
        table = NoiseTable(batch, torch.zeros(part.rows, 1, dtype=torch.int64), tree.nodes + 1)
        choice = Enumerated(batch, table, torch.nn.functional.pad(part.depth + 1, (1, 0)))
        choice.dice = Dice(branch, torch.ones(part.rows, dtype=torch.float64))
        verdict = rule.verify(part, logits[row], choice)
        _check_path(part, verdict, choice.dice.weight > 0)
        return choice.dice, verdict

    outcomes = run(torch.arange(1), torch.zeros(1, dtype=torch.int64))[0].outcomes  # the decisions of the rule
    total = tree.rows * math.prod(outcomes)
    for start in range(0, total, _AT_ONCE):
        number = torch.arange(start, min(start + _AT_ONCE, total))
        row = number % tree.rows
        dice, verdict = run(row, number // tree.rows)
        assert dice.outcomes == outcomes, (
            "the decisions of the rule depend on earlier outcomes: it reads values on the host"
        )
        see(row, dice.weight, verdict)


def _check_path(tree: TokenTree, verdict: Verdict, real: Tensor) -> None:
    """Assert that the accepted nodes are a path of nodes in use, and that their tokens are the emitted tokens."""
    path = torch.arange(tree.nodes).expand(tree.rows, -1) if verdict.path is None else verdict.path
    inside = (torch.arange(path.shape[1]) < verdict.accepted) & real[:, None]
    above = torch.nn.functional.pad(path[:, :-1], (1, 0), value=-1)[:, : path.shape[1]]
    parents = torch.arange(-1, tree.nodes - 1).expand_as(tree.tokens) if tree.parents is None else tree.parents
    fine = (parents.gather(1, path) == above) & (tree.tokens.gather(1, path) == verdict.emitted[:, : path.shape[1]])
    if tree.in_use is not None:
        fine = fine & tree.in_use.gather(1, path)
    assert bool(fine[inside].all()), "an accepted path is not a path of the draft"


# ---- the check


def emitted_law(rule: Rule, world: World, drafts: Drafts, temperature: float, apart: bool = False) -> Tensor:
    """Return [1 or R, V, ..., V]: the joint law of `horizon` tokens if `rule` verifies these drafts. apart: one law for
    each draft, and not one for the mixture of all drafts."""
    V, H = world.vocabulary, world.horizon
    texts = (V + 1) ** H
    found = torch.zeros((drafts.tree.rows if apart else 1) * texts, dtype=torch.float64)

    def see(row: Tensor, weight: Tensor, verdict: Verdict) -> None:
        emitted = torch.nn.functional.pad(verdict.emitted, (0, max(0, H - verdict.emitted.shape[1])), value=NOTHING)
        assert not bool((emitted == BROKEN)[weight > 0].any())
        code = row if apart else torch.zeros_like(row)
        for at in range(H):
            code = code * (V + 1) + emitted[:, at] + 1
        found.index_add_(0, code.where(weight > 0, 0), weight if apart else weight * drafts.weight[row])

    every_branch(rule, world, drafts, temperature, see)
    return _continued(found.view(-1, texts), world if temperature > 0 else world.greedy())


def _continued(found: Tensor, world: World) -> Tensor:
    """Return the law of `horizon` tokens: that of the emitted tokens `found`, continued with the target's law."""
    V, H = world.vocabulary, world.horizon
    joint = found.view(-1, *[V + 1] * H)
    # texts with k emitted tokens: the other axes are NOTHING (index 0), and the target continues
    total = torch.zeros(found.shape[0], *[V] * H, dtype=torch.float64)
    for k in range(1, H + 1):
        where: list[slice | int] = [slice(None), *[slice(1, None)] * k, *[0] * (H - k)]
        part = joint[tuple(where)]
        for law in world.target[k:]:
            part = part.unsqueeze(-1) * law
        total += part
    return total


def total_variation(rule: Rule, world: World, drafts: Drafts, temperature: float = 1.0, apart: bool = False) -> float:
    """Return the largest total variation between the law of the emitted tokens and the target's joint law."""
    law = emitted_law(rule, world, drafts, temperature, apart)
    target = (world if temperature > 0 else world.greedy()).joint()
    return float((law - target).abs().flatten(1).sum(1).max() / 2)


# ---- A rule on toy worlds: chains and trees, sampled and greedy

BOUND = 1e-9  # a smaller total variation is rounding
# Coupled drafts are not enumerated: the comparison of texts with the same seed tests them.
HOW: dict[Drawn, Law] = {"certain": without_replacement, "iid": iid, "without_replacement": without_replacement}
CHAINS = ([-1], [-1, 0], [-1, 0, 1])
TREES = ([-1, -1], [-1, -1, 0, 0], [-1, 0, 0, -1])
RANDOM = [(seed, likeness) for likeness in (0.2, 0.5, 0.8) for seed in (1, 2)]


@dataclass(frozen=True)
class Case:
    """A kind of draft and a temperature. parents: as in a TokenTree."""

    drawn: Drawn
    parents: tuple[int, ...]
    chain: bool
    temperature: float

    def __str__(self) -> str:
        shape = f"a chain of {len(self.parents)}" if self.chain else f"the tree {list(self.parents)}"
        return f"{shape}, drawn {self.drawn}, temperature {self.temperature:g}"


@dataclass(frozen=True)
class Measured:
    """The total variation of a case: its mean over random worlds and its maximum over all. None: it was refused."""

    case: Case
    mean: float | None = None
    largest: float | None = None
    failure: str | None = None  # the rule raised an error


@dataclass(frozen=True)
class RuleAudit:
    """All cases of one rule."""

    rule: str
    keeps: str  # "text", "law", or "" when lossy
    measured: tuple[Measured, ...]

    @property
    def judged(self) -> list[Measured]:
        return [item for item in self.measured if item.largest is not None]

    @property
    def largest(self) -> float:
        return max((item.largest or 0.0 for item in self.measured), default=0.0)

    @property
    def by_drawn(self) -> dict[str, tuple[float, float]]:
        """Return the mean over random worlds and the maximum over all, for each way of drawing (sampled cases only)."""
        result: dict[str, tuple[float, float]] = {}
        for drawn in HOW:
            items = [item for item in self.judged if item.case.drawn == drawn and item.case.temperature > 0]
            if items:
                result[drawn] = fmean(item.mean or 0.0 for item in items), max(item.largest or 0.0 for item in items)
        return result

    @property
    def worst(self) -> Measured | None:
        """Return the case with an error or with the largest total variation above BOUND. None: the rule is exact."""
        for item in self.measured:
            if item.failure is not None:
                return item
        over = [item for item in self.judged if (item.largest or 0.0) >= BOUND]
        return max(over, key=lambda item: item.largest or 0.0, default=None)


def cases(rule: Rule) -> Iterator[Case]:
    """Yield all cases for the drafts that the rule declares in `judges`: chains and trees, sampled and greedy."""
    for drawn in HOW:
        if drawn not in rule.judges:
            continue
        for temperature in (1.0, 0.0):
            for parents in CHAINS:
                yield Case(drawn, tuple(parents), True, temperature)
            for parents in TREES if rule.branches else ():
                yield Case(drawn, tuple(parents), False, temperature)


def worlds(horizon: int) -> tuple[list[World], list[World]]:
    """Return random worlds and hard worlds: with impossible tokens, with equal laws, with laws without overlap."""
    apart = World.random(3, horizon, 6)
    left = [torch.zeros_like(p).index_fill_(-1, torch.tensor([0]), 1.0) for p in apart.target]
    right = [torch.zeros_like(p).index_fill_(-1, torch.tensor([1, 2]), 0.5) for p in apart.target]
    hard = [
        World.random(3, horizon, 3, likeness=0.3, holes=0.4),
        World.random(3, horizon, 5, likeness=1.0),
        World(3, horizon, left, right),
        World(3, horizon, right, left),
    ]
    return [World.random(3, horizon, seed, likeness) for seed, likeness in RANDOM], hard


def audit_rule(rule: Rule, progress: Progress = lambda label, done, total: None) -> RuleAudit:
    """Return the total variation of a rule in all cases, over all worlds."""
    if rule.exact not in ("text", "law", ""):
        raise UnsupportedError(
            f"Rule '{rule.name}' keeps the {rule.exact}, but an audit tests only rules that keep text or law; use "
            "another rule."
        )
    todo = list(cases(rule))
    measured = []
    for done, case in enumerate(todo):
        progress(f"enumerating rule {rule.name}", done, len(todo))
        measured.append(_measure(rule, case))
    return RuleAudit(rule.name, rule.exact, tuple(measured))


def _measure(rule: Rule, case: Case) -> Measured:
    parents = list(case.parents)
    deepest = max(len(path_to(node, parents)) for node in range(len(parents)))
    random, hard = worlds(deepest + 1)
    if rule.exact == "text":  # the rule reads the target's tokens and no laws, so few worlds are enough
        random, hard = random[::3], hard[::2]
    try:
        distances = [_distance(rule, case, world) for world in [*random, *hard]]
    except UnsupportedError:
        return Measured(case)
    except Exception as error:  # an error of a rule is a finding
        return Measured(case, failure=" ".join(f"{type(error).__name__}: {error}".split())[:200])
    return Measured(case, fmean(distances[: len(random)]), max(distances))


def _distance(rule: Rule, case: Case, world: World) -> float:
    drafts = enumerate_drafts(world, list(case.parents), case.drawn, HOW[case.drawn], chain=case.chain)
    # a certain draft is a point mass, so the rule must be exact for each draft and not only on average
    return total_variation(rule, world, drafts, case.temperature, apart=case.drawn == "certain")
