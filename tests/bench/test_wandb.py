"""Logging to Weights & Biases, offline."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.results.metrics import summarise
from paceline.bench.results.outputs import check_wandb, log
from paceline.common.errors import UnsupportedError
from tests.bench.made_reports import made_report


class FakeRun:
    """What `wandb.init` gives, without its process beside ours."""

    url = None
    dir = "here/files"

    def __init__(self, **given: Any) -> None:
        self.given, self.summary, self.logged, self.finished = given, {}, {}, False

    def log(self, content: dict[str, Any]) -> None:
        self.logged.update(content)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[FakeRun]:
    wandb = pytest.importorskip("wandb")
    made: list[FakeRun] = []

    def init(**given: Any) -> FakeRun:
        made.append(FakeRun(**given))
        return made[-1]

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setenv("WANDB_MODE", "offline")
    return made


def test_everything_is_logged(run: list[FakeRun]) -> None:
    report = made_report()
    assert log(report, summarise(report), "mine") == "here"
    (made,) = run
    assert made.given["config"] == report.provenance
    assert (made.given["project"], made.given["mode"]) == ("mine", "offline")
    assert made.summary["all/suffix/speed_up"] == pytest.approx(1.143, abs=0.001)
    assert made.summary["code/suffix/tau"] == 2.5
    assert made.summary["chat/hf/speed_up"] == pytest.approx(0.5)
    assert made.summary["all/suffix/ratio to hf"] > 2
    assert made.summary["complete"] is True
    assert {"tables/All prompts", "tables/Speed-up by category", "charts/speed-up", "charts/v"} <= made.logged.keys()
    assert made.finished


def test_two_contestants_in_one_chart_are_logged_with_their_points(run: list[FakeRun]) -> None:
    report = made_report(versus=("suffix", "hf"))
    log(report, summarise(report))
    logged = run[0].logged
    assert "charts/versus" in logged
    table = logged["chart data/versus"]
    assert table.columns == ["series", "measure", "value (no unit)"]
    assert {row[0] for row in table.data} == {"suffix", "hf"}


def test_a_run_ends_whatever_happens(run: list[FakeRun], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("oh")

    monkeypatch.setattr(FakeRun, "log", fail)
    report = made_report()
    with pytest.raises(RuntimeError, match="oh"):
        log(report, summarise(report))
    assert run[0].finished


def test_without_a_key_nobody_is_asked_for_one(run: list[FakeRun], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE")
    wandb = pytest.importorskip("wandb")
    report = made_report()
    for key, mode in ((None, "offline"), ("k" * 40, "online")):
        monkeypatch.setattr(type(wandb.api), "api_key", property(lambda self, key=key: key))
        log(report, summarise(report))
        assert run[-1].given["mode"] == mode


SCRIPT = """
from tests.bench.made_reports import made_report
from paceline.bench.results.metrics import summarise
from paceline.bench.results.outputs import log
report = made_report()
print(log(report, summarise(report), "mine", folder="."))
"""


@pytest.mark.nightly
def test_offline_it_is_a_folder(tmp_path: Path) -> None:
    """The real thing, in a process of its own: it leaves threads and folders behind."""
    pytest.importorskip("wandb")
    places = {f"WANDB_{name}_DIR": str(tmp_path / name) for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT")}
    more = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env={**os.environ, **places, **more},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder = tmp_path / done.stdout.strip()
    assert list(folder.glob("run-*.wandb"))
    assert list(folder.rglob("speed-up*.png"))
    assert "Traceback" not in done.stderr


def test_without_wandb_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.integrations.provenance.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'paceline\[bench\]'"):
        check_wandb()
