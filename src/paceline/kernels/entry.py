"""Everything there is for a CPU: importing this compiles it, or reads what was compiled before."""

from . import branches, drafting, growing, heads

__all__ = ["branches", "drafting", "growing", "heads"]
