"""The command line starts without the compiler and without distributed tensors; both are there once they are used."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import save_model

from paceline.common import process
from paceline.models.loading import slim_start as slim

PACKAGE = """
ran.append(1)
marked = []
def allow_in_graph(function):
    marked.append(function)
    return function
assume_constant_result = allow_in_graph
def disable(function, recursive=True, reason=None):
    return lambda *given: ("disabled", function(*given))
from . import part
value = 7
"""


@pytest.fixture
def lazy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
    """A package inside a package that is put off, and how often its code ran."""
    ran: list[int] = []
    inner = tmp_path / "outer_room" / "compiler"
    inner.mkdir(parents=True)
    (tmp_path / "outer_room" / "__init__.py").write_text("")
    (inner / "__init__.py").write_text("from builtins import _ran as ran\n" + PACKAGE)
    (inner / "part.py").write_text("number = 3\n")
    monkeypatch.setattr("builtins._ran", ran, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(slim, "_COMPILER", "outer_room.compiler")
    outer = importlib.import_module("outer_room")
    slim.put_off("outer_room.compiler")
    yield outer, ran
    for name in ("outer_room", "outer_room.compiler", "outer_room.compiler.part"):
        sys.modules.pop(name, None)


def test_a_package_runs_when_it_is_used(lazy: tuple[Any, list[int]]) -> None:
    outer, ran = lazy
    package = importlib.import_module("outer_room.compiler")
    assert outer.compiler is package
    assert importlib.import_module("outer_room.compiler.part").number == 3
    assert package.part.number == 3
    assert not hasattr(package, "__version__")
    assert ran == []
    assert package.value == 7
    assert package.value == 7
    assert (ran, type(package).__name__) == ([1], "module")


def test_decorators_wait_for_it(lazy: tuple[Any, list[int]]) -> None:
    outer, ran = lazy

    @outer.compiler.allow_in_graph
    def marked() -> int:
        return 1

    @outer.compiler.disable
    def plain(number: int) -> int:
        return number + 1

    @outer.compiler.disable(recursive=False, reason="x")
    def other() -> int:
        return 5

    assert (marked(), plain(1), other()) == (1, 2, 5)  # nothing can be compiled yet
    assert ran == []
    assert outer.compiler.marked == [marked]
    assert (plain(1), other()) == (("disabled", 2), ("disabled", 5))


def test_what_is_imported_stays() -> None:
    before = sys.modules["torch.nn"]
    slim.put_off("torch.nn")
    assert sys.modules["torch.nn"] is before is torch.nn
    slim.put_off("torch.no_such_package")
    assert not hasattr(torch, "no_such_package")


@pytest.mark.parametrize(
    ("arguments", "environment", "wanted"),
    [
        (["generate", "x"], {}, True),
        (["--debug", "chat"], {}, True),
        (["train"], {}, False),
        (["bench"], {}, False),
        ([], {}, False),
        (["generate", "x"], {"WORLD_SIZE": "2"}, False),
        (["generate", "x"], {process.SWITCH: "off"}, False),
    ],
)
def test_only_short_commands_of_one_process(
    arguments: list[str], environment: dict[str, str], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", process.SWITCH):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    usual = gc.get_threshold()
    try:
        process.decide(arguments)
        assert process.is_slim() is wanted
        assert (gc.get_threshold() != usual) is wanted  # modules are no garbage
        process.started()
        assert gc.get_threshold() == usual
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


# The heavy packages that a start must not import; then the compiler still works, and a model can be saved.
GENERATE = """
import sys
from pathlib import Path
folder, heavy = Path(sys.argv[1]), sys.argv[2].split(",")
sys.argv = ["paceline", "generate", "Hello", "--target", str(folder), "--max-new-tokens", "4", "--draft", "suffix"]
from paceline.cli.main import main
try:
    main()
except SystemExit as end:
    assert end.code == 0, end.code
found = [name for name in heavy if name in sys.modules]
assert not found, found
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(folder)
model.save_pretrained(folder / "again")
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
"""
HEAVY = ("torch._dynamo.convert_frame", "torch.distributed.tensor", "torch._inductor", "sympy", "gguf",
         "prompt_toolkit", "matplotlib", "wandb", "pandas")  # fmt: skip


@pytest.mark.skipif(
    not slim.may_put_off(torch.__version__, torch.version.cuda), reason="this torch imports its compiler as usual"
)
def test_a_start_imports_nothing_that_it_does_not_use(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny")
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", process.SWITCH)
    where = {name: value for name, value in os.environ.items() if name not in launched}
    run = subprocess.run(
        [sys.executable, "-c", GENERATE, str(folder), ",".join(HEAVY)],
        env={**where, "PACELINE_CACHE": str(tmp_path / "cache")}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert (folder / "again" / "model.safetensors").is_file()


def test_only_a_torch_that_was_tried_is_changed() -> None:
    """torch 2.11 for CUDA cannot import transformers when its compiler is put off (seen on an H200)."""
    assert slim.may_put_off("2.13.0+cpu", None)
    assert not slim.may_put_off("2.13.0+cu130", "13.0")
    assert not slim.may_put_off("2.11.0+cu130", "13.0")
    assert not slim.may_put_off("2.14.0", None)
