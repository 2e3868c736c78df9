"""`python -m tests.mutants [NAME...] [--list]`: apply each mutant to a copy of the package and run the test it names.

Exits with 1 if a mutant survives or cannot be judged. Each test runs in a process that is forked from this one, which
has imported torch and transformers already.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from tests.mutants import PACKAGE, ROOT, Mutant, all_mutants

COPIES = ROOT / "build" / "mutants"  # kept: numba finds the kernels that it compiled there before
PARALLEL = os.cpu_count() or 2
SECONDS = 300  # for one test
_BROKEN = 70


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


@dataclass
class Trial:
    """A mutant in one copy of the package, and the process that runs its test."""

    mutant: Mutant
    folder: Path
    path: Path
    original: str
    process: int
    began: float

    @staticmethod
    def start(mutant: Mutant, folder: Path) -> Trial:
        """Raises ValueError or OSError if the mutant does not apply."""
        path = folder / "paceline" / mutant.file
        original, times = path.read_text(encoding="utf-8"), path.stat()
        path.write_text(mutant.applied(original), encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))  # numba compares times
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            run(mutant.test, folder)
        return Trial(mutant, folder, path, original, process, time.monotonic())

    def verdict(self) -> str:
        """What became of the mutant; "" while its test runs."""
        ended, status = os.waitpid(self.process, os.WNOHANG)
        if not ended and time.monotonic() - self.began < SECONDS:
            return ""
        if not ended:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        times = self.path.stat()
        self.path.write_text(self.original, encoding="utf-8")
        os.utime(self.path, ns=(times.st_atime_ns, times.st_mtime_ns - 10**9))
        if not ended:
            return "no end"
        code = os.waitstatus_to_exitcode(status)
        # 1: some tests failed; 2: a module could not be imported; 4, 5: there is no such test
        return {0: "survived", 1: "killed", 2: "killed", 4: "no such test", 5: "no such test"}.get(code, "broken")


def run(test: str, folder: Path) -> None:
    """In the new process: the test, with the package of `folder`."""
    import pytest

    with open(folder / "output.txt", "wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)
    try:
        code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--assert=plain", test]))
    except BaseException:
        traceback.print_exc()
        code = _BROKEN
    sys.stdout.flush()
    os._exit(code)


def judge_all(mutants: list[Mutant]) -> list[str]:
    """The verdicts, in the order of the mutants."""
    free, running = [copy_package(number) for number in range(PARALLEL)], list[Trial]()
    verdicts: dict[str, str] = {}
    waiting = list(mutants)
    while waiting or running:
        while waiting and free:
            mutant, folder = waiting.pop(0), free.pop()
            try:
                running.append(Trial.start(mutant, folder))
            except (ValueError, OSError) as error:
                verdicts[mutant.name] = "not applicable"
                print(f"not applicable          {error}")
                free.append(folder)
        for trial in list(running):
            if verdict := trial.verdict():
                running.remove(trial)
                free.append(trial.folder)
                verdicts[trial.mutant.name] = verdict
                print(f"{verdict:15} {time.monotonic() - trial.began:5.1f} s {trial.mutant.name}", flush=True)
        time.sleep(0.05)
    return [verdicts[mutant.name] for mutant in mutants]


def main(arguments: list[str]) -> int:
    mutants = all_mutants()
    if unknown := set(arguments) - {mutant.name for mutant in mutants} - {"--list"}:
        print(f"No mutant is called {', '.join(sorted(unknown))}; --list prints the names.")
        return 2
    if "--list" in arguments:
        print(*(f"{mutant.name:50} {mutant.file:40} {mutant.test}" for mutant in mutants), sep="\n")
        return 0
    os.chdir(ROOT)
    os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    import pytest  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    torch.set_num_threads(1)
    assert "paceline" not in sys.modules
    chosen = [mutant for mutant in mutants if not arguments or mutant.name in arguments]
    verdicts = judge_all(chosen)
    print(f"{verdicts.count('killed')} of {len(verdicts)} mutants killed")
    for mutant, verdict in zip(chosen, verdicts, strict=True):
        if verdict != "killed":
            print(f"{verdict}: {mutant.name} ({mutant.file}), by {mutant.test}")
    return int(any(verdict != "killed" for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
