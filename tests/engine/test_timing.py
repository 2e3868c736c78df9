"""o and c from real rounds on a made-up clock: every call of it is a second, so seconds are counts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from tests.toys import letters, llama

from paceline.core.contracts import Drafter
from paceline.drafters.resolve import make_drafter
from paceline.engine.round_timing import full_costs, measure_drafter, measure_overhead, time_rounds
from paceline.models.language_model import LanguageModel


def ticking() -> Callable[[], float]:
    ticks = count()
    return lambda: float(next(ticks))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))


def test_a_round_is_taken_apart() -> None:
    lm = LanguageModel(llama(), letters())
    plain = time_rounds(lm, make_drafter("none"), 1, clock=ticking())
    assert len(plain) > 5
    # a pass and two calls of the drafter, two ticks each; the round begins one tick before them and ends one after
    assert {(each.seconds, each.reading, each.drafting) for each in plain} == {(7.0, 1.0, 2.0)}
    assert measure_overhead(lm, clock=ticking()) == 4.0


def test_a_draft_step_is_a_share_of_the_draft() -> None:
    lm = LanguageModel(llama())
    assert measure_drafter(lm, make_drafter("prompt-lookup"), 4, clock=ticking()) == pytest.approx(2 / 4)
    model = make_drafter("draft-model", {"model": LanguageModel(llama(seed=1))})
    assert measure_drafter(lm, model, 2, clock=ticking()) == pytest.approx(2 / 2)


@pytest.mark.parametrize("name", ["early-exit", "recycling", "lookahead", "portfolio"])
def test_drafters_of_every_kind(name: str) -> None:
    assert measure_drafter(LanguageModel(llama()), make_drafter(name), 3) > 0


def test_the_shortest_context() -> None:
    assert measure_overhead(LanguageModel(llama(max_position_embeddings=3))) >= 0


def test_what_is_known_is_not_measured_again() -> None:
    lm, made = LanguageModel(llama()), []

    def make() -> Drafter:
        made.append(1)
        return make_drafter("suffix")

    first = full_costs(lm, {"suffix": make})
    assert first.overhead > 0
    assert first.drafters["suffix"] > 0
    assert full_costs(lm, {"suffix": make}) == first
    assert len(made) == 1
