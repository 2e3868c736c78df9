"""`python -m tests.mutants [NAME...] [--list]`: apply each mutant to a copy of the package and run the test it names.

Exits with 1 if a mutant survives or cannot be judged.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants import PACKAGE, ROOT, Mutant, all_mutants

COPIES = ROOT / "build" / "mutants"  # kept: numba finds the kernels that it compiled there before
PARALLEL = 2
SECONDS = 300  # for one test


def copy_package(number: int) -> Path:
    """A copy of the Python files; other files are links."""

    def copy(source: str, target: str) -> None:
        if source.endswith(".py"):
            shutil.copy2(source, target)
        else:
            os.symlink(source, target)

    folder = COPIES / str(number)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(PACKAGE, folder / "paceline", copy_function=copy, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def judge(mutant: Mutant, folder: Path) -> str:
    """Run the named test with the mutant in place: "killed", "survived", "not applicable" or "no such test"."""
    path = folder / "paceline" / mutant.file
    try:
        original = path.read_text(encoding="utf-8")
        changed = mutant.applied(original)
    except (ValueError, OSError):
        return "not applicable"
    stamp = path.stat()
    try:
        path.write_text(changed, encoding="utf-8")
        return run(mutant.test, folder)
    finally:
        path.write_text(original, encoding="utf-8")
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # numba compares times


def run(test: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", test]
    try:
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "killed"  # it does not end
    # 0: all passed; 1: some failed; 2: the module of the test could not be imported; 4, 5: there is no such test
    return {0: "survived", 1: "killed", 2: "killed"}.get(result.returncode, "no such test")


def main(arguments: list[str]) -> int:
    mutants = all_mutants()
    if unknown := set(arguments) - {mutant.name for mutant in mutants} - {"--list"}:
        print(f"No mutant is called {', '.join(sorted(unknown))}; --list prints the names.")
        return 2
    if "--list" in arguments:
        print(*(f"{mutant.name:40} {mutant.file:40} {mutant.test}" for mutant in mutants), sep="\n")
        return 0
    chosen = [mutant for mutant in mutants if not arguments or mutant.name in arguments]
    folders: SimpleQueue[Path] = SimpleQueue()
    for number in range(PARALLEL):
        folders.put(copy_package(number))

    def judged(mutant: Mutant) -> str:
        folder, start = folders.get(), time.monotonic()
        try:
            verdict = judge(mutant, folder)
        finally:
            folders.put(folder)
        print(f"{verdict:15} {time.monotonic() - start:5.1f} s  {mutant.name}", flush=True)
        return verdict

    with ThreadPoolExecutor(PARALLEL) as pool:
        verdicts = list(pool.map(judged, chosen))
    print(f"{verdicts.count('killed')} of {len(verdicts)} mutants killed")
    for mutant, verdict in zip(chosen, verdicts, strict=True):
        if verdict != "killed":
            print(f"{verdict}: {mutant.name} ({mutant.file}), by {mutant.test}")
    return int(any(verdict != "killed" for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
