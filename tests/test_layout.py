"""The shape of the source itself: layers, sizes, what may be absent, and what may never be there."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60

# These must import where only torch, transformers, safetensors, tokenizers and numpy are present.
BARE_ROOMS = ("core", "rules", "models", "drafters", "engine", "audit", "bench", "training")
ABSENT = ("rich", "typer", "gguf", "pytest", "matplotlib", "wandb", "accelerate")

UNPICKLERS = frozenset({"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"})

IMPORT_BARE = """
import importlib, importlib.machinery, pkgutil, sys

rooms, absent = sys.argv[1].split(","), set(sys.argv[2].split(","))

class Bare(importlib.machinery.PathFinder):  # finds everything except what is absent, as on a box that lacks it
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in absent else super().find_spec(name, path, target)

sys.meta_path[:] = [Bare if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
for name in absent:
    assert name not in sys.modules and importlib.util.find_spec(name) is None, f"{name} is still importable"

failures, imported = [], 0
def take(name):
    global imported
    try:
        module = importlib.import_module(name)
    except Exception as error:
        failures.append(f"{name}: {type(error).__name__}: {error}")
        return
    imported += 1
    for child in pkgutil.iter_modules(getattr(module, "__path__", ()), name + "."):
        take(child.name)

for room in rooms:
    take("paceline." + room)
print("\\n".join(failures) or f"imported {imported} modules")
sys.exit(bool(failures))
"""


def package_folder() -> Path:
    spec = importlib.util.find_spec("paceline")
    assert spec is not None, "paceline is not installed"
    assert spec.submodule_search_locations, "paceline is not a package"
    return Path(next(iter(spec.submodule_search_locations)))


def source_files() -> list[Path]:
    files = sorted(package_folder().rglob("*.py"))
    assert files, f"no Python files under {package_folder()}"
    return files


def long_functions(source: str) -> Iterator[tuple[int, str, int]]:
    """(line, name, length) of every function longer than the limit, without its decorators."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield node.lineno, node.name, length


def unpickling(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) of everything that could unpickle: the modules that do, torch.load, and numpy's allow_pickle."""
    tree = ast.parse(source)
    torch_names = {"torch"} | {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "torch" and alias.asname
    }
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, f"import {a.name}") for a in names if a.name.partition(".")[0] in UNPICKLERS)
            case ast.ImportFrom(module=str(module), level=0) if module.partition(".")[0] in UNPICKLERS:
                yield node.lineno, f"from {module} import"
            case ast.ImportFrom(module="torch" | "torch.serialization", names=names, level=0):
                yield from ((node.lineno, f"from torch import {a.name}") for a in names if a.name == "load")
            case ast.Attribute(value=ast.Name(id=name), attr="load") if name in torch_names:
                yield node.lineno, "torch.load"
            case ast.Attribute(value=ast.Attribute(attr="serialization"), attr="load"):
                yield node.lineno, "torch.serialization.load"
            case ast.keyword(arg="allow_pickle", value=value) if not (
                isinstance(value, ast.Constant) and value.value is False
            ):
                yield node.lineno, "allow_pickle"


# Objects of a whole process that functions change. `tools/process_state.py` finds them; docs/map.md has the reasons.
PROCESS_STATE = {
    "common.process:_ALL",
    "common.registry:_REGISTERED",
    "core.device_ops:CONSTANTS",
    "kernels.cpu.keeping:ByContent",
    "kernels.cpu.team:TEAM",
    "models.cpu.threads:THREADS",
}


def process_state() -> set[str]:
    spec = importlib.util.spec_from_file_location("process_state", ROOT / "tools" / "process_state.py")
    assert spec is not None
    assert spec.loader is not None
    tool = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return {state.name for state in tool.states()}


def test_only_these_objects_of_a_process_change() -> None:
    assert process_state() == PROCESS_STATE
    assert len(PROCESS_STATE) <= 6


def test_the_map_has_a_reason_for_each_object_of_a_process() -> None:
    section = (ROOT / "docs" / "map.md").read_text(encoding="utf-8").partition("## Process-wide state")[2]
    rows = re.findall(r"^\| `(\w+)` \| `([\w/]+)\.py` \| .+ \|$", section.partition("\n## ")[0], re.MULTILINE)
    assert {f"{file.replace('/', '.')}:{name}" for name, file in rows} == PROCESS_STATE


def test_imports_point_down_only() -> None:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    run = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_files_stay_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in source_files()}
    long = [f"{path.relative_to(package_folder())}: {n} lines" for path, n in lengths.items() if n > MAX_FILE_LINES]
    assert not long, f"longer than {MAX_FILE_LINES} lines, split them:\n" + "\n".join(long)


def test_file_names_are_unique() -> None:
    names = Counter(path.name for path in source_files())
    twice = [name for name, n in names.items() if n > 1 and name not in ("__init__.py", "base.py")]
    assert not twice, "two files have the same name, rename one: " + ", ".join(twice)


def test_functions_stay_short() -> None:
    long = [
        f"{path.relative_to(package_folder())}:{line}: {name} has {length} lines"
        for path in source_files()
        for line, name, length in long_functions(path.read_text(encoding="utf-8"))
    ]
    assert not long, f"longer than {MAX_FUNCTION_LINES} lines, split them:\n" + "\n".join(long)


def test_nothing_unpickles() -> None:
    found = [
        f"{path.relative_to(package_folder())}:{line}: {what}"
        for path in source_files()
        for line, what in unpickling(path.read_text(encoding="utf-8"))
    ]
    assert not found, "only safetensors and GGUF are read, never a pickle:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import torch, pickle as p",
        "from pickle import loads",
        "import joblib.numpy_pickle",
        "import torch\ntorch.load('x', weights_only=True)",
        "import torch as t\nread = t.load",
        "import torch\ntorch.serialization.load('x')",
        "from torch import load",
        "from torch.serialization import load",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy as np\nnp.load('x', allow_pickle=flag)",
    ],
)
def test_the_pickle_check_can_fail(source: str) -> None:
    assert list(unpickling(source))


@pytest.mark.parametrize(
    "source",
    [
        "from safetensors.torch import load_file\nload_file('x')",
        "import json\njson.load(f)",
        "import paceline\npaceline.load('smollm2-135m')",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "from .torch import load",
    ],
)
def test_the_pickle_check_lets_honest_code_pass(source: str) -> None:
    assert not list(unpickling(source))


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_the_length_check_can_fail(kind: str) -> None:
    def function(lines: int) -> str:
        return f"class A:\n    @property\n    {kind} f(self):\n" + "        x = 1\n" * (lines - 1)

    assert [name for _, name, _ in long_functions(function(MAX_FUNCTION_LINES + 1))] == ["f"]
    assert not list(long_functions(function(MAX_FUNCTION_LINES)))


def import_bare(rooms: tuple[str, ...], absent: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", IMPORT_BARE, ",".join(rooms), ",".join(absent)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_the_library_imports_on_a_bare_machine() -> None:
    run = import_bare(BARE_ROOMS, ABSENT)
    assert run.returncode == 0, f"without {', '.join(ABSENT)}:\n{run.stdout}{run.stderr}"


def test_the_bare_machine_check_can_fail() -> None:
    run = import_bare(("core",), ("torch",))
    assert run.returncode == 1, run.stdout + run.stderr
    assert "No module named 'torch'" in run.stdout


def test_the_contract_of_drafters_is_small() -> None:
    """Everything else that a drafter may do is an optional protocol with a docstring."""
    from paceline.core import protocols
    from paceline.core.contracts import Drafter

    members = {name for name in {*vars(Drafter), *Drafter.__annotations__} if not name.startswith("_")}
    assert len(members) <= 10, sorted(members)
    optional = [
        cls for cls in vars(protocols).values() if isinstance(cls, type) and cls.__module__ == protocols.__name__
    ]
    assert optional
    assert all(issubclass(cls, Drafter) and cls.__doc__ for cls in optional)
