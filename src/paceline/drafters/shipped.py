"""Find the trained drafters that Paceline ships for a target.

A drafter fits every target with the same architecture, sizes and vocabulary. Other weights only give a warning
(`heads.head_files`).

catalogue/<model>/catalogue.json     {"best": ["eagle", ...]}: the kinds, the best first
catalogue/<model>/<kind>/            a folder in the format of `paceline train`
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.common.errors import InputError
from paceline.drafters.heads.head_files import fits, other_weights
from paceline.models.language_model import LanguageModel
from paceline.models.loading.catalogue import RANDOM

ROOT = Path(__file__).resolve().parents[1] / "catalogue"


def shipped(target: LanguageModel) -> dict[str, Path]:
    """Return the folders of the drafters that fit this model, by kind, the best first. An entry for the same weights
    has priority. A model with random weights has no drafters, because its text cannot be learned."""
    if getattr(target, "model", None) is None or target.weights == RANDOM:
        return {}
    fitting = [entry for entry in _entries() if fits(entry[0], target)]
    if len(fitting) > 1:
        fitting.sort(key=lambda entry: other_weights(entry[0], target))
    return fitting[0][1] if fitting else {}


def kinds_of(model: str) -> tuple[str, ...]:
    """Return the kinds that are shipped for a model of the catalogue. This loads nothing."""
    index = ROOT / model / "catalogue.json"
    return tuple(json.loads(index.read_text("utf-8"))["best"]) if index.exists() else ()


def best_for(target: LanguageModel) -> tuple[str, dict[str, str]] | None:
    """Return the best shipped drafter for a target as (name, options), or None."""
    for kind, folder in shipped(target).items():
        return kind, weights_of(kind, folder)
    return None


def trained_for(target: LanguageModel, kind: str) -> Path:
    """Return the folder of the shipped drafter of one kind. Raise `InputError` if there is none."""
    folder = shipped(target).get(kind)
    if folder is None:
        raise InputError(
            f"{kind} needs a trained head, and Paceline ships none for {target.name}: give its folder "
            f"(--drafter.head FOLDER, options={{'head': folder}}), or make one with `paceline train --kind {kind}`."
        )
    return folder


def weights_of(kind: str, path: Path) -> dict[str, str]:
    """Return the option with the weights of this kind: a folder, or a file in it."""
    if kind == "trigram":
        return {"file": str(path / "model.safetensors" if path.is_dir() else path)}
    return {"head": str(path)}


def made_for(kind: str, folder: Path) -> dict[str, Any] | None:
    """Return the fingerprint of the target that a drafter was trained for, or None if the folder has none."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):  # a trigram table can be a single file
        return None
    ours = isinstance(config, dict) and config.get("kind") == kind and isinstance(config.get("target"), dict)
    return config["target"] if ours else None


def _entries() -> Iterator[tuple[dict[str, Any], dict[str, Path]]]:
    """Yield for each model of the catalogue its fingerprint, and the folders of its drafters by kind."""
    for index in sorted(ROOT.glob("*/catalogue.json")):
        folders = {kind: index.parent / kind for kind in json.loads(index.read_text("utf-8"))["best"]}
        first = next(iter(folders.values()))
        yield json.loads((first / "config.json").read_text("utf-8"))["target"], folders
