"""The bits of a sequence do not depend on its batch: tokens, log-probabilities, KV cache and hidden states."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from tests.conformance.models import CASES, build
from tests.conformance.test_cache import Texts

from paceline import LanguageModel, SpeculativeDecoder
from paceline.models.cpu.cpu_forward import kernels_missing
from paceline.models.runtime import quantize_as, with_runner, with_strict

VOCABULARY = 97
LENGTHS = [1, 30, 7, 70, 2, 13, 44, 5]  # of the prompts: ragged, odd, and longer than one piece
NEW = 7
FORMATS = [None, "int8", "int4", "bfloat16"]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 5},
}
with_kernels = pytest.mark.skipif(kernels_missing() is not None, reason="no kernels here")


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def texts(lengths: list[int] = LENGTHS, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Random prompts with repetitions, so that prompt lookup finds something."""
    dice = random.Random(3)
    known = [dice.randrange(vocabulary) for _ in range(6)]
    return [[dice.choice(known) if place % 3 else known[place % 6] for place in range(size)] for size in lengths]


@cache
def llama(layers: int = 2, hidden: int = 64, heads: int = 4, inner: int = 128) -> LanguageModel:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2 if heads % 2 == 0 else heads // 3,
        max_position_embeddings=2048, initializer_range=0.1, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(layers)
        return LanguageModel(transformers.AutoModelForCausalLM.from_config(config).float().eval())


def written(out: Any) -> tuple[list[int], Any]:
    return out.tokens, out.logprobs


def each_alone(decoder: SpeculativeDecoder, prompts: list[list[int]], **settings: Any) -> list[Any]:
    return [written(decoder.generate(prompt, **settings)) for prompt in prompts]


def drafters() -> dict[str, dict[str, Any]]:
    return {
        "none": {"draft": None},
        "prompt-lookup": {"draft": "prompt-lookup", "gamma": 4},
        "tree": {"draft": llama(1), "gamma": 3, "nodes": 7, "options": {"tree": "levels"}},
    }


@with_kernels
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_batch_by_cpu_kernels_has_the_bits_of_each_alone(kind: str | None, settings: str, threads: int) -> None:
    """Also where a sequence joins a batch that runs (rows=3), and with every kind of draft."""
    output = {"max_new_tokens": NEW, "logprobs": 3, "ignore_eos": True, **SETTINGS[settings]}
    target = quantize_as(llama(), kind)
    wanted = each_alone(SpeculativeDecoder(target, None), texts(), **output)
    assert target.reader().kernels is not None, "this is to test kernels"
    for name, how in drafters().items():
        decoder = SpeculativeDecoder(target, rows=3 if name == "prompt-lookup" else 8, **how)
        assert [written(out) for out in decoder.generate(texts(), **output)] == wanted, name


MIXED: dict[str, list[Any]] = {
    "temperature": [0, 0.8, 1.2, 0, 0.7, 1.0, 0, 0.9],
    "top_k": [None, 5, None, None, 20, None, 3, None],
    "top_p": [None, None, 0.7, None, 0.9, None, None, 0.5],
    "min_p": [None, 0.05, None, None, None, 0.1, None, None],
    "typical_p": [None, None, None, None, None, None, None, 0.8],
    "repetition_penalty": [1.0, 1.2, 1.0, 1.1, 1.0, 1.0, 1.3, 1.0],
    "frequency_penalty": [0.0, 0.0, 0.4, 0.0, 0.0, 0.2, 0.0, 0.0],
    "logit_bias": [None, {3: 1.5}, None, None, {9: -2.0}, None, {4: 0.7}, None],
    "logprobs": [None, 0, 2, 3, None, 97, 1, 4],
    "seed": list(range(8)),
}


@with_kernels
def test_the_settings_of_other_rows_change_no_bits() -> None:
    decoder = SpeculativeDecoder(llama(), "prompt-lookup", gamma=4)
    output = {"max_new_tokens": NEW, "ignore_eos": True}
    wanted = [
        written(decoder.generate(prompt, **output, **{name: values[row] for name, values in MIXED.items()}))
        for row, prompt in enumerate(texts())
    ]
    assert [written(out) for out in decoder.generate(texts(), **output, **MIXED)] == wanted


def memory(reader: Any, row: int, end: int) -> list[torch.Tensor]:
    return [store[row, :, :end] for store in (*reader.cache.keys, *reader.cache.values)]


def tapped(reader: Any, row: int) -> list[torch.Tensor]:
    """The hidden states of a row's prompt, in the order of the taps."""
    mine = [
        taps_piece
        for taps_piece in reader.prompt_taps
        if taps_piece.first <= row < taps_piece.first + len(taps_piece.taps[0])
    ]
    return [torch.cat([taps_piece.taps[tap][row - taps_piece.first] for taps_piece in mine]) for tap in range(2)]


def read(lm: LanguageModel, prompts: list[list[int]], room: int) -> tuple[Any, Texts, torch.Tensor]:
    rows, reader = Texts(), lm.reader((0.5, 1.0))
    rows.admit(prompts)
    width = reader.begin(rows, 0, room)
    assert width == 1  # the last token of a prompt is read as every later token is
    return reader, rows, reader.extend(rows, width).logits


def check_reading(lm: LanguageModel, prompts: list[list[int]]) -> None:
    """Keys, values, hidden states and logits: of all prompts together, and of each alone."""
    together, _, logits = read(lm, prompts, 200)
    for row, prompt in enumerate(prompts):
        alone, _, output = read(lm, [prompt], len(prompt) + 9)
        assert torch.equal(logits[row], output[0])
        here, there = memory(together, row, len(prompt)), memory(alone, 0, len(prompt))
        assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))
        if len(prompt) > 1:
            states, same = tapped(together, row), tapped(alone, 0)
            assert all(torch.equal(one[: len(prompt) - 1], two) for one, two in zip(states, same, strict=True))


@with_kernels
@pytest.mark.parametrize("kind", FORMATS)
@torch.inference_mode()
def test_kernels_read_a_prompt_alike_in_every_batch(kind: str | None, threads: int) -> None:
    check_reading(quantize_as(llama(), kind), texts())
    check_reading(quantize_as(llama(), kind), texts([3, 4, 1, 6, 5]))  # so short that one pass reads them


@with_kernels
@pytest.mark.parametrize("kind", FORMATS)
@torch.inference_mode()
def test_kernels_give_a_prefix_the_bits_of_the_whole(kind: str | None) -> None:
    """What a position holds depends on the text up to it alone; so a KV cache may be reused from any position on."""
    lm, text = quantize_as(llama(), kind), texts([300])[0]
    whole = memory(read(lm, [text], 310)[0], 0, 299)
    for end in (2, 64, 129, 200):
        part = memory(read(lm, [text[:end]], 400)[0], 0, end)
        assert all(torch.equal(one[:, :end], other) for one, other in zip(whole, part, strict=True))


# ---- transformers' forward, by fixed shapes


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in CASES if CASES[name].dtype == torch.float64)]
    + [(name, "bfloat16") for name in ("llama", "gemma3", "gpt2", "bloom", "mixtral")],
)
@torch.inference_mode()
def test_strict_reading_is_alike_in_every_batch(name: str, dtype: str) -> None:
    lm = with_strict(with_runner(LanguageModel(build(CASES[name]).to(getattr(torch, dtype))), "eager"))
    check_reading(lm, texts([1, 23, 7, 13], lm.vocabulary))


def wide(dtype: torch.dtype) -> Any:
    """At the width of a real model: small products may hide the effect."""
    return transformers.AutoModelForCausalLM.from_config(llama(2, 576, 9, 1536).model.config).to(dtype).eval()


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@DTYPES
@torch.inference_mode()
def test_strict_reading_of_a_wide_model(dtype: torch.dtype, threads: int) -> None:
    check_reading(with_strict(with_runner(LanguageModel(wide(dtype)), "eager")), texts([7, 70, 13]))


@DTYPES
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_strict_batch_has_the_bits_of_each_alone(dtype: torch.dtype, settings: str) -> None:
    output = {"max_new_tokens": NEW, "logprobs": 3, "ignore_eos": True, **SETTINGS[settings]}
    model = wide(dtype)
    wanted = each_alone(SpeculativeDecoder(model, None, runner="eager", strict=True), texts(), **output)
    decoder = SpeculativeDecoder(model, "prompt-lookup", runner="eager", strict=True, rows=5, gamma=4)
    assert [written(out) for out in decoder.generate(texts(), **output)] == wanted


@torch.inference_mode()
def test_strict_gives_a_prefix_the_bits_of_the_whole() -> None:
    lm = with_strict(with_runner(llama(), "eager"))
    text = texts([300])[0]
    whole = memory(read(lm, [text], 310)[0], 0, 299)
    for end in (2, 64, 129, 200):
        part = memory(read(lm, [text[:end]], 700)[0], 0, end - 1)  # the last token is read as those after it
        assert all(torch.equal(one[:, : end - 1], other) for one, other in zip(whole, part, strict=True))


@torch.inference_mode()
def test_strict_rounds_see_as_many_slots_as_the_position_asks_for() -> None:
    """A sequence beside a much longer one, at the edge of a block of slots, and in drafts that cross it."""
    lm = with_strict(with_runner(llama(), "eager"))
    short, long = texts([509, 1200])
    reader, rows, logits = read(lm, [short], 530)
    beside, both, more = read(lm, [short, long], 1300)
    assert torch.equal(logits[0], more[0])
    draft = torch.tensor([texts([11])[0]])
    for reading, texts_read in ((reader, rows), (beside, both)):
        reading.keep(texts_read, None)
    far = beside.extend(both, 1, draft.expand(2, -1)).logits[0]
    steps = []
    for token in [None, *draft[0].tolist()]:
        if token is not None:
            reader.keep(rows, None)
            rows.commit([[token]])
        steps.append(reader.extend(rows, 1).logits[0, -1])
    assert torch.equal(far, torch.stack(steps))
