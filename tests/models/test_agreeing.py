"""A target and its first layers agree as much as its other layers are soft, with no script and no training."""

from __future__ import annotations

import pytest
import torch

from paceline import InputError, LanguageModel, SpeculativeDecoder
from paceline.models.synthetic.random_models import agreeing_pair

SHAPE = "tiny:layers=4"


@torch.inference_mode()
def measured_agreement(target: LanguageModel, draft: LanguageModel) -> float:
    """How often the draft model picks the target's token, along greedy texts after random prompts."""
    ids = torch.randint(0, target.vocabulary, (8, 16), generator=torch.Generator().manual_seed(0))
    settings = {"do_sample": False, "max_new_tokens": 32, "min_new_tokens": 32}
    text = target.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    picks = draft.model(input_ids=text[:, :-1], use_cache=False).logits[:, 15:].argmax(-1)
    return float((picks == text[:, 16:]).double().mean())


@pytest.mark.parametrize("shape", [SHAPE, "gpt2:layers=4,vocab=300"])
def test_layers_that_add_nothing_leave_the_draft_always_right(shape: str) -> None:
    target, draft = agreeing_pair(shape, 1, 0.0)
    assert (target.layers, draft.layers) == (4, 1)
    assert measured_agreement(target, draft) == 1.0
    found = SpeculativeDecoder(target, draft, gamma=4).generate([1, 2, 3], max_new_tokens=20)
    assert (found.stats.rounds, found.stats.accepted) == (4, 16)


def test_agreement_falls_as_the_other_layers_speak_up() -> None:
    found = [measured_agreement(*agreeing_pair(SHAPE, 1, eps)) for eps in (0.0, 0.1, 0.4, 1.0)]
    assert found == sorted(found, reverse=True)
    assert found[1] > 0.6 > 0.3 > found[3]


def test_the_text_is_the_targets() -> None:
    target, draft = agreeing_pair(SHAPE, 2, 0.2, dtype="float64")
    plain = SpeculativeDecoder(target, draft=None).generate([5, 6], max_new_tokens=40)
    found = SpeculativeDecoder(target, draft).generate([5, 6], max_new_tokens=40)
    assert found.tokens == plain.tokens
    assert 0 < found.stats.accepted < found.stats.drafted


def test_the_draft_shares_the_targets_weights() -> None:
    target, draft = agreeing_pair(SHAPE, 2, 0.5)
    ours = {weight.data_ptr() for weight in target.model.parameters()}
    assert {weight.data_ptr() for weight in draft.model.parameters()} < ours
    assert draft.model.generation_config is not target.model.generation_config
    assert target.model.config.num_hidden_layers == 4


def test_transformers_can_decode_the_pair() -> None:
    target, draft = agreeing_pair(SHAPE, 1, 0.0)
    ids = torch.tensor([[4, 5, 6]])
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 12}
    plain = target.model.generate(ids, **settings)
    draft.model.generation_config.assistant_confidence_threshold = 0.0  # random models are never sure
    passes: list[int] = []
    hook = target.model.register_forward_hook(lambda *_: passes.append(1))
    assert torch.equal(target.model.generate(ids, assistant_model=draft.model, **settings), plain)
    hook.remove()
    assert len(passes) == 1  # all in one draft; whoever counts the target's passes does not count the draft's


def test_what_is_impossible_is_refused() -> None:
    with pytest.raises(InputError, match="eps must be from 0"):
        agreeing_pair(SHAPE, 1, 1.5)
    with pytest.raises(InputError, match="cannot be left after 4; use 1 to 3"):
        agreeing_pair(SHAPE, 4, 0.5)
