"""A trigram model in a folder, as all drafters are."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.common.limits import Limited, limited
from paceline.drafters.heads.head_files import FORMAT, fingerprint
from paceline.drafters.lookup.trigram import TrigramTable
from paceline.models.language_model import LanguageModel
from paceline.training.data.corpus import write_whole


@dataclass(frozen=True)
class CountingOptions(Limited):
    """least: pairs and triples of tokens that were seen fewer times count as unseen, for a smaller table."""

    least: int = limited(1, 1)


def save_table(folder: Path, table: TrigramTable, lm: LanguageModel) -> None:
    """config.json and model.safetensors; its logarithms in 32 bits, which is more than counting knows."""
    small = replace(
        table,
        unigram=table.unigram.astype(np.float32),
        pairs=_smaller(table.pairs),
        triples=_smaller(table.triples),
    )
    small.save(folder / "model.safetensors")
    config = {"kind": "trigram", "format": FORMAT, "target": fingerprint(lm)}
    write_whole(folder / "config.json", (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def _smaller(level: Any) -> Any:
    return replace(level, logs=level.logs.astype(np.float32), open=level.open.astype(np.float32))
