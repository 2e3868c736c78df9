"""Requests of all kinds: whole ones, clients that leave early or are cut off, broken and half bodies. What is left?"""

from __future__ import annotations

import asyncio
import random
import statistics
from typing import Any, Protocol

from tests.serve.raw_client import metrics, open_exchange, request, send_all

_COMPLETIONS = "/v1/completions"


class Watched(Protocol):
    """The process of a server."""

    @property
    def memory(self) -> int:
        """Return the bytes that are resident."""
        ...

    @property
    def threads(self) -> int: ...

    @property
    def sockets(self) -> int: ...


_BROKEN = (
    b'{"prompt": "a", ', b"[]", b"\xff\xfe", b'{"prompt": 7}', b'{"prompt": "a", "max_tokens": -1}', b"", b"[" * 500,
    b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": [99999999]}', b'{"messages": 1}',
    b'{"prompt": "a", "zz": 1}',
)  # fmt: skip


async def soak_of(port: int, count: int, process: Watched, at_once: int = 16) -> dict[str, Any]:
    """Send requests of all kinds: whole ones, clients that leave early, that are cut off, and broken bodies."""
    dice, kinds, statuses = random.Random(7), dict[str, int](), dict[int, int]()
    memory = list[tuple[float, float]]()
    await send_all(port, _COMPLETIONS, [{"prompt": "warm", "max_tokens": 4}] * 64, at_once)
    await _idle(port, process)
    before = {"threads": process.threads, "sockets": process.sockets}
    numbers = iter(range(count))

    async def client() -> None:
        for number in numbers:
            kind = dice.choices(("whole", "leaves", "cut off", "broken", "half"), (55, 15, 10, 15, 5))[0]
            kinds[kind] = kinds.get(kind, 0) + 1
            status = await _one_of(port, kind, dice)
            statuses[status] = statuses.get(status, 0) + 1
            if number % max(1, count // 200) == 0:
                memory.append((number, process.memory / 1024))

    await asyncio.gather(*(client() for _ in range(at_once)))
    left = await _idle(port, process, before["sockets"])
    half = [point for point in memory if point[0] >= count / 2]
    return {
        "requests": count,
        "kinds": kinds,
        "statuses": {str(status): number for status, number in sorted(statuses.items())},
        "server_errors": sum(number for status, number in statuses.items() if status >= 500),
        "left": {name: left[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")},
        "threads": [before["threads"], process.threads],
        "sockets": [before["sockets"], process.sockets],
        "memory_kib": [round(memory[0][1]), round(half[0][1]), round(half[-1][1])],
        "memory_points": [(number, round(kib)) for number, kib in memory],
        "memory_slope_bytes_per_request": 1024 * statistics.linear_regression(*zip(*half, strict=True)).slope,
    }


async def _one_of(port: int, kind: str, dice: random.Random) -> int:
    """Send one request of a kind. Return its status; 0: the client left without one."""
    body = {"prompt": "the wind, the height of the water " * dice.randrange(1, 4), "stream": dice.random() < 0.5,
            "max_tokens": dice.randrange(1, 12), "seed": dice.randrange(1000),
            "n": dice.choice([1, 1, 1, 2])}  # fmt: skip
    data = request(_COMPLETIONS, dice.choice(_BROKEN) if kind == "broken" else body)
    if kind in ("leaves", "cut off"):
        data = request(_COMPLETIONS, {**body, "max_tokens": 500, "ignore_eos": True})
    if kind == "half":
        data = data[: dice.randrange(1, len(data))]
    packets = {"leaves": dice.randrange(1, 4) if body["stream"] else None, "cut off": 0, "half": 0}.get(kind)
    exchange = await open_exchange(port, data, packets)
    if kind == "leaves" and packets is None:
        await asyncio.sleep(0.03 * dice.random())
        exchange.transport.abort()
    await asyncio.wait_for(exchange.closed, 60)
    return exchange.answer().status if kind in ("whole", "broken") else 0


async def _idle(port: int, process: Watched, sockets: int | None = None) -> dict[str, float]:
    """Wait until no sequence is live and only this number of sockets is open, but not for ever. Return the metrics."""
    for _ in range(500):
        seen = await metrics(port)
        live = seen["num_requests_running"] + seen["num_requests_waiting"]
        if not live and (sockets is None or process.sockets <= sockets):
            break
        await asyncio.sleep(0.02)
    return seen
