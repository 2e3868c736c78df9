"""What the kernels become on processors that are not here: LLVM compiles for them all, and their code can be read."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import pytest
from numba import njit, types

from paceline.kernels.cpu import team, vectors
from paceline.kernels.cpu.formats import FLOAT32
from paceline.kernels.cpu.product import product

_INT = types.int64
_multiply = product(FLOAT32)


@njit(types.void(_INT, _INT), nogil=True)
def meeting(barrier, wanted):
    vectors.fetch_add(barrier, 1)
    while vectors.look(barrier) < wanted:
        team.step_aside()


@njit(types.float32(_INT, _INT), nogil=True)
def weighing(scores, count):
    return vectors.softmax(scores, count)


@njit(types.void(*[_INT] * 11), nogil=True)
def multiplying(x, x_step, n, w, scales, K, low, high, y, y_step, after):
    _multiply(x, x_step, n, w, scales, K, low, high, y, y_step, after)


PROCESSORS = {
    "aarch64-unknown-linux-gnu": "cortex-a72",
    "arm64-apple-macosx": "apple-m1",
    "aarch64-pc-windows-msvc": "generic",
    "x86_64-pc-windows-msvc": "haswell",
    "x86_64-apple-macosx": "haswell",
}


@cache
def _all_targets() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def assembly(kernel: Any, triple: str) -> str:
    _all_targets()
    (code,) = kernel.inspect_llvm().values()
    code = re.sub(r"^target (datalayout|triple) = .*$", "", code, flags=re.M)
    code = re.sub(r'"target-(cpu|features)"="[^"]*"', "", code)
    machine = llvm.Target.from_triple(triple).create_target_machine(opt=3, cpu=PROCESSORS[triple])
    module = llvm.parse_assembly(code)
    module.triple, module.data_layout = triple, str(machine.target_data)
    return machine.emit_assembly(module)


def on_arm(triple: str) -> bool:
    return not triple.startswith("x86")


@pytest.mark.parametrize("kernel", [weighing, multiplying], ids=["softmax", "product"])
@pytest.mark.parametrize("triple", PROCESSORS)
def test_a_fused_multiplication_is_one_instruction(triple: str, kernel: Callable[..., Any]) -> None:
    """And rounding too. A call of a library for every float would be right, and hundreds of times slower."""
    code = assembly(kernel, triple)
    assert re.search(r"\bfmla" if on_arm(triple) else r"\bvfmadd\d+ps", code)
    assert not re.search(r"\b_?(fmaf?|rintf?|nearbyintf?|expf?|memcpy)\b", code)


@pytest.mark.parametrize("triple", PROCESSORS)
def test_threads_that_meet_see_what_the_others_wrote(triple: str) -> None:
    """ARM may reorder reads and writes: entering a barrier releases, leaving it acquires."""
    code = assembly(meeting, triple)
    if not on_arm(triple):
        assert re.search(r"\block\b", code)
        return
    assert re.search(r"\bldaddal\b", code) or (re.search(r"\bldaxr\b", code) and re.search(r"\bstlxr\b", code))
    assert re.search(r"\b(ldar|ldapr)\b", code)
