"""Comparing two reports: a real change is flagged, noise is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.bench.results.metrics import ALL, compare, differences, same_machine
from paceline.bench.results.records import Recorder, Report

from .acting import Actor, act, chats

MACHINE = {"cpu": "a", "cores": 2, "versions": {"torch": "1"}, "arguments": {"target": "x"}, "commit": "c0"}


def report(
    *names: str, slower: float = 1.0, plain: float = 1.0, seed: int = 0, repeats: int = 5, **told: Any
) -> Report:
    """Every candidate is twice as fast as plain decoding; noise of 1 % on every run."""
    random = np.random.default_rng(seed)

    def seconds(mean: float) -> Any:
        return lambda task, repeat: mean * float(np.exp(random.normal(0, 0.01)))

    actors = [Actor("plain", seconds=seconds(2.0 * plain))]
    for name in names:
        library = "transformers" if name == "hf" else "paceline"
        actors.append(Actor(name, seconds=seconds(3.0 if name == "hf" else slower), library=library, speculates=True))
    recorder = Recorder()
    recorder.add("provenance", {**MACHINE, **told})
    talks = [*chats("1", "2", "3"), *chats("4", "5", category="code")]
    return act(actors, talks, 4, recorder, repeats=repeats)


def verdicts(changes: list[Any], name: str) -> dict[str, str]:
    return {change.category: change.verdict for change in changes if change.contestant == name}


def test_ten_percent_slower_is_flagged_and_one_percent_is_not() -> None:
    old = report("a")
    same, slow, fast = (report("a", slower=factor, seed=1) for factor in (1.01, 1.1, 0.9))
    assert verdicts(compare(old, same), "a") == {"chat": "same", "code": "same", ALL: "same"}
    changes = [change for change in compare(old, slow) if change.contestant == "a"]
    assert {change.category: change.regression for change in changes} == {"chat": True, "code": True, ALL: True}
    assert changes[-1].ratio == pytest.approx(1 / 1.1, rel=0.02)
    assert verdicts(compare(old, fast), "a")[ALL] == "faster"


def test_who_is_missing_and_who_is_new() -> None:
    changes = compare(report("a", "b"), report("a", "c"))
    assert verdicts(changes, "b") == {ALL: "missing"}
    assert verdicts(changes, "c") == {ALL: "added"}
    assert not any(change.regression for change in changes if change.contestant != "a")


def test_plain_decoding_is_compared_with_a_peer_or_on_the_same_machine() -> None:
    old, new = report("a", "hf"), report("a", "hf", plain=1.2, seed=1)
    changes = {(c.contestant, c.measure, c.category): c for c in compare(old, new)}
    assert changes["plain", "ratio to hf", ALL].verdict == "slower"
    assert changes["a", "speed-up", ALL].verdict == "faster"  # over plain decoding, which is slower now
    alone = compare(report("a"), report("a", plain=1.2, seed=1))
    assert {(c.measure, c.verdict) for c in alone if c.contestant == "plain"} == {("tokens/s", "slower")}
    for other in (
        report("a", plain=1.2, seed=1, cpu="b"),
        report("a", plain=1.2, seed=1, arguments={"target": "y"}),
        _disturbed(report("a", plain=1.2, seed=1)),
    ):
        assert not [change for change in compare(report("a"), other) if change.contestant == "plain"]


def _disturbed(found: Report) -> Report:
    return replace(found, results=tuple(replace(result, disturbed=True) for result in found.results))


def test_only_tasks_that_both_have_are_compared() -> None:
    old, new = report("a"), report("a", seed=1)
    fewer = tuple(result for result in new.results if result.run.category == "chat")
    changes = compare(old, replace(new, results=fewer))
    assert {change.category for change in changes} == {"chat", ALL}
    whole = {change.category: change.old for change in changes if change.contestant == "a"}
    assert whole["chat"] == whole[ALL]


def test_one_repeat_has_five_percent_of_room() -> None:
    old = report("a", repeats=1)
    assert verdicts(compare(old, report("a", slower=1.03, repeats=1, seed=1)), "a")[ALL] == "same"
    assert verdicts(compare(old, report("a", slower=1.1, repeats=1, seed=1)), "a")[ALL] == "slower"


def test_what_else_is_different_is_told() -> None:
    old = report("a")
    new = replace(report("a", cpu="b", versions={"torch": "2"}, arguments={"target": "y"}, loaded=True), complete=False)
    assert differences(old, old) == []
    assert differences(old, new) == [
        "cpu: a then, b now",
        "torch: 1 then, 2 now",
        "target: x then, y now",
        "the machine was loaded now",
        "the measurement was interrupted now",
    ]
    assert same_machine(old, old)
    assert not same_machine(old, new)
    fewer = replace(old, results=tuple(r for r in old.results if r.run.task != "5"))
    assert differences(old, fewer) == ["tasks: 5 then, 4 now, 4 in both"]
