"""From a folder or a hub id to a drafter: what its files say decides which. `load_drafter` is the public door."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from paceline.common.errors import LoadError, UnsupportedError
from paceline.core.contracts import DRAFTERS, Drafter
from paceline.core.registry import build_options
from paceline.drafters.heads.eagle import EagleHead
from paceline.drafters.heads.formats import eagle1, eagle3
from paceline.drafters.heads.formats.head_folder import read_config, weight_names
from paceline.drafters.heads.formats.medusa_keys import read_medusa
from paceline.drafters.heads.head_modules import DraftHead
from paceline.drafters.heads.medusa import MedusaHead
from paceline.drafters.heads.prophet import ProphetHead
from paceline.models import load
from paceline.models.language_model import LanguageModel
from paceline.models.loading import hub
from paceline.models.loading.catalogue import find_entry
from paceline.models.loading.weight_check import place_of

H = TypeVar("H", bound=DraftHead)

_TRIGRAM = "paceline-trigram"  # how the format of trigram models begins
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

# what a folder holds -> the drafter that takes it, and how its head is read
_HEADS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "eagle": ("eagle", EagleHead.load),
    "eagle-1": ("eagle", eagle1.FirstEagleHead.load),
    "medusa": ("medusa", MedusaHead.load),
    "prophet": ("prophet", ProphetHead.load),
    "EAGLE-3, as published": ("eagle", eagle3.read_published),
    "EAGLE-3 in the speculators format": ("eagle", eagle3.read_speculators),
    "EAGLE-1, as published": ("eagle", eagle1.read_published),
    "EAGLE-1 in the speculators format": ("eagle", eagle1.read_speculators),
    "Medusa, as published or served": ("medusa", read_medusa),
}
_SPECULATORS = {"eagle3": "EAGLE-3 in the speculators format", "eagle": "EAGLE-1 in the speculators format"}


def load_drafter(where: str | os.PathLike[str], target: Any = None, **options: Any) -> Drafter:
    """The drafter that a folder or a hub id holds, ready for `SpeculativeDecoder(target, drafter)`: a head trained
    here, one of others (Medusa, EAGLE, EAGLE-3, the `speculators` format), a trigram model, or a draft model. Where
    there is no such folder, the name of a drafter is one too: "eagle" drafts with the head that comes with Paceline
    for its target.

    target: the model it will draft for; the drafter is checked against it now, and shares with it what is the same.
    options: of the drafter, such as tree="levels".
    """
    lm = None if target is None else load(target)
    held = holds(where)
    if held is None and _is_hub_id(where):
        held = holds(_fetched(os.fspath(where)))
    if held is None and isinstance(where, str) and where in DRAFTERS:
        return _by_name(where, options, lm)
    name, path = held or ("draft-model", Path(where))
    if name == "trigram":
        options["file"] = str(path)
    elif held is None:
        options["model"] = load(where, device=None if lm is None else lm.device)
    else:
        options["head"] = _sharing(_read(path), lm) if _held(path) in _HEADS else str(path)
    cls = DRAFTERS[name]
    drafter = cls(build_options(cls.Options, options, f"drafter '{name}'"))  # type: ignore[call-arg]
    if lm is not None:
        drafter.check(lm)
    return drafter


def _by_name(name: str, options: Mapping[str, Any], target: LanguageModel | None) -> Drafter:
    from paceline.drafters.resolve import make_drafter  # it uses this file

    drafter = make_drafter(name, options, None if target is None else target.device)
    if target is not None:
        drafter.check(target)
    return drafter


def read_head(where: str | os.PathLike[str], Head: type[H]) -> H:
    """The head of one kind in a folder or on the hub."""
    path = place_of(where)
    if not path.exists() and _is_hub_id(where):
        path = _fetched(os.fspath(where))
    if _held(path) not in _HEADS and hasattr(Head, "kind"):
        return Head.load(path)  # says what is missing
    head = _read(path)
    if not isinstance(head, Head):
        kind = Head.kind
        raise LoadError(
            f"'{where}' holds a head of kind '{head.kind}', not '{kind}'; give the folder of a {kind} head."
        )
    return head


def holds(where: str | os.PathLike[str]) -> tuple[str, Path] | None:
    """The drafter that a folder (or the file of a trigram model) is made for, and where its weights are; None where
    it is something else, such as a language model. Nothing but a few headers is read, and nothing is fetched."""
    path = place_of(where)
    if find_entry(os.fspath(where)) is not None or not path.exists():
        return None
    table = _trigram(path)
    if table is not None:
        return "trigram", table
    held = _held(path)
    if held is None or held in _HEADS:
        return None if held is None else (_HEADS[held][0], path)
    if "head" not in (field.name for field in fields(DRAFTERS[held].Options)):
        raise LoadError(f"'{path}' holds a head of kind '{held}', but the drafter of this name takes none.")
    return held, path


def _held(folder: Path) -> str | None:
    """What kind of head a folder holds, by its config and the names of its tensors. Our own kinds are called like
    their drafters, of which others may have added some."""
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


def _read(folder: Path) -> Any:
    held = _held(folder)
    if held not in _HEADS:
        what = "no head" if held is None else f"a head of kind '{held}', and none"
        raise LoadError(f"'{folder}' holds {what} that is known here; give the folder of a trained head.")
    return _HEADS[held][1](folder)


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


def _is_hub_id(where: str | os.PathLike[str]) -> bool:
    text = os.fspath(where)
    return not place_of(text).exists() and find_entry(text) is None and bool(_HUB_ID.fullmatch(text))


def _fetched(repository: str) -> Path:
    try:
        return hub.fetch(repository)
    except hub.HubError as error:
        raise LoadError(
            f"'{repository}' is no folder here and could not be fetched: {error}; check the name and the connection, "
            "or pass a folder."
        ) from error


def _sharing(head: Any, target: LanguageModel | None) -> Any:
    """An eagle head without the embedding that it brings, where that is the target's."""
    if target is None or not isinstance(head, EagleHead) or head.words is None:
        return head
    own = head.words.weight.detach()
    embedding = target.model.get_input_embeddings()
    if (embedding.num_embeddings, embedding.embedding_dim) != tuple(own.shape):
        return head
    with torch.no_grad():
        theirs = embedding(torch.arange(own.shape[0], device=target.device))
    if torch.equal(own.to(theirs.device, theirs.dtype), theirs):
        head.words, head.config = None, replace(head.config, own_embedding=False)
    return head
