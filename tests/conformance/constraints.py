"""A constraint without a grammar: which tokens may follow depends on all new tokens before, and some are forced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .models import EOS, VOCABULARY

_FORCED = 4  # in one of four states only one token may follow
_FREE = [token for token in range(VOCABULARY) if token not in (EOS, 12, 25, 33)]  # which others ban


@dataclass(frozen=True)
class Winding:
    """Allows about a third of the tokens. `last`: after this token the text is complete."""

    last: int | None = None

    def start(self, ends: Sequence[int]) -> WindingCursor:
        return WindingCursor(self, tuple(ends))

    def after(self, text: Sequence[int]) -> list[int]:
        """The tokens that may follow."""
        state = sum((place + 3) * (token + 1) for place, token in enumerate(text))
        if state % _FORCED == 0:
            return [_FREE[state // _FORCED % len(_FREE)]]
        return [token for token in range(VOCABULARY) if (token * 7 + state) % 3 == 0]


@dataclass
class WindingCursor:
    """The place of one text."""

    of: Winding
    ends: tuple[int, ...]
    text: list[int] = field(default_factory=list)
    problem: str = ""

    def allowed(self, paths: Sequence[tuple[int, ...]]) -> Tensor:
        mask = torch.zeros(len(paths), VOCABULARY, dtype=torch.bool)
        for row, path in enumerate(paths):
            mask[row, self.of.after([*self.text, *path])] = True
        return mask

    def forced(self, most: int) -> list[int]:
        found: list[int] = []
        while len(found) < most and len(follow := self.of.after([*self.text, *found])) == 1:
            found += follow
        return found

    def commit(self, token: int) -> bool:
        assert token in self.of.after(self.text), "a token was committed that the constraint forbids"
        self.text.append(token)
        return token == self.of.last

    def seek(self, tokens: Sequence[int]) -> bool:
        self.text = list(tokens)
        return self.text[-1:] == [self.of.last]
