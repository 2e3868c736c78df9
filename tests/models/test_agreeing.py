"""A target and its first layers agree as much as its other layers are soft, with no script and no training."""

from __future__ import annotations

import pytest
import torch

from paceline import InputError, SpeculativeDecoder
from paceline.models.synthetic import agreeing_pair, eps_for, measured_agreement

SHAPE = "tiny:layers=4"


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
    assert len(passes) == 1  # all in one draft: a count of the target's passes does not count the draft's


def test_an_eps_is_found_for_an_acceptance() -> None:
    found = eps_for(0.7, SHAPE, 1, steps=6, close=0.03)
    assert 0 < found.eps < 1
    assert found.agreement == pytest.approx(0.7, abs=0.1)
    assert found.agreement == measured_agreement(*agreeing_pair(SHAPE, 1, found.eps))
    assert eps_for(1.0, SHAPE, 1).eps == 0.0


def test_what_is_impossible_is_refused() -> None:
    with pytest.raises(InputError, match="eps must be from 0"):
        agreeing_pair(SHAPE, 1, 1.5)
    with pytest.raises(InputError, match="cannot be left after 4; use 1 to 3"):
        agreeing_pair(SHAPE, 4, 0.5)
    with pytest.raises(InputError, match="from 0 to 1, got 2"):
        eps_for(2, SHAPE, 1)
