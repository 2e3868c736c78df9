"""What only a process of its own can show: start-up, exit codes, pipes, a real terminal, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import httpx
import pytest

pytestmark = pytest.mark.usefixtures("looks_up")

pty = pytest.importorskip("pty", reason="there are no pseudo-terminals here")

COMMAND = [sys.executable, "-m", "paceline"]
PATIENCE = 600.0  # seconds: no measure of speed
SAY_MODULES = (
    "import sys, paceline.cli.main as cli\n"
    "try: cli.app(sys.argv[1:], prog_name='paceline')\n"
    "except SystemExit: print(*(name for name in ('torch', 'transformers', 'numpy', 'numba') if name in sys.modules))\n"
)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["--help"],
        ["generate", "--help"],
        ["chat", "--help"],
        ["generate", "--print-config"],
        ["serve", "--print-config"],
    ],
)
def test_what_needs_no_model_does_not_wait_for_torch(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAY_MODULES, *arguments], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.slow
def test_a_pipe_in_and_a_pipe_out(target: str) -> None:
    arguments = ["generate", "-", "--target", target, "--max-new-tokens", "8", "--ignore-eos"]
    done = subprocess.run([*COMMAND, *arguments], input=b"abc abc\n", capture_output=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert b"\x1b" not in done.stdout + done.stderr
    assert len([line for line in done.stderr.splitlines() if not line.startswith(b"compiling kernels")]) == 2


def test_the_exit_code_of_an_error() -> None:
    done = subprocess.run([*COMMAND, "generate", "x", "--gama", "1"], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: No such option: --gama")


@pytest.mark.slow
def test_a_terminal_gets_colours(target: str) -> None:
    arguments = [
        "generate",
        "abc abc abc",
        "--target",
        target,
        "--max-new-tokens",
        "24",
        "--ignore-eos",
        "--show-drafts",
    ]
    code, shown = _in_a_terminal([*COMMAND, *arguments])
    assert code == 0, shown
    assert "\x1b[34m" in shown
    assert "\x1b[9;31m" in shown
    assert "24 tokens in" in shown


def listen() -> None:
    """A job started in the background of a script inherits deaf ears for Ctrl-C; this one must hear it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_written(target: str) -> None:
    arguments = ["generate", "abc", "--target", target, "--max-new-tokens", "2000", "--ignore-eos", "--stream"]
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--draft", "none"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=listen,
    )
    assert process.stdout is not None
    first = process.stdout.read(20)  # so it is writing by now
    process.send_signal(signal.SIGINT)
    rest, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, told
    assert len(first + rest) > 20
    assert b"Traceback" not in told
    assert told.decode().splitlines()[-1].endswith("cancelled")


@pytest.mark.slow
def test_a_server_answers_and_ends_with_sigterm(target: str) -> None:
    arguments = ["serve", "--target", target, "--draft", "suffix", "--port", "0", "--api-key", "secret"]
    process = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line.strip())
        if " at http://" in line:
            break
    url, asked = lines[-1].rpartition(" ")[2], {"prompt": "abc abc abc", "max_tokens": 8, "seed": 3}
    with httpx.Client(
        base_url=url, headers={"Authorization": "Bearer secret"}, timeout=PATIENCE, trust_env=False
    ) as client:
        answer = client.post("/v1/completions", json=asked)
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=PATIENCE)[1].splitlines()
    assert process.returncode == 0, rest
    assert answer.json()["usage"]["completion_tokens"] == 8
    assert json.loads(rest[0])["completion_tokens"] == 8
    assert rest[1:] == ["0 sequences are in work and have 30 seconds; a second signal ends them"]


def _in_a_terminal(command: Sequence[str]) -> tuple[int, str]:
    """Run with stdout and stderr on a pseudo-terminal; the exit code and all that was shown."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    shown, until = b"", time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # Linux says so when the other side is closed
            break
        if not piece:
            break
        shown += piece
    os.close(leader)
    return process.wait(PATIENCE), shown.decode("utf-8", "replace")
