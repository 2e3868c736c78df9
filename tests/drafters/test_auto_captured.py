"""`auto` where whole rounds are captured: the best trained drafter leads, and rests where it does not pay."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.graph_devices import Replays, imitated
from tests.toys import llama

import paceline
from paceline.bench.candidate import PacelineRun, Plan, Task, parse_run_spec
from paceline.common.errors import DrafterWarning
from paceline.core.costs import Costs
from paceline.drafters import shipped as room
from paceline.drafters.adaptive import graphed_auto
from paceline.drafters.adaptive.auto import Auto
from paceline.drafters.adaptive.graphed_auto import GraphedAuto
from paceline.drafters.adaptive.policy import POLICY
from paceline.drafters.heads.eagle import Eagle, EagleHead, Steps
from paceline.drafters.heads.medusa import MedusaHead
from paceline.models.language_model import LanguageModel

pytestmark = pytest.mark.usefixtures("trees_by_torch")  # a device that is imitated has no kernels of a CPU

PROMPTS = [[1, 2, 3, 4, 5, 1, 2], [7, 8, 9], [3, 3, 3, 3, 3], [6, 1]]
FREE = Costs({1: {1: 1.0, 64: 1.01}})
SETTINGS: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 3}]
TASK = Task("1", "story", ((1, 2, 3, 4, 5, 1, 2, 3),))
SIZES = {"num_hidden_layers": 3, "max_position_embeddings": 512}
HEADS: dict[str, Any] = {"eagle": EagleHead, "medusa": MedusaHead}


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Replays]:
    return imitated(monkeypatch)


@pytest.fixture
def lm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: list[Replays]) -> LanguageModel:
    """A target with shipped heads, on a device that captures graphs."""
    lm = LanguageModel(llama(0, **SIZES), name="toy")
    for kind, head in HEADS.items():
        head.random(lm).save(tmp_path / "toy" / kind)
    (tmp_path / "toy" / "catalogue.json").write_text(json.dumps({"best": list(HEADS)}))
    monkeypatch.setattr(room, "ROOT", tmp_path)
    monkeypatch.setattr(graphed_auto, "captures", lambda lm: True)
    monkeypatch.setattr(graphed_auto, "by_kernels", lambda lm: True)
    return lm


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at few rounds, and rests for few."""
    policy = replace(POLICY, rest_after=4, first_rest=9, longest_rest=12)
    monkeypatch.setattr(graphed_auto, "POLICY", policy)


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
    assert isinstance(decoder.drafter, GraphedAuto)
    assert "auto (eagle, tree best-first, or none), γ≤5, rule match" in decoder.describe()
    assert isinstance(drafter(options={"drafters": ("suffix",)}), Auto)  # as was asked for
    assert isinstance(drafter(rule="ratio"), Auto)  # it judges chains
    monkeypatch.setattr(graphed_auto, "captures", lambda lm: False)
    assert isinstance(drafter(), Auto)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("rows", [1, 4])
def test_the_same_texts_with_rests(lm: LanguageModel, restless: None, settings: dict[str, Any], rows: int) -> None:
    """Rounds are replayed, it rests, catches up and goes on; rows come and go meanwhile."""
    simple = paceline.SpeculativeDecoder(llama(0, **SIZES), draft=None, runner="eager")
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
    """Every draft equals that of a drafter that starts with the same text."""
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
            questions = count()  # one round is enough
            asked = {"max_new_tokens": 60, "ignore_eos": True, "cancel": lambda asked=questions: next(asked) > 0}
            fresh = other.generate(known, **asked).trace.rounds[0]
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


def test_every_text_begins_awake_and_bench_reuses_it(lm: LanguageModel, restless: None) -> None:
    decoder = paceline.SpeculativeDecoder(lm, "auto", options={"costs": FREE})
    leader = decoder.drafter
    assert leader.reset_copy() is leader
    leader._clock = ticking(lambda: 0.5 if leader.resting else 5.0)
    first, second = (decoder.generate(PROMPTS[0], max_new_tokens=30, ignore_eos=True) for _ in range(2))
    assert leader.resting
    assert first.trace.rounds[0].drafted == second.trace.rounds[0].drafted != ()


def test_beams_are_searched_without_it(lm: LanguageModel) -> None:
    """They are judged by chains, or not at all."""
    plain = paceline.SpeculativeDecoder(lm, draft=None).generate(PROMPTS[0], max_new_tokens=12, num_beams=2)
    found = paceline.SpeculativeDecoder(lm, "auto", options={"costs": FREE}).generate(
        PROMPTS[0], max_new_tokens=12, num_beams=2
    )
    assert found.tokens == plain.tokens


def leader_of(decoder: paceline.SpeculativeDecoder) -> GraphedAuto:
    assert isinstance(decoder.drafter, GraphedAuto)
    return decoder.drafter


def wrong_entries(leader: GraphedAuto, margin: int) -> dict[int, list[int]]:
    """Per row, entries of the KV cache that differ from those of a new reading; the last may be missing."""
    eagle, rows, found = leader.inner, leader._rows, {}
    assert isinstance(eagle, Eagle)
    with torch.inference_mode():
        for row in range(rows.count):
            known = rows.lengths[row] - 1
            steps = Steps(eagle.light, eagle.embed, eagle.shared, eagle.places, None)
            steps.cache.reserve(rows.capacity, known)
            steps.read(rows, slice(row, row + 1), torch.arange(known)[None], known)
            ours, true = (each.keys[0][row, :, : max(0, known - margin)] for each in (eagle._cache, steps.cache))
            wrong = ((ours - true).abs().amax((0, 2)) > 1e-6).nonzero().flatten().tolist()
            found.update({row: wrong} if wrong else {})
    return found


@pytest.mark.parametrize(("rows", "count"), [(1, 2), (4, 6), (16, 9)])
def test_its_memory_has_no_holes(
    lm: LanguageModel, restless: None, rows: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where everything is accepted, rounds of few rows add more than those of many look back to by themselves."""
    decoder = paceline.SpeculativeDecoder(lm, "auto", options={"costs": FREE}, rows=rows)
    leader, holes, looked = leader_of(decoder), [], 0
    leader._clock = ticking(lambda: 0.5 if leader.resting else 5.0)
    on_round_read = leader.on_round_read

    def looking(tokens: Any, away: float) -> None:
        nonlocal looked
        on_round_read(tokens, 0.0)
        if not leader.resting and not leader._catching_up:
            looked += 1
            holes.append(wrong_entries(leader, 16))

    monkeypatch.setattr(leader, "on_round_read", looking)
    prompts = [[1, 2, row + 1] for row in range(count)]
    settings = {"max_new_tokens": [60 + 20 * (row % 3) for row in range(count)], "ignore_eos": True}
    decoder.generate(prompts, logit_bias={5: 1000.0}, **settings)
    assert looked > 6
    assert not any(holes)


def test_a_drafter_that_another_loop_opened_is_not_used_again(lm: LanguageModel, programs: list[Replays]) -> None:
    """`reset_copy` may be the same one: two decoders that take turns with it draft as if they were alone."""
    for draft in ("eagle", "auto", LanguageModel(llama(1, **SIZES))):
        options = {"costs": FREE} if draft == "auto" else {}
        one = paceline.SpeculativeDecoder(lm, draft, options=options)
        other = paceline.SpeculativeDecoder(lm, one.drafter.reset_copy())
        assert other.drafter is one.drafter
        settings = {"max_new_tokens": 20, "ignore_eos": True}
        first = one.generate(PROMPTS[0], **settings)
        other.generate([9, 9, 8, 7, 6, 5, 4], **settings)
        before = len(programs)
        again = one.generate(PROMPTS[0], **settings)
        assert len(programs) > before
        assert again.trace.rounds == first.trace.rounds
        before = len(programs)
        assert one.generate(PROMPTS[0], **settings).trace.rounds == first.trace.rounds
        assert len(programs) == before  # now it is its own again


def test_it_wakes_though_rows_come_and_go(lm: LanguageModel, restless: None) -> None:
    decoder = paceline.SpeculativeDecoder(lm, "auto", options={"costs": FREE}, rows=4)
    leader, woken = leader_of(decoder), []
    leader._clock = ticking(lambda: 0.5 if leader.resting else 5.0)
    wake = leader._wake
    leader._wake = lambda: woken.append(wake())  # type: ignore[method-assign, func-returns-value]
    lengths = [8 + 5 * (row % 4) for row in range(40)]
    decoder.generate([[1, 2, row % 9 + 1] for row in range(40)], max_new_tokens=lengths, ignore_eos=True)
    assert len(woken) >= 3


def test_a_batch_too_large_for_drafts_stays_captured(lm: LanguageModel, restless: None) -> None:
    decoder = paceline.SpeculativeDecoder(lm, "auto", options={"costs": FREE}, rows=64)
    leader = leader_of(decoder)
    leader._clock = ticking(lambda: 5.0)
    texts = decoder.generate([[1, 2, row % 9 + 1] for row in range(40)], max_new_tokens=40, ignore_eos=True)
    assert not any(each.drafted for each in texts[0].trace.rounds)
    assert leader.graphable(100)


def test_bench_measures_it(lm: LanguageModel) -> None:
    ours = PacelineRun(lm, replace(parse_run_spec("auto"), options={"costs": FREE}))
    assert isinstance(ours.decoder(1).drafter, GraphedAuto)
    plain = PacelineRun(lm, plain=True).run(TASK, Plan(20), 0, lambda: False)
    assert ours.run(TASK, Plan(20), 0, lambda: False).tokens == plain.tokens
    assert isinstance(ours.decoder(1).drafter, GraphedAuto)


def test_what_was_set_is_not_ignored(lm: LanguageModel) -> None:
    decoder = paceline.SpeculativeDecoder(lm, "auto", options={"costs": FREE, "frozen": True})
    assert isinstance(decoder.drafter, Auto)


def test_time_that_tokens_are_taken_in_does_not_count(lm: LanguageModel, restless: None) -> None:
    leader = leader_of(paceline.SpeculativeDecoder(lm, "auto", options={"costs": FREE}))
    decoder = paceline.SpeculativeDecoder(lm, leader)
    now = 0.0
    leader._clock = lambda: now
    on_round_read = leader.on_round_read
    seen: list[float] = []

    def later(tokens: Any, away: float) -> None:
        nonlocal now
        now += 0.9 + 7.0
        seen.append(away)
        on_round_read(tokens, 7.0)

    leader.on_round_read = later  # type: ignore[method-assign]
    text = decoder.generate(PROMPTS[0], max_new_tokens=40, ignore_eos=True)
    assert all(each.drafted for each in text.trace.rounds[:-1])
    assert all(0 <= away < 60 for away in seen[1:])


def test_failing_to_rest_costs_speed_and_not_the_text(lm: LanguageModel, restless: None) -> None:
    decoder = paceline.SpeculativeDecoder(lm, "auto", options={"costs": FREE})
    leader = leader_of(decoder)
    leader._clock = ticking(lambda: 5.0)

    def failing(lengths: list[int]) -> None:
        raise RuntimeError("no")

    leader.inner.rewind = failing  # type: ignore[method-assign]
    plain = paceline.SpeculativeDecoder(llama(0, **SIZES), draft=None, runner="eager")
    with pytest.warns(DrafterWarning, match="RuntimeError: no"):
        found = decoder.generate(PROMPTS[0], max_new_tokens=40, ignore_eos=True)
    assert found.tokens == plain.generate(PROMPTS[0], max_new_tokens=40, ignore_eos=True).tokens
