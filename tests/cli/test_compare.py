"""Where two texts part: what a comparison says of the place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import paceline
from paceline import LanguageModel, SpeculativeDecoder
from paceline.cli.commands.generate import Side, _divergence, _in_turns
from paceline.core.costs import Costs
from tests.toys import llama

MODEL = LanguageModel(llama(3))
TARGETS: dict[str, Any] = {
    "a model": MODEL,
    "guided": paceline.guided(MODEL, 2.0),
    "negative prompt": paceline.guided(MODEL, 2.0, [5, 2, 9]),
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_the_gap_is_that_of_the_text_itself(target: LanguageModel) -> None:
    """What was written before it is no prompt: the second branch of a guided target has another one."""
    plain = SpeculativeDecoder(target, draft=None)
    text = plain.generate([1, 7, 9, 4, 7], max_new_tokens=8, ignore_eos=True, logprobs=2)
    other = replace(text, tokens=[*text.tokens[:5], text.tokens[5] + 1, *text.tokens[6:]])
    parted = _divergence(Side("plain", text, [1.0]), Side("other", other, [1.0]), plain)
    assert parted is not None
    assert (parted.position, parted.plain, parted.speculative) == (5, text.tokens[5], text.tokens[5] + 1)
    (_, best), (_, second) = text.logprobs[5].top_raw
    assert parted.gap == pytest.approx(best - second)


PROMPT = [1, 7, 9, 4, 7]
SETTINGS = {"max_new_tokens": 40, "ignore_eos": True, "seed": 1, "temperature": 0.0}


def test_a_drafter_that_remembers_has_not_seen_the_text_before() -> None:
    """Every run has the rounds of a first one."""
    first = SpeculativeDecoder(MODEL, "suffix").generate(PROMPT, **SETTINGS)
    decoder = SpeculativeDecoder(MODEL, "suffix")
    again = decoder.generate(PROMPT, **SETTINGS), decoder.generate(PROMPT, **SETTINGS)
    assert again[1].stats.rounds < first.stats.rounds  # it does remember
    sides = _in_turns(
        {"plain": SpeculativeDecoder(MODEL, draft=None), "it": decoder}, PROMPT, SETTINGS, 2, lambda: False
    )
    assert sides is not None
    assert sides[1].result.stats.rounds == first.stats.rounds
    assert sides[1].result.tokens == first.tokens == sides[0].result.tokens


def test_auto_forgets_before_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rounds depend on the clock, so the order of calls is compared."""
    decoder = SpeculativeDecoder(MODEL, "auto", options={"costs": Costs({1: {1: 1.0, 64: 1.01}})})
    calls: list[str] = []
    for name in ("forget", "generate"):
        call = getattr(decoder, name)
        monkeypatch.setattr(decoder, name, lambda *a, _n=name, _c=call, **k: (calls.append(_n), _c(*a, **k))[1])
    before = decoder.drafter
    assert _in_turns(
        {"plain": SpeculativeDecoder(MODEL, draft=None), "auto": decoder}, PROMPT, SETTINGS, 2, lambda: False
    )
    assert decoder.drafter is not before
    assert calls == ["generate", "forget", "generate", "forget", "generate"]  # the first one is the warm-up
