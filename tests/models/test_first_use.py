"""Kernels compiled once: where they are kept, the progress meanwhile, and what happens where nothing can be kept."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.common.errors import PacelineWarning
from paceline.kernels.cpu import warm_up
from paceline.models.cpu import compile as first_use
from paceline.models.cpu.compile import LABEL, kernels_ready

numba = pytest.importorskip("numba")

# a room of kernels with one small kernel in it: real ones take ten seconds
KERNEL = """
from numba import njit, types

@njit(types.int64(types.int64), cache=True)
def more(a):
    return a + 1

LATER = ()
"""
IN_A_PROCESS = """
import sys
from pathlib import Path
room = Path(sys.argv[1])
sys.path.insert(0, str(room.parent))
from paceline.kernels.cpu import warm_up
warm_up._ROOM, warm_up._HERE, warm_up.MODULES = room.name, room, ("entry",)
from paceline.models.cpu.compile import kernels_ready
told = []
kernels_ready(lambda *message: told.append(message))
import importlib
assert importlib.import_module(room.name + ".entry").more(1) == 2
print(sum(1 for label, done, many in told if label.startswith("compiling") and done == 1))
"""
# The same in two processes, forked before either of them has imported numba.
IN_TWO = """
import os, sys, paceline
paceline.SpeculativeDecoder, paceline.load
import paceline.models.runtime, paceline.models.cpu.compile
import paceline.models.pass_timing, paceline.cli.main
assert not {"numba", "llvmlite"} & set(sys.modules), "an import of paceline imports the compiler"
children = [os.fork()]
if children[0]:
    children.append(os.fork())
if all(children):
    sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""

# The same where nothing can be written. numba itself counts what it compiled and what it read.
READ_ONLY = (
    """
import os, sys, tempfile
for folder in sys.argv[1:]:
    try:
        tempfile.TemporaryFile(dir=folder)
    except OSError:
        continue
    sys.exit(f"{folder} is writable, so this test would show nothing")
"""
    + IN_A_PROCESS
    + """
stats = importlib.import_module(room.name + ".entry").more.stats
assert sum(stats.cache_hits.values()) == 1 and not stats.cache_misses, stats
"""
)
_DAC_OVERRIDE, _PR_CAPBSET_DROP = 1, 24


def without_override() -> None:
    """Before a process starts: permissions hold for root too. Others have no such privilege to lose."""
    ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _DAC_OVERRIDE, 0, 0, 0)


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kernels, as in a process that has used none."""
    room = tmp_path / f"room_{tmp_path.name}"
    room.mkdir()
    (room / "__init__.py").write_text("")
    (room / "entry.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(warm_up, "_ROOM", room.name)
    monkeypatch.setattr(warm_up, "_HERE", room)
    monkeypatch.setattr(warm_up, "MODULES", ("entry",))
    monkeypatch.setattr(warm_up, "fingerprint", warm_up.fingerprint.__wrapped__)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return room


@pytest.fixture
def again(room: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
    """Use the kernels as a new process would; return the messages."""

    def use() -> list[Any]:
        sys.modules.pop(f"{room.name}.entry", None)
        told: list[Any] = []
        kernels_ready(lambda *message: told.append(message))
        assert sys.modules[f"{room.name}.entry"].more(41) == 42
        return told

    return use


def test_compiled_once_and_told(again: Callable[[], list[Any]], tmp_path: Path) -> None:
    assert again() == [(LABEL, 0, 1), (LABEL, 1, 1)]
    kept = list((tmp_path / "cache" / "kernels").rglob("*.nbc"))
    assert len(kept) == 1
    assert again() == []
    assert numba.config.CACHE_DIR == ""  # others' functions are kept where they were


def test_a_second_use_in_a_process_does_nothing(
    again: Callable[[], list[Any]], room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again()
    monkeypatch.setattr(first_use, "_make", lambda *_: pytest.fail("made again"))
    kernels_ready()


def test_another_state_of_any_source_is_compiled_anew(again: Callable[[], list[Any]], room: Path) -> None:
    """numba looks at the file of a function only, not at those of its pieces."""
    again()
    (room / "__init__.py").write_text("# other pieces")
    assert len(again()) == 2


def test_a_folder_that_the_user_gave_numba(
    again: Callable[[], list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "theirs"))
    again()
    assert list((tmp_path / "theirs" / "paceline").rglob("*.nbc"))
    assert not (tmp_path / "cache").exists()
    assert str(tmp_path / "theirs") == numba.config.CACHE_DIR


def test_where_nothing_can_be_kept(
    again: Callable[[], list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    with pytest.warns(PacelineWarning, match="cannot be kept in .*set PACELINE_CACHE") as found:
        assert len(again()) == 2
    assert len(found) == 1
    with pytest.warns(PacelineWarning):
        assert len(again()) == 2


def test_a_folder_one_may_only_read_is_read(again: Callable[[], list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    again()
    monkeypatch.setattr(first_use, "_writable", lambda place: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert again() == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="drops a privilege of Linux")
def test_a_read_only_installation_compiles_nothing(again: Callable[[], list[Any]], room: Path, tmp_path: Path) -> None:
    """As in a container: the cache, the package and the home folder are read-only."""
    again()
    (tmp_path / "home").mkdir()
    folders = [tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())]
    where = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    where |= {"PYTHONDONTWRITEBYTECODE": "1", "HOME": str(tmp_path / "home")}
    for folder in folders:
        folder.chmod(0o555)
    try:
        run = subprocess.run(
            [sys.executable, "-W", "error::paceline.common.errors.PacelineWarning", "-c", READ_ONLY, str(room),
             *map(str, folders)],
            env=where, preexec_fn=without_override, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert (run.returncode, run.stdout.strip()) == (0, "0"), run.stdout + run.stderr


def test_a_part_of_a_read_only_cache_can_be_used(
    again: Callable[[], list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is compiled for this process. The copy is writable although the cache is not."""
    again()
    (place,) = (tmp_path / "cache" / "kernels").iterdir()
    warm_up.seal(place).unlink()
    for file in place.glob("*.nbi"):
        file.unlink()
    monkeypatch.setattr(first_use, "_writable", lambda place: False)
    place.chmod(0o555)
    try:
        with pytest.warns(PacelineWarning, match="cannot be kept"):
            assert len(again()) == 2
    finally:
        place.chmod(0o755)
    copy = Path(sys.modules[f"{warm_up._ROOM}.entry"].more._cache.cache_path)
    assert copy != place
    assert copy.stat().st_mode & 0o200


def test_a_second_installation_compiles_nothing(
    again: Callable[[], list[Any]], room: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another environment, or a fresh clone: the same text in another folder, with other times."""
    again()
    other = tmp_path / "elsewhere" / room.name
    shutil.copytree(room, other, copy_function=shutil.copyfile)
    os.utime(other / "entry.py", (0, 0))
    for name in (room.name, f"{room.name}.entry"):
        sys.modules.pop(name)
    monkeypatch.syspath_prepend(str(other.parent))
    monkeypatch.setattr(warm_up, "_HERE", other)
    assert again() == []
    made = sys.modules[f"{room.name}.entry"].more
    assert Path(made.py_func.__code__.co_filename).parent == other
    assert sum(made.stats.cache_hits.values()) == 1


@pytest.mark.parametrize(
    "change",
    [("numba.__version__", "0.0"), ("llvmlite.__version__", "0.0"), ("numba.config.CPU_NAME", "generic"),
     ("paceline.kernels.cpu.machine.features", lambda: {"avx2"})],
)  # fmt: skip
def test_another_compiler_or_processor_has_another_folder(
    room: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: tuple[str, Any]
) -> None:
    before = warm_up.place(tmp_path)
    monkeypatch.setattr(warm_up, "_settings", lambda: numba.config)  # which reads the environment again
    assert warm_up.place(tmp_path) == before
    monkeypatch.setattr(*change)
    assert warm_up.place(tmp_path) != before


def test_a_complete_cache_holds_what_is_compiled_later(again: Callable[[], list[Any]], room: Path) -> None:
    """A read-only cache could not take it up when a model needs it."""
    with (room / "entry.py").open("a") as file:
        file.write("made = []\nLATER = (lambda: made.append(1),)\n")
    again()
    assert sys.modules[f"{room.name}.entry"].made == [1]
    again()
    assert sys.modules[f"{room.name}.entry"].made == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_importing_paceline_imports_no_compiler_and_one_of_several_processes_compiles(room: Path) -> None:
    """The other one waits for it and reads; no process finds half a file."""
    command = [sys.executable, "-c", IN_TWO + IN_A_PROCESS, str(room)]
    where = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    run = subprocess.run(command, env=where, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert sorted(run.stdout.split()) == ["0", "1"]


def test_old_kernels_are_swept_away(
    again: Callable[[], list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "cache" / "kernels"
    (kept / "gone").mkdir(parents=True)
    (kept / "gone" / "x.nbc").write_text("")
    monkeypatch.setattr(first_use, "_OLD", -60.0)
    again()
    assert [folder.name for folder in kept.iterdir()] == [warm_up.place(kept).name]


def test_the_sources_are_told_apart(room: Path) -> None:
    before = warm_up.fingerprint()
    assert warm_up.fingerprint() == before
    (room / "entry.py").write_text(KERNEL + "\n# more")
    assert warm_up.fingerprint() != before
