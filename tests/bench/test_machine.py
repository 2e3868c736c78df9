"""The load of a machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.bench import machine_use as machine
from paceline.bench.machine_use import Busy, check_quiet, how_busy
from paceline.common.errors import InputError
from paceline.integrations import provenance as made
from paceline.models.pass_timing import Neighbours, Usage, read_usage


def looks(*usages: Usage | None) -> Any:
    found: Iterator[Usage | None] = iter(usages)
    return lambda: next(found)


def test_what_others_use_is_what_is_used_less_our_own() -> None:
    slept: list[float] = []
    busy = how_busy(look=looks(Usage(10, 1, 100, 2), Usage(11.5, 1.5, 104, 2)), sleep=slept.append)
    assert busy.share == pytest.approx((1.5 - 0.5) / 4)
    assert slept == [1.0]
    assert busy.loaded
    assert busy.describe() == "25% of the processors"


@pytest.mark.parametrize(("used", "ours", "share"), [(0.5, 0.9, 0.0), (9, 0, 1.0)])
def test_shares_stay_between_nothing_and_all(used: float, ours: float, share: float) -> None:
    assert Usage(used, ours, 4).others_since(Usage(0, 0, 0)) == share


def test_a_moment_is_too_short_to_tell() -> None:
    assert Usage(0.3, 0, 0.5, 2).others_since(Usage(0, 0, 0, 2)) is None
    assert Usage(0.3, 0, 0.6, 2).others_since(Usage(0, 0, 0, 2)) == pytest.approx(0.5)


def test_a_loaded_machine_is_refused_in_one_sentence_that_says_how_to_go_on() -> None:
    with pytest.raises(InputError, match=r"25% of the processors .* allows 10%.*leave --require-quiet out"):
        check_quiet(Busy(0.25))
    with pytest.raises(InputError, match=r"3% of the processors and 80% of the GPU"):
        check_quiet(Busy(0.03, 0.8))
    check_quiet(Busy(0.05))


def test_where_nothing_says_how_busy_it_is_it_is_unknown(tmp_path: Path) -> None:
    assert read_usage(tmp_path / "stat") is None
    (tmp_path / "stat").write_text("cpu nonsense\n")
    assert read_usage(tmp_path / "stat") is None
    busy = how_busy(look=lambda: None, sleep=lambda seconds: None)
    assert busy.share is None
    check_quiet(busy)
    assert busy.describe().startswith("unknown")
    neighbours = Neighbours(look=lambda: None)
    neighbours.begin()
    assert neighbours.disturbed() is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says it")
def test_the_numbers_of_linux(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  100 0 50 800 20 10 10 10 0 0\ncpu0 1\ncpu1 1\nintr 5\n")
    usage = read_usage(tmp_path / "stat")
    assert usage is not None
    assert (usage.used, usage.capacity, usage.cores) == (1.8, 10.0, 2)
    assert read_usage() is not None


def test_a_run_is_disturbed_when_others_used_more_than_the_limit() -> None:
    neighbours = Neighbours(limit=0.1, look=looks(Usage(0, 0, 0), Usage(1.2, 0.5, 4), Usage(0, 0, 0), Usage(1, 0.7, 4)))
    neighbours.begin()
    assert neighbours.disturbed() is True
    neighbours.begin()
    assert neighbours.disturbed() is False


def test_the_card_that_is_asked_is_the_one_we_see(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(made, "_output", lambda command: asked.append(command) or "40")
    for visible, wanted in (("", "--id=1"), ("3,5", "--id=5")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        busy = how_busy(torch.device("cuda:1"), look=lambda: None, sleep=lambda seconds: None)
        assert busy.gpu == pytest.approx(0.4)
        assert asked[-1][-1] == wanted
    assert machine.wanted_device("cpu") is None
    assert machine.wanted_device("cuda:1") == torch.device("cuda:1")
