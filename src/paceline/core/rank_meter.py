"""How often the first, the second, the third guess comes true: what the best shape of a tree depends on."""

from __future__ import annotations

import torch
from torch import Tensor

from .contracts import arange
from .verdict import Verdict

_FIRST_LOOK = 16  # rounds before the shape is first fitted to what was measured; then at every doubling


class RankMeter:
    """How often the child of each rank was the accepted one. Counted on the device, read at every doubling."""

    _MOST = 64  # ranks that are told apart

    def __init__(self) -> None:
        self._rounds, self._next = 0, _FIRST_LOOK
        self._hits: Tensor | int = 0  # [64] places where the child of that rank was accepted
        self._tries: Tensor | int = 0  # [64] places, of those that were reached, that had such a child

    def add(self, ranks: Tensor, parents: Tensor, verdict: Verdict) -> None:
        """`ranks` [R,N]: the rank of every node among its siblings."""
        assert verdict.path is not None
        R, N = ranks.shape
        children = torch.zeros(R, N + 1, dtype=torch.int64, device=ranks.device)
        children = children.scatter_add(1, parents + 1, torch.ones_like(parents))  # of the text and of every node
        inside = arange(0, verdict.path.shape[1], ranks.device) < verdict.accepted
        taken = ranks.gather(1, verdict.path).where(inside, self._MOST)
        below = torch.cat([children[:, :1], children.gather(1, verdict.path + 1).where(inside, 0)], 1)
        every = arange(0, self._MOST, ranks.device)
        self._hits = self._hits + (taken.unsqueeze(-1) == every).sum((0, 1))
        self._tries = self._tries + (below.unsqueeze(-1) > every).sum((0, 1))
        self._rounds += 1

    def due(self) -> bool:
        if self._rounds < self._next:
            return False
        self._next *= 2
        return True

    def acceptance(self, ranks: int) -> list[float]:
        """A share for each rank, falling; a rank that was never tried gets half of the one before it."""
        assert isinstance(self._hits, Tensor)
        assert isinstance(self._tries, Tensor)
        found: list[float] = []
        for hits, tries in zip(self._hits[:ranks].tolist(), self._tries[:ranks].tolist(), strict=True):
            before = found[-1] if found else 1.0
            # half a hit in advance: nobody is written off for bad luck, and no share is 0
            found.append(min(before, (hits + 0.5) / (tries + 1)) if tries else before / 2)
        return found
