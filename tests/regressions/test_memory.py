"""What a model remembers: rejected tokens, short rows and lost windows leave no trace; logprobs come from that pass."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, MistralConfig, PreTrainedModel

from paceline import Generation, LanguageModel, SpeculativeDecoder
from tests.toys import SHAPE, build, letters, llama, naive

WINDOW = 3  # less than γ: a drafted token no longer sees its first ancestors
DRAFTS: dict[str, dict[str, Any]] = {
    "chain": {},
    "levels": {"options": {"tree": "levels", "branch": 3}},
    "best-first": {"options": {"tree": "best-first"}},
}


def sliding(mixed: bool, seed: int = 0, window: int = WINDOW) -> PreTrainedModel:
    shape = {**SHAPE, "head_dim": 8, "sliding_window": window, "tie_word_embeddings": False}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}
    return build(Gemma3TextConfig(**shape, **kinds) if mixed else MistralConfig(**shape), seed)


@pytest.mark.parametrize("mixed", [False, True], ids=["all layers slide", "some layers slide"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_sliding_window_can_be_rewound_after_it_has_wrapped(mixed: bool, draft: str) -> None:
    """Trap 11, M#1427, M#1914: a rotating cache cannot take back what it has overwritten: silent corruption."""
    target, other = sliding(mixed), sliding(mixed, 1)
    prompts = [[1, 7, 9, 4, 7, 9, 4, 7, 9, 11, 2], [5, 6]]
    for model in (other, target):
        outs = SpeculativeDecoder(target, model, gamma=6, **DRAFTS[draft]).generate(prompts, max_new_tokens=30)
        for prompt, out in zip(prompts, outs, strict=True):
            assert out.tokens == naive(target, prompt, 30)
        assert outs[0].stats.accepted < outs[0].stats.drafted or model is target, "something must be taken back"
    assert naive(sliding(mixed, window=90), prompts[0], 30) != outs[0].tokens, "the window must matter"


# ---- logprobs


@cache
def lm(seed: int = 0) -> LanguageModel:
    return LanguageModel(llama(seed))


def logits_of(model: PreTrainedModel, out: Generation) -> Tensor:
    """[n,V]: the model's own logits at every emitted token, from one pass without a cache."""
    text = torch.tensor([out.prompt_tokens + out.tokens])
    with torch.no_grad():
        return model(input_ids=text, use_cache=False).logits[0, len(out.prompt_tokens) - 1 : -1]


def check_raw(out: Generation, model: PreTrainedModel, top: int = 0) -> None:
    assert out.logprobs is not None
    assert len(out.logprobs) == len(out.tokens)
    raw = logits_of(model, out).log_softmax(-1)
    for entry, token, wanted in zip(out.logprobs, out.tokens, raw, strict=True):
        assert entry.token == token
        assert entry.raw == pytest.approx(float(wanted[token]), abs=1e-5)
        assert [pair[0] for pair in entry.top_raw] == wanted.topk(top).indices.tolist()
        assert [pair[1] for pair in entry.top_raw] == pytest.approx(wanted.topk(top).values.tolist(), abs=1e-5)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("rule", ["match", "ratio"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_raw_logprobs_are_those_of_the_bare_logits(draft: str, rule: str, temperature: float) -> None:
    """Trap 15, L#27972, V#30846, S#10660: 0.0 or missing for accepted tokens, processed instead of raw."""
    decoder = SpeculativeDecoder(lm(), lm(), gamma=4, rule=rule, **DRAFTS[draft])
    out = decoder.generate(
        [1, 2, 3], temperature=temperature, seed=3, logprobs=3, max_new_tokens=16, repetition_penalty=1.2, top_k=20
    )
    check_raw(out, lm().model, 3)
    assert sum(out.trace.from_draft) > 8
    assert all(entry.raw < 0 for entry in out.logprobs or [])


def test_processed_logprobs_are_those_of_the_law_after_every_control() -> None:
    """Trap 15: the documented mode beside raw; checked against the formula, for accepted and for recovered tokens."""
    out = SpeculativeDecoder(lm(), lm(), gamma=4).generate(
        [1, 2, 3], temperature=0.7, top_k=4, seed=3, logprobs=6, max_new_tokens=16
    )
    for entry, logits in zip(out.logprobs or [], logits_of(lm().model, out), strict=True):
        scores = logits / 0.7
        law = scores.masked_fill(scores < scores.topk(4).values[-1], -math.inf).log_softmax(-1)
        assert entry.processed == pytest.approx(float(law[entry.token]), abs=1e-5)
        assert [pair[1] for pair in entry.top_processed[:4]] == pytest.approx(law.topk(4).values.tolist(), abs=1e-5)
        assert [pair[1] for pair in entry.top_processed[4:]] == [-math.inf] * 2


def test_short_rows_do_not_see_the_keys_of_long_ones() -> None:
    """Trap 14, mlx-vlm#2113: phantom keys and wrong offsets in ragged batches, in every layer."""
    prompts = [list(range(1, 30)), [5], [6, 7, 8], list(range(20))]
    for draft in (None, lm(), lm(1), "prompt-lookup"):
        outs = SpeculativeDecoder(lm(), draft, gamma=3, rows=3).generate(
            prompts, max_new_tokens=[4, 20, 12, 9], temperature=[0.0, 1.0, 0.0, 2.0], logprobs=0
        )
        for out in outs:
            check_raw(out, lm().model)


def test_logprobs_are_asked_for_per_row() -> None:
    """Trap 15: one row wants none, one wants none beside its own, one wants more than there are tokens."""
    outs = SpeculativeDecoder(lm(), lm(1), gamma=3).generate([[1], [2], [3]], logprobs=[None, 0, 99], max_new_tokens=5)
    assert outs[0].logprobs is None
    assert [len(entry.top_raw) for entry in outs[1].logprobs] == [0] * 5
    assert [len(entry.top_raw) for entry in outs[2].logprobs] == [40] * 5
    for out in outs[1:]:
        assert [entry.token for entry in out.logprobs] == out.tokens


def test_logprobs_end_with_the_text() -> None:
    """Trap 8: the tail of a block after a stop string has no logprobs."""
    target = LanguageModel(llama(), letters())
    whole = SpeculativeDecoder(target, draft=None).generate([1, 2, 3], max_new_tokens=12)
    stop = whole.text[6]
    at = whole.text.index(stop)
    out = SpeculativeDecoder(target, target, gamma=5).generate([1, 2, 3], max_new_tokens=12, stop=stop, logprobs=1)
    assert out.tokens == whole.tokens[: at + 1]
    assert len(out.logprobs or []) == at + 1
