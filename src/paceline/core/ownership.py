"""Which batch and which loop a drafter belongs to. It holds the state of its rows, so it has one batch at a time."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.common.errors import InputError
from paceline.core.contracts import Drafter
from paceline.core.protocols import HoldsDrafters, speculates

_CLAIM = "_claim"  # the attribute of a drafter that names its batch
_OPENER = "_opened_by"  # the attribute of a drafter that holds the mark of the loop that opened it last


def inside(drafter: Drafter) -> Sequence[Drafter]:
    """Return the drafters that this one calls: by default, its attributes that are drafters."""
    if isinstance(drafter, HoldsDrafters):
        return drafter.inside()
    return [value for value in vars(drafter).values() if isinstance(value, Drafter)]


def all_inside(drafter: Drafter) -> list[Drafter]:
    """Return the drafters inside this one, and those inside them, each once."""
    found: dict[int, Drafter] = {}
    waiting = list(inside(drafter))
    while waiting:
        inner = waiting.pop(0)
        if inner is not drafter and id(inner) not in found:
            found[id(inner)] = inner
            waiting += inside(inner)
    return list(found.values())


# ---- The loop that opened a drafter


def mark_opened(drafter: Drafter, mark: object) -> None:
    """Note that the loop with this mark opened the drafter, and those inside it."""
    for opened in (drafter, *all_inside(drafter)):
        opened.__dict__[_OPENER] = mark


def opened_last_by(drafter: Drafter, mark: object) -> bool:
    """Return whether the loop with this mark was the last one to open the drafter, and those inside it."""
    inner = (
        opened.__dict__.get(_OPENER, mark) for opened in all_inside(drafter)
    )  # one made for these rows has no mark
    return drafter.__dict__.get(_OPENER) is mark and all(opener is mark for opener in inner)


# ---- The batch of a drafter


class _Claim:
    """A batch, and the ids of its drafters. A copy of a drafter has another id, so that it is not claimed."""

    def __init__(self) -> None:
        self.ids: set[int] = set()


@contextmanager
def claimed(drafter: Drafter) -> Iterator[None]:
    """The drafter, and all drafters inside it, belong to one batch. Raises `InputError` if one has a batch already."""
    claim, taken = _Claim(), list[Drafter]()
    try:
        for wanted in (drafter, *all_inside(drafter)) if speculates(drafter) else ():
            if not _take(wanted, claim):
                gc.collect()  # a stream that was dropped in a reference cycle still holds its drafter
                if not _take(wanted, claim):
                    raise InputError(
                        f"Drafter '{wanted.name}' already drafts for another batch. Make a second drafter object, or "
                        "wait until that batch ends."
                    )
            taken.append(wanted)
        yield
    finally:
        for wanted in taken:
            wanted.__dict__.pop(_CLAIM, None)


def _take(drafter: Drafter, claim: _Claim) -> bool:
    claim.ids.add(id(drafter))
    holder: Any = drafter.__dict__.setdefault(_CLAIM, claim)  # one step, so that of two threads one is first
    if holder is not claim and id(drafter) not in holder.ids:  # the claim was copied with the drafter
        drafter.__dict__[_CLAIM] = holder = claim
    return holder is claim
