"""`python -m tests.third_party [NAME...] [--list]`: run the suites on our server, and print one table.

Exits with 1 if a case fails. What is absent is skipped with a line that says why.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from tests.third_party.checks.server_process import Started, serving
from tests.third_party.environments import (
    AbsentError,
    commit_of,
    copied,
    node_environment,
    python_environment,
    version_in,
)
from tests.third_party.outcomes import Outcome, read_junit, table
from tests.third_party.suites import SUITES, Suite
from tests.third_party.tiny_model import smollm2_folder, tiny_model

HERE = Path(__file__).resolve().parent
KEPT = HERE.parents[1] / "build" / "third-party"
_SECONDS = 1800  # for one suite


class Servers:
    """The servers of all suites, by their flags. A server is started when a suite first needs it, and kept."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._running = stack, dict[tuple[str, ...], Started]()

    def url(self, flags: tuple[str, ...]) -> str:
        if flags not in self._running:
            log = KEPT / f"server{len(self._running)}.log"
            self._running[flags] = self._stack.enter_context(serving(flags, log))
        server = self._running[flags]
        if server.process.poll() is not None:
            raise RuntimeError(f"The server has ended with {server.process.returncode}; see {server.log}.")
        return server.url


def run(suite: Suite, servers: Servers) -> Outcome:
    """Run one suite in its environment."""
    begun = time.monotonic()
    folder = KEPT / suite.name
    work, report, version = folder / "work", folder / "report.xml", ""
    work.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    try:
        theirs = copied(suite.checkout, folder / "theirs") if suite.checkout else None
        make = node_environment if suite.kind == "node" else python_environment
        place = make(folder / "environment", suite.packages)
    except AbsentError as absent:
        return Outcome(suite.name, absent=str(absent))
    version = commit_of(suite.checkout) if suite.checkout else _version(suite, place)
    seen = _environment(suite, work, theirs)
    for name, flags in suite.servers.items():
        seen["PACELINE_URL" + (f"_{name.upper()}" if name else "")] = servers.url((*_model_flags(suite), *flags))
    _check(suite, place, folder, theirs, seen)
    if not report.exists():
        raise RuntimeError(f"{suite.name} has written no report; see {folder / 'output.txt'}.")
    passed, failed, skipped, remark = read_junit(report)
    return Outcome(suite.name, version, passed, failed, skipped, time.monotonic() - begun, remark)


def _version(suite: Suite, place: Path) -> str:
    return suite.packages[0].rpartition("@")[2] if suite.kind == "node" else version_in(place, suite.tool)


def _model_flags(suite: Suite) -> tuple[str, ...]:
    if suite.model == "tiny":
        return ("--target", str(tiny_model(KEPT / "tiny-model")), "--served-model-name", "tiny")
    return ("--target", suite.model, "--max-model-len", "2048")


def _environment(suite: Suite, work: Path, theirs: Path | None) -> dict[str, str]:
    """What a check sees: the name of the model, folders, our interpreter, and no way to the hub."""
    checks = HERE / "checks"
    own = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return {
        **own,
        "PACELINE_MODEL": suite.model,
        "PACELINE_WORK": str(work),
        "PACELINE_THEIRS": str(theirs or ""),
        "PACELINE_TOKENIZER": str(smollm2_folder()),
        "PACELINE_PYTHON": sys.executable,
        "PACELINE_PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "PYTHONPATH": os.pathsep.join(map(str, [checks, *([checks / suite.stubs] if suite.stubs else [])])),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HOME": str(work / "hf"),
        **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "DO_NOT_TRACK"), "1"),
    }


def _check(suite: Suite, place: Path, folder: Path, theirs: Path | None, seen: dict[str, str]) -> None:
    """Run the checks. Their output goes to a file, and its end to the screen if one fails."""
    report, output, where = folder / "report.xml", folder / "output.txt", folder / "work"
    checks = str(HERE / "checks" / suite.checks)
    if suite.kind == "node":
        command = ["node", "--test", "--test-reporter=junit", f"--test-reporter-destination={report}", checks]
        seen["PACELINE_PACKAGES"] = str(place)
    else:
        command = [str(place), "-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider", f"--junitxml={report}"]
        if theirs is not None and suite.plugin:
            where = theirs / suite.root
            command += ["-p", suite.plugin, suite.checks]
        else:
            command += ["-p", "shared", "--noconftest", checks]
        settings = where / "pytest.ini"  # else pytest would take ours
        command += [f"--rootdir={where}", "-c", str(settings) if settings.exists() else os.devnull]
    with output.open("wb") as lines:
        ended = subprocess.run(command, cwd=where, env=seen, stdout=lines, stderr=subprocess.STDOUT, timeout=_SECONDS)
    if ended.returncode:
        print(output.read_text(encoding="utf-8", errors="replace")[-8000:])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.third_party", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="suites to run; all by default")
    parser.add_argument("--list", action="store_true", help="print the names of the suites")
    given = parser.parse_args()
    known = {suite.name: suite for suite in SUITES}
    if given.list:
        print("\n".join(known))
        return 0
    unknown = [name for name in given.names if name not in known]
    if unknown:
        parser.error(f"there is no suite {unknown[0]!r}; use {', '.join(known)}")
    outcomes = []
    with ExitStack() as stack:
        servers = Servers(stack)
        for suite in [known[name] for name in given.names] or SUITES:
            print(f"{suite.name} ...", flush=True)
            outcomes.append(run(suite, servers))
            print(" | ".join(outcomes[-1].cells()), flush=True)
    print(table(outcomes))
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
