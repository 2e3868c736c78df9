"""The next prompt of a decoder does not read again what the last one left in the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.serve.collected import small_model
from tests.toys import llama

import paceline
from paceline.drafters.heads.eagle import EagleHead
from paceline.models.language_model import LanguageModel
from paceline.models.reader import SlotReader

PROMPT = [n % 40 for n in range(100)]


@contextmanager
def tokens_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of prompt tokens of every pass."""
    seen: list[int] = []
    read = SlotReader.read_piece

    def counted(self: SlotReader, first: int, ids: Any, start: int, scored: bool = False) -> Any:
        seen.append(ids.numel())
        return read(self, first, ids, start, scored)

    with monkeypatch.context() as patch:
        patch.setattr(SlotReader, "read_piece", counted)
        yield seen


def drafts(model: LanguageModel) -> list[Any]:
    return [None, "auto", "suffix", "self-quantized", ("eagle", {"head": EagleHead.random(model)})]


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_second_turn_reads_only_what_is_new(
    number: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model()
    decoder = paceline.SpeculativeDecoder(model, drafts(model)[number])
    prompt = list(PROMPT)
    for turn in range(3):
        plain = paceline.SpeculativeDecoder(model, None)
        settings = {"max_new_tokens": 20, "temperature": temperature, "seed": turn, "logprobs": 2}
        with tokens_read(monkeypatch) as seen:
            result = decoder.generate(prompt, **settings)
        alone = plain.generate(prompt, **settings)
        assert (result.tokens, result.logprobs) == (alone.tokens, alone.logprobs)
        # 4 new tokens less the last one, the last token of the text before, and one that proves the weights
        assert sum(seen) == (len(prompt) - 1 if turn == 0 else 5)
        assert (result.cached_tokens, alone.cached_tokens) == (0 if turn == 0 else len(prompt) - 5, 0)
        prompt += [*result.tokens, 3, 1, 4, 1]


def test_a_prompt_that_leaves_the_last_one_reads_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = paceline.SpeculativeDecoder(small_model(), None)
    decoder.generate(PROMPT, max_new_tokens=4)
    other = [*PROMPT[:60], 5, 5, 5, 5]
    with tokens_read(monkeypatch) as seen:
        result = decoder.generate(other, max_new_tokens=9)
    assert sum(seen) == 1 + 3
    assert result.tokens == paceline.SpeculativeDecoder(small_model(), None).generate(other, max_new_tokens=9).tokens


@pytest.mark.parametrize("change", ["in place", "data", "another layer", "hook"])
def test_other_weights_read_the_prompt_again(change: str) -> None:
    model = small_model()
    decoder = paceline.SpeculativeDecoder(model, "suffix")
    decoder.generate(PROMPT, max_new_tokens=4)
    layer = model.model.model.layers[0]
    with torch.no_grad():
        if change == "in place":
            layer.mlp.down_proj.weight.mul_(1.5)
        elif change == "data":
            layer.mlp.down_proj.weight.data.mul_(1.5)
        elif change == "another layer":
            layer.mlp.down_proj.weight = torch.nn.Parameter(layer.mlp.down_proj.weight * 1.5)
        else:
            layer.mlp.register_forward_hook(lambda module, inputs, output: output * 1.5)
    fresh = paceline.SpeculativeDecoder(model, None)
    assert decoder.generate(PROMPT, max_new_tokens=20).tokens == fresh.generate(PROMPT, max_new_tokens=20).tokens


def test_what_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    decoder = paceline.SpeculativeDecoder(model, None)
    decoder.generate(PROMPT, max_new_tokens=4)
    assert len(decoder.kv_caches()) == 1
    decoder.forget()
    assert decoder.kv_caches() == []
    decoder.generate([PROMPT, PROMPT], max_new_tokens=4)
    assert decoder.kv_caches() == [], "a batch is not kept"
    decoder.keeps_prefix = False
    decoder.generate(PROMPT, max_new_tokens=4)
    assert decoder.kv_caches() == []
    monkeypatch.setattr("paceline.engine.kept_rows._LARGE", 1000)
    decoder.keeps_prefix = True
    decoder.generate(PROMPT, max_new_tokens=4)
    assert decoder.kv_caches() == [], "a large one is not kept"


def test_a_model_without_kernels_keeps_nothing() -> None:
    decoder = paceline.SpeculativeDecoder(LanguageModel(llama(3)), None)
    decoder.generate(PROMPT[:50], max_new_tokens=4)
    assert decoder.kv_caches() == []
