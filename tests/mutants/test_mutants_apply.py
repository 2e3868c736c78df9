"""Every mutant can be applied, and the test that it names exists. `make mutants` runs those tests."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tests.mutants import PACKAGE, ROOT, all_mutants


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_mutant_applies() -> None:
    for mutant in all_mutants():
        text = (PACKAGE / mutant.file).read_text(encoding="utf-8")
        changed = mutant.applied(text)
        ast.parse(changed)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)), mutant.name


def test_every_named_test_exists() -> None:
    for mutant in all_mutants():
        file, _, function = mutant.test.partition("::")
        assert function.partition("[")[0] in functions_of(ROOT / file), mutant.name


def test_names_are_unique_and_many() -> None:
    mutants = all_mutants()
    assert [name for name, count in Counter(mutant.name for mutant in mutants).items() if count > 1] == []
    assert len(mutants) >= 60
