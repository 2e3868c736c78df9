"""The measurement: the order, what counts, failures and interruption."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.bench.bench_session import check_same, first_difference, order
from paceline.bench.candidate import Plan, Run, Task
from paceline.bench.results.records import Recorder, Report, Result, Watcher, open_record, read_records
from paceline.common.errors import InputError, ModelOutputError, PacelineWarning

from .acting import Actor, Chat, act, chats


def run(actors: Sequence[Actor], conversations: Sequence[Chat], **changes: Any) -> Report:
    return act(actors, conversations, 8, **{"repeats": 3, **changes})


def actors(*names: str, **changes: Any) -> tuple[list[Actor], list[tuple[str, str, int, int]]]:
    log: list[tuple[str, str, int, int]] = []
    return [Actor(name, log=log, **changes) for name in names], log


def test_contestants_take_turns_and_every_second_repeat_goes_backwards() -> None:
    three, log = actors("a", "b", "c")
    run(three, chats("1"), repeats=4)
    assert "".join(name for name, *_ in log) == "abc" + "cba" + "bca" + "acb"
    assert [repeat for _, _, repeat, _ in log] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3


def test_plain_decoding_opens_every_task_and_the_others_change_places() -> None:
    three, log = actors("a", "b", "c")
    run(three, chats("1", "2", "3"), repeats=1)
    assert "".join(name for name, *_ in log) == "abc" + "acb" + "abc"
    assert order(1, 5, 3) == [0]


def test_the_warm_up_is_done_once_and_not_counted() -> None:
    two, log = actors("a", "b")
    report = run(two, chats("1", "2"), repeats=1, warm_up=3)
    assert [(name, tokens) for name, *_, tokens in log[:2]] == [("a", 3), ("b", 3)]
    assert [tokens for *_, tokens in log[2:]] == [8] * 4
    assert len(report.results) == 4
    assert all(result.run.emitted == 8 for result in report.results)


def test_the_second_turn_follows_what_plain_decoding_wrote() -> None:
    a, b = Actor("a"), Actor("b", changed_at=2)
    report = run([a, b], chats("1", turns=2), repeats=2)
    assert report.tasks == ("1", "1/2")
    second = [result for result in report.results if result.run.task == "1/2"]
    assert second[0].run.tokens[0][0] == 3 + 8  # the prompt, and its own eight tokens
    assert [(r.run.contestant, r.same, r.parted) for r in second[:2]] == [("a", True, None), ("b", False, 2)]


@pytest.mark.parametrize("after", [0, 1, 4, 7])
def test_stopping_after_some_runs_leaves_a_valid_file_with_exactly_those(after: int, tmp_path: Any) -> None:
    three, log = actors("a", "b", "c")
    path = tmp_path / "runs.jsonl"
    with path.open("w") as file:
        recorder = Recorder(file)
        recorder.add("provenance", {"date": "today"})
        run(three, chats("1", "2"), recorder=recorder, cancel=lambda: len(log) >= after)
    report = read_records(path)
    assert len(report.results) == after
    assert not report.complete
    assert [line["kind"] for line in map(json.loads, path.read_text().splitlines())][-1] == "summary"


def test_a_run_that_was_interrupted_is_dropped() -> None:
    stopped: list[bool] = []

    class Cut(Actor):
        def run(self, task: Task, *arguments: Any) -> Run:
            stopped.append(True)
            return Run.cancelled(self.name, task, 0)

    report = run([Actor("a"), Cut("b")], chats("1"), cancel=lambda: bool(stopped))
    assert [result.run.contestant for result in report.results] == ["a"]
    assert not report.complete
    assert not report.notes


def test_whoever_raises_is_noted_and_left_out_from_there_on() -> None:
    broken = Actor("b", fails=lambda task, repeat: ValueError("no luck.") if (task, repeat) == ("2", 1) else None)
    report = run([Actor("a"), broken, Actor("c")], chats("1", "2", "3"))
    count = {name: sum(r.run.contestant == name for r in report.results) for name in "abc"}
    assert count == {"a": 9, "b": 4, "c": 9}
    assert report.notes == ("b failed in task 2 and is left out from there on: ValueError: no luck.",)
    assert report.complete


def test_failing_in_the_warm_up_is_failing() -> None:
    report = run([Actor("a"), Actor("b", fails=lambda task, repeat: InputError("Not so."))], chats("1"), warm_up=2)
    assert report.notes == ("b failed in task 1 and is left out from there on: Not so.",)
    assert {result.run.contestant for result in report.results} == {"a"}


def test_another_number_of_tokens_is_no_result() -> None:
    report = run([Actor("a"), Actor("b", off=1)], chats("1"))
    assert {result.run.contestant for result in report.results} == {"a"}
    assert "b failed in task 1" in report.notes[0]
    assert "wrote [9] tokens for 1 instead of 8" in report.notes[0]


def test_without_plain_decoding_there_is_nothing_to_measure() -> None:
    with pytest.raises(ModelOutputError, match=r"'a' wrote \[7\] tokens for 1 instead of 8"):
        run([Actor("a", off=-1), Actor("b")], chats("1"))
    with pytest.raises(InputError, match=r"Too bad\."):
        run([Actor("a", fails=lambda task, repeat: InputError("Too bad.")), Actor("b")], chats("1"))


def test_whoever_refuses_is_counted_with_its_tasks() -> None:
    told: list[str] = []

    class Listener(Watcher):
        def started(self, candidates: Any, runs: int) -> None:
            told.append(f"{runs} runs")

        def ran(self, result: Result) -> None:
            told.append(result.run.contestant)

        def noted(self, sentence: str) -> None:
            told.append(sentence)

    two = [Actor("a"), Actor("b", refuses_tasks=("1", "3"))]
    report = run(two, chats("1", "2", "3"), repeats=1, watcher=Listener())
    assert [(each.contestant, each.why, each.tasks) for each in report.skipped] == [("b", "it cannot", ("1", "3"))]
    assert told == ["6 runs", "b does not take part in 1: it cannot", "a", "a", "b", "a"]


def test_a_second_ctrl_c_still_leaves_the_refusals_and_all_runs(tmp_path: Any) -> None:
    class Impatient(Actor):
        def run(self, *arguments: Any) -> Run:
            raise KeyboardInterrupt

    file = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        run([Actor("a"), Actor("b", refuses_tasks=("1",)), Impatient("c")], chats("1"), recorder=Recorder(file))
    kinds = [json.loads(line)["kind"] for line in file.getvalue().splitlines()]
    assert kinds == ["contestants", "run", "skipped"]


def test_the_first_difference_of_any_row() -> None:
    assert first_difference([[1, 2, 3], [1, 2, 3]], [[1, 2, 3], [1, 2, 3]]) is None
    assert first_difference([[1, 2, 3], [1, 5, 3]], [[1, 2, 4], [1, 2, 3]]) == 1


def test_memory_is_weighed_in_a_run_of_its_own_once_in_a_category() -> None:
    two, log = actors("a", "b")
    talks = [*chats("1", "2"), *chats("3", category="code")]
    report = run(two, talks, repeats=1, weigh=lambda act: (act(), 77))
    assert [(name, task) for name, task, *_ in log[:4]] == [("a", "1"), ("b", "1"), ("a", "1"), ("b", "1")]
    assert [(r.run.task, r.run.peak) for r in report.results if r.run.contestant == "b"] == [
        ("1", 77),
        ("2", None),
        ("3", 77),
    ]


def test_what_was_cut_short_is_gone_on_with(tmp_path: Any) -> None:
    """Nothing is run twice, the record is whole, and texts are still compared with plain decoding's."""
    path = tmp_path / "bench.jsonl"
    two, log = actors("a", "b")
    left = iter([False] * 11 + [True] * 99)
    with path.open("w") as file:
        recorder = Recorder(file)
        recorder.add("provenance", {"arguments": {}})
        run(two, chats("1", "2"), recorder=recorder, cancel=lambda: next(left))
    before = len(log)
    assert 0 < before < 12
    with path.open("a") as file:
        file.write('{"kind": "run", "contes')  # and killed in the middle of a line
    with pytest.warns(PacelineWarning, match="is incomplete"):
        file, earlier = open_record(path, resume=True)
    assert earlier is not None
    with file:
        recorder = Recorder(file)
        recorder.add("provenance", {"arguments": {}})
        recorder.resume(earlier)
        report = run(two, chats("1", "2"), recorder=recorder)
    assert len(log) == 12
    assert len({entry[:3] for entry in log}) == 12
    assert report.complete
    again = read_records(path)
    assert again.complete
    assert len(again.results) == 12
    assert all(result.same for result in again.results)


def test_only_the_same_benchmark_can_be_gone_on_with() -> None:
    earlier = Report({"arguments": {"gamma": 5, "limit": 3}, "cpu": "here"}, (), ())
    check_same(earlier, {"arguments": {"gamma": 5, "limit": 9}, "cpu": "here"})
    with pytest.raises(InputError, match="gamma 5 and this is 7"):
        check_same(earlier, {"arguments": {"gamma": 7, "limit": 3}, "cpu": "here"})
    with pytest.raises(InputError, match="cpu 'here' and this is 'there'"):
        check_same(earlier, {"arguments": {"gamma": 5, "limit": 3}, "cpu": "there"})


def test_who_captures_is_warmed_up_for_every_shape() -> None:
    """Whole texts, that is: the shapes on the way count, too."""

    class Capturing(Actor):
        def shape_of(self, task: Task, plan: Plan) -> int:
            return len(task.id)

    log: list[Any] = []
    capturing, other = Capturing("a", log=log), Actor("b", log=log)
    report = run([capturing, other], chats("1", "2", "33"), repeats=1, warm_up=3)
    counts = {name: [tokens for who, *_, tokens in log if who == name] for name in "ab"}
    assert counts == {"a": [8, 8, 8, 8, 8], "b": [3, 8, 8, 8]}  # of "1", timed, timed, of "33", timed
    assert len(report.results) == 6
