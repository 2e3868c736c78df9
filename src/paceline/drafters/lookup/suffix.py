"""Draft from suffix automata of this text and of past texts (SuffixDecoding, 2411.04975; SAM decoding, 2411.10666)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.common.errors import InputError
from paceline.common.limits import Limited, limited
from paceline.core.contracts import DRAFTERS, Budget, RowsView
from paceline.core.per_row import PerRow
from paceline.core.protocols import Replayable
from paceline.core.tree import chain_parents
from paceline.drafters.lookup.base import RANKED, ListDraft, ListDrafter, grow, space_of

# ---- A suffix automaton that grows with a text and counts all its substrings

# A state is a class of substrings that end at the same positions. State 0 is the empty string.
ROOT = 0
END = -1  # separates two texts in one automaton; it is never matched and never drafted
_CONTEXTS = 4  # the number of contexts that are mixed for a next token
_OPEN = 0.02  # below this remaining probability, shorter contexts are ignored
_CLIMB = 24  # the largest number of contexts counted per token, the longest first; texts like "aaaa" have many


class SuffixAutomaton:
    """All substrings of a text, in at most two states per token. To learn or to match a token is O(1) amortised.

    Every context of a new token counts it. The contexts are the states on the suffix links; real text has a few of
    them, and at most `_CLIMB` are counted.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # length of the longest string of each state
        self._count = [0]  # occurrences of each state
        self._ranked: dict[int, list[int]] = {}  # the most frequent followers of a state, if it has several
        self._last = ROOT  # the state of the whole text
        self.size = 0

    def extend(self, token: int) -> None:
        """Add the next token of the text."""
        before, link, following = self._last, self._link, self._next
        new = self._add({}, 0, self._length[before] + 1, 0)
        at = before
        while at >= 0 and token not in following[at]:
            following[at][token] = new
            at = link[at]
        if at >= 0:
            there = following[at][token]
            link[new] = there if self._length[there] == self._length[at] + 1 else self._split(at, token, there)
        self._last = new
        self.size += 1
        for _ in range(_CLIMB):
            self._count[new] += 1
            new = link[new]
            if new <= ROOT:
                break
        if token != END:
            self._rank(before, token)

    def _add(self, following: dict[int, int], link: int, length: int, count: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        return len(self._link) - 1

    def _split(self, at: int, token: int, there: int) -> int:
        """Return a new state for the shorter strings of a state: they now end at a position where the longer do not."""
        link, following = self._link, self._next
        short = self._add(dict(following[there]), link[there], self._length[at] + 1, self._count[there])
        if there in self._ranked:
            self._ranked[short] = list(self._ranked[there])
        link[there] = short
        while at >= 0 and following[at].get(token) == there:
            following[at][token] = short
            at = link[at]
        return short

    def _rank(self, context: int, token: int) -> None:
        """Move the token up among the ranked followers of its contexts. Of equal counts, the latest is first."""
        count, link = self._count, self._link
        for _ in range(_CLIMB):
            if context <= ROOT:
                return
            following = self._next[context]
            if len(following) > 1:
                ranked = self._ranked.get(context)
                if ranked is None:
                    ranked = self._ranked[context] = [other for other in following if other not in (token, END)]
                often = count[following[token]]
                if token in ranked:
                    place = ranked.index(token)
                elif len(ranked) < RANKED:
                    place = len(ranked)
                    ranked.append(token)
                elif count[following[ranked[-1]]] <= often:
                    place = RANKED - 1
                    ranked[place] = token
                else:
                    place = 0
                while place and count[following[ranked[place - 1]]] <= often:
                    ranked[place - 1], ranked[place] = token, ranked[place - 1]
                    place -= 1
            context = link[context]

    # ---- matching

    @property
    def repeated(self) -> tuple[int, int]:
        """Return the state and the length of the longest suffix of the text that also occurred earlier."""
        state = max(self._link[self._last], ROOT)
        return state, self._length[state]

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the state and length of the longest match after one more token. state, length: the match before it."""
        link = self._link
        while state > ROOT and self._length[link[state]] >= length:
            state = link[state]  # the state was split after the match was found
        while token not in self._next[state]:
            state = link[state]
            if state < ROOT:
                return ROOT, 0
            length = self._length[state]
        return self._next[state][token], length + 1

    def followers(self, state: int) -> tuple[list[int], list[int]]:
        """Return the followers of a state and their counts: the most frequent first, of equal counts the latest."""
        following = self._next[state]
        ranked = self._ranked.get(state) or [token for token in following if token != END]
        return ranked, [self._count[following[token]] for token in ranked]

    def after(self, state: int, length: int, most: int) -> list[tuple[int, float, int, int]]:
        """Return up to `most` next tokens after a match, the best first, as (token, probability, state, length).

        The probabilities mix the longest contexts. Each context leaves a part of the probability to shorter ones: less,
        if it is longer and more frequent.
        """
        found: dict[int, tuple[int, float, int, int]] = {}
        mass, contexts = 1.0, _CONTEXTS
        while state > ROOT and contexts and mass > _OPEN:
            ranked, counts = self.followers(state)
            if ranked:
                following = self._next[state]
                total = sum(counts)
                evidence = total + length / 2
                share = mass * evidence / (evidence + len(following)) / total
                for token, often in zip(ranked, counts, strict=True):
                    known = found.get(token)
                    if known is None:
                        found[token] = (token, share * often, following[token], length + 1)
                    else:
                        found[token] = (token, known[1] + share * often, known[2], known[3])
                mass -= share * total
                contexts -= 1
                if most == 1 and len(found) == 1 and share * total >= mass:
                    break  # no other token can have a larger probability
            state = self._link[state]
            length = self._length[state]
        if most == 1 or len(found) == 1:
            return [max(found.values(), key=_probability)] if found else []
        return sorted(found.values(), key=_probability, reverse=True)[:most]


def _probability(follower: tuple[int, float, int, int]) -> float:
    return follower[1]


# ---- The drafter

_LEAD_IN = 8  # the last tokens of the prompt are stored with an answer, so that its start can be matched
_RECENT = 32  # the number of last tokens of a text that are matched in past texts
_TOTAL, _SPACES = 2, 1024  # limits of a store: tokens, in capacities of one namespace; number of namespaces
_PARTS = 4  # automata per namespace; the oldest one is dropped as a whole

Place = tuple[SuffixAutomaton, int, int]  # an automaton, a state, and the length of the match


class SuffixStore:
    """The past answers of each namespace. Decoders can share a store; namespaces stay separate. All namespaces together
    hold at most `_TOTAL` times the capacity of one. The least recently written namespaces are dropped."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._spaces: dict[str, list[SuffixAutomaton]] = {}  # in the order of the last write
        self._tokens = 0  # tokens of all namespaces

    def __getitem__(self, namespace: str) -> list[SuffixAutomaton]:
        """Return the automata of a namespace, the latest first."""
        return self._spaces.get(namespace, [])

    def size(self, namespace: str) -> int:
        return sum(part.size for part in self[namespace])

    def add(self, namespace: str, text: list[int]) -> None:
        """Add a text. Drop the oldest texts if the namespace has too many tokens."""
        most = self.capacity // _PARTS
        text = text[-(most - 1) :]
        self._tokens -= self.size(namespace)
        parts = self._spaces[namespace] = self._spaces.pop(namespace, [])
        if not parts or parts[0].size + len(text) + 1 > most:
            parts.insert(0, SuffixAutomaton())
            del parts[_PARTS:]
        for token in text:
            parts[0].extend(token)
        parts[0].extend(END)
        self._tokens += self.size(namespace)
        while len(self._spaces) > 1 and (self._tokens > _TOTAL * self.capacity or len(self._spaces) > _SPACES):
            self.clear(next(iter(self._spaces)))

    def clear(self, namespace: str) -> None:
        self._tokens -= self.size(namespace)
        self._spaces.pop(namespace, None)


@DRAFTERS.register("suffix")
class Suffix(Replayable, ListDrafter["_Row"]):
    """Draft the tokens after the longest match of the last tokens, in this text and in past answers."""

    @dataclass(frozen=True)
    class Options(Limited):
        branches: int = limited(1, 1, RANKED)  # continuations of a match to propose at once, as a tree
        # tokens with a smaller estimated joint probability are not drafted (except the first token)
        min_probability: float = limited(0.05, 0, 1)
        remember: bool = True  # learn from the answers of past requests
        store: Any = None  # a SuffixStore that drafters share; None: a new one
        namespace: str = ""  # the namespace of the store; other namespaces are never read
        frozen: bool = False  # read the store, and add nothing
        # tokens stored per namespace; the oldest answers are dropped
        capacity: int = limited(100_000, 4 * _PARTS, 10**8)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.store is not None and not isinstance(self.store, SuffixStore):
                raise InputError(f"store must be a SuffixStore, got {type(self.store).__name__}.")

        @classmethod
        def conformance_variants(cls) -> list[dict[str, Any]]:
            return [{"min_probability": 0.0, "branches": 2, "capacity": 64}, {"remember": False}]

    def __init__(self, options: Options | None = None) -> None:
        self.options = options = options or self.Options()
        self.store: SuffixStore = SuffixStore(options.capacity) if options.store is None else options.store
        self._states = PerRow()

    def reset(self) -> None:
        """Drop the past answers of this namespace."""
        self.store.clear(self.options.namespace)

    # ---- rows

    def begin(self, rows: RowsView, row: int) -> _Row:
        return _Row(rows.lengths[row], space_of(self.options.namespace, rows.owners[row]))

    def end(self, state: _Row, rows: RowsView, row: int) -> None:
        """Store the answer of a request that has ended."""
        if self.options.remember and not self.options.frozen:
            answer = rows.histories[row][max(0, state.prompt - _LEAD_IN) : rows.settled[row]]
            self.store.add(state.space, answer)

    def _places(self, row: _Row, text: list[int], settled: int) -> list[Place]:
        """Return the match in each automaton, the longest first; of equal ones this text, then the latest text."""
        own = row.own
        for place in range(row.known, settled):
            own.extend(text[place])
        parts = self.store[row.space] if self.options.remember else []
        if [part for part, _, _ in row.past] != parts:  # the store has changed
            known = {id(part): (part, state, length) for part, state, length in row.past}
            row.past = [
                known.get(id(part)) or _match(part, text[max(0, row.known - _RECENT) : row.known]) for part in parts
            ]
        new = text[row.known : settled]
        row.past = [_walk(place, new[-_RECENT:]) for place in row.past]
        row.known = max(row.known, settled)
        tail = text[settled:]
        places = [_walk(place, tail) for place in [(own, *own.repeated), *row.past]]
        return sorted((place for place in places if place[1] != ROOT), key=_length, reverse=True)

    # ---- drafting

    def propose_lists(self, rows: RowsView, budget: Budget, branching: bool = True) -> list[ListDraft]:
        least, drafts = self.options.min_probability, list[ListDraft]()
        branches = self.options.branches if branching else 1
        known = zip(rows.histories, rows.settled, self._states, budget.limits, strict=True)
        for text, settled, row, limit in known:
            places = self._places(row, text, settled)
            depth = min(limit, budget.depth)
            if depth < 1:
                drafts.append(([], []))
            elif branches == 1:
                chain = _chain(places, depth, least)
                drafts.append((chain, chain_parents(len(chain))))
            else:
                nodes = min(budget.nodes, depth * branches)
                drafts.append(grow(places, lambda some: _after(some, branches), nodes, depth, 1, least))
        return drafts


@dataclass
class _Row:
    """The automaton of one text, and the matches of this text in past texts."""

    prompt: int  # the length of the prompt
    space: str  # the namespace of its owner
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    known: int = 0  # the number of its tokens that were learned
    past: list[Place] = field(default_factory=list)


def _length(place: Place) -> int:
    return place[2]


def _walk(place: Place, tokens: list[int]) -> Place:
    automaton, state, length = place
    for token in tokens:
        state, length = automaton.step(state, length, token)
    return automaton, state, length


def _match(automaton: SuffixAutomaton, tokens: list[int]) -> Place:
    return _walk((automaton, ROOT, 0), tokens)


def _chain(places: list[Place], depth: int, least: float) -> list[int]:
    """Return the chain of likeliest tokens after the longest match that has a follower."""
    drafted: list[int] = []
    joint = 1.0
    for automaton, state, length in places:
        while len(drafted) < depth:
            best = automaton.after(state, length, 1)
            if not best:
                break
            token, share, state, length = best[0]
            joint *= share
            if drafted and joint < least:
                break
            drafted.append(token)
        if drafted:
            break
    return drafted


def _after(places: list[Place], most: int) -> list[tuple[int, float, list[Place]]]:
    """Return the next tokens with their probabilities and places, for `grow`. If several automata match, each adds new
    tokens with half the weight of the one before."""
    tokens: dict[int, tuple[int, float, list[Place]]] = {}
    mass = 1.0
    for automaton, state, length in places:
        for token, share, after, longer in automaton.after(state, length, most):
            if token not in tokens and len(tokens) < most:
                tokens[token] = (token, share * mass, [(automaton, after, longer)])
        mass /= 2
    return list(tokens.values())
