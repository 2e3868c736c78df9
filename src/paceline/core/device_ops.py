"""The operations between forward passes: pick tokens, grow and match trees, find cache slots, commit tokens.

`DeviceOps` implements them in torch, for every device. A subclass replaces some of them by kernels with the same
results: `models.cpu.cpu_ops` the trees on a CPU, `models.cuda.cuda_ops` whole rounds on a CUDA device, where a torch
call costs as much as a small kernel. The target owns the object (`LanguageModel.ops`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from paceline.core.noise import Purpose, exponential
from paceline.core.ranking import first_best
from paceline.core.verdict import BROKEN, NOTHING, Verdict

if TYPE_CHECKING:
    from paceline.core.choice import Choice, Draw
    from paceline.core.contracts import RowsView
    from paceline.core.law import Law
    from paceline.core.tree import TokenTree

# ---- Constant tensors. A CUDA graph cannot copy numbers from the host. No constant is freed: graphs still read it

_BEFORE = 4096  # the long tables begin at minus this number
_SHORT = 64


class Constants:
    """The constants of a process. `functools.cache` returns a known constant without a Python call."""

    def __init__(self) -> None:
        self._short: dict[tuple[int, int, torch.device], Tensor] = {}  # by start, stop and device
        self._tables: dict[torch.device, Tensor] = {}
        self.multiples = cache(_multiples)
        self.zeros = cache(_zeros)
        self.integers = cache(_integers)

    def arange(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Return the numbers start..stop-1: a constant of its own if it is short, else a part of one long table."""
        if stop - start <= _SHORT and start <= _SHORT:
            known = self._short.get((start, stop, device))
            if known is None:
                known = self._short[start, stop, device] = torch.arange(start, stop, device=device)
            return known
        if start < -_BEFORE:
            return torch.arange(start, stop, device=device)
        table = self._tables.get(device)
        if table is None or stop + _BEFORE > table.shape[0]:
            table = self._tables[device] = torch.arange(-_BEFORE, max(2 * stop, 4096), device=device)
        return table[start + _BEFORE : stop + _BEFORE]


def _multiples(start: int, stop: int, of: int, device: torch.device) -> Tensor:
    """Return the numbers start..stop-1, times `of`."""
    return torch.arange(start, stop, device=device) * of


def _zeros(rows: int, device: torch.device) -> Tensor:
    """Return int64 zeros [rows,1]."""
    return torch.zeros(rows, 1, dtype=torch.int64, device=device)


def _integers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the numbers as an int64 tensor."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)


CONSTANTS = Constants()
arange, multiples, zeros, integers = CONSTANTS.arange, CONSTANTS.multiples, CONSTANTS.zeros, CONSTANTS.integers


# ---- The operations


class TreeBuilder(Protocol):
    """A draft tree that grows at its best nodes."""

    num_expanded: int  # the number of nodes that `expand_best` has returned

    @property
    def slots(self) -> Tensor | None:
        """Return [R,N], for a finished tree: the number of each node in the order of expansion, or -1."""
        ...

    def add(self, logits: Tensor, k: int) -> None:
        """Add k children to each node that was expanded last (first: to the text). logits [R,W,V]: of these nodes."""

    def expand_best(self, spread: int) -> tuple[Tensor, Tensor]:
        """Expand the `spread` best open nodes. Return their tokens [R,spread] and the numbers of their parents."""
        ...

    def finish(self, most: int) -> TokenTree:
        """Return the tree of the best `most` nodes."""
        ...


class Texts(Protocol):
    """The tensors of a batch that a commit writes: see `engine.static_rows.RowTensors`."""

    text: Tensor  # [R,T]
    length: Tensor  # [R,1]
    end: Tensor  # [R,1]
    counts: Tensor | None  # [R,V]: occurrences in the new text
    seen: Tensor | None  # [R,V]: occurrences in prompt and text

    def advance(self, accepted: Tensor) -> None:
        """Add accepted [R,1] + 1 to the lengths."""


class DeviceOps:
    """The operations, in torch. A subclass can set kernels for some of them. None: the operation runs in torch."""

    depths_kernel: Callable[[Tensor], Tensor] | None = None
    match_tree_kernel: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None
    move_kernel: Callable[..., None] | None = None  # for stores of one shape, with their addresses on the device

    # ---- tokens

    def exponential(self, key: Tensor, position: Tensor, lanes: Tensor | int) -> Tensor:
        """Return exponential noise [R,Q,L]: see `core.noise`. key [R,1], position [R,Q]."""
        return exponential(key, position, lanes)

    def pick(self, choice: Choice, logits: Tensor) -> Tensor:
        """Return [R,Q]: the target's token at each position, or BROKEN where no token can be chosen."""
        if choice.batch.deterministic:
            scores = logits if choice.prefix is None else choice.edited(logits)
            index = first_best(scores)
            value = scores.gather(-1, index.unsqueeze(-1)).squeeze(-1)
            return torch.where(value - value == 0, index, BROKEN)
        return choice.gumbel_argmax(choice.law(logits), logits.shape[-1])

    def guess(
        self, choice: Choice, logits: Tensor, draw: Draw, into: Tensor | None = None
    ) -> tuple[Tensor, Law | None]:
        """Return one drafted token per position [R,Q], and the law it was drawn from (None: a point mass). `into` [R,Q]
        is a part of `chain_buffer`: the tokens may be written there."""
        if choice.batch.deterministic or draw == "certain":
            return first_best(logits if choice.prefix is None else choice.edited(logits)), None
        law = choice.law(logits)
        return choice.sample(law, logits.shape[-1], Purpose.TARGET if draw == "coupled" else Purpose.DRAFT), law

    def chain_buffer(self, depth: int, rows: int, device: torch.device) -> Tensor | None:
        """Return a buffer [depth,R,1] for the tokens that `guess` draws. None: `guess` returns new tensors."""
        return None

    # ---- verdicts

    def match_chain(self, tree: TokenTree, picks: Tensor) -> Verdict:
        """Return the verdict of rule `match` on a chain. picks [R,1+N]: the target's token after text and each node."""
        agree = tree.tokens == picks[:, :-1]
        if tree.count is not None and tree.in_use is not None:
            agree = agree & tree.in_use
        accepted = agree.cumprod(1).sum(1, keepdim=True)
        return Verdict(picks.where(arange(0, picks.shape[1], picks.device) <= accepted, NOTHING), accepted)

    def match_tree(self, tree: TokenTree, picks: Tensor) -> Verdict:
        """Return the verdict of rule `match` on a tree. Of siblings with the same token, only the first can match."""
        assert tree.parents is not None
        if self.match_tree_kernel is not None:
            return Verdict(*self.match_tree_kernel(tree.tokens, tree.parents, tree.count, picks, tree.reach))
        agree = (tree.tokens == picks.gather(1, tree.parents + 1)) & _first_of_siblings(tree.tokens, tree.parents)
        if tree.in_use is not None:
            agree = agree & tree.in_use
        broken = (tree.ancestors & ~agree.unsqueeze(1)).any(-1)
        return _path_verdict(~broken, picks, tree.reach)

    def ratio(self, choice: Choice, tree: TokenTree, logits: Tensor) -> Verdict | None:
        """Return the verdict of rule `ratio` from a kernel. None: there is no kernel, and the rule uses torch."""
        return None

    # ---- trees

    def tree_builder(
        self, rows: RowsView, draw: Draw, logits: Tensor, size: int, widest: int, anywhere: bool
    ) -> TreeBuilder:
        """Return a builder for a tree of at most `size` nodes that expands at most `widest` nodes at once. logits: of
        the first `add`. anywhere: it also expands nodes of earlier levels."""
        from paceline.core.tree_growth import TorchTree

        return TorchTree(rows, draw, anywhere)

    def depths(self, tree: TokenTree) -> Tensor:
        """Return [R,1+N]: the number of drafted tokens up to the text (0) and up to and including each node."""
        by_kernel = self.depths_kernel is not None and tree.parents is not None
        return self.depths_kernel(tree.parents) if by_kernel else tree.after  # type: ignore[misc, arg-type]

    # ---- slots of a KV cache

    def move(
        self,
        stores: Sequence[Tensor],
        addresses: Callable[[], Tensor | None],
        length: Tensor,
        source: Tensor,
        target: Tensor,
    ) -> None:
        """Copy slots in each of the stores [rows,heads,slots,width]: from length + source [R,D] to length + target [D].
        addresses() returns a tensor with the addresses of the stores, or None if their shapes differ."""
        table = None if self.move_kernel is None else addresses()
        if self.move_kernel is not None and table is not None:
            return self.move_kernel(table[: len(stores)], stores[0], length, source, target)
        R, D = source.shape
        source, target = length + source, length + target
        for store in stores:
            shape = (R, store.shape[1], D, store.shape[3])
            moved = store[:R].gather(2, source[:, None, :, None].expand(shape))
            store[:R].scatter_(2, target[:, None, :, None].expand(shape), moved)

    def slot_mapping(
        self, text: Tensor, length: Tensor, tokens: Tensor | None, width: int, more: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return slots [R,Q] and ids [R,Q] of the last `width` tokens of the texts [R,T] and of the `tokens` [R,fed]
        after them; then the `more` slots after each text as [more,R], if the kernel computes them too (else None)."""
        return *slots_after(text, length, tokens, width, 0), None

    # ---- the rows of a CUDA graph

    def begin_round(self, length: Tensor, end: Tensor, depth: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the next positions [R,1+depth] of texts of `length` [R,1], and the number of tokens [R] that each may
        draft before its `end` [R,1]. None: they are computed where they are used."""
        return None, None

    def commit(self, rows: Texts, verdict: Verdict, tree: TokenTree) -> Tensor:
        """Write the emitted tokens to the texts. Return the verdict and the tree as one tensor [R,C], so that a round
        needs only one host read (`Rows.commit` splits it)."""
        steps = verdict.emitted.shape[1]
        rows.text.scatter_(1, rows.length + arange(0, steps, rows.text.device), verdict.emitted)
        rows.advance(verdict.accepted)
        if rows.counts is not None and rows.seen is not None:
            real = (verdict.emitted >= 0).to(torch.int64)
            for table in (rows.counts, rows.seen):
                table.scatter_add_(1, verdict.emitted.clamp(min=0), real)
        columns = [verdict.emitted, tree.tokens]
        columns += [verdict.path] if verdict.path is not None else []
        columns += [tree.parents] if tree.parents is not None else []
        columns += [tree.count.unsqueeze(1)] if tree.count is not None else []
        return torch.cat(columns, 1)

    # ---- a model that follows a script

    def say(
        self, logits: Tensor, script: Tensor, ids: Tensor, position: Tensor, length: Tensor, loudness: float
    ) -> None:
        """Set one logit per position to `loudness`, in logits [R,K,V] of the last K of `ids` [R,Q]: that of the token
        script[id, d]. The script is [V,D]; d counts from the end of the text: position [R,Q] + 1 - length [R,1]."""
        keep = logits.shape[1]
        steps: Tensor | int = 0
        if script.shape[1] > 1:
            steps = (position[:, -keep:] + 1 - length).clamp(0, script.shape[1] - 1)
        logits.scatter_(-1, script[ids[:, -keep:], steps].unsqueeze(-1), loudness)


TORCH = DeviceOps()


class KernelTree:
    """A `TreeBuilder` whose nodes are stored by a kernel (`kernels.cpu.tree_growing`, `kernels.cuda`)."""

    slots: Tensor | None = None

    def __init__(self, nodes: Any, noise: tuple[Tensor, Tensor] | None, zeros: Tensor) -> None:
        """noise: temperature [R,1,1] and key [R,1], or None if greedy. zeros: from `SamplingBatch.zeros`."""
        self._nodes, self._noise, self._zeros = nodes, noise, zeros
        self.num_expanded = self._levels = 0

    def add(self, logits: Tensor, k: int) -> None:
        self._nodes.add(logits, k, self._noise, self._zeros)
        self._levels += 1

    def expand_best(self, spread: int) -> tuple[Tensor, Tensor]:
        self.num_expanded += spread
        tokens, parents = self._nodes.expand_best(spread)
        return tokens, parents

    def finish(self, most: int) -> TokenTree:
        from paceline.core.tree import TokenTree

        tokens, parents, self.slots = self._nodes.tree(most)
        drawn = "certain" if self._noise is None else "coupled"
        return TokenTree(tokens, parents, drawn=drawn, deepest=self._levels)  # type: ignore[arg-type]


def slots_after(text: Tensor, length: Tensor, tokens: Tensor | None, width: int, scratch: int) -> tuple[Tensor, Tensor]:
    """Return slots [R,Q] and ids [R,Q] of the last `width` tokens of each text, and of the `tokens` [R,fed] that follow
    `scratch` drafted tokens."""
    fed = 0 if tokens is None else tokens.shape[1]
    slots = length + arange(scratch - width, scratch + fed, text.device)
    if not width:
        assert tokens is not None
        return slots, tokens
    known = text.gather(1, slots[:, :width] if fed else slots)
    return slots, known if tokens is None or not fed else torch.cat([known, tokens], 1)


def _first_of_siblings(tokens: Tensor, parents: Tensor) -> Tensor:
    """Return [R,N] bool: whether no earlier node has the same parent and token. Unchecked trees can have such nodes."""
    same = (tokens.unsqueeze(1) == tokens.unsqueeze(2)) & (parents.unsqueeze(1) == parents.unsqueeze(2))
    return ~same.tril(-1).any(-1)


def _path_verdict(taken: Tensor, picks: Tensor, reach: int) -> Verdict:
    """Return the verdict for one accepted path per row, given as a set of nodes [R,N]. Parents come before children, so
    the order of the nodes is the order of the path. picks [R,1+N]: the token after the text and each node."""
    N = taken.shape[1]
    nodes = arange(0, N, taken.device)
    accepted = taken.sum(1, keepdim=True)
    path = torch.where(taken, nodes, N).sort(1).values[:, :reach]  # the taken nodes first
    inside = nodes[:reach] < accepted
    path = path.where(inside, 0)
    rest = picks.gather(1, path + 1).where(inside, NOTHING)
    return Verdict(torch.cat([picks[:, :1], rest], 1), accepted, path)
