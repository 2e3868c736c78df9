"""Bytes of broken and hostile clients: each gets a clear answer or is cut off, and the server stays healthy."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

import pytest

from paceline.serve import http_server, middleware

from .fakes import Running, serving
from .test_http import CHAT, COMPLETIONS, HELLO, error_of, wait_for

POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
HI = [{"role": "user", "content": "a"}]
GET = b"GET /health HTTP/1.1\r\nHost: a\r\n"


@contextmanager
def connected(server: Running, receives: int | None = None) -> Iterator[socket.socket]:
    """A raw connection. `receives`: bytes that its kernel takes before the test reads them."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as made:
        if receives is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        made.settimeout(10)
        made.connect((host, int(port)))
        yield made


def read_answer(connection: socket.socket | BinaryIO) -> tuple[int, dict[str, Any]]:
    """Status and body of one answer with a length."""
    file = connection.makefile("rb", buffering=0) if isinstance(connection, socket.socket) else connection
    status = int(file.readline().split()[1])
    headers = dict(line.lower().split(b": ") for line in iter(file.readline, b"\r\n"))
    body = b""
    while len(body) < int(headers[b"content-length"]):
        body += file.read(int(headers[b"content-length"]) - len(body))
    return status, json.loads(body)


def body_of(text: bytes) -> bytes:
    return POST + b"Content-Length: %d\r\n\r\n" % len(text) + text


# ---- bodies


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"nothing",
        b"[" * 10**5 + b"]" * 10**5,
        b'{"prompt": "' + b"\xff\xfe" + b'"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "metadata": {"x": [1e999]}}',
        b'{"prompt": "a", "metadata": {"x": -1' + b"0" * 400 + b".0}}",
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a"} {"prompt": "b"}',
    ],
)
def test_bodies_that_are_no_json(server: Running, content: bytes) -> None:
    with server.client() as client:
        response = client.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
        error_of(response, 400)
        assert client.get("/health").status_code == 200


def test_large_and_slow_bodies(server: Running) -> None:
    with serving({"max_body_bytes": 2000, "body_seconds": 0.3}) as small, small.client() as client:
        assert error_of(client.post(COMPLETIONS, json={"prompt": "a" * 3000}), 413)["code"] == "body_too_large"

        def chunks() -> Any:
            for _ in range(10):
                yield b"a" * 500

        headers = {"Content-Type": "application/json"}
        error_of(client.post(COMPLETIONS, content=chunks(), headers=headers), 413)
        with connected(small) as slow:
            slow.sendall(POST + b"Content-Length: 100\r\n\r\n{")
            assert read_answer(slow)[0] == 408


def test_a_huge_body_gets_its_answer_before_it_has_been_sent() -> None:
    """Its client would lose the answer if the connection closed at once."""
    with serving({"max_body_bytes": 10_000}) as server:
        for head in (b"Content-Length: 200000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"):
            with connected(server) as huge:
                huge.sendall(POST + head)
                piece = b"a" * 65536
                chunk = piece if b"Length" in head else b"10000\r\n" + piece + b"\r\n"
                for _ in range(100):
                    huge.sendall(chunk)
                status, body = read_answer(huge)
                assert (status, body["error"]["code"]) == (413, "body_too_large")
        assert server.get("/health").status_code == 200


def test_a_chunked_body_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "_LINGER", 0.2)
    with serving({"max_body_bytes": 10_000}) as server, connected(server) as endless:
        endless.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        piece, sent = b"1000\r\n" + b"a" * 4096 + b"\r\n", 0
        with suppress(ConnectionError):  # the server has closed the connection
            while sent < 2**30:
                sent += endless.send(piece)
        assert sent < 2**30
        wait_for(lambda: not server.server.server_state.connections)


def test_large_bodies_together_have_a_limit() -> None:
    with serving({"max_body_bytes": 1000}) as server:
        held = [connected(server) for _ in range(8)]
        waiting = [each.__enter__() for each in held]
        for each in waiting:
            each.sendall(POST + b"Content-Length: 1000\r\n\r\n" + b" " * 999)
        with connected(server) as last:
            last.sendall(POST + b"Content-Length: 1000\r\n\r\n" + b" " * 999)
            status, body = read_answer(last)
            assert (status, body["error"]["code"]) == (429, "too_many_bytes")
        for each in held:
            each.__exit__(None, None, None)
        wait_for(lambda: not server.server.server_state.connections)
        assert server.post(COMPLETIONS, HELLO).status_code == 200


# ---- what is no HTTP


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n",  # TLS to a plain port
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # without a host
        b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x00" * 1000 + b"\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        POST + b"Content-Length: -1\r\n\r\n{}",
        POST + b"Content-Length: 99999999999999999999999\r\n\r\n{}",
        POST + b"Transfer-Encoding: chunked\r\n\r\nno number\r\n{}\r\n",
        POST + b"Transfer-Encoding: gzip\r\n\r\n{}",
        GET + b"a b: c\r\n\r\n",
        GET + b"X: a\r\n folded\r\n\x01\r\n\r\n",
    ],
)
def test_garbage_is_refused(server: Running, garbage: bytes) -> None:
    with connected(server) as raw:
        raw.sendall(garbage)
        status, body = read_answer(raw)
        assert 400 <= status < 502
        assert set(body["error"]) == {"message", "type", "param", "code"}
        raw.sendall(garbage)  # the connection has an error; more of it changes nothing
    assert server.get("/health").status_code == 200


def test_garbage_after_a_request(server: Running) -> None:
    """HTTP pipelining: the first request has its answer, the rest has an error."""
    with connected(server) as raw:
        raw.sendall(body_of(json.dumps(HELLO).encode()) + GET + b"\r\n" + b"\x00garbage\r\n\r\n")
        answers = raw.makefile("rb")
        assert read_answer(answers)[1]["choices"]
        assert read_answer(answers)[1] == {"status": "ok"}
        assert read_answer(answers)[0] == 400
        assert answers.read() == b""
    with connected(server) as raw:  # the garbage comes while a stream runs
        raw.sendall(body_of(json.dumps({**HELLO, "stream": True}).encode()) + b"\x00" * 100 + b"\r\n\r\n")
        text = b""
        while more := raw.recv(65536):
            text += more
        assert b"[DONE]" in text
    assert server.get("/health").status_code == 200


def test_slow_and_endless_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_HEADER_SECONDS", 0.5)
    with serving() as server:
        with connected(server) as slow:
            slow.sendall(GET)
            assert slow.recv(1000) == b""  # closed
        with connected(server) as quick:
            for _ in range(2):  # the timer begins again with each request
                quick.sendall(GET + b"\r\n")
                assert read_answer(quick)[0] == 200
            quick.sendall(b"GET /he")
            assert quick.recv(1000) == b""
        with connected(server) as many:
            with suppress(ConnectionError):  # the server has closed the connection
                for number in range(10**6):
                    many.sendall(b"X-%d: y\r\n" % number if number else GET)
            assert number < 10**5
        assert server.get("/health").status_code == 200


def test_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its jobs end, and its connection too."""
    monkeypatch.setattr(http_server, "_UNREAD_SECONDS", 0.3)
    with serving({"keep_alive_seconds": 1}, context=200_000, script=lambda job: "x") as server:
        body = {"prompt": "a", "max_tokens": 150_000, "ignore_eos": True, "stream": True, "logprobs": 5}
        with connected(server, receives=4096) as mute:
            mute.sendall(body_of(json.dumps(body).encode()))
            wait_for(lambda: server.engine.state().running == 1)
            wait_for(lambda: server.engine.cancelled)
            wait_for(lambda: not server.server.server_state.connections)
        wait_for(lambda: server.engine.state().running == server.service.mailbox.waiting == 0)


# ---- valid JSON, hostile values


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "a"}] * 20_000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 10**5}]},
        {"messages": [{"role": "user", "content": "<eos>" * 5000}]},
        {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}] * 1000},
        {"messages": HI, "logit_bias": {str(i): 1 for i in range(10**5)}},
        {"messages": HI, "chat_template_kwargs": {"strftime_now": 1, "namespace": 2},
         "max_tokens": 2**40},
        {"messages": "a"},
        {"messages": {"role": "user"}},
        {"messages": [[[]]]},
        {"messages": [{"role": ["user"], "content": "a"}]},
        {"messages": [{"role": "user", "content": {"a": 1}}]},
    ],
)  # fmt: skip
def test_hostile_conversations(server: Running, body: Any) -> None:
    error_of(server.post(CHAT, body), 400)
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/responses", {"input": "a", "background": 0}, "background"),
        ("/v1/responses", {"input": "a", "store": 0}, "store"),
        ("/v1/completions", {"prompt": "a", "use_beam_search": 0}, "use_beam_search"),
        ("/v1/completions", {"prompt": "a", "skip_special_tokens": 1}, "skip_special_tokens"),
        ("/v1/completions", {"prompt": "a", "best_of": True}, "best_of"),
    ],
)
def test_a_number_is_no_truth_value(server: Running, path: str, body: dict[str, Any], name: str) -> None:
    """schemathesis found that 0 passed for false."""
    response = server.post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name


def test_a_text_too_long_to_encode_exceeds_the_context(server: Running) -> None:
    """Clients tell this error from others by its code."""
    error = server.post("/v1/completions", {"prompt": "word " * 10**5}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
