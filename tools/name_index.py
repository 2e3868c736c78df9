"""Write the index of names (`common/names.json`) from the registries.

python tools/name_index.py
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from paceline.common.names import FILE


def build() -> dict[str, dict[str, list[str]]]:
    """kind -> name -> options, of Paceline itself."""
    from paceline.bench.bench_options import PRESETS
    from paceline.bench.peers.peer_names import _PEERS
    from paceline.core.contracts import DRAFTERS, RULES
    from paceline.drafters.heads.head_files import NUMBERS
    from paceline.models.loading.catalogue import CATALOGUE
    from paceline.models.runtime import KINDS, RUNNERS
    from paceline.models.synthetic import SHAPES
    from paceline.training.distillation import LOSSES
    from paceline.training.recipes.base import RECIPES
    from paceline.training.train_options import PAIR, CountingOptions, PairSizes

    kinds = {**_ours(RECIPES), PAIR: _fields(PairSizes), "trigram": _fields(CountingOptions)}
    found = {
        "drafter": _ours(DRAFTERS),
        "rule": _ours(RULES),
        "model": {entry.name: list(entry.aliases) for entry in CATALOGUE},
        "runner": _bare(RUNNERS),
        "quantize": _bare(KINDS),
        "dtype": _bare(["auto", *_dtypes()]),
        "kind": kinds,
        "loss": _bare(LOSSES),
        "numbers": _bare(NUMBERS),
        "preset": _bare(PRESETS),
        "peer": {name: list(opening.options) for name, opening in _PEERS.items()},
        "shape": _bare(SHAPES),
    }
    return {kind: dict(sorted(names.items())) for kind, names in found.items()}


def _ours(registry: Any) -> dict[str, list[str]]:
    """The registered classes of Paceline, without those of other packages and tests."""
    return {name: _fields(registry[name].Options) for name in registry if _is_ours(registry[name])}


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "paceline"


def _fields(options: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(options)]


def _bare(names: Iterable[str]) -> dict[str, list[str]]:
    return {name: [] for name in names}


def _dtypes() -> list[str]:
    """The names of types of floating-point numbers that every version of torch has."""
    return ["bfloat16", "double", "float", "float16", "float32", "float64", "half"]


def written(found: dict[str, dict[str, list[str]]]) -> str:
    """A line for each name, so that a change is easy to see."""
    kinds = []
    for kind, names in found.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(options)}" for name, options in names.items())
        kinds.append(f" {json.dumps(kind)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(kinds) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(written(build()), "utf-8")
    print(FILE)
