"""Damaged files and folders made to do harm: one sentence each, in bounded time and memory, and no code is run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.common.errors import LoadError
from paceline.models.loading.weight_check import Table, bounded, link_problem
from tests.hostile.attacks import ATTACKS

SECONDS = 10.0  # of CPU time, for one file
GROWN = 16 << 20  # bytes of memory that a case may touch beside twice its files
_ERRORS = ("InputError", "LoadError", "UnsupportedError", "UnknownNameError", "ModelOutputError")
_ROOT = Path(__file__).parents[2]


def results(room: Path, *wanted: str) -> list[dict[str, Any]]:
    """What became of some files, in a process of its own."""
    source = Path(paceline.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{_ROOT}", "OMP_NUM_THREADS": "1",
                   "MALLOC_ARENA_MAX": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}  # fmt: skip
    command = [sys.executable, "-m", "tests.hostile.worker", str(room), *wanted]
    done = subprocess.run(command, env=environment, cwd=_ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All attacks, and a damage of every kind: one process, for importing torch takes longer than all of them."""
    wanted = ("gguf=28", "safetensors=33", f"attacks={len(ATTACKS)}")
    return results(tmp_path_factory.mktemp("hostile"), *wanted)


def check(told: dict[str, Any]) -> None:
    """One file: used, or refused in a sentence or two of ours."""
    case = f"{told['case']}: {told['outcome']}: {told['message']}"
    assert told["outcome"] in (*_ERRORS, "used"), case
    assert told["seconds"] < SECONDS, case
    assert told["grown"] < 2 * told["bytes"] + GROWN, f"{case} took {told['grown']} bytes"
    assert told["seen"] == [], f"{case} did {told['seen']}"
    message = told["message"]
    if message:
        assert "\n" not in message, case
        assert message.endswith("."), case
        assert len(message) < 600, case
        assert len(re.findall(r"\. [A-Z]", message)) <= 2, case  # a name that is unknown has a hint and a list
        assert not re.search(r"[Cc]annot allocate|out of memory|MemoryError|Traceback|File \"", message), case


def checked(found: list[dict[str, Any]], kind: str, count: int) -> list[dict[str, Any]]:
    """The cases of a kind; the sound files were used before them."""
    sound = [told for told in found if told["kind"] == "sound"]
    assert {told["outcome"] for told in sound} == {"used"}, sound
    cases = [told for told in found if told["kind"] == kind]
    assert len(cases) == count
    for told in cases:
        check(told)
    return cases


@pytest.mark.parametrize(("kind", "count"), [("gguf", 28), ("safetensors", 33)])
def test_some_damaged_files(some: list[dict[str, Any]], kind: str, count: int) -> None:
    cases = checked(some, kind, count)
    assert sum(told["outcome"] == "LoadError" for told in cases) > count / 2


def test_folders_that_do_harm(some: list[dict[str, Any]]) -> None:
    """All of them are refused; none is followed out of its folder."""
    cases = checked(some, "attacks", len(ATTACKS))
    assert [told["case"] for told in cases if told["outcome"] == "used"] == []
    assert not Path("/tmp/hostile-was-here").exists()


@pytest.mark.nightly
def test_two_hundred_damaged_files_of_each_kind(tmp_path: Path) -> None:
    found = results(tmp_path, "gguf=200", "safetensors=200")
    for kind in ("gguf", "safetensors"):
        refused = [told for told in checked(found, kind, 200) if told["outcome"] == "LoadError"]
        assert len(refused) > 100
        assert {told["case"].split()[-1] for told in refused} > {"cut", "shifted"}


def test_links_of_the_hub_and_of_people_are_followed(tmp_path: Path) -> None:
    """The hub's cache links a snapshot to blobs without an ending; people link weights to another disk."""
    hub = tmp_path / "models--a--b"
    snapshot, blob, weights = hub / "snapshots" / "1f", hub / "blobs" / "0a", tmp_path / "disk" / "x.safetensors"
    for path in (blob, weights, tmp_path / "secret"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    snapshot.mkdir(parents=True)
    links = {"blob": blob, "weights": weights, "secret": tmp_path / "secret"}
    found = {}
    for name, place in links.items():
        (snapshot / f"{name}.safetensors").symlink_to(place)
        found[name] = link_problem(snapshot, f"{name}.safetensors")
    assert found["blob"] is found["weights"] is None
    assert found["secret"] is not None
    assert "which is no .safetensors file; copy the file into the folder" in found["secret"]


def test_a_model_is_compared_with_its_weights_while_it_is_built() -> None:
    """Only what this thread builds on the meta device counts."""
    made = []
    with bounded(Table(2, 100), "toy"):
        torch.nn.Linear(2000, 2000)  # real, not of the model
        thread = threading.Thread(target=lambda: made.append(torch.nn.Linear(2000, 2000, device="meta")))
        thread.start()
        thread.join()
        torch.nn.Linear(10, 10, device="meta")
        with pytest.raises(LoadError, match="describes a larger model than its weights, which are 2 tensors with 100"):
            torch.nn.Linear(2000, 2000, device="meta")
    assert len(made) == 1
    torch.nn.Linear(2000, 2000, device="meta")  # the check has ended
