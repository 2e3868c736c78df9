"""A suffix automaton that grows with a text and knows how often, and how lately, everything in it was said."""

from __future__ import annotations

from .host import RANKED

# a state per class of substrings that end at the same places; 0 is the empty string
ROOT = 0
END = -1  # set between two texts in one automaton; never matched and never drafted
_VOICES = 4  # contexts that are asked for what follows
_OPEN = 0.02  # what they leave open that is not worth asking a shorter one about
_CLIMB = 24  # contexts that are counted per token, the longest first: a bound for texts like "aaaa"


class SuffixAutomaton:
    """All substrings of a text in two states per token at most. Learning a token and following one are O(1) amortised.

    Counts are exact: every context of the new token counts it. Those contexts are the suffix links, a handful in real
    text; at most `_CLIMB` of them are climbed.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # of the longest string of a state
        self._count = [0]  # how often it occurred
        self._ranked: dict[int, list[int]] = {}  # its most frequent followers, where it has several
        self._last = ROOT  # the whole text
        self.size = 0

    def extend(self, token: int) -> None:
        """Learn one more token of the text."""
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
        """The shorter strings of a state have now occurred where the longer have not: they get a state of their own."""
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
        """The token moves up among the followers of its contexts; of equally frequent ones the latest is first."""
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
        """The longest end of the text that occurred before: its state and its length."""
        state = max(self._link[self._last], ROOT)
        return state, self._length[state]

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest known end of (a match of `length` tokens in `state`) + token."""
        link = self._link
        while state > ROOT and self._length[link[state]] >= length:
            state = link[state]  # the state was split since
        while token not in self._next[state]:
            state = link[state]
            if state < ROOT:
                return ROOT, 0
            length = self._length[state]
        return self._next[state][token], length + 1

    def followers(self, state: int) -> tuple[list[int], list[int]]:
        """The tokens that followed the strings of a state, and how often: the most frequent first, then the latest."""
        following = self._next[state]
        ranked = self._ranked.get(state) or [token for token in following if token != END]
        return ranked, [self._count[following[token]] for token in ranked]

    def after(self, state: int, length: int, most: int) -> list[tuple[int, float, int, int]]:
        """What may follow a match, best first: (token, probability, state, length). The longest contexts speak, each
        for what the longer ones leave open: the less, the longer and the more frequent they are."""
        found: dict[int, tuple[int, float, int, int]] = {}
        mass, voices = 1.0, _VOICES
        while state > ROOT and voices and mass > _OPEN:
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
                voices -= 1
                if most == 1 and len(found) == 1 and share * total >= mass:
                    break  # nothing can overtake it
            state = self._link[state]
            length = self._length[state]
        if most == 1 or len(found) == 1:
            return [max(found.values(), key=_probability)] if found else []
        return sorted(found.values(), key=_probability, reverse=True)[:most]


def _probability(follower: tuple[int, float, int, int]) -> float:
    return follower[1]
