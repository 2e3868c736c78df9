"""A long benchmark on a machine with many cores: the prompts in parts, a part per slice of cores, all at the same time.

    python -m tests.real.in_slices 8 spec_bench_dev.jsonl OUT --seconds 560 -- --run auto --peer hf

The candidates still take turns inside one slice. A second call continues with what is
missing; after `--seconds` each slice is interrupted and keeps what it has. `OUT/bench.jsonl` holds all of it, for
`paceline bench --report`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def parts_of(prompts: Path, slices: int) -> list[list[str]]:
    """Dealt out so that every slice, and every beginning of one, has some of each category."""
    by_category: dict[str, list[str]] = {}
    for line in prompts.read_text("utf-8").splitlines():
        if line.strip():
            by_category.setdefault(json.loads(line).get("category", ""), []).append(line)
    kinds = list(by_category.values())
    lines = [own[place] for place in range(max(map(len, kinds))) for own in kinds if place < len(own)]
    return [lines[start::slices] for start in range(slices)]


def start(number: int, slices: int, out: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    cores = sorted(os.sched_getaffinity(0))
    wide = len(cores) // slices
    own = cores[number * wide : (number + 1) * wide]
    command = [sys.executable, "-m", "paceline", "bench", "--prompts", str(out / f"part{number}.jsonl"),
               "--out", str(out / f"slice{number}"), "--resume", "--threads", str(wide), "--force",
               *arguments]  # fmt: skip
    log = (out / f"log{number}.txt").open("w")
    environment = {**os.environ, "OMP_NUM_THREADS": str(wide)}
    return subprocess.Popen(
        command, stdout=log, stderr=log, env=environment, preexec_fn=lambda: os.sched_setaffinity(0, own)
    )


def before_and_after(words: list[str]) -> tuple[list[str], list[str]]:
    """What is ours and what is `paceline bench`'s: argparse of Python 3.12 loses a list that follows `--`."""
    here = words.index("--") if "--" in words else len(words)
    return words[:here], words[here + 1 :]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slices", type=int)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9)
    own, arguments = before_and_after(sys.argv[1:])
    output = parser.parse_args(own)
    output.out.mkdir(parents=True, exist_ok=True)
    for number, lines in enumerate(parts_of(output.prompts, output.slices)):
        (output.out / f"part{number}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    until = time.monotonic() + output.seconds
    running = [start(number, output.slices, output.out, arguments) for number in range(output.slices)]
    for process in running:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
    codes = [process.wait() for process in running]
    records = [output.out / f"slice{number}" / "bench.jsonl" for number in range(output.slices)]
    whole = "".join(record.read_text("utf-8") for record in records if record.exists())
    (output.out / "bench.jsonl").write_text(whole, "utf-8")
    print(f"exit codes {codes}; {whole.count(json.dumps('run'))} runs in {output.out / 'bench.jsonl'}")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
