"""Grow the draft of any drafter that has logits: a chain, or a tree of a fixed or a growing shape.

`Grower.run(rows, budget, expand)` calls `expand(tokens, parents)` for the logits [R,W,V] after the text (tokens=None)
and then after the nodes that it chooses. The nodes are numbered in the order of expansion, and `parents` are such
numbers (-1: the text; None: a chain). The draft is greedy, coupled with the target, or drawn with noise for drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.common.errors import InputError, shown
from paceline.common.limits import NODES_LIMIT, Limited, limited
from paceline.core.choice import Draw
from paceline.core.contracts import Budget, RowsView
from paceline.core.device_ops import arange, integers
from paceline.core.law import Law
from paceline.core.tree import Drawn, TokenTree
from paceline.core.verdict import Verdict

# ---- The shape of a tree, fixed before a token is drawn: given by the user, or the best one for measured acceptance


@dataclass(frozen=True)
class Shape:
    """The shape of a tree. A node is named by the ranks on its path: (0,) is the likeliest first token, (0, 1) the
    second likeliest token after it. Parents come before children. A node with a child of rank 1 has one of rank 0.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        known = {()} | set(self.paths)
        for path in self.paths:
            if not path or any(rank < 0 for rank in path):
                raise InputError(f"A node of a tree is named by ranks from 0 up, such as (0, 1); got {path!r}.")
            if path[:-1] not in known:
                raise InputError(f"The tree has node {path} but not its parent {path[:-1]}.")
            if path[-1] and (*path[:-1], path[-1] - 1) not in known:
                raise InputError(f"The tree has node {path} but not its earlier sibling.")

    @staticmethod
    def of(given: Any) -> Shape:
        """Return the shape given as paths, or as the children per level: "3x2x1"."""
        if isinstance(given, Shape):
            return given
        if not isinstance(given, str):
            try:
                paths = sorted({tuple(int(rank) for rank in path) for path in given}, key=_order)
            except (TypeError, ValueError, OverflowError) as error:
                raise InputError(
                    f"A tree shape is '3x2x1' or paths like [(0,), (0, 1)], got {shown(given)}."
                ) from error
            if not paths:
                raise InputError("A tree shape needs at least one node, such as [(0,)]; got none.")
            if len(paths) > NODES_LIMIT:
                raise InputError(f"A tree shape has at most {NODES_LIMIT:,} nodes, got {len(paths):,}.")
            return Shape(tuple(paths))
        try:
            widths = [int(width) for width in given.split("x")]
        except ValueError as error:
            raise InputError(f"A tree shape is children per level, such as 3x2x1, got {shown(given)}.") from error
        if any(width < 1 for width in widths):
            raise InputError(f"A tree shape needs at least one child per level, got {shown(given)}.")
        level: list[tuple[int, ...]] = [()]
        found: list[tuple[int, ...]] = []
        for width in widths:
            if len(found) + len(level) * width > NODES_LIMIT:
                raise InputError(f"A tree shape has at most {NODES_LIMIT:,} nodes, got more: {shown(given)}.")
            level = [(*path, rank) for path in level for rank in range(width)]
            found += level
        return Shape(tuple(found))

    @staticmethod
    def optimal(acceptance: Sequence[float], nodes: int, depth: int) -> Shape:
        """Return the tree of `nodes` nodes with the most accepted tokens on average, if the child of rank r is always
        accepted with probability acceptance[r] (Sequoia's dynamic programme, arXiv 2402.12374)."""
        kept = tuple(round(float(chance), 6) for chance in acceptance)
        return Shape(tuple(sorted(_grow(kept, nodes, depth), key=_order)))

    def expected(self, acceptance: Sequence[float]) -> float:
        """Return the accepted tokens on average, if rank r is accepted with probability acceptance[r]."""
        total = 0.0
        for path in self.paths:
            chance = 1.0
            for rank in path:
                chance *= acceptance[rank] if rank < len(acceptance) else 0.0
            total += chance
        return total

    def within(self, depth: int, nodes: int, widest: int) -> Shape:
        """Return the first nodes of this shape that fit the depth, the number of nodes and the vocabulary `widest`."""
        fitting = [path for path in self.paths if len(path) <= depth and max(path) < widest]
        return self if len(fitting) == len(self.paths) <= nodes else Shape(tuple(fitting[:nodes]))

    @cached_property
    def levels(self) -> list[list[tuple[int, int]]]:
        """Return for each level the nodes of the level before that have children: (index in that level, children)."""
        found: list[list[tuple[int, int]]] = []
        above: list[tuple[int, ...]] = [()]
        while above:
            here = [path for path in self.paths if len(path) == len(found) + 1]
            children = [(i, sum(path[:-1] == parent for path in here)) for i, parent in enumerate(above)]
            found.append([(i, count) for i, count in children if count])
            above = here
        return found[:-1]


def _order(path: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    return len(path), path


def _grow(acceptance: tuple[float, ...], nodes: int, depth: int) -> list[tuple[int, ...]]:
    split = _splits(acceptance, nodes, depth)

    def below(path: tuple[int, ...], size: int, levels: int) -> list[tuple[int, ...]]:
        """Return the best `size` nodes below `path`, in at most `levels` levels."""
        found: list[tuple[int, ...]] = []
        rank = 0
        while size > 0 and levels > 0 and rank < len(acceptance):
            given = split[levels][rank][size]
            if given == 0:
                break
            child = (*path, rank)
            found += [child, *below(child, given - 1, levels - 1)]
            size -= given
            rank += 1
        return found

    return below((), nodes, depth)


@lru_cache(maxsize=64)
def _splits(acceptance: tuple[float, ...], nodes: int, depth: int) -> list[list[list[int]]]:
    """Return split[d][r][n]: if the siblings of ranks r, r+1, ... share n nodes in d levels, the number of nodes in the
    subtree of rank r. value[d][r][n] is the largest expected number of accepted tokens of these n nodes."""
    ranks = len(acceptance)
    value = [[[0.0] * (nodes + 1) for _ in range(ranks + 1)] for _ in range(depth + 1)]
    split = [[[0] * (nodes + 1) for _ in range(ranks + 1)] for _ in range(depth + 1)]
    for d in range(1, depth + 1):
        for r in range(ranks - 1, -1, -1):
            for n in range(1, nodes + 1):
                for given in range(1, n + 1):
                    gain = acceptance[r] * (1 + value[d - 1][0][given - 1]) + value[d][r + 1][n - given]
                    if gain > value[d][r][n] + 1e-12:
                        value[d][r][n], split[d][r][n] = gain, given
    return split


# ---- The measured acceptance of each rank, which decides the best shape

_FIRST_LOOK = 16  # rounds before the shape is first fitted to the measurement; then at every doubling


class RankMeter:
    """Counts how often the child of each rank is accepted. The counts stay on the device and are read rarely."""

    _MOST = 64  # ranks that are counted

    def __init__(self) -> None:
        self._rounds, self._next = 0, _FIRST_LOOK
        self._hits: Tensor | int = 0  # [64] accepted nodes of each rank
        self._tries: Tensor | int = 0  # [64] nodes of each rank whose parent was accepted

    def add(self, ranks: Tensor, parents: Tensor, verdict: Verdict) -> None:
        """Count the nodes of one verdict. `ranks` [R,N]: the rank of every node among its siblings."""
        assert verdict.path is not None
        R, N = ranks.shape
        children = torch.zeros(R, N + 1, dtype=torch.int64, device=ranks.device)
        children = children.scatter_add(1, parents + 1, torch.ones_like(parents))  # of the text and of every node
        inside = arange(0, verdict.path.shape[1], ranks.device) < verdict.accepted
        taken = ranks.gather(1, verdict.path).where(inside, self._MOST)
        below = torch.cat([children[:, :1], children.gather(1, verdict.path + 1).where(inside, 0)], 1)
        every = arange(0, self._MOST, ranks.device)
        self._hits = self._hits + (taken.unsqueeze(-1) == every).sum((0, 1))
        self._tries = self._tries + (below.unsqueeze(-1) > every).sum((0, 1))
        self._rounds += 1

    def due(self) -> bool:
        if self._rounds < self._next:
            return False
        self._next *= 2
        return True

    def acceptance(self, ranks: int) -> list[float]:
        """Return the acceptance of each rank, which never rises with the rank. A rank without a trial has half of the
        one before."""
        assert isinstance(self._hits, Tensor)
        assert isinstance(self._tries, Tensor)
        found: list[float] = []
        for hits, tries in zip(self._hits[:ranks].tolist(), self._tries[:ranks].tolist(), strict=True):
            before = found[-1] if found else 1.0
            # start with half a hit in one trial, so that a few rejections decide little and no acceptance is 0
            found.append(min(before, (hits + 0.5) / (tries + 1)) if tries else before / 2)
        return found


# ---- Growing a draft from the logits that the drafter returns

Expand = Callable[[Tensor | None, Tensor | None], Tensor]
Chain = Callable[[int], Tensor | None]  # number of steps -> greedy tokens [R,steps], or None if that is impossible
_NEVER = float("-inf")


@dataclass(frozen=True)
class TreeOptions(Limited):
    """How a drafter with logits grows its draft. Inherited by the options of such drafters."""

    tree: Literal["chain", "levels", "best-first", "static", "optimal"] = "chain"
    branch: int = limited(2, 1, NODES_LIMIT)  # children of a node that is expanded (levels, best-first)
    width: int = limited(2, 1, NODES_LIMIT)  # nodes expanded per step (levels, best-first)
    shape: Any = "3x2x1x1"  # static: children per level, or paths; optimal: the first shape

    def __post_init__(self) -> None:
        super().__post_init__()
        Shape.of(self.shape)


class Grower:
    """Grows the drafts of one drafter, and measures which ranks are accepted."""

    def __init__(self, options: TreeOptions) -> None:
        self.options = options
        self.fed = 0  # the number of tokens that `expand` read for the last draft
        self.slots: Tensor | None = None  # [R,N]: the number of each node among these, -1: not read (None: a chain)
        self._shape = Shape.of(options.shape)
        self._meter = RankMeter()
        self._last: TorchTree | None = None  # the last tree, if the shape is fitted to the acceptance

    def run(self, rows: RowsView, budget: Budget, expand: Expand, chain: Chain | None = None) -> TokenTree:
        """Return a draft within the budget. chain: a function that computes a whole greedy chain at once."""
        if self.options.tree == "chain":
            return self._likeliest(rows, budget, chain) or self._chain(rows, budget, expand)
        logits = expand(None, None)
        if self.options.tree in ("static", "optimal"):
            return self._by_shape(rows, budget, expand, logits)
        return self._by_score(rows, budget, expand, logits)

    def judged(self, verdict: Verdict) -> None:
        """Take the verdict on the last draft, and forget the draft."""
        last = self._last
        self.slots = self._last = None  # the next draft may be for other rows
        if last is not None and verdict.path is not None and verdict.path.shape[1]:
            self._meter.add(last.rank, last.parents, verdict)

    def kept(self, verdict: Verdict) -> Tensor | None:
        """Take the verdict on the last draft. Return the accepted path as numbers of the tokens that `expand` read, for
        `Reader.keep`. An accepted leaf that was not read has the number 0; the reader must read it again."""
        path, slots = verdict.path, self.slots
        self.judged(verdict)
        if path is None or slots is None or path.shape[1] == 0:
            return path
        return slots.gather(1, path).clamp(min=0)

    def reorder(self, source: Sequence[int]) -> None:
        """Make the state of row r a copy of that of row source[r], with the last draft."""
        some = list(source)
        self.slots = None if self.slots is None else self.slots[some]
        if self._last is not None:
            self._last.rank, self._last.parents = self._last.rank[some], self._last.parents[some]

    def _likeliest(self, rows: RowsView, budget: Budget, chain: Chain | None) -> TokenTree | None:
        """Return a greedy chain from `chain`, or None if the draft is not greedy or `chain` returns None."""
        if chain is None or rows.needs_path or not rows.choice(slice(0, 1)).greedy(budget.draw):
            return None
        tokens = chain(budget.depth)
        self.fed, self.slots = budget.depth - 1, None
        return None if tokens is None else TokenTree(tokens)

    def _chain(self, rows: RowsView, budget: Budget, expand: Expand) -> TokenTree:
        logits = expand(None, None)
        buffer = rows.ops.chain_buffer(budget.depth, rows.count, logits.device)
        tokens: list[Tensor] = []
        laws: list[Law | None] = []
        for step in range(budget.depth):
            if step:
                logits = expand(tokens[-1], None)
            path = _chain_path(tokens) if rows.needs_path and step else None
            choice = rows.choice(slice(step, step + 1), path)
            token, law = choice.guess(logits, budget.draw, None if buffer is None else buffer[step])
            tokens.append(token)
            laws.append(law)
        self.fed, self.slots = budget.depth - 1, None
        in_place = buffer is not None and tokens[0].data_ptr() == buffer.data_ptr()
        drafted = buffer.squeeze(2).t() if in_place and buffer is not None else torch.cat(tokens, 1)
        if laws[0] is None:
            return TokenTree(drafted)
        if budget.draw == "coupled":
            return TokenTree(drafted, drawn="coupled")
        dense = [law.dense(logits.shape[-1]) for law in laws if law is not None]
        return TokenTree(drafted, drawn="iid", laws=torch.cat(dense, 1))

    def _by_score(self, rows: RowsView, budget: Budget, expand: Expand, logits: Tensor) -> TokenTree:
        """Return a tree that expands its best nodes, of the last level or of the whole tree. A draft without laws grows
        more nodes than the budget and keeps the best. With laws, no drawn node may be dropped."""
        branch = min(self.options.branch, budget.nodes, logits.shape[-1])
        spreads = [1]
        while len(spreads) < budget.depth:
            spread = min(self.options.width, spreads[-1] * branch)
            if budget.draw in ("independent", "iid"):
                spread = min(spread, (budget.nodes - sum(spreads) * branch) // branch)
            if spread < 1:
                break
            spreads.append(spread)
        everywhere = self.options.tree == "best-first"
        tree = rows.ops.tree_builder(rows, budget.draw, logits, sum(spreads) * branch, max(spreads), everywhere)
        for level, spread in enumerate(spreads):
            if level:
                logits = expand(*tree.expand_best(spread))
            tree.add(logits, branch)
        finished = tree.finish(budget.nodes)
        self.fed, self.slots, self._last = tree.num_expanded, tree.slots, None
        return finished

    def _by_shape(self, rows: RowsView, budget: Budget, expand: Expand, logits: Tensor) -> TokenTree:
        """Return a tree whose shape is fixed before a token is drawn."""
        tree = TorchTree(rows, budget.draw)
        for level, parents in enumerate(self._fitting(budget, logits.shape[-1]).levels):
            start = tree.nodes - tree.newest
            if level:
                chosen = integers(tuple(start + i for i, _ in parents), tree.device).expand(tree.R, -1)
                logits = expand(*tree.expand(chosen))
            tree.add(logits, max(count for _, count in parents), [count for _, count in parents])
        self.fed, self.slots = tree.num_expanded, tree.slots
        self._last = tree if self.options.tree == "optimal" else None
        return tree.finish(tree.nodes)

    def _fitting(self, budget: Budget, vocabulary: int) -> Shape:
        """Return the given shape, or the best one for the acceptance of past rounds, cut to the budget."""
        if self.options.tree == "optimal" and self._meter.due():
            widest = 1 + max(max(path) for path in self._shape.paths)
            acceptance = self._meter.acceptance(max(widest, 4))
            self._shape = Shape.optimal(acceptance, len(Shape.of(self.options.shape).paths), budget.depth)
        return self._shape.within(budget.depth, budget.nodes, vocabulary)


def _chain_path(tokens: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the `path` of `RowsView.choice` for the next position of a chain: all tokens drafted so far."""
    drafted = torch.cat(tokens, 1)
    return drafted, torch.ones_like(drafted, dtype=torch.bool).unsqueeze(1)


class TorchTree:
    """A `TreeBuilder` in torch. A node keeps its index, unless the tree is pruned at the end."""

    def __init__(self, rows: RowsView, draw: Draw, anywhere: bool = False) -> None:
        self.rows, self.draw, self.anywhere = rows, draw, anywhere
        self.wants_laws = draw in ("independent", "iid")
        self.R, self.device = rows.count, rows.text.device
        self.tokens = torch.empty(self.R, 0, dtype=torch.int64, device=self.device)
        self.parents, self.depth, self.rank = self.tokens, self.tokens, self.tokens
        self.slots: Tensor = self.tokens
        self.ancestors = torch.empty(self.R, 0, 0, dtype=torch.bool, device=self.device)
        self.score = torch.empty(self.R, 0, dtype=torch.float64, device=self.device)  # sum of the log-confidences
        self.laws: list[Tensor] = []
        self.newest = 0  # nodes added by the last step
        self.num_expanded = 0
        self.certain = False
        self.steps = 0  # the number of levels, so an upper limit of the length of a path
        self._expanded = torch.full((self.R, 1), -1, device=self.device)  # the nodes to add children to; -1: the text

    @property
    def nodes(self) -> int:
        return self.tokens.shape[1]

    def expand_best(self, spread: int) -> tuple[Tensor, Tensor]:
        """Expand the `spread` best open nodes, of the whole tree or of the last level; of equal nodes the first."""
        open_nodes = self.slots < 0
        if not self.anywhere:
            open_nodes = open_nodes & (arange(0, self.nodes, self.device) >= self.nodes - self.newest)
        score = self.score.clamp(min=-1e300)  # an open node of probability 0 still wins over an expanded node
        score = score.masked_fill(~open_nodes, _NEVER)
        return self.expand(score.sort(dim=1, descending=True, stable=True).indices[:, :spread].sort(1).values)

    def expand(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Expand the chosen nodes [R,W]. Return their tokens [R,W] and the numbers of their parents [R,W]."""
        above = torch.cat([torch.full_like(self.slots[:, :1], -1), self.slots], 1)
        parents = above.gather(1, self.parents.gather(1, chosen) + 1)
        numbers = arange(self.num_expanded, self.num_expanded + chosen.shape[1], self.device).expand_as(chosen)
        self.slots = self.slots.scatter(1, chosen, numbers)
        self.num_expanded += chosen.shape[1]
        self._expanded = chosen
        return self.tokens.gather(1, chosen), parents

    def add(self, logits: Tensor, k: int, counts: list[int] | None = None) -> None:
        """Add k children to each node that was expanded last, or only the first counts[w] of them to node w."""
        chosen, (R, W) = self._expanded, self._expanded.shape
        known = chosen.clamp(min=0)
        deep = self.depth.gather(1, known) + 1 if self.nodes else torch.zeros_like(chosen)
        path = None
        if self.rows.needs_path and self.nodes:
            path = (self.tokens, self.ancestors.gather(1, known.unsqueeze(-1).expand(R, W, self.nodes)))
        branch = chosen + 1 if self.wants_laws else None
        tokens, sure, law = self.rows.choice(deep, path).siblings(logits, k, self.draw, branch)
        self.certain = law is None
        some = None if counts is None else [w * k + i for w, count in enumerate(counts) for i in range(count)]
        some = None if some is not None and len(some) == W * k else some
        if self.wants_laws and law is not None:
            laws = law.unsqueeze(2).expand(R, W, k, -1) if self.draw == "iid" else _sibling_laws(law, tokens)
            self.laws.append(_flat(laws, some))
        base = self.score.gather(1, known) if self.nodes else torch.zeros(R, W, dtype=torch.float64, device=self.device)
        score = base.unsqueeze(-1) + sure.where(sure == sure, _NEVER)  # NaN: no token can follow
        parents = _flat(chosen.unsqueeze(-1).expand(R, W, k), some)
        self._grow_ancestors(parents)
        self.tokens = torch.cat([self.tokens, _flat(tokens, some)], 1)
        self.parents = torch.cat([self.parents, parents], 1)
        self.depth = torch.cat([self.depth, _flat(deep.unsqueeze(-1).expand(R, W, k), some)], 1)
        self.rank = torch.cat([self.rank, _flat(arange(0, k, self.device).expand(R, W, k), some)], 1)
        self.score = torch.cat([self.score, _flat(score, some)], 1)
        self.newest = parents.shape[1]
        self.slots = torch.cat([self.slots, torch.full_like(parents, -1)], 1)
        self.steps += 1

    def _grow_ancestors(self, parents: Tensor) -> None:
        if not self.rows.needs_path:
            return
        old, (R, new) = self.ancestors, parents.shape
        padded = torch.nn.functional.pad(old, (0, new, 1, 0))
        rows = padded.gather(1, (parents + 1).unsqueeze(-1).expand(R, new, padded.shape[2]))
        own = torch.eye(new, dtype=torch.bool, device=self.device).expand(R, new, new)
        rows = rows | torch.nn.functional.pad(own, (padded.shape[2] - new, 0))
        self.ancestors = torch.cat([padded[:, 1:], rows], 1)

    def finish(self, most: int) -> TokenTree:
        if self.nodes > most:
            self._prune(most)
        drawn: Drawn = "without_replacement"
        if self.certain:
            drawn = "certain"
        elif self.draw in ("coupled", "iid"):
            drawn = self.draw
        laws = torch.cat(self.laws, 1) if self.laws else None
        return TokenTree(self.tokens, self.parents, drawn=drawn, laws=laws, deepest=self.steps)

    def _prune(self, most: int) -> None:
        """Keep the best `most` nodes, of equal ones the first. No score is above its parent's, so ancestors stay."""
        order = self.score.clamp(min=-1e300).sort(dim=1, descending=True, stable=True).indices
        kept = order[:, :most].sort(1).values
        where = torch.full((self.R, self.nodes + 1), -1, device=self.device)
        where = where.scatter(1, kept + 1, arange(0, most, self.device).expand_as(kept))
        parents = where.gather(1, self.parents.gather(1, kept) + 1)
        self.tokens, self.slots, self.rank, self.score = (
            column.gather(1, kept) for column in (self.tokens, self.slots, self.rank, self.score)
        )
        self.parents = parents


def _flat(of_children: Tensor, some: list[int] | None) -> Tensor:
    """Return [R,W*k,...] from [R,W,k,...], or only the children with the indices `some` of it."""
    flat = of_children.flatten(1, 2)
    return flat if some is None else flat.index_select(1, integers(tuple(some), flat.device))


def _sibling_laws(law: Tensor, tokens: Tensor) -> Tensor:
    """Return [R,W,k,V]: the law of each sibling, given that its token is none of the earlier siblings'. If no
    probability is left, the token was fixed and not drawn: the law is a point mass."""
    laws = []
    for i in range(tokens.shape[2]):
        total = law.sum(-1, keepdim=True)
        fixed = torch.zeros_like(law).scatter_(-1, tokens[..., i : i + 1], 1.0)
        laws.append(torch.where(total > 0, law / total, fixed))
        law = law.scatter(-1, tokens[..., i : i + 1], 0.0)
    return torch.stack(laws, 2)
