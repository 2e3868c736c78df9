"""Texts by the kernels of the ratio test, interpreted on a CPU: the same seeds give what the rule itself gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import paceline
from paceline.engine import round_graphs as flight
from paceline.models.cuda.cuda_ops import CudaOps
from paceline.models.language_model import LanguageModel
from tests.engine.graph_devices import Rehearsal
from tests.selection import covering
from tests.toys import llama

pytest.importorskip("triton")

from paceline.kernels.cuda import accepting, choosing

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")


def texts(rule: str, draft: Any, options: dict[str, Any], settings: dict[str, Any]) -> Iterator[list[int]]:
    target, small = llama(0).float(), llama(1, num_hidden_layers=1).float()
    named = paceline.LanguageModel(small) if draft == "model" else draft
    decoder = paceline.SpeculativeDecoder(paceline.LanguageModel(target), named, rule=rule, options=options, gamma=2)
    yield from (out.tokens for out in decoder.generate([[1, 2, 3, 1, 2], [7, 8], [4]], max_new_tokens=7, **settings))


@pytest.mark.parametrize(
    ("case", "captured"),
    covering(
        [
            ("ratio", "model", {}, [0.0, 1.1, 0.6]),
            ("multi-round", "model", {}, 0.8),
            ("block", "model", {}, 0.8),
            ("ratio", "model", {"tree": "levels"}, 0.9),
            ("ratio", "staged", {"model": None}, 0.7),
            ("ratio", "prompt-lookup", {}, [0.0, 0.4, 0.0]),
            ("ratio", None, {}, 0.9),
            ("ratio", "model", {}, 0.0),
        ],
        [False, True],
    ),
)
def test_texts(case: tuple[str, Any, dict[str, Any], Any], captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, draft, options, temperature = case
    if "model" in options:
        options = {"model": paceline.LanguageModel(llama(1, num_hidden_layers=1).float())}
    if captured:
        monkeypatch.setattr(flight, "programs_for", lambda lm: Rehearsal())
    monkeypatch.setattr(accepting, "_CHUNK", 32)
    monkeypatch.setattr(choosing, "_CHUNK", 32)
    settings, asked = {"temperature": temperature, "seed": [5, 6, 7]}, []
    wanted = list(texts(rule, draft, options, settings))
    ops: Any = CudaOps()
    ops.ratio_kernel = lambda *given: asked.append(given[2] is not None) or accepting.judge(*given)
    monkeypatch.setattr(LanguageModel, "ops", ops)
    assert list(texts(rule, draft, options, settings)) == wanted
    assert any(asked) == (draft == "model" and not options and rule != "block" and temperature != 0)
