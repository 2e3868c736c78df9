"""Trained weights in a folder, a file or a hub repository: which drafter they belong to, and the heads in them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open

from paceline.common.errors import LoadError, UnsupportedError
from paceline.core.contracts import DRAFTERS
from paceline.drafters.heads.eagle import EagleHead
from paceline.drafters.heads.formats import eagle_checkpoints
from paceline.drafters.heads.formats.checkpoint import read_config, weight_names
from paceline.drafters.heads.formats.medusa_keys import read_medusa
from paceline.drafters.heads.head_modules import DraftHead
from paceline.drafters.heads.medusa import MedusaHead
from paceline.drafters.heads.prophet import ProphetHead
from paceline.models.loading import hub
from paceline.models.loading.catalogue import find_entry
from paceline.models.loading.weight_check import place_of

H = TypeVar("H", bound=DraftHead)

_TRIGRAM = "paceline-trigram"  # how the format of trigram models begins
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

# kind of head -> the drafter that uses it, and the function that reads it
_HEADS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "eagle": ("eagle", EagleHead.load),
    "eagle-1": ("eagle", eagle_checkpoints.FirstEagleHead.load),
    "medusa": ("medusa", MedusaHead.load),
    "prophet": ("prophet", ProphetHead.load),
    "EAGLE-3, as published": ("eagle", eagle_checkpoints.read_eagle3),
    "EAGLE-3 in the speculators format": ("eagle", eagle_checkpoints.read_eagle3_speculators),
    "EAGLE-1, as published": ("eagle", eagle_checkpoints.read_eagle1),
    "EAGLE-1 in the speculators format": ("eagle", eagle_checkpoints.read_eagle1_speculators),
    "Medusa, as published or served": ("medusa", read_medusa),
}
_SPECULATORS = {"eagle3": "EAGLE-3 in the speculators format", "eagle": "EAGLE-1 in the speculators format"}


def drafter_of_folder(where: str | os.PathLike[str]) -> tuple[str, Path] | None:
    """The drafter that a folder (or the file of a trigram model) is made for, and where its weights are.

    None if it holds something else, such as a language model. Reads a few file headers and downloads nothing.
    """
    path = place_of(where)
    if find_entry(os.fspath(where)) is not None or not path.exists():
        return None
    table = _trigram(path)
    if table is not None:
        return "trigram", table
    kind = _kind_of(path)
    if kind is None or kind in _HEADS:
        return None if kind is None else (_HEADS[kind][0], path)
    if "head" not in (field.name for field in fields(DRAFTERS[kind].Options)):
        raise LoadError(f"'{path}' holds a head of kind '{kind}', but the drafter of this name takes none.")
    return kind, path


def is_head(folder: Path) -> bool:
    """Does this folder hold a head that `read_head` reads?"""
    return _kind_of(folder) in _HEADS


def read_head(where: str | os.PathLike[str], Head: type[H]) -> H:
    """The head in a folder or on the hub. `Head`: the class that is needed."""
    folder = fetch_head(where) or place_of(where)
    kind = _kind_of(folder)
    if kind not in _HEADS:
        if hasattr(Head, "kind"):
            return Head.load(folder)  # raises an error that says what is missing
        what = "no head" if kind is None else f"a head of kind '{kind}', and none"
        raise LoadError(f"'{folder}' holds {what} that is known here; give the folder of a trained head.")
    head = _HEADS[kind][1](folder)
    if not isinstance(head, Head):
        raise LoadError(
            f"'{where}' holds a head of kind '{head.kind}', not '{Head.kind}'; give the folder of a {Head.kind} head."
        )
    return head


def fetch_head(where: str | os.PathLike[str]) -> Path | None:
    """Download the head of a hub id. None if `where` is no hub id."""
    repository = os.fspath(where)
    if place_of(repository).exists() or find_entry(repository) is not None or not _HUB_ID.fullmatch(repository):
        return None
    try:
        return hub.fetch(repository)
    except hub.HubError as error:
        raise LoadError(
            f"'{repository}' is no folder here and could not be fetched: {error}; check the name and the connection, "
            "or pass a folder."
        ) from error


def _kind_of(folder: Path) -> str | None:
    """The kind of the head in a folder, from its config and its tensor names; None if it holds no head.

    Paceline's own kinds have the names of their drafters. Other packages may add some.
    """
    config = read_config(folder) if folder.is_dir() else None
    if config is None:
        return None
    if "kind" in config and "target" in config:
        return str(config["kind"])
    if "speculators_model_type" in config:
        kind = config["speculators_model_type"]
        if kind not in _SPECULATORS:
            raise UnsupportedError(
                f"'{folder}' holds a speculator of type '{kind}', and only {' and '.join(_SPECULATORS)} are known here."
            )
        return _SPECULATORS[kind]
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return "Medusa, as published or served"
    names = weight_names(folder)
    if {"fc.weight", "model.fc.weight"} & names:
        third = any("midlayer." in name or name.endswith(("d2t", "layers.0.hidden_norm.weight")) for name in names)
        return "EAGLE-3, as published" if third else "EAGLE-1, as published"
    return None


def _trigram(path: Path) -> Path | None:
    """The file of a trigram model: this one, or the only one in a folder."""
    if path.is_dir():
        inside = sorted(path.glob("*.safetensors"))
        return _trigram(inside[0]) if len(inside) == 1 else None
    try:
        with safe_open(path, "pt") as file:
            return path if (file.metadata() or {}).get("format", "").startswith(_TRIGRAM) else None
    except (OSError, SafetensorError):
        return None
