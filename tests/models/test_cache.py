"""The weight cache: whole entries or none, checked, and made once however many ask at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

from paceline.common.errors import LoadError, PacelineWarning
from paceline.models.loading import disk_cache as cache_module
from paceline.models.loading.disk_cache import MANIFEST, VERIFIED, WeightCache, cache_folder, file_sha256


class Maker:
    """Fills a folder and counts how often it was asked to."""

    def __init__(self, content: bytes = b"weights" * 100) -> None:
        self.content, self.calls = content, 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "model.safetensors").write_bytes(self.content)
        (folder / "deep").mkdir()
        (folder / "deep" / "config.json").write_text("{}")


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(tmp_path / "cache")


def left_in(cache: WeightCache) -> list[str]:
    return sorted(path.name for path in cache.entries.iterdir() if not path.name.endswith(".lock"))


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.setenv("PACELINE_CACHE", "")
    assert cache_folder() == tmp_path / "xdg" / "paceline"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "paceline"


def test_an_entry_is_made_once(cache: WeightCache) -> None:
    make = Maker()
    assert cache.find("a") is None
    folder = cache.obtain("a", make)
    assert (folder / "model.safetensors").read_bytes() == make.content
    assert cache.obtain("a", make) == cache.find("a") == folder
    assert make.calls == 1
    assert cache.obtain("b", make) != folder
    assert make.calls == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, LoadError, ZeroDivisionError])
def test_an_interruption_leaves_no_half_entry(cache: WeightCache, error: type[BaseException]) -> None:
    def fail(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    with pytest.raises(error):
        cache.obtain("a", fail)
    assert left_in(cache) == []
    assert cache.obtain("a", Maker()).is_dir()  # and the lock is free again


def test_what_a_killed_process_left_is_swept(cache: WeightCache) -> None:
    (cache.entries / ".building-a-dead").mkdir(parents=True)
    (cache.entries / ".building-b-alive").mkdir()
    cache.obtain("a", Maker())
    assert left_in(cache) == [".building-b-alive", "a"]


def truncate(entry: Path) -> None:
    (entry / "model.safetensors").write_bytes(b"short")


def change_a_byte(entry: Path) -> None:
    path = entry / "model.safetensors"
    path.write_bytes(b"X" + path.read_bytes()[1:])
    os.utime(path, ns=(1, 1))


def remove_a_file(entry: Path) -> None:
    (entry / "deep" / "config.json").unlink()


def break_the_manifest(entry: Path) -> None:
    (entry / MANIFEST).write_text("{")


def empty_the_manifest(entry: Path) -> None:
    (entry / MANIFEST).write_text('{"files": {"model.safetensors": {}}}')


@pytest.mark.parametrize("harm", [truncate, change_a_byte, remove_a_file, break_the_manifest, empty_the_manifest])
@pytest.mark.parametrize("used_before", [False, True])
def test_damage_is_seen_and_repaired_with_one_warning(cache: WeightCache, harm, used_before: bool) -> None:
    make = Maker()
    entry = cache.obtain("a", make)
    if used_before:
        assert cache.find("a") == entry
    harm(entry)
    with pytest.warns(PacelineWarning, match="damaged") as caught:
        again = cache.obtain("a", make)
    assert len(caught) == 1
    assert make.calls == 2
    assert (again / "model.safetensors").read_bytes() == make.content
    assert left_in(cache) == ["a"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.find("a") == again


def test_the_first_use_hashes_even_when_the_times_look_right(cache: WeightCache) -> None:
    path = cache.obtain("a", Maker()) / "model.safetensors"
    before = path.stat()
    path.write_bytes(b"X" + path.read_bytes()[1:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.warns(PacelineWarning, match="checksum"):
        assert cache.find("a") is None


def test_hashing_happens_once_and_again_when_times_change(cache: WeightCache, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = cache.obtain("a", Maker())
    hashed: list[str] = []

    def counted(path: Path, **options: object) -> str:
        hashed.append(path.name)
        return file_sha256(path)

    monkeypatch.setattr(cache_module, "file_sha256", counted)
    cache.find("a")
    assert sorted(hashed) == ["config.json", "model.safetensors"]
    hashed.clear()
    cache.find("a")
    assert hashed == []
    os.utime(entry / "model.safetensors", ns=(1, 1))  # as after copying the folder to another machine
    assert cache.find("a") == entry
    assert hashed == ["model.safetensors"]
    hashed.clear()
    (entry / VERIFIED).write_text("nonsense")
    assert cache.find("a") == entry
    assert len(hashed) == 2


def test_the_sha256_of_a_source_is_remembered(
    cache: WeightCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(b"one")
    first = cache.source_sha256(source)
    assert first == file_sha256(source)
    monkeypatch.setattr(cache_module, "file_sha256", lambda path, **options: "read again")
    assert cache.source_sha256(source) == first
    source.write_bytes(b"another")
    assert cache.source_sha256(source) == "read again"


def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(LoadError, match="PACELINE_CACHE"):
        WeightCache(tmp_path / "file").obtain("a", Maker())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_two_processes_make_it_once(tmp_path: Path) -> None:
    """One makes it and does not finish before the other says that it waits; that one gets the entry the first made."""
    script = textwrap.dedent("""
        import os, sys, time
        from pathlib import Path
        from paceline.models.loading.disk_cache import WeightCache

        children = [os.fork()]
        if children[0]:
            children.append(os.fork())
        if all(children):
            sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
        root, me = Path(sys.argv[1]), "second" if children[0] else "first"
        (root / f"ready-{me}").touch()
        while len(list(root.glob("ready-*"))) < 2:
            time.sleep(0.01)

        def make(folder):
            (root / f"made-by-{me}").touch()
            (folder / "model.safetensors").write_bytes(b"part one")
            while not list(root.glob("waits-*")) and len(list(root.glob("made-by-*"))) < 2:
                time.sleep(0.01)
            (folder / "config.json").write_text("{}")

        output = []

        def progress(label, done, total):
            output.append(label)
            (root / f"waits-{me}").touch()

        entry = WeightCache(root / "cache").obtain("a", make, progress=progress)
        print(entry, sorted(path.name for path in entry.glob("*.*")), len(output))
    """)
    command = [sys.executable, "-c", script, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    printed = sorted(run.stdout.splitlines())
    assert len(printed) == 2
    assert len(list(tmp_path.glob("made-by-*"))) == 1
    assert all("config.json" in line and "model.safetensors" in line for line in printed)
    assert sorted(line[-1] for line in printed) == ["0", "1"]  # one of them reported that it waits


def test_times_of_an_image_layer_are_as_good(cache: WeightCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Image layers keep whole seconds: what was verified before is not hashed at every start."""
    entry = cache.obtain("x", Maker())
    assert cache.find("x") == entry  # hashed once, and noted
    hashed: list[str] = []
    monkeypatch.setattr(cache_module, "file_sha256", lambda path: hashed.append(path.name) or "other")
    file = entry / "model.safetensors"
    second = file.stat().st_mtime_ns // 10**9
    os.utime(file, ns=(0, second * 10**9))
    assert cache.find("x") == entry
    assert hashed == []
    os.utime(file, ns=(0, (second + 1) * 10**9))
    with pytest.warns(PacelineWarning, match="damaged"):
        assert cache.find("x") is None
    assert "model.safetensors" in hashed
