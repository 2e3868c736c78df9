"""Products of weights in every format, against float64: odd shapes, odd addresses, and the same bits in any company."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from paceline.kernels.cpu import product

BLOCKS = ("q4_1",)


@dataclass
class Weights:
    """A matrix as it lies in memory, and what it means."""

    memory: np.ndarray  # bytes
    scales: np.ndarray
    exact: np.ndarray  # [outputs, K] float64


def made(kind: str, outputs: int, K: int, dice: np.random.Generator) -> Weights:
    ones = np.ones(outputs, np.float32)
    w = dice.standard_normal((outputs, K)).astype(np.float32)
    if kind in ("float32", "bfloat16"):
        tensor = torch.from_numpy(w).to(getattr(torch, kind))
        return Weights(tensor.view(torch.uint8).numpy(), ones, tensor.double().numpy())
    if kind == "int8":
        q = dice.integers(-128, 128, (outputs, K)).astype(np.int8)
        scales = dice.uniform(0.5, 2, outputs).astype(np.float32)
        return Weights(q.view(np.uint8), scales, q * scales.astype(np.float64)[:, None])
    blocks = (outputs, K // 32)
    d = dice.uniform(1e-6, 0.1, (*blocks, 1)).astype(np.float16)  # some are subnormal
    m = dice.uniform(-1, 1, (*blocks, 1)).astype(np.float16)
    q = dice.integers(0, 16, (*blocks, 32)).astype(np.uint8)
    memory = np.concatenate([d.view(np.uint8), m.view(np.uint8), q[..., :16] | q[..., 16:] << 4], 2)
    exact = d.astype(np.float64) * q + m.astype(np.float64)
    return Weights(memory.reshape(outputs, -1), ones, exact.reshape(outputs, K))


def shifted(array: np.ndarray, bytes: int) -> tuple[np.ndarray, int]:
    """A copy that begins `bytes` after a line of memory and ends where nothing else may be read or written: what is
    around it are NaNs, whatever they are read as. And its address."""
    held = np.full(array.nbytes + 256, 0xFF, np.uint8)
    start = -held.ctypes.data % 64 + bytes
    held[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    return held, held.ctypes.data + start


def multiplied(kind: str, weights: Weights, x: np.ndarray, low: int, high: int, shift: int = 0) -> np.ndarray:
    n, K = x.shape
    outputs = len(weights.exact)
    whole = np.zeros((n, outputs), np.float32)
    held = [shifted(weights.memory, shift), shifted(weights.scales, 4), shifted(x, 4), shifted(whole, 4)]
    w, scales, rows, y = (address for _, address in held)
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 11)(product.compiled(kind).address)
    function(rows, 4 * K, n, w, scales, K, low, high, y, 4 * outputs, w)
    out, start = held[3][0], y - held[3][0].ctypes.data
    around = np.delete(out, np.s_[start : start + whole.nbytes])
    assert (around == 0xFF).all(), "nothing else is written"
    return out[start : start + whole.nbytes].view(np.float32).reshape(n, outputs).copy()


def inputs(kind: str) -> list[int]:
    return [32, 96, 576] if kind in BLOCKS else [1, 7, 8, 31, 40, 63, 100, 576]


@pytest.mark.parametrize("kind", product.KINDS)
def test_every_row_is_right_and_the_same_at_every_n(kind: str) -> None:
    dice = np.random.default_rng(0)
    for K in inputs(kind):
        for outputs in (1, 2, 5, 12, 19):
            weights, x = made(kind, outputs, K, dice), dice.standard_normal((17, K)).astype(np.float32)
            wanted = x.astype(np.float64) @ weights.exact.T
            most = np.abs(x).astype(np.float64) @ np.abs(weights.exact).T  # what rounding errors are a share of
            alone = np.concatenate([multiplied(kind, weights, x[r : r + 1], 0, outputs) for r in range(17)])
            assert (np.abs(alone - wanted) <= 1e-6 * most + 1e-12).all()
            for n in range(2, 18):
                together = multiplied(kind, weights, x[:n], 0, outputs)
                assert together.tobytes() == alone[:n].tobytes(), (K, outputs, n)


@pytest.mark.parametrize("kind", product.KINDS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 9])
def test_some_outputs_at_odd_addresses(kind: str, n: int) -> None:
    """Any part of the outputs, from any byte: GGUF files and safetensors promise little about where tensors begin."""
    dice = np.random.default_rng(n)
    K, outputs = (64, 11) if kind in BLOCKS else (43, 11)
    weights, x = made(kind, outputs, K, dice), dice.standard_normal((n, K)).astype(np.float32)
    whole = multiplied(kind, weights, x, 0, outputs)
    size = {"float32": 4, "bfloat16": 2}.get(kind, 1)
    for low, high, shift in ((0, 11, size), (3, 10, 2 * size), (5, 6, 7 * size), (4, 4, 0), (1, 11, 13 * size)):
        part = multiplied(kind, weights, x, low, high, shift)
        assert part[:, low:high].tobytes() == whole[:, low:high].tobytes()
        assert not np.delete(part, np.s_[low:high], 1).any()


@pytest.mark.parametrize("kind", ["bfloat16"])
def test_floats_cut_short_multiply_as_the_floats_they_are(kind: str) -> None:
    """A checkpoint in bfloat16 says the same in float32, bit for bit, at twice the bytes."""
    dice = np.random.default_rng(1)
    weights, x = made(kind, 21, 123, dice), dice.standard_normal((6, 123)).astype(np.float32)
    long = weights.exact.astype(np.float32)
    floats = Weights(long.view(np.uint8), weights.scales, weights.exact)
    for n in (1, 4, 6):
        assert (multiplied(kind, weights, x[:n], 0, 21) == multiplied("float32", floats, x[:n], 0, 21)).all()


def test_blocks_mean_what_gguf_says() -> None:
    gguf = pytest.importorskip("gguf")
    dice = np.random.default_rng(2)
    for kind in BLOCKS:
        weights = made(kind, 5, 96, dice)
        theirs = gguf.quants.dequantize(weights.memory, gguf.GGMLQuantizationType[kind.upper()])
        np.testing.assert_allclose(theirs, weights.exact, rtol=1e-6, atol=1e-7)
