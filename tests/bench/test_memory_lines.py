"""Memory by line of source, by tracemalloc and by memray."""

from __future__ import annotations

import sys
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from paceline.bench import bench_session
from paceline.bench import machine_use as room
from paceline.bench.bench_options import BenchOptions
from paceline.bench.bench_session import BenchSession
from paceline.bench.machine_use import NOTES, Busy, lines_while
from paceline.bench.results.metrics import summarise
from paceline.bench.results.outputs import as_html
from paceline.bench.results.records import read_records
from paceline.bench.results.tables import memory_lines
from paceline.core.costs import Costs

KILOBYTES = 200


@pytest.fixture
def without_memray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "find_spec", lambda name: None)


def hold() -> list[bytearray]:
    return [bytearray(1000) for _ in range(KILOBYTES)]  # this line


@pytest.mark.usefixtures("without_memray")
def test_tracemalloc_names_the_line_that_holds_the_most() -> None:
    held, (first, *_) = lines_while(hold)
    assert len(held) == KILOBYTES
    assert first.profiler == "tracemalloc"
    assert first.file.endswith("tests/bench/test_memory_lines.py")
    assert first.source.endswith("# this line")
    assert 1000 * KILOBYTES <= first.bytes < 1200 * KILOBYTES
    assert first.blocks >= KILOBYTES
    assert not tracemalloc.is_tracing()


@pytest.mark.usefixtures("without_memray")
def test_what_is_freed_before_the_end_is_seen_while_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = threading.Event()
    real = tracemalloc.take_snapshot

    def snapshot() -> tracemalloc.Snapshot:
        found = real()
        if sum(each.size for each in found.statistics("filename")) > 1000 * KILOBYTES:
            taken.set()
        return found

    monkeypatch.setattr(room.tracemalloc, "take_snapshot", snapshot)

    def act() -> bool:
        held = hold()
        return taken.wait(60) and len(held) > 0  # until it was looked at, however slow the machine is

    result, (first, *_) = lines_while(act)
    assert result
    assert first.source.endswith("# this line")


@pytest.mark.usefixtures("without_memray")
def test_a_failure_ends_the_tracing() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        lines_while(fail)
    assert not tracemalloc.is_tracing()
    assert not [thread for thread in threading.enumerate() if thread.name == "paceline-memory-lines"]


def test_memray_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with memray's own calls; the real one is tried below where it is installed."""
    fake: Any = ModuleType("memray")
    traced: list[Path] = []

    class Tracker:
        def __init__(self, path: Path) -> None:
            traced.append(path)

        def __enter__(self) -> None:
            pass

        __exit__ = lambda self, *_: None  # noqa: E731

    class FileReader(Tracker):
        def __enter__(self) -> FileReader:  # type: ignore[override]
            return self

        def get_high_watermark_allocation_records(self, merge_threads: bool) -> list[Any]:
            def record(size: int, frames: list[Any]) -> Any:
                return SimpleNamespace(size=size, n_allocations=1, stack_trace=lambda max_stacks: frames[:max_stacks])

            here = ("hold", __file__, 37)
            return [record(10, [here, ("main", "x.py", 1)]), record(5, []), record(30, [here])]

    fake.Tracker, fake.FileReader = Tracker, FileReader
    monkeypatch.setitem(sys.modules, "memray", fake)
    monkeypatch.setattr(room, "find_spec", lambda name: object())
    result, lines = lines_while(lambda: 7)
    assert result == 7
    assert [(line.line, line.bytes, line.blocks) for line in lines] == [(37, 40, 2), (0, 5, 1)]
    assert lines[0].profiler == "memray"
    assert traced[0] == traced[1]
    assert not traced[0].parent.exists()


def test_the_real_memray_sees_tensors() -> None:
    pytest.importorskip("memray", reason="memray is not installed (optional): pip install memray")
    import torch

    _, (first, *_) = lines_while(lambda: torch.zeros(1 << 22))
    assert first.profiler == "memray"
    assert first.bytes >= 1 << 24
    assert "torch.zeros" in first.source


@pytest.mark.usefixtures("without_memray")
def test_a_benchmark_shows_and_keeps_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_session, "how_busy", lambda device: Busy(0.0))
    monkeypatch.setattr(
        "paceline.bench.bench_session.measured_costs", lambda *_, **__: Costs({1: {1: 0.001, 8: 0.002}})
    )
    options = BenchOptions(
        shape="tiny", runs=("suffix",), max_new_tokens=6, prompt_tokens=8, limit=1, repeats=1, warm_up=0,
        memory_lines=True,
    )  # fmt: skip
    out = tmp_path / "bench.jsonl"
    with out.open("w") as file:
        BenchSession(options, out=file).run()
    report = read_records(out)
    assert {line["contestant"] for line in report.memory_lines} == {"plain", "suffix"}
    table = memory_lines(report)
    assert table.note == NOTES["tracemalloc"]
    assert "does not see tensors" in table.note
    assert "Memory by line" in as_html(report, summarise(report))
    assert not memory_lines(replace(report, memory_lines=())).rows
