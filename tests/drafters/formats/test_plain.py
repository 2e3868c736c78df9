"""A draft-lm becomes a model of its own, and drafts as before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.toys import letters, llama
from transformers import AutoModelForCausalLM

import paceline
from paceline.common.errors import InputError, LoadError, UnsupportedError
from paceline.drafters.heads.export_head import export_head
from paceline.drafters.heads.medusa import MedusaHead
from paceline.drafters.models.draft_lm import DraftLayers, DraftLm, SavedLayers
from paceline.models.runtime import quantized


@pytest.mark.parametrize("kept", [0, 1])
def test_it_drafts_as_before(tmp_path: Path, kept: int) -> None:
    llama(0, num_hidden_layers=3).save_pretrained(tmp_path / "target")
    letters().save_pretrained(tmp_path / "target")
    lm = paceline.load(str(tmp_path / "target"), dtype="float64")
    layers = DraftLayers(lm, (0, 2), kept)
    with torch.no_grad():
        for weight in layers.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    layers.save(tmp_path / "draft")
    assert len(SavedLayers.load(tmp_path / "draft").tensors) == 2 * len(layers.layers[0].state_dict())
    export_head(tmp_path / "draft", str(tmp_path / "target"), tmp_path / "out", "hf")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert whole.config.num_hidden_layers == 2 + kept
    found = []
    for drafter in (
        paceline.load_drafter(tmp_path / "draft", lm),
        paceline.load(str(tmp_path / "out"), dtype="float64"),
    ):
        out = paceline.SpeculativeDecoder(lm, drafter).generate([1, 2, 3], max_new_tokens=24)
        found.append([each.drafted for each in out.trace.rounds])
    assert found[0] == found[1]


def test_as_many_layers_as_there_are_cannot_be_kept() -> None:
    for many in (2, -1):
        with pytest.raises(InputError, match=rf"can keep 0 to 1 layers of .*, got {many}\."):
            DraftLayers(paceline.LanguageModel(llama(0)), (0,), many)


def test_what_is_kept_is_a_number(tmp_path: Path) -> None:
    lm = paceline.LanguageModel(llama(0))
    DraftLayers(lm, (0,)).save(tmp_path / "draft")
    saved = SavedLayers.load(tmp_path / "draft")
    with pytest.raises(LoadError, match=r"'kept' in the config\.json of .* must be a number of layers, got '1'"):
        SavedLayers({**saved.config, "kept": "1"}, saved.tensors, saved.folder).fitted(lm)


def test_layers_that_were_given_stay_as_they_are() -> None:
    models = [paceline.LanguageModel(llama(0).to(dtype)) for dtype in (torch.float32, torch.float64)]
    layers = DraftLayers(models[0], (0,), 1)
    decoders = [paceline.SpeculativeDecoder(lm, DraftLm(DraftLm.Options(head=layers))) for lm in models]
    for decoder in (*decoders, *decoders):
        assert decoder.generate([1, 2, 3], max_new_tokens=8).stats.drafted > 0
    assert all(weight.dtype == torch.float32 for weight in layers.parameters())


def test_a_target_in_fewer_bits_is_refused(tmp_path: Path) -> None:
    lm = paceline.LanguageModel(llama(0))
    DraftLayers(lm, (0,)).save(tmp_path / "draft")
    packed = quantized(lm, "int8")
    with pytest.raises(UnsupportedError, match="are quantized, but a draft-lm needs the original weights"):
        SavedLayers.load(tmp_path / "draft").fitted(packed)


def test_what_has_no_layers_is_refused(tmp_path: Path) -> None:
    lm = paceline.LanguageModel(llama(0))
    MedusaHead.random(lm).save(tmp_path / "head")
    with pytest.raises(LoadError, match="holds a head of kind 'medusa', not 'draft-lm'"):
        export_head(tmp_path / "head", lm, tmp_path / "out", "hf")
    DraftLayers(lm, (0,)).save(tmp_path / "draft")
    with pytest.raises((InputError, LoadError, UnsupportedError)):
        export_head(tmp_path / "draft", lm, tmp_path / "out", "medusa")
