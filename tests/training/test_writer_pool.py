"""SeveralProcesses processes that write: the same shards, however many there are and whatever happens to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.common.errors import InputError
from paceline.models.language_model import LanguageModel
from paceline.training.corpus import Shards
from paceline.training.train_options import TrainOptions, WritingPlan
from paceline.training.train_run import train
from paceline.training.writing import Writer, WriterJob, WriterPool
from tests.toys import letters, llama

HANGS = 600  # seconds: no measure of speed, only the end of a test that would never end
PLAN = WritingPlan(tokens=2000, style="text", answer=10, rows=4, shard=8, temperatures=(0.0, 1.0), seed=5)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pool")
    llama(0).float().save_pretrained(folder / "target")
    letters().save_pretrained(folder / "target")
    return folder / "target"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


class Run:
    """Texts of `count` processes and this one, and what was args on the way. first: is called when this one is about to
    write its first."""

    def __init__(
        self,
        place: Path,
        count: int,
        first: Callable[[WriterPool], None] = lambda pool: None,
        plan: WritingPlan = PLAN,
    ) -> None:
        lm = paceline.load(str(place), device="cpu")
        self.writer, self.job = Writer(lm, plan), WriterJob.of(str(place), None, lm, plan)
        self.notes: list[str] = []
        self.own: list[int] = []
        self.count, self.first = count, first
        self.pool: WriterPool | None = None

    def write(self, number: int) -> Any:
        if not self.own:
            assert self.pool is not None
            self.first(self.pool)
        self.own.append(number)
        return self.writer.write(number)

    def fill(self, folder: Path, cancel: Callable[[], bool] | None = None) -> WriterPool:
        with WriterPool(self.write, self.job, self.count, self.notes.append, cancel) as self.pool:
            self.writer.fill(Shards(folder, {}), write_shard=self.pool.shard)
        assert not any(worker.process.is_alive() for worker in self.pool.workers)
        return self.pool


def wait_for(what: Callable[[], object]) -> None:
    """Until it is so, however slow the machine is; a hang fails after ten minutes instead of never."""
    until = time.monotonic() + HANGS
    while not what():
        assert time.monotonic() < until, "it hangs"
        time.sleep(0.02)


def heard(pool: WriterPool) -> None:
    """Wait until a worker has written something, or has failed."""
    wait_for(lambda: any(future.done() for worker in pool.workers for future in worker.numbers))


def killed(pool: WriterPool) -> None:
    os.kill(pool.workers[0].process.pid, signal.SIGKILL)


def killed_while_it_writes(pool: WriterPool) -> None:
    heard(pool)
    killed(pool)


def alone(place: Path, folder: Path, plan: WritingPlan = PLAN) -> dict[str, bytes]:
    Writer(paceline.load(str(place), device="cpu"), plan).fill(Shards(folder, {}))
    return files(folder)


@pytest.mark.nightly
def test_the_same_shards_by_three(place: Path, tmp_path: Path) -> None:
    wanted = alone(place, tmp_path / "one")
    assert len(wanted) > 6
    run = Run(place, 2, heard)
    pool = run.fill(tmp_path / "three")
    assert files(tmp_path / "three") == wanted
    assert len(pool.workers) == 2
    assert len(run.own) < len(wanted) - 1, "the others wrote some of them"
    assert not run.notes


@pytest.mark.parametrize("how", [pytest.param(killed, marks=pytest.mark.nightly), killed_while_it_writes])
def test_who_is_killed_is_told_of_and_the_rest_is_written(
    how: Callable[[WriterPool], None], place: Path, tmp_path: Path
) -> None:
    long = replace(PLAN, rows=1, answer=60, shard=24, tokens=5000)  # a shard takes more than a moment
    run = Run(place, 1, how, long)
    run.fill(tmp_path / "it")
    assert files(tmp_path / "it") == alone(place, tmp_path / "alone", long)
    assert run.notes == ["one writer ended: it was killed by signal 9; the others continue"]


@pytest.mark.nightly
def test_who_cannot_even_load_is_told_of(place: Path, tmp_path: Path) -> None:
    run = Run(place, 1, heard)
    run.job = replace(run.job, target=str(tmp_path / "none" / "here"))
    run.fill(tmp_path / "it")
    assert files(tmp_path / "it") == alone(place, tmp_path / "alone")
    assert len(run.notes) == 1
    assert run.notes[0].startswith("one writer ended: ")
    assert "here" in run.notes[0]


@pytest.mark.parametrize("later", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_stop_keeps_what_is_written_and_going_on_ends_the_same(later: int, place: Path, tmp_path: Path) -> None:
    wanted = alone(place, tmp_path / "alone")
    folder = tmp_path / "it"
    Run(place, 2).fill(folder, lambda: (folder / "shard-00001.safetensors").exists())
    some = files(folder)
    assert 2 <= len(some) - 1 < len(wanted) - 1
    assert some.items() <= wanted.items()
    Run(place, later).fill(folder)
    assert files(folder) == wanted


def test_nobody_is_started_where_nothing_is_wanted(place: Path, tmp_path: Path) -> None:
    Run(place, 0).fill(tmp_path / "it")
    assert not Run(place, 3).fill(tmp_path / "it").workers


def options(place: Path, out: Path, **changes: Any) -> TrainOptions:
    args: dict[str, Any] = {
        "target": str(place), "kind": "trigram", "out": str(out), "tokens": 900, "style": "text", "answer": 10,
        "rows": 4, "shard": 8, "device": "cpu", "seed": 5, "length": 32,
    }  # fmt: skip
    return TrainOptions(**{**args, **changes})


def test_from_the_options(place: Path, tmp_path: Path) -> None:
    one = train(options(place, tmp_path / "one"))
    two = train(options(place, tmp_path / "two", writers=2))
    assert files(one / "texts") == files(two / "texts")
    train(options(place, tmp_path / "two", tokens=1000))  # however many wrote the first ones
    lm = LanguageModel(llama(0).float(), letters(), "toy")
    with pytest.raises(InputError, match="give a name or a folder, or writers=1"):
        WriterJob.of(lm, None, lm, PLAN)
    with pytest.raises(InputError, match="writers must be at least 1, got 0"):
        options(place, tmp_path / "none", writers=0)


def below(pid: int) -> list[int]:
    """Processes that were started by this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize(
    ("how", "writers"), [(signal.SIGKILL, 2), pytest.param(signal.SIGINT, 3, marks=pytest.mark.nightly)]
)
def test_no_orphans(how: signal.Signals, writers: int, place: Path, tmp_path: Path) -> None:
    args = ["--target", str(place), "--kind", "trigram", "--out", str(tmp_path / "it"), "--tokens", "10000000",
            "--style", "text", "--answer", "10", "--rows", "4", "--shard", "8", "--device", "cpu", "--seed", "5",
            "--writers", str(writers), "--temperatures", "0,1"]  # fmt: skip
    command = [sys.executable, "-m", "paceline", "train", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: process.poll() is not None or len(list((tmp_path / "it").glob("texts/shard-*"))) >= 3)
        pids = below(process.pid)
        assert len(pids) == writers, "the other writers and the resource tracker of multiprocessing"
        process.send_signal(how)
        _, told = process.communicate(timeout=HANGS)
    assert process.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 130), told
    wait_for(lambda: not any(_runs(pid) for pid in pids))
    written = files(tmp_path / "it" / "texts")
    shards = [name for name in written if name.startswith("shard-") and name.endswith(".safetensors")]
    assert shards == [f"shard-{number:05}.safetensors" for number in range(len(shards))]
    assert len(shards) >= 3
    plan = replace(PLAN, tokens=1)
    Writer(paceline.load(str(place), device="cpu"), plan).fill(Shards(tmp_path / "again", {}))
    assert files(tmp_path / "again")[shards[0]] == written[shards[0]]
