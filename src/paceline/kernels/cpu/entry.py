"""Everything there is for a CPU: importing this compiles it, or reads what was compiled before."""

from functools import partial

from paceline.kernels.cpu import head_layer as heads
from paceline.kernels.cpu import head_steps as drafting
from paceline.kernels.cpu import packed
from paceline.kernels.cpu import tree_growing as growing
from paceline.kernels.cpu import tree_paths as branches

LATER = tuple(partial(packed.compiled, kind) for kind in packed.KINDS)  # compiled when a model first needs them

__all__ = ["LATER", "branches", "drafting", "growing", "heads"]
