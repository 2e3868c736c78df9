"""Private environments of the tools, kept between runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.third_party.suites import Checkout

_NO_INDEX = ("NewConnectionError", "Network is unreachable", "Temporary failure in name resolution", "ENOTFOUND",
             "ConnectTimeoutError", "EAI_AGAIN", "ECONNREFUSED")  # fmt: skip
_SECONDS = 1800


class AbsentError(Exception):
    """What a suite needs is not on this machine."""


def python_environment(folder: Path, packages: Sequence[str]) -> Path:
    """The interpreter of a virtual environment with these packages. It is made again if the packages change."""
    python = folder / "bin" / "python"
    if _is_made(folder, packages):
        return python
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages])
    _mark(folder, packages)
    return python


def node_environment(folder: Path, packages: Sequence[str]) -> Path:
    """A folder whose node_modules has these packages."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise AbsentError("node and npm are not installed")
    if not _is_made(folder, packages):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *packages])
        _mark(folder, packages)
    return folder


def version_in(python: Path, package: str) -> str:
    """The version of a package in a Python environment."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def copied(checkout: Checkout, folder: Path) -> Path:
    """A new copy of the files of a checkout. Nothing is written into the checkout itself."""
    source = _folder_of(checkout)
    shutil.rmtree(folder, ignore_errors=True)
    for name in checkout.files:
        if not (source / name).exists():
            raise AbsentError(f"{checkout.variable}={source} has no {name}")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (source / name).is_dir():
            shutil.copytree(source / name, folder / name)
        else:
            shutil.copy2(source / name, folder / name)
    return folder


def commit_of(checkout: Checkout) -> str:
    """The commit of a checkout, or that it is none of git."""
    source = _folder_of(checkout)
    if not (source / ".git").exists():
        return "no commit"
    command = ["git", "-C", str(source), "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def _folder_of(checkout: Checkout) -> Path:
    given = os.environ.get(checkout.variable, "")
    if not given:
        raise AbsentError(f"{checkout.variable} is not set")
    return Path(given).expanduser().resolve()


def _stamp(folder: Path) -> Path:
    return folder / "installed.txt"


def _is_made(folder: Path, packages: Sequence[str]) -> bool:
    stamp = _stamp(folder)
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == "\n".join(packages)


def _mark(folder: Path, packages: Sequence[str]) -> None:
    _stamp(folder).write_text("\n".join(packages), encoding="utf-8")


def _run(command: Sequence[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    if ended.returncode == 0:
        return
    output = ended.stdout + ended.stderr
    if any(sign in output for sign in _NO_INDEX):
        raise AbsentError("the package index cannot be reached")
    raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}:\n{output[-2000:]}")
