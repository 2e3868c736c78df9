"""The pause of a drafter that failed."""

from __future__ import annotations

FIRST_PAUSE, LONGEST_PAUSE = 16, 512  # rounds without drafts after a failure: the first pause, and the longest


class Pause:
    """A pause in rounds. Each one is twice as long as the one before."""

    def __init__(self) -> None:
        self.rounds = self._waited = 0

    @property
    def is_over(self) -> bool:
        return self._waited >= self.rounds

    def begin(self) -> bool:
        """Begin the next pause. Return whether it is longer than the one before."""
        before, self.rounds = self.rounds, min(2 * self.rounds, LONGEST_PAUSE) or FIRST_PAUSE
        self._waited = 0
        return self.rounds > before

    def count_round(self) -> None:
        self._waited += 1
