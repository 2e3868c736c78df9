"""Trained drafters that come along are found for the very model they were made for, and `auto` takes the best."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.toys import llama

import paceline
from paceline.core.costs import Costs
from paceline.core.errors import InputError
from paceline.drafters import shipped as room
from paceline.drafters.draft_lm import DraftLayers
from paceline.drafters.eagle import EagleHead
from paceline.drafters.medusa import MedusaHead
from paceline.drafters.shipped import best_for, shipped
from paceline.models.language_model import LanguageModel

FREE = Costs({1: {1: 1.0, 64: 1.01}})


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    lm = LanguageModel(llama(0, num_hidden_layers=3), name="toy")
    EagleHead.random(lm).save(tmp_path / "toy" / "eagle", "int8")
    MedusaHead.random(lm).save(tmp_path / "toy" / "medusa", "bfloat16")
    (tmp_path / "toy" / "catalogue.json").write_text(json.dumps({"best": ["medusa", "eagle"]}))
    monkeypatch.setattr(room, "ROOT", tmp_path)
    return lm


def test_the_best_first_and_for_no_other_model(target: LanguageModel, tmp_path: Path) -> None:
    assert list(shipped(target)) == ["medusa", "eagle"]
    assert best_for(target) == ("medusa", {"head": str(tmp_path / "toy" / "medusa")})
    for other in (llama(1, num_hidden_layers=3), llama(0, num_hidden_layers=2)):
        assert shipped(LanguageModel(other)) == {}
        assert best_for(LanguageModel(other)) is None


def test_auto_takes_it(target: LanguageModel) -> None:
    plain = paceline.SpeculativeDecoder(target).generate([1, 2, 3], max_new_tokens=30)
    decoder = paceline.SpeculativeDecoder(target, "auto", options={"costs": FREE})
    assert "medusa" in decoder.describe()
    assert decoder.generate([1, 2, 3], max_new_tokens=30).tokens == plain.tokens
    other = paceline.SpeculativeDecoder(llama(1), "auto", options={"costs": FREE})
    assert "medusa" not in other.describe()


@pytest.mark.parametrize("kind", ["eagle", "medusa", "draft-lm"])
def test_a_drafter_without_a_head_takes_what_comes_along(kind: str, target: LanguageModel, tmp_path: Path) -> None:
    if kind == "draft-lm":
        DraftLayers(target, (0,)).save(tmp_path / "toy" / kind)
        (tmp_path / "toy" / "catalogue.json").write_text(json.dumps({"best": ["medusa", "eagle", kind]}))
    plain = paceline.SpeculativeDecoder(target).generate([1, 2, 3], max_new_tokens=20)
    found = paceline.SpeculativeDecoder(target, kind).generate([1, 2, 3], max_new_tokens=20)
    assert found.tokens == plain.tokens
    assert found.stats.drafted > 0
    among = paceline.SpeculativeDecoder(target, "portfolio", options={"drafters": (kind, "suffix")})
    assert among.generate([1, 2, 3], max_new_tokens=20).tokens == plain.tokens
    with pytest.raises(InputError, match=f"{kind} needs a trained head, and none comes with Paceline for Llama"):
        paceline.SpeculativeDecoder(llama(1), kind)


def test_what_is_in_the_package_fits_its_own_description() -> None:
    for index in room.ROOT.glob("*/catalogue.json"):
        for kind in json.loads(index.read_text())["best"]:
            assert (index.parent / kind / "config.json").exists()
            assert (index.parent / kind / "model.safetensors").exists()
