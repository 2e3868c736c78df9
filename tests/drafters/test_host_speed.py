"""A proposal does not do more work in a longer text: steps are counted, not seconds. host_speed.py has the figures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.drafters.host_speed import DRAFTERS, GAMMA, words
from tests.drafters.texts import HandRows

from paceline import Budget

ROUNDS = 200


class Steps:
    """Lines of our own code that were run: what a proposal costs, whatever else this machine does."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Steps:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: Any, event: str, arg: object) -> Any:
        return self._stepped if "paceline" in frame.f_code.co_filename else None

    def _stepped(self, frame: Any, event: str, arg: object) -> Any:
        self.count += event == "line"
        return self._stepped


class Text(list[int]):
    """Counts the tokens that are read from it: a copy of a whole text is one line of code."""

    taken = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.taken += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        self.taken += len(self)
        return super().__iter__()


def work(name: str, context: int) -> tuple[float, float, float]:
    """Per round of one token more: lines run, tokens looked at, tokens drafted. Learning that token counts too."""
    text = words(context + ROUNDS)
    drafter = DRAFTERS[name]()
    rows = HandRows([text[:context]])
    rows.histories[0] = history = Text(rows.histories[0])
    drafter.open(None, rows)
    drafter.admit(rows, 0)
    budget = Budget(GAMMA, 64, (GAMMA,))
    drafter.propose(rows, budget)  # learns the whole text
    history.taken, drafted = 0, 0
    with Steps() as steps:
        for token in text[context:]:
            history.append(token)
            drafted += drafter.propose(rows, budget).nodes
    return steps.count / ROUNDS, history.taken / ROUNDS, drafted / ROUNDS


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_round_does_not_cost_more_in_a_longer_text(name: str) -> None:
    short, long = work(name, 1_000), work(name, 8_000)
    print(f"\n{name}: lines, tokens looked at and drafted per round: {short} at 1,000 and {long} at 8,000")
    assert min(short[2], long[2]) > 1
    # longer texts have longer matches, and more is drafted: a little more work per drafted token is none
    assert long[0] / long[2] < 1.3 * short[0] / short[2]
    assert long[0] < 160 * long[2] + 200
    assert long[1] < 1.3 * short[1] + 8
    assert long[1] < 100


def test_a_reader_of_the_whole_text_is_found() -> None:
    text = Text(range(5_000))
    with Steps() as steps:
        assert sum(text[1:]) > 0
    assert text.taken == 4_999
    assert steps.count == 0  # not ours
