"""Find out whether kernels can run on this machine. This compiles nothing and works without numba."""

from __future__ import annotations

import os
import platform
import sys

SWITCH = "PACELINE_KERNELS"
_X86, _ARM = {"x86_64", "amd64"}, {"arm64", "aarch64"}


def missing() -> str | None:
    """Return why kernels cannot run here; None if they can."""
    if os.environ.get(SWITCH, "").strip().lower() in {"off", "no", "false", "0"}:
        return f"{SWITCH} is off"
    if sys.byteorder != "little" or sys.maxsize < 1 << 32:
        return "kernels need a 64-bit, little-endian processor"
    processor = platform.machine().lower()
    if processor not in _X86 | _ARM:
        return f"kernels are for x86-64 and ARM64, not '{processor}'"
    try:
        from numba import config
    except Exception as error:  # numba checks its environment at import, and can raise any error
        return f"numba cannot be imported ({error})"
    if config.DISABLE_JIT:
        return "numba compiles nothing (NUMBA_DISABLE_JIT)"
    lacking = sorted({"avx2", "fma"} - features()) if processor in _X86 else []
    if lacking:
        return f"kernels need AVX2 and FMA, and this processor lacks {' and '.join(lacking)}"
    return None


def features() -> set[str]:
    """Return the processor features that numba compiles for, without those that the user switched off
    (NUMBA_ENABLE_AVX, NUMBA_CPU_FEATURES). Without FMA, each fused multiplication would be a library call per float."""
    from llvmlite import binding
    from numba import config

    if config.CPU_FEATURES is not None:
        return {name[1:] for name in config.CPU_FEATURES.split(",") if name.startswith("+")}
    try:
        found = {name for name, there in binding.get_host_cpu_features().items() if there}
    except RuntimeError:  # LLVM does not know this system
        return set()
    return found if config.ENABLE_AVX else {name for name in found if not name.startswith("avx")}
