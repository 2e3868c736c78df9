"""The mailbox, when the event loop ends before the engine thread."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.serve.jobs import Update
from paceline.serve.mailbox import Mailbox


def opened(loop: asyncio.AbstractEventLoop) -> Mailbox:
    mailbox, engine = Mailbox(), object()

    async def listen() -> None:
        mailbox.open(engine, ())  # type: ignore[arg-type]

    loop.run_until_complete(listen())
    return mailbox


def test_updates_for_a_loop_that_was_closed_are_dropped() -> None:
    loop = asyncio.new_event_loop()
    mailbox = opened(loop)
    loop.close()
    mailbox.deliver([Update("1")])


def test_other_errors_of_the_loop_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> None:
        raise RuntimeError("broken")

    loop = asyncio.new_event_loop()
    mailbox = opened(loop)
    monkeypatch.setattr(loop, "call_soon_threadsafe", broken)
    with pytest.raises(RuntimeError, match="broken"):
        mailbox.deliver([Update("1")])
    monkeypatch.undo()
    loop.close()
