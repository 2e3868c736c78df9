"""A server with its playground over a small model, on real engines."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

import paceline
from paceline.bench.what_if import what_if
from paceline.models.language_model import LanguageModel
from paceline.serve.engine_thread import EngineThread
from paceline.serve.http_server import HttpServer
from paceline.serve.playground.drafter_engines import DrafterEngines
from paceline.serve.playground.turns import Turns
from paceline.serve.server_options import ServerOptions
from paceline.serve.service import Service
from tests.serve.fakes import TEMPLATE, events_of, listening
from tests.toys import letters, llama

SCRIPT = "<script>document.title='hacked'</script>"
# the text of every token of the model is a part of a tag, so that the model writes HTML
TAGS = [*"abcdefghijklmnopqrstuvwxyz0123456789 .,", "!"]
PARTS = {3: "<img src=x onerror=alert(1)>", 11: "<script>", 17: "</script>", 23: "\n", 29: "&amp;", 31: "é"}


def small_model(context: int = 512, tags: bool = False) -> LanguageModel:
    tokenizer = letters()
    if tags:
        tokenizer = letters([PARTS.get(at, letter) for at, letter in enumerate(TAGS)])  # type: ignore[arg-type]
    tokenizer.chat_template = TEMPLATE
    return LanguageModel(llama(3, max_position_embeddings=context).float(), tokenizer)


@dataclass
class Played:
    """A playground that listens."""

    url: str
    service: Service
    server: HttpServer
    turns: Turns
    headers: dict[str, str] = field(default_factory=dict)

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, headers=self.headers)

    def get(self, path: str, **more: Any) -> httpx.Response:
        with self.client() as client:
            return client.get(path, **more)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **more)

    def stream(self, path: str, body: Any) -> list[Any]:
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        return events_of(response)


@contextmanager
def playing(
    model: LanguageModel | None = None, draft: Any = "prompt-lookup", slots: int = 3, **options: Any
) -> Iterator[Played]:
    lm = model or small_model()
    turns = Turns()
    decoder = paceline.SpeculativeDecoder(lm, draft, gamma=4)
    made = ServerOptions(**{"port": 0, "log_requests": False, "drain_seconds": 2, **options})

    def engine(deliver: Callable[[Any], None], decoder: Any, slots: int) -> EngineThread:
        return EngineThread(decoder, slots=slots, max_model_len=None, max_queued=4, deliver=deliver, turns=turns)

    service = Service(
        lambda deliver: engine(deliver, decoder, slots), lm.tokenizer, made,
        lambda deliver: DrafterEngines(decoder, lambda other, count: engine(deliver, other, count)), what_if,
    )  # fmt: skip
    with listening(service) as (url, server):
        yield Played(url, service, server, turns)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true. One that never is fails after a minute."""
    event = threading.Event()
    for _ in range(6000):
        if condition():
            return
        event.wait(0.01)
    raise AssertionError("it did not happen in time")


class Relay:
    """A port that passes bytes to a server, so that a test can end the server and begin another one at this address."""

    def __init__(self) -> None:
        self.target: int | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            if self.target is None:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self.target))
            self._open += [client, server]
            for one, other in ((client, server), (server, client)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """End every connection, and take no other until there is a target again."""
        self.target = None
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._open.clear()

    def close(self) -> None:
        self.cut()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
