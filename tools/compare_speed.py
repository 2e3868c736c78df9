"""Compare the speed of two checkouts on SmolLM2-135M, in turns in one run.

    python tools/compare_speed.py /path/to/old/src /path/to/new/src [--repeats 5] [--tokens 96]

Each checkout has one process. They decode the same chats one after the other, never at once. The table shows the median
time of the new checkout divided by that of the old one, per drafter, and whether all texts are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from statistics import median
from typing import Any

DRAFTS = ("none", "auto", "eagle")
CHATS = (
    "Name three rivers and say where they flow.",
    "Explain in a few sentences why the sky is blue.",
    "Write a short letter to a friend about a day at the sea.",
    "Repeat this list in reverse order: apple, pear, plum, cherry, fig, lemon.",
    "Write a Python function that returns the sum of the squares of a list.",
)

WORKER = """
import json, sys, time
import paceline

lm = paceline.load("smollm2-135m")
decoders = {}
for line in sys.stdin:
    asked = json.loads(line)
    draft = asked["draft"]
    if draft not in decoders:
        decoders[draft] = paceline.SpeculativeDecoder(lm, None if draft == "none" else draft)
    decoder = decoders[draft]
    decoder.forget()
    began = time.perf_counter()
    out = decoder.generate([{"role": "user", "content": asked["chat"]}], max_new_tokens=asked["tokens"])
    print(json.dumps({"seconds": time.perf_counter() - began, "tokens": out.tokens}), flush=True)
"""


class Checkout:
    """A process that decodes with the package in the folder `source`."""

    def __init__(self, source: str) -> None:
        environment = {**os.environ, "PYTHONPATH": source}
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def decode(self, draft: str, chat: str, tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"draft": draft, "chat": chat, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())  # type: ignore[no-any-return]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    checkouts = [Checkout(options.old), Checkout(options.new)]
    try:
        print(f"{'draft':8} {'new / old':>10} {'old s':>8} {'new s':>8}  same texts")
        for draft in DRAFTS:
            times: list[list[list[float]]] = [[[] for _ in CHATS] for _ in checkouts]
            same = True
            for repeat in range(options.repeats + 1):  # the first time is a warm-up
                for c, chat in enumerate(CHATS):
                    order = (0, 1) if (repeat + c) % 2 else (1, 0)
                    found = {side: checkouts[side].decode(draft, chat, options.tokens) for side in order}
                    same = same and found[0]["tokens"] == found[1]["tokens"]
                    if repeat:
                        for side, result in found.items():
                            times[side][c].append(result["seconds"])
            old, new = (sum(median(each) for each in side) for side in times)
            print(f"{draft:8} {new / old:10.3f} {old:8.2f} {new:8.2f}  {same}", flush=True)
    finally:
        for checkout in checkouts:
            checkout.close()


if __name__ == "__main__":
    main()
