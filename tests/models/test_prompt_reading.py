"""Which pieces of prompts are captured."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from paceline.models.cuda.cuda_forward import PromptReader, padded


class Kernels:
    """Notes what it was given to read."""

    def __init__(self) -> None:
        self.read_so_far: list[tuple[int, list[list[int]], list[int]]] = []

    def read(self, cache: Any, first: int, tokens: torch.Tensor, position: torch.Tensor, taps: Any) -> Any:
        self.read_so_far.append((first, tokens.tolist(), position[0].tolist()))
        return tuple(tokens.unsqueeze(-1) * tap for tap in taps)


class Cache:
    storage_version = 0

    def reserve(self, rows: int, slots: int) -> None: ...
    def set_next_write(self, rows: slice, start: int, stop: int, longest: int) -> None: ...


class Programs:
    def __init__(self) -> None:
        self.keys: list[Hashable] = []
        self.forgot = 0
        self.result: tuple[torch.Tensor, ...] = ()

    def run(self, key: Hashable, program: Callable[[], Any]) -> Any:
        self.keys.append(key)
        self.result = program()
        return self.result

    def forget(self) -> None:
        self.forgot += 1


def reader(taps: tuple[int, ...] = ()) -> tuple[PromptReader, Kernels, Programs]:
    made = PromptReader.__new__(PromptReader)
    kernels, programs = Kernels(), Programs()
    made._kernels, made._programs = kernels, programs  # type: ignore[assignment]
    made._pieces, made._met, made._moved, made._taps = {}, set(), 0, taps
    return made, kernels, programs


def ids(length: int, value: int = 1) -> torch.Tensor:
    return torch.full((1, length), value)


def test_the_first_row_at_once_and_others_when_they_come_again() -> None:
    made, kernels, programs = reader()
    cache: Any = Cache()
    made.read(cache, 0, ids(5), 0)
    assert programs.keys == [(0, 16, 0)]
    made.read(cache, 3, ids(5), 0)
    made.read(cache, 4, ids(5), 0)
    assert len(programs.keys) == 1
    made.read(cache, 3, ids(9, 7), 0)
    assert programs.keys[1:] == [(3, 16, 0)]
    assert [first for first, _, _ in kernels.read_so_far] == [0, 3, 4, 3]
    assert all(len(row) == padded(5) for _, tokens, _ in kernels.read_so_far for row in tokens)
    assert kernels.read_so_far[-1][1][0][:9] == [7] * 9


def test_tensors_of_a_program_stay_and_what_moved_is_forgotten() -> None:
    made, _, programs = reader()
    cache: Any = Cache()
    made.read(cache, 0, ids(5), 32)
    before = made._pieces[(0, 16, 32)][0].data_ptr()
    made.read(cache, 0, ids(6), 32)
    assert made._pieces[(0, 16, 32)][0].data_ptr() == before
    cache.storage_version = 1
    made.read(cache, 5, ids(6), 0)
    assert (programs.forgot, made._pieces) == (1, {})


def test_what_was_tapped_ends_with_the_prompt_and_outlives_the_next() -> None:
    made, _, programs = reader((1, 2))
    taps = made.read(Cache(), 0, ids(5, 3), 0)  # type: ignore[arg-type]
    programs.result[0].zero_()
    assert [tap.squeeze(-1).tolist() for tap in taps] == [[[3] * 5], [[6] * 5]]
    assert [tap.squeeze(-1).tolist() for tap in made.read(Cache(), 2, ids(4), 0)] == [[[1] * 4], [[2] * 4]]  # type: ignore[arg-type]
