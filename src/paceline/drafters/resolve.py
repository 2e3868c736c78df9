"""Make a drafter from a name, a mapping, a folder, a hub id or a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from paceline.common.errors import InputError, LoadError, UnknownNameError, UnsupportedError, shown
from paceline.common.names import HUB_ID
from paceline.common.options import convert_options
from paceline.common.registry import build_options
from paceline.common.text_formats import parse_json
from paceline.core.contracts import DRAFTERS, Drafter
from paceline.core.protocols import HoldsDrafters, replay_needs_of
from paceline.drafters.heads import foreign_heads
from paceline.drafters.heads.base import DraftHead
from paceline.drafters.heads.eagle import EagleHead
from paceline.drafters.heads.foreign_heads import read_config, weight_names
from paceline.drafters.heads.medusa import MedusaHead
from paceline.drafters.heads.prophet import ProphetHead
from paceline.drafters.shipped import weights_of
from paceline.models import catalogue_names, is_model, load
from paceline.models.language_model import LanguageModel
from paceline.models.loading import hub
from paceline.models.loading.catalogue import find_entry
from paceline.models.loading.weight_check import place_of


class ResolvedDraft(NamedTuple):
    """The registered name of a drafter and all its options.

    `source` is the model or the trained weights that were given instead of a registered name, else None. The options
    contain it, too.
    """

    name: str
    options: dict[str, Any]
    source: Any = None


def resolve_draft(
    spec: Any,
    options: Mapping[str, Any] | None = None,
    *,
    text_prefix: str | None = None,
    fetch: bool = False,
) -> ResolvedDraft:
    """Return the drafter that a specification names. This reads some file headers, and loads no weights.

    spec: a registered name, (name, options), {"name": ..., options} or this mapping as JSON, a model or the name of a
        model, or a folder with a trained head. None is plain decoding.
    options: more options. They have priority over options in `spec`.
    text_prefix: convert options given as text to the types of their fields. Messages show it before an option's name.
    fetch: download a hub id to find out whether it holds a trained head. Otherwise a hub id is a model.
    """
    if options is not None and not isinstance(options, Mapping):
        raise InputError(f"options of a drafter must be a mapping of names to values, got {shown(options)}.")
    draft, inside = _split_spec(spec)
    given = {**inside, **(options or {})}
    weights: dict[str, Any] = {}
    if isinstance(draft, str) and draft in DRAFTERS:
        name, source = draft, None
    elif (trained := _trained(draft, fetch)) is not None:
        name, source = trained
        weights = weights_of(name, source)
    elif isinstance(draft, str) and not is_model(draft):
        raise UnknownNameError("drafter or model", draft, [*DRAFTERS, *catalogue_names()])
    else:
        name, source = "draft-model", draft
        weights = {"model": draft}
    if text_prefix is not None:
        texts = {option: value for option, value in given.items() if isinstance(value, str)}
        given |= convert_options(texts, DRAFTERS[name].Options, "drafter", name, text_prefix)
    return ResolvedDraft(name, {**given, **weights}, source)


def make_drafter(
    spec: Any, options: Mapping[str, Any] | None = None, device: Any = None, runner: str | None = None
) -> Drafter:
    """Return the drafter that `spec` names (see `resolve_draft`), or `spec` if it is a Drafter.

    A model that must be loaded is put on `device` and runs with `runner`.
    """
    if isinstance(spec, Drafter):
        if options:
            raise InputError(f"options {sorted(options)} are for a drafter given by name, but this one is an object.")
        return spec
    name, given, _ = resolve_draft(spec, options)
    model = given.get("model")
    if isinstance(model, (str, os.PathLike)):
        given["model"] = load(model, device=device, runner=runner)
    elif model is not None:
        given["model"] = load(model)
    cls = DRAFTERS[name]
    built = build_options(cls.Options, given, f"drafter '{name}'")
    return cls(built, device) if issubclass(cls, HoldsDrafters) else cls(built)  # type: ignore[call-arg]


def load_drafter(where: str | os.PathLike[str], target: Any = None, **options: Any) -> Drafter:
    """Return the drafter in a folder or a hub repository, ready for `SpeculativeDecoder(target, drafter)`.

    The files decide which drafter it is: a head trained with Paceline, a head in another format (Medusa, EAGLE-1,
    EAGLE-3, `speculators`), a trigram model, or a draft model. If no folder has the given name, it can be the name of a
    drafter: "eagle" uses the shipped head for its target.

    target: the target model. The drafter is checked against it now, and an equal embedding is shared with it.
    options: options of the drafter, such as tree="levels".
    """
    if not isinstance(where, (str, os.PathLike)):
        raise InputError(f"A trained drafter is in a folder, a hub repository or the catalogue, got {shown(where)}.")
    lm = None if target is None else load(target)
    is_file = find_entry(os.fspath(where)) is None and place_of(where).exists()
    name, given, source = resolve_draft(Path(where) if is_file else where, options, fetch=True)
    if isinstance(source, Path) and _kind_of(source) in _HEADS:
        given["head"] = _sharing(read_head(source, DraftHead), lm)
    drafter = make_drafter(name, given, device=None if lm is None else lm.device)
    if lm is not None:
        drafter.check(lm)
    return drafter


def replay_needs(spec: Any, options: Mapping[str, Any] | None = None) -> str | None:
    """Return `Replayable.replay_needs` of the drafter that `spec` names. This loads nothing."""
    if isinstance(spec, Drafter):
        return replay_needs_of(type(spec), getattr(spec, "options", None))
    name, given, _ = resolve_draft(spec, options)
    return replay_needs_of(DRAFTERS[name], build_options(DRAFTERS[name].Options, given, f"drafter '{name}'"))


def _split_spec(spec: Any) -> tuple[Any, dict[str, Any]]:
    """Return the part of `spec` that names the drafter, and the options in `spec`."""
    if spec is None:
        return "none", {}
    if isinstance(spec, str) and spec.lstrip().startswith("{"):
        try:
            spec = parse_json(spec)
        except ValueError as error:
            raise InputError(f"A drafter given as JSON must be valid JSON: {error}.") from None
    if isinstance(spec, (tuple, list)) and len(spec) == 2 and isinstance(spec[1], Mapping):
        return spec[0], dict(spec[1])
    if not isinstance(spec, Mapping):
        return spec, {}
    options = dict(spec)
    if not isinstance(options.get("name"), str):
        raise InputError(f"A drafter given as a mapping needs a name, such as {{'name': 'suffix'}}, got {shown(spec)}.")
    return options.pop("name"), options


def _trained(draft: Any, fetch: bool) -> tuple[str, Path] | None:
    """Return the drafter of a folder, file or hub repository with trained weights, and their path; None if none."""
    if not isinstance(draft, (str, os.PathLike)):
        return None
    trained = drafter_of_folder(draft)
    if trained is None and fetch:
        folder = fetch_head(draft)
        trained = None if folder is None else drafter_of_folder(folder)
    return trained


def _sharing(head: Any, target: LanguageModel | None) -> Any:
    """Return the head. If it is an EAGLE head whose embedding equals the target's, it uses that of the target."""
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


# ---- Trained weights in a folder, a file or a hub repository: find their drafter, and read their heads

H = TypeVar("H", bound=DraftHead)

_TRIGRAM = "paceline-trigram"  # the format of a trigram model begins with this

# kind of head -> the drafter that uses it, and the function that reads it
_HEADS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "eagle": ("eagle", EagleHead.load),
    "eagle-1": ("eagle", foreign_heads.FirstEagleHead.load),
    "medusa": ("medusa", MedusaHead.load),
    "prophet": ("prophet", ProphetHead.load),
    "EAGLE-3, as published": ("eagle", foreign_heads.read_eagle3),
    "EAGLE-3 in the speculators format": ("eagle", foreign_heads.read_eagle3_speculators),
    "EAGLE-1, as published": ("eagle", foreign_heads.read_eagle1),
    "EAGLE-1 in the speculators format": ("eagle", foreign_heads.read_eagle1_speculators),
    "Medusa, as published or served": ("medusa", foreign_heads.read_medusa),
}
_SPECULATORS = {"eagle3": "EAGLE-3 in the speculators format", "eagle": "EAGLE-1 in the speculators format"}


def drafter_of_folder(where: str | os.PathLike[str]) -> tuple[str, Path] | None:
    """Return the name of the drafter for a folder (or for the file of a trigram model), and the path of its weights.

    None: it holds something else, for example a language model. This only reads some file headers.
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
        raise LoadError(f"'{path}' holds a head of kind '{kind}', but the drafter of this name takes no head.")
    return kind, path


def read_head(where: str | os.PathLike[str], Head: type[H]) -> H:
    """Return the head in a folder or on the hub. `Head`: the class that it must have."""
    folder = fetch_head(where) or place_of(where)
    kind = _kind_of(folder)
    if kind not in _HEADS:
        if hasattr(Head, "kind"):
            return Head.load(folder)  # raises an error that names what is missing
        what = "no head" if kind is None else f"a head of the unknown kind '{kind}'"
        raise LoadError(f"'{folder}' holds {what}; give the folder of a trained head.")
    head = _HEADS[kind][1](folder)
    if not isinstance(head, Head):
        raise LoadError(
            f"'{where}' holds a head of kind '{head.kind}', not '{Head.kind}'; give the folder of a {Head.kind} head."
        )
    return head


def fetch_head(where: str | os.PathLike[str]) -> Path | None:
    """Download the head of a hub id, and return its folder. None: `where` is not a hub id."""
    repository = os.fspath(where)
    if place_of(repository).exists() or find_entry(repository) is not None or not HUB_ID.fullmatch(repository):
        return None
    return hub.fetch_or_refuse(repository)


def _kind_of(folder: Path) -> str | None:
    """Return the kind of the head in a folder, from its config and its tensor names. None: it holds no head.

    Paceline's kinds have the names of their drafters. Other packages can add kinds.
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
                f"'{folder}' holds a speculator of type '{kind}'; only {' and '.join(_SPECULATORS)} are supported."
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
    """Return the file of a trigram model: this path, or the only safetensors file of a folder. None: it has none."""
    if path.is_dir():
        inside = sorted(path.glob("*.safetensors"))
        return _trigram(inside[0]) if len(inside) == 1 else None
    try:
        with safe_open(path, "pt") as file:
            return path if (file.metadata() or {}).get("format", "").startswith(_TRIGRAM) else None
    except (OSError, SafetensorError):
        return None
