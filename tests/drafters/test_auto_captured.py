"""`auto` where whole rounds are captured: the best trained drafter leads, and rests where it does not pay."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.engine.test_replays import imitated
from tests.toys import llama

import paceline
from paceline.core.costs import Costs
from paceline.drafters import auto_captured
from paceline.drafters import shipped as room
from paceline.drafters.auto import Auto
from paceline.drafters.auto_captured import Leader
from paceline.drafters.eagle import EagleHead
from paceline.drafters.medusa import MedusaHead
from paceline.models.language_model import LanguageModel

pytestmark = pytest.mark.usefixtures("trees_by_torch")  # a device that is imitated has no kernels of a CPU

PROMPTS = [[1, 2, 3, 4, 5, 1, 2], [7, 8, 9], [3, 3, 3, 3, 3], [6, 1]]
FREE = Costs({1: {1: 1.0, 64: 1.01}})
SETTINGS: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 3}]
SIZES = {"num_hidden_layers": 3, "max_position_embeddings": 512}
HEADS: dict[str, Any] = {"eagle": EagleHead, "medusa": MedusaHead}


@pytest.fixture
def lm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    """A target with heads that come along for it, on a device that captures."""
    lm = LanguageModel(llama(0, **SIZES), name="toy")
    for kind, head in HEADS.items():
        head.random(lm).save(tmp_path / "toy" / kind)
    (tmp_path / "toy" / "catalogue.json").write_text(json.dumps({"best": list(HEADS)}))
    monkeypatch.setattr(room, "ROOT", tmp_path)
    monkeypatch.setattr(auto_captured, "captures", lambda lm: True)
    monkeypatch.setattr(auto_captured, "by_kernels", lambda lm: True)
    imitated(monkeypatch)
    return lm


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at few rounds, and rests for few."""
    monkeypatch.setattr(auto_captured, "_SURE", 4)
    monkeypatch.setattr(auto_captured, "_REST", (9, 12))


def ticking(step: Callable[[], float]) -> Callable[[], float]:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += step()
        return now

    return clock


def test_it_leads_where_rounds_are_captured_and_nowhere_else(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drafter(**given: Any) -> Any:
        options = {"costs": FREE, **given.pop("options", {})}
        return paceline.SpeculativeDecoder(lm, "auto", options=options, **given).drafter

    decoder = paceline.SpeculativeDecoder(lm, "auto", options={"costs": FREE})
    assert isinstance(decoder.drafter, Leader)
    assert "auto (eagle, tree best-first, or none), γ=5, rule match" in decoder.describe()
    assert isinstance(drafter(options={"drafters": ("suffix",)}), Auto)  # as was asked for
    assert isinstance(drafter(rule="ratio"), Auto)  # it judges chains
    monkeypatch.setattr(auto_captured, "captures", lambda lm: False)
    assert isinstance(drafter(), Auto)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("rows", [1, 4])
def test_the_same_texts_with_rests(lm: LanguageModel, restless: None, settings: dict[str, Any], rows: int) -> None:
    """Rounds are replayed, it rests, catches up and goes on; rows come and go meanwhile."""
    simple = paceline.SpeculativeDecoder(llama(0, **SIZES), runner="eager")
    plain = simple.generate(PROMPTS, max_new_tokens=60, ignore_eos=True, **settings)
    decoder = paceline.SpeculativeDecoder(lm, "auto", options={"costs": FREE}, rows=rows)
    leader = decoder.drafter
    leader._clock = ticking(lambda: 0.5 if leader.resting else 5.0)  # drafting never pays
    for _ in range(2):
        texts = decoder.generate(PROMPTS, max_new_tokens=60, ignore_eos=True, **settings)
        assert [text.tokens for text in texts] == [text.tokens for text in plain]
        trace = texts[0].trace.rounds
        drafting = [bool(each.drafted) for each in trace]
        assert 1 < sum(drafting) < len(drafting) - 1
        changes = sum(a != b for a, b in pairwise(drafting))
        assert changes >= 3  # it has rested, tried again, and rested


def test_after_a_rest_it_knows_all_of_the_text(lm: LanguageModel, restless: None) -> None:
    """Every draft is the one that somebody makes who begins with the text as it is then."""
    decoder = paceline.SpeculativeDecoder(lm, "auto", options={"costs": FREE})
    leader = decoder.drafter
    leader._clock = ticking(lambda: 0.5 if leader.resting else 5.0)
    text = decoder.generate(PROMPTS[0], max_new_tokens=60, ignore_eos=True)
    other = paceline.SpeculativeDecoder(lm, "auto", options={"costs": FREE})
    known, compared, rested = list(PROMPTS[0]), 0, False
    for each in text.trace.rounds:
        if not each.drafted:
            rested = True
        elif rested and len(known) < len(PROMPTS[0]) + 50:
            fresh = other.generate(known, max_new_tokens=60, ignore_eos=True).trace.rounds[0]
            assert (fresh.drafted, fresh.parents) == (each.drafted, each.parents)
            compared += 1
        known += each.emitted
    assert compared >= 4
    assert known[len(PROMPTS[0]) :] == text.tokens


def test_it_goes_on_where_it_pays(lm: LanguageModel, restless: None) -> None:
    decoder = paceline.SpeculativeDecoder(lm, "auto", options={"costs": FREE})
    decoder.drafter._clock = ticking(lambda: 0.9)  # a round with a draft is faster than a pass
    text = decoder.generate(PROMPTS[0], max_new_tokens=40, ignore_eos=True)
    assert all(each.drafted for each in text.trace.rounds[:-1])


def test_a_pass_reads_no_more_than_is_cheap(lm: LanguageModel) -> None:
    decoder = paceline.SpeculativeDecoder(lm, "auto", options={"costs": FREE}, rows=16)
    for rows, most in ((1, 24), (2, 24), (4, 15), (8, 7), (16, 3)):
        texts = decoder.generate([[1, 2, row + 1] for row in range(rows)], max_new_tokens=12, ignore_eos=True)
        assert {len(text.trace.rounds[0].drafted) for text in texts} == {most}


def test_every_text_begins_awake_and_bench_need_not_make_it_anew(lm: LanguageModel, restless: None) -> None:
    decoder = paceline.SpeculativeDecoder(lm, "auto", options={"costs": FREE})
    leader = decoder.drafter
    assert leader.anew() is leader
    leader._clock = ticking(lambda: 0.5 if leader.resting else 5.0)
    first, second = (decoder.generate(PROMPTS[0], max_new_tokens=30, ignore_eos=True) for _ in range(2))
    assert leader.resting
    assert first.trace.rounds[0].drafted == second.trace.rounds[0].drafted != ()


def test_beams_are_searched_without_it(lm: LanguageModel) -> None:
    """They are judged by chains, or not at all."""
    plain = paceline.SpeculativeDecoder(lm).generate(PROMPTS[0], max_new_tokens=12, num_beams=2)
    found = paceline.SpeculativeDecoder(lm, "auto", options={"costs": FREE}).generate(
        PROMPTS[0], max_new_tokens=12, num_beams=2
    )
    assert found.tokens == plain.tokens
