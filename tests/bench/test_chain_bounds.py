"""Where a record leaves places open: every number that is told is the least and the most that any answer would give."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from paceline.bench.candidates.candidate import Entry
from paceline.bench.replay.chain_bounds import UNKNOWN, depth_at, known_hits
from paceline.bench.replay.replay import Replayed, ReplayedText, replay
from paceline.bench.replay.trace_files import TraceFile, TraceHeader, TraceText
from paceline.core.costs import Costs
from paceline.core.trace import Round, Trace

COSTS = Costs({1: {1: 1.0, 2: 1.1, 9: 1.8}}, overhead=0.1, drafters={"draft-model": 0.2})
MODEL = "some/model"
TOLD = ("emitted", "rounds", "drafted", "accepted", "acceptance_rate", "tau", "seconds", "speed_up")


def written(text: TraceText, had: list[bool | None], gamma: int, reach: int | None) -> Trace:
    """The rounds of a drafter that has, or has not, each token of a text."""
    rounds, at, tokens = [], 0, text.tokens
    while at < len(tokens):
        depth, run = depth_at(text, at, gamma, reach), 0
        while run < depth and at + run < len(tokens) and had[at + run]:
            run += 1
        drafted = (*tokens[at : at + run], *[UNKNOWN] * (depth - run))
        own = tokens[at + run] if at + run < len(tokens) else None
        rounds.append(Round(drafted, None, tuple(range(run)), own, run == depth))
        at += run + 1
    return Trace(rounds)


@pytest.mark.parametrize("seed", range(4))
def test_no_answer_lies_outside_and_some_lie_on_the_edges(seed: int) -> None:
    """Near the end of a text drafts are shorter, so the fewest rounds are not always those that draft least."""
    dice = random.Random(seed)
    for _ in range(60):
        tokens = tuple(range(dice.randrange(1, 12)))
        reach = dice.choice([None, None, dice.randrange(3, 20)])
        text = TraceText("t", "c", (1, 2, 3), tokens, len(tokens) + dice.choice([0, 1, 5]))
        gamma, other = dice.randrange(1, 5), dice.randrange(1, 7)
        header = TraceHeader("m", 99, "", MODEL, gamma=gamma, reach=reach, costs=COSTS)
        recorded = written(text, [dice.random() < 0.7 for _ in tokens], gamma, reach)
        text = replace(text, rounds=tuple(recorded.rounds))
        entry = Entry("e", MODEL, gamma=other)
        told = replay(TraceFile(header, (text,)), entry).row()
        had = known_hits(text, header)
        rows = []
        for answers in product([False, True], repeat=had.count(None)):
            some = iter(answers)
            full = [next(some) if known is None else known for known in had]
            trace = written(text, full, other, reach)
            rows.append(Replayed(entry, (ReplayedText("t", "c", trace, trace),), "", (), COSTS).row())
        for name in TOLD:
            edges = min(row[name][0] for row in rows), max(row[name][1] for row in rows)
            assert told[name] == pytest.approx(edges), (name, text, gamma, other)
