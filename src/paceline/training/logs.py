"""The log of training: a line of JSON at a time, and Weights & Biases where somebody asks for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.core.json_text import parse_json
from paceline.engine.weights_and_biases import start

from .options import TrainOptions

NAME = "training.jsonl"


class Log:
    """Appends to training.jsonl in the folder of training; `quiet`: another process writes it."""

    def __init__(self, folder: Path, options: TrainOptions, quiet: bool = False) -> None:
        self._path, self._quiet = folder / NAME, quiet
        self._run: Any = None
        if options.wandb and not quiet:
            self._run = start("train", asdict(options), folder)

    def write(self, line: Mapping[str, Any]) -> None:
        if self._quiet:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self._run is not None:
            self._run.log(dict(_flat(line)), step=int(line.get("step", 0)))

    def cut(self, step: int) -> None:
        """Forget what was logged after `step`: it is done again."""
        if self._quiet or not self._path.exists():
            return
        lines = self._path.read_text("utf-8").splitlines()
        kept = [line for line in lines if _step(line) <= step]
        self._path.write_text("".join(f"{line}\n" for line in kept), "utf-8")

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def _step(line: str) -> int:
    """A line that was being written when the process was killed belongs to nothing."""
    try:
        return int(parse_json(line).get("step", 0))
    except (AttributeError, TypeError, ValueError):
        return 1 << 62


def _flat(line: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in line.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{before}{name}/")
        elif isinstance(value, (list, tuple)):
            found += [(f"{before}{name}/{index}", each) for index, each in enumerate(value)]
        elif value is not None:
            found.append((f"{before}{name}", value))
    return found
