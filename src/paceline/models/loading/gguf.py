"""Read a GGUF file: first its header, with every length checked, then its weights by transformers.

The header check comes first because the usual defect is an incomplete download, which transformers would notice only
after half a minute, with a traceback or with a wrong tensor.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as reader

from paceline.common.errors import LoadError, in_one_line, shown
from paceline.models.loading.disk_cache import Progress
from paceline.models.loading.gguf_tokenizer import TokenizerError, build_tokenizer
from paceline.models.loading.hub import quiet
from paceline.models.loading.weight_check import Table, bounded

CONVERTER_VERSION = 1
"""Part of every cache key. Raise it when the same file would be converted to another result."""
PROVENANCE = "paceline-provenance.json"

# How GGUF numbers its value types; 8 is a string and 9 an array.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4  # ggml has no tensor with more
_MOST_LISTED = 1 << 21  # values in arrays: a vocabulary of 262,144 tokens with its merges has 1.3 million
_MOST_NUMBERED = 1 << 16  # values of an array of numbers that is no longer than the vocabulary
_MOST_COUNT = 1 << 31
_DEFAULT_ALIGNMENT = 32
_F32, _F16 = 0, 1
# the endings of keys that are counts or sizes
_COUNTS = ("_count", "_length", "_count_kv", "vocab_size", "dimension_count", "_used_count", "sliding_window")


class _DamageError(Exception):
    """What is wrong with the bytes, as the middle of a sentence."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the header, with its shape in torch's order."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GGUFHeader:
    """The metadata and the tensor table of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])


class _Cursor:
    """Reads forward through the bytes and never past their end, whatever lengths the file claims."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.size = len(data)
        self.at = 0
        self.listed = 0  # values in arrays so far

    def skip(self, length: int) -> int:
        """Skip `length` bytes and return where they begin."""
        start = self.at
        if length > self.size - start:
            raise _DamageError(f"it ends in the middle of its header, at byte {self.size}")
        self.at = start + length
        return start

    def number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.skip(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        start = self.skip(int(self.number("Q")))
        try:
            return self.data[start : self.at].decode("utf-8")
        except UnicodeDecodeError:
            raise _DamageError(f"the text at byte {start} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise _DamageError(f"a value at byte {self.at} has the unknown type {kind}")
        element, count = int(self.number("I")), int(self.number("Q"))
        self.listed += count
        if self.listed > _MOST_LISTED:  # readers make an object of each
            raise _DamageError(f"its arrays hold more than {_MOST_LISTED:,} values")
        if element in _NUMBERS:
            code = _NUMBERS[element]
            start = self.skip(count * struct.calcsize("<" + code))
            return list(struct.unpack_from(f"<{count}{code}", self.data, start))
        if element == _ARRAY:
            raise _DamageError(f"an array of arrays stands at byte {self.at}")
        if 8 * count > self.size - self.at:  # every text takes at least its length
            raise _DamageError(f"an array at byte {self.at} claims {count} texts")
        return [self.value(element) for _ in range(count)]


def read_header(path: Path) -> GGUFHeader:
    """Return metadata and tensor table, after checking that the file is long enough for all that it announces."""
    try:
        size = path.stat().st_size
        if size < 24:
            raise _DamageError(f"it has only {size} bytes")
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, _Cursor(data))
    except _DamageError as damage:
        raise LoadError(f"'{path}' is not a usable GGUF file: {damage}; download it again.") from None
    except OSError as error:
        raise LoadError(f"'{path}' cannot be read: {error.strerror or error}.") from error


def _parse(path: Path, cursor: _Cursor) -> GGUFHeader:
    if cursor.data[cursor.skip(4) : cursor.at] != b"GGUF":
        raise _DamageError("it does not begin with 'GGUF'")
    version = cursor.number("I")
    if version not in (2, 3):
        raise _DamageError(f"its version is {version}, and only 2 and 3 can be read")
    tensor_count, value_count = int(cursor.number("Q")), int(cursor.number("Q"))
    if 12 * value_count + 24 * tensor_count > cursor.size:  # the least bytes of these entries
        raise _DamageError(f"it announces {value_count} values and {tensor_count} tensors in {cursor.size} bytes")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        name = cursor.text()
        if name in metadata:
            raise _DamageError(f"it has {shown(name)} twice")
        metadata[name] = cursor.value(int(cursor.number("I")))
    if not isinstance(metadata.get("general.architecture"), str):
        raise _DamageError("it does not name its architecture")
    if metadata.get("split.count", 1) not in (0, 1):
        raise LoadError(
            f"'{path}' is one of {metadata['split.count']} parts; merge them first (llama-gguf-split --merge)."
        )
    tensors = tuple(_tensor(cursor) for _ in range(tensor_count))
    _check_extent(cursor, metadata, tensors)
    _check_metadata(metadata, tensors)
    return GGUFHeader(path, metadata, tensors)


def _check_metadata(metadata: dict[str, Any], tensors: tuple[TensorInfo, ...]) -> None:
    """Compare the sizes that a model is built from with the tensor table."""
    architecture = metadata["general.architecture"]
    for name, value in metadata.items():
        if name.startswith(f"{architecture}.") and name.endswith(_COUNTS):
            counts = value if isinstance(value, list) else [value]
            if not all(type(count) is int and 0 <= count < _MOST_COUNT for count in counts):
                raise _DamageError(f"its {name} is {shown(value)}, which is no count")
    blocks = {tensor.name.split(".")[1] for tensor in tensors if tensor.name.startswith("blk.")}
    claimed = metadata.get(f"{architecture}.block_count", len(blocks))
    if claimed != len(blocks):
        raise _DamageError(f"it announces {shown(claimed)} blocks, and its tensors are of {len(blocks)}")
    tokens = metadata.get("tokenizer.ggml.tokens")
    most = max(_MOST_NUMBERED, len(tokens) if isinstance(tokens, list) else 0)
    for name, value in metadata.items():
        if isinstance(value, list) and len(value) > most and not isinstance(value[0], str):
            raise _DamageError(f"its {name} has {len(value):,} values, more than there are tokens")


def _tensor(cursor: _Cursor) -> TensorInfo:
    name, dimensions = cursor.text(), int(cursor.number("I"))
    if dimensions > _MOST_DIMENSIONS:
        raise _DamageError(f"tensor {shown(name)} has {dimensions} dimensions")
    shape = tuple(int(cursor.number("Q")) for _ in range(dimensions))
    kind, offset = int(cursor.number("I")), int(cursor.number("Q"))
    return TensorInfo(name, shape[::-1], kind, offset)


def _check_extent(cursor: _Cursor, metadata: dict[str, Any], tensors: tuple[TensorInfo, ...]) -> None:
    sizes = _block_sizes()
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise _DamageError(f"its alignment is {shown(alignment)}")
    start = -(-cursor.at // alignment) * alignment
    if not tensors:
        raise _DamageError("it holds no tensors")
    ends: list[tuple[int, int]] = []
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            raise _DamageError(f"it has the tensor {shown(tensor.name)} twice")
        names.add(tensor.name)
        if tensor.kind not in sizes:
            raise _DamageError(f"tensor {shown(tensor.name)} is stored in the unknown type {tensor.kind}")
        elements, width = sizes[tensor.kind]
        if not tensor.shape or 0 in tensor.shape or tensor.shape[-1] % elements:
            raise _DamageError(f"tensor {shown(tensor.name)} has the shape {shown(tensor.shape)}")
        begin = start + tensor.offset
        end = begin + prod(tensor.shape) // elements * width
        if end > cursor.size:
            raise _DamageError(f"it should have {end} bytes or more and has {cursor.size}, so it was cut short")
        ends.append((begin, end))
    ends.sort()  # tensors on the same bytes would let a small file fill any memory
    if any(begin < before for (_, before), (begin, _) in pairwise(ends)):
        raise _DamageError("two of its tensors overlap")


def _block_sizes() -> dict[int, tuple[int, int]]:
    """Return how many weights one block of each type holds, and in how many bytes."""
    try:
        from gguf import GGML_QUANT_SIZES
    except ImportError:  # `models` must import on a bare machine; only reading a GGUF needs the package
        raise LoadError("Reading a GGUF file needs the package 'gguf'; install it with: pip install gguf.") from None
    return {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}


def convert(header: GGUFHeader, folder: Path, *, need_tokenizer: bool, progress: Progress | None = None) -> None:
    """Write the file's model and tokenizer into `folder`, as safetensors and tokenizer.json.

    The tokenizer comes first, because it takes a second: if it cannot be built, no minute is spent on the weights.
    """
    problem: str | None = None
    try:
        tokenizer = build_tokenizer(header.metadata)
    except TokenizerError as reason:
        tokenizer, problem = None, str(reason)
        if need_tokenizer:
            raise LoadError(tokenizer_refused(header.path, problem)) from None
    with quiet():
        try:
            model = _read_model(header, progress)
            if progress is not None:
                progress(f"saving {header.path.name}", 0, None)
            model.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
        except LoadError:
            raise
        except Exception as error:  # transformers and gguf raise every kind of error for a file that they cannot read
            raise LoadError(f"'{header.path}' cannot be converted: {in_one_line(error)}.") from error
    provenance = {
        "source": header.path.name,
        "architecture": header.architecture,
        "converter": CONVERTER_VERSION,
        "tokenizer_problem": problem,
        "remarks": _remarks(header, model),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    (folder / PROVENANCE).write_text(json.dumps(provenance, indent=1), "utf-8")


def tokenizer_refused(name: object, problem: str) -> str:
    return f"No tokenizer can be built from '{name}' ({problem}); pass tokenizer= with a folder or hub id that has it."


def _read_model(header: GGUFHeader, progress: Progress | None) -> PreTrainedModel:
    """Read the model with transformers' tensor names and permutations, below `from_pretrained(gguf_file=...)`.

    That level needs no accelerate package, no second copy in memory, and leaves no `quantization_config` behind that
    would forbid saving.
    """
    if progress is not None:
        progress(f"reading {header.path.name}", 0, None)
    described = reader.load_gguf_checkpoint(str(header.path))["config"]
    described.pop("_model_name_or_path", None)
    config = AutoConfig.for_model(**described)
    ids = {role: header.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos", "padding", "eot")}
    config.bos_token_id, config.eos_token_id, config.pad_token_id = ids["bos"], ids["eos"], ids["padding"]
    table = Table(len(header.tensors), sum(prod(tensor.shape) for tensor in header.tensors))
    with bounded(table, header.path), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with _reported(f"converting {header.path.name}", progress):
        tensors = reader.load_gguf_checkpoint(
            str(header.path), return_tensors=True, model_to_load=model, torch_dtype=_stored_dtype(header)
        )["tensors"]
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise LoadError(
                f"'{header.path}' is damaged ('{name}' holds values that are not finite); download it again."
            )
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    absent = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if absent:
        raise LoadError(f"'{header.path}' lacks {len(absent)} weights of its model, the first of them '{absent[0]}'.")
    stops = [token for token in dict.fromkeys((ids["eos"], ids["eot"])) if token is not None]
    model.generation_config = GenerationConfig(
        bos_token_id=ids["bos"],
        eos_token_id=stops if len(stops) > 1 else ids["eos"],
        pad_token_id=ids["padding"] if ids["padding"] is not None else ids["eos"],
    )
    return model


def _stored_dtype(header: GGUFHeader) -> torch.dtype:
    """Return the dtype for the weights: that of plain floats; bfloat16 for blocks of 2 to 8 bits."""
    kinds = {tensor.kind for tensor in header.tensors if len(tensor.shape) > 1}
    if kinds <= {_F32}:
        return torch.float32
    return torch.float16 if kinds <= {_F32, _F16} else torch.bfloat16


def _remarks(header: GGUFHeader, model: PreTrainedModel) -> list[str]:
    """Return sentences about content that transformers' reader ignores although it changes the model."""
    scaling = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    stretched = scaling != "none" or any(tensor.name.startswith("rope_f") for tensor in header.tensors)
    kept = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type", "default") != "default"
    if stretched and not kept:
        return ["its stretched position encoding (RoPE scaling) is not read, so long texts come out differently"]
    return []


@contextmanager
def _reported(label: str, progress: Progress | None) -> Iterator[None]:
    """Report transformers' progress over tensors inside the context, by replacing its bar, its only interface."""

    def counted(tensors: Iterable[Any], **_bar: Any) -> Iterator[Any]:
        items = list(tensors)
        for done, item in enumerate(items):
            if progress is not None:
                progress(label, done, len(items))
            yield item
        if progress is not None:
            progress(label, len(items), len(items))

    original = reader.tqdm
    reader.tqdm = counted
    try:
        yield
    finally:
        reader.tqdm = original
