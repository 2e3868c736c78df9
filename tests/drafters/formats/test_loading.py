"""`load_drafter` and drafters named by a folder: the files decide which drafter it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.drafters.formats.heads_of_others import LAYERS, drafts, target
from tests.toys import llama

from paceline import LanguageModel, LoadError, PacelineWarning, SpeculativeDecoder, UnknownNameError, load, load_drafter
from paceline.drafters.heads.eagle import EagleHead
from paceline.drafters.heads.foreign_heads import FirstEagleHead
from paceline.drafters.heads.head_files import fingerprint, save_head
from paceline.drafters.heads.medusa import MedusaHead
from paceline.drafters.heads.prophet import ProphetHead
from paceline.drafters.lookup.trigram import train_trigram
from paceline.drafters.models.early_exit import ExitHead
from paceline.drafters.resolve import replay_needs, resolve_draft
from paceline.models.runtime import quantized

HEADS: dict[str, Any] = {"eagle": EagleHead, "medusa": MedusaHead, "prophet": ProphetHead}


@pytest.mark.parametrize("name", HEADS)
def test_a_folder_of_our_own(name: str, tmp_path: Path) -> None:
    head = HEADS[name].random(target(), 1)
    head.save(tmp_path)
    expected = drafts(name, head=head)
    assert drafts(load_drafter(tmp_path, target())) == expected
    assert drafts(str(tmp_path)) == expected
    assert drafts(tmp_path) == expected
    assert load_drafter(tmp_path, tree="levels").describe() == f"{name}, tree levels"


def test_an_eagle1_head_may_be_saved_as_our_own(tmp_path: Path) -> None:
    head = FirstEagleHead.random(target(), 1)
    head.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["kind"] == "eagle-1"
    assert drafts(str(tmp_path)) == drafts("eagle", head=head)


def test_an_exit_of_our_own(tmp_path: Path) -> None:
    ExitHead.fresh(target(), 3).save(tmp_path)
    assert resolve_draft(str(tmp_path), {})[:2] == ("early-exit", {"head": str(tmp_path)})
    assert load_drafter(tmp_path, target()).describe() == "early-exit after 3 layers by a trained head"


def test_kinds_that_others_add_are_called_like_their_drafter(tmp_path: Path) -> None:
    save_head(tmp_path / "some", "eagle-9", {"target": fingerprint(target())}, {"x": torch.zeros(1)})
    with pytest.raises(UnknownNameError, match="Unknown drafter 'eagle-9'"):
        load_drafter(tmp_path / "some")
    save_head(tmp_path / "none", "suffix", {"target": fingerprint(target())}, {"x": torch.zeros(1)})
    with pytest.raises(LoadError, match="kind 'suffix', but the drafter of this name takes no head"):
        load_drafter(tmp_path / "none")


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_trigram_model(as_folder: bool, tmp_path: Path) -> None:
    train_trigram([[1, 2, 3, 4, 5, 1, 2, 3]], 40).save(tmp_path / "trigram.safetensors")
    where = tmp_path if as_folder else tmp_path / "trigram.safetensors"
    file = str(tmp_path / "trigram.safetensors")
    assert resolve_draft(str(where), {"tree": "levels"})[:2] == ("trigram", {"file": file, "tree": "levels"})
    assert drafts(load_drafter(where, target())) == drafts("trigram", file=file)


def test_a_language_model(tmp_path: Path) -> None:
    llama(1).float().save_pretrained(tmp_path)
    assert resolve_draft(str(tmp_path), {})[:2] == ("draft-model", {"model": str(tmp_path)})
    drafter = load_drafter(tmp_path, target(), tree="levels")
    assert drafter.name == "draft-model"
    assert drafts(drafter) == drafts("draft-model", model=load(tmp_path), tree="levels")


def test_finding_out_reads_no_weights(tmp_path: Path) -> None:
    """Which drafter a folder means is asked more often than it is loaded."""
    EagleHead.random(target()).save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert resolve_draft(str(tmp_path), {})[:2] == ("eagle", {"head": str(tmp_path)})
    assert replay_needs(str(tmp_path)) is not None
    with pytest.raises(LoadError, match="No eagle head could be read"):
        load_drafter(tmp_path)


@pytest.mark.parametrize("text", ["[1, 2]", "{"])
def test_a_config_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(LoadError, match=r"config\.json' (holds no JSON object|cannot be read)"):
        load_drafter(tmp_path)


def test_the_head_of_another_kind_is_refused(tmp_path: Path) -> None:
    MedusaHead.random(target()).save(tmp_path)
    with pytest.raises(LoadError, match="kind 'medusa', not 'eagle'"):
        SpeculativeDecoder(target(), "eagle", options={"head": tmp_path})


# ---- whose head it is


@pytest.mark.parametrize("name", HEADS)
def test_another_revision_of_the_same_shape_is_told(name: str, tmp_path: Path) -> None:
    HEADS[name].random(target()).save(tmp_path)
    other = LanguageModel(llama(1, num_hidden_layers=LAYERS).float())
    with pytest.warns(PacelineWarning, match=r"trained on other weights \(LlamaForCausalLM\) than these"):
        load_drafter(tmp_path, other)


@pytest.mark.parametrize(
    "part", ["model.embed_tokens.weight", "model.norm.weight", "model.layers.7.mlp.down_proj.weight"]
)
def test_one_percent_more_is_another_revision(part: str) -> None:
    head = MedusaHead.random(target())
    model = llama(0, num_hidden_layers=LAYERS).float()
    head.check(LanguageModel(model))
    with torch.no_grad():
        dict(model.named_parameters())[part].mul_(1.01)
    with pytest.warns(PacelineWarning, match="trained on other weights"):
        head.check(LanguageModel(model))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_same_weights_in_another_dtype_fit(dtype: torch.dtype) -> None:
    small = llama(0, num_hidden_layers=LAYERS).float()
    with torch.no_grad():
        small.model.embed_tokens.weight.mul_(1e-4)  # float16 has few digits for such numbers
    head = MedusaHead.random(LanguageModel(small))
    head.check(LanguageModel(small.to(dtype)))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_same_model_in_fewer_bits_fits(kind: str) -> None:
    """What is packed cannot be compared; the norms and the embedding still are."""
    head = MedusaHead.random(target())
    head.check(quantized(target(), kind))
    other = LanguageModel(llama(1, num_hidden_layers=LAYERS).float())
    with pytest.warns(PacelineWarning, match="trained on other weights"):
        head.check(quantized(other, kind))


def test_older_heads_without_weights_still_load(tmp_path: Path) -> None:
    head = MedusaHead.random(target())
    old = {name: value for name, value in fingerprint(target()).items() if name != "weights"}
    MedusaHead(replace(head.config), old).save(tmp_path)
    assert load_drafter(tmp_path, target()).name == "medusa"
