"""Bytes that can be worked out by hand."""

from __future__ import annotations

import threading
import tracemalloc

import pytest
import torch

from paceline.bench.machine_use import cache_bytes, layer_seconds, layer_table, tensor_bytes
from paceline.common.errors import UnsupportedError
from paceline.engine.decoder import SpeculativeDecoder
from paceline.models import device as looking
from paceline.models.device import peak_while
from paceline.models.language_model import LanguageModel
from tests.toys import fingerprint, gpt2, llama, scripted

MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return LanguageModel(llama())


def test_a_peak_on_the_cpu_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[torch.Tensor] = []
    looked, real = threading.Event(), looking._resident

    def resident() -> int:
        found = bool(held), real()
        if found[0]:
            looked.set()
        return found[1]

    def use() -> str:
        held.append(torch.ones(64 * MEGABYTE, dtype=torch.uint8))
        assert looked.wait(60), "the peak was not looked at while it lasted"
        held.clear()
        return "done"

    if not looking._STATM.exists():  # the system does not say
        assert peak_while(lambda: 1, torch.device("cpu")) == (1, None)
        return
    monkeypatch.setattr(looking, "_resident", resident)
    result, peak = peak_while(use, torch.device("cpu"))
    assert result == "done"
    assert peak is not None
    assert peak > 48 * MEGABYTE


def test_the_peak_is_above_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([100, 130, *[110] * 1000])
    monkeypatch.setattr(looking, "_EVERY", 10.0)
    assert looking._resident_while(lambda: 7, lambda: next(sizes)) == (7, 30)


def test_nobody_looks_on_after_a_failure() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        peak_while(fail, torch.device("cpu"))
    assert not [thread for thread in threading.enumerate() if thread.name == "paceline-memory"]


def test_elsewhere_it_is_not_known() -> None:
    assert peak_while(lambda: 1, torch.device("meta")) == (1, None)


def weight_bytes(lm: LanguageModel) -> int:
    return tensor_bytes([*lm.model.parameters(), *lm.model.buffers()])


def test_weights_that_are_shared_count_once() -> None:
    tied = LanguageModel(llama(tie_word_embeddings=True))
    apart = LanguageModel(llama(tie_word_embeddings=False))
    assert weight_bytes(apart) - weight_bytes(tied) == 40 * 32 * 8
    assert weight_bytes(apart) == sum(p.numel() * 8 for p in apart.model.parameters()) + sum(
        b.numel() * b.element_size() for b in apart.model.buffers()
    )


def test_the_table_of_layers_adds_up(lm: LanguageModel) -> None:
    table = layer_table(lm)
    assert [row.name for row in table] == ["layer 0", "layer 1", "embeddings, head, norms"]
    assert sum(row.parameters for row in table) == weight_bytes(lm)
    assert [row.per_token for row in table] == [2 * 2 * 8 * 8, 2 * 2 * 8 * 8, 0]  # K and V, heads, width, bytes
    assert table[0].dtype == "float64"
    assert table[0].seconds is None
    assert len(layer_table(LanguageModel(gpt2()))) == 3


def test_seconds_per_layer_come_from_the_clock_and_leave_no_hooks(lm: LanguageModel) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1
        return now

    before = fingerprint(lm.model)
    assert layer_seconds(lm, clock, passes=2) == [1.0, 1.0]
    assert [row.seconds for row in layer_table(lm, clock)] == [1.0, 1.0, None]
    assert fingerprint(lm.model) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in lm.model.modules())


def test_a_model_without_a_list_of_layers_has_no_table() -> None:
    with pytest.raises(UnsupportedError, match="in no list"):
        layer_table(LanguageModel(scripted([1, 2, 3])))


def test_caches_of_both_kinds_are_weighed(lm: LanguageModel) -> None:
    output = lm.model(input_ids=torch.zeros(2, 5, dtype=torch.int64), use_cache=True)
    assert cache_bytes(output.past_key_values) == 2 * 2 * 2 * 2 * 8 * 5 * 8
    assert cache_bytes(None) is None
    assert cache_bytes(object()) is None


def test_a_decoder_finds_the_caches_that_it_holds_without_memory_of_its_own(lm: LanguageModel) -> None:
    """Looking for them is part of a run whose peak is measured."""
    others = lm.reader()
    decoder = SpeculativeDecoder(lm, LanguageModel(llama(seed=1)))
    assert decoder.kv_caches() == []
    stream = decoder.stream([1, 2, 3], max_new_tokens=9)
    next(stream)
    found = decoder.kv_caches()
    assert len(found) == 2
    assert others.cache not in found
    tracemalloc.start()
    decoder.kv_caches()
    assert tracemalloc.get_traced_memory()[1] < MEGABYTE / 4
    tracemalloc.stop()
    stream.close()
    assert len(decoder.kv_caches()) == 1  # the drafter keeps its cache until it is opened again
