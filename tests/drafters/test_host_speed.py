"""A proposal does not get slower with the text. Ratios, for this machine may be busy; host_speed.py has the figures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.drafters.host_speed import DRAFTERS, measure


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_proposal_does_not_grow_with_the_context(name: str, record_property: Callable[[str, object], None]) -> None:
    """The best of three tries each: whatever else runs here can only make them slower."""
    short = [measure(DRAFTERS[name], 1_000, 60) for _ in range(3)]
    long = [measure(DRAFTERS[name], 16_000, 60) for _ in range(3)]
    best, worst = min(speed.propose for speed in short), min(speed.propose for speed in long)
    record_property("propose_us_at_1000", best)
    record_property("propose_us_at_16000", worst)
    record_property("learn_us_per_token_at_16000", min(speed.learn for speed in long))
    assert min(speed.drafted for speed in long) > 1
    assert worst < 2 * best
    assert worst < 1_000
    assert min(speed.learn for speed in long) < 1_000
