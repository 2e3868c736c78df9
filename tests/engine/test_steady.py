"""Rounds of fixed shapes, as they are captured on a CUDA device; run as they are on a CPU, they write the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from tests.engine.graph_devices import Rehearsal, Watched, watched
from tests.selection import covering
from tests.toys import gpt2, llama

import paceline
from paceline.common.errors import DrafterWarning, UnsupportedError
from paceline.drafters.heads.eagle import EagleHead
from paceline.drafters.heads.medusa import MedusaHead
from paceline.drafters.heads.prophet import ProphetHead
from paceline.engine import round_graphs as flight
from paceline.engine.loop import Loop
from paceline.engine.request import build_requests
from paceline.engine.rows import Rows

pytestmark = pytest.mark.usefixtures("trees_by_torch")  # a device that is imitated has no kernels of a CPU

PROMPTS = [[1, 2, 3, 4, 5, 1, 2], [7, 8, 9], [3, 3, 3, 3, 3], [6, 1], [9]]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": [3, 4, 5, 6, 7]},
    "mixed": {"temperature": [0.0, 0.9, 1.2, 0.0, 0.7], "top_k": [4, 0, 10, 4, 4], "top_p": 0.9, "seed": 1},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "min_new_tokens": 6,
                  "seed": 2, "logit_bias": {3: -2.0}},
}  # fmt: skip
DRAFTS: list[tuple[Any, dict[str, Any]]] = [  # all others: conformance/test_identity.py
    (None, {}),
    ("model", {"tree": "best-first", "branch": 3}),
    ("prompt-lookup", {}),
    ("eagle", {}),
]
HEADS = {"medusa": MedusaHead, "eagle": EagleHead, "prophet": ProphetHead}


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    return watched(monkeypatch)


def decoders(draft: Any, options: dict[str, Any], family: Callable[..., Any], **more: Any) -> Any:
    target, small = family(0), family(1, **({"num_hidden_layers": 1} if family is llama else {"n_layer": 1}))
    plain = paceline.SpeculativeDecoder(target, draft=None, runner="eager", rows=5)
    named = paceline.LanguageModel(small) if draft == "model" else draft
    if draft in HEADS:
        options = {**options, "head": HEADS[draft].random(paceline.LanguageModel(target))}
    return plain, paceline.SpeculativeDecoder(target, named, options=options, **more)


@cache
def plain_tokens(name: str, limit: int) -> list[list[int]]:
    plain = paceline.SpeculativeDecoder(llama(0), draft=None, runner="eager", rows=5)
    return [out.tokens for out in plain.generate(PROMPTS, max_new_tokens=limit, **SETTINGS[name])]


@pytest.mark.parametrize(("drafter", "name", "rows"), covering(DRAFTS, SETTINGS, [1, 3, 5]))
def test_the_same_texts(drafter: tuple[Any, dict[str, Any]], name: str, rows: int, programs: list[Watched]) -> None:
    (draft, options), settings = drafter, SETTINGS[name]
    _, graphable = decoders(draft, options, llama, rows=rows)
    for limit in (18, 22):  # the second call uses the graphs of the first
        wanted = plain_tokens(name, limit)
        got = [out.tokens for out in graphable.generate(PROMPTS, max_new_tokens=limit, **settings)]
        assert got == wanted
    assert sum(count > 1 for watched in programs for count in watched.runs.values())
    if draft != "prompt-lookup":  # whole rounds
        assert all(key[0] == "round" for watched in programs for key in watched.runs)


@pytest.mark.parametrize(("draft", "options"), DRAFTS[:2], ids=str)
def test_another_architecture(draft: Any, options: dict[str, Any], programs: list[Watched]) -> None:
    plain, graphable = decoders(draft, options, gpt2)
    assert [out.tokens for out in graphable.generate(PROMPTS, max_new_tokens=24)] == [
        out.tokens for out in plain.generate(PROMPTS, max_new_tokens=24)
    ]


@pytest.mark.parametrize("draft", [None, "model"])
@pytest.mark.parametrize("rule", ["match", "ratio", "block", "traversal"])
def test_stops_and_limits(draft: Any, rule: str, programs: list[Watched]) -> None:
    """A round may have begun before the last one was read; what it wrote for a text that has ended is dropped."""
    plain, graphable = decoders(draft, {}, llama, rule=rule, rows=2)
    limits = [1, 7, 24, 3, 12]
    wanted = plain.generate(PROMPTS, max_new_tokens=limits)
    ends = [[text.tokens[min(4, len(text.tokens) - 1)]] for text in wanted]
    for settings in ({}, {"eos_token_ids": ends}):
        wanted = plain.generate(PROMPTS, max_new_tokens=limits, **settings)
        got = graphable.generate(PROMPTS, max_new_tokens=limits, **settings)
        assert [text.tokens for text in got] == [text.tokens for text in wanted]
        assert [text.finish_reason for text in got] == [text.finish_reason for text in wanted]
        for text in got:
            committed = sum(len(r.path) + (r.own is not None) for r in text.trace.rounds)
            assert committed == len(text.tokens)


def test_a_tree_that_the_rule_cannot_judge_is_refused(programs: list[Watched]) -> None:
    _, graphable = decoders("model", {"tree": "levels"}, llama, rule="block")
    with pytest.raises(UnsupportedError, match="judges chains"):
        graphable.generate(PROMPTS[0], max_new_tokens=20, temperature=0.9, seed=1)


def test_a_drafter_that_fails_costs_speed_only(programs: list[Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, graphable = decoders("model", {}, llama)
    propose = type(graphable.drafter).propose

    def fails(self: Any, rows: Any, budget: Any) -> Any:
        if rows.bound is not None:
            raise RuntimeError("out of order")
        return propose(self, rows, budget)

    monkeypatch.setattr(type(graphable.drafter), "propose", fails)
    with pytest.warns(DrafterWarning, match="out of order"):
        got = graphable.generate(PROMPTS, max_new_tokens=20)
    assert [out.tokens for out in got] == [out.tokens for out in plain.generate(PROMPTS, max_new_tokens=20)]


@pytest.mark.parametrize("draft", ["model", *HEADS])
def test_drafts_can_be_timed_alone(draft: str, programs: list[Watched]) -> None:
    """They are made and forgotten: the text goes on as if there had been none."""
    plain, graphable = decoders(draft, {}, llama)
    loop = Loop(graphable.target, graphable.drafter, graphable.rule, 5, 5)
    request = build_requests(1, {"max_new_tokens": 20, "ignore_eos": True})
    loop.admit(rows := graphable._rows(PROMPTS[:1], request))
    loop.step()
    assert loop.draft_seconds(3, time.perf_counter)
    while loop.rows.count:
        loop.step()
    assert rows[0].tokens == plain.generate(PROMPTS[0], max_new_tokens=20, ignore_eos=True).tokens


def test_streams_can_be_left(programs: list[Watched]) -> None:
    _, graphable = decoders("model", {}, llama)
    stream = graphable.stream(PROMPTS[0], max_new_tokens=40)
    for _ in range(5):
        next(stream)
    stream.close()
    again = graphable.generate(PROMPTS[0], max_new_tokens=10).tokens
    assert again == decoders(None, {}, llama)[0].generate(PROMPTS[0], max_new_tokens=10).tokens


def test_rows_come_and_go_without_new_programs(programs: list[Watched]) -> None:
    _, graphable = decoders("model", {}, llama, rows=2)
    graphable.generate(PROMPTS[:2], max_new_tokens=[30, 8])
    before = {key for watched in programs for key in watched.runs}
    graphable.generate([PROMPTS[2], PROMPTS[0], PROMPTS[1]], max_new_tokens=[8, 20, 9])
    assert {key for watched in programs for key in watched.runs} <= before


@pytest.mark.parametrize("rows", [32, 12])
def test_rows_that_ended_keep_their_slots_for_a_while(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large captured batch rows leave together, when a smaller program will do; others write on as if alone."""
    prompts = [[1 + i % 7, 2, 3 + i % 5][: 2 + i % 2] for i in range(32)]
    settings: dict[str, Any] = {
        "max_new_tokens": [5 + 3 * (i % 11) for i in range(32)],
        "temperature": [0.0, 0.9, 1.2, 0.7] * 8,
        "seed": list(range(32)),
        "eos_token_ids": (3, 5),
    }
    model = llama(4)
    plain = paceline.SpeculativeDecoder(model, draft=None, rows=rows).generate(prompts, **settings)
    sat, left = [], []
    mark_idle, compact = Rows.mark_idle, Rows.compact
    monkeypatch.setattr(Rows, "mark_idle", lambda self, ended: (sat.append(len(ended)), mark_idle(self, ended))[1])
    monkeypatch.setattr(Rows, "compact", lambda self, *moves: (left.append(len(moves[1])), compact(self, *moves))[1])
    monkeypatch.setattr(flight, "programs_for", lambda lm: Rehearsal())
    decoder = paceline.SpeculativeDecoder(model, draft=None, rows=rows)
    for _ in range(2):
        found = decoder.generate(prompts, **settings)
        assert [each.tokens for each in found] == [each.tokens for each in plain]
        assert [each.finish_reason for each in found] == [each.finish_reason for each in plain]
    assert sum(sat) > 8, "some have kept their slots"
    assert max(left) > 1, "several have moved at once"


def test_longer_texts_seldom_move_what_programs_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation grows: its programs stay, as long as there is room for a thousand tokens."""
    forgotten: list[int] = []

    class Counting(Rehearsal):
        def forget(self) -> None:
            forgotten.append(1)

    monkeypatch.setattr(flight, "programs_for", lambda lm: Counting())
    lm = paceline.load(llama(max_position_embeddings=2048))
    decoder = paceline.SpeculativeDecoder(lm, "eagle", options={"head": EagleHead.random(lm, 0)})
    for length in (5, 300, 600, 900):
        decoder.generate([1, 2, 3] * (length // 3), max_new_tokens=8, ignore_eos=True)
    assert len(forgotten) == 1  # the first
    decoder.generate([1, 2, 3] * 400, max_new_tokens=8, ignore_eos=True)
    assert len(forgotten) == 2
    capacity = flight.Capacity(captured=True)
    wanted = [(200, 1), (1025, 8), (3000, 1), (5000, 1), (200, 16), (700, 64)]
    assert [capacity.slots(*each) for each in wanted] == [1024, 2048, 4096, 8192, 256, 768]
