"""Draft with whatever pays on this machine, as much as pays, or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from paceline.common.errors import InputError, shown
from paceline.common.limits import Limited
from paceline.core.contracts import DRAFTERS, Budget, Drafter, RowsView, Rule
from paceline.core.costs import Costs
from paceline.core.protocols import ChoosesLength, Replayable, Resolvable
from paceline.core.tree import LAWFUL, TokenTree
from paceline.drafters.adaptive.graphed_auto import leader_for
from paceline.drafters.adaptive.group import DrafterGroup, Member, Outcome, Proposal, note_help
from paceline.drafters.adaptive.stats import (
    PLAIN,
    Draft,
    Drafted,
    Ledger,
    Offer,
    Rate,
    Trust,
    average,
    best_chain,
    best_depth,
    best_first,
    best_width,
    cheapest_node,
    pool,
    select,
)
from paceline.drafters.models.self_quantized import has_fast_twin
from paceline.drafters.shipped import best_for
from paceline.models.pass_timing import costs_for

# ---- Why `auto` drafts what it drafts, in words: what the trace of a text says of every round


def of_merged(rows: Sequence[tuple[list[str], Offer]], speculating: Offer, rate: float, asked: str) -> list[str]:
    """Per row: whose nodes are read and what they are expected to bring; or, where none are, what the best draft would
    have been. `asked`: the member that was asked besides, at a price."""
    said = f"at a rate of {rate:.2f} tokens per pass" + (f", {asked} was asked" if asked else "")
    if not any(offer.nodes for _, offer in rows):
        best = f"the best draft: {_said(speculating)}" if speculating.nodes else "nobody has an idea"
        return [f"plain; {best}, {said}"] * len(rows)
    return [f"{' + '.join(names) or 'nobody'}, {_said(offer)}, {said}" for names, offer in rows]


def of_whole(member: str, tree: TokenTree, offer: Offer, budget: Budget) -> list[str]:
    """Of a tree with laws of its own; rows near their end read less of a chain."""
    used = [max(0, min(tree.nodes, limit)) if tree.is_chain else tree.nodes for limit in budget.limits]
    return [f"{member} alone, {_said(replace(offer, nodes=nodes))}" for nodes in used]


def _said(offer: Offer) -> str:
    return f"{offer.nodes} nodes for {offer.tokens:.2f} tokens in {offer.price:.2f} passes"


# ---- What was proposed for a row of `auto`: one tree of everybody's nodes, with their chances

Pairs = list[tuple[Draft, Ledger]]


class Found:
    """`pairs`: the drafts and their drafters' ledgers; `order`: the nodes of the tree they make by their chances."""

    __slots__ = ("_pool", "_titles", "order", "pairs")

    def __init__(self, pairs: Pairs, titles: list[str], depth: int) -> None:
        self.pairs, self._titles = pairs, titles
        self._pool = pool(pairs, depth)
        self.order = best_first(self._pool.chances)

    def believed(self, trust: float) -> list[float]:
        """The chances of its nodes, the best first, as far as promises are trusted."""
        chances = self._pool.chances
        return [trust * chances[node] for node in self.order]

    def promises(self, nodes: int) -> float:
        """The tokens that so many nodes are expected to bring."""
        chances = self._pool.chances
        return sum([chances[node] for node in self.order[:nodes]])

    def select(self, nodes: int) -> Drafted:
        """The best nodes as a tree; every draft learns where its nodes went."""
        return select(self.pairs, self._pool, sorted(self.order[:nodes]))

    @property
    def names(self) -> list[str]:
        """Whose nodes are in what was selected."""
        return [title for (draft, _), title in zip(self.pairs, self._titles, strict=True) if max(draft.where) >= 0]


def found_for(row: int, asked: Sequence[tuple[Member, Proposal]], books: Sequence[Ledger], budget: Budget) -> Found:
    """All that was proposed for a row; for rules that judge chains, the best chain."""
    drafted = [(member, proposal.drafts[row]) for member, proposal in asked if proposal.drafts]
    some = [(member, draft) for member, draft in drafted if draft.tokens]
    pairs = [(draft, books[member.number]) for member, draft in some]
    titles = [member.title for member, _ in some]
    if not budget.branches:
        best = best_chain(pairs)
        titles = [title for title, (draft, _) in zip(titles, pairs, strict=True) if best and best[0][0] is draft]
        pairs = best
    return Found(pairs, titles, min(budget.depth, budget.limits[row]))


# ---- Draft with whatever pays on this machine, as much as pays, or not at all

_TRIAL = 16  # rounds in a row that a member is asked which does not seem to pay
_CHEAP = 0.01  # of a pass: who costs less is asked in every round
_RARELY = (64, 512)  # rounds until one that did not help is tried again: at first, and in the end
_GLANCE = 0.005  # deeper than tokens with such a chance nobody is asked to draft
_CLEARLY = 2.0  # times the price of a node: what a second branch must be worth to be drafted
_UNKNOWN_STEP = 0.3  # of a pass: what a draft step of a model is taken to cost before it was timed
_DOUBT, _SURE = 2.0, 8.0  # that counts as so many proposals at first, and no longer once so many were timed
_LOOK_UP = (("suffix", {"branches": 4}), "recycling")  # who needs nothing but texts and passes
_PURSE = 1.0  # passes to begin with for trying out members that do not seem to pay


@DRAFTERS.register("auto")
class Auto(DrafterGroup, ChoosesLength, Replayable, Resolvable):
    """Choose drafter, length and tree in every round from measured costs and live acceptance; also not to speculate."""

    @dataclass(frozen=True)
    class Options(Limited):
        # names, (name, options), or drafters; a tie goes to the earlier one. None: who needs no training
        drafters: tuple[Any, ...] | None = None
        costs: Any = None  # a Costs, else measured once per model and machine and kept on disk
        probing: float = 0.005  # share of the time spent on asking members that do not seem to pay
        persistent: bool = True  # what was learned is kept from one request to the next
        frozen: bool = False  # what was learned stays as it is

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.drafters is not None and (not isinstance(self.drafters, (list, tuple)) or not self.drafters):
                raise InputError(f"drafters must be a list of at least one drafter, got {shown(self.drafters)}.")
            if self.costs is not None and not isinstance(self.costs, Costs):
                raise InputError(f"costs must be a paceline.core.costs.Costs, got {type(self.costs).__name__}.")
            if self.costs is not None and not (self.costs.passes and all(self.costs.passes.values())):
                raise InputError("costs has no pass in it; give the seconds of at least one, such as {1: {1: 0.02}}.")
            if not 0 <= self.probing <= 1:
                raise InputError(f"probing must be a share from 0 to 1, got {self.probing}.")

        @classmethod
        def conformance_variants(cls) -> list[Mapping[str, Any]]:
            return [{"costs": _FREE}, {"costs": _FREE, "drafters": _with_the_target}, {"costs": _DEAR}]

    def __init__(self, options: Options | None = None, device: Any = None) -> None:
        """Models of the members that have to be loaded go to `device`."""
        super().__init__(options or self.Options(), device)

    @classmethod
    def replay_needs(cls, options: Any) -> str | None:
        return "a clock, to know what a draft costs"

    def describe(self) -> str:
        return f"auto ({', '.join(member.title for member in self._members)} or none)"

    def _usual(self) -> tuple[Any, ...]:
        return _LOOK_UP

    def check(self, target: Any) -> None:
        if self.options.drafters is None and self._given is _LOOK_UP:
            best = "self-quantized" if has_fast_twin(target) else best_for(target)
            if best is not None:
                self._engage((*_LOOK_UP, best))
        super().check(target)
        self._study(target)  # now, so that no text waits for it

    def resolve_for(self, target: Any, rule: Rule) -> Drafter:
        as_usual = replace(self.options, costs=None) == self.Options()
        return leader_for(target, rule, self._costs) or self if as_usual else self

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
        self._prices: dict[tuple[int, int], list[float]] = {}  # by rows and nodes
        self._current, self._node, self._plain = [1.0], 0.0, (0, 0.0)
        self._cheap = [member for member in self._members if not member.dear]
        self._dear = [member for member in self._members if member.dear]
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
        self.model_seconds = 0.0
        prices = self._prices_for(rows.count, budget.nodes)
        for member in self._cheap:
            if not member.lost and self._due(member, rows.count):
                self._ask(member, rows, self._glance(member, budget))
        found = self._found(rows.count, budget)
        offer, speculating = self._width(found, prices)
        asked, deeper = self._dearer(rows, budget, prices, offer) if self._dear else (None, offer)
        if asked is not None:
            spent = deeper.nodes * self._step(asked, rows.count)
            self.model_seconds = spent * self._seconds(rows.count)
            whole = self._ask_dear(asked, rows, budget, deeper)
            if whole is not None:
                self._offer = Offer(whole.nodes, deeper.tokens, prices[min(whole.nodes, budget.nodes)] + spent)
                self.reasons = of_whole(asked.title, whole, self._offer, budget)
                return whole
            found = self._found(rows.count, budget)
            offer, speculating = self._width(found, prices)
            offer = replace(offer, price=offer.price + spent)  # whatever is read now, that time is gone
        self._offer = offer
        self._promised = [row.promises(offer.nodes) for row in found]
        self._tree = self._chosen(found, offer.nodes)
        self.reasons = self._why(found, speculating, asked)
        return self._tree

    def _prices_for(self, rows: int, nodes: int) -> list[float]:
        """Of passes with 0, 1, ... drafted nodes per row, in those without; a round costs its overhead besides."""
        known = self._prices.get((rows, nodes))
        if known is None:
            extra, plain = self._costs.overhead, self._seconds(rows) + self._costs.overhead
            known = [(self._costs.seconds(1 + n, rows) + extra) / plain for n in range(nodes + 1)]
            self._prices[rows, nodes] = known
        if self._current is not known:
            self._current, self._node = known, cheapest_node(known)
        return known

    def _seconds(self, rows: int) -> float:
        """Of a pass without a draft."""
        if self._plain[0] != rows:
            self._plain = (rows, self._costs.seconds(1, rows))
        return self._plain[1]

    def _due(self, member: Member, rows: int) -> bool:
        """In every round while it costs next to nothing, or less than it brings; else, after ever longer pauses, for
        some rounds in a row: whoever learns from passes has to see a few before it can help. It begins with a pause, so
        that a short text does not pay for what only long ones have the time to use."""
        account, plain = member.account, self._seconds(rows)
        cost = account.cost.value + account.absorbing.value
        if cost <= _CHEAP * plain or cost <= account.helped.value * plain:
            account.tried, account.wait = _TRIAL, _RARELY[0]
            return True
        if account.tried >= _TRIAL and self._rounds - account.last > account.wait:
            account.tried, account.wait = 0, min(2 * account.wait, _RARELY[1])
        account.tried += 1
        return account.tried <= _TRIAL

    def _glance(self, member: Member, budget: Budget) -> Budget:
        """Somebody who has not been right of late is not asked for long drafts: nobody would read them."""
        depth = max([books[member.number].glance(budget.depth, _GLANCE) for books in self._books], default=1)
        return Budget(depth, budget.nodes, budget.limits, budget.draw, budget.branches)

    def _branching(self, member: Member) -> bool:
        """Nor for trees whose second branches are hardly worth their nodes."""
        dear = _CLEARLY * self._rate.value * self._node
        return any(books[member.number].second >= dear for books in self._books)

    def _absorbs(self, member: Member, asked: bool) -> bool:
        return asked  # who is not asked does not have to keep up

    def _found(self, count: int, budget: Budget) -> list[Found]:
        return [found_for(row, self._asked, self._books[row], budget) for row in range(count)]

    def _width(self, found: list[Found], prices: list[float]) -> tuple[Offer, Offer]:
        chances = []
        for row, trust in zip(found, self._trust, strict=True):
            chances.append(row.believed(trust.value))
        return best_width(chances, prices, self._rate.value)

    def _chosen(self, found: list[Found], nodes: int) -> TokenTree:
        rows = [row.select(nodes) for row in found]
        if not nodes:
            return TokenTree.empty(len(found), "cpu")
        as_drafted = self._as_drafted(rows, found) if any(member.shares for member in self._members) else None
        if as_drafted is not None:
            return as_drafted
        coupled = any(proposal.drawn == "coupled" for _, proposal in self._asked)
        drawn: Literal["coupled", "certain"] = "coupled" if coupled else "certain"
        return TokenTree.from_lists(rows, "cpu", drawn)

    def _as_drafted(self, rows: Sequence[Drafted], found: list[Found]) -> TokenTree | None:
        """The very tree of the member whose reader is shared, if it is all that will be read: the target then goes on
        from where that member stopped."""
        for member, proposal in self._asked:
            if not member.shares or not proposal.tree.nodes or not proposal.drafts:
                continue
            own = proposal.drafts
            if any(-1 in draft.where or len(draft.tokens) != len(new[0]) for draft, new in zip(own, rows, strict=True)):
                continue
            for draft, row in zip(own, found, strict=True):
                place = {node: i for i, node in enumerate(draft.where)}
                for other, _ in row.pairs:
                    other.where[:] = [place.get(node, -1) for node in other.where]
            return proposal.tree
        return None

    # ---- members that run a model: they cost passes, so it is decided before they are asked

    def _dearer(self, rows: RowsView, budget: Budget, prices: list[float], offer: Offer) -> tuple[Member | None, Offer]:
        """The member whose draft would be worth more than what is at hand already, or that is due to be tried."""
        rate = self._rate.value
        best: tuple[Member | None, Offer] = (None, offer)
        dear = [member for member in self._dear if not member.lost]
        for member in dear:
            expected = average([self._books[row][member.number].expected(budget.depth) for row in range(rows.count)])
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
        """What one draft step costs, in plain passes. The first ones that were timed do not say all: a slow moment must
        not keep a member from ever being asked again in a short text."""
        cost = member.account.cost
        doubt = _DOUBT * max(0.0, 1.0 - cost.weight / _SURE)
        seen = cost.weight * cost.value / self._seconds(rows)
        return (seen + doubt * _UNKNOWN_STEP) / (cost.weight + doubt)

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
        rate = self._rate.value
        self._rate.see(tokens, self._offer.price)
        self._purse += self.options.probing * self._offer.price
        self._offer = PLAIN  # until something is proposed again
        for trust, promised, path in zip(self._trust, self._promised, outcome.paths, strict=False):
            if promised and not self.frozen:
                trust.see(promised, len(path))
        self._promised = []
        known = {member.number for member, _ in asked}
        if not self.frozen:
            note_help(asked, outcome, self._current, rate)
        for books in self._books:
            for book, member in zip(books, self._members, strict=True):
                if member.number not in known:
                    book.run = 0  # nobody knows

    def _why(self, found: list[Found], speculating: Offer, asked: Member | None) -> list[str]:
        offer, rows = self._offer, []
        for row, promised, trust in zip(found, self._promised, self._trust, strict=True):
            mine = Offer(min(offer.nodes, len(row.order)), 1.0 + promised * trust.value, offer.price)
            rows.append((row.names if offer.nodes else [], mine))
        return of_merged(rows, speculating, self._rate.value, "" if asked is None else asked.title)


# for the conformance suite: machines on which reading is free, and on which it hardly ever pays
_FREE = Costs({1: {1: 1.0, 64: 1.01}})
_DEAR = Costs({1: {1: 1.0, 2: 1.7, 8: 2.1, 64: 8.0}})


def _with_the_target(target: Any) -> tuple[Any, ...]:
    """For the conformance suite: a draft model, as a tree, beside drafters on the host and on the device."""
    return (("draft-model", {"model": target, "tree": "levels"}), "prompt-lookup", "recycling")
