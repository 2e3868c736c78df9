"""Faster ways of a device: kernels that do at once what torch does in several steps. Whoever has some puts them here.

What they compute is said by the code that asks for them, and it is what that code computes by itself where there are
none. Inside a captured round a step of torch's costs as much as a small kernel, however little it does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


class Lay(Protocol):
    """The slots [R,Q] and the ids [R,Q] of the last `width` tokens of texts [R,T] of `length` [R,1] and of `tokens`
    [R,fed] after them; and, [more,R], the slots that follow each text."""

    def __call__(
        self, text: Tensor, length: Tensor, tokens: Tensor | None, width: int, more: int
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Write(Protocol):
    """`StaticRows.write`: tokens emitted [R,S] go to the texts, lengths grow by accepted [R,1] + 1 up to `end`; returns
    emitted, tokens, of a tree (branch) the accepted path and the parents, and count side by side."""

    def __call__(
        self,
        texts: tuple[Tensor, Tensor, Tensor],
        emitted: Tensor,
        accepted: Tensor,
        tokens: Tensor,
        count: Tensor | None,
        branch: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor: ...


class TreeBuilder(Protocol):
    """A tree of guesses that grows on the device; `fed` nodes were asked about."""

    fed: int

    def add(self, logits: Tensor, k: int, noise: tuple[Tensor, Tensor] | None, done: Tensor) -> None:
        """k children, the best, for each of the nodes asked about last (at first: for the text), whose logits are
        [R,W,V]. noise: heat [R] and key [R], where they race. done: as in `Quick.race`, R*W at least."""

    def ask(self, spread: int) -> tuple[Tensor, Tensor]:
        """The `spread` surest that nobody asked about: tokens [R,spread], and their parents among those that were."""
        ...

    def tree(self, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and parents [R,N] of the surest `most`, and each one's number among those asked about (-1: none)."""
        ...


@dataclass(frozen=True)
class Branches:
    """The kernels of one type of device for drafts that are trees."""

    # length [R,1] of the texts, nodes at most, may nodes of earlier levels be asked about?
    trunk: Callable[[Tensor, int, bool], TreeBuilder]
    # `TokenTree.after`: parents [R,N] -> [R,1+N]
    depths: Callable[[Tensor], Tensor]
    # rule `match` on trees: tokens [R,N], parents [R,N], count [R], picks [R,1+N], longest path D -> emitted [R,1+D],
    # accepted [R,1], path [R,D]
    follow_tree: Callable[[Tensor, Tensor, Tensor | None, Tensor, int], tuple[Tensor, Tensor, Tensor]]
    # `SlotCache.move`: addresses of stores [M], one of them, length [R,1], source [R,D], target [D]
    move: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    races: bool = field(default=True, kw_only=True)  # does the trunk take noise?


@dataclass(frozen=True)
class Quick(Branches):
    """All of them, for whole rounds that are captured."""

    # `Choice.pick` and `Choice.guess`: logits [R,Q,V], heat [R], key [R], position [R,Q], broken, into [R,Q], done ->
    # [R,Q]. The best, or, where a row's heat is not 0, the winner of score / heat + Gumbel noise; `broken` where none
    # can be chosen. into: where to write it. done: zeros to count with, R*Q at least; zeros again when it is over.
    race: Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None, int, Tensor | None, Tensor | None], Tensor]
    # rule `ratio` on chains: logits, tokens, the draft's logits, count, heat, keys, length -> emitted, accepted
    judge: Callable[
        [Tensor, Tensor, Tensor | None, Tensor | None, Tensor, tuple[Tensor, Tensor], Tensor], tuple[Tensor, Tensor]
    ]
    # rule `match` on chains: tokens [R,N], count [R], picks [R,1+N] -> emitted [R,1+N], accepted [R,1]
    follow: Callable[[Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor]]
    lay: Lay
    # lengths [R,1], ends [R,1], depth -> the next 1 + depth positions [R,1+depth], drafted tokens at most [R]
    begin: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
    write: Write
    # `ScriptedModel`: logits [R,K,V] of the last K ids, the script [V,D], ids, position [R,Q], length [R,1], loudness
    say: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], None]


QUICK: dict[str, Quick] = {}  # by the type of a device
BRANCHES: dict[str, Branches] = {}  # of those that have no others


def branches_of(device: str) -> Branches | None:
    """What a type of device has for trees."""
    return QUICK.get(device) or BRANCHES.get(device)
