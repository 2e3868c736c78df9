"""What the engines do, as events for the operator's view: which slot read and wrote what, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from paceline.serve.jobs import Job, Update

_WAITING = 512  # events that a slow reader may have; then the oldest are dropped
_ALIVE = 1.0  # seconds between two checks whether the stream must end


class EngineEvents:
    """Gives every update to each reader. The event loop's thread uses it."""

    def __init__(self) -> None:
        self._readers: list[asyncio.Queue[dict[str, Any]]] = []
        self._drafters: dict[str, str] = {}  # of the jobs that have not ended
        self._lanes: dict[str, int] = {}

    def submitted(self, jobs: Sequence[Job], drafter: str) -> None:
        for job in jobs:
            self._drafters[job.id] = drafter

    def refused(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._drafters.pop(job.id, None)

    def updated(self, update: Update) -> None:
        """Take an update. A job has the first free lane from its first update to its end."""
        job = update.job
        drafter = self._drafters.get(job)
        if drafter is None:
            return
        if job not in self._lanes:
            taken = set(self._lanes.values())
            self._lanes[job] = next(lane for lane in range(len(taken) + 1) if lane not in taken)
        event = {
            "at": update.at,
            "lane": self._lanes[job],
            "job": job[-8:],
            "drafter": drafter,
            "pieces": [list(piece) for piece in update.pieces],
            "rounds": [
                [len(each.round.drafted), len(each.round.path), len(each.round.emitted), each.seconds]
                for each in update.rounds
            ],
            "ended": None if update.ending is None else update.ending.finish_reason,
        }
        if update.ending is not None:
            del self._lanes[job], self._drafters[job]
        for reader in self._readers:
            if reader.full():
                reader.get_nowait()
            reader.put_nowait(event)

    async def read(self, ended: Callable[[], bool]) -> AsyncIterator[dict[str, Any] | None]:
        """Yield the events from now on, until `ended` says so; None about once a second, to keep the stream open."""
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(_WAITING)
        self._readers.append(queue)
        try:
            while not ended():
                try:
                    yield await asyncio.wait_for(queue.get(), _ALIVE)
                except asyncio.TimeoutError:
                    yield None
        finally:
            self._readers.remove(queue)
