"""The examples of docs/serving.md run as they stand, on a server with a small model. Its tables name what there is."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import paceline
from paceline.cli.main import app
from paceline.serve.engine_thread import EngineThread
from paceline.serve.openai.api_models import ChatRequest, CompletionRequest, ResponsesRequest, StreamOptions
from paceline.serve.server_options import ServerOptions
from paceline.serve.service import Service
from tests.cli.conftest import save_model

from .fakes import Running, listening

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
MODEL, URL = "smollm2-135m", "http://localhost:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def commands(program: str) -> list[str]:
    """The commands of the page that run a program; one may have several lines."""
    return [block for block in blocks("sh") if block.startswith(program)]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = paceline.load(str(save_model(tmp_path_factory.mktemp("model") / "tiny")))
    decoder = paceline.SpeculativeDecoder(model, "suffix", gamma=4)
    service = Service(
        lambda deliver: EngineThread(decoder, slots=4, max_model_len=512, max_queued=8, deliver=deliver),
        model.tokenizer,
        ServerOptions(port=0, log_requests=False, drain_seconds=2, served_model_name=(MODEL,)),
    )
    with listening(service) as (address, _):
        yield address


# ---- examples


def test_every_block_is_of_a_kind_that_is_run() -> None:
    assert set(re.findall(r"^```(\w+)$", PAGE, re.MULTILINE)) == {"sh", "python", "js"}
    started = ("paceline serve", "PACELINE_", "curl", "pip install")
    assert all(line.startswith((*started, " ", "}")) for block in blocks("sh") for line in block.splitlines())


def test_the_flags_of_the_page_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("serve.toml").write_text("[serve]\nport = 81\n")
    lines = [line for block in blocks("sh") for line in block.splitlines() if "paceline serve" in line]
    assert len(lines) >= 4
    for line in lines:
        words = shlex.split(line)
        at = words.index("paceline")
        for name, value in (word.split("=", 1) for word in words[:at]):
            monkeypatch.setenv(name, value)
        result = CliRunner().invoke(app, [*words[at + 1 :], "--print-config"], prog_name="paceline")
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith("[serve]")
    flags = set(re.findall(r"`(--[a-z-]+)", PAGE)) - {"--server", "--target", "--draft"}
    shown = CliRunner().invoke(app, ["serve", "--help"], prog_name="paceline", env={"COLUMNS": "200"}).stdout
    assert {flag for flag in flags if flag not in shown} == set()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("command", commands("curl"))
def test_a_curl_example_is_answered(command: str, url: str) -> None:
    assert URL in command
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", command.replace(URL, url)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert '"error"' not in done.stdout
    if "json_schema" in command:
        content = json.loads(json.loads(done.stdout)["choices"][0]["message"]["content"])
        assert set(content) == {"continent", "is_long"}
    if "include_rounds" in command:
        events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line.startswith("data: {")]
        rounds = [entry for event in events for entry in json.loads(event).get("rounds", ())]
        assert any(entry["drafted"] for entry in rounds)
        assert all(entry["seconds"] > 0 for entry in rounds)


def test_the_python_example_runs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    exec(compile(code.replace(URL, url), "serving.md", "exec"), space := dict[str, Any]())
    space["client"].close()
    written, statistics = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert written
    assert "num_spec_steps" in statistics


def node_modules() -> Path | None:
    """The folder with the npm package `openai`."""
    places = [
        *os.environ.get("NODE_PATH", "").split(os.pathsep),
        "/usr/lib/node_modules",
        "/usr/local/lib/node_modules",
    ]
    return next((Path(place) for place in places if place and (Path(place) / "openai").is_dir()), None)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.skipif(
    node_modules() is None, reason="the npm package openai is not installed (NODE_PATH names its folder)"
)
def test_the_node_example_runs(url: str, tmp_path: Path) -> None:
    (code,) = blocks("js")
    modules = node_modules()
    assert modules is not None
    (tmp_path / "node_modules").symlink_to(modules, target_is_directory=True)
    (tmp_path / "example.mjs").write_text(code.replace(URL, url), encoding="utf-8")
    done = subprocess.run(["node", "example.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


# ---- tables


def test_the_page_names_every_parameter() -> None:
    known = {name for kind in (ChatRequest, CompletionRequest, ResponsesRequest) for name in kind.model_fields}
    known |= set(StreamOptions.model_fields)
    assert {name for name in known if f"`{name}`" not in PAGE} == set()
    table = PAGE.split("## Parameters")[1].split("\n\n`/v1/responses`")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named <= known


def test_the_page_names_every_metric(server: Running) -> None:
    text = server.get("/metrics").text
    names = set(re.findall(r"^# TYPE paceline:(\w+?)(?:_total)? (?:counter|gauge|histogram)$", text, re.MULTILINE))
    names = {name for name in names if not name.endswith("_created")}
    table = PAGE.split("## Metrics")[1]
    assert set(re.findall(r"`(\w+)`", table.split("|---|---|")[1].split("\n\n")[0])) == names


def test_the_page_names_every_endpoint(server: Running) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    table = PAGE.split("## Endpoints")[1].split("## Parameters")[0]
    named = set(re.findall(r"`(/[\w/{}]+)`", table)) - {"/v1", "/openapi.json"}
    assert named == {path.replace("{model}", "{id}") for path in paths}
