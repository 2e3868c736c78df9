"""What every request passes: paths, errors, keys, limits, logs, clients that go, and the end of the server."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.common.errors import InputError
from paceline.serve.middleware import LOGGER
from paceline.serve.server_options import ServerOptions, check_packages
from paceline.serve.token_texts import TokenTexts

from .fakes import Running, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"prompt": "Hello", "max_tokens": 20}


def wait_for(condition: Any) -> None:
    """Until it is so, however slow the machine is. What never happens fails after a minute."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, in OpenAI's shape: one sentence."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith((".", "?"))
    assert error["code"]
    return error  # type: ignore[no-any-return]


# ---- endpoints


def test_the_small_endpoints(server: Running) -> None:
    (card,) = server.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", 1024)
    assert server.get("/v1/models/fake").json() == card
    assert server.get("/models").json()["data"] == [card]
    assert error_of(server.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/ready").json()["status"] == "ready"
    assert server.get("/version").json()["version"]
    assert server.post("/completions", HELLO).json()["choices"]
    assert server.post("/chat/completions", {"messages": [{"role": "user", "content": "a"}]}).json()["choices"]


def test_tokens_and_texts(server: Running) -> None:
    ids = server.engine.tokenizer.encode("café")
    answer = server.post("/tokenize", {"prompt": "café", "return_token_strs": True}).json()
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 1024)
    assert answer["token_strs"][:3] == ["c", "a", "f"]
    assert server.post("/tokenize", {"content": "café"}).json()["tokens"] == ids
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "a"}]}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": chat}).json()["prompt"] == "user: a\nassistant:"
    assert server.post("/v1/detokenize", {"tokens": ids}).json() == {"prompt": "café", "content": "café"}
    info = server.get("/tokenizer_info").json()
    assert info["eos_token"] == "<eos>"
    assert "messages" in info["chat_template"]
    asked = {"messages": [{"role": "user", "content": "a"}]}
    pairs = ((CHAT, asked), ("/chat/completions", asked), ("/v1/responses", {"input": "a"}))
    counted = [server.post(f"{path}/input_tokens", body).json()["input_tokens"] for path, body in pairs]
    assert counted == [len("user: a\nassistant:")] * 3
    assert error_of(server.post("/tokenize", {}), 400)
    assert error_of(server.post("/detokenize", {"tokens": [10**6]}), 400)["param"] == "tokens"


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (CHAT, {"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        (CHAT, {"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "junk": 1}]}]},
         "messages.0.content.0.junk"),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 4097}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 4097}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 9}] * 2000}, "18,000 parts"),
        ("/v1/responses", {"input": [{"role": "user", "content": ""}] * 4097}, "input"),
        ("/v1/responses", {"input": [{"role": "user", "content": "a", "junk": 1}]}, "input.0.junk"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "junk": 1}]}]},
         "input.0.content.junk"),
        ("/v1/responses", {"input": [{"type": "function_call_output", "output": "a", "junk": 1}]}, "input.0.junk"),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_object", "strict": True}}},
         "text.format.strict"),
        ("/tokenize", {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "add_special": True}, "add_special"),
        ("/tokenize", {"prompt": "a", "add_special": True, "add_special_tokens": False}, "add_special_tokens"),
    ],
)  # fmt: skip
def test_a_field_without_an_effect_is_named(server: Running, path: str, body: dict[str, Any], name: str) -> None:
    messages = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {}
    error = error_of(server.post(path, messages | body), 400)
    assert name in error["message"]
    assert len(error["message"]) < 300


def test_long_work_is_not_done_in_the_event_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop serves every client: scans of many tokens belong to the worker, and tables to the start."""
    assert "_bytes" in vars(server.service.texts)
    workers: list[str] = []
    for name in ("token", "decode"):
        whole = getattr(TokenTexts, name)

        def spied(self: TokenTexts, given: Any, whole: Any = whole) -> Any:
            workers.append(threading.current_thread().name)
            return whole(self, given)

        monkeypatch.setattr(TokenTexts, name, spied)
    assert server.post("/tokenize", {"prompt": "ab", "return_token_strs": True}).json()["token_strs"] == ["a", "b"]
    assert server.post("/detokenize", {"tokens": [97]}).status_code == 200
    assert len(workers) == 3
    assert all(name.startswith("paceline-prompts") for name in workers), workers


def test_unknown_endpoints_and_methods(server: Running) -> None:
    for path in ("/v1/messages", "/api/generate", "/v1/embeddings", "/docs"):
        error = error_of(server.post(path, {}), 404)
        assert path in error["message"]
        assert error["code"] == "unknown_endpoint"
    assert "not allowed" in error_of(server.get(COMPLETIONS), 405)["message"]


def test_the_openapi_document_lists_the_endpoints(server: Running) -> None:
    found = server.get("/openapi.json").json()
    assert COMPLETIONS in found["paths"]
    assert CHAT in found["paths"]
    assert "temperature" in found["components"]["schemas"]["ChatRequest"]["properties"]


# ---- bodies


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"prompt": "a", "best_of": 3}, "best_of", "invalid_value"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "invalid_value"),
        ({"prompt": "a", "wizardry": 1}, "wizardry", "unknown_parameter"),
        ({"prompt": "a", "temperature": "hot"}, "temperature", "invalid_value"),
        ({"prompt": "a", "temperature": -1}, "temperature", "invalid_value"),
        ({"prompt": "a", "top_p": 2}, "top_p", "invalid_value"),
        ({"prompt": "a", "n": True}, "n", "invalid_value"),
        ({"prompt": "a", "n": 0}, "n", "invalid_value"),
        ({"prompt": "a", "n": 128}, "n", "invalid_value"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"prompt": "a", "max_tokens": 4, "min_tokens": 5}, "min_tokens", "invalid_value"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "invalid_value"),
        ({"prompt": "a", "stop": ""}, "stop", "invalid_value"),
        ({"prompt": "a", "stop_token_ids": [10**6]}, "stop_token_ids", "invalid_value"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"prompt": "a", "logit_bias": {"999999": 1}}, "logit_bias", "invalid_value"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, None, "invalid_value"),
        ({"prompt": "a", "stream": True, "stream_options": {"no": 1}}, "stream_options", "unknown_parameter"),
        ({"prompt": "a", "seed": 2**80}, "seed", "invalid_value"),
        ({"prompt": "a", "model": "other"}, "model", "model_not_found"),
        ({"prompt": "a", "speculative_config": {"method": "x"}}, "speculative_config", "unsupported_parameter"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [10**6]}, "prompt", "invalid_value"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({"prompt": [1.5]}, "prompt", "invalid_value"),
        ({"prompt": "a" * 1100}, "prompt", "context_length_exceeded"),
        ({"prompt": "a" * 1000, "max_tokens": 100}, "max_tokens", "context_length_exceeded"),
        ({"prompt": "a" * 10**6}, "prompt", "context_length_exceeded"),
        ({"prompt": ["a"] * 500}, "n", "invalid_value"),
        ({"prompt": "a", "stop": ["s"] * 10**6}, "stop", "invalid_value"),
        ({"prompt": [1.5] * 10**6}, "prompt", "invalid_value"),
        ({"prompt": "a", **{f"k{i}": 1 for i in range(10**5)}}, None, "invalid_value"),
        ({}, "prompt", "missing_parameter"),
        ([], None, "invalid_value"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(server: Running, body: Any, param: str | None, code: str) -> None:
    error = error_of(server.post(COMPLETIONS, body), 404 if code == "model_not_found" else 400)
    assert (error["param"], error["code"]) == (param, code), error
    assert len(error["message"]) < 600


def test_other_content_types(server: Running) -> None:
    with server.client() as client:
        error = error_of(client.post(COMPLETIONS, data={"prompt": "a"}), 415)
    assert "application/json" in error["message"]


def test_an_unknown_parameter_that_is_nearly_right(server: Running) -> None:
    near = error_of(server.post(COMPLETIONS, {"prompt": "a", "max_token": 3}), 400)
    assert "did you mean 'max_tokens'?" in near["message"]
    long = error_of(server.post(COMPLETIONS, {"prompt": "a", "x" * 10**6: 3}), 400)
    assert len(long["message"]) < 200


# ---- keys, ids, logs, browsers


def test_keys_open_everything_but_health(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("from-file\n\nanother\n")
    with serving({"api_key": ("secret",), "api_key_file": tmp_path / "keys"}) as running:
        assert running.get("/health").status_code == 200
        for path in ("/v1/models", "/ready", "/metrics", "/version", "/openapi.json", "/nowhere"):
            assert error_of(running.get(path), 401)["type"] == "authentication_error"
        for given in ("Bearer wrong", "Bearer", "secret", "Basic secret", "Bearer secretsecret"):
            error_of(running.get("/v1/models", headers={"Authorization": given}), 401)
        error_of(running.post(COMPLETIONS, HELLO), 401)
        owners = []
        for key in ("secret", "from-file", "another"):
            headers = {"Authorization": f"Bearer {key}"}
            assert running.get("/v1/models", headers=headers).status_code == 200
            assert running.post(COMPLETIONS, HELLO, headers=headers).status_code == 200
            owners.append(running.engine.submitted[-1].owner)
        assert len(set(owners)) == 3  # none finds the KV cache of another
        assert not any("secret" in owner or "file" in owner for owner in owners)
        for name in ("one", "two"):  # a client that names its KV caches stays one client
            assert running.post(COMPLETIONS, {**HELLO, "prompt_cache_key": name}, headers=headers).status_code == 200
        jobs = running.engine.submitted
        assert jobs[-1].owner != jobs[-2].owner
        assert jobs[-1].client == jobs[-2].client == jobs[-3].client != jobs[-4].client


def test_a_file_of_keys_must_have_one(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n \n")
    with pytest.raises(InputError, match="empty"):
        ServerOptions(api_key_file=tmp_path / "empty").keys()
    with pytest.raises(InputError, match="cannot be read"):
        ServerOptions(api_key_file=tmp_path / "missing").keys()
    with pytest.raises(InputError, match="not ASCII"):
        ServerOptions(api_key=("schlüssel",)).keys()


def test_request_ids_go_in_and_out(server: Running) -> None:
    assert server.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = [server.get("/health").headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2
    assert server.get("/health", headers={"X-Request-Id": "a b"}).headers["x-request-id"] != "a b"
    assert server.get("/nowhere", headers={"X-Request-Id": "mine-2"}).headers["x-request-id"] == "mine-2"


def log_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == LOGGER]


def test_a_line_for_each_request_without_secrets(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    with serving({"log_requests": True, "api_key": ("hidden-key",)}) as running:
        headers = {"Authorization": "Bearer hidden-key", "X-Request-Id": "r1"}
        running.post(COMPLETIONS, {"prompt": "private words", "max_tokens": 5}, headers=headers)
        running.post(COMPLETIONS, {"prompt": "private words", "max_tokens": 5, "stream": True}, headers=headers)
        wait_for(lambda: len(log_lines(caplog)) == 2)
    for line in log_lines(caplog):
        assert (line["request_id"], line["path"], line["status"]) == ("r1", COMPLETIONS, 200)
        assert (line["prompt_tokens"], line["completion_tokens"]) == (13, 5)
        assert (line["drafted_tokens"], line["accepted_tokens"], line["finish_reasons"]) == (4, 3, ["length"])
        assert datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0)
    assert "private" not in caplog.text
    assert "hidden" not in caplog.text
    caplog.clear()
    with serving({"log_requests": True, "log_prompts": True}) as running:
        running.post(COMPLETIONS, {"prompt": "private words", "max_tokens": 5})
        wait_for(lambda: log_lines(caplog))
    assert log_lines(caplog)[0]["prompts"] == ["private words"]


def test_the_line_of_a_refused_request_has_the_code_of_its_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    with serving({"log_requests": True, "max_body_bytes": 1000}) as running:
        for body in ({**HELLO, "top_k": "all"}, {**HELLO, "prompt": [10**6]}, {"prompt": "a" * 2000}):
            assert running.post(COMPLETIONS, body).is_client_error
        running.get("/nowhere")
        wait_for(lambda: len(log_lines(caplog)) == 4)
    found = [(line["error"], line.get("param")) for line in log_lines(caplog)]
    assert found == [("invalid_value", "top_k"), ("invalid_value", "prompt"), ("body_too_large", None),
                     ("unknown_endpoint", None)]  # fmt: skip


def test_browsers_may_call_only_if_asked_for(server: Running) -> None:
    origin = {"Origin": "https://a.example"}
    assert "access-control-allow-origin" not in server.get("/v1/models", headers=origin).headers
    with serving({"cors_origin": ("https://a.example",), "api_key": ("k",)}) as running:
        refused = running.get("/v1/models", headers=origin)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        assert "access-control-allow-origin" not in running.get("/health", headers={"Origin": "https://b"}).headers
        with running.client() as client:
            asks = {**origin, "Access-Control-Request-Method": "POST"}
            assert client.options(CHAT, headers=asks).status_code == 200
            asks["Access-Control-Request-Headers"] = "authorization,content-type,x-stainless-os,x-stainless-retry-count"
            assert client.options(CHAT, headers=asks).status_code == 200
            asks["Access-Control-Request-Headers"] = "x-other"
            assert client.options(CHAT, headers=asks).status_code == 400


def test_an_unexpected_error_is_status_500(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving({"log_requests": True}) as running:
        monkeypatch.setattr(running.service.planner, "completion", lambda *given: 1 / 0)
        monkeypatch.setattr(running.service.planner, "chat", lambda *given: {}["a word of the prompt"])
        error = error_of(running.post(COMPLETIONS, HELLO), 500)
        assert "ZeroDivisionError" in error["message"]
        error_of(running.post(CHAT, {"messages": [{"role": "user", "content": "a"}]}), 500)
        assert running.get("/health").status_code == 200
    failed = [line for line in log_lines(caplog) if "traceback" in line]
    assert [line["exception"] for line in failed] == ["ZeroDivisionError", "KeyError"]
    assert all(any("test_http.py" in frame for frame in line["traceback"]) for line in failed)
    assert "a word of the prompt" not in caplog.text


# ---- load


def test_a_full_queue_is_status_429() -> None:
    with serving({"max_queued": 2}, slots=1, max_queued=2) as running:
        running.engine.hold = True
        with running.client() as client:
            waiting = [client.stream("POST", COMPLETIONS, json={**HELLO, "stream": True}) for _ in range(3)]
            for each in waiting:
                each.__enter__()
            wait_for(lambda: running.engine.state().waiting == 3)
            error = error_of(refused := client.post(COMPLETIONS, json=HELLO), 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert refused.headers["retry-after"] == "2"
            assert error_of(client.get("/ready"), 503)["code"] == "queue_full"
            assert client.get("/health").status_code == 200
            running.engine.hold = False
            for each in waiting:
                each.__exit__(None, None, None)
        assert "request_refused_total{" in running.get("/metrics").text


def test_a_client_that_goes_ends_its_jobs() -> None:
    with serving(pause=0.02, script=lambda job: "x" * 400) as running:
        body = {"prompt": "Hello", "max_tokens": 400, "n": 2}
        with running.client() as client:
            with client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as response:
                next(response.iter_lines())
            wait_for(lambda: len(running.engine.cancelled) == 2)
        left = http.client.HTTPConnection(running.url.removeprefix("http://"))
        left.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
        wait_for(lambda: len(running.engine.submitted) == 4)
        left.close()
        wait_for(lambda: len(running.engine.cancelled) == 4)
        wait_for(lambda: running.engine.state().running == 0)
        wait_for(lambda: running.service.mailbox.waiting == 0)


def test_a_request_that_takes_too_long(server: Running) -> None:
    with serving({"request_seconds": 0.3}, pause=0.02, script=lambda job: "x" * 400) as running:
        error = error_of(running.post(COMPLETIONS, {"prompt": "Hello", "max_tokens": 400}), 504)
        assert error["code"] == "timeout"
        assert running.engine.state().running == 0


def test_many_requests_leave_nothing_behind(server: Running) -> None:
    async def flood() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client:
            bodies = [{**HELLO, "n": 1 + i % 3, "stream": i % 2 == 0} for i in range(60)]
            answers = await asyncio.gather(*(client.post(COMPLETIONS, json=body) for body in bodies))
            return [answer.status_code for answer in answers]

    found = asyncio.run(flood())
    assert set(found) <= {200, 429}
    assert 200 in found
    wait_for(lambda: server.engine.state().running == 0)
    wait_for(lambda: server.service.mailbox.waiting == 0)


def test_an_engine_that_ended_is_not_healthy() -> None:
    with serving() as running:
        running.engine.failed = "out of memory."
        assert error_of(running.get("/health"), 503)["code"] == "engine_failed"
        assert error_of(running.get("/ready"), 503)["code"] == "failed"


# ---- the end


LONG = {"prompt": "Hello", "max_tokens": 400, "stream": True}


def test_the_first_signal_drains() -> None:
    with serving({"drain_seconds": 60}, pause=0.05, script=lambda job: "x" * 60) as running:
        with running.client() as client, client.stream("POST", COMPLETIONS, json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            running.server.handle_exit(15, None)
            wait_for(lambda: running.engine.state().draining)
            assert list(lines)[-2] == "data: [DONE]"  # a running request comes to its end
        wait_for(lambda: not running.server.server_state.connections)


def test_the_second_signal_ends() -> None:
    slow: Any = {"pause": 0.05, "script": lambda job: "x" * 400}
    with (
        serving({"drain_seconds": 60}, **slow) as running,
        running.client() as client,
        client.stream("POST", COMPLETIONS, json=LONG) as response,
    ):
        next(response.iter_lines())
        running.server.handle_exit(15, None)
        running.server.handle_exit(15, None)
        wait_for(lambda: not running.engine.thread.is_alive())


def test_a_draining_server_takes_nothing(server: Running) -> None:
    with serving() as running:
        running.engine.drain()
        error = error_of(refused := running.post(COMPLETIONS, HELLO), 503)
        assert error["code"] == "draining"
        assert refused.headers["retry-after"]
        assert error_of(running.get("/ready"), 503)["code"] == "draining"


def test_the_drain_ends_after_its_seconds() -> None:
    with serving({"drain_seconds": 0.3}, pause=0.05, script=lambda job: "x" * 400) as running:
        with (
            running.client() as client,
            client.stream("POST", COMPLETIONS, json=LONG) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            running.server.handle_exit(15, None)
            with pytest.raises(httpx.RemoteProtocolError):  # the text would take seven seconds
                list(lines)
        wait_for(lambda: running.engine.cancelled)


# ---- options


def test_options_that_do_not_fit() -> None:
    with pytest.raises(InputError, match="belong together"):
        ServerOptions(ssl_certfile=Path("a"))
    with pytest.raises(InputError, match="metrics-prefix"):
        ServerOptions(metrics_prefix="a b")


def test_without_the_extra_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    check_packages()
    monkeypatch.setattr("paceline.serve.server_options.find_spec", lambda name: None if name == "uvicorn" else name)
    with pytest.raises(Exception, match=r"needs uvicorn; .*pip install 'paceline\[serve\]'"):
        check_packages()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_events_of_streams_are_documented_as_objects(server: Running, path: str) -> None:
    """schemathesis compares each event, with its data and its name, with the schema."""
    answers = server.get("/openapi.json").json()["paths"][path]["post"]["responses"]["200"]["content"]
    schema = answers["text/event-stream"]["schema"]
    assert (schema["type"], schema["required"]) == ("object", ["data"])
    assert set(schema["properties"]) == {"data", "event"}
