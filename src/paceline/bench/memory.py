"""Bytes: at the peak of a run, of keys and values, of weights, and layer by layer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import UnsupportedError
from paceline.core.scratch_rows import ScratchRows
from paceline.models.language_model import LanguageModel
from paceline.models.notebook import Notebook
from paceline.models.runners.device import finish
from paceline.models.runners.memory import peak_while as peak_while  # for whoever weighs runs
from paceline.models.shells import layers_of
from paceline.models.slot_cache import SlotCache


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Of the memory behind them; what several share counts once."""
    stores = {}
    for tensor in tensors:
        store = tensor.untyped_storage()
        stores[store.data_ptr()] = store.nbytes()
    return sum(stores.values())


def _weights(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def cache_bytes(cache: Any) -> int | None:
    """Keys and values of one of our stores, or of one of transformers'; None where they cannot be found."""
    if cache is None:
        return None
    if isinstance(cache, SlotCache):
        return tensor_bytes([*cache.keys, *cache.values])
    found: list[Tensor] = []
    for layer in getattr(cache, "layers", ()):
        found += [held for held in vars(layer).values() if isinstance(held, Tensor)]
    return tensor_bytes(found) if found else None


# ---- layer by layer


@dataclass(frozen=True)
class LayerBytes:
    """One layer, or what stands before and after them: bytes of its weights, and of keys and values per token."""

    name: str
    parameters: int
    per_token: int
    dtype: str
    seconds: float | None = None  # of a pass over one token

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def layer_table(lm: LanguageModel, clock: Callable[[], float] | None = None) -> list[LayerBytes]:
    """Every layer, and a last line for everything else (embeddings, output head, norms). With a clock
    (time.perf_counter) also the seconds of each in a pass over one token."""
    layers = layers_of(lm)
    cache = _cache_of_one_token(lm)
    seconds: list[float | None] = [None] * len(layers) if clock is None else [*layer_seconds(lm, clock)]
    table, inside = [], []
    for index, (layer, taken) in enumerate(zip(layers, seconds, strict=True)):
        weights = _weights(layer)
        inside += weights
        kept = [store[index] for store in (cache.keys, cache.values) if index < len(store)]
        per_token = sum(each.shape[1] * each.shape[3] * each.element_size() for each in kept)
        table.append(LayerBytes(f"layer {index}", tensor_bytes(weights), per_token, _dtype(weights), taken))
    known = {id(weight) for weight in inside}
    rest = [weight for weight in _weights(lm.model) if id(weight) not in known]
    return [*table, LayerBytes("embeddings, head, norms", tensor_bytes(rest), 0, _dtype(rest))]


def _dtype(weights: list[Tensor]) -> str:
    """The types of the weights, the one with the most bytes first."""
    sizes: dict[str, int] = {}
    for weight in weights:
        name = str(weight.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + weight.numel() * weight.element_size()
    return ", ".join(sorted(sizes, key=lambda name: -sizes[name]))


@torch.inference_mode()
def _cache_of_one_token(lm: LanguageModel) -> SlotCache:
    """What the model keeps of a text is seen where it has read one."""
    reader = lm.reader()
    if not isinstance(getattr(reader, "cache", None), SlotCache):
        raise UnsupportedError(f"{lm.name} is made of several models, so it has no table of layers.")
    book = Notebook(reader, ScratchRows(lm.device))
    book.admit([[0]])
    book.extend()
    return reader.cache


@torch.inference_mode()
def layer_seconds(lm: LanguageModel, clock: Callable[[], float] = time.perf_counter, passes: int = 5) -> list[float]:
    """Median seconds of each layer in a pass over one token, by hooks that are gone afterwards. Waiting for a GPU at
    every layer makes these seconds comparable with each other, and not with a pass that is not looked at."""
    layers = layers_of(lm)
    started = [0.0] * len(layers)
    taken: list[list[float]] = [[] for _ in layers]

    def enter(index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            finish(lm.device)
            started[index] = clock()

        return hook

    def leave(index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            finish(lm.device)
            taken[index].append(clock() - started[index])

        return hook

    hooks = [layer.register_forward_pre_hook(enter(i)) for i, layer in enumerate(layers)]
    hooks += [layer.register_forward_hook(leave(i)) for i, layer in enumerate(layers)]
    try:
        for _ in range(passes + 1):  # the first is not counted
            _cache_of_one_token(lm)
    finally:
        for hook in hooks:
            hook.remove()
    return [statistics.median(times[1:]) for times in taken]
