"""The engine thread with CUDA graphs, on an imitated device: pieces of prompts, prefixes and idle rows."""

from __future__ import annotations

from typing import Any

import pytest

import paceline
from paceline.drafters.heads.eagle import EagleHead
from tests.engine.graph_devices import Watched, watched
from tests.serve.collected import engine, small_model
from tests.serve.test_engine_thread import check_all, prompts

pytestmark = pytest.mark.usefixtures("trees_by_torch")  # a device that is imitated has no kernels of a CPU


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    return watched(monkeypatch)


@pytest.mark.parametrize("draft", [None, "suffix", "eagle"])
def test_texts_do_not_depend_on_load(draft: Any, programs: list[Watched]) -> None:
    model = small_model(kernels=False)
    options = {"head": EagleHead.random(model)} if draft == "eagle" else None
    plain = paceline.SpeculativeDecoder(model, None, strict=True, runner="eager")
    with engine(model, draft, decoder={"strict": True, "options": options}) as collected:
        scheduler = collected.engine._scheduler
        tables = (scheduler.loop.rows.store, *scheduler.loop.reader.cache.keys)
        check_all(collected, plain, prompts(10), 2, logprobs=None, max_draft=None)
        after = (scheduler.loop.rows.store, *scheduler.loop.reader.cache.keys)
        assert all(one is other for one, other in zip(tables, after, strict=True)), "the tables grew"
        assert collected.engine.state().prefix_hits > 0, "the prefix cache was not used"
    assert sum(count > 1 for each in programs for count in each.runs.values()), "no graph was replayed"
