"""Where the weights of a model come from, and the form in which they lie there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

if TYPE_CHECKING:
    from .gguf import GGUFHeader

PYPI, HUB, FOLDER, FILE = "PyPI", "the Hugging Face hub", "a folder", "a GGUF file"
_TORCH = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # as files name them


@dataclass(frozen=True)
class Weights:
    """form: the type of most numbers in the file, such as "Q4_1" or "bfloat16". source: where the file is from. A model
    that is given as an object has neither."""

    form: str = ""
    source: str = ""

    def __str__(self) -> str:
        return f"{self.form} from {self.source}" if self.form else self.source

    def read_as(self, dtype: torch.dtype) -> str:
        """The form, the source and the dtype in memory, in a few words."""
        name = str(dtype).removeprefix("torch.")
        if not str(self) or self.form == name:
            return str(self) or name
        expanded = self.form and self.form not in _TORCH.values()
        return f"{self}, {'expanded to' if expanded else 'as'} {name}"


UNKNOWN = Weights()
RANDOM = Weights(source="random numbers")


def in_folder(folder: Path, source: str) -> Weights:
    """Of a folder with safetensors: the form of the first file stands for all."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        return Weights(source=source)
    with safe_open(files[0], "pt") as file:
        parts = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
        return Weights(_most((part.get_dtype(), prod(part.get_shape())) for part in parts), source)


def in_gguf(header: GGUFHeader) -> Weights:
    from gguf import GGMLQuantizationType

    return Weights(_most((GGMLQuantizationType(each.kind).name, prod(each.shape)) for each in header.tensors), FILE)


def _most(parts: Iterable[tuple[str, int]]) -> str:
    """The type that most numbers have, by torch's name where torch has it."""
    counts: Counter[str] = Counter()
    for kind, numbers in parts:
        counts[kind] += numbers
    kind = counts.most_common(1)[0][0] if counts else ""
    return _TORCH.get(kind, kind)
