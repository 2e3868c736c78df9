"""Pass updates from the engine thread to the requests that wait for them, once per round."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from paceline.serve.jobs import Engine, Job, Update


class Ticket:
    """The updates of the jobs of one request, as (index of the job, update), until all of them ended."""

    def __init__(self, engine: Engine, jobs: Sequence[Job]) -> None:
        self._engine = engine
        self._index = {job.id: at for at, job in enumerate(jobs)}
        self._open = set(self._index)
        self._queue: asyncio.Queue[Update] = asyncio.Queue()
        self.expired = False

    def put(self, update: Update) -> None:
        self._queue.put_nowait(update)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Update]]:
        while self._open:
            update = await self._queue.get()
            if update.ending is not None:
                self._open.discard(update.job)
            yield self._index[update.job], update

    def cancel(self) -> None:
        """End the jobs that have not ended. Each of them gets a last update."""
        if self._open:
            self._engine.cancel(sorted(self._open))

    def expire(self) -> None:
        """Cancel the jobs of a request that took too long."""
        self.expired = True
        self.cancel()


class Mailbox:
    """Gives every update to the ticket of its job. Only `deliver` may be called from another thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tickets: dict[str, Ticket] = {}
        self._listeners: list[Callable[[Update], None]] = []

    def listen(self, listener: Callable[[Update], None]) -> None:
        """Call `listener` with every update, on the event loop's thread."""
        self._listeners.append(listener)

    def deliver(self, updates: list[Update]) -> None:
        """Take the updates of a round. The engine thread calls it."""
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(self._sort, updates)
        except RuntimeError:  # the event loop was closed, so no request waits
            if not loop.is_closed():
                raise

    def open(self, engine: Engine, jobs: Sequence[Job]) -> Ticket:
        """Return a ticket for jobs that are submitted next."""
        self._loop = asyncio.get_running_loop()
        ticket = Ticket(engine, jobs)
        self._tickets.update((job.id, ticket) for job in jobs)
        return ticket

    def close(self, jobs: Sequence[Job]) -> None:
        """Discard all later updates of these jobs."""
        for job in jobs:
            self._tickets.pop(job.id, None)

    @property
    def waiting(self) -> int:
        """Jobs that have a ticket."""
        return len(self._tickets)

    def _sort(self, updates: list[Update]) -> None:
        for update in updates:
            for listener in self._listeners:
                listener(update)
            ticket = self._tickets.get(update.job)
            if ticket is not None:
                ticket.put(update)
