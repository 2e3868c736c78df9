"""The folder on disk where converted weights are kept, so that they are fetched and converted once per machine.

An entry is a folder that appears complete or not at all: it is made under another name, gets a manifest (the sha256 of
every file) and is renamed. Each entry has a lock, so that only one process makes it. Reading needs no lock and no write
permission.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from paceline.common.errors import LoadError, PacelineWarning
from paceline.common.progress import Progress
from paceline.common.text_formats import parse_json

__all__ = ["Progress", "WeightCache", "cache_folder", "file_sha256", "read_json", "write_json"]

MANIFEST = "paceline-manifest.json"
# When each file was last found to match the manifest. It is kept apart because it says something about this machine
# (modification times), while the manifest says something about the weights.
VERIFIED = "paceline-verified.json"
_CHUNK = 1 << 20
_SECOND = 1_000_000_000  # in nanoseconds


def cache_folder() -> Path:
    """Return the folder of weights: $PACELINE_CACHE, else $XDG_CACHE_HOME/paceline, else ~/.cache/paceline."""
    if own := os.environ.get("PACELINE_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "paceline"
    return Path.home() / ".cache" / "paceline"


def file_sha256(path: Path, *, progress: Progress | None = None, label: str = "") -> str:
    digest = hashlib.sha256()
    total, done = path.stat().st_size, 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(label, done, total)
    return digest.hexdigest()


class WeightCache:
    """Entries by key. A key holds the sha256 of what an entry was made from, so equal keys mean equal weights."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = cache_folder() if root is None else Path(root)
        self.entries = self.root / "models"

    def find(self, key: str) -> Path | None:
        """Return the entry if it exists and is valid. A damaged one is removed with a warning and can be made again."""
        entry = self.entries / key
        if not entry.is_dir():
            return None
        if _damage(entry) is None:
            return entry
        with self._locked(key, None):
            return self._sound_or_removed(key)

    def obtain(self, key: str, make: Callable[[Path], None], *, progress: Progress | None = None) -> Path:
        """Return the entry. If it does not exist, `make` fills an empty folder for it."""
        found = self.find(key)
        if found is not None:
            return found
        with self._locked(key, progress):
            return self._sound_or_removed(key) or self._build(key, make)

    def source_sha256(self, path: Path, *, progress: Progress | None = None) -> str:
        """Return the sha256 of a file outside the cache, stored for as long as its size and time do not change."""
        path = path.resolve()
        state = path.stat()
        stamp = {"path": str(path), "size": state.st_size, "mtime_ns": state.st_mtime_ns}
        note = self.root / "sources" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
        known = read_json(note)
        if known is not None and {name: known.get(name) for name in stamp} == stamp and "sha256" in known:
            return str(known["sha256"])
        digest = file_sha256(path, progress=progress, label=f"checking {path.name}")
        with self._writable():
            note.parent.mkdir(parents=True, exist_ok=True)
            write_json(note, {**stamp, "sha256": digest})
        return digest

    @contextmanager
    def _writable(self) -> Iterator[None]:
        """Raise a LoadError that says what to do if the cache cannot be written."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise LoadError(
                f"The weight cache '{self.root}' cannot be written ({reason}); make room there or set PACELINE_CACHE "
                "to another folder."
            ) from error

    @contextmanager
    def _locked(self, key: str, progress: Progress | None) -> Iterator[None]:
        with self._writable():
            self.entries.mkdir(parents=True, exist_ok=True)
            lock = FileLock(str(self.entries / f".{key}.lock"))
            try:
                lock.acquire(timeout=0)
            except Timeout:
                if progress is not None:
                    progress("waiting for another process that prepares the same weights", 0, None)
                lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _sound_or_removed(self, key: str) -> Path | None:
        """Return the entry, or remove it if it is damaged. The caller must hold the lock."""
        entry = self.entries / key
        if not entry.is_dir():
            return None
        damage = _damage(entry)
        if damage is None:
            return entry
        warnings.warn(
            f"The cached weights in '{entry}' are damaged ({damage}); they are made again.",
            PacelineWarning,
            stacklevel=2,
        )
        with self._writable():
            trash = self.entries / f".trash-{key}-{uuid.uuid4().hex[:8]}"
            os.replace(entry, trash)
            shutil.rmtree(trash)
        return None

    def _build(self, key: str, make: Callable[[Path], None]) -> Path:
        """Make the entry, after removing incomplete ones of earlier processes. The caller must hold the lock."""
        for left_behind in [*self.entries.glob(f".building-{key}-*"), *self.entries.glob(f".trash-{key}-*")]:
            shutil.rmtree(left_behind, ignore_errors=True)
        building = self.entries / f".building-{key}-{uuid.uuid4().hex[:8]}"
        try:
            with self._writable():
                building.mkdir()
                make(building)
                _seal(building)
                os.replace(building, self.entries / key)
        except BaseException:  # also after Ctrl-C: no incomplete entry remains
            shutil.rmtree(building, ignore_errors=True)
            raise
        return self.entries / key


def _seal(folder: Path) -> None:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: {"size": (folder / name).stat().st_size, "sha256": file_sha256(folder / name)} for name in names}
    write_json(folder / MANIFEST, {"files": files})


def _damage(entry: Path) -> str | None:
    """Return what is wrong with an entry. Files are hashed the first time and when their modification time changes."""
    manifest = read_json(entry / MANIFEST)
    if manifest is None or not isinstance(manifest.get("files"), dict):
        return "its manifest cannot be read"
    known = read_json(entry / VERIFIED) or {}
    times: dict[str, int] = {}
    for name, expected in manifest["files"].items():
        try:
            state = (entry / name).stat()
            if state.st_size != expected["size"]:
                return f"{name} has {state.st_size} bytes instead of {expected['size']}"
            if not _unchanged(known.get(name), state.st_mtime_ns) and file_sha256(entry / name) != expected["sha256"]:
                return f"{name} does not match its checksum"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        except (KeyError, TypeError):
            return "its manifest cannot be read"
        times[name] = state.st_mtime_ns
    if times != known:
        with suppress(OSError):  # in a read-only cache the files are hashed at every load
            write_json(entry / VERIFIED, times)
    return None


def _unchanged(known: object, found: int) -> bool:
    """Return True if this is the stored time. Layers of a container image keep whole seconds only."""
    if not isinstance(known, int):
        return False
    return known == found or (found % _SECOND == 0 and known // _SECOND == found // _SECOND)


@contextmanager
def replacing(path: Path, what: str = "", left: str = "what was there is untouched") -> Iterator[Path]:
    """Yield a file to write. It replaces `path` when it is complete; if it cannot be written, the old file stays."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            part.unlink()
        problem = getattr(error, "strerror", None) or error
        raise LoadError(f"{what}'{path}' cannot be written: {problem}; {left}.") from error


def read_json(path: Path) -> dict | None:
    """Return the JSON object in a file; None if it is absent or damaged."""
    try:
        content = parse_json(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_json(path: Path, content: dict) -> None:
    """Write another file, then rename it, so that a reader never sees an incomplete file."""
    beside = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    beside.write_text(json.dumps(content, indent=1), "utf-8")
    os.replace(beside, path)
