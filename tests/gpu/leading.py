"""`auto` where whole rounds are captured: the same texts while it drafts, rests, catches up and goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import paceline
from paceline.core.costs import Costs
from paceline.drafters.adaptive import graphed_auto
from paceline.drafters.adaptive.graphed_auto import GraphedAuto
from paceline.drafters.heads.eagle import Eagle, EagleHead

PROMPTS = [[1, 2, 3, 4, 5, 1, 2], [7, 8, 9], [3, 3, 3, 3, 3], list(range(40, 90))]


def slow_while_drafting(leader: GraphedAuto) -> Callable[[], float]:
    """A clock by which drafting never pays."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.5 if leader.resting else 5.0
        return now

    return clock


def check_leader(lm: Any, settings: dict[str, Any]) -> None:
    options = Eagle.Options(head=EagleHead.random(lm), **graphed_auto.TREE)
    leader = GraphedAuto(Eagle(options), Costs({1: {1: 1.0, 64: 1.01}}))
    decoder = paceline.SpeculativeDecoder(lm, leader)
    settings = {**settings, "max_new_tokens": 160, "ignore_eos": True}
    plain = [paceline.SpeculativeDecoder(lm, draft=None).generate(prompt, **settings).tokens for prompt in PROMPTS]
    assert [decoder.generate(prompt, **settings).tokens for prompt in PROMPTS] == plain, "as it is"
    policy, clock = graphed_auto.POLICY, leader._clock
    graphed_auto.POLICY = replace(policy, rest_after=6, first_rest=20, longest_rest=30)
    leader._clock = slow_while_drafting(leader)
    try:
        texts = [decoder.generate(prompt, **settings) for prompt in PROMPTS]
    finally:
        graphed_auto.POLICY, leader._clock = policy, clock
    assert [text.tokens for text in texts] == plain, "with rests"
    drafting = [bool(each.drafted) for each in texts[0].trace.rounds]
    changes = sum(one != other for one, other in zip(drafting[1:], drafting[:-1], strict=True))
    assert changes >= 3, drafting
    began = time.perf_counter()
    decoder.generate(PROMPTS[0], **settings)
    print(f"auto leads: {changes} changes; 160 tokens in {1e3 * (time.perf_counter() - began):.0f} ms by a random head")
