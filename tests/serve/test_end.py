"""The end of a server: signals drain it, and a second one ends it."""

from __future__ import annotations

import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from .fakes import serving
from .test_http import COMPLETIONS, HELLO

SERVER = """
import sys
from paceline.serve.http_server import serve
from paceline.serve.listening import bind_sockets
from paceline.serve.server_options import ServerOptions
from paceline.serve.service import Service
from tests.serve.fakes import FakeEngine, tokenizer

options = ServerOptions(port=0, drain_seconds=30, log_requests=False)
service = Service(lambda deliver: FakeEngine(deliver, pause=0.05, script=lambda job: "x" * 60), tokenizer(), options)
serve(service, lambda url: print(url, flush=True), bind_sockets(options))
print("ended", flush=True)
"""


@contextmanager
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its address."""
    root = Path(__file__).parents[2]
    started = subprocess.Popen([sys.executable, "-c", SERVER], cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None
        yield started, started.stdout.readline().strip()
    finally:
        started.kill()
        started.communicate()


def test_the_first_signal_drains_and_the_second_ends() -> None:
    short, long = ({**HELLO, "max_tokens": n, "ignore_eos": True, "stream": True} for n in (60, 900))
    with (
        process() as (server, url),
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
        client.stream("POST", COMPLETIONS, json=long) as endless,
        client.stream("POST", COMPLETIONS, json=short) as accepted,
    ):
        lines = accepted.iter_lines()
        next(lines)
        server.send_signal(signal.SIGTERM)
        assert list(lines)[-2] == "data: [DONE]"
        with pytest.raises(httpx.ConnectError):
            httpx.post(url + COMPLETIONS, json=HELLO, trust_env=False)
        assert next(line for line in endless.iter_lines() if line).startswith("data: {")  # it still drains
        server.send_signal(signal.SIGTERM)
        assert server.communicate(timeout=60)[0] == "ended\n"
        assert server.returncode == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_https(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
               "-addext", "subjectAltName=IP:127.0.0.1", "-out", str(cert), "-keyout", str(key)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    with serving({"ssl_certfile": cert, "ssl_keyfile": key}) as server:
        assert server.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=server.url, verify=trusted, trust_env=False) as client:
            assert client.post(COMPLETIONS, json=HELLO).status_code == 200
            with client.stream("POST", COMPLETIONS, json={**HELLO, "stream": True}) as response:
                assert list(response.iter_lines())[-2] == "data: [DONE]"
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/health", trust_env=False)
