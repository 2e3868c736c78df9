"""Captured programs, as far as they can be looked at without a device: when they are captured, and when not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from paceline.common.errors import PacelineWarning
from paceline.models import cuda_graph
from paceline.models.cuda_graph import MOST, Programs


class Graph:
    """Stands for a captured graph, and counts."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Programs:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(Programs, "_captured", lambda self, program: cuda_graph._Program(Graph(), program()))
    return Programs(torch.device("cpu"))


def test_run_once_then_replayed(programs: Programs) -> None:
    ran: list[int] = []
    for _ in range(5):
        programs.run("key", lambda: ran.append(1))
    assert len(ran) == 2, "as it is, and while it is captured"
    assert programs._made["key"].graph.replays == 4


def test_the_longest_unused_makes_room(programs: Programs) -> None:
    for key in range(MOST):
        programs.run(key, lambda: None)
    programs.run(0, lambda: None)
    programs.run("one more", lambda: None)
    assert len(programs._made) == MOST
    assert 0 in programs._made
    assert 1 not in programs._made


@pytest.mark.parametrize(
    ("failure", "told"),
    [(torch.cuda.OutOfMemoryError("out"), "not enough memory"), (RuntimeError("a host read"), "a host read")],
)
def test_what_cannot_be_captured_runs_as_it_is(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, failure: Exception, told: str
) -> None:
    def fails(self: Any, program: Any) -> Any:
        raise failure

    monkeypatch.setattr(Programs, "_captured", fails)
    with pytest.warns(PacelineWarning, match=told):
        assert programs.run("key", lambda: 7) == 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # reported once
        assert [programs.run(key, lambda: 8) for key in ("key", "other")] == [8, 8]
