"""How fast a skinny product is here, ours and torch's: 40 matrices of 3072×576, float32.

    python -m tests.real.product_speed

Every candidate takes its turn in every sweep; medians. Read bandwidth is that of `torch.sum` over the same weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from numba import njit

from paceline.kernels.cpu import team
from paceline.kernels.cpu.product import multiply
from paceline.kernels.cpu.team import meet

MATRICES, OUTPUTS, K = 40, 3072, 576
ROWS = (1, 2, 4, 8, 16)
SWEEPS = 15


@njit(nogil=True)
def _all(w, x, n, y, barrier, threads, me):  # type: ignore[no-untyped-def]
    low, high = OUTPUTS * me // threads, OUTPUTS * (me + 1) // threads
    size = 4 * OUTPUTS * K
    for m in range(MATRICES):
        here = w + m * size
        multiply(x, 4 * K, n, here, K, low, high, y, 4 * OUTPUTS, here + size + 4 * K * low)
    meet(barrier, threads)


def candidates(weights: torch.Tensor, threads: int) -> dict[str, Callable[[torch.Tensor], None]]:
    packed = [torch.ops.mkldnn._reorder_linear_weight(w) for w in weights]
    barrier, out = np.zeros(8, np.int64), torch.empty(max(ROWS), OUTPUTS)

    def ours(x: torch.Tensor) -> None:
        barrier[:] = 0
        team.TEAM.run(
            threads, _all, weights.data_ptr(), x.data_ptr(), len(x), out.data_ptr(), barrier.ctypes.data, threads
        )

    def linear(x: torch.Tensor) -> None:
        for w in weights:
            torch.nn.functional.linear(x, w)

    def turned(x: torch.Tensor) -> None:
        columns = x.T.contiguous()
        for w in weights:
            torch.mm(w, columns)

    def onednn(x: torch.Tensor) -> None:
        for w in packed:
            torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")

    return {"ours": ours, "torch linear": linear, "torch, w·xᵀ": turned, "oneDNN packed": onednn}


def main() -> None:
    threads = team.TEAM.gather(torch.get_num_threads())
    weights = torch.randn(MATRICES, OUTPUTS, K)
    runs = candidates(weights, threads)
    runs["torch.sum"] = lambda x: weights.sum()  # type: ignore[assignment, return-value]
    taken: dict[tuple[str, int], list[float]] = {}
    inputs = {n: torch.randn(n, K) for n in ROWS}
    for _ in range(SWEEPS + 1):
        for name, run in runs.items():
            for n in ROWS if name != "torch.sum" else (1,):
                started = time.perf_counter()
                run(inputs[n])
                taken.setdefault((name, n), []).append(time.perf_counter() - started)
    size = weights.numel() * 4
    print(f"{threads} threads; ms (GB/s of weights), median of {SWEEPS}")
    for name in runs:
        told = [
            f"{1e3 * middle:.1f} ({size / middle / 1e9:.0f})"
            for n in ROWS
            if (name, n) in taken
            for middle in [median(taken[name, n][1:])]
        ]
        print(f"  {name:14}", "  ".join(told))


if __name__ == "__main__":
    with torch.no_grad():
        main()
