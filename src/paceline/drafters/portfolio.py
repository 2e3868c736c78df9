"""Several drafters at once: one tree of what they propose, shared out by what each of them has been worth."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from paceline.core.contracts import DRAFTERS, Budget, Drafter, Glimpse, Reader, Reading, RowsView
from paceline.core.credit import Ledger, Mean, merge
from paceline.core.errors import InputError, PacelineWarning, UnsupportedError
from paceline.core.tree import TokenTree
from paceline.core.verdict import Verdict

from .making import make_drafter
from .portfolio_member import Account, Member, credit
from .portfolio_view import Outcome, Proposal, all_of, drafts_of
from .recycling import of_rows

T = TypeVar("T")
_TRIAL = 64  # rounds every member is asked before it may be passed over
_PROBE = 16  # where only one may draft: every so many rounds another one does
_LEADS = 4
_PASS = 32  # where nodes are the cost: a pass of the target costs as much as proposing so many full trees
_MERGES = ("certain", "coupled")


@DRAFTERS.register("portfolio")
class Portfolio(Drafter):
    """Merge what several drafters propose into one tree, and learn which of them to believe."""

    @dataclass(frozen=True)
    class Options:
        # names, (name, options), or drafters; a tie goes to the earlier one
        drafters: tuple[Any, ...] = (
            ("suffix", {"branches": 4}),
            ("ngram", {"branches": 4}),
            "prompt-lookup",
            "recycling",
        )
        mode: Literal["merge", "first"] = "merge"  # one tree of all, or of the first that has an idea
        cost: Literal["time", "nodes"] = "time"  # what a proposal costs: seconds, or nodes (the same on every machine)
        least: float = 0.002  # chance below which a node is left out
        persistent: bool = True  # credit is kept from one request to the next
        frozen: bool = False  # credit stays as it is

        def __post_init__(self) -> None:
            if not isinstance(self.drafters, (list, tuple)):
                raise InputError(f"drafters must be a list of drafters, got {self.drafters!r}.")
            if not self.drafters:
                raise InputError("portfolio needs at least one drafter, got none.")
            if self.mode not in ("merge", "first") or self.cost not in ("time", "nodes"):
                raise InputError(f"mode is merge or first, cost is time or nodes; got '{self.mode}' and '{self.cost}'.")
            if not 0 <= self.least < 1:
                raise InputError(f"least must be from 0 to below 1, got {self.least}.")

        @classmethod
        def conformance_variants(cls) -> list[Mapping[str, Any]]:
            return [{"drafters": _with_the_target}, {"drafters": _with_the_target, "mode": "first"}]

    holds_drafters = True

    def __init__(self, options: Options | None = None, device: Any = None) -> None:
        """Models of the members that have to be loaded go to `device`."""
        self.options = options or self.Options()
        self.frozen = self.options.frozen
        made = [make_drafter(given, device=device) for given in self.options.drafters]
        names = [drafter.name for drafter in made]
        titles = [name if names.count(name) == 1 else f"{name} {i + 1}" for i, name in enumerate(names)]
        self._members = [Member(*each, number) for number, each in enumerate(zip(made, titles, strict=True))]
        taps = sorted({tap for drafter in made for tap in drafter.needs_taps})
        for member in self._members:
            member.taps = tuple(taps.index(tap) for tap in member.drafter.needs_taps)
        self.needs_taps = tuple(taps)
        self.takes_prediction = any(drafter.takes_prediction for drafter in made)
        self.reset()

    # ---- credit

    def reset(self) -> None:
        """Forget what the members have been worth."""
        for member in self._members:
            member.account = Account()
        self._rounds = 0
        self._emitted, self._lasts, self._began = Mean(), Mean(), 0.0
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

    def describe(self) -> str:
        shown = [
            f"{member.title} {member.account.ledger.gain.value:.2f}" if member.account.asked else member.title
            for member in self._members
        ]
        return f"portfolio ({'first of ' if self.options.mode == 'first' else ''}{', '.join(shown)})"

    # ---- rows come and go

    def check(self, target: Any) -> None:
        for member in self._members:
            member.drafter.check(target)

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
            shared = self._try(member, member.drafter.reader, target)
            if shared is not None:
                member.shares = True
                return shared
        return None

    def watch(self, rows: RowsView, glimpse: Glimpse) -> None:
        for member in self._alive():
            if member.taps:
                own = Glimpse(glimpse.first, glimpse.start, tuple(glimpse.taps[tap] for tap in member.taps))
                self._try(member, member.drafter.watch, rows, own)

    def admit(self, rows: RowsView, first: int) -> None:
        del self._books[first:]
        for _ in range(first, rows.count):
            self._books.append([Ledger(member.account.ledger) for member in self._members])
        for member in self._alive():
            self._try(member, member.drafter.restart if member.behind else member.drafter.admit, rows, first)
            member.behind = False
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
            member.behind = member.behind or not self._try(member, member.drafter.reorder, rows, source)
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
                self._try(member, member.drafter.rewind, lengths)

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
                f"Drafter '{member.title}' of the portfolio failed ({type(error).__name__}: {error}); "
                "the others go on.",
                PacelineWarning,
                stacklevel=3,
            )
            return None

    # ---- drafting

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        self._asked, self._tree = [], None
        for member in self._alive():
            if member.behind:
                self._try(member, member.drafter.restart, rows, rows.count)
                member.behind = False
        now = time.perf_counter()
        if self._began and self.options.cost == "time" and not self.frozen:
            self._lasts.see(now - self._began)
        self._began = now
        self._rounds += 1
        lawful = budget.draw in ("independent", "iid")
        for member in self._order(lawful):
            if lawful and member.has_laws and self._has_ideas():
                continue  # its tokens could not stand beside the others'
            if not (lawful or self._due(member, budget)):
                continue
            proposal = self._ask(member, rows, budget)
            if proposal is None:
                continue
            if proposal.tree.drawn not in _MERGES and proposal.tree.nodes:
                member.has_laws = True
                if not self._has_ideas():  # alone: of what was drawn nothing may be left out
                    proposal.whole, self._tree = True, proposal.tree
                    return proposal.tree
            if self.options.mode == "first" and self._everyone_served(rows.count):
                break
        tree = self._tree = self._merged(rows.count, budget)
        return tree

    def _order(self, lawful: bool) -> list[Member]:
        alive = self._alive()
        if self.options.mode == "first":
            return alive
        ranked = sorted(alive, key=lambda member: -member.account.ledger.gain.value)
        if lawful and ranked:  # one may have to draft alone: each must have led for a while, and again now and then
            ranked.sort(key=lambda member: member.account.led >= _LEADS)
            if self._rounds % _PROBE == 0:
                ranked.insert(0, ranked.pop(self._rounds // _PROBE % len(ranked)))
            ranked[0].account.led += 1
        return ranked

    def _due(self, member: Member, budget: Budget) -> bool:
        """The best is always asked, the others as long as what they alone have is worth their price; else rarely."""
        account = member.account
        if self.options.mode == "first" or account.asked < _TRIAL:
            return True
        if account.ledger.gain.value >= max(other.account.ledger.gain.value for other in self._alive()):
            return True
        whole = self._lasts.value if self.options.cost == "time" else float(_PASS * budget.nodes)
        pays = account.alone.value * whole >= account.cost.value * self._emitted.value
        return pays or self._rounds - account.last >= account.pause

    def _ask(self, member: Member, rows: RowsView, budget: Budget) -> Proposal | None:
        began = time.perf_counter()
        tree = self._try(member, member.drafter.propose, rows, budget)
        if tree is None:
            return None
        account = member.account
        account.asked += 1
        account.last = self._rounds
        proposal = Proposal(tree, member.taps)
        if tree.drawn in _MERGES:
            limits = None if member.drafter.on_device else (self._target.vocabulary, budget.nodes, budget.depth)
            read = self._try(member, drafts_of, tree, rows.count, limits)
            if read is None:
                return None
            proposal.drafts = read
        if not self.frozen:
            drafted = sum(len(draft.tokens) for draft in proposal.drafts) / max(1, rows.count)
            account.cost.see(time.perf_counter() - began if self.options.cost == "time" else drafted)
        self._asked.append((member, proposal))
        return proposal

    def _has_ideas(self) -> bool:
        """Has anyone proposed anything that can be merged?"""
        return any(draft.tokens for _, proposal in self._asked for draft in proposal.drafts)

    def _everyone_served(self, count: int) -> bool:
        return all(any(p.drafts and p.drafts[row].tokens for _, p in self._asked) for row in range(count))

    def _merged(self, count: int, budget: Budget) -> TokenTree:
        """One tree per row: of the first with an idea, or of all, the most credited of this row first."""
        rows = []
        for row in range(count):
            books = self._books[row]
            pairs = [
                (proposal.drafts[row], books[member.number])
                for member, proposal in self._asked
                if proposal.drafts and proposal.drafts[row].tokens
            ]
            least = self.options.least
            if self.options.mode == "first":
                pairs, least = pairs[:1], 0.0
            else:
                pairs.sort(key=lambda pair: -pair[1].gain.value)
            rows.append(merge(pairs, min(budget.depth, budget.limits[row]), budget.nodes, least))
        coupled = any(proposal.tree.drawn == "coupled" for _, proposal in self._asked)
        drawn: Literal["coupled", "certain"] = "coupled" if coupled else "certain"
        if all(parents == list(range(-1, len(parents) - 1)) for _, parents in rows):
            return TokenTree.from_chains([tokens for tokens, _ in rows], "cpu", drawn)
        return TokenTree.from_rows(rows, "cpu", drawn)

    # ---- what became of it

    def keep(self, rows: RowsView, verdict: Verdict, reading: Reading) -> None:
        asked, tree = self._asked, self._tree
        self._asked, self._tree = [], None
        outcome = Outcome.of(verdict)
        if not self.frozen:
            for words in outcome.emitted:
                self._emitted.see(len(words))
            credit(asked, outcome, self._books)
        proposals = {member.number: proposal for member, proposal in asked}
        for member in self._alive():
            if member.absorber is not None:
                self._try(member, member.absorber.absorb, *all_of(rows, tree, verdict, reading))
            proposal = proposals.get(member.number)
            if proposal is None and member.taps:  # it follows the target's thoughts, whoever drafts
                proposal = Proposal(TokenTree.empty(rows.count, rows.text.device), member.taps)
            if proposal is not None and not (member.lost or member.behind):
                self._try(member, member.tell, proposal, rows, outcome, verdict, reading)


def _with_the_target(target: Any) -> tuple[Any, ...]:
    """For the conformance suite: a draft model, as a tree, beside drafters on the host and on the device."""
    return (("draft-model", {"model": target, "tree": "levels"}), "prompt-lookup", "recycling")
