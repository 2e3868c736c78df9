"""Several drafters under one roof: who they are, what they have been worth, and what each is told of a round."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from paceline.common.errors import DrafterError, PacelineWarning, UnsupportedError
from paceline.core.contracts import Budget, Drafter, PromptTaps, Reader, Reading, RowsView
from paceline.core.protocols import (
    Adaptive,
    DraftsOnDevice,
    HoldsDrafters,
    NeedsHiddenStates,
    Reorderable,
    Rewindable,
    RunsModel,
    SharesReader,
    TakesPrediction,
    prior_acceptance,
    reads_verdicts,
    reorder,
    restart,
    rewind,
    takes_prediction,
    taps_of,
)
from paceline.core.tree import TokenTree, check_row
from paceline.core.verdict import NOTHING, Verdict
from paceline.drafters.adaptive.stats import Draft, Drafted, Ledger, Mean
from paceline.drafters.lookup.recycling import READ, UNREAD, WRITTEN, accepted_nodes, of_rows
from paceline.drafters.resolve import make_drafter

# ---- What a member of a portfolio is told: the round in terms of its own draft, not of the tree that was read


@runtime_checkable
class ForwardObserver(Protocol):
    """A drafter that learns from whatever the target says, whoever drafted it: then it is told all of a pass."""

    def observe_forward(self, tokens: Tensor, logits: Tensor, standing: Tensor) -> None: ...


@runtime_checkable
class ListProposer(Protocol):
    """A drafter whose drafts are lists before they are tensors (`host.ListDrafter`)."""

    def propose_lists(self, rows: RowsView, budget: Budget, branching: bool = True) -> list[Drafted]: ...


@dataclass
class Proposal:
    """What a member drafted: a tree per row on the host, or laws of its own, of which nothing was looked at."""

    given: TokenTree | None  # None: as `drafts` say
    taps: tuple[int, ...] = ()  # which of the portfolio's taps are the member's
    drafts: list[Draft] = field(default_factory=list)  # per row; empty where the tree has laws of its own
    whole: bool = False  # this very tree was read, alone

    @property
    def tree(self) -> TokenTree:
        """As tensors: of drafts that were lists, when somebody asks for them."""
        if self.given is None:
            self.given = TokenTree.from_rows([(draft.tokens, draft.parents) for draft in self.drafts], "cpu")
        return self.given

    @property
    def drawn(self) -> str:
        return "certain" if self.given is None else self.given.drawn

    def reorder(self, source: Sequence[int]) -> None:
        """Row r goes on as a copy of row source[r]. Of the tree itself only the shape is asked for later."""
        self.drafts = [self.drafts[other] for other in source] if self.drafts else []


@dataclass(frozen=True)
class Outcome:
    """What was decided, on the host: per row the emitted tokens, and the accepted nodes of the tree that was read."""

    emitted: list[list[int]]
    paths: list[list[int]]

    @staticmethod
    def of(verdict: Verdict) -> Outcome:
        """One read; none of a chain's lengths, which show in what was emitted."""
        width, paths = verdict.emitted.shape[1], []
        whole = verdict.emitted if verdict.path is None else torch.cat([verdict.emitted, verdict.path], 1)
        emitted: list[list[int]] = []
        for line in whole.tolist():
            words = line[:width]
            count = words.index(NOTHING) if NOTHING in words else width
            emitted.append(words[:count])
            paths.append(list(range(count - 1)) if verdict.path is None else line[width : width + count - 1])
        return Outcome(emitted, paths)

    def own_paths(self, proposal: Proposal) -> list[list[int]]:
        """Per row, the nodes of a member's own tree that were accepted: a beginning of the accepted path."""
        if proposal.whole:
            return self.paths
        if not proposal.drafts:
            return [[] for _ in self.paths]
        rows = zip(proposal.drafts, self.emitted, self.paths, strict=True)
        return [draft.follow(words[: len(path)], 0) for draft, words, path in rows]

    def known_to(self, proposal: Proposal, lengths: Sequence[int]) -> list[int]:
        """How far a memory by position is right after the round: of tokens that others drafted it has read nothing."""
        rows = zip(lengths, self.own_paths(proposal), self.paths, strict=True)
        return [start + len(own) + (len(own) == len(path)) for start, own, path in rows]


def drafts_of(tree: TokenTree, count: int, limits: tuple[int, int, int] | None) -> list[Draft]:
    """A member's tree on the host. One from there is not trusted, like that of any drafter on the host: `limits` are
    the vocabulary, and the nodes and the depth it may have."""
    columns = [tree.tokens]
    columns += [tree.parents] if tree.parents is not None else []
    columns += [tree.count.unsqueeze(1)] if tree.count is not None else []
    N, chain = tree.nodes, list(range(-1, tree.nodes - 1))
    own = []
    for line in (torch.cat(columns, 1) if len(columns) > 1 else tree.tokens).tolist():  # one read
        used = N if tree.count is None else line[-1]
        own.append((line[:used], (chain if tree.parents is None else line[N : 2 * N])[:used]))
    return checked_drafts(own, count, limits)


def checked_drafts(own: Sequence[Drafted], count: int, limits: tuple[int, int, int] | None) -> list[Draft]:
    """The same of lists."""
    if len(own) != count:
        raise DrafterError(f"A draft has {len(own)} rows for {count} texts.")
    if limits is not None:
        for row, (words, above) in enumerate(own):
            check_row(words, above, limits, row)
    return [Draft(*each) for each in own]


def view_of(proposal: Proposal, outcome: Outcome, verdict: Verdict, reading: Reading) -> tuple[Verdict, Reading]:
    """The verdict on a member's own tree, and what the target said at its own nodes (NaN where it was not asked).

    Members with taps follow the target's thoughts along the whole text: what it thought at tokens that others drafted
    is put where the member's own, unaccepted nodes were, in the order of the path."""
    if proposal.whole:
        return verdict, Reading(reading.logits, tuple(reading.taps[tap] for tap in proposal.taps))
    own, tree = outcome.own_paths(proposal), proposal.tree
    wheres = [draft.where for draft in proposal.drafts] or [[]] * len(own)
    places = [[0, *(node + 1 if node >= 0 else -1 for node in where)] for where in wheres]
    thoughts, shown = places, own
    if proposal.taps:
        shown = [_stand_in(*paths, tree) for paths in zip(own, outcome.paths, strict=True)]
        thoughts = [_replaced(*row) for row in zip(places, shown, outcome.paths, strict=True)]
    device = verdict.accepted.device
    path = None if tree.is_chain else torch.tensor(_even(shown, 0), dtype=torch.int64, device=device)
    accepted = torch.tensor([[len(nodes)] for nodes in own], device=device)
    least = 1 + tree.nodes
    said = _OwnReading(reading, _even(places, -1, least), _even(thoughts, -1, least), proposal.taps)
    return Verdict(verdict.emitted, accepted, path), said


def _stand_in(own: list[int], full: list[int], tree: TokenTree) -> list[int]:
    """The accepted path with the member's own numbers: of a chain they go on, else unaccepted nodes are lent."""
    if tree.is_chain:
        return list(range(len(full)))
    lent = [node for node in range(tree.nodes) if node not in own]
    return own + lent[: len(full) - len(own)]


def _replaced(places: list[int], path: list[int], full: list[int]) -> list[int]:
    """`places` with the nodes of the accepted path where `path` says."""
    found = places + [-1] * (max(path, default=-1) + 2 - len(places))
    for node, read in zip(path, full, strict=False):  # a small tree has not enough nodes to lend
        found[node + 1] = read + 1
    return found


def _even(lists: list[list[int]], filling: int, least: int = 1) -> list[list[int]]:
    most = max(least, *map(len, lists))
    return [each + [filling] * (most - len(each)) for each in lists]


class _OwnReading(Reading):
    """Gathered when somebody looks: most members never do, and logits are large."""

    def __init__(
        self, whole: Reading, places: list[list[int]], thoughts: list[list[int]], taps: tuple[int, ...]
    ) -> None:
        for name, value in (("_whole", whole), ("_places", places), ("_thoughts", thoughts), ("_own", taps)):
            object.__setattr__(self, name, value)

    _whole: Reading
    _places: list[list[int]]
    _thoughts: list[list[int]]
    _own: tuple[int, ...]

    @cached_property
    def logits(self) -> Tensor:  # type: ignore[override]
        return _gathered(self._whole.logits, self._places)

    @cached_property
    def taps(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(_gathered(self._whole.taps[tap], self._thoughts) for tap in self._own)


def _gathered(values: Tensor, places: list[list[int]]) -> Tensor:
    """values [R,Q,V] at places [R,P]; NaN at -1."""
    index = torch.tensor(places, device=values.device).unsqueeze(-1)
    found = values.gather(1, index.clamp(min=0).expand(*index.shape[:2], values.shape[2]))
    return found.masked_fill(index < 0, float("nan"))


def all_of(rows: RowsView, tree: TokenTree | None, verdict: Verdict, reading: Reading) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens [R,1+N] a pass has read, what the target said after them, and their standing (see `recycling`)."""
    tokens = rows.text.gather(1, rows.length - 1)
    standing = torch.full_like(tokens, WRITTEN)
    if tree is None or not tree.nodes:
        return tokens, reading.logits, standing
    tree = tree.clean().to(rows.text.device)
    below = torch.full_like(tree.tokens, READ)
    if tree.in_use is not None:
        below = below.where(tree.in_use, UNREAD)
    standing = torch.cat([standing, accepted_nodes(verdict, below)], 1)
    return torch.cat([tokens, tree.tokens], 1), reading.logits, standing


# ---- The members of a portfolio: a drafter each, and what it has been worth

_RARELY = 32  # rounds after which even the worst is asked again


@dataclass
class Account:
    """What one member has been worth, over all rows."""

    ledger: Ledger = field(default_factory=Ledger)
    alone: Mean = field(default_factory=Mean)  # tokens in a row that nobody else had
    cost: Mean = field(default_factory=Mean)  # of a proposal
    asked: int = 0
    last: int = 0  # the round it was last asked in
    led: int = 0  # rounds it was asked first, where only one may draft
    absorbing: Mean = field(default_factory=Mean)  # seconds of learning from a pass, where it does that
    tried: int = 0  # rounds in a row it was asked without paying
    wait: int = 64  # rounds before it is tried again, then
    helped: Mean = field(default_factory=Mean)  # tokens that nobody before it had, less what it cost to read its nodes
    spread: Mean = field(default_factory=lambda: Mean(1.0, 1.0))  # nodes per depth of its trees that are read whole
    pause: int = 1  # rounds before it is asked again, while it does not pay


@dataclass
class Member:
    """One drafter of a portfolio."""

    drafter: Drafter
    title: str
    number: int
    taps: tuple[int, ...] = ()  # which of the portfolio's taps are its own
    lost: bool = False  # it failed in this batch
    fresh: bool = True  # rows are new to it: its next proposal takes longer than others
    behind: bool = False  # it has not followed rows that changed places
    shares: bool = False  # it brought the reader of the target
    has_laws: bool = False  # it draws from laws of its own where it is asked to
    account: Account = field(default_factory=Account)

    @property
    def dear(self) -> bool:
        """It runs a model, so that asking costs passes."""
        return prior_acceptance(self.drafter) is not None

    @cached_property
    def absorber(self) -> ForwardObserver | None:
        """The drafter, if it is told all of a pass instead of what became of its own draft."""
        return self.drafter if isinstance(self.drafter, ForwardObserver) else None

    @cached_property
    def rewinds(self) -> bool:
        """Has it a memory by position?"""
        return isinstance(self.drafter, Rewindable)

    @cached_property
    def lister(self) -> ListProposer | None:
        """The drafter, if its drafts are lists."""
        return self.drafter if isinstance(self.drafter, ListProposer) else None

    def tell(self, proposal: Proposal, rows: RowsView, outcome: Outcome, verdict: Verdict, reading: Reading) -> None:
        """What became of its own tree; and, where its memory goes by position, how far that is right now."""
        if self.absorber is None and reads_verdicts(self.drafter):
            self.drafter.keep(rows, *view_of(proposal, outcome, verdict, reading))
        if self.rewinds and not self.shares:  # a reader that is shared is kept by the loop itself
            rewind(self.drafter, outcome.known_to(proposal, rows.lengths))


def credit(asked: Sequence[tuple[Member, Proposal]], outcome: Outcome, books: Sequence[Sequence[Ledger]]) -> None:
    """By what would have come true, whether or not it was in the tree; of a tree with laws, by what did. `books` are
    per row and member."""
    for row, words in enumerate(outcome.emitted):
        gains = []
        for member, proposal in asked:
            book, account = books[row][member.number], member.account
            if proposal.drafts:
                draft = proposal.drafts[row]
                path = draft.follow(words, book.run, (book, account.ledger))
                book.run = draft.run_after(path, words, book.run)
                gain = len(path)
            elif proposal.whole:
                gain = len(outcome.paths[row])
                for ledger in (book, account.ledger):
                    ledger.see_chain(proposal.tree.reach, gain, book.run)
                book.run = book.run + gain if gain == proposal.tree.reach else 0
            else:
                continue
            gains.append((gain, account))
            book.gain.see(gain)
            account.ledger.gain.see(gain)
        for place, (gain, account) in enumerate(gains):
            others = max([other for i, (other, _) in enumerate(gains) if i != place], default=0)
            account.alone.see(max(0, gain - others))
            account.pause = min(_RARELY, 2 * account.pause) if gain <= others else max(1, account.pause // 2)


def follow(asked: Sequence[tuple[Member, Proposal]], outcome: Outcome, books: Sequence[Sequence[Ledger]]) -> None:
    """Only who is right at present, and for how long: where nothing is learned, that is still seen."""
    for row, words in enumerate(outcome.emitted):
        for member, proposal in asked:
            book = books[row][member.number]
            if proposal.drafts:
                draft = proposal.drafts[row]
                book.run = draft.run_after(draft.follow(words, book.run), words, book.run)


def note_help(asked: Sequence[tuple[Member, Proposal]], outcome: Outcome, prices: Sequence[float], rate: float) -> None:
    """Per member: how many nodes were read and accepted that nobody asked before it had, less what it costs to read
    all those that only it had: `prices` of passes with 0, 1, ... nodes, worth `rate` tokens each."""
    if len(asked) == 1:  # nearly always: nothing to tell apart
        (member, proposal), rows = asked[0], max(1, len(outcome.paths))
        read = max([sum([place >= 0 for place in draft.where]) for draft in proposal.drafts], default=0)
        helped = sum(map(len, outcome.paths)) / rows if read else 0.0
        member.account.helped.see(helped - rate * (prices[min(read, len(prices) - 1)] - prices[0]))
        return
    left = [set(path) for path in outcome.paths]
    known: list[set[int]] = [{-1} for _ in left]
    for member, proposal in asked:
        own = [set(draft.where) for draft in proposal.drafts] or [set[int]() for _ in left]
        helped = sum(len(nodes & mine) for nodes, mine in zip(left, own, strict=True))
        left = [nodes - mine for nodes, mine in zip(left, own, strict=True)]
        before = max(map(len, known), default=1)
        known = [some | mine for some, mine in zip(known, own, strict=True)]
        after = min(max(map(len, known), default=1), len(prices))
        spent = rate * (prices[after - 1] - prices[min(before, after) - 1])
        member.account.helped.see(helped / max(1, len(left)) - spent)


# ---- Several drafters under one roof: who they are, what they have been worth, and what each is told of a round

T = TypeVar("T")
MERGES = ("certain", "coupled")  # drafts of these kinds may stand in one tree
_HICCUP, _ENOUGH = 3.0, 3.0  # a proposal counts as so many usual ones at most, once so many were timed


class DrafterGroup(
    Adaptive, HoldsDrafters, NeedsHiddenStates, Reorderable, Rewindable, RunsModel, SharesReader, TakesPrediction
):
    """What `portfolio` and `auto` share. A subclass proposes: it asks members (`ask`) and leaves in `tree` what was
    read. Its options have `drafters`, `persistent` and `frozen`."""

    takes_prediction = False  # unless a member does

    def __init__(self, options: Any, device: Any = None) -> None:
        """Models of the members that have to be loaded go to `device`."""
        self.options = options
        self.frozen, self._device = self.options.frozen, device
        self._engage(self._usual() if options.drafters is None else tuple(options.drafters))

    def _usual(self) -> tuple[Any, ...]:
        """Who takes part where nobody is named."""
        raise NotImplementedError

    def _engage(self, given: tuple[Any, ...]) -> None:
        """These are the members: names, (name, options), or drafters. Nothing is known of them yet."""
        self._given = given
        made = [make_drafter(each, device=self._device) for each in given]
        names = [drafter.name for drafter in made]
        titles = [name if names.count(name) == 1 else f"{name} {i + 1}" for i, name in enumerate(names)]
        self._members = [Member(*each, number) for number, each in enumerate(zip(made, titles, strict=True))]
        self._share_taps()
        self.takes_prediction = any(takes_prediction(drafter) for drafter in made)
        self.prior_acceptance = max((prior for prior in map(prior_acceptance, made) if prior is not None), default=None)
        self.reset()

    def inside(self) -> list[Drafter]:
        return [member.drafter for member in self._members]

    def reset_copy(self) -> DrafterGroup:
        given = zip(self._members, self._given, strict=True)
        made = tuple(member.drafter.reset_copy() or each for member, each in given)
        return type(self)(replace(self.options, drafters=made), self._device)

    # ---- credit

    def reset(self) -> None:
        """Forget what the members have been worth."""
        for member in self._members:
            member.account = Account(Ledger(prior_acceptance=prior_acceptance(member.drafter)))
        self._rounds = 0
        self._emitted = Mean()
        self._books: list[list[Ledger]] = []  # per row and member

    def credits(self) -> dict[str, dict[str, float]]:
        """Per member: rounds it was asked, tokens in a row that came true, those that nobody else had, and its cost."""
        return {
            member.title: {
                "asked": member.account.asked,
                "accepted": member.account.ledger.gain.value,
                "alone": member.account.alone.value,
                "cost": member.account.cost.value,
            }
            for member in self._members
        }

    # ---- rows come and go

    def check(self, target: Any) -> None:
        for member in self._members:
            member.drafter.check(target)
        self._share_taps()  # some know only now what they want to see

    def _share_taps(self) -> None:
        taps = sorted({tap for member in self._members for tap in taps_of(member.drafter)})
        for member in self._members:
            member.taps = tuple(taps.index(tap) for tap in taps_of(member.drafter))
        self.needs_taps = tuple(taps)

    def open(self, target: Any, rows: RowsView) -> None:
        if not self.options.persistent:
            self.reset()
        self._target = target
        self._books = []
        self._asked: list[tuple[Member, Proposal]] = []
        self._tree: TokenTree | None = None
        for member in self._members:
            member.lost = member.behind = member.shares = member.has_laws = False
            self._try(member, member.drafter.open, target, rows)

    def reader(self, target: Any) -> Reader | None:
        """Of the first member that brings one: the others run without. It reads merged drafts like any other, but has
        no taps, so that nobody may want them."""
        for member in self._alive() if not self.needs_taps else []:
            if not isinstance(member.drafter, SharesReader):
                continue
            shared = self._try(member, member.drafter.reader, target)
            if shared is not None:
                member.shares = True
                return shared
        return None

    def observe_prompt(self, rows: RowsView, taps_piece: PromptTaps) -> None:
        for member in self._alive():
            if member.taps and isinstance(member.drafter, NeedsHiddenStates):
                own = PromptTaps(taps_piece.first, taps_piece.start, tuple(taps_piece.taps[tap] for tap in member.taps))
                self._try(member, member.drafter.observe_prompt, rows, own)

    def admit(self, rows: RowsView, first: int) -> None:
        del self._books[first:]
        for _ in range(first, rows.count):
            self._books.append([Ledger(member.account.ledger) for member in self._members])
        for member in self._alive():
            begin = partial(restart, member.drafter) if member.behind else member.drafter.admit
            self._try(member, begin, rows, first)
            member.behind, member.fresh = False, True
        self._asked, self._tree = [], None

    def release(self, row: int, last: int, length: int) -> None:
        self._books[row] = self._books[last]
        del self._books[last]
        for member in self._alive():
            self._try(member, member.drafter.release, row, last, length)

    def reorder(self, rows: RowsView, source: Sequence[int]) -> bool:
        """Members that do not follow begin anew when the round is committed. What members were worth to a row stays
        with it: rows that change places are of one search."""
        for member in self._alive():
            member.behind = member.behind or not self._try(member, reorder, member.drafter, rows, source)
        for _, proposal in self._asked:
            proposal.reorder(source)
        self._tree = None if self._tree is None else of_rows(self._tree, source)
        return True

    def restart(self, rows: RowsView, count: int) -> None:
        for member in self._members:
            member.behind = True
        self.admit(rows, count)

    def rewind(self, lengths: list[int]) -> None:
        for member in self._alive():
            if not member.behind:
                self._try(member, rewind, member.drafter, lengths)

    def _alive(self) -> list[Member]:
        return [member for member in self._members if not member.lost]

    def _try(self, member: Member, act: Callable[..., T], *given: Any) -> T | None:
        """A member that fails is left out until the next batch; the others go on."""
        try:
            return act(*given)
        except UnsupportedError:
            raise
        except Exception as error:
            member.lost = True
            warnings.warn(
                f"Drafter '{member.title}' of '{self.name}' failed ({type(error).__name__}: {error}); "
                "the others go on.",
                PacelineWarning,
                stacklevel=3,
            )
            return None

    def _ask(self, member: Member, rows: RowsView, budget: Budget) -> Proposal | None:
        began = time.perf_counter()
        proposal = self._try(member, self._proposal, member, rows, budget)
        if proposal is None:
            return None
        account = member.account
        account.asked += 1
        account.last = self._rounds
        if not (self.frozen or member.fresh):
            drafted = sum([len(draft.tokens) for draft in proposal.drafts]) / max(1, rows.count)
            price = self._price(time.perf_counter() - began, drafted)
            known = account.cost
            # a moment in which the machine does something else is no cost of a drafter
            known.see(price if known.weight < _ENOUGH else min(price, _HICCUP * known.value))
        member.fresh = False
        self._asked.append((member, proposal))
        return proposal

    def _proposal(self, member: Member, rows: RowsView, budget: Budget) -> Proposal:
        drafter, limits = member.drafter, (self._target.vocabulary, budget.nodes, budget.depth)
        if member.lister is not None:
            lists = member.lister.propose_lists(rows, budget, budget.branches and self._branching(member))
            return Proposal(None, member.taps, checked_drafts(lists, rows.count, limits))
        proposal = Proposal(drafter.propose(rows, budget), member.taps)
        if proposal.tree.drawn in MERGES:
            valid = isinstance(drafter, DraftsOnDevice)
            proposal.drafts = drafts_of(proposal.tree, rows.count, None if valid else limits)
        return proposal

    def _branching(self, member: Member) -> bool:
        """Is a tree of this member's wanted, or will a chain do?"""
        return True

    def _price(self, seconds: float, drafted: float) -> float:
        """What a proposal that took so long and drafted so many nodes per row has cost."""
        return seconds

    def _absorbs(self, member: Member, asked: bool) -> bool:
        """Is a member that learns from every pass told of this one?"""
        return True

    def _learned(self, asked: Sequence[tuple[Member, Proposal]], outcome: Outcome) -> None:
        """What became of a round, once the members are credited."""

    def _catch_up(self, rows: RowsView) -> None:
        """Before a round: members that have not followed rows that changed places begin anew."""
        self._asked, self._tree = [], None
        self._rounds += 1
        for member in self._alive():
            if member.behind:
                self._try(member, restart, member.drafter, rows, rows.count)
                member.behind = False

    def _has_ideas(self) -> bool:
        """Has anyone proposed anything that can be merged?"""
        return any(draft.tokens for _, proposal in self._asked for draft in proposal.drafts)

    # ---- what became of it

    def keep(self, rows: RowsView, verdict: Verdict, reading: Reading) -> None:
        asked, tree = self._asked, self._tree
        self._asked, self._tree = [], None
        outcome = Outcome.of(verdict)
        if not self.frozen:
            for words in outcome.emitted:
                self._emitted.see(len(words))
            credit(asked, outcome, self._books)
        else:
            follow(asked, outcome, self._books)
        self._learned(asked, outcome)
        proposals = {member.number: proposal for member, proposal in asked}
        for member in self._alive():
            proposal = proposals.get(member.number)
            if member.absorber is not None and self._absorbs(member, proposal is not None):
                began = time.perf_counter()
                self._try(member, member.absorber.observe_forward, *all_of(rows, tree, verdict, reading))
                member.account.absorbing.see(time.perf_counter() - began)
            if proposal is None and member.taps:  # it follows the target's thoughts, whoever drafts
                proposal = Proposal(TokenTree.empty(rows.count, rows.text.device), member.taps)
            if proposal is not None and not (member.lost or member.behind):
                self._try(member, member.tell, proposal, rows, outcome, verdict, reading)
