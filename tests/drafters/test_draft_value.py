"""The value of a draft against its forward pass, and the measured costs behind it."""

from __future__ import annotations

import pytest

from paceline.core.costs import Costs, bound
from paceline.drafters.adaptive.stats import PLAIN, Calibration, Throughput, best_depth, best_width, price_of_node

STEEP = [1.0, 1.7, 1.8, 1.9, 2.0]  # a CPU: the second token is expensive, the others are cheap
FLAT = [1.0, 1.01, 1.02, 1.03, 1.04]


def test_a_draft_is_read_only_where_it_pays() -> None:
    hesitant = [[0.5, 0.25, 0.12, 0.06]]
    assert best_width(hesitant, STEEP, 1.0)[0] is PLAIN
    assert best_width(hesitant, FLAT, 1.0)[0].nodes == 4
    assert best_width([[0.9, 0.8, 0.7, 0.65]], STEEP, 1.0)[0].nodes == 4


def test_what_was_not_worth_it_is_returned_too() -> None:
    value, speculating = best_width([[0.5]], STEEP, 1.0)
    assert (value.nodes, speculating.nodes, speculating.tokens, speculating.price) == (0, 1, 1.5, 1.7)
    assert best_width([[]], STEEP, 1.0) == (PLAIN, PLAIN)


def test_high_throughput_shortens_drafts() -> None:
    """At three tokens per pass a node with a chance of 3 % is not worth 1 % of a pass more."""
    chances = [[0.9, 0.8, 0.025, 0.02]]
    assert best_width(chances, FLAT, 1.0)[0].nodes == 4
    assert best_width(chances, FLAT, 3.0)[0].nodes == 2


def test_rows_decide_together() -> None:
    """One row that is sure of itself does not make seven others read padding, unless it pays for all."""
    sure, none = [0.95, 0.9, 0.86, 0.82], [0.05]
    assert best_width([sure], STEEP, 1.0)[0].nodes == 4
    assert best_width([sure] + [none] * 7, STEEP, 1.0)[0] is PLAIN
    assert best_width([sure] * 7 + [none], STEEP, 1.0)[0].nodes == 4


def test_draft_steps_have_their_price() -> None:
    chances = [0.8, 0.64, 0.51, 0.41]
    assert best_depth(chances, FLAT, 0.0, 1.0).nodes == 4
    assert best_depth(chances, FLAT, 0.55, 1.0).nodes == 2
    assert best_depth(chances, FLAT, 0.9, 1.0) is PLAIN


def test_throughput_begins_and_ends_at_plain_decoding() -> None:
    throughput = Throughput()
    assert throughput.value == 1.0
    for _ in range(200):
        throughput.add(4.0, 1.5)
    assert 2.0 < throughput.value < 4.0 / 1.5
    for _ in range(400):
        throughput.add(1.0, 1.6)  # losing
    assert throughput.value == 1.0


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = Costs({1: {1: 2.0, 2: 3.0, 8: 6.0}, 4: {1: 3.0, 2: 5.0, 8: 11.0}}, overhead=0.5, drafters={"small": 0.4})
    assert costs.seconds(5) == pytest.approx(4.5)
    assert costs.seconds(14) == pytest.approx(9.0)  # the last slope goes on
    assert costs.seconds(1, rows=2) == pytest.approx(2.0 + 1 / 3)
    assert costs.seconds(4, rows=8) == pytest.approx(11.0)  # more rows than ever measured: by the number of tokens
    assert (costs.v(8), costs.c("small"), costs.o()) == (3.0, 0.2, 0.25)
    assert costs.c("unknown") == 0.0
    assert Costs.from_dict(costs.as_dict()) == costs


def test_the_bound_follows_the_formula() -> None:
    costs = Costs({1: {1: 1.0, 4: 1.3}}, overhead=0.1, drafters={"small": 0.05})
    expected = (1 - 0.8**4) / (1 - 0.8)
    assert bound(0.8, 3, costs, "small") == pytest.approx(expected / (1.3 + 3 * 0.05 + 0.1))
    assert bound(1.0, 3, costs, "small") == pytest.approx(4 / 1.55)


def test_promises_are_scaled_by_what_was_accepted() -> None:
    calibration = Calibration()
    calibration.add(1.4, 3)  # a promise is never scaled up
    assert calibration.value == 1.0
    for _ in range(4):
        calibration.add(1.4, 0)
    assert 0.4 < calibration.value < 0.7
    for _ in range(20):
        calibration.add(1.0, 2)
    assert calibration.value == 1.0


def test_the_price_of_a_node_is_that_of_a_few_where_they_are_cheapest() -> None:
    """The price of the first node does not count."""
    cliff = [1.0, 1.65, *[1.7] * 12]
    assert price_of_node(cliff) == 0.0
    slope = [1.0, 1.01, *[1.01 + 0.05 * n for n in range(1, 20)]]
    assert price_of_node(slope) == pytest.approx(0.05)
    assert price_of_node([1.0, 1.2]) == 0.0  # nothing is known
