"""Targets of two branches write what the formula gives, with and without speculation."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tests.toys import CONTEXT, VOCABULARY, letters, llama
from torch import Tensor

import paceline
from paceline import InputError, LanguageModel, SpeculativeDecoder, UnsupportedError

NEW = 24
PROMPTS = [[1, 7, 9, 4, 7, 9, 4, 7, 9, 11, 2], [3, 3, 8, 3, 3, 8, 3], [6, 21], [13]]
NEGATIVES: dict[str, list[int]] = {"none": [], "short": [5], "long": [9, 2, 30, 17, 4, 4, 21, 8, 1, 12, 33, 6, 6]}
MODEL, CLOSE = LanguageModel(llama(3)), LanguageModel(llama(4, num_hidden_layers=1))
SAMPLED = {"temperature": 0.9, "seed": [5, 6, 7, 8]}
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lookup": ("prompt-lookup", {}),
    "chain": ("draft-model", {"model": MODEL}),
    "tree": ("draft-model", {"model": MODEL, "tree": "best-first"}),
    "staged": ("staged", {"model": MODEL}),
    "early exit": ("early-exit", {}),
}


def plain(target: LanguageModel, **settings: Any) -> list[list[int]]:
    """One prompt at a time, no draft."""
    texts = []
    for row, prompt in enumerate(PROMPTS):
        mine = {name: value[row] if isinstance(value, list) else value for name, value in settings.items()}
        out = SpeculativeDecoder(target, draft=None).generate(prompt, max_new_tokens=NEW, ignore_eos=True, **mine)
        texts.append(out.tokens)
    return texts


def score(target: Any, prompt: list[int], new: list[int]) -> Tensor:
    """What both branches say together, by whole forward passes."""
    logs = []
    for lm, text in ((target.first, prompt), (target.second, target.other_prompt(prompt))):
        with torch.no_grad():
            logits = lm.model(input_ids=torch.tensor([[*text, *new]]), use_cache=False).logits
        logs.append(logits[0, -1].log_softmax(-1))
    if hasattr(target, "scale"):
        return logs[1] + target.scale * (logs[0] - logs[1])
    beta = target.beta
    found = logs[0] - logs[1] if beta is None else (1 + beta) * logs[0] - beta * logs[1]
    found[logs[0].exp() < target.alpha * logs[0].exp().max()] = -torch.inf
    return found


def formula(target: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding on a slip of paper."""
    new: list[int] = []
    for _ in range(count):
        new.append(int(score(target, prompt, new).argmax()))
    return new


def best_beam(target: Any, prompt: list[int], width: int, count: int) -> list[int]:
    """Beam search on a slip of paper."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(count):
        found = []
        for total, new in beams:
            logs = score(target, prompt, new).log_softmax(-1)
            found += [(total + float(logs[token]), [*new, token]) for token in range(len(logs))]
        beams = sorted(found, reverse=True)[:width]
    return beams[0][1]


@pytest.mark.parametrize("scale", [0.0, 1.5, 4.0])
@pytest.mark.parametrize("negative", NEGATIVES.values(), ids=NEGATIVES)
def test_guidance_is_that_of_transformers(negative: list[int], scale: float) -> None:
    """Another prompt, scale or alignment of the second branch would give another text."""
    target = paceline.guided(MODEL, scale, negative)
    written = plain(target)
    assert written != plain(MODEL)
    for prompt, text in zip(PROMPTS, written, strict=True):
        more = {"negative_prompt_ids": torch.tensor([negative])} if negative else {}
        ids = torch.tensor([prompt])
        hugging = MODEL.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
            pad_token_id=0, guidance_scale=scale, **more,
        )  # fmt: skip
        assert hugging[0, len(prompt) :].tolist() == text


@pytest.mark.parametrize(("alpha", "beta"), [(0.1, 0.5), (0.3, None), (0.0, 2.0), (1.0, 0.5)])
def test_contrast_is_the_formula(alpha: float, beta: float | None) -> None:
    target = paceline.contrast(MODEL, CLOSE, alpha, beta)
    written = plain(target)
    assert written == [formula(target, prompt, NEW) for prompt in PROMPTS]
    assert (written == plain(MODEL)) == (alpha == 1.0)  # of one plausible token there is no choice


SpeculativeDecoder(MODEL, "early-exit")  # which looks into a model once


@cache
def guided_plain(negative: str, sampled: bool) -> list[list[int]]:
    return plain(paceline.guided(MODEL, 2.0, NEGATIVES[negative]), **(SAMPLED if sampled else {}))


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("negative", ["none", "long"])
def test_speculation_changes_nothing(name: str, negative: str) -> None:
    """A ragged batch with rows that come and go, greedy and sampled; the draft model knows nothing of the guidance."""
    target = paceline.guided(MODEL, 2.0, NEGATIVES[negative])
    draft, options = DRAFTERS[name]
    for settings in ({}, SAMPLED):
        wanted = guided_plain(negative, bool(settings))
        for rows in (2, 4):
            decoder = SpeculativeDecoder(target, draft, options=options, gamma=4, rows=rows)
            outs = decoder.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True, **settings)
            assert [out.tokens for out in outs] == wanted
            assert sum(out.stats.accepted for out in outs) > 0


@pytest.mark.parametrize("name", DRAFTERS)
def test_speculation_changes_nothing_of_a_contrast(name: str) -> None:
    target = paceline.contrast(MODEL, CLOSE)
    draft, options = DRAFTERS[name]
    for settings in ({}, SAMPLED):
        decoder = SpeculativeDecoder(target, draft, options=options, gamma=4)
        outs = decoder.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True, **settings)
        assert [out.tokens for out in outs] == plain(target, **settings)


def test_a_guided_model_may_draft_for_itself() -> None:
    """As a draft its reader catches up and is rewound: a perfect draft must be believed, in batches that change."""
    target = paceline.guided(MODEL, 2.0, NEGATIVES["short"])
    for options in ({"model": target}, {"model": target, "tree": "levels"}):
        decoder = SpeculativeDecoder(target, "draft-model", options=options, gamma=3, rows=2)
        outs = decoder.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)
        assert [out.tokens for out in outs] == plain(target)
        assert all(entry.path for out in outs for entry in out.trace.rounds if entry.drafted)


@pytest.mark.parametrize("draft", [None, MODEL])
def test_beams_take_their_second_branch_along(draft: Any) -> None:
    """Rows change places; a second branch that stays behind would judge another text."""
    target = paceline.guided(MODEL, 2.0, NEGATIVES["long"])
    outs = SpeculativeDecoder(target, draft, gamma=3).generate(PROMPTS[:2], max_new_tokens=7, num_beams=3)
    assert [out.tokens for out in outs] == [best_beam(target, prompt, 3, 7) for prompt in PROMPTS[:2]]


def test_logprobs_are_of_both_branches() -> None:
    target = paceline.guided(MODEL, 2.0)
    (first,) = SpeculativeDecoder(target, draft=None).generate(PROMPTS[0], max_new_tokens=1, logprobs=0).logprobs
    with torch.no_grad():
        logs = [MODEL.model(input_ids=torch.tensor([text])).logits[0, -1].log_softmax(-1) for text in
                (PROMPTS[0], PROMPTS[0][-1:])]  # fmt: skip
    wanted = (logs[1] + 2.0 * (logs[0] - logs[1])).log_softmax(-1)
    assert first.raw == pytest.approx(float(wanted[first.token]))


def test_the_end_of_the_context_is_that_of_the_longer_text() -> None:
    """A negative prompt longer than the prompt would otherwise run over the end first."""
    negative = [1] * 40
    target = paceline.guided(MODEL, 2.0, negative)
    out = SpeculativeDecoder(target, "prompt-lookup").generate([13], max_new_tokens=200, ignore_eos=True)
    assert len(out.tokens) + len(negative) == CONTEXT
    assert out.tokens == formula(target, [13], len(out.tokens))


def test_a_negative_prompt_may_be_text() -> None:
    lm = LanguageModel(MODEL.model, letters())
    assert paceline.guided(lm, 2.0, "bad").negative == lm.tokenizer.encode("bad")  # type: ignore[attr-defined]
    assert paceline.guided(lm, 1.0, "bad") is lm


def test_refusals() -> None:
    with pytest.raises(InputError, match="no tokenizer"):
        paceline.guided(MODEL, 2.0, "text")
    with pytest.raises(InputError, match="outside the vocabulary"):
        paceline.guided(MODEL, 2.0, [VOCABULARY])
    with pytest.raises(InputError, match="guidance scale"):
        paceline.guided(MODEL, float("nan"))
    with pytest.raises(InputError, match="shorten it"):
        paceline.guided(MODEL, 2.0, [1] * CONTEXT)
    wrong: Any
    for wrong in (None, [1.5], ["1"], 3):
        with pytest.raises(InputError, match="a text or a list of token ids"):
            paceline.guided(MODEL, 2.0, wrong)
    for wrong in (2, "x", None, True, float("nan")):
        with pytest.raises(InputError, match="alpha"):
            paceline.contrast(MODEL, CLOSE, alpha=wrong)
    for wrong in (-1, "x", True, float("inf")):
        with pytest.raises(InputError, match="beta"):
            paceline.contrast(MODEL, CLOSE, beta=wrong)
    with pytest.raises(UnsupportedError, match="tokens"):
        paceline.contrast(MODEL, LanguageModel(llama(1, vocab_size=VOCABULARY - 1)))
