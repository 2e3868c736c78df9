"""A client of the OpenAI API for audits. It needs only the standard library."""

from __future__ import annotations

import json
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Literal
from urllib.parse import urlsplit

from paceline.audit.agreement import stop_if
from paceline.common.errors import InputError, in_one_line, shown
from paceline.common.progress import Cancel

Endpoint = Literal["chat", "completions"]
PATHS: dict[str, str] = {"chat": "/chat/completions", "completions": "/completions"}
TOP = 2  # alternatives per log-probability, for the difference of the two best tokens
_MOST_BYTES = 64 * 2**20  # the largest answer that is read
_TRIES = 20  # tries of a request that the server refuses because it is full
_LONGEST_WAIT = 30.0  # seconds before the next try
_LOOK = 0.05  # seconds between two checks of Ctrl-C


@dataclass(frozen=True)
class Ask:
    """One request."""

    number: int
    endpoint: Endpoint
    prompt: str
    temperature: float
    seed: int
    tokens: int
    logprobs: bool = False

    @property
    def sampled(self) -> bool:
        return self.temperature > 0

    def body(self, **more: Any) -> dict[str, Any]:
        """Return the JSON body of the request. It has fields that every server accepts, and those in `more`."""
        body: dict[str, Any] = {"temperature": self.temperature, "seed": self.seed, "max_tokens": self.tokens}
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": self.prompt}]
            body |= {"logprobs": True, "top_logprobs": TOP} if self.logprobs else {}
        else:
            body["prompt"] = self.prompt
            body |= {"logprobs": TOP} if self.logprobs else {}
        return body | more


@dataclass(frozen=True)
class Reply:
    """The answer to a request, or its error. logprobs: one number for each token. gaps: the difference of the two best
    log-probabilities at each token. drafted, cached: None if the server does not report them."""

    text: str = ""
    finish_reason: str | None = None
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    gaps: tuple[float | None, ...] = ()
    drafted: int | None = None
    cached: int | None = None
    error: str | None = None
    status: int = 200

    def same_text(self, other: Reply) -> bool:
        return self.error is None and other.error is None and self.content == other.content

    @property
    def content(self) -> tuple[str, str | None]:
        return self.text, self.finish_reason


def read_reply(ask: Ask, body: Any) -> Reply:
    """Return the reply in the JSON of an answer."""
    try:
        choice = body["choices"][0]
        text = choice["message"]["content"] if ask.endpoint == "chat" else choice["text"]
        tokens, values, gaps = _logprobs(choice.get("logprobs") or {})
        usage = body.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return Reply(text or "", choice.get("finish_reason"), tokens, values, gaps, _drafted(body), cached)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        return Reply(error=f"the answer is not in the format of OpenAI ({type(error).__name__}: {error})")


def _logprobs(given: dict[str, Any]) -> tuple[tuple[str, ...], tuple[float, ...], tuple[float | None, ...]]:
    """Return tokens, log-probabilities and gaps, from the answer of a chat or of completions."""
    if "content" in given:
        entries = given["content"] or []
        best = [[float(top["logprob"]) for top in entry.get("top_logprobs") or ()] for entry in entries]
        tokens, values = [entry["token"] for entry in entries], [float(entry["logprob"]) for entry in entries]
    else:
        tokens, values = list(given.get("tokens") or ()), [float(x or 0.0) for x in given.get("token_logprobs") or ()]
        best = [[float(x) for x in (top or {}).values()] for top in given.get("top_logprobs") or ()]
    best += [[]] * (len(values) - len(best))
    ranked = [sorted(one, reverse=True) for one in best]
    return tuple(tokens), tuple(values), tuple(one[0] - one[1] if len(one) > 1 else None for one in ranked)


def _drafted(body: dict[str, Any]) -> int | None:
    """Return the number of drafted tokens in the format of vLLM and Paceline, or in that of llama.cpp."""
    speculation = (body.get("metrics") or {}).get("speculative_decoding") or {}
    found = speculation.get("num_draft_tokens", (body.get("timings") or {}).get("draft_n"))
    return None if found is None else int(found)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would send the API key to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


class ServerClient:
    """The client of one server: `ask` sends one request, `ask_all` sends several at the same time."""

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InputError(f"The URL of a server must begin with http:// or https://, got {shown(url)}.")
        base = url.rstrip("/")
        self.url = base if base.endswith("/v1") else f"{base}/v1"
        self.model: str | None = None
        self._key, self._timeout = api_key, timeout
        self._opener = urllib.request.build_opener(_NoRedirect)

    # ---- one request

    def models(self) -> list[dict[str, Any]]:
        """Return the models that the server lists. Raise `InputError` if it cannot be reached or refuses the key."""
        status, body = self._send("/models", None)
        if status in (401, 403):
            raise InputError(f"{self.url} refuses the key ({_why(status, body)}); give the right one with --api-key.")
        if status != 200 or not isinstance(body, dict) or not isinstance(body.get("data"), list):
            raise InputError(f"{self.url}/models is not a list of models ({_why(status, body)}); give another URL.")
        return [entry for entry in body["data"] if isinstance(entry, dict) and isinstance(entry.get("id"), str)]

    def ask(self, ask: Ask, more: dict[str, Any] | None = None, ended: threading.Event | None = None) -> Reply:
        """Return the reply to one request. If the server is full, the request is sent again."""
        wait = (ended or threading.Event()).wait
        for _ in range(_TRIES):
            try:
                status, body = self._send(PATHS[ask.endpoint], {"model": self.model, **ask.body(**(more or {}))})
            except InputError as error:
                return Reply(error=str(error), status=0)
            if status not in (429, 503) or wait(_seconds(body)):
                break
        return read_reply(ask, body) if status == 200 else Reply(error=_why(status, body), status=status)

    def _send(self, path: str, body: Any) -> tuple[int, Any]:
        """Return the status and the JSON of an answer, or the seconds of Retry-After where a refusal has them."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                return response.status, _json(response.read(_MOST_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                content = _json(error.read(_MOST_BYTES))
            retry = error.headers.get("Retry-After", "") if error.code in (429, 503) else ""
            return error.code, float(retry) if retry.isdecimal() else content
        except (OSError, HTTPException, ValueError) as error:  # refused, timed out, cut off, an invalid key
            reason = in_one_line(getattr(error, "reason", None) or error)  # type: ignore[arg-type]
            raise InputError(f"{self.url} cannot be reached: {reason}.") from None

    # ---- several requests at the same time

    def ask_all(
        self,
        asks: Sequence[Ask],
        more: Callable[[Ask], dict[str, Any]],
        workers: int,
        progress: Callable[[int], None],
        cancel: Cancel,
    ) -> dict[int, Reply]:
        """Return the replies by the numbers of the requests. `workers` threads send them. The threads are daemons, so a
        cancelled audit does not wait for their answers."""
        todo: queue.SimpleQueue[Ask] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[int, Reply | Exception]] = queue.SimpleQueue()
        ended = threading.Event()
        for ask in asks:
            todo.put(ask)

        def work() -> None:
            while not ended.is_set():
                try:
                    ask = todo.get_nowait()
                except queue.Empty:
                    return
                try:
                    done.put((ask.number, self.ask(ask, more(ask), ended)))
                except Exception as error:  # the main thread raises it
                    done.put((ask.number, error))

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(workers, len(asks)))]
        for thread in threads:
            thread.start()
        replies: dict[int, Reply] = {}
        try:
            while len(replies) < len(asks):
                stop_if(cancel)
                progress(len(replies))
                try:
                    number, reply = done.get(timeout=_LOOK)
                except queue.Empty:
                    continue
                if isinstance(reply, Exception):
                    raise reply
                replies[number] = reply
        finally:
            ended.set()
        for thread in threads:
            thread.join()
        return replies


def _json(data: bytes) -> Any:
    """Return the value of a JSON answer, or its text if it is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data.decode("utf-8", "replace")


def _why(status: int, body: Any) -> str:
    """Return a phrase about a refusal, with the status and the message of the server."""
    found = body.get("error", body) if isinstance(body, dict) else body
    message = found.get("message", found) if isinstance(found, dict) else found
    return f"HTTP {status}: {in_one_line(ValueError(str(message)), 160)}"


def _seconds(body: Any) -> float:
    """Return the seconds to wait for a server that is full."""
    return min(_LONGEST_WAIT, max(0.05, body)) if isinstance(body, float) else 1.0
