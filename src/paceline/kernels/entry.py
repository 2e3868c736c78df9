"""Everything there is for a CPU: importing this compiles it, or reads what was compiled before."""

from functools import partial

from . import branches, drafting, growing, heads, packed

LATER = tuple(partial(packed.compiled, kind) for kind in packed.KINDS)  # compiled when a model first needs them

__all__ = ["LATER", "branches", "drafting", "growing", "heads"]
