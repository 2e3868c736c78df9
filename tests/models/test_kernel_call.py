"""The list of numbers that a CPU kernel gets, and its buffers."""

from __future__ import annotations

import pytest

pytest.importorskip("numba")

from paceline.models.cpu.cpu_forward import KernelCall, kernels_missing

NAMES = ("a", "barrier", "x", "counters", "y", "scores", "scores_step", "row", "extra", "extras", "b")


def call_of(**options: bool) -> KernelCall:
    if kernels_missing() is not None:
        pytest.skip("no kernels here")
    return KernelCall(NAMES, {"x": 3, "y": 5}, ("row",), optional=("b",), **options)


def test_numbers_are_in_the_order_of_the_names_before_lines_of_zeros() -> None:
    call = call_of()
    call.make_room(1, 1, 1)
    numbers = call.numbers({"a": 7}, counters=4)
    named = dict(zip(NAMES, numbers.tolist(), strict=False))
    assert (named["a"], named["b"]) == (7, 0)
    assert named["barrier"] % 64 == 0
    assert named["barrier"] >= numbers.ctypes.data + 8 * len(NAMES)
    assert named["counters"] == named["barrier"] + 64
    assert named["counters"] + 4 * 64 <= numbers.ctypes.data + numbers.nbytes
    assert not numbers[len(NAMES) :].any()
    assert call.numbers({"a": 7}, counters=4)[1] != named["barrier"]  # of this call alone


def test_a_name_that_is_left_out_is_an_error() -> None:
    call = call_of()
    call.make_room(1, 1, 1)
    with pytest.raises(KeyError, match="a"):
        call.numbers({}, counters=1)


@pytest.mark.parametrize("branches", [False, True])
def test_buffers_do_not_overlap(branches: bool) -> None:
    n, visible, threads = 3, 10, 2
    where, (floats, lists) = call_of(branches=branches).allocate(n, visible, threads)
    sizes = {"x": 4 * 3 * n, "y": 4 * 5 * n, "scores": threads * where["scores_step"], "row": 8 * n}
    sizes |= {"extra": 8 * (n + 1), "extras": 8 * (n * visible + 1 if branches else 1)}
    for names, tensor in ((("x", "y", "scores"), floats), (("row", "extra", "extras"), lists)):
        at = tensor.data_ptr()
        for name in names:
            assert where[name] == at
            at += sizes[name]
        assert at == tensor.data_ptr() + tensor.nbytes
    assert branches or not lists.any()


def test_kept_buffers_only_grow() -> None:
    call = call_of()
    call.make_room(20, 5, 2)
    before = call.addresses
    for smaller in ((32, 16, 2), (1, 1, 1)):
        call.make_room(*smaller)
        assert call.addresses is before
    call.floats("y", 32 * 5).fill_(1)
    assert call.floats("y", 1).data_ptr() == before["y"]
    call.make_room(1, 17, 1)
    assert call.addresses["scores_step"] > before["scores_step"]
    assert call.addresses["y"] - call.addresses["x"] == 4 * 3 * 32
