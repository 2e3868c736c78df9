"""Two processes of torch.distributed for a test: forked from one that imported torch, or started by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# What torchrun sets. Each child runs the script as a program of its own.
_FORKED = """
import os, runpy, socket, sys
import torch, transformers, paceline
import torch.distributed
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2",
                   "LOCAL_WORLD_SIZE": "2"}
children = []
for rank in range(2):
    children.append(os.fork())
    if not children[-1]:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def run_both(script: Path, given: str, start: str, **environment: str) -> None:
    """Run a script with one argument in two processes. `start` is "fork" or "torchrun"."""
    first = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *(first if start == "torchrun" else ["-c", _FORKED]), str(script), given]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}
    )
    assert done.returncode == 0, done.stderr
