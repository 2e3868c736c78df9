"""The contracts: what a drafter, a rule and a reader promise, and what the loop may ask them."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from paceline.common.errors import InputError
from paceline.core.beam_search import Grouped
from paceline.core.choice import Choice, Draw
from paceline.core.registry import Registry
from paceline.core.tree import Drawn, TokenTree
from paceline.core.verdict import Verdict

# ---- The contracts: what a drafter, a rule and a reader promise, and what the loop may ask them


@dataclass(frozen=True)
class Budget:
    """What one round may draft: `depth` tokens in a row, `nodes` in all; `limits`: the depth each row can still use."""

    depth: int
    nodes: int
    limits: tuple[int, ...]
    draw: Draw = "coupled"
    branches: bool = True  # may it be a tree, or only chains?


class RowsView(Protocol):
    """The live rows as drafters and readers see them: tensors for the device, lists for the host."""

    text: Tensor  # [R,T] committed tokens; garbage past `length`
    length: Tensor  # [R,1] number of committed tokens
    lengths: list[int]  # the same on the host

    @property
    def bound(self) -> int | None:
        """Of a captured program: no text is longer, and `lengths` say no more than that. None: they are exact."""
        ...

    @property
    def histories(self) -> list[list[int]]:
        """The same tokens on the host, for drafters that work there."""
        ...

    @property
    def count(self) -> int: ...

    @property
    def capacity(self) -> int:
        """Rows that memories should have room for: there may soon be so many."""
        ...

    @property
    def room(self) -> int:
        """Slots that the longest of them may need, drafts included."""
        ...

    @property
    def settled(self) -> list[int]:
        """How many tokens of each text will stay: all of them, but for a draft inside a draft (see `staged`)."""
        ...

    @property
    def predictions(self) -> list[list[int] | None]:
        """What each row's caller expects to be written, where it said so (see `prediction`)."""
        ...

    def choice(self, depth: Tensor | slice | TokenTree, path: tuple[Tensor, Tensor] | None = None) -> Choice:
        """The places `depth` tokens past the committed text, or after it and after every node of a tree. `path` =
        (tokens [R,M], member [R,Q,M]): which of the uncommitted tokens precede each place; only looked at when a
        control needs the prefix (`needs_path`)."""
        ...

    @property
    def needs_path(self) -> bool: ...


@dataclass(frozen=True)
class Reading:
    """What a model said: logits [R,Q,V], and the hidden states [R,Q,D] that were tapped."""

    logits: Tensor
    taps: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class PromptTaps:
    """What the target thought while it read a prompt: taps [R,Q,D] of positions start... of the rows `first`...; past
    the end of a row they are garbage."""

    first: int
    start: int
    taps: tuple[Tensor, ...]


NODES = 64  # of a tree, in all, where nobody says otherwise


class Reader(Protocol):
    """A model reading a batch of texts with a memory it can forget."""

    prompt_taps: list[PromptTaps]  # of the last `begin`, where taps were asked for: all the prompt but its last token

    @property
    def branches(self) -> bool:
        """May it be given trees, or chains only?"""
        ...

    @property
    def storage_version(self) -> int:
        """Another number whenever its memory is another one."""
        ...

    @property
    def capturable(self) -> bool:
        """Can what it does for rows with a `bound` be captured: no host read, no shape that depends on the texts?"""
        ...

    def begin(self, rows: RowsView, first: int, room: int) -> int:
        """Read the new rows `first`... but for a last piece; returns how many tokens the next `extend` must read."""
        ...

    def extend(
        self, rows: RowsView, width: int, tokens: Tensor | None = None, parents: Tensor | None = None
    ) -> Reading:
        """Read the last `width` committed tokens of every row and then scratch `tokens` [R,Q].

        Scratch tokens are numbered from 0 since the last `keep`; `parents` [R,Q] points among them (-1: the text), and
        None continues a chain. The logits are of the last committed token (if width > 0) and of every scratch token.
        """
        ...

    def reorder(self, rows: RowsView, source: Sequence[int]) -> None:
        """Row r becomes a copy of row source[r], its scratch tokens too. Called before `keep`, while `rows` are still
        as they were."""
        ...

    def keep(self, rows: RowsView, path: Tensor | None) -> None:
        """Make the scratch tokens `path` [R,D] permanent, in that order, and forget the others (None: the chain stays
        in place, as far as it will be committed). Called before the rows commit."""
        ...

    def release(self, row: int, last: int, length: int) -> None:
        """Row `row` is gone; row `last` (of `length` tokens) takes its place."""
        ...


class Drafter(ABC):
    """Guesses what the target will write next. One file per method; it registers itself with `DRAFTERS.register`.

    A drafter never decides anything: whatever it proposes, the text stays the target's. Rows come and go: `admit` is
    told of rows `first...`, and when `release` is called the last row takes the place of the released one.
    """

    name: ClassVar[str] = "unnamed"
    Options: ClassVar[type]  # a small dataclass; its fields are the API's and the command line's options
    speculates: ClassVar[bool] = True  # false for the one that drafts nothing
    on_device: ClassVar[bool] = False  # proposes from device tensors without a host read, and is trusted to be valid
    shares_reader: ClassVar[bool] = False  # may bring a reader of the target along (`reader`)
    wants_verdict: ClassVar[bool] = True  # `keep` does something; inside a portfolio it is not worked out for others
    holds_drafters: ClassVar[bool] = False  # made with (options, device): the models of those inside belong there too
    by_clock: ClassVar[bool] = False  # what it drafts depends on how long things take
    chooses_length: ClassVar[bool] = False  # decides itself how much to draft; γ is only a limit
    reasons: Sequence[str] = ()  # of the last proposal, per row: why so much and by whom (for the trace)
    model_seconds: float = 0.0  # of the last proposal: what models took that it was decided to ask
    prior_acceptance: float | None = None  # for drafters that run a model: how often a token is right, before one knows
    uses_all_nodes: bool = False  # its trees grow as large as they may, and nobody has said how large
    graph_key: int = 0  # where what it does inside captured programs may change: another number, another program
    depth: int | None = None  # drafted in a row at most where it chooses the length and nobody has said γ
    home: Any = None  # the mark of the loop that opened it last; only that loop may go on with its state
    takes_prediction: bool = False  # drafts from `rows.predictions`
    needs_taps: tuple[float, ...] = ()  # relative depths of the target's hidden states it wants to see

    def inside(self) -> Sequence[Drafter]:
        """The drafters that this one calls: its attributes that are drafters. One that keeps them elsewhere says so."""
        return [value for value in vars(self).values() if isinstance(value, Drafter)]

    def all_inside(self) -> list[Drafter]:
        """The drafters inside this one, and those inside them; each once."""
        found: dict[int, Drafter] = {}
        waiting = list(self.inside())
        while waiting:
            each = waiting.pop(0)
            if each is not self and id(each) not in found:
                found[id(each)] = each
                waiting += each.inside()
        return list(found.values())

    @classmethod
    def replay_needs(cls, options: Any) -> str | None:
        """What its drafts need beyond the tokens of a text and the caller's prediction, in a few words; None: nothing,
        so that they can be made again without the target (`bench.replaying.replay`)."""
        return "a model's logits"

    def check(self, target: Any) -> None:  # noqa: B027
        """Refuse, with `UnsupportedError`, a target this drafter cannot draft for."""

    def resolve_for(self, target: Any, rule: Rule) -> Drafter:
        """Who drafts in its stead for this target and rule, once it was checked: itself, unless it knows better."""
        return self

    def reader(self, target: Any) -> Reader | None:
        """A reader of the target that this drafter shares with the loop (early exit), or None."""
        return None

    def open(self, target: Any, rows: RowsView) -> None:  # noqa: B027
        """A batch begins. `target` is the LanguageModel that will judge."""

    def admit(self, rows: RowsView, first: int) -> None:  # noqa: B027
        """Rows `first` and after are new."""

    def observe_prompt(self, rows: RowsView, taps_piece: PromptTaps) -> None:  # noqa: B027
        """Before `admit`, for drafters that need taps: a piece of the prompts as the target read it."""

    @abstractmethod
    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        """A draft for every row, within the budget."""

    def keep(self, rows: RowsView, verdict: Verdict, reading: Reading) -> None:  # noqa: B027
        """What was decided, on the device, before the rows commit it; `reading` is the target's pass over the draft."""

    def reorder(self, rows: RowsView, source: Sequence[int]) -> bool:
        """Row r goes on as a copy of row source[r], with the draft just made (beam search); `rows` are still as they
        were, and `keep` follows. False: this drafter does not follow; it is not told `keep`, and begins anew
        (`restart`) when the round is committed."""
        return False

    def restart(self, rows: RowsView, count: int) -> None:
        """It has not followed `count` rows that changed places: they and whatever rows are new begin here, with the
        texts they have now. None of them has ended, so nothing is learned from them as if it had."""
        for row in range(count - 1, -1, -1):
            self.release(row, row, rows.lengths[row])
        self.admit(rows, 0)

    def graphable(self, longest: int) -> bool:
        """May its drafts for texts of up to `longest` tokens be made inside a captured program? Then `propose` and
        `keep` look at nothing on the host where `rows.bound` says so, and hold what they need from one round to the
        next in tensors that stay where they are (`storage_version` says when they did not)."""
        return False

    @property
    def storage_version(self) -> int:
        """Another number whenever its tensors are others, for programs that use them."""
        return 0

    def on_replay(self) -> None:  # noqa: B027
        """A captured round has passed, with nothing of this object's code run."""

    def on_round_read(self, tokens: Sequence[int], away: float) -> None:  # noqa: B027
        """A round was read on the host: so many tokens per row. The next may have begun already. away: seconds since
        the last one that whoever takes the tokens spent with them."""

    def rewind(self, lengths: list[int]) -> None:  # noqa: B027
        """The texts were cut back to these lengths: inside another drafter. Stores learn only what is `settled`."""

    def release(self, row: int, last: int, length: int) -> None:  # noqa: B027
        """Row `row` is gone; row `last` (of `length` tokens) takes its place."""

    def reset_copy(self) -> Drafter | None:
        """The same drafter, as if it had never seen a text: made again from its `options`; itself, where it learns
        nothing. Whoever holds something slow to make that knows no text (a model made out of the target, a head read
        from a file) hands it on. None: it has no such attribute, and whoever made it must make it again."""
        options = getattr(self, "options", None)
        return None if options is None else type(self)(options)  # type: ignore[call-arg]

    def describe(self) -> str:
        """One short phrase for the line that says what speculates with what."""
        return self.name


class Rule(ABC):
    """Decides what of a draft is kept. A pure function of the draft, the logits and the choice at hand."""

    name: ClassVar[str] = "unnamed"
    exact: ClassVar[str] = "text"  # what it keeps: "text", "law", "beam" (the result of beam search), or "" when lossy
    draw: Draw = "coupled"  # how it wants drafts to be drawn
    judges: ClassVar[tuple[Drawn, ...]] = ("certain", "coupled", "iid", "without_replacement")
    branches: ClassVar[bool] = True  # can it judge trees, or chains only?
    on_device: ClassVar[bool] = True  # judges without a host read
    num_beams: int = 1  # of a request that does not say

    @dataclass(frozen=True)
    class Options:
        """The rule's own settings; most have none."""

    def __init__(self, options: Any = None) -> None:
        self.options = options or self.Options()

    def open(self, rows: Grouped) -> None:  # noqa: B027
        """A batch begins. For a rule that decides about rows together: which of them are one search."""

    @abstractmethod
    def verify(self, tree: TokenTree, logits: Tensor, choice: Choice) -> Verdict:
        """logits [R,1+N,V]: of the last committed token and of every node. Must not read anything to the host
        (but for a rule that walks there, and says so)."""


def choice_after(rows: RowsView, tree: TokenTree) -> Choice:
    """The places after the text and after every node of a draft."""
    depth = slice(0, tree.nodes + 1) if tree.is_chain else tree
    if not rows.needs_path or tree.nodes == 0:
        return rows.choice(depth)
    return rows.choice(depth, (tree.tokens, torch.nn.functional.pad(tree.ancestors, (0, 0, 1, 0))))


DRAFTERS: Registry[Drafter] = Registry("drafter", "paceline.drafters")
RULES: Registry[Rule] = Registry("rule", "paceline.rules")


def arange(start: int, stop: int, device: torch.device) -> Tensor:
    """The numbers start..stop-1: a constant if short, else a piece of one long table; rounds need them often."""
    if stop - start <= 64 and start <= 64:
        known = _SHORT.get((start, stop, device))
        if known is None:
            known = _SHORT[(start, stop, device)] = torch.arange(start, stop, device=device)
        return known
    table = _LONG.get(device)
    if table is None or stop + _BEFORE > table.shape[0] or start < -_BEFORE:
        if start < -_BEFORE:
            return torch.arange(start, stop, device=device)
        table = _LONG[device] = torch.arange(-_BEFORE, max(2 * stop, 4096), device=device)
    return table[start + _BEFORE : stop + _BEFORE]


_BEFORE = 4096
_SHORT: dict[tuple[int, int, torch.device], Tensor] = {}
_LONG: dict[torch.device, Tensor] = {}


# ---- One batch at a time: a drafter holds the state of the rows that it drafts for

_SLOT = "_claim"  # the attribute of a drafter in which its batch stands


class _Claim:
    """A batch, and the drafters that are its own. A copy of a drafter has another id, so that it is not claimed."""

    def __init__(self) -> None:
        self.ids: set[int] = set()


@contextmanager
def claimed(drafter: Drafter) -> Iterator[None]:
    """The drafter, and all drafters inside it, belong to one batch. Raises `InputError` where one has a batch already.

    A drafter that never speculates holds no state, so that any number of batches may share it."""
    claim, taken = _Claim(), list[Drafter]()
    try:
        for each in (drafter, *drafter.all_inside()) if drafter.speculates else ():
            if not _take(each, claim):
                gc.collect()  # a stream that was dropped in a reference cycle still holds its drafter
                if not _take(each, claim):
                    raise InputError(
                        f"Drafter '{each.name}' already drafts for another batch. Make a second drafter object, or "
                        "wait until that batch ends."
                    )
            taken.append(each)
        yield
    finally:
        for each in taken:
            each.__dict__.pop(_SLOT, None)


def _take(drafter: Drafter, claim: _Claim) -> bool:
    claim.ids.add(id(drafter))
    holder = drafter.__dict__.setdefault(_SLOT, claim)  # one step, so that of two threads one is first
    if holder is not claim and id(drafter) not in holder.ids:  # the mark was copied with the drafter
        drafter.__dict__[_SLOT] = holder = claim
    return holder is claim
