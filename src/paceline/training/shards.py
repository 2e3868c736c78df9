"""Texts as token ids, on disk: a folder of shards (safetensors) that grows whole shard by whole shard.

    manifest.json              what the texts are of: the target's fingerprint, and how they came about
    shard-00000.safetensors    tokens [N] of all its texts one after the other, starts [T+1], prompts [T]

A shard appears whole or not at all, so whoever is killed while writing goes on with the next one. A file `enough`
beside them says that no more are wanted, however many there were to be.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.core.errors import InputError, LoadError
from paceline.core.json_text import parse_json
from paceline.models.weight_check import reading

FORMAT = 1
ENOUGH = "enough"
WANTED = "tokens"  # in the manifest: how many tokens there are to be
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Text:
    """Token ids; the first `prompt` of them were given, the others were written by the target."""

    tokens: list[int]
    prompt: int = 0


def about_texts(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What the manifest of a folder says of its texts; nothing where there is none."""
    path = Path(folder) / _MANIFEST
    if not path.exists():
        return {}
    with reading("The manifest", path):
        found = parse_json(path.read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
    return found


class Shards:
    """A folder of texts. `about` must be the same whenever it is opened: texts of two targets never mix."""

    def __init__(self, folder: str | os.PathLike[str], about: Mapping[str, Any], wanted: int | None = None) -> None:
        """wanted: how many tokens there are to be; it is noted for those who share the texts."""
        self.folder = Path(folder)
        plain = json.loads(json.dumps({"format": FORMAT, **about}))
        path = self.folder / _MANIFEST
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._note({**plain, **({} if wanted is None else {WANTED: wanted})})
        found = about_texts(self.folder)
        for name, value in plain.items():
            if found.get(name) != value:
                raise InputError(
                    f"The texts in '{self.folder}' were made with {name} = {found.get(name)!r}, not {value!r}; "
                    "take another folder, or remove this one."
                )
        if wanted is not None and found.get(WANTED) != wanted:
            self._note({**found, WANTED: wanted})

    def _note(self, found: Mapping[str, Any]) -> None:
        write_whole(self.folder / _MANIFEST, (json.dumps(found, indent=2, sort_keys=True) + "\n").encode())

    def __len__(self) -> int:
        """How many shards there are; the next one gets this number."""
        count = 0
        while self._path(count).exists():
            count += 1
        return count

    @property
    def enough(self) -> bool:
        """Did somebody say that no more are wanted?"""
        return (self.folder / ENOUGH).exists()

    def _path(self, number: int) -> Path:
        return self.folder / f"shard-{number:05}.safetensors"

    def append(self, texts: Sequence[Text]) -> None:
        """One more shard."""
        starts = [0]
        for text in texts:
            starts.append(starts[-1] + len(text.tokens))
        tensors = {
            "tokens": torch.tensor([token for text in texts for token in text.tokens], dtype=torch.int32),
            "starts": torch.tensor(starts, dtype=torch.int64),
            "prompts": torch.tensor([text.prompt for text in texts], dtype=torch.int32),
        }
        number = len(self)
        beside = self._path(number).with_suffix(".part")
        try:
            save_file(tensors, beside)
            beside.replace(self._path(number))
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                beside.unlink()
            raise LoadError(f"The texts of shard {number} cannot be written to '{self.folder}': {error}.") from error

    def texts(self) -> Iterator[Text]:
        """All texts, in the order in which they were written."""
        for number in range(len(self)):
            with reading("The texts in", self._path(number)):
                with safe_open(self._path(number), "pt") as file:
                    tokens, starts, prompts = (file.get_tensor(name) for name in ("tokens", "starts", "prompts"))
                _check(tokens, starts, prompts)
            every, edges = tokens.tolist(), starts.tolist()
            for start, stop, prompt in zip(edges, edges[1:], prompts.tolist(), strict=False):
                yield Text(every[start:stop], prompt)


def _check(tokens: torch.Tensor, starts: torch.Tensor, prompts: torch.Tensor) -> None:
    """Texts lie one after the other, and a prompt is a part of its text. A ValueError says what is wrong."""
    for name, each in (("tokens", tokens), ("starts", starts), ("prompts", prompts)):
        if each.ndim != 1 or each.is_floating_point() or (each < 0).any():
            raise ValueError(f"its '{name}' are no list of whole numbers")
    lengths = starts.diff()
    if len(starts) != len(prompts) + 1 or starts[0] != 0 or starts[-1] != len(tokens) or (lengths < prompts).any():
        raise ValueError(f"its {len(starts)} edges do not fit its {len(tokens)} tokens and {len(prompts)} prompts")


def write_whole(path: Path, content: bytes) -> None:
    """A file that is there whole or not at all; whatever was there before stays if it cannot be written."""
    beside = path.with_name(f".{path.name}.part")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise LoadError(
            f"'{path}' cannot be written: {error.strerror or error}; what was there is untouched."
        ) from error
