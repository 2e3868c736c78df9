"""A draft-lm as a model of its own: with the target's embedding, norm and output head written beside its layers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.common.errors import InputError, LoadError, UnsupportedError, shown
from paceline.common.json_text import read_json
from paceline.common.limits import LARGEST
from paceline.drafters.heads.head_modules import DraftHead
from paceline.drafters.models.draft_lm import SavedLayers
from paceline.models import load
from paceline.models.loading import hub
from paceline.models.loading.quiet import quiet
from paceline.models.loading.weight_check import Table, bounded, check_link, header_of, reading

# ---- A folder with a head that somebody else trained: its config, and its tensors, each of which must be understood

H = TypeVar("H", bound=DraftHead)

OURS = "paceline"  # under this name our exports keep what they know of the target
_WEIGHTS = ("model.safetensors", "model-*.safetensors", "medusa_lm_head.safetensors")
_MOST_CONFIG = 1 << 22  # bytes
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def read_config(folder: Path) -> dict[str, Any] | None:
    """What config.json says; None where there is none."""
    check_link(folder / "config.json")
    try:
        config = read_json(folder / "config.json", _MOST_CONFIG)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise LoadError(f"'{folder / 'config.json'}' cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise LoadError(f"'{folder / 'config.json'}' holds no JSON object, so it describes no model.")
    return config


def weight_files(folder: Path) -> list[Path]:
    return [path for pattern in _WEIGHTS for path in sorted(folder.glob(pattern))]


def weight_names(folder: Path) -> set[str]:
    """The names of all tensors; the tensors themselves are not read."""
    found: set[str] = set()
    for path in weight_files(folder):
        found.update(header_of(path))
    return found


class Checkpoint:
    """The config and the tensors of a head. What is taken is understood; `finish` refuses a head with anything left."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self.config: dict[str, Any] = read_config(folder) or {}
        self._tensors: dict[str, Tensor] = {}
        files = weight_files(folder)
        if not files:
            raise LoadError(f"The folder '{folder}' {hub.weights_problem(folder) or 'holds no weights'}.")
        for path in files:
            header_of(path)
            with reading("The weights", path):
                self._tensors.update(load_file(path))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._tensors))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def rename(self, old: str, new: str) -> None:
        """Another beginning of names, for whoever has it."""
        self._tensors = {
            new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in self._tensors.items()
        }

    def take(self, name: str) -> Tensor:
        """A tensor of numbers; not to be found again."""
        if name not in self._tensors:
            raise LoadError(f"The {self.kind} head in '{self.folder}' lacks the tensor '{name}'.")
        found = self._tensors.pop(name)
        if found.is_floating_point() and found.dtype not in _DTYPES:
            raise self.refusal(f"weights in {str(found.dtype).removeprefix('torch.')}")
        return found

    def drop(self, name: str) -> None:
        """A tensor that says nothing new."""
        self._tensors.pop(name, None)

    def number(self, *path: str, default: Any = None) -> Any:
        """A number of the config, under the first of several names that is there."""
        for name in path:
            value = self.config.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                if not abs(value) <= LARGEST:  # NaN is not, either
                    raise LoadError(f"'{name}' in the config.json of '{self.folder}' is {shown(value)}; get it again.")
                return value
        if default is None:
            raise LoadError(f"config.json of the {self.kind} head in '{self.folder}' needs a number '{path[0]}'.")
        return default

    def target(self, name: Any) -> dict[str, Any]:
        """What the files say of the target: its whole fingerprint in what was exported here, else at most its name."""
        own = self.config.get(OURS)
        if isinstance(own, dict) and isinstance(own.get("target"), dict):
            return dict(own["target"])
        return {"name": name} if isinstance(name, str) else {}

    def refusal(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"The {self.kind} head in '{self.folder}' has {what}, which such heads cannot have here; use another."
        )

    def finish(
        self, Head: type[H], config: Mapping[str, Any], made_for: dict[str, Any], weights: dict[str, Tensor]
    ) -> H:
        """The head itself, on the CPU and in the dtype of its first weight."""
        if self._tensors:
            raise self.refusal(f"a tensor '{min(self._tensors)}'")
        dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
        whole = {n: t.to(dtype) if t.is_floating_point() else t for n, t in weights.items()}
        try:
            table = Table(len(whole), sum(tensor.numel() for tensor in whole.values()))
            with bounded(table, self.folder), torch.device("meta"):  # no need to think up numbers that are replaced
                head = Head(Head.Config(**config), made_for)
            head.load_state_dict(whole, assign=True)
        except (ArithmeticError, AttributeError, InputError, LookupError, RuntimeError, TypeError) as error:
            said = " ".join(str(error).split())
            raise LoadError(f"The {self.kind} head in '{self.folder}' does not fit its own config: {said}") from error
        return head


# ---- A draft-lm as a model of its own: with the target's embedding, norm and output head written beside its layers

WHOLE = "hf"


def export_layers(head: str | os.PathLike[str], target: Any, folder: str | os.PathLike[str]) -> None:
    """Into a folder as transformers writes it: for assisted generation, vLLM, llama.cpp's converter."""
    saved = SavedLayers.load(head)
    lm = load(target, dtype="auto", device="cpu") if isinstance(target, (str, os.PathLike)) else load(target)
    model = saved.fitted(lm).to(lm.dtype).model(lm)
    place = Path(folder)
    with quiet():
        model.save_pretrained(place)
        if lm.tokenizer is not None:
            lm.tokenizer.save_pretrained(place)
