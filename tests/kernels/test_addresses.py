"""A plan is a list of addresses. Here is what could make one of them wrong: weights that change hands, a cache
that grows, positions past the table of angles, unknown tokens, tensors of another dtype than expected."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from tests.conformance.test_cache import Texts
from tests.kernels.zoo import VOCABULARY, Alone, build, reader_of, small
from torch import nn

from paceline import LanguageModel, SpeculativeDecoder
from paceline.common.errors import ModelOutputError, UnsupportedError
from paceline.models.cpu.cpu_plan import plan_of
from paceline.models.slot_cache import SlotCache

PROMPT = [3, 9, 27, 4, 11, 9, 27]


def text(lm: LanguageModel, runner: str = "auto") -> list[int]:
    lm.runner = runner
    return list(SpeculativeDecoder(lm, "prompt-lookup").generate(PROMPT, max_new_tokens=24, ignore_eos=True).tokens)


def uses_kernels(lm: LanguageModel) -> bool:
    lm.runner = "auto"
    return lm.reader().kernels is not None


# ---- weights that change between generations, or under our hands


def test_a_model_may_be_cast_and_cast_back() -> None:
    lm = LanguageModel(build("llama"))
    before = text(lm)
    lm.model.double()
    assert not uses_kernels(lm)
    assert text(lm) == before
    lm.model.float()
    assert uses_kernels(lm)
    assert text(lm) == before


def test_weights_may_be_replaced() -> None:
    """In place, by another tensor, by another module: the plan is made for every text."""
    lm, other = LanguageModel(build("llama")), build("llama", seed=1)
    before = text(lm)
    lm.model.load_state_dict(other.state_dict())
    assert text(lm) == text(lm, "eager") != before
    lm.model.lm_head.weight.data = torch.randn(VOCABULARY, 36)
    assert text(lm) == text(lm, "eager")
    lm.model.lm_head = nn.Linear(36, VOCABULARY, bias=False)
    assert uses_kernels(lm)
    assert text(lm) == text(lm, "eager")
    lm.model.lm_head.weight.data = lm.model.lm_head.weight.data.t().contiguous().t()  # not in the order of its rows
    assert text(lm) == text(lm, "eager")


def test_weights_that_are_freed_in_the_middle_of_a_text_are_not_freed_for_it() -> None:
    """A model that is cast during a text finishes the text as it began."""
    lm = LanguageModel(build("llama"))
    wanted = text(lm)
    stream = SpeculativeDecoder(lm, "prompt-lookup").stream(PROMPT, max_new_tokens=24, ignore_eos=True)
    got = [next(stream).token]
    for weight in lm.model.parameters():
        weight.data = torch.full_like(weight, 7.0)
    gc.collect()
    noise = [torch.randn(weight.shape) for weight in lm.model.parameters()]  # takes memory that was given back
    got += [event.token for event in stream if event.token is not None]
    assert len(noise) > 0
    assert got == wanted


def test_listeners_are_heard_and_those_of_transformers_are_not_listeners() -> None:
    lm = LanguageModel(build("llama"))
    heard: list[int] = []
    hook = lm.model.model.layers[1].register_forward_hook(lambda *_: heard.append(1))
    assert not uses_kernels(lm)
    text(lm)
    assert heard
    hook.remove()
    lm.model(torch.tensor([PROMPT]), output_hidden_states=True)  # leaves hooks of its own behind
    assert uses_kernels(lm)


@pytest.mark.parametrize("change", ["a narrower layer", "a shorter head", "a shorter embedding"])
def test_weights_of_another_shape_than_the_config_says_are_not_read(change: str) -> None:
    model = build("llama")
    if change == "a narrower layer":
        mlp = model.model.layers[1].mlp
        mlp.gate_proj, mlp.up_proj = nn.Linear(36, 20, bias=False), nn.Linear(36, 20, bias=False)
        mlp.down_proj = nn.Linear(20, 36, bias=False)
    elif change == "a shorter head":
        model.lm_head = nn.Linear(36, VOCABULARY - 3, bias=False)
    else:
        model.model.embed_tokens = nn.Embedding(VOCABULARY - 3, 36)
    lm = LanguageModel(model)
    assert isinstance(plan_of(lm.model, lm.architecture.kinds, lm.architecture.window, lm.logits), str)
    assert not uses_kernels(lm)
    lm.runner = "kernels"
    with pytest.raises(UnsupportedError, match="cannot run by it"):
        lm.reader()


def test_numbers_that_are_none_are_told() -> None:
    lm = LanguageModel(build("llama"))
    with torch.no_grad():
        lm.model.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    assert uses_kernels(lm)
    with pytest.raises(ModelOutputError):
        text(lm)


# ---- the cache


@torch.inference_mode()
def test_the_cache_may_grow_in_the_middle_of_a_text() -> None:
    alone, dice = Alone(small("qwen3")), random.Random(3)
    written = [dice.randrange(VOCABULARY) for _ in range(60)]
    rows, reader = Texts(), reader_of(small("qwen3"), 2)
    rows.admit([written[:1], written[:1]])
    reader.begin(rows, 0, 2)
    places = set()
    for end in range(1, 60):
        logits = reader.extend(rows, 1).logits
        places.add(reader.cache.addresses().tobytes())
        reader.keep(rows, None)
        for row in range(2):
            alone.check(logits[row, 0], written[:end], f"after {end}")
        rows.commit([[written[end]], [written[end]]])
    assert len(places) > 3, "it grew"


def test_a_cache_knows_where_it_is() -> None:
    cache = SlotCache()
    cache.reserve(1, 8)
    cache.allocate(2, 1, 8, torch.float32)

    def is_right() -> bool:
        stores = [store for pair in zip(cache.keys, cache.values, strict=True) for store in pair]
        return cache.addresses().tolist() == [store.data_ptr() for store in stores]

    assert is_right()
    assert cache.addresses() is cache.addresses()
    cache.reserve(3, 8)
    assert is_right()
    cache.reserve(3, 99)
    assert is_right()
    cache.set_next_write(slice(0, 3), 0, 4, 0)
    cache.update(torch.zeros(3, 1, 4, 8), torch.zeros(3, 1, 4, 8), 2)
    assert is_right()
    assert len(cache.addresses()) == 6


# ---- positions


@torch.inference_mode()
def test_positions_past_the_table_of_angles() -> None:
    lm = LanguageModel(build("llama", max_position_embeddings=2048))
    dice = random.Random(4)
    written = [dice.randrange(VOCABULARY) for _ in range(516)]
    rows, reader = Texts(), reader_of(lm)
    rows.admit([written[:509]])
    reader.begin(rows, 0, 520)
    got = [reader.extend(rows, 1, torch.tensor([written[509:511]])).logits]
    assert reader.kernels.plan.angles[0].shape[0] == 512
    reader.keep(rows, None)
    rows.commit([written[509:512]])
    got.append(reader.extend(rows, 1, torch.tensor([written[512:]])).logits)
    assert reader.kernels.plan.angles[0].shape[0] > 512
    wanted = lm.model(torch.tensor([written])).logits[:, 508:]
    torch.testing.assert_close(torch.cat(got, 1), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "llama3-rope", "yarn-rope"])
def test_a_longer_table_begins_as_the_shorter_one(name: str) -> None:
    lm = small(name)
    tables = []
    for positions in (1, 600, 5000):
        plan: Any = plan_of(lm.model, lm.architecture.kinds, lm.architecture.window)
        tables.append(plan.turned(positions))
        assert tables[-1][0].shape[0] >= positions
    for cos, sin in tables[:2]:
        assert torch.equal(cos, tables[2][0][: len(cos)])
        assert torch.equal(sin, tables[2][1][: len(sin)])


# ---- tokens


@torch.inference_mode()
def test_tokens_a_draft_does_not_know_are_read_as_its_last() -> None:
    lm = LanguageModel(build("llama"))
    wide = LanguageModel(build("llama", vocab_size=50))
    speaker = lm.with_vocabulary_of(wide)
    rows, reader = Texts(), speaker.reader()
    rows.admit([[3]])
    reader.begin(rows, 0, 16)
    logits = reader.extend(rows, 1, torch.tensor([[49, 43, 42]])).logits
    assert logits.shape == (1, 4, VOCABULARY)
    for count in range(4):
        Alone(lm).check(logits[0, count], [3, 42, 42, 42][: count + 1], f"{count} unknown tokens")


@pytest.mark.parametrize("token", [VOCABULARY, -1, 2**40])
@torch.inference_mode()
def test_tokens_nobody_knows_are_an_error_and_not_a_memory(token: int) -> None:
    rows, reader = Texts(), reader_of(small("llama"))
    rows.admit([[3, 5]])
    reader.begin(rows, 0, 16)
    with pytest.raises(IndexError, match="knows 0 to 42"):
        reader.extend(rows, 1, torch.tensor([[token]]))
    reader.keep(rows, None)
    assert reader.extend(rows, 1, torch.tensor([[7]])).logits.isfinite().all()


@torch.inference_mode()
def test_tokens_of_another_kind_or_order() -> None:
    rows, reader = Texts(), reader_of(small("llama"))
    rows.admit([[3]])
    reader.begin(rows, 0, 16)
    reader.extend(rows, 1)
    fed = torch.tensor([[7, 0, 8, 0, 9, 0]], dtype=torch.int32)[:, ::2]
    logits = reader.extend(rows, 0, fed).logits
    for count in range(3):
        Alone(small("llama")).check(logits[0, count], [3, 7, 8, 9][: count + 2], "int32, every second")


# ---- calls of torch


@torch.inference_mode()
def test_torch_may_have_been_told_to_make_other_tensors() -> None:
    lm, alone = LanguageModel(build("llama")), Alone(small("llama"))
    written = [3, 7, 8, 9]
    wanted = [alone.after(written[:end]) for end in range(1, 5)]
    rows = Texts()
    rows.admit([[3]])
    fed = torch.tensor([written[1:]])
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        reader = reader_of(lm)
        reader.begin(rows, 0, 16)
        logits = reader.extend(rows, 1, fed).logits
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert all(torch.equal(got, each) for got, each in zip(logits[0], wanted, strict=True))
