"""`paceline serve`: options become a server, on an engine without a model."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cli.command_options import PlaygroundOptions
from paceline.cli.commands.serve import beginning
from paceline.core.costs import Costs
from paceline.serve.service import Service
from tests.serve.fakes import FakeEngine

from .conftest import CONTEXT, refusal, run


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Service, dict[str, Any]]]:
    """The services that the command would run, each with the arguments of its engine."""
    found: list[tuple[Service, dict[str, Any]]] = []
    arguments: list[dict[str, Any]] = []

    def engine(decoder: Any, *, deliver: Any, **given: Any) -> FakeEngine:
        arguments.append({"decoder": decoder, **given})
        return FakeEngine(deliver, slots=given["slots"], context=given["max_model_len"])

    def run_service(service: Service, started: Callable[[str], None], sockets: list[Any]) -> None:
        started("http://127.0.0.1:1")
        found.append((service, arguments[-1]))
        service.close()

    monkeypatch.setattr("paceline.cli.commands.serve.bind_sockets", lambda options: [])  # the port may be in use
    monkeypatch.setitem(sys.modules, "paceline.serve.engine_thread", SimpleNamespace(EngineThread=engine))
    monkeypatch.setattr("paceline.serve.http_server.serve", run_service)
    return found


def test_the_command_starts_a_server(target: str, served: list[tuple[Service, dict[str, Any]]]) -> None:
    result = run("serve", "--target", target, "--draft", "prompt-lookup", "--gamma", "3", "--log-requests")
    assert result.exit_code == 0, result.output
    ((service, given),) = served
    assert (given["slots"], given["max_model_len"], given["max_queued"]) == (8, CONTEXT, 256)
    assert (given["decoder"].drafter.name, given["decoder"].gamma) == ("prompt-lookup", 3)
    assert (service.options.host, service.options.port) == ("127.0.0.1", 8000)
    told = result.stderr.splitlines()
    assert "fake with nothing" in told
    assert told[1] == "8 slots of 2,048 tokens, 0 MiB of KV cache, which is reserved and keeps prefixes"
    assert told[2] == "temperature 1 where a request gives none: OpenAI's default, because the model states none"
    assert told[3] == "the bits of a text are the same alone and in any batch, with a cold and a warm cache"
    assert told[-1] == "fake at http://127.0.0.1:1"


def test_every_option_arrives(
    target: str, served: list[tuple[Service, dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.cli.commands.serve.check_tls", lambda options: None)  # the files are empty
    (tmp_path / "keys").write_text("two\n")
    for name in ("cert", "key"):
        (tmp_path / name).write_text("")
    flags = ["--host", "0.0.0.0", "--port", "81", "--max-num-seqs", "3", "--max-model-len", "100", "--max-queued", "5",
             "--max-body-bytes", "9000", "--body-seconds", "7", "--request-seconds", "8", "--drain-seconds", "9",
             "--keep-alive-seconds", "4", "--api-key", "one", "--api-key-file", str(tmp_path / "keys"),
             "--metrics-prefix", "vllm", "--cors-origin", "https://a", "--cors-origin", "https://b",
             "--served-model-name", "gpt", "--ssl-certfile", str(tmp_path / "cert"), "--ssl-keyfile",
             str(tmp_path / "key"), "--no-log-requests", "--log-prompts"]  # fmt: skip
    result = run("serve", "--target", target, "--draft", "none", *flags)
    assert result.exit_code == 0, result.output
    ((service, given),) = served
    options = service.options
    assert (given["slots"], given["max_model_len"], given["max_queued"]) == (3, 100, 5)
    assert (options.host, options.port, options.max_body_bytes, options.body_seconds) == ("0.0.0.0", 81, 9000, 7)
    assert (options.request_seconds, options.drain_seconds, options.keep_alive_seconds) == (8, 9, 4)
    assert options.keys() == {"one", "two"}
    assert (options.metrics_prefix, options.cors_origin) == ("vllm", ("https://a", "https://b"))
    assert (service.names, options.log_requests, options.log_prompts) == (("gpt",), False, True)
    assert (options.ssl_certfile, options.ssl_keyfile) == (tmp_path / "cert", tmp_path / "key")
    assert result.stderr.splitlines()[-1] == "gpt at http://127.0.0.1:1"


def test_keys_come_from_the_environment_and_are_not_shown(
    target: str, served: list[tuple[Service, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "from-outside")
    result = run("serve", "--target", target, "--draft", "none")
    assert result.exit_code == 0, result.output
    assert served[0][0].options.keys() == {"from-outside"}
    shown = run("serve", "--print-config").stdout
    assert "# api-key is set and not shown  # environment" in shown.splitlines()
    assert "from-outside" not in shown


def test_the_default_temperature_is_the_models(target: str, served: list[Any], tmp_path: Path) -> None:
    own = shutil.copytree(target, tmp_path / "own")
    (own / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.25}')
    for folder, expected, source in ((own, 0.25, "the model's generation config"), (Path(target), 1.0, "OpenAI's")):
        result = run("serve", "--target", str(folder), "--draft", "none")
        assert result.exit_code == 0
        assert served[-1][1]["default_temperature"] == expected
        assert f"where a request gives none: {source}" in result.stderr


def test_the_start_lines_say_what_ties_depend_on(target: str, served: list[Any]) -> None:
    ties = "only where two tokens tie in float32, a text can depend on the batch and the draft; --strict prevents that"
    same = "the bits of a text are the same alone and in any batch"
    for more, expected in ((("--runner", "eager"), ties), (("--runner", "eager", "--strict"), same), ((), same)):
        lines = run("serve", "--target", target, "--draft", "none", *more).stderr.splitlines()
        assert any(line.startswith(expected) for line in lines), lines


def test_the_start_lines_say_what_guided_targets_lack(
    target: str, served: list[tuple[Service, dict[str, Any]]]
) -> None:
    run("serve", "--target", target, "--draft", "none")
    ((service, given),) = served
    lines = list(beginning(replace(service.engine.facts, reserves=False), given["decoder"]))
    assert "2,048 tokens; for a target with two branches the KV cache grows" in lines[1]


def test_the_start_lines_say_what_speed_to_expect(
    target: str, served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs: list[Costs | None] = [None, Costs({1: {1: 1.0, 8: 1.0}}), Costs({1: {1: 1.0, 8: 1.0}}, 0.0, {"suffix": 0.1})]
    monkeypatch.setattr("paceline.models.pass_timing.known_costs", lambda lm: costs.pop(0))
    monkeypatch.setattr("paceline.cli.expected_speed.measured_before", lambda decoder: None)
    share = "if 60% / 80% / 90% of γ=4 drafted tokens are accepted; `paceline doctor` measures it"
    expected = [
        "expected speed-up: not measured on this machine yet; `paceline doctor` measures it",
        f"expected speed-up at most 2.3 / 3.4 / 4.1 {share}",
        f"expected speed-up 1.6 / 2.4 / 2.9 {share}",
    ]
    for line in expected:
        assert line in run("serve", "--target", target, "--draft", "suffix").stderr.splitlines()
    assert "speed-up" not in run("serve", "--target", target, "--draft", "none").stderr


def test_without_a_key_an_open_address_is_told(target: str, served: list[Any]) -> None:
    told = run("serve", "--target", target, "--draft", "none", "--host", "0.0.0.0").stderr
    assert "there is no --api-key" in told
    assert "--api-key" not in run("serve", "--target", target, "--draft", "none", "--host", "::1").stderr


def test_what_is_refused_before_anything_listens(target: str, served: list[Any], tmp_path: Path) -> None:
    assert "2,048" in refusal("serve", "--target", target, "--draft", "none", "--max-model-len", "4096", code=2)
    assert "belong together" in refusal("serve", "--ssl-certfile", "a.pem", code=2)
    assert "cannot be read" in refusal("serve", "--api-key-file", str(tmp_path / "none"), code=2)
    assert "at most 65,535" in refusal("serve", "--port", "70000", code=2)
    assert "--tp-plan" in refusal("serve", "--tp-plan", "auto", code=2)
    assert "did you mean" in refusal("serve", "--target", "smollm2-135n", code=2).lower()
    assert not served


def test_an_address_that_is_taken_or_wrong_is_refused_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cli.commands.serve.open_decoder", lambda *_: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert refusal("serve", "--port", str(port), code=2) == (
            f"error: Port {port} of 127.0.0.1 is in use; choose another one with --port, or 0 for a free one."
        )
    assert "is no address of this machine" in refusal("serve", "--host", "no.such.host.invalid", "--port", "0", code=2)
    assert "cannot listen on 192.0.2.1" in refusal("serve", "--host", "192.0.2.1", "--port", "0", code=2)


def test_wrong_tls_files_are_refused_before_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cli.commands.serve.open_decoder", lambda *_: pytest.fail("loaded"))
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    for cert, key, expected in (
        (tmp_path / "none.pem", text, "--ssl-certfile"),
        (text, tmp_path / "none.pem", "--ssl-keyfile"),
        (text, text, "are no certificate and its unencrypted key"),
    ):
        files = ("--ssl-certfile", str(cert), "--ssl-keyfile", str(key))
        assert expected in refusal("serve", "--port", "0", *files, code=2)


def test_without_the_packages_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.serve.server_options.find_spec", lambda name: None)
    told = refusal("serve", code=3)
    assert "pip install 'paceline[serve]'" in told


# ---- the playground


def test_the_playground_opens_its_page(
    target: str, served: list[tuple[Service, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = list[str]()
    monkeypatch.setattr("paceline.cli.commands.playground.bind_sockets", lambda options: [])
    monkeypatch.setattr("paceline.cli.commands.playground._open", opened.append)
    result = run("playground", "--target", target, "--draft", "suffix", "--browser")
    assert result.exit_code == 0, result.output
    assert opened == ["http://127.0.0.1:1"]
    ((service, _),) = served
    assert service.others is not None
    assert service.what_if is not None
    assert "the playground: http://127.0.0.1:1/" in result.stderr.splitlines()


def test_the_playground_opens_no_browser_if_asked(
    target: str, served: list[tuple[Service, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.cli.commands.playground.bind_sockets", lambda options: [])
    result = run("playground", "--target", target, "--draft", "suffix", "--no-browser")
    assert "open http://127.0.0.1:1 in a browser" in result.stderr
    assert "leave --no-playground out" in refusal("playground", "--target", target, "--no-playground", code=2)


def test_the_playground_takes_a_free_port_if_its_port_is_in_use() -> None:
    from paceline.cli.commands.playground import _bound

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (found,) = _bound(PlaygroundOptions(port=port))
        assert found.getsockname()[1] not in (0, port)
        found.close()


def test_a_page_that_no_browser_shows_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.cli.commands.playground import _try_to_open

    monkeypatch.setattr("webbrowser.open", lambda url: False)
    _try_to_open("http://127.0.0.1:1")
    assert "no browser was found; open http://127.0.0.1:1" in capsys.readouterr().err


def test_a_server_can_leave_the_playground_out(target: str, served: list[tuple[Service, dict[str, Any]]]) -> None:
    result = run("serve", "--target", target, "--draft", "suffix", "--no-playground", "--operator-key", "boss")
    assert result.exit_code == 0, result.output
    ((service, given),) = served
    assert (service.others, service.what_if, given["turns"]) == (None, None, None)
    assert service.options.operator_key == "boss"
    assert "the playground" not in result.stderr
    assert run("serve", "--target", target, "--playground", "--print-config").exit_code == 0
    assert "operator" in refusal("serve", "--operator-key", " ", code=2)
