"""Who goes when, and on what: the order of contestants, the turns of conversations, and whether texts are the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from .contest import Contestant, Run, Task

Tokens = tuple[tuple[int, ...], ...]


class Talk(Protocol):
    """Prompts that are decoded together, turn after turn (see `tasks.Conversation`)."""

    task: Task

    @property
    def turns(self) -> int: ...

    def next_task(self, written: Sequence[Sequence[int]]) -> Task | None: ...


class Silence:
    """A watcher for whom nothing has to be shown."""

    def started(self, contestants: Sequence[Contestant], runs: int) -> None:
        pass

    def ran(self, run: Run, same: bool | None) -> None:
        pass

    def noted(self, sentence: str) -> None:
        pass


def order(count: int, repeat: int, task: int) -> list[int]:
    """Who goes when. Plain decoding (0) opens a task; every second repeat goes backwards, and after two the next one
    begins; from task to task the others change places. So nobody always runs after the same neighbour."""
    others = list(range(1, count))
    start = task % len(others) if others else 0
    row = [0, *others[start:], *others[:start]]
    shift = (repeat // 2) % count
    row = row[shift:] + row[:shift]
    return row[::-1] if repeat % 2 else row


@dataclass
class Turn:
    """A task that is being done, and then what plain decoding wrote."""

    task: Task
    written: Tokens = ()


def turns(talks: Sequence[Talk]) -> Iterator[Turn]:
    """The tasks of all conversations; before it is asked for the next one, `written` must be filled in."""
    for talk in talks:
        turn: Task | None = talk.task
        while turn is not None:
            at_hand = Turn(turn)
            yield at_hand
            turn = talk.next_task(at_hand.written)


def first_difference(tokens: Sequence[Sequence[int]], text: Sequence[Sequence[int]]) -> int | None:
    """The first position at which any row is another; None where all are the same."""
    places = [
        next((place for place, pair in enumerate(zip(row, other, strict=False)) if pair[0] != pair[1]), None)
        for row, other in zip(tokens, text, strict=True)
    ]
    return min((place for place in places if place is not None), default=None)
