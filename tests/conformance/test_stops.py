"""Where a text ends: for every kind of stop, at many positions, the result equals that of plain decoding.

Tokens, text, finish reason, its cause, counts and log-probabilities; with the stop anywhere in an accepted block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from paceline import Generation, LanguageModel, PacelineWarning
from tests.selection import covering

from .drafters import PLAIN, Variant, board, on_settings, some_slow, some_variants, variants
from .models import CASES, EOS, VOCABULARY, build, target
from .test_identity import check_accounts
from .tokenizer import ByteTokenizer

CASE = "llama"
NEW = 21
GAMMA = 5
AT = [0, 1, 2, 3, 4, 5, 8, 11, 13, 18, 20]  # positions: each residue of γ + 1, and both ends
PROMPT = [1, 7, 9, 4, 7, 9, 4, 7]
SAMPLING = [{"temperature": 0.0, "seed": 3}, {"temperature": 1.2, "seed": 3}]
RUNNERS = [PLAIN, *some_variants(("close", "same"))]
SOME_SLOW = some_slow(RUNNERS, lambda variant: variant.perfect)


@cache
def model() -> LanguageModel:
    return LanguageModel(target(CASE).model, ByteTokenizer(), CASE)


@cache
def whole(sampled: bool) -> Generation:
    """The text without any stop."""
    return PLAIN.decoder(CASE, model()).generate(PROMPT, max_new_tokens=NEW, ignore_eos=True, **SAMPLING[sampled])


# kind of stop -> the settings for position i of the text
Kind = Callable[[int, Generation], dict[str, Any]]


def cut(out: Generation, start: int, length: int) -> str:
    """A piece of the text: a stop string that is certain to occur."""
    start = min(start, len(out.text) - length)
    return out.text[start : start + length]


KINDS: dict[str, Kind] = {
    "eos": lambda i, out: {"eos_token_ids": [out.tokens[i]]},
    "several eos": lambda i, out: {"eos_token_ids": [VOCABULARY - 1, out.tokens[i], out.tokens[5]]},
    "the model's own eos": lambda i, out: {"logit_bias": {EOS: i / 4}},
    "eos ignored": lambda i, out: {"eos_token_ids": [out.tokens[i]], "ignore_eos": True},
    "one character": lambda i, out: {"stop": [cut(out, i, 1)]},
    "two characters": lambda i, out: {"stop": [cut(out, i, 2)]},
    "a stop string over many tokens": lambda i, out: {"stop": [cut(out, i, 7)]},
    "several stop strings": lambda i, out: {"stop": [cut(out, i, 4), cut(out, i + 1, 2), "not there", cut(out, i, 3)]},
    "maximum": lambda i, out: {"max_new_tokens": i + 1},
    "eos at the maximum": lambda i, out: {"eos_token_ids": [out.tokens[i]], "max_new_tokens": i + 1},
    "stop string at the maximum": lambda i, out: {"stop": [cut(out, i, 2)], "max_new_tokens": i + 1},
    "stop string and eos": lambda i, out: {"stop": [cut(out, i, 2)], "eos_token_ids": [out.tokens[i]]},
    "minimum": lambda i, out: {"min_new_tokens": i + 1, "eos_token_ids": list(out.tokens[:6])},
    "minimum, with a stop string": lambda i, out: {
        "min_new_tokens": i + 1,
        "stop": [cut(out, i // 2, 2)],
        "eos_token_ids": [out.tokens[0]],
    },
}


def settings_at(kind: str, i: int) -> dict[str, Any]:
    sampled = i % 2 == 1
    base = {
        "max_new_tokens": NEW,
        "ignore_eos": "eos" not in kind and "minimum" not in kind,
        "logprobs": [None, 0, 3][i % 3],
        **SAMPLING[sampled],
    }
    return {**base, **KINDS[kind](i, whole(sampled))}


def record(out: Generation) -> tuple[Any, ...]:
    return out.tokens, out.text, out.finish_reason, out.stop_reason, out.stats.emitted, out.prompt_tokens, out.seed


def check_logprobs(out: Generation, wanted: Generation) -> None:
    if wanted.logprobs is None:
        assert out.logprobs is None
        return
    assert out.logprobs is not None
    assert [entry.token for entry in out.logprobs] == out.tokens
    for ours, theirs in zip(out.logprobs, wanted.logprobs, strict=True):
        assert ours.raw == pytest.approx(theirs.raw, abs=1e-9)
        assert ours.processed == pytest.approx(theirs.processed, abs=1e-9)
        for top, other in ((ours.top_raw, theirs.top_raw), (ours.top_processed, theirs.top_processed)):
            assert [token for token, _ in top] == [token for token, _ in other]
            assert [value for _, value in top] == pytest.approx([value for _, value in other], abs=1e-9)


@cache
def plain(kind: str) -> list[Generation]:
    """One prompt at a time, one token at a time."""
    decoder = PLAIN.decoder(CASE, model())
    return [decoder.generate(PROMPT, **settings_at(kind, i)) for i in range(NEW)]


def batch(decoder: Any, settings: list[dict[str, Any]]) -> list[Generation]:
    names = sorted({name for one in settings for name in one})
    return decoder.generate([PROMPT] * len(settings), **{name: [one.get(name) for one in settings] for name in names})


@pytest.mark.parametrize("kind", KINDS)
def test_the_stops_are_where_they_should_be(kind: str) -> None:
    """Otherwise the comparison below compares texts that never stopped."""
    outs = plain(kind)
    early = [len(out.tokens) for out in outs if out.finish_reason == "stop"]
    if kind in ("maximum", "eos ignored"):
        assert not early
        assert [len(out.tokens) for out in outs] == (list(range(1, NEW + 1)) if kind == "maximum" else [NEW] * NEW)
    else:
        assert len(early) > NEW // 3
        assert len(set(early)) >= 3
    for out in outs:
        assert out.text == out.text.split(str(out.stop_reason))[0] or not isinstance(out.stop_reason, str)


@pytest.mark.parametrize(("kind", "variant"), board(KINDS, RUNNERS, on_settings))
def test_every_stop_at_every_position(kind: str, variant: Variant) -> None:
    settings = [settings_at(kind, i) for i in AT]
    outs = batch(variant.decoder(CASE, model(), gamma=GAMMA, rows=8), settings)
    for i, out in zip(AT, outs, strict=True):
        wanted = plain(kind)[i]
        assert record(out) == record(wanted), f"position {i}"
        check_logprobs(out, wanted)
        check_accounts(out)


@pytest.mark.parametrize("variant", SOME_SLOW, ids=str)
def test_streams_stop_there_too(variant: Variant) -> None:
    kinds = ["two characters", "several stop strings", "eos", "stop string at the maximum"]
    settings = [settings_at(kind, i) for kind in kinds for i in range(0, NEW, 2)]
    wanted = [plain(kind)[i] for kind in kinds for i in range(0, NEW, 2)]
    names = sorted({name for one in settings for name in one})
    lists = {name: [one.get(name) for one in settings] for name in names}
    texts, ends = [""] * len(settings), [""] * len(settings)
    for piece in variant.decoder(CASE, model(), gamma=5).stream([PROMPT] * len(settings), **lists):
        assert not ends[piece.index], "a piece after the end"
        texts[piece.index] += piece.text
        ends[piece.index] = piece.finish_reason or ""
    assert texts == [out.text for out in wanted]
    assert ends == [out.finish_reason for out in wanted]


@pytest.mark.parametrize("least", range(1, 9))
def test_the_minimum_is_what_it_says(least: int) -> None:
    """Against a loop on paper: the ids that end a text are out for the first `least` tokens, and then in again."""
    ends = sorted(set(whole(False).tokens[:6]))
    text = list(PROMPT)
    while len(text) < len(PROMPT) + NEW and not (len(text) > len(PROMPT) and text[-1] in ends):
        with torch.no_grad():
            logits = model().model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].clone()
        logits[ends if len(text) - len(PROMPT) < least else []] = float("-inf")
        text.append(int(logits.argmax()))
    for variant in RUNNERS[least % 4 :: 4]:
        out = variant.decoder(CASE, model()).generate(
            PROMPT, max_new_tokens=NEW, min_new_tokens=least, eos_token_ids=ends
        )
        assert out.tokens == text[len(PROMPT) :]


# ---- the end of the context

LEARNED_AND_ROTARY = ["gpt2", "gemma3", "falcon-alibi"]
SHORT = 24


@cache
def short_models(case: str) -> tuple[LanguageModel, LanguageModel]:
    """A target and a draft that can read only a few tokens."""
    name = "n_positions" if "n_positions" in CASES[case].settings else "max_position_embeddings"
    made = [LanguageModel(build(CASES[case], seed, **{name: SHORT}), name=case) for seed in (0, 1)]
    assert all(lm.context == SHORT for lm in made)
    return made[0], made[1]


TO_THE_END = [[(3 * i) % 11 for i in range(length)] for length in (SHORT - 1, SHORT - 2, SHORT - 6, 9, 1)]


@cache
def to_the_end(case: str) -> list[Generation]:
    """Plain texts that end with the context."""
    decoder = PLAIN.decoder(case, short_models(case)[0])
    return [decoder.generate(prompt, max_new_tokens=40, ignore_eos=True, seed=0) for prompt in TO_THE_END]


@pytest.mark.parametrize(("case", "variant"), board(LEARNED_AND_ROTARY, RUNNERS, lambda variant: 3))
def test_the_end_of_the_context(case: str, variant: Variant) -> None:
    """Never a token more than fits, and the rows that end there do not disturb the others."""
    lm, small = short_models(case)
    wanted = to_the_end(case)
    assert [len(out.tokens) for out in wanted] == [SHORT - len(prompt) for prompt in TO_THE_END]
    options = {**variant.made_for(lm, case), **({"model": lm if variant.perfect else small} if variant.draft else {})}
    made = Variant(variant.drafter, options)
    for rows in (1, 3):
        outs = made.decoder(case, lm, gamma=6, rows=rows).generate(
            TO_THE_END, max_new_tokens=40, ignore_eos=True, seed=0
        )
        assert [record(out) for out in outs] == [record(one) for one in wanted]
        assert all(out.finish_reason == "length" for out in outs)


@pytest.mark.parametrize(
    ("case", "variant"), covering(["gpt2", "llama"], [variant for variant in variants(("close",)) if variant.draft])
)
def test_a_draft_that_reads_less_than_the_target(case: str, variant: Variant) -> None:
    """It drafts as long as it can, says once that it no longer can, and the text goes on."""
    lm, small = target(case), short_models(case)[1]
    prompts = [[(3 * i) % 11 for i in range(length)] for length in (SHORT - 4, 9, 1)]
    wanted = [PLAIN.decoder(case).generate(prompt, max_new_tokens=30, ignore_eos=True).tokens for prompt in prompts]
    made = Variant(variant.drafter, {**variant.options, "model": small})
    with pytest.warns(PacelineWarning, match="longer than the context") as warnings:
        outs = made.decoder(case, lm, gamma=4).generate(prompts, max_new_tokens=30, ignore_eos=True)
    assert [out.tokens for out in outs] == wanted
    assert len(warnings) == 1
    assert all(out.stats.drafted > 0 for out in outs)
