"""Which of the waiting sequences get slots, and how much work it is to choose them."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.engine.scheduler import Party, Scheduler


class Counted(int):
    """A priority that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        Counted.compared += 1
        return int(self) < int(other)


def party(client: str, priority: int, rows: int = 1, owner: str = "") -> Party:
    return Party([SimpleNamespace() for _ in range(rows)], owner, priority, client)  # type: ignore[misc]


def scheduler(slots: int, live: list[str], waiting: list[Party]) -> Scheduler:
    """A scheduler over a loop that has only what the choice needs: the clients of the live rows."""
    rows = SimpleNamespace(live=[SimpleNamespace(client=client) for client in live])
    loop: Any = SimpleNamespace(rows=rows, reader=None, captures=False, slots=SimpleNamespace(taken=len(live)))
    made = Scheduler(loop, slots)
    for each in waiting:
        made.submit(each)
    return made


def one_by_one(slots: int, live: list[str], waiting: list[Party]) -> list[Party]:
    """The definition: again and again the party of the lowest priority number, whose client has the fewest rows, that
    came first; until one does not fit."""
    known, taken, left, chosen = Counter(live), len(live), list(waiting), list[Party]()
    while left:
        best = min(left, key=lambda each: (each.priority, known[each.client], each.number))
        if taken and taken + len(best.rows) > slots:
            break
        left.remove(best)
        chosen.append(best)
        taken += len(best.rows)
        known[best.client] += len(best.rows)
    return chosen


@pytest.mark.parametrize("clients", ["a", "abc"])
def test_the_order_is_that_of_the_definition(clients: str) -> None:
    dice = random.Random(clients)
    for case in range(200):
        live = [dice.choice(clients) for _ in range(dice.randrange(4))]
        waiting = [
            party(dice.choice(clients), dice.choice([0, 0, 1, 5]), dice.choice([1, 1, 1, 3]))
            for _ in range(dice.randrange(12))
        ]
        slots = dice.choice([2, 5, 20])
        made = scheduler(slots, live, waiting)
        assert made._fitting() == one_by_one(slots, live, waiting), f"case {case}"


def test_a_client_gets_no_more_slots_with_several_owners() -> None:
    """A client chooses the names of its KV caches, so a new name must not be a new share."""
    many = [party("a", 0, owner=f"a/{number}") for number in range(4)]
    one = [party("b", 0, owner="b/") for _ in range(2)]
    assert scheduler(4, [], [*many, *one])._fitting() == [many[0], one[0], many[1], one[1]]


def test_the_choice_among_many_that_wait_is_little_work() -> None:
    """Each comparison of all that wait for each slot made 10,000 prompts take seconds."""
    count = 3000
    waiting = [party("ab"[number % 2], Counted(number % 3)) for number in range(count)]
    made = scheduler(count, [], waiting)
    Counted.compared = 0
    assert len(made._fitting()) == count
    assert Counted.compared < 40 * count
    full = scheduler(1, ["a"], waiting)
    Counted.compared = 0
    assert full._fitting() == []
    assert Counted.compared == 0, "no slot is free"
