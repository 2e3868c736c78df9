"""Heads that were trained here, in the formats of others, and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.drafters.formats.heads_of_others import LAYERS, drafts, lively, noise, target
from tests.toys import llama

from paceline import InputError, LanguageModel, PacelineWarning, UnknownNameError, UnsupportedError, load_drafter
from paceline.drafters.heads.eagle import EagleHead
from paceline.drafters.heads.export_head import export_head
from paceline.drafters.heads.foreign_heads import FirstEagleHead
from paceline.drafters.heads.medusa import MedusaHead
from paceline.drafters.heads.prophet import ProphetHead


def eagle(**change: Any) -> EagleHead:
    return lively(EagleHead.random(target(), 1, replace(EagleHead.sizes(target()), **change)))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"draft_vocabulary": 25},
        {"norm_before_residual": True, "heads": 2, "head_width": 10, "eps": 1e-4, "rope_theta": 50.0},
        {"rope_scaling": (8.0, 1.0, 4.0, 24.0)},
        {"draft_vocabulary": 25, "own_output": False},
    ],
    ids=["plain", "few words", "as others have it", "stretched", "borrowed words"],
)
def test_an_eagle_head_comes_back_as_it_went(change: dict[str, Any], tmp_path: Path) -> None:
    head = eagle(**change)
    if head.d2t is not None:  # in no order at all
        head.d2t = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:25]
    head.save(tmp_path / "ours")
    export_head(tmp_path / "ours", target(), tmp_path / "theirs")
    expected = drafts("eagle", head=head)
    assert drafts(load_drafter(tmp_path / "theirs", target())) == expected
    assert drafts(str(tmp_path / "theirs")) == expected
    back: Any = load_drafter(tmp_path / "theirs", target())
    embedded, taps = noise(1, 6, 32), [noise(1, 6, 32, seed=n) for n in range(3)]
    with torch.no_grad():
        for one, other in zip(head(embedded, taps, 3), back.head(embedded, taps, 3), strict=True):
            assert torch.equal(one, other)


def test_what_speculators_read(tmp_path: Path) -> None:
    head = eagle(draft_vocabulary=25)
    head.d2t = torch.arange(39, 14, -1)
    export_head(head, target(), tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["norm_before_residual"] is False
    assert "auto_map" not in config
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["speculators_config"]["proposal_methods"][0]["verifier_accept_k"] == 1
    assert config["draft_vocab_size"] == 25
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["d2t"].tolist() == [15] * 25  # 15, 16, ..., 39: each fifteen from its own number
    assert tensors["t2d"].tolist() == [False] * 15 + [True] * 25
    assert torch.equal(tensors["lm_head.weight"], head.output.weight.flip(0))
    assert torch.equal(tensors["embed_tokens.weight"], target().model.get_input_embeddings().weight)


@pytest.mark.parametrize("change", [{}, {"own_output": False}, {"layers": 0}, {"layers": 2, "heads": 2}])
@pytest.mark.parametrize("biased", [False, True])
def test_a_medusa_head_comes_back_as_it_went(change: dict[str, Any], biased: bool, tmp_path: Path) -> None:
    head = MedusaHead.random(target(), 1, replace(MedusaHead.sizes(target()), **change))
    with torch.no_grad():
        head.blocks.add_(noise(*head.blocks.shape))
        if biased:
            head.biases.add_(noise(*head.biases.shape, scale=1.0))
    export_head(head, target(), tmp_path, "medusa")
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    assert config["model_type"] == "medusa"
    assert config["medusa_fc_bias"] is any(name.endswith("bias") for name in tensors) is bool(head.biases.any())
    assert all(tensors[f"lm_heads.{k}.weight"].shape == (40, 32) for k in range(head.config.heads))
    assert drafts(str(tmp_path)) == drafts("medusa", head=head)
    assert load_drafter(tmp_path, target()).name == "medusa"


def test_what_was_exported_knows_its_target(tmp_path: Path) -> None:
    export_head(eagle(), target(), tmp_path)
    other = LanguageModel(llama(1, num_hidden_layers=LAYERS).float())
    with pytest.warns(PacelineWarning, match="trained on other weights"):
        load_drafter(tmp_path, other)
    wider = LanguageModel(llama(1, num_hidden_layers=LAYERS, hidden_size=64).float())
    with pytest.raises(UnsupportedError, match="a hidden width of 32, but LlamaForCausalLM has a hidden width of 64"):
        export_head(eagle(), wider, tmp_path / "other")


@pytest.mark.parametrize(
    ("make", "format", "words"),
    [
        (lambda: ProphetHead.random(target()), "medusa", "only eagle, medusa and draft-lm can be exported"),
        (lambda: FirstEagleHead.random(target()), "speculators", "cannot hold heads of kind 'eagle-1'"),
        (lambda: MedusaHead.random(target()), "speculators", "export it to medusa"),
        (eagle, "medusa", "export it to speculators"),
        (lambda: eagle(width=16), "speculators", "width 16, hidden states of 32"),
        (lambda: eagle(fuse_bias=True), "speculators", "has a bias in fc"),
        (lambda: eagle(taps=(0.25, 0.5, 1.0)), "speculators", "takes different ones from 0 to 7"),
        (lambda: eagle(taps=(0.25, 0.26, 0.5)), "speculators", "takes different ones from 0 to 7"),
    ],
)
def test_a_head_that_the_format_cannot_hold_is_refused(make: Any, format: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as refused:
        export_head(make(), target(), tmp_path / "out", format)
    assert words in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_where_and_how_is_checked(tmp_path: Path) -> None:
    head = eagle()
    head.save(tmp_path)
    with pytest.raises(InputError, match="to its own folder"):
        export_head(tmp_path, target(), tmp_path)
    with pytest.raises(UnknownNameError, match=r"'speculator'.*Did you mean 'speculators'"):
        export_head(head, target(), tmp_path / "out", "speculator")
