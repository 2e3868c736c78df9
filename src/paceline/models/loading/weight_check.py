"""Checks of weight files before a model is built: a wrong number in a config must not allocate memory.

The headers of the files say how many tensors and numbers there are. A config that describes a much larger model is
refused while the model is built, on torch's meta device, before anything is allocated.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from paceline.common.errors import InputError, LoadError, PacelineError, in_one_line, shown
from paceline.common.limits import LONGEST
from paceline.common.text_formats import parse_json, read_json

M = TypeVar("M", bound=nn.Module)

INDEX = "model.safetensors.index.json"
_CONFIG_BYTES = 1 << 22
_INDEX_BYTES = 1 << 26
_HEADER_BYTES = 100_000_000  # the most that safetensors itself reads
_BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
         "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
         "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64}  # fmt: skip
# the names of the number of layers in configs
_LAYERS = frozenset(["num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "attention_types",
                     "decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers"])  # fmt: skip
_FEW_LAYERS = 1024  # more take seconds to build
_COPIES = 2  # weights that a model may have per number in a file, because tied weights are stored once
_PARTS = 4  # tensors of a model per tensor in a file: some files join several
_PACKED = 16  # weights of few bits per number in a file
_LONGEST_NAME = 255  # the longest that common file systems take
_SLACK = 1 << 20  # weights of a model that need not be in a file
_BUFFERS = 1 << 24  # tables that a model computes, such as masks


@dataclass(frozen=True)
class Table:
    """The number of tensors in weight files, and of numbers in all of them."""

    tensors: int
    numbers: int


@contextmanager
def reading(what: str, path: object, remedy: str = "") -> Iterator[None]:
    """Turn any error inside, while a file is read, into a LoadError of one sentence."""
    try:
        yield
    except PacelineError:
        raise
    except (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError,
            SafetensorError) as error:  # fmt: skip
        problem = error.strerror if isinstance(error, OSError) else None
        place = f"'{path}'" if len(str(path)) <= 2 * _LONGEST_NAME else shown(str(path))
        raise LoadError(f"{what} {place} cannot be read: {problem or in_one_line(error)}{remedy}.") from error


# ---- names of files


def place_of(where: str | os.PathLike[str]) -> Path:
    """Return the path that a user names, with ~ as the home folder. Refuse a name that no file can have."""
    text = os.path.expanduser(os.fspath(where))
    try:
        longest = max(map(len, os.fsencode(text).split(os.sep.encode())))
    except UnicodeEncodeError:
        longest = LONGEST
    if "\0" in text or longest > _LONGEST_NAME or len(text) > LONGEST:
        raise InputError(f"{shown(text)} can be the name of no model, file or folder; check it.")
    return Path(text)


def shards_of(folder: Path) -> list[str]:
    """Return the files that the index in a folder names. Raise ValueError with the end of a sentence."""
    found = read_json(folder / INDEX, _INDEX_BYTES)
    shards = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise ValueError("it has no 'weight_map' that maps tensors to files")
    return sorted(set(map(_file_name, shards.values())))


def _file_name(name: Any) -> str:
    """Return the name of a file beside the index: an index must not name other files of this machine."""
    if not isinstance(name, str) or not name.endswith(".safetensors") or len(name) > _LONGEST_NAME:
        raise ValueError(f"it names {shown(name)}, which is no .safetensors file")
    if Path(name).name != name or "\\" in name or "\0" in name:
        raise ValueError(f"it names {shown(name)}, which is outside the folder")
    return name


def link_problem(folder: Path, name: str) -> str | None:
    """Return why a link in a folder is not followed, as the end of a sentence. A link may lead to a file of the same
    kind, by its ending; those of the hub's cache lead to its blobs."""
    path = folder / name
    if not path.is_symlink():
        return None
    place, inside = path.resolve(), folder.resolve()
    blobs = inside.parent.parent / "blobs" if inside.parent.name == "snapshots" else inside
    if place.suffix == path.suffix or place.is_relative_to(inside) or place.is_relative_to(blobs):
        return None
    return f"has '{name}' as a link to '{place}', which is no {path.suffix} file; copy the file into the folder"


def check_link(path: Path) -> None:
    problem = link_problem(path.parent, path.name)
    if problem is not None:
        raise LoadError(f"The folder '{path.parent}' {problem}.")


# ---- headers


def header_of(path: Path) -> dict[str, Any]:
    """Return the tensors in the header of a safetensors file, checked against its length."""
    check_link(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _HEADER_BYTES):
                raise ValueError(f"its header should have {length:,} bytes and the file has {size:,}")
            found = parse_json(file.read(length))
        if not isinstance(found, dict):
            raise ValueError("its header is no JSON object")
        found.pop("__metadata__", None)
        _check_extent(found, size - 8 - length)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"'{path}' is not a usable safetensors file: {error}; get it again.") from None
    except OSError as error:
        raise LoadError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    return found


def _check_extent(tensors: Mapping[str, Any], size: int) -> None:
    """Refuse a tensor that is outside the file, whose byte count does not match its shape, or overlaps another one."""
    places = []
    for name, about in tensors.items():
        try:
            bits, shape, (start, stop) = _BITS[about["dtype"]], about["shape"], about["data_offsets"]
            whole = all(type(value) is int and value >= 0 for value in (*shape, start, stop))
        except (KeyError, TypeError, ValueError):
            whole = False
        if not whole:
            raise ValueError(f"its tensor {shown(name)} is described as {shown(about)}")
        if (stop - start) * 8 != prod(shape) * bits or stop > size:
            raise ValueError(f"its tensor {shown(name)} does not fit the bytes {start:,} to {stop:,} of {size:,}")
        places.append((start, stop))
    places.sort()
    if any(start < before for (_, before), (start, _) in pairwise(places)):
        raise ValueError("two of its tensors overlap")


def table_of(paths: list[Path]) -> Table:
    """Return the numbers of tensors and weights of all files together."""
    headers = [header_of(path) for path in paths]
    shapes = [about["shape"] for header in headers for about in header.values()]
    return Table(len(shapes), sum(prod(shape) for shape in shapes))


def check_folder(folder: Path, name: str) -> Table:
    """Read config.json and the headers of the weights of a model's folder, and compare them."""
    single = folder / "model.safetensors"
    check_link(folder / "config.json")
    with reading("The config.json of", name):
        config = read_json(folder / "config.json", _CONFIG_BYTES)
    with reading("The index of the weights of", name):
        paths = [single] if single.is_file() else [folder / shard for shard in shards_of(folder)]
    table = table_of(paths)
    if not isinstance(config, dict):
        raise LoadError(f"The config.json of '{name}' is no JSON object; get it again.")
    kind = config.get("model_type", "")
    if not isinstance(kind, str):
        raise LoadError(f"model_type in the config.json of '{name}' must be a text, got {shown(kind)}; get it again.")
    _check_layers(config, table, name)
    if config.get("quantization_config"):
        return Table(table.tensors, _PACKED * table.numbers)
    return table


def _check_layers(config: Any, table: Table, name: str, key: str = "") -> None:
    """Refuse a wrong number of layers before config classes make lists with one entry per layer."""
    if isinstance(config, dict):
        for inner, value in config.items():
            _check_layers(value, table, name, str(inner))
    elif isinstance(config, list):
        for value in config:
            _check_layers(value, table, name, key)
    elif key in _LAYERS and isinstance(config, (int, float)) and not config <= max(_FEW_LAYERS, table.tensors):
        raise LoadError(
            f"The config.json of '{name}' says {key} = {shown(config)}, but its weights are {table.tensors:,} tensors; "
            "get it again."
        )


# ---- building


def built(make: Callable[[], M], tensors: Mapping[str, Tensor], name: object) -> M:
    """Return the module of `make`, if its weights have the shapes of `tensors`. It is made on the meta device first, so
    that a false size costs nothing."""
    table = Table(len(tensors), sum(tensor.numel() for tensor in tensors.values()))
    with bounded(table, name), torch.device("meta"):
        wanted = {key: tuple(weight.shape) for key, weight in make().state_dict().items()}
    given = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    for key in sorted(wanted.keys() | given.keys()):
        if wanted.get(key) != given.get(key):
            raise ValueError(f"'{key}' should have the shape {wanted.get(key)} and has {given.get(key)}")
    return make()


@contextmanager
def bounded(table: Table, name: object) -> Iterator[None]:
    """Refuse a model that is built inside, on the meta device, and is much larger than its weights."""
    mine = threading.get_ident()
    seen: set[tuple[int, str]] = set()
    numbers = tables = 0

    def check(too_many: bool) -> None:
        if too_many:
            raise LoadError(
                f"The config of '{name}' describes a larger model than its weights, which are {table.tensors:,} "
                f"tensors with {table.numbers:,} numbers; get both again."
            )

    def weight(module: Any, key: str, value: Tensor | None) -> None:
        nonlocal numbers
        if value is None or not value.is_meta or threading.get_ident() != mine or (id(module), key) in seen:
            return
        seen.add((id(module), key))
        numbers += value.numel()
        check(len(seen) > _PARTS * table.tensors + 64 or numbers > _COPIES * table.numbers + _SLACK)

    def buffer(module: Any, key: str, value: Tensor | None) -> None:
        nonlocal tables
        if value is not None and value.is_meta and threading.get_ident() == mine:
            tables += value.numel()
            check(tables > 64 * table.numbers + _BUFFERS)

    hooks = [register_module_parameter_registration_hook(weight), register_module_buffer_registration_hook(buffer)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
