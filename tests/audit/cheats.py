"""A server with OpenAI's API that writes texts without a model, and that can cheat."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OVERLAP = 0.05  # seconds that a request waits for another one, where the load is what changes the text
SPECULATES = {"speculative_decoding": {"num_draft_tokens": 7}}
DRAFTED_NOTHING = {"speculative_decoding": {"num_draft_tokens": 0}}


@dataclass
class Call:
    """A request at the server. running: requests that were there with it. before: how often the prompt was read."""

    body: dict[str, Any]
    chat: bool
    running: int
    before: int
    number: int

    @property
    def prompt(self) -> str:
        return str(self.body["messages"][0]["content"] if self.chat else self.body["prompt"])

    @property
    def sampled(self) -> bool:
        return bool(self.body["temperature"] > 0)

    @property
    def off(self) -> bool:
        return self.body.get("speculative_config") is False


def honest(call: Call) -> str:
    """A text that follows from the prompt, the temperature and the seed."""
    seed = call.body["seed"] if call.sampled else None
    return hashlib.sha256(f"{call.prompt}/{seed}".encode()).hexdigest()


@dataclass
class Cheat:
    """How a server behaves. `refuse`: the status of a request that fails. `key`: the only key that it takes."""

    text: Callable[[Call], str] = honest
    refuse: Callable[[Call], int | None] = lambda call: None
    logprob: Callable[[Call], float] = lambda call: -0.5
    metrics: Callable[[Call], Any] = lambda call: DRAFTED_NOTHING if call.off else SPECULATES
    chats: bool = True
    completes: bool = True
    scores: bool = True
    switches: bool = True
    waits: bool = False
    cards: tuple[dict[str, Any], ...] = ({"id": "tiny", "max_model_len": 2048},)
    key: str | None = None
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.changed = threading.Condition()
        self.running = 0
        self.read: Counter[str] = Counter()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        chat = path.endswith("/chat/completions")
        if not (self.chats if chat else self.completes):
            return 404, {"error": {"message": "no such path"}}
        if "speculative_config" in body and not self.switches:
            return 400, {"error": {"message": "unknown field speculative_config"}}
        with self.changed:
            self.running += 1
            self.changed.notify_all()
            if self.waits:
                self.changed.wait_for(lambda: self.running > 1, OVERLAP)
            call = Call(body, chat, self.running, 0, len(self.calls))
            call.before = self.read[call.prompt]
            self.read[call.prompt] += 1
            self.calls.append(call)
        status = self.refuse(call)
        reply = (status, {"error": {"message": "broken"}}) if status is not None else (200, self._choice(call))
        with self.changed:
            self.running -= 1
        return reply

    def _choice(self, call: Call) -> dict[str, Any]:
        text, scores = self.text(call), self.scores and bool(call.body.get("logprobs"))
        value, letters = self.logprob(call), list(self.text(call))
        if call.chat:
            entries = [{"token": letter, "logprob": value, "top_logprobs": [{"logprob": -0.5}, {"logprob": -0.75}]}
                       for letter in letters]  # fmt: skip
            choice: dict[str, Any] = {
                "message": {"content": text},
                "logprobs": {"content": entries} if scores else None,
            }
        else:
            found = {"tokens": letters, "token_logprobs": [value] * len(letters),
                     "top_logprobs": [{"a": -0.5, "b": -0.75}] * len(letters)}  # fmt: skip
            choice = {"text": text, "logprobs": found if scores else None}
        usage = {"prompt_tokens_details": {"cached_tokens": 5 * min(1, call.before)}}
        return {"choices": [choice | {"finish_reason": "length"}], "usage": usage, "metrics": self.metrics(call)}


@contextmanager
def running(cheat: Cheat) -> Iterator[str]:
    """The URL of a server that behaves so."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            if cheat.key is not None and self.headers.get("Authorization") != f"Bearer {cheat.key}":
                self._send(401, {"error": {"message": "wrong key"}})
            else:
                self._send(200, {"data": list(cheat.cards)})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*cheat.answer(self.path, body))

        def _send(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            if status == 429:
                self.send_header("Retry-After", "0")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
