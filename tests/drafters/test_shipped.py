"""Shipped drafters are found for every model of their sizes, and `auto` takes the best."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.toys import llama

import paceline
from paceline.bench.candidate import PacelineRun, Plan, Task, parse_run_specs
from paceline.bench.peers.peer_names import PeerSetup, draft_model_of, open_peers
from paceline.common.errors import InputError, UnknownNameError
from paceline.core.costs import Costs
from paceline.drafters import shipped as room
from paceline.drafters.heads.eagle import EagleHead
from paceline.drafters.heads.medusa import MedusaHead
from paceline.drafters.lookup.trigram import train_trigram
from paceline.drafters.models.draft_lm import DraftLayers
from paceline.drafters.models.early_exit import ExitHead
from paceline.drafters.shipped import best_for, shipped
from paceline.models.language_model import LanguageModel
from paceline.training.train_run import save_table

FREE = Costs({1: {1: 1.0, 64: 1.01}})


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    lm = LanguageModel(llama(0, num_hidden_layers=3), name="toy")
    EagleHead.random(lm).save(tmp_path / "toy" / "eagle", "int8")
    MedusaHead.random(lm).save(tmp_path / "toy" / "medusa", "bfloat16")
    (tmp_path / "toy" / "catalogue.json").write_text(json.dumps({"best": ["medusa", "eagle"]}))
    monkeypatch.setattr(room, "ROOT", tmp_path)
    return lm


def test_the_best_first_and_for_no_other_sizes(target: LanguageModel, tmp_path: Path) -> None:
    assert list(shipped(target)) == ["medusa", "eagle"]
    assert best_for(target) == ("medusa", {"head": str(tmp_path / "toy" / "medusa")})
    assert list(shipped(LanguageModel(llama(1, num_hidden_layers=3)))) == ["medusa", "eagle"]
    for other in (llama(0, num_hidden_layers=2), llama(0, num_hidden_layers=3, vocab_size=48)):
        assert shipped(LanguageModel(other)) == {}
        assert best_for(LanguageModel(other)) is None


def test_auto_takes_it(target: LanguageModel) -> None:
    plain = paceline.SpeculativeDecoder(target, draft=None).generate([1, 2, 3], max_new_tokens=30)
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
    plain = paceline.SpeculativeDecoder(target, draft=None).generate([1, 2, 3], max_new_tokens=20)
    found = paceline.SpeculativeDecoder(target, kind).generate([1, 2, 3], max_new_tokens=20)
    assert found.tokens == plain.tokens
    assert found.stats.drafted > 0
    among = paceline.SpeculativeDecoder(target, "portfolio", options={"drafters": (kind, "suffix")})
    assert among.generate([1, 2, 3], max_new_tokens=20).tokens == plain.tokens
    with pytest.raises(InputError, match=f"{kind} needs a trained head, and Paceline ships none for Llama"):
        paceline.SpeculativeDecoder(llama(1), kind)


def test_a_drafter_is_loaded_by_its_name(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = paceline.SpeculativeDecoder(target, None).generate([1, 2, 3], max_new_tokens=20)
    for drafter in (paceline.load_drafter("eagle", tree="levels"), paceline.load_drafter("eagle", target)):
        out = paceline.SpeculativeDecoder(target, drafter).generate([1, 2, 3], max_new_tokens=20)
        assert (out.tokens, out.stats.drafted > 0) == (plain.tokens, True)
    with pytest.raises(InputError, match="Paceline ships none for Llama"):
        paceline.load_drafter("eagle", LanguageModel(llama(0)))
    with pytest.raises(UnknownNameError, match="'eagel'"):
        paceline.load_drafter("eagel")
    MedusaHead.random(target).save(tmp_path / "here" / "eagle")
    monkeypatch.chdir(tmp_path / "here")
    assert paceline.load_drafter("eagle").name == "medusa", "a folder that holds a drafter goes first"


def add(target: LanguageModel, root: Path, kind: str) -> Path:
    folder = root / "toy" / kind
    if kind == "early-exit":
        ExitHead.fresh(target, 2).save(folder)
    else:
        folder.mkdir()
        save_table(folder, train_trigram([[1, 2, 3, 4] * 5], target.vocabulary), target)
    (root / "toy" / "catalogue.json").write_text(json.dumps({"best": ["medusa", "eagle", kind]}))
    return folder


@pytest.mark.parametrize(("kind", "described", "other"), [
    ("early-exit", "after 2 layers by a trained head", {"layers": 1}), ("trigram", "trigram table", None)
])  # fmt: skip
def test_what_also_works_untrained_takes_what_comes_along(
    kind: str, described: str, other: dict[str, int] | None, target: LanguageModel, tmp_path: Path
) -> None:
    assert described not in paceline.SpeculativeDecoder(target, kind).describe()
    folder = add(target, tmp_path, kind)
    decoder = paceline.SpeculativeDecoder(target, kind)
    assert described in decoder.describe()
    plain = paceline.SpeculativeDecoder(target, draft=None).generate([1, 2, 3], max_new_tokens=20)
    assert decoder.generate([1, 2, 3], max_new_tokens=20).tokens == plain.tokens
    if other is not None:
        assert described not in paceline.SpeculativeDecoder(target, kind, options=other).describe()
    (by_folder,) = parse_run_specs([str(folder)])
    (where,) = by_folder.options.values()
    assert by_folder.draft == kind
    assert Path(where) in (folder, folder / "model.safetensors")


def test_transformers_drafts_with_the_same_small_model(target: LanguageModel, tmp_path: Path) -> None:
    DraftLayers(target, (0,)).save(tmp_path / "small")
    ours = PacelineRun(target, parse_run_specs([f"draft-lm:head={tmp_path / 'small'}"])[0])
    (peer,), notes = open_peers(["hf-assisted:gamma=3"], PeerSetup(target, draft_model_of([ours]), 3))
    assert not notes
    task, plan = Task("one", "toy", ((1, 2, 3, 4),)), Plan(tokens=12)
    assert peer.run(task, plan, 0, lambda: False).tokens == ours.run(task, plan, 0, lambda: False).tokens


def test_what_comes_along_is_whole_and_small() -> None:
    """Every kind that is named has weights, a card and where it is from; nothing else is there; 24 MiB in all."""
    home = Path(room.__file__).parents[1] / "catalogue"
    kinds = room.kinds_of("smollm2-135m")
    assert kinds[0] == "eagle"
    assert {each.name for each in (home / "smollm2-135m").iterdir()} == {*kinds, "catalogue.json"}
    for kind in kinds:
        files = {each.name for each in (home / "smollm2-135m" / kind).iterdir()}
        assert files == {"README.md", "config.json", "model.safetensors", "provenance.json"}
        provenance = json.loads((home / "smollm2-135m" / kind / "provenance.json").read_text())
        assert provenance["arguments"]["kind"] == kind
        assert "H200" in provenance["gpu"]
    assert sum(each.stat().st_size for each in home.rglob("*") if each.is_file()) <= 24 * 2**20
