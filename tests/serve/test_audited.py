"""`paceline audit --server` on our own server with a small model."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

import paceline
from paceline.audit.server_audit import ServerPlan, Target, audit_server
from paceline.cli.main import app
from paceline.serve.engine_thread import EngineThread
from paceline.serve.server_options import ServerOptions
from paceline.serve.service import Service

from .collected import small_model
from .fakes import TEMPLATE, listening

KEY = "sk-tiny"
PROMPTS = ["abc abc abc abc", "the cat sat on the mat. the cat", "one two three one two three one"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    model = small_model()
    model.tokenizer.chat_template = TEMPLATE
    decoder = paceline.SpeculativeDecoder(model, "suffix", gamma=4)
    service = Service(
        lambda deliver: EngineThread(decoder, slots=4, max_model_len=None, max_queued=64, deliver=deliver),
        model.tokenizer,
        ServerOptions(port=0, log_requests=False, drain_seconds=2, api_key=(KEY,)),
    )
    with listening(service) as (address, _):
        yield address


def test_our_server_keeps_its_promise(url: str) -> None:
    report = audit_server(Target(url, KEY), prompts=PROMPTS, plan=ServerPlan(requests=16, concurrency=6, tokens=16))
    assert report.verdict == "identical: 80 of 80 texts, and the log-probabilities of all 40 that have them"
    assert report.untested == []
    assert report.switched
    assert report.warm.total("drafted")
    assert report.again.total("cached")


def test_two_servers(url: str) -> None:
    result = CliRunner().invoke(
        app,
        ["audit", "--server", url, "--api-key", KEY, "--against", url, "--against-api-key", KEY, "--requests", "4",
         "--tokens", "4", "--json"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["verdict"].startswith("identical: 24 of 24 texts")
    assert told["reference"] == "other server, alone"
    assert KEY not in result.output
