"""The trained drafters that come with Paceline: which of them fit a target.

catalogue/<model>/catalogue.json     {"best": ["eagle", ...]}: the kinds, the one to be tried first in front
catalogue/<model>/<kind>/            a folder as `paceline train` writes it
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from paceline.core.errors import InputError, UnsupportedError
from paceline.models.head_files import check_target
from paceline.models.language_model import LanguageModel

ROOT = Path(__file__).resolve().parents[1] / "catalogue"
_KNOWN: WeakKeyDictionary[Any, tuple[Path, dict[str, Path]]] = WeakKeyDictionary()


def shipped(target: LanguageModel) -> dict[str, Path]:
    """The folders of the drafters made for this very model, by kind, the best first; a few values of its weights are
    looked at, once per model."""
    model = getattr(target, "model", None)
    if model is None:
        return {}
    found = _KNOWN.get(model)
    if found is None or found[0] != ROOT:
        found = _KNOWN[model] = (ROOT, _fitting(target))
    return found[1]


def kinds_of(model: str) -> tuple[str, ...]:
    """What comes along for a model of the catalogue, by its name; nothing is loaded to find out."""
    index = ROOT / model / "catalogue.json"
    return tuple(json.loads(index.read_text("utf-8"))["best"]) if index.exists() else ()


def best_for(target: LanguageModel) -> tuple[str, dict[str, str]] | None:
    """The one to be tried first, as a name and options."""
    for kind, folder in shipped(target).items():
        return kind, weights_of(kind, folder)
    return None


def trained_for(target: LanguageModel, kind: str) -> Path:
    """The folder of one kind, or an error that says where to get one."""
    folder = shipped(target).get(kind)
    if folder is None:
        raise InputError(
            f"{kind} needs a trained head, and none comes with Paceline for {target.name}: give its folder "
            f"(--drafter.head FOLDER, options={{'head': folder}}), or make one with `paceline train --kind {kind}`."
        )
    return folder


def weights_of(kind: str, path: Path) -> dict[str, str]:
    """The option by which a drafter of this kind is told where its weights are: in a folder, or in a file of it."""
    if kind == "trigram":
        return {"file": str(path / "model.safetensors" if path.is_dir() else path)}
    return {"head": str(path)}


def _fitting(target: LanguageModel) -> dict[str, Path]:
    for index in sorted(ROOT.glob("*/catalogue.json")):
        kinds = json.loads(index.read_text("utf-8"))["best"]
        folders = {kind: index.parent / kind for kind in kinds}
        first = json.loads((folders[kinds[0]] / "config.json").read_text("utf-8"))
        try:
            check_target(kinds[0], first["target"], target)
        except UnsupportedError:
            continue
        return folders
    return {}
