"""A record of every round of a row, and the statistics of these records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Round:
    """One round of one row, after stop trimming. parents=None: the draft is a chain."""

    drafted: tuple[int, ...]
    parents: tuple[int, ...] | None
    path: tuple[int, ...]  # the accepted nodes that were committed
    own: int | None  # the target's own token, if it was committed
    bonus: bool  # `own` followed full acceptance, not a rejection
    why: str = ""  # why the draft has this length and source, if the drafter is `Adaptive`
    asked: float = 0.0  # measured seconds of the models that ran for this draft

    @property
    def above(self) -> Sequence[int]:
        """Return the parent of every drafted node; -1 is the text."""
        return range(-1, len(self.drafted) - 1) if self.parents is None else self.parents

    @property
    def depths(self) -> list[int]:
        """Return the depth of every drafted node; a node without a parent has depth 0."""
        if self.parents is None:
            return list(range(len(self.drafted)))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def depth(self) -> int:
        """Return the number of tokens on the longest path of the draft."""
        return max(self.depths, default=-1) + 1

    @property
    def rejected(self) -> tuple[int, ...]:
        """Return the drafted tokens that were not kept, in the order of the draft."""
        kept = set(self.path)
        return tuple(token for node, token in enumerate(self.drafted) if node not in kept)

    @property
    def emitted(self) -> tuple[int, ...]:
        tokens = tuple(self.drafted[node] for node in self.path)
        return tokens if self.own is None else (*tokens, self.own)


@dataclass
class Trace:
    """The rounds of one row, in order."""

    rounds: list[Round] = field(default_factory=list)
    # seconds from the end of the round before to the end of each round, for the whole batch, without the time of the
    # caller. A beam search has none.
    seconds: list[float] = field(default_factory=list, compare=False)
    # of these seconds, those of the draft and those of the forward pass; None where the host does not wait for them
    parts: list[tuple[float, float] | None] = field(default_factory=list, compare=False)

    @property
    def from_draft(self) -> list[bool]:
        """Return for every emitted token whether it is a drafted token."""
        flags: list[bool] = []
        for entry in self.rounds:
            flags += [True] * len(entry.path) + ([] if entry.own is None else [False])
        return flags

    def explain(self, why: str, asked: float = 0.0) -> None:
        """Set `why` and `asked` of the last round."""
        last = self.rounds[-1]
        self.rounds[-1] = Round(last.drafted, last.parents, last.path, last.own, last.bonus, why, asked)

    def by_position(self) -> list[tuple[int, int]]:
        """Return (accepted, drafted) for depth 0, 1, ...: the rounds with an accepted node, and those with any node."""
        table: list[list[int]] = []
        for entry in self.rounds:
            depths = entry.depths
            for depth in set(depths):
                while len(table) <= depth:
                    table.append([0, 0])
                table[depth][1] += 1
            for node in entry.path:
                table[depths[node]][0] += 1
        return [(accepted, drafted) for accepted, drafted in table]

    def of_prediction(self, prediction: Sequence[int]) -> tuple[int, int]:
        """Return how many accepted and drafted tokens continue the caller's prediction: two tokens in a row that are
        also neighbours in the prediction, or its first token. Every drafter can have drafted them."""
        pairs = set(pairwise(prediction))
        accepted = drafted = 0
        last: int | None = None  # the last new token of the text
        for entry in self.rounds:
            found = set[int]()
            for node, (token, parent) in enumerate(zip(entry.drafted, entry.above, strict=True)):
                before = last if parent < 0 else entry.drafted[parent]
                if (before, token) in pairs:
                    found |= {node} if parent < 0 else {node, parent}
                elif before is None and token == next(iter(prediction), None):
                    found.add(node)
            drafted += len(found)
            accepted += len(found.intersection(entry.path))
            last = next(reversed(entry.emitted), last)
        return accepted, drafted

    def stats(
        self, seconds: float, rule: str = "", lossy: bool = False, predicted: Sequence[int] | None = None
    ) -> Stats:
        """Return the statistics of these rounds. predicted: the prediction of the caller, as tokens."""
        rounds = self.rounds
        accepted, drafted = (0, 0) if predicted is None else self.of_prediction(predicted)
        return Stats(
            rounds=len(rounds),
            drafted=sum(len(r.drafted) for r in rounds),
            accepted=sum(len(r.path) for r in rounds),
            recovered=sum(r.own is not None and not r.bonus for r in rounds),
            bonus=sum(r.own is not None and r.bonus for r in rounds),
            seconds=seconds,
            rule=rule,
            lossy=lossy,
            predicted=predicted is not None,
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=drafted - accepted,
        )


@dataclass(frozen=True)
class Stats:
    """The statistics of one row, in the words of docs/exactness.md. `seconds` includes reading the prompt. `lossy`: the
    rule may have changed the text."""

    rounds: int
    drafted: int
    accepted: int
    recovered: int
    bonus: int
    seconds: float
    rule: str = ""
    lossy: bool = False
    predicted: bool = False  # the caller gave a prediction
    # drafted tokens that continue this prediction; the names are those of the OpenAI API
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    @property
    def emitted(self) -> int:
        return self.accepted + self.recovered + self.bonus

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Return τ: emitted tokens per round."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.emitted / self.seconds if self.seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        names = ("emitted", "acceptance_rate", "mean_accepted_length", "tokens_per_second")
        kept = {name: value for name, value in asdict(self).items() if self.predicted or "predict" not in name}
        kept.pop("predicted", None)
        return {**kept, **{name: getattr(self, name) for name in names}}
