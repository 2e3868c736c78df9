"""One batch at a time: a drafter holds the state of the rows that it drafts for."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from .contracts import Drafter
from .errors import InputError

_SLOT = "_claim"  # the attribute of a drafter in which its batch stands


class _Claim:
    """A batch, and the drafters that are its own. A copy of a drafter has another id, so that it is not claimed."""

    def __init__(self) -> None:
        self.ids: set[int] = set()


@contextmanager
def claimed(drafter: Drafter) -> Iterator[None]:
    """The drafter, and all drafters inside it, belong to one batch. Raises `InputError` where one has a batch already.

    A drafter that never speculates holds no state, so that any number of batches may share it."""
    claim, taken = _Claim(), list[Drafter]()
    try:
        for each in (drafter, *drafter.all_inside()) if drafter.speculates else ():
            if not _take(each, claim):
                gc.collect()  # a stream that was dropped in a reference cycle still holds its drafter
                if not _take(each, claim):
                    raise InputError(
                        f"Drafter '{each.name}' already drafts for another batch. Make a second drafter object, or "
                        "wait until that batch ends."
                    )
            taken.append(each)
        yield
    finally:
        for each in taken:
            each.__dict__.pop(_SLOT, None)


def _take(drafter: Drafter, claim: _Claim) -> bool:
    claim.ids.add(id(drafter))
    holder = drafter.__dict__.setdefault(_SLOT, claim)  # one step, so that of two threads one is first
    if holder is not claim and id(drafter) not in holder.ids:  # the mark was copied with the drafter
        drafter.__dict__[_SLOT] = holder = claim
    return holder is claim
