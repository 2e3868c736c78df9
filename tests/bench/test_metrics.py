"""Metrics against numbers worked out by hand, and spreads against measuring again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.bench.candidate import Run
from paceline.bench.results.metrics import ALL, Line, noise, predicted_seconds, spread, summarise
from paceline.bench.results.records import Member, Recorder, Report, Result, Tally
from paceline.cli.bench_table import Standings
from paceline.core.costs import Costs, bound
from paceline.core.trace import Round, Trace

from .acting import Actor, act, chats

COSTS = Costs({1: {1: 0.1, 5: 0.2}, 2: {1: 0.1, 5: 0.3}}, overhead=0.02, drafters={"toy": 0.01})
PLAIN = {"1": (2.0, 2.2, 1.8), "2": (4.0, 4.0, 5.0), "3": (3.0, 3.0, 3.0)}


def measured(costs: Costs | None = COSTS) -> Report:
    """Plain decoding, a drafter with two of four tokens accepted, and a peer of half the speed."""
    recorder = Recorder()
    plain = Actor("plain", seconds=lambda task, repeat: PLAIN[task][repeat])
    toy = Actor(
        "toy",
        seconds=lambda task, repeat: PLAIN[task][repeat] / (2.0 if task == "3" else 1.25),
        speculates=True,
        gamma=4,
        accepted=2,
        drafter="toy",
    )
    peer = Actor("hf", seconds=lambda task, repeat: 2 * PLAIN[task][repeat], library="transformers", changed_at=5)
    if costs is not None:
        recorder.add("costs", costs)
    talks = [*chats("1", "2"), *chats("3", category="code")]
    return act([plain, toy, peer], talks, 10, repeats=3, recorder=recorder)


def line(report: Report, contestant: str, category: str = ALL) -> Line:
    found = summarise(report).of(contestant, category)
    assert found is not None
    return found


def test_seconds_are_medians_added_up_and_speed_ups_ratios_of_them() -> None:
    report = measured()
    plain, toy = line(report, "plain", "chat"), line(report, "toy", "chat")
    assert plain.seconds == pytest.approx(2.0 + 4.0)
    assert plain.tokens_per_second == pytest.approx(20 / 6.0)
    assert plain.speed_up is not None
    assert plain.speed_up.value == 1
    assert toy.speed_up is not None
    assert toy.speed_up.value == pytest.approx(1.25)
    everything = line(report, "toy")
    assert everything.speed_up is not None
    assert everything.speed_up.value == pytest.approx(9.0 / (6.0 / 1.25 + 1.5))
    assert everything.ratios["hf"].value == pytest.approx(18.0 / (6.0 / 1.25 + 1.5))
    assert (everything.tasks, everything.runs, everything.disturbed) == (3, 9, 0)


def test_decoding_is_what_comes_after_the_first_token() -> None:
    plain = line(measured(), "plain", "code")
    assert plain.first == pytest.approx(0.3)
    assert plain.decode_tokens_per_second == pytest.approx(9 / 2.7)
    assert plain.latency == pytest.approx((0.3, 0.3, 0.3))


def test_rounds_in_the_words_of_exactness() -> None:
    toy = line(measured(), "toy", "code")
    # 10 tokens: rounds of 2 accepted and 1 own, drafts of 4, 4, 3 and none
    assert (toy.rounds, toy.drafted, toy.accepted) == (12, 33, 18)  # of three repeats
    assert toy.tau == pytest.approx(10 / 4)
    assert toy.acceptance_rate == pytest.approx(18 / 33)
    assert toy.alpha == pytest.approx(2 / 3)  # in each of three drafts two went on, and one did not
    assert toy.by_position == ((9, 9), (9, 9), (0, 9), (0, 6))
    assert toy.efficiency == pytest.approx(2.0 / 2.5)
    assert toy.bound == pytest.approx(bound(2 / 3, 4, COSTS, "toy"))
    assert toy.bound == pytest.approx((1 - (2 / 3) ** 5) / (1 - 2 / 3) / (2 + 0.4 + 0.2))
    assert toy.reached == pytest.approx(2.0 / toy.bound)


def test_others_have_no_rounds_and_plain_decoding_no_bound() -> None:
    report = measured()
    peer, plain = line(report, "hf"), line(report, "plain")
    assert (peer.rounds, peer.tau, peer.bound, peer.predicted) == (None,) * 4
    assert (plain.tau, plain.bound, plain.efficiency) == (1, None, None)
    assert (peer.compared, peer.same, peer.parted) == (3, 0, 5)
    assert (plain.compared, plain.same, plain.parted) == (3, 3, None)
    assert line(measured(None), "toy").bound is None


def test_the_prediction_is_the_trace_at_measured_costs() -> None:
    toy = line(measured(), "toy", "code")
    # in passes of plain decoding, 0.1 + 0.02 each: v(5) twice, v(4) once, v(1) once, with o and c per drafted token
    passes = (2 * (0.2 + 0.02 + 0.04) + (0.175 + 0.02 + 0.03) + (0.1 + 0.02)) / 0.12
    seconds = 0.3 + 0.3 * (passes - 1)
    assert toy.predicted == pytest.approx(3.0 / seconds)
    assert toy.prediction_error == pytest.approx(abs(3.0 / seconds - 2.0) / 2.0)


def test_rows_of_a_batch_share_their_passes() -> None:
    def chain(*sizes: int) -> Trace:
        return Trace([Round((7,) * size, None, (), 1, False) for size in sizes])

    tally = Tally.of([chain(4, 0, 2), chain(2)])
    assert tally is not None
    assert tally.steps == {(2, 5, 4): 1, (1, 1, 0): 1, (1, 3, 2): 1}
    assert (tally.rounds, tally.drafted, tally.judged) == (4, 8, 3)
    plain = Result(Run("plain", "1+2", "chat", 0, ((1, 2, 3), (1, 2, 3)), 3.0, 1.0))
    passes = ((0.3 + 0.02 + 0.04) + (0.1 + 0.02) + (0.15 + 0.02 + 0.02)) / 0.12
    assert predicted_seconds(plain, tally, COSTS, "toy") == pytest.approx(1.0 + passes - 1)


def test_models_that_were_asked_count_in_their_own_seconds_once_per_pass() -> None:
    rows = [Trace([Round((7,), None, (), 1, False, "why", 0.25), Round((7,), None, (), 1, False)]) for _ in range(2)]
    tally, without = Tally.of(rows), Tally.of([Trace([replace(r, asked=0.0) for r in trace.rounds]) for trace in rows])
    assert tally is not None
    assert without is not None
    assert tally.asked == 0.25
    assert Tally.total([tally, tally]).asked == 0.5
    plain = Result(Run("plain", "1+2", "chat", 0, ((1, 2, 3), (1, 2, 3)), 3.0, 1.0))
    more, less = (predicted_seconds(plain, each, COSTS, "toy") for each in (tally, without))
    assert more == pytest.approx((less or 0.0) + 0.25)


def test_a_tree_is_judged_by_its_depth() -> None:
    tree = Round((5, 6, 7), (-1, -1, 0), (0,), 9, False)
    tally = Tally.of([Trace([tree])])
    assert tally is not None
    assert (tally.judged, tally.accepted, dict(tally.steps)) == (2, 1, {(1, 4, 2): 1})


def test_one_repeat_has_no_spread_and_the_same_runs_have_none_either() -> None:
    base = {"1": {0: 1.0, 1: 2.0, 2: 1.5}, "2": {0: 3.0, 1: 3.0, 2: 3.0}}
    once = {task: {0: 1.0} for task in base}
    assert spread(once, once, ["1", "2"]) is None
    half = {task: {repeat: s / 2 for repeat, s in found.items()} for task, found in base.items()}
    assert spread(base, half, ["1", "2"]) == pytest.approx(0)  # a slow moment hits both: paired, nothing is left
    pool = noise(base, half)
    assert pool is not None
    assert (pool.pairs.shape, pool.free) == ((6, 2), 4)


def _session(random: Any, tasks: int, repeats: int) -> dict[str, dict[int, float]]:
    return {
        str(task): {repeat: (1 + task) * float(np.exp(random.normal(0, 0.03))) for repeat in range(repeats)}
        for task in range(tasks)
    }


@pytest.mark.parametrize(("tasks", "repeats"), [(12, 3), (3, 5), (6, 2)])
def test_measuring_again_differs_by_less_than_the_spread(tasks: int, repeats: int) -> None:
    """The promise of the instrument, on paper: of 300 pairs of sessions nearly all."""
    random = np.random.default_rng(7)
    inside, names = 0, [str(task) for task in range(tasks)]
    for _ in range(300):
        ratios = []
        for _ in range(2):
            base, other = (_session(random, tasks, repeats) for _ in range(2))
            sums = [sum(np.median(list(found.values())) for found in one.values()) for one in (base, other)]
            ratios.append(np.log(sums[0] / sums[1]))
        wide = spread(base, other, names)
        assert wide is not None
        assert wide < 0.2
        inside += abs(ratios[0] - ratios[1]) <= wide
    assert inside >= 0.9 * 300


def test_a_contestant_without_results_has_no_line() -> None:
    report = Report({}, (Member("plain"), Member("absent")), measured().results[:1])
    summary = summarise(report)
    assert summary.of("absent") is None
    assert summary.of("plain") is not None
    assert [found.category for found in summary.per_task] == ["1"]


def test_tau_of_a_text_that_ends_inside_an_accepted_draft() -> None:
    """The last round has no token of the target's own: τ is emitted over rounds, not 1 + accepted over rounds."""
    tokens = (1, 2, 3, 4, 5)
    rounds = [Round((1, 2, 9), None, (0, 1), 3, False), Round((4, 5), None, (0, 1), None, False)]
    run = Run("toy", "1", "chat", 0, (tokens,), 1.0, 0.1, traces=(Trace(rounds),))
    tally = Tally.of(run.traces)
    assert tally is not None
    assert (tally.rounds, tally.accepted, tally.emitted) == (2, 4, 5)
    plain = replace(run, contestant="plain", traces=())
    members = (Member("plain"), Member("toy", speculates=True, gamma=3))
    report = Report({}, members, (Result(plain), Result(run, tally)))
    assert line(report, "toy").tau == 5 / 2
    standings = Standings([Actor("plain"), Actor("toy")], 2)
    standings.results += report.results
    table = standings.table()
    assert table.rows[1][table.header.index("τ")].text == "2.50"
