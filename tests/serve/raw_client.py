"""A light client on raw sockets: it notes what comes and when, and parses it later."""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any


@dataclass
class Answer:
    """An answer of a server, and when its parts came. `problem`: why there is none."""

    began: float
    ended: float
    status: int
    body: bytes
    chunks: list[tuple[float, bytes]]
    problem: str | None = None

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[tuple[float, dict[str, Any]]]:
        """The events of a stream, each with the time when its last byte came."""
        found, rest = list[tuple[float, dict[str, Any]]](), b""
        for when, data in self.chunks:
            *whole, rest = (rest + data.replace(b"\r\n", b"\n")).split(b"\n\n")
            for event in whole:
                if event.startswith(b"data: {"):
                    found.append((when, json.loads(event[len(b"data: ") :])))
        return found

    def texts(self) -> list[float]:
        """The times of the events of a stream that have text or tokens."""
        return [when for when, event in self.events() if _has_text(event)]

    def usage(self) -> dict[str, Any]:
        """The usage of an answer, or of the last event of a stream that has one."""
        if self.chunks and self.body.startswith(b"{"):
            return dict(self.json["usage"])
        return next(dict(event["usage"]) for _, event in reversed(self.events()) if event.get("usage"))


def _has_text(event: dict[str, Any]) -> bool:
    for choice in event.get("choices", ()):
        delta = choice.get("delta", choice)
        if delta.get("text") or delta.get("content") or choice.get("token_ids"):
            return True
    return False


class Exchange(asyncio.Protocol):
    """One request on its own connection. It only notes what comes and when; parsing is done after the measurement."""

    def __init__(self, request: bytes, leave_after: int | None = None) -> None:
        """leave_after: packets after which the client resets the connection; 0: after the request."""
        self._request, self._leave_after = request, leave_after
        self.parts: list[bytes] = []
        self.times: list[float] = []
        self.began = 0.0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.began = transport, time.perf_counter()
        transport.write(self._request)
        if self._leave_after == 0:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self.times.append(time.perf_counter())
        self.parts.append(data)
        if len(self.parts) == self._leave_after:
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def answer(self) -> Answer:
        raw = b"".join(self.parts)
        head, _, body = raw.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 "):
            return Answer(self.began, time.perf_counter(), 0, b"", [], "the connection was closed without an answer")
        chunks = [(self.times[-1], body)]
        if b"transfer-encoding: chunked" in head.lower():
            chunks = list(_chunks(body, len(head) + 4, list(accumulate(map(len, self.parts))), self.times))
        whole = b"".join(data for _, data in chunks)
        return Answer(self.began, self.times[-1], int(head[9:12]), whole, chunks)


def _chunks(body: bytes, offset: int, ends: list[int], times: list[float]) -> Iterator[tuple[float, bytes]]:
    at = 0
    while True:
        line = body.find(b"\r\n", at)
        size = int(body[at:line].partition(b";")[0], 16) if line > at else 0
        if not size:
            return
        data = body[line + 2 : line + 2 + size]
        at = line + 4 + size
        yield times[min(len(times) - 1, bisect_left(ends, offset + line + 2 + size))], data


def request(path: str, body: Any = None, key: str | None = None, method: str = "") -> bytes:
    """A request that the server closes the connection after. body: a value for JSON, or bytes."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {len(data)}"]
    lines += ["Content-Type: application/json"] * (body is not None) + [f"Authorization: Bearer {key}"] * bool(key)
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


async def open_exchange(port: int, data: bytes, leave_after: int | None = None) -> Exchange:
    loop = asyncio.get_running_loop()
    _, exchange = await loop.create_connection(lambda: Exchange(data, leave_after), "127.0.0.1", port)
    return exchange


async def send(port: int, path: str, body: Any = None, leave_after: int | None = None, wait: float = 600) -> Answer:
    """The answer to one request."""
    began = time.perf_counter()
    exchange = await open_exchange(port, request(path, body), leave_after)
    await asyncio.wait_for(exchange.closed, wait)
    answer = exchange.answer()
    answer.began = began
    return answer


async def send_all(port: int, path: str, bodies: Sequence[Any], at_once: int) -> list[Answer]:
    """The answers to requests, at most `at_once` at a time, in the order of the requests."""
    limit = asyncio.Semaphore(at_once)

    async def one(body: Any) -> Answer:
        async with limit:
            return await send(port, path, body)

    return list(await asyncio.gather(*map(one, bodies)))


async def metrics(port: int) -> dict[str, float]:
    """The metrics of our server, added up over labels."""
    found: dict[str, float] = {}
    for line in (await send(port, "/metrics")).body.decode().splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            short = name.partition("{")[0].removeprefix("paceline:")
            found[short] = found.get(short, 0.0) + float(value)
    return found
