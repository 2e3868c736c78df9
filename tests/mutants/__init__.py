"""Small wrong changes of the package. Each one must fail the test that it names (`make mutants`).

A mutant replaces one text of one file, which occurs there exactly once. Every other file of this folder holds the
`MUTANTS` of one room.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "paceline"


@dataclass(frozen=True)
class Mutant:
    """`old` in `file` (relative to the package) becomes `new`; `test` is a test that must then fail."""

    name: str
    file: str
    old: str
    new: str
    test: str

    def applied(self, text: str) -> str:
        """The text of the file with the wrong change."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"Mutant '{self.name}': its old text occurs {count} times in {self.file}, not once.")
        return text.replace(self.old, self.new)


def all_mutants() -> list[Mutant]:
    rooms = sorted(path.stem for path in Path(__file__).parent.glob("of_*.py"))
    return [mutant for room in rooms for mutant in importlib.import_module(f"tests.mutants.{room}").MUTANTS]
