"""The interfaces of drafters, rules and readers, and the types that they exchange with the loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.common.registry import Registry
from paceline.core.beam_search import Grouped
from paceline.core.choice import Choice, Draw
from paceline.core.device_ops import DeviceOps
from paceline.core.device_ops import arange as arange
from paceline.core.sampling import Cursor
from paceline.core.tree import Drawn, TokenTree
from paceline.core.verdict import Verdict


@dataclass(frozen=True)
class Budget:
    """The largest draft of a round: `depth` tokens in a row and `nodes` in all. `limits`: the depth that each row can
    still use."""

    depth: int
    nodes: int
    limits: tuple[int, ...]
    draw: Draw = "coupled"
    branches: bool = True  # trees are allowed, not only chains


class RowsView(Protocol):
    """The live rows as drafters and readers see them: tensors for the device, lists for the host."""

    text: Tensor  # [R,T] committed tokens; arbitrary values past `length`
    length: Tensor  # [R,1] number of committed tokens
    lengths: list[int]  # `length` as a list on the host

    @property
    def ops(self) -> DeviceOps:
        """Return the device operations of the target."""
        ...

    @property
    def bound(self) -> int | None:
        """Return an upper limit of all lengths inside a CUDA graph; every entry of `lengths` is this limit there. None:
        `lengths` is exact."""
        ...

    @property
    def histories(self) -> list[list[int]]:
        """Return the committed tokens of each row as lists, for drafters on the host."""
        ...

    @property
    def count(self) -> int: ...

    @property
    def capacity(self) -> int:
        """Return how many rows a KV cache needs."""
        ...

    @property
    def room(self) -> int:
        """Return how many KV slots the longest row may need, with its draft."""
        ...

    @property
    def settled(self) -> list[int]:
        """Return how many tokens of each row are final: all committed tokens; while `staged` drafts, not its own."""
        ...

    @property
    def predictions(self) -> list[list[int] | None]:
        """Return the output that the caller of each row expects, if given (see `prediction`)."""
        ...

    @property
    def owners(self) -> list[str]:
        """Return the owner of each row. A drafter must not draft from the texts of another owner."""
        ...

    @property
    def cursors(self) -> Sequence[Cursor | None]:
        """Return the cursor of each row in its constraint, for example a grammar. None: the row has no constraint."""
        ...

    def choice(self, depth: Tensor | slice | TokenTree, path: tuple[Tensor, Tensor] | None = None) -> Choice:
        """Return the choice at the positions `depth` tokens past the committed text, or after the text and after every
        node of a tree. `path` = (tokens [R,M], member [R,Q,M]): the uncommitted tokens before each position. Give it if
        a control needs the prefix (`needs_path`)."""
        ...

    @property
    def needs_path(self) -> bool: ...


@dataclass(frozen=True)
class Reading:
    """The output of a forward pass: logits [R,Q,V], and the hidden states [R,Q,D] that were tapped."""

    logits: Tensor
    taps: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class PromptTaps:
    """Hidden states of prompts: `taps` [R,Q,D] of the rows from `first` on, at the positions from `start` on. Values
    past the end of a prompt are arbitrary."""

    first: int
    start: int
    taps: tuple[Tensor, ...]


@dataclass(frozen=True)
class Prefilled:
    """The input of a drafter for a prompt that the KV cache holds already: the hidden states of the pieces that were
    read, and the stored states of the prefix that was not read (see `core.protocols.KeepsStates`). in_pieces: the
    drafter reads the prompt later, in pieces, if it can (see `core.protocols.CatchesUp`)."""

    taps: Sequence[PromptTaps]
    states: Any = None
    in_pieces: bool = False


NODES = 64  # the default size of a tree


class Reader(Protocol):
    """Reads a batch with a model. Its KV cache can discard drafted tokens."""

    prompt_taps: list[PromptTaps]  # the taps of the last `begin`: of every prompt token except the last one

    @property
    def branches(self) -> bool:
        """Return whether the reader can read trees, not only chains."""
        ...

    @property
    def storage_version(self) -> Hashable:
        """Return a value that changes when the KV cache is allocated again."""
        ...

    @property
    def capturable(self) -> bool:
        """Return whether a CUDA graph can hold its forward passes: they make no host read, and no shape depends on the
        texts."""
        ...

    def begin(self, rows: RowsView, first: int, room: int) -> int:
        """Read the prompts of the rows from `first` on, except the last tokens. Return how many tokens the next
        `extend` must read."""
        ...

    def extend(
        self, rows: RowsView, width: int, tokens: Tensor | None = None, parents: Tensor | None = None
    ) -> Reading:
        """Read the last `width` committed tokens of every row, and then the scratch `tokens` [R,Q].

        Scratch tokens are numbered from 0 since the last `keep`. `parents` [R,Q] holds such numbers (-1: the text);
        None continues a chain. The logits are those of the last committed token (if width > 0) and of all scratch
        tokens.
        """
        ...

    def reorder(self, rows: RowsView, source: Sequence[int]) -> None:
        """Make row r a copy of row source[r], with its scratch tokens. The loop calls this before `keep`, while `rows`
        are still in the old order."""
        ...

    def keep(self, rows: RowsView, path: Tensor | None) -> None:
        """Keep the scratch tokens `path` [R,D], in this order, and discard the others. None: the draft is a chain, and
        its tokens are in the right slots already. The loop calls this before the rows commit."""
        ...

    def release(self, row: int, last: int, length: int) -> None:
        """Remove row `row`, which has ended. Row `last`, of `length` tokens, takes its index."""
        ...


@runtime_checkable
class ReadsPieces(Protocol):
    """A reader that can read a prompt in pieces, into a row of its KV cache that is not in the batch yet."""

    prompt_taps: list[PromptTaps]
    cache: Any  # the KV cache

    @property
    def piece(self) -> int:
        """Return the largest number of prompt tokens in one forward pass."""
        ...

    @property
    def grid(self) -> int:
        """Return a number: each piece begins at a multiple of it and ends at the next one or at the prompt's end."""
        ...

    @property
    def scores(self) -> bool:
        """Return whether `read_piece` can return logits (`scored`)."""
        ...

    def begin(self, rows: RowsView, first: int, room: int, prefilled: bool = False) -> int:
        """See `Reader.begin`. prefilled: the KV cache holds the prompts of these rows already."""
        ...

    def read_piece(self, first: int, ids: Tensor, start: int, scored: bool = False) -> Reading:
        """Read the tokens `ids` [R,Q] into the rows from `first` on of the KV cache, from the position `start` on. With
        `scored`, the logits are those of all these tokens; otherwise the logits have no meaning."""
        ...

    def reserve_rows(self, rows: int, slots: int) -> None:
        """Allocate a KV cache with at least this number of rows and slots."""
        ...

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of a row to another row."""
        ...

    def swap_rows(self, one: int, other: int, length: int) -> None:
        """Exchange the first `length` slots of two rows."""
        ...


class Drafter(ABC):
    """Proposes tokens for the target to verify. Each method is one file that registers its class with
    `DRAFTERS.register`. No draft changes the text of the target. `core.protocols` has the optional interfaces, for
    example for drafters that read hidden states, run inside a CUDA graph or follow beams.
    """

    name: ClassVar[str] = "unnamed"
    Options: ClassVar[type]  # a small dataclass: its fields are the options in Python and on the command line

    def check(self, target: Any) -> None:  # noqa: B027
        """Raise `UnsupportedError` for a target that this drafter cannot draft for."""

    def open(self, target: Any, rows: RowsView) -> None:  # noqa: B027
        """Begin a batch. `target` is the LanguageModel that verifies the drafts."""

    def admit(self, rows: RowsView, first: int) -> None:  # noqa: B027
        """Begin the rows from `first` on: they are new in the batch."""

    @abstractmethod
    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        """Return a draft for every row, within the budget."""

    def keep(self, rows: RowsView, verdict: Verdict, reading: Reading) -> None:  # noqa: B027
        """Take the verdict on the draft. `reading` is the target's forward pass. The rows commit the verdict next."""

    def release(self, row: int, last: int, length: int) -> None:  # noqa: B027
        """Remove row `row`, which has ended. Row `last`, of `length` tokens, takes its index."""

    def reset_copy(self) -> Drafter | None:
        """Return a new drafter with the same options, models and heads, but without the state that it learned from
        texts. A drafter without such state can return itself. None: it has no `options`, so no copy can be made."""
        options = getattr(self, "options", None)
        return None if options is None else type(self)(options)  # type: ignore[call-arg]

    def describe(self) -> str:
        """Return one short phrase with the name and the main options."""
        return self.name


class Rule(ABC):
    """Decides which drafted tokens are kept: a pure function of the draft, the logits and the choice."""

    name: ClassVar[str] = "unnamed"
    # what the rule keeps unchanged: "text", "law" (the distribution), "beam" (the result of a beam search), "" if lossy
    exact: ClassVar[str] = "text"
    draw: Draw = "coupled"  # how drafters should draw
    judges: ClassVar[tuple[Drawn, ...]] = ("certain", "coupled", "iid", "without_replacement")
    branches: ClassVar[bool] = True  # verifies trees, not only chains
    on_device: ClassVar[bool] = True  # verifies without a host read
    num_beams: int = 1  # for a request that gives no number

    @dataclass(frozen=True)
    class Options:
        """The options of the rule. Most rules have none."""

    def __init__(self, options: Any = None) -> None:
        self.options = options or self.Options()

    def open(self, rows: Grouped) -> None:  # noqa: B027
        """Begin a batch. `rows.beams` names the rows of each beam search."""

    @abstractmethod
    def verify(self, tree: TokenTree, logits: Tensor, choice: Choice) -> Verdict:
        """Return the accepted path and the next token. logits [R,1+N,V]: those of the last committed token and of every
        node. Only a rule with `on_device = False` may read tensors on the host."""


def choice_after(rows: RowsView, tree: TokenTree) -> Choice:
    """Return the choice at the positions after the text and after every node of the draft `tree`."""
    depth = slice(0, tree.nodes + 1) if tree.is_chain else tree
    if not rows.needs_path or tree.nodes == 0:
        return rows.choice(depth)
    return rows.choice(depth, (tree.tokens, torch.nn.functional.pad(tree.ancestors, (0, 0, 1, 0))))


DRAFTERS: Registry[Drafter] = Registry("drafter", "paceline.drafters")
RULES: Registry[Rule] = Registry("rule", "paceline.rules")
