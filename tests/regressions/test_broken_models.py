"""Models that say NaN: one sentence, and the decoder is as good as new. And the user's model stays the user's."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import RULES, CustomGenerate, LanguageModel, ModelOutputError, SpeculativeDecoder
from tests.toys import TableModel, fingerprint, letters, llama, naive

EXACT = [name for name in RULES if RULES[name].exact in ("text", "law")]


@lru_cache(maxsize=1)
def lm() -> LanguageModel:
    return LanguageModel(llama())


def nan_after(token: int) -> LanguageModel:
    """Writes 1, 2, 3, ... but after `token` its logits are NaN."""
    model = TableModel(torch.eye(12).roll(1, 1) * 9)
    target = LanguageModel(model)
    model.table[token, 5] = float("nan")  # later, or the probe would have refused it
    return target


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.3, "seed": 1},
    "top-k": {"temperature": 0.3, "seed": 1, "top_k": 3},
    "greedy with noise": {"temperature": 0.0, "top_k": 3, "noise": 0.1},
    "greedy with a bias": {"logit_bias": {2: 0.0}},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("rule", EXACT)
def test_nan_is_one_sentence_and_the_next_call_works(settings: str, rule: str) -> None:
    """S#19796: NaN logits poisoned the step or the server. The sentence says where and what to look at."""
    target = nan_after(4)
    for draft, options in ((None, {}), (target, {}), (target, {"tree": "levels"})):
        if options and not RULES[rule].branches:
            continue
        decoder = SpeculativeDecoder(target, draft, gamma=3, rule=rule, options=options)
        with pytest.raises(ModelOutputError) as error:
            decoder.generate([0], max_new_tokens=9, **SETTINGS[settings])
        message = str(error.value)
        assert "position 5 of prompt 0" in message
        assert message.count(".") == 1
        assert "\n" not in message
        # the same decoder, a text that does not meet the NaN
        assert decoder.generate([6], max_new_tokens=4).tokens == [7, 8, 9, 10]


def test_nan_of_a_greedy_row_is_noticed_among_sampled_rows() -> None:
    """S#19796 with trap 2: argmax of NaN is a token like any other, unless it is checked."""
    decoder = SpeculativeDecoder(nan_after(4), draft=None)
    with pytest.raises(ModelOutputError, match="prompt 1"):
        decoder.generate([[6], [4], [7]], temperature=[0.5, 0.0, 0.5], max_new_tokens=2, seed=0)


def test_nan_beyond_what_is_kept_is_nobodys_business() -> None:
    """S#19796: NaN in the rows of rejected tokens does not matter, under any rule."""
    table = torch.zeros(12, 12)
    table[:, 4] = 9  # 4 after everything, and after 4 the target says NaN
    target, draft = nan_after(4), LanguageModel(TableModel(table))
    for rule in EXACT:
        for options in ({}, {"tree": "levels"}) if RULES[rule].branches else ({},):
            decoder = SpeculativeDecoder(target, draft, gamma=3, rule=rule, options=options)
            assert decoder.generate([6], max_new_tokens=5).tokens == [7, 8, 9, 10, 11]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_controls_that_forbid_everything_are_one_sentence(temperature: float) -> None:
    """S#19796: a callable that bans every token leaves no choice: a sentence, not a crash or a token."""

    def nothing(prefix: Tensor, logits: Tensor) -> Tensor:
        return torch.full_like(logits, float("-inf"))

    for draft in (None, lm()):
        with pytest.raises(ModelOutputError, match="all tokens are forbidden"):
            SpeculativeDecoder(lm(), draft).generate(
                [1, 2], processors=[nothing], temperature=temperature, max_new_tokens=4
            )


def test_an_error_in_a_users_callable_is_not_swallowed() -> None:
    """Trap 19: exceptions of others come out as they are; the decoder can be used again."""

    def fails(prefix: Tensor, logits: Tensor) -> Tensor:
        raise KeyError("mine")

    decoder = SpeculativeDecoder(lm(), draft=None)
    with pytest.raises(KeyError, match="mine"):
        decoder.generate([1, 2], processors=[fails])
    assert decoder.generate([1, 2], max_new_tokens=5).tokens == naive(lm().model, [1, 2], 5)


def test_the_users_models_are_never_edited() -> None:
    """Trap 17 (transformers' early exit edits num_hidden_layers): weights, configs and mode are the same afterwards."""
    target, draft = llama(0), llama(1)
    before = fingerprint(target), fingerprint(draft)
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules()]
    forward = target.forward
    for options in ({}, {"tree": "best-first"}):
        decoder = SpeculativeDecoder(LanguageModel(target, letters()), LanguageModel(draft, letters()), options=options)
        decoder.generate(["abc", "d"], max_new_tokens=9, temperature=[0.0, 1.0], logprobs=2, stop="!")
        stream = decoder.stream("abc", max_new_tokens=9)
        next(stream)
        stream.close()
    target.generate(torch.tensor([[1, 2]]), max_new_tokens=4, custom_generate=CustomGenerate("prompt-lookup"))
    broken = SpeculativeDecoder(target, draft=None)
    with pytest.raises(KeyError):
        broken.generate([1], processors=[lambda prefix, logits: {}[1]])
    assert (fingerprint(target), fingerprint(draft)) == before
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules()] == hooks
    assert target.forward == forward
    assert all(weight.grad is None and weight.requires_grad for weight in target.parameters())


def test_no_gradients_are_recorded() -> None:
    """D1 of our own: reading a ragged prompt outside inference mode kept the whole graph in the cache."""
    model, recorded = llama(), []
    model.model.register_forward_hook(lambda *_: recorded.append(torch.is_grad_enabled()))
    SpeculativeDecoder(model, "prompt-lookup", rows=2).generate([[1, 2, 3], [4], [5, 6]], max_new_tokens=[3, 8, 4])
    assert recorded
    assert not any(recorded)
