"""o and c from real rounds on a made-up clock: every call of it is a second, so seconds are counts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.toys import letters, llama

import paceline
from paceline.core.contracts import Drafter
from paceline.drafters.resolve import make_drafter
from paceline.engine.drafter_calls import RoundClock
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


# ---- times in a trace


def test_the_time_of_the_caller_is_no_time_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 13.0, 14.0, 20.0, 22.0, 23.0])
    monkeypatch.setattr("paceline.engine.drafter_calls.time", SimpleNamespace(perf_counter=lambda: next(now)))
    clock = RoundClock()
    clock.resume()
    assert clock.take() == (3.0, 10.0)
    clock.pause()
    clock.resume()
    assert clock.take() == (3.0, 6.0)
    assert clock.take() == (1.0, 0.0)  # a second round in the same step


@pytest.mark.parametrize("draft", [None, "suffix"])
def test_every_round_of_a_trace_has_its_seconds(draft: str | None) -> None:
    decoder = paceline.SpeculativeDecoder(LanguageModel(llama()), draft, rows=2)
    results = decoder.generate([[1, 2, 1, 2, 1], [3], [4, 4, 4]], max_new_tokens=[12, 3, 8], ignore_eos=True)
    for result in results:
        assert len(result.trace.seconds) == len(result.trace.rounds)
        assert all(seconds > 0 for seconds in result.trace.seconds)
        assert sum(result.trace.seconds) <= result.stats.seconds
    assert decoder.generate([1, 2], max_new_tokens=4, num_beams=2).trace.seconds == []
