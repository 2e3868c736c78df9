"""Audit a server with the OpenAI API: send the same requests alone and under load, with a cold and a warm cache, with
and without speculation. All texts of a request must be equal."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from paceline.audit.audit_run import PROMPTS
from paceline.audit.server_client import Ask, Endpoint, Reply, ServerClient
from paceline.audit.server_report import Run, ServerReport
from paceline.common.errors import InputError, UnknownNameError, UnsupportedError
from paceline.common.limits import Limited, limited
from paceline.common.progress import Cancel, Progress

OFF = {"speculative_config": False}  # a field of Paceline's API: no drafts for this request
_MOST_WORKERS = 256
_OTHER_SEED = 4  # this number of sampled requests is repeated with another seed
_SHARED = (  # half of the prompts begin with this text, so that a prefix cache is used
    "These are the notes of a small library by a river. The library has two floors. On the first floor there are "
    "newspapers, maps and books for children. On the second floor there are novels, plays and a quiet room with "
    "six desks. It opens at nine in the morning and closes at seven in the evening. On Sundays it stays closed. "
    "Members may borrow eight books for four weeks, and two films for one week. A book that another member waits "
    "for cannot be kept longer. A member who loses a book pays for a new one. In summer there is a reading in the "
    "garden every Friday, and in winter a course for people who want to repair old bindings. The library was "
    "built in 1931, burned in 1954, and was opened again in 1957 with twice as many shelves. "
)


@dataclass(frozen=True)
class ServerPlan(Limited):
    """The size of an audit of a server."""

    requests: int = limited(16, 4, 4096)
    concurrency: int = limited(8, 2, _MOST_WORKERS)
    tokens: int = limited(32, 1)  # of each text
    temperature: float = limited(0.8, above=0)  # of every second request; the others are greedy
    seed: int = limited(0, -(2**63), 2**63 - 1 - 4096)
    timeout: float = limited(300.0, above=0, most=86_400)  # seconds of a request


@dataclass(frozen=True)
class Target:
    """A server, its API key (None: no key), and the name of the model (None: the only model of the server)."""

    url: str
    api_key: str | None = None
    model: str | None = None


def audit_server(
    server: Target,
    against: Target | None = None,
    prompts: Sequence[str] = PROMPTS,
    plan: ServerPlan | None = None,
    progress: Progress = lambda label, done, total: None,
    cancel: Cancel = lambda: False,
) -> ServerReport:
    """Test whether the text of a server depends on its load, its cache or speculation. `against`: another server with
    the same model, for example one without speculation. Its texts, sent alone, are then the expected ones."""
    return _ServerAudit(server, against, prompts, plan or ServerPlan(), progress, cancel).report()


@dataclass
class _Abilities:
    """The features that a server has. reasons: the features that it does not have, and why."""

    endpoints: list[Endpoint] = field(default_factory=list)
    logprobs: set[Endpoint] = field(default_factory=set)
    takes_off: bool = False
    reasons: list[str] = field(default_factory=list)


class _ServerAudit:
    def __init__(
        self, server: Target, against: Target | None, prompts: Sequence[str], plan: ServerPlan, progress: Progress,
        cancel: Cancel,
    ) -> None:  # fmt: skip
        self._prompts, self._plan, self._progress, self._cancel = prompts, plan, progress, cancel
        if not prompts:
            raise InputError("The audit has no prompts; give at least one.")
        self._server, length = _connect(server, plan)
        self._against = None
        if against is not None:
            self._against, other = _connect(against, plan)
            length = min(length, other)
        # each audit has other prompts, so that the cache of the server does not hold those of an earlier audit
        self._mark = secrets.token_hex(4)
        self._shared = _SHARED[: max(0, length // 4)]
        self._runs: list[Run] = []

    def report(self) -> ServerReport:
        """Run all parts of the audit, and return the report."""
        began = time.perf_counter()
        abilities = self._look(self._server)
        if self._against is not None:
            theirs = self._look(self._against)
            abilities.endpoints = [name for name in abilities.endpoints if name in theirs.endpoints]
            abilities.logprobs &= theirs.logprobs
            if not abilities.endpoints:
                raise UnsupportedError(f"{self._server.url} and {self._against.url} have no endpoint in common.")
            abilities.reasons += [f"{reason} (the other server)" for reason in theirs.reasons]
        asks = self._asks(abilities)
        first, second = [[ask for ask in asks if ask.number.bit_count() % 2 == half] for half in (0, 1)]
        alone, loaded = 1, self._plan.concurrency
        self._run("under load, cold cache", second, loaded)
        self._run("alone, cold cache", first, alone)
        warm = self._run("alone, warm cache", asks, alone)
        again = self._run("alone, warm cache, again", asks, alone)
        self._run("under load, warm cache", asks, loaded)
        plain = None
        if abilities.takes_off:
            plain = self._run("alone, without speculation", asks, alone, lambda ask: OFF)
            self._run("under load, half of it without speculation", asks, loaded,
                      lambda ask: OFF if ask.number % 2 else {})  # fmt: skip
        other = other_again = None
        if self._against is not None:
            other = self._run("other server, alone", asks, alone, server=self._against)
            other_again = self._run("other server, alone, again", asks, alone, server=self._against)
        seeds = [replace(ask, seed=ask.seed + 1) for ask in asks if ask.sampled][:_OTHER_SEED]
        reseeded = self._run("alone, another seed", seeds, alone, is_compared=False).replies
        return ServerReport(
            subject={
                "server": self._server.url,
                "model": self._server.model,
                "against": None if self._against is None else self._against.url,
                "requests": len(asks),
                **{name: getattr(self._plan, name) for name in ("tokens", "temperature", "seed")},
                "concurrency": min(loaded, len(asks)),
                "mark": self._mark,
            },
            asks=asks,
            runs=self._runs,
            warm=warm,
            again=again,
            plain=plain,
            other=other,
            other_again=other_again,
            seed_works=any(not reply.same_text(warm.replies[number]) for number, reply in reseeded.items()),
            reasons=abilities.reasons,
            seconds=time.perf_counter() - began,
        )

    # ---- the features of a server

    def _look(self, server: ServerClient) -> _Abilities:
        """Return the features of a server, found with one request of each kind."""
        found = _Abilities()
        self._progress(f"looking at {server.url}", 0, None)
        names: tuple[Endpoint, ...] = ("chat", "completions")
        for name in names:
            ask = Ask(-1, name, f"{self._mark} {self._prompts[0]}", 0.0, self._plan.seed, 2)
            reply, scored = self._one(server, ask), self._one(server, replace(ask, logprobs=True))
            if reply.error is not None:
                found.reasons.append(f"{_TITLES[name]}: {reply.error}")
                continue
            found.endpoints.append(name)
            if scored.logprobs:
                found.logprobs.add(name)
            else:
                found.reasons.append(f"log-probabilities of {_TITLES[name]}: {scored.error or 'the answer has none'}")
        if not found.endpoints:
            raise UnsupportedError(f"{server.url} cannot be audited: {'; '.join(found.reasons)}.")
        if server is self._server:
            off = self._one(server, Ask(-1, found.endpoints[0], f"{self._mark} {self._prompts[0]}", 0.0, 0, 2), OFF)
            found.takes_off = off.error is None
            if off.error is not None:
                found.reasons.append(f"speculation on and off: the server does not switch it per request ({off.error})")
        return found

    def _one(self, server: ServerClient, ask: Ask, more: dict[str, bool] | None = None) -> Reply:
        reply = server.ask_all([ask], lambda ask: more or {}, 1, lambda done: None, self._cancel)[ask.number]
        if reply.status in (0, 401, 403):
            raise InputError(f"{server.url} does not answer a request: {reply.error}.")
        return reply

    # ---- the requests

    def _asks(self, abilities: _Abilities) -> list[Ask]:
        """Return the requests: greedy or sampled, chat or completions, short or long, some with log-probabilities."""
        plan, asks = self._plan, []
        for number in range(plan.requests):
            endpoint = abilities.endpoints[(number >> 1) % len(abilities.endpoints)]
            shared = self._shared if number >> 3 & 1 else ""
            prompt = f"{self._mark} {shared}({number}) {self._prompts[number % len(self._prompts)]}"
            temperature = plan.temperature if number & 1 else 0.0
            logprobs = bool(number >> 2 & 1) and endpoint in abilities.logprobs
            asks.append(Ask(number, endpoint, prompt, temperature, plan.seed + number, plan.tokens, logprobs))
        return asks

    def _run(
        self,
        name: str,
        asks: Sequence[Ask],
        workers: int,
        more: Callable[[Ask], dict[str, bool]] = lambda ask: {},
        server: ServerClient | None = None,
        is_compared: bool = True,
    ) -> Run:
        began, order = time.perf_counter(), list(asks)
        if workers > 1:  # another order gives other batches
            random.Random(self._plan.seed).shuffle(order)
        report: Callable[[int], None] = lambda done: self._progress(name, done, len(order))  # noqa: E731
        replies = (server or self._server).ask_all(order, more, workers, report, self._cancel)
        run = Run(name, replies, time.perf_counter() - began)
        self._runs += [run] if is_compared else []
        return run


_TITLES: dict[Endpoint, str] = {"chat": "chat completions", "completions": "completions"}


def _connect(target: Target, plan: ServerPlan) -> tuple[ServerClient, int]:
    """Return the client of a server, and the context length of the model (a large number if it is not known)."""
    client = ServerClient(target.url, target.api_key, plan.timeout)
    cards = client.models()
    names = [card["id"] for card in cards]
    if target.model is None and len(names) != 1:
        listed = ", ".join(names[:8]) or "it names none"
        raise InputError(f"{client.url} serves {len(names)} models; name one with --model ({listed}).")
    if target.model is not None and names and target.model not in names:
        raise UnknownNameError(f"model of {client.url}", target.model, names)
    client.model = target.model or names[0]
    length = next((card.get("max_model_len") for card in cards if card["id"] == client.model), None)
    return client, length if isinstance(length, int) else 2**31
