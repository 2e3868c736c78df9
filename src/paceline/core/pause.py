"""The pause of a drafter that failed."""

from __future__ import annotations

FIRST_PAUSE, LONGEST_PAUSE = 16, 512  # rounds without drafts after a failure: the first pause, and the longest


class Pause:
    """A pause in rounds. Each one is twice as long as the one before."""

    def __init__(self) -> None:
        self.rounds = 0  # its length
        self.waited = 0  # the rounds that have passed; the caller counts them

    @property
    def is_over(self) -> bool:
        return self.waited >= self.rounds

    def begin(self) -> bool:
        """Begin the next pause. Return whether it is longer than the one before."""
        before, self.rounds = self.rounds, min(2 * self.rounds, LONGEST_PAUSE) or FIRST_PAUSE
        self.waited = 0
        return self.rounds > before
