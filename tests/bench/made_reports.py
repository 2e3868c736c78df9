"""A report made by hand: two categories, two prompts of each, three repeats, plain decoding, one of ours, one peer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.bench.candidate import Run
from paceline.bench.results.records import LeftOut, Member, Report, Result, Tally
from paceline.core.costs import Costs

NASTY = '<script>alert("x")</script> & $m$'
TOKENS = tuple(range(20))
COSTS = Costs({1: {1: 0.010, 2: 0.015, 6: 0.020}, 4: {1: 0.02, 6: 0.04}}, 0.0005, {"suffix": 0.0001})
TALLY = Tally(
    rounds=8,
    drafted=30,
    accepted=12,
    recovered=6,
    bonus=2,
    judged=18,
    by_position=((6, 8), (4, 8), (2, 7), (0, 7)),
    steps={(1, 6, 5): 8},
)
# contestant -> category -> factor by which it is faster than plain decoding
SPEEDS = {
    "plain": {"chat": 1.0, "code": 1.0},
    "suffix": {"chat": 0.8, "code": 2.0},
    "hf": {"chat": 0.5, "code": 0.5},
}


def made_report(**changes: Any) -> Report:
    members = (
        Member("plain"),
        Member("suffix", speculates=True, gamma=5, drafter="suffix"),
        Member("hf", library="transformers"),
    )
    results = tuple(
        made_result(name, category, number, repeat)
        for category in ("chat", "code")
        for number in (1, 2)
        for repeat in range(3)
        for name in SPEEDS
    )
    report = Report(
        provenance={
            "commit": "abc",
            "cpu": "a CPU",
            "versions": {"torch": "2"},
            "arguments": {"target": "tiny", "runs": ["suffix"], "seed": 0, "shape": None},
        },
        members=members,
        results=results,
        costs=COSTS,
        skipped=(LeftOut("hf-lookup", "It is not here.", ()), LeftOut("", "too long", ("7", "8"))),
        notes=("A note.",),
    )
    return replace(report, **changes)


def made_result(name: str, category: str, number: int, repeat: int) -> Result:
    wobble = 1 + 0.01 * repeat
    seconds = 0.25 / SPEEDS[name][category] * wobble
    arrivals = tuple(0.05 + 0.01 * place for place in range(len(TOKENS)))
    run = Run(name, f"{category}-{number}", category, repeat, (TOKENS,), seconds, 0.05, arrivals)
    differs = name == "hf" and number == 2
    return Result(run, TALLY if name == "suffix" else None, not differs, 4 if differs else None, False)
