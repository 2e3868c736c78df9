"""Several drafters at once: one tree of what they propose, shared out by what each of them has been worth."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from paceline.core.contracts import DRAFTERS, Budget, Drafter, Glimpse, Reader, Reading, RowsView
from paceline.core.credit import Draft, Ledger, Mean, merge
from paceline.core.errors import DrafterError, InputError, PacelineWarning, UnsupportedError
from paceline.core.tree import TokenTree, check_row
from paceline.core.verdict import Verdict

from .making import make_drafter
from .portfolio_member import Account, Member
from .portfolio_view import Outcome, Proposal, all_of, view_of

T = TypeVar("T")
_TRIAL = 64  # rounds every member is asked before it may be passed over
_RARELY = 32  # rounds after which even the worst is asked again
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
            if not self.drafters:
                raise InputError("portfolio needs at least one drafter, got none.")
            if self.mode not in ("merge", "first") or self.cost not in ("time", "nodes"):
                raise InputError(f"mode is merge or first, cost is time or nodes; got '{self.mode}' and '{self.cost}'.")
            if not 0 <= self.least < 1:
                raise InputError(f"least must be from 0 to below 1, got {self.least}.")

        @classmethod
        def conformance_variants(cls) -> list[Mapping[str, Any]]:
            return [{"drafters": _with_the_target}, {"drafters": _with_the_target, "mode": "first"}]

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self.frozen = self.options.frozen
        made = [make_drafter(given) for given in self.options.drafters]
        names = [drafter.name for drafter in made]
        titles = [name if names.count(name) == 1 else f"{name} {i + 1}" for i, name in enumerate(names)]
        self._members = [Member(*each, number) for number, each in enumerate(zip(made, titles, strict=True))]
        taps = sorted({tap for drafter in made for tap in drafter.needs_taps})
        for member in self._members:
            member.taps = tuple(taps.index(tap) for tap in member.drafter.needs_taps)
        self.needs_taps = tuple(taps)
        self.takes_prediction = any(drafter.takes_prediction for drafter in made)
        if any(type(drafter).reader is not Drafter.reader for drafter in made):
            self.reader = self._shared_reader  # type: ignore[method-assign]
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
            member.lost = member.shares = member.has_laws = False
            self._try(member, lambda: member.drafter.open(target, rows))  # noqa: B023  called at once

    def _shared_reader(self, target: Any) -> Reader | None:
        """Of the first member that brings one: the others run without. It reads merged drafts like any other, but has
        no taps, so that nobody may want them."""
        for member in self._alive() if not self.needs_taps else []:
            shared = self._try(member, lambda: member.drafter.reader(target))  # noqa: B023
            if shared is not None:
                member.shares = True
                return shared
        return None

    def watch(self, rows: RowsView, glimpse: Glimpse) -> None:
        for member in self._alive():
            if member.taps:
                own = Glimpse(glimpse.first, glimpse.start, tuple(glimpse.taps[tap] for tap in member.taps))
                self._try(member, lambda: member.drafter.watch(rows, own))  # noqa: B023

    def admit(self, rows: RowsView, first: int) -> None:
        del self._books[first:]
        for _ in range(first, rows.count):
            self._books.append([Ledger(member.account.ledger) for member in self._members])
        for member in self._alive():
            if self._asked and first == 0 and member.by_position:  # a round that was never kept: it begins anew
                self._try(member, lambda: member.drafter.open(self._target, rows))  # noqa: B023
            self._try(member, lambda: member.drafter.admit(rows, first))  # noqa: B023
        self._asked, self._tree = [], None

    def release(self, row: int, last: int, length: int) -> None:
        self._books[row] = self._books[last]
        del self._books[last]
        for member in self._alive():
            self._try(member, lambda: member.drafter.release(row, last, length))  # noqa: B023

    def rewind(self, lengths: list[int]) -> None:
        for member in self._alive():
            self._try(member, lambda: member.drafter.rewind(lengths))  # noqa: B023

    def _alive(self) -> list[Member]:
        return [member for member in self._members if not member.lost]

    def _try(self, member: Member, act: Callable[[], T]) -> T | None:
        """A member that fails is left out until the next batch; the others go on."""
        try:
            return act()
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
        tree = self._try(member, lambda: member.drafter.propose(rows, budget))
        if tree is None:
            return None
        account = member.account
        account.asked += 1
        account.last = self._rounds
        proposal = Proposal(tree, member.taps)
        if tree.drawn in _MERGES:
            read = self._try(member, lambda: self._read(member, tree, rows.count, budget))
            if read is None:
                return None
            proposal.drafts = read
        if not self.frozen:
            drafted = sum(len(draft.tokens) for draft in proposal.drafts) / max(1, rows.count)
            account.cost.see(time.perf_counter() - began if self.options.cost == "time" else drafted)
        self._asked.append((member, proposal))
        return proposal

    def _read(self, member: Member, tree: TokenTree, count: int, budget: Budget) -> list[Draft]:
        """A member's tree on the host. Those on the host are not trusted, like any drafter there."""
        if tree.rows != count:
            raise DrafterError(f"A draft has {tree.rows} rows for {count} texts.")
        used = [tree.nodes] * count if tree.count is None else tree.count.tolist()
        tokens = tree.tokens.tolist()
        chain = list(range(-1, tree.nodes - 1))
        parents = [chain] * count if tree.parents is None else tree.parents.tolist()
        for row in range(count if not member.drafter.on_device else 0):
            limits = (self._target.vocabulary, budget.nodes, budget.depth)
            check_row(tokens[row][: used[row]], parents[row][: used[row]], limits, row)
        return [Draft(tokens[row][: used[row]], parents[row][: used[row]]) for row in range(count)]

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
            self._credit(asked, outcome)
        learners = [member for member in self._alive() if member.learns]
        tokens, standing = all_of(rows, tree, verdict) if learners else (None, None)
        for member in learners:
            self._try(member, lambda: member.drafter.absorb(tokens, reading.logits, standing))  # type: ignore[attr-defined]  # noqa: B023
        for member, proposal in asked:
            if not member.lost:
                self._try(member, lambda: self._tell(member, proposal, rows, outcome, verdict, reading))  # noqa: B023

    def _tell(
        self, member: Member, proposal: Proposal, rows: RowsView, outcome: Outcome, verdict: Verdict, reading: Reading
    ) -> None:
        """What became of the member's own tree; and, where its memory goes by position, how far that is right now: of
        tokens that others drafted it has read nothing."""
        if member.is_told:
            member.drafter.keep(rows, *view_of(proposal, outcome, verdict, reading))
        if member.by_position:
            lengths = []
            for start, own, path in zip(rows.lengths, outcome.own_paths(proposal), outcome.paths, strict=True):
                lengths.append(start + len(path) + 1 if len(own) == len(path) else start + len(own))
            member.drafter.rewind(lengths)

    def _credit(self, asked: list[tuple[Member, Proposal]], outcome: Outcome) -> None:
        """By what would have come true, whether or not it was in the tree; of a tree with laws, by what did."""
        for row, words in enumerate(outcome.emitted):
            self._emitted.see(len(words))
            gains = []
            for member, proposal in asked:
                book, account = self._books[row][member.number], member.account
                if proposal.drafts:
                    gain = len(proposal.drafts[row].follow(words, (book, account.ledger)))
                elif proposal.whole:
                    gain = len(outcome.paths[row])
                else:
                    continue
                gains.append((gain, account))
                book.gain.see(gain)
                account.ledger.gain.see(gain)
            for place, (gain, account) in enumerate(gains):
                others = max([other for i, (other, _) in enumerate(gains) if i != place], default=0)
                account.alone.see(max(0, gain - others))
                account.pause = min(_RARELY, 2 * account.pause) if gain <= others else max(1, account.pause // 2)


def _with_the_target(target: Any) -> tuple[Any, ...]:
    """For the conformance suite: a draft model, as a tree, beside drafters on the host and on the device."""
    return (("draft-model", {"model": target, "tree": "levels"}), "prompt-lookup", "recycling")
