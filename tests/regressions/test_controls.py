"""Penalties, bias, bans and callables: every node of a draft is judged with the text before that very node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import RULES, LanguageModel, SpeculativeDecoder
from tests.toys import llama, naive

PROMPT = [1, 7, 9, 4, 7, 9, 4, 7]
COUNT = 24


@cache
def lm(seed: int = 0) -> LanguageModel:
    return LanguageModel(llama(seed))


DRAFTS: dict[str, Callable[[], dict[str, Any]]] = {
    "perfect chain": lambda: {"draft": lm()},
    "perfect levels": lambda: {"draft": lm(), "options": {"tree": "levels", "branch": 3}},
    "blind best-first": lambda: {"draft": lm(1), "options": {"tree": "best-first", "branch": 2}},
    "lookup tree": lambda: {"draft": "prompt-lookup", "options": {"branches": 3}},
}


def decoder(draft: str, **settings: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(lm(), gamma=4, **DRAFTS[draft](), **settings)


# ---- each control once more, as plainly as it can be written: (token ids so far, logits [V]) -> logits


def repetition(text: list[int], logits: Tensor) -> Tensor:
    for token in set(text):
        logits[token] = logits[token] / 1.7 if logits[token] > 0 else logits[token] * 1.7
    return logits


def occurrences(text: list[int], logits: Tensor) -> Tensor:
    for token, times in Counter(text[len(PROMPT) :]).items():
        logits[token] -= 0.9 * times + 1.3
    return logits


def bias(text: list[int], logits: Tensor) -> Tensor:
    logits[[3, 30]] += torch.tensor([4.0, -4.0], dtype=logits.dtype)
    logits[[14, 15, 16, 17, 18]] = -1e9
    return logits


def no_pair_twice(text: list[int], logits: Tensor) -> Tensor:
    for first, second in pairwise(text):
        if first == text[-1]:
            logits[second] = -1e9
    return logits


def as_processor(prefix: Tensor, logits: Tensor) -> Tensor:
    return no_pair_twice(prefix.tolist(), logits)


CONTROLS: dict[str, tuple[dict[str, Any], Callable[[list[int], Tensor], Tensor]]] = {
    "repetition_penalty": ({"repetition_penalty": 1.7}, repetition),
    "presence and frequency": ({"presence_penalty": 1.3, "frequency_penalty": 0.9}, occurrences),
    "bias and bans": ({"logit_bias": {3: 4.0, 30: -4.0}, "banned_tokens": [14, 15, 16, 17, 18]}, bias),
    "a callable": ({"processors": [as_processor]}, no_pair_twice),
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("control", CONTROLS)
def test_a_control_sees_the_path_of_its_node_exactly_once(control: str, draft: str) -> None:
    """Trap 6, S#33643, S#28200: only the last accepted token counted, rejected drafts counted, counted twice."""
    settings, edit = CONTROLS[control]
    wanted = naive(lm().model, PROMPT, COUNT, edit)
    assert wanted != naive(lm().model, PROMPT, COUNT), "the control must matter"
    out = decoder(draft).generate(PROMPT, max_new_tokens=COUNT, **settings)
    assert out.tokens == wanted
    assert out.stats.drafted > 0
    if draft == "perfect chain":
        assert out.stats.acceptance_rate == 1.0, "the draft model is under the same controls"


@pytest.mark.parametrize("draft", DRAFTS)
def test_controls_of_one_row_are_its_own(draft: str) -> None:
    """Trap 6: four rows with four different controls, in one batch, each as if it were alone."""
    prompts = [PROMPT[i:] for i in range(4)]
    settings = {
        "repetition_penalty": [1.0, 1.7, 1.0, 1.0],
        "banned_tokens": [[], [], [14, 15, 16, 17, 18], []],
        "logit_bias": [{}, {}, {3: 4.0, 30: -4.0}, {}],
        "processors": [[], [], [], [as_processor]],
    }
    edits = [None, repetition, bias, no_pair_twice]
    outs = decoder(draft).generate(prompts, max_new_tokens=COUNT, **settings)
    for prompt, edit, out in zip(prompts, edits, outs, strict=True):
        assert out.tokens == naive(lm().model, prompt, COUNT, edit)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(
    "control",
    [
        {"min_p": 0.2},
        {"typical_p": 0.6},
        {"top_k": 4},
        {"top_p": 0.7},
        {"top_k": 12, "noise": 0.8},
        {"dynamic_temperature": 0.7},
        {"repetition_penalty": 1.4, "top_p": 0.8, "min_p": 0.05},
        {"processors": [as_processor], "frequency_penalty": 0.5, "min_new_tokens": 9, "eos_token_ids": [11]},
    ],
    ids=lambda control: "+".join(control),
)
def test_no_control_is_skipped_in_the_verifier(control: dict[str, Any], draft: str) -> None:
    """Trap 6, V#42744, S#26330, V#26317: min-p, typical, noise, callables held in plain decoding only."""
    settings = {"temperature": 1.3, "seed": 5, "max_new_tokens": COUNT, **control}
    plain = SpeculativeDecoder(lm(), draft=None).generate(PROMPT, **settings).tokens
    without = (
        SpeculativeDecoder(lm(), draft=None).generate(PROMPT, temperature=1.3, seed=5, max_new_tokens=COUNT).tokens
    )
    assert plain != without, "the control must matter"
    assert decoder(draft).generate(PROMPT, **settings).tokens == plain


def test_a_callable_is_asked_about_every_prefix_of_the_text() -> None:
    """Trap 6: the committed text, then the text and one drafted token, and so on; never a prefix without the prompt."""
    seen: set[tuple[int, ...]] = set()

    def listen(prefix: Tensor, logits: Tensor) -> Tensor:
        seen.add(tuple(prefix.tolist()))
        return logits

    out = decoder("perfect levels").generate(PROMPT, max_new_tokens=12, processors=[listen])
    text = PROMPT + out.tokens
    assert {tuple(text[:end]) for end in range(len(PROMPT), len(text))} <= seen
    assert all(list(prefix[: len(PROMPT)]) == PROMPT for prefix in seen)


def test_logits_are_not_edited_in_place() -> None:
    """Trap 17: a callable that writes into its argument changes neither raw logprobs nor the next control."""

    def vandal(prefix: Tensor, logits: Tensor) -> Tensor:
        answer = logits.clone()
        logits.fill_(float("nan"))
        return answer

    plain = decoder("perfect chain").generate(PROMPT, max_new_tokens=8, logprobs=2)
    out = decoder("perfect chain").generate(PROMPT, max_new_tokens=8, logprobs=2, processors=[vandal, vandal])
    assert out.tokens == plain.tokens
    assert out.logprobs == plain.logprobs
    rolled = decoder("perfect chain").generate(
        PROMPT, max_new_tokens=1, logprobs=2, processors=[lambda prefix, logits: logits.roll(3)]
    )
    assert rolled.tokens != plain.tokens[:1]
    bare, told = plain.logprobs[0].top_raw, rolled.logprobs[0].top_raw
    assert [token for token, _ in told] == [token for token, _ in bare], "raw is of the bare logits"
    assert [value for _, value in told] == pytest.approx([value for _, value in bare])


def test_temperature_is_not_ignored() -> None:
    """S#39253: the verifier ignored the temperature; a hot text differs from a cool one of the same seed."""
    texts = [
        decoder("perfect chain").generate(PROMPT, max_new_tokens=COUNT, temperature=temperatures, seed=3).tokens
        for temperatures in (0.0, 1e-4, 3.0)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_temperature_zero_is_a_point_mass_in_a_mixed_batch() -> None:
    """Trap 2, V#27077: division by zero; a greedy row among sampled rows stays greedy under every rule."""
    wanted = naive(lm().model, PROMPT, COUNT)
    for rule, draft in product([name for name in RULES if RULES[name].exact in ("text", "law")], DRAFTS):
        if RULES[rule].branches or draft == "perfect chain":
            outs = decoder(draft, rule=rule).generate(
                [PROMPT, PROMPT, PROMPT], temperature=[1.0, 0.0, 0.5], top_k=[3, 0, 0], seed=1, max_new_tokens=COUNT
            )
            assert outs[1].tokens == wanted, (rule, draft)
            assert outs[0].tokens != wanted
