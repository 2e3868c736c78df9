"""Draft with whatever pays on this machine, as much as pays, or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from paceline.core.contracts import DRAFTERS, Budget, RowsView
from paceline.core.costs import Costs
from paceline.core.credit import Draft, Drafted, Ledger, Pool, best_chain, best_first, entry_of, pool, select
from paceline.core.errors import InputError
from paceline.core.tree import LAWFUL, TokenTree
from paceline.core.worth import PLAIN, Offer, Rate, Trust, best_depth, best_width
from paceline.models.pass_times import costs_for

from .auto_reasons import of_merged, of_whole
from .company import Company
from .portfolio_member import Member, note_help
from .portfolio_view import Outcome, Proposal

_TRIAL = 8  # rounds in a row every member is asked before it may be passed over, and when it is tried again
_CHEAP = 0.01  # of a pass: who costs less is asked in every round
_RARELY = (32, 512)  # rounds until one that did not help is tried again: at first, and in the end
_GLANCE = 0.005  # deeper than tokens with such a chance nobody is asked to draft
_UNKNOWN_STEP = 0.3  # of a pass: what a draft step of a model is taken to cost before it was timed
_PURSE = 1.0  # passes to begin with for trying out members that do not seem to pay

Pairs = list[tuple[Draft, Ledger]]


@DRAFTERS.register("auto")
class Auto(Company):
    """Choose drafter, length and tree in every round from measured costs and live acceptance; also not to speculate."""

    @dataclass(frozen=True)
    class Options:
        # names, (name, options), or drafters; a tie goes to the earlier one
        drafters: tuple[Any, ...] = (
            ("suffix", {"branches": 4}),
            "prompt-lookup",
            "recycling",
        )
        costs: Any = None  # a Costs, else measured once per model and machine and kept on disk
        probing: float = 0.005  # share of the time spent on asking members that do not seem to pay
        persistent: bool = True  # what was learned is kept from one request to the next
        frozen: bool = False  # what was learned stays as it is

        def __post_init__(self) -> None:
            if not isinstance(self.drafters, (list, tuple)) or not self.drafters:
                raise InputError(f"drafters must be a list of at least one drafter, got {self.drafters!r}.")
            if self.costs is not None and not isinstance(self.costs, Costs):
                raise InputError(f"costs must be a paceline.core.costs.Costs, got {type(self.costs).__name__}.")
            if self.costs is not None and not (self.costs.passes and all(self.costs.passes.values())):
                raise InputError("costs has no pass in it; give the seconds of at least one, such as {1: {1: 0.02}}.")
            if not 0 <= self.probing <= 1:
                raise InputError(f"probing must be a share from 0 to 1, got {self.probing}.")

        @classmethod
        def conformance_variants(cls) -> list[Mapping[str, Any]]:
            return [{"costs": _FREE}, {"costs": _FREE, "drafters": _with_the_target}, {"costs": _DEAR}]

    chooses_length = True

    def __init__(self, options: Options | None = None, device: Any = None) -> None:
        """Models of the members that have to be loaded go to `device`."""
        super().__init__(options or self.Options(), device)

    @classmethod
    def beyond_text(cls, options: Any) -> str | None:
        return "a clock, to know what a draft costs"

    def describe(self) -> str:
        return f"auto ({', '.join(member.title for member in self._members)} or none)"

    def check(self, target: Any) -> None:
        super().check(target)
        self._study(target)  # now, so that no text waits for it

    def _study(self, target: Any) -> None:
        if self._studied is not target:
            self._costs: Costs = self.options.costs or costs_for(target)
            self._studied = target

    _studied: Any = None

    def reset(self) -> None:
        super().reset()
        self._purse = _PURSE
        self._rate, self._offer = Rate(), PLAIN

    def open(self, target: Any, rows: RowsView) -> None:
        super().open(target, rows)
        self._study(target)
        self._rate, self._offer = Rate(), PLAIN  # the text before says little about what time is worth in this one
        self._prices: dict[int, list[float]] = {}
        self._trust: list[Trust] = []  # per row
        self._promised: list[float] = []  # per row of the draft that is being read; empty: none, or not of this kind

    def admit(self, rows: RowsView, first: int) -> None:
        super().admit(rows, first)
        self._trust[first:] = [Trust() for _ in range(first, rows.count)]

    def release(self, row: int, last: int, length: int) -> None:
        super().release(row, last, length)
        self._trust[row] = self._trust[last]
        del self._trust[last]

    # ---- a round

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        self._catch_up(rows)
        prices = self._prices_for(rows.count, budget.nodes)
        for member in self._alive():
            if not member.dear and self._due(member, rows.count):
                self._ask(member, rows, self._glance(member, budget))
        pools, pairs = self._pools(rows.count, budget)
        offer, speculating = self._width(pools, prices)
        asked, deeper = self._dearer(rows, budget, prices, offer)
        if asked is not None:
            spent = deeper.nodes * self._step(asked, rows.count)
            whole = self._ask_dear(asked, rows, budget, deeper)
            if whole is not None:
                self._offer = Offer(whole.nodes, deeper.tokens, prices[min(whole.nodes, budget.nodes)] + spent)
                self.reasons = of_whole(asked.title, whole, self._offer, budget)
                return whole
            pools, pairs = self._pools(rows.count, budget)
            offer, speculating = self._width(pools, prices)
            offer = replace(offer, price=offer.price + spent)  # whatever is read now, that time is gone
        self._offer = offer
        self._promised = [sum(sorted(found.chances, reverse=True)[: offer.nodes]) for found in pools]
        self._tree = self._chosen(pools, pairs, offer.nodes)
        self.reasons = self._why(pools, pairs, speculating, asked)
        return self._tree

    def _prices_for(self, rows: int, nodes: int) -> list[float]:
        """Of passes with 0, 1, ... drafted nodes per row, in those without; a round costs its overhead besides."""
        known = self._prices.get(rows)
        if known is None or len(known) <= nodes:
            extra = self._costs.overhead
            plain = self._costs.seconds(1, rows) + extra
            known = [(self._costs.seconds(1 + n, rows) + extra) / plain for n in range(nodes + 1)]
            self._prices[rows] = known
        return known[: nodes + 1]

    def _due(self, member: Member, rows: int) -> bool:
        """In every round while it costs next to nothing, or less than it brings; else for a few rounds in a row, since
        only somebody who was right in a row is believed, and then after ever longer pauses."""
        account, plain = member.account, self._costs.seconds(1, rows)
        cost = account.cost.value + account.absorbing.value
        if cost <= _CHEAP * plain or cost <= account.helped.value * plain:
            account.tried, account.wait = 0, _RARELY[0]
            return True
        if account.tried >= _TRIAL and self._rounds - account.last > account.wait:
            account.tried, account.wait = 0, min(2 * account.wait, _RARELY[1])
        account.tried += 1
        return account.tried <= _TRIAL

    def _glance(self, member: Member, budget: Budget) -> Budget:
        """Somebody who has not been right of late is not asked for long drafts: nobody would read them."""
        depth = 1
        for books in self._books:
            ledger = books[member.number]
            joint = ledger.chance[entry_of(0, ledger.run)]
            reach = 1
            while reach < budget.depth and joint >= _GLANCE:
                joint *= ledger.chance[entry_of(0, ledger.run + reach)]
                reach += 1
            depth = max(depth, reach)
        return budget if depth >= budget.depth else replace(budget, depth=depth)

    def _absorbs(self, member: Member, asked: bool) -> bool:
        return asked  # who is not asked does not have to keep up

    def _pools(self, count: int, budget: Budget) -> tuple[list[Pool], list[Pairs]]:
        """Per row: all that was proposed as one tree with its chances, and by whom."""
        pools, every = [], []
        for row in range(count):
            pairs = [
                (proposal.drafts[row], self._books[row][member.number])
                for member, proposal in self._asked
                if proposal.drafts and proposal.drafts[row].tokens
            ]
            if not budget.branches:
                pairs = best_chain(pairs)
            pools.append(pool(pairs, min(budget.depth, budget.limits[row])))
            every.append(pairs)
        return pools, every

    def _width(self, pools: list[Pool], prices: list[float]) -> tuple[Offer, Offer]:
        chances = []
        for found, trust in zip(pools, self._trust, strict=True):
            believed = trust.value
            chances.append(sorted((believed * chance for chance in found.chances), reverse=True))
        return best_width(chances, prices, self._rate.value)

    def _chosen(self, pools: list[Pool], every: list[Pairs], nodes: int) -> TokenTree:
        rows = []
        for found, pairs in zip(pools, every, strict=True):
            rows.append(select(pairs, found, sorted(best_first(found.chances)[:nodes])))
        as_drafted = self._as_drafted(rows, every)
        if as_drafted is not None:
            return as_drafted
        coupled = any(proposal.tree.drawn == "coupled" for _, proposal in self._asked)
        drawn: Literal["coupled", "certain"] = "coupled" if coupled else "certain"
        if all(parents == list(range(-1, len(parents) - 1)) for _, parents in rows):
            return TokenTree.from_chains([tokens for tokens, _ in rows], "cpu", drawn)
        return TokenTree.from_rows(rows, "cpu", drawn)

    def _as_drafted(self, rows: Sequence[Drafted], every: list[Pairs]) -> TokenTree | None:
        """The very tree of the member whose reader is shared, if it is all that will be read: the target then goes on
        from where that member stopped."""
        for member, proposal in self._asked:
            if not member.shares or not proposal.tree.nodes or not proposal.drafts:
                continue
            own = proposal.drafts
            if any(-1 in draft.where or len(draft.tokens) != len(row[0]) for draft, row in zip(own, rows, strict=True)):
                continue
            for draft, pairs in zip(own, every, strict=True):
                place = {node: i for i, node in enumerate(draft.where)}
                for other, _ in pairs:
                    other.where[:] = [place.get(node, -1) for node in other.where]
            return proposal.tree
        return None

    # ---- members that run a model: they cost passes, so it is decided before they are asked

    def _dearer(self, rows: RowsView, budget: Budget, prices: list[float], offer: Offer) -> tuple[Member | None, Offer]:
        """The member whose draft would be worth more than what is at hand already, or that is due to be tried."""
        rate = self._rate.value
        best: tuple[Member | None, Offer] = (None, offer)
        dear = [member for member in self._alive() if member.dear]
        for member in dear:
            expected = _mean([self._books[row][member.number].expected(budget.depth) for row in range(rows.count)])
            wide = max(1.0, member.account.spread.value)
            widened = [prices[min(budget.nodes, round(depth * wide))] for depth in range(budget.depth + 1)]
            found = best_depth(expected, widened, self._step(member, rows.count), rate)
            if found.nodes and (not best[1].nodes or found.value(rate) > best[1].value(rate)):
                best = (member, found)
        if best[0] is None and dear and not self.frozen:
            member = min(dear, key=lambda member: member.account.last)
            price = self._step(member, rows.count)
            self._purse = min(self._purse, max(_PURSE, price))  # what lies there long is not spent on one text
            if self._purse >= price:
                self._purse -= price
                best = (member, Offer(1, 1.0, price + prices[1]))
        return best

    def _step(self, member: Member, rows: int) -> float:
        """What one draft step costs, in plain passes."""
        cost = member.account.cost
        return cost.value / self._costs.seconds(1, rows) if cost.weight else _UNKNOWN_STEP

    def _ask_dear(self, member: Member, rows: RowsView, budget: Budget, offer: Offer) -> TokenTree | None:
        """Have it draft as deep as was found best. Its tree, if that can only be read alone and whole."""
        before = len(self._asked)
        self._depth = offer.nodes
        proposal = self._ask(member, rows, replace(budget, depth=min(budget.depth, offer.nodes)))
        self._depth = 1
        whole = proposal is not None and proposal.tree.drawn in LAWFUL and proposal.tree.nodes > 0
        if not self.frozen:
            member.account.spread.see(proposal.tree.nodes / offer.nodes if whole and proposal else 1.0)
        if proposal is None or not whole:
            return None
        for _, other in self._asked[:before]:  # not read, and judged by the text like all the others
            for draft in other.drafts:
                draft.where[:] = [-1] * len(draft.tokens)
        proposal.whole, self._tree = True, proposal.tree
        return proposal.tree

    _depth = 1  # of what is being asked for: a model's time goes by its steps

    def _price(self, seconds: float, drafted: float) -> float:
        return seconds / self._depth

    # ---- what became of it, and why

    def _learned(self, asked: Sequence[tuple[Member, Proposal]], outcome: Outcome) -> None:
        tokens = sum(len(words) for words in outcome.emitted) / max(1, len(outcome.emitted))
        self._rate.see(tokens, self._offer.price)
        self._purse += self.options.probing * self._offer.price
        self._offer = PLAIN  # until something is proposed again
        for trust, promised, path in zip(self._trust, self._promised, outcome.paths, strict=False):
            if promised and not self.frozen:
                trust.see(promised, len(path))
        self._promised = []
        known = {member.number for member, _ in asked}
        if not self.frozen:
            note_help(asked, outcome)
        for books in self._books:
            for book, member in zip(books, self._members, strict=True):
                if member.number not in known:
                    book.run = 0  # nobody knows

    def _why(self, pools: list[Pool], every: list[Pairs], speculating: Offer, asked: Member | None) -> list[str]:
        titles = {id(draft): member.title for member, proposal in self._asked for draft in proposal.drafts}
        rows = []
        for found, pairs, promised, trust in zip(pools, every, self._promised, self._trust, strict=True):
            names = [titles[id(draft)] for draft, _ in pairs if any(place >= 0 for place in draft.where)]
            mine = Offer(min(self._offer.nodes, len(found.tokens)), 1.0 + promised * trust.value, self._offer.price)
            rows.append((names, mine))
        return of_merged(rows, speculating, self._rate.value, "" if asked is None else asked.title)


def _mean(rows: list[list[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


# for the conformance suite: machines on which reading is free, and on which it hardly ever pays
_FREE = Costs({1: {1: 1.0, 64: 1.01}})
_DEAR = Costs({1: {1: 1.0, 2: 1.7, 8: 2.1, 64: 8.0}})


def _with_the_target(target: Any) -> tuple[Any, ...]:
    """For the conformance suite: a draft model, as a tree, beside drafters on the host and on the device."""
    return (("draft-model", {"model": target, "tree": "levels"}), "prompt-lookup", "recycling")
