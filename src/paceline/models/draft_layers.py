"""Small layers for drafters with trained weights, and the memory they draft with.

The same layer runs over whole texts (to be trained) and over scratch tokens by slot (to draft): who it remembers is a
function it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.core.contracts import arange
from paceline.core.errors import InputError
from paceline.core.tree import closure

from . import masks
from .slot_cache import SlotCache

# (keys, values) [R,H,Q,W] of the fed tokens -> (keys, values) [R,H,S,W] of all that may be seen
Remember = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def alone(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Remember nothing from before: a text that is read as a whole."""
    return keys, values


def by_slot(cache: SlotCache, layer: int) -> Remember:
    """Remember in `cache`, in the slots it is aimed at."""

    def remember(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = cache.update(keys, values, layer)
        return found

    return remember


@dataclass(frozen=True)
class LayerConfig:
    """The sizes of a decoder layer. `inner`: of its feed-forward part; `head_width`: of one attention head (None: the
    width shared out evenly); `eps`: of its norms; `rope_scaling`: factor, low and high frequency factor and original
    context, as Llama 3 stretches its positions (None: it does not)."""

    width: int
    heads: int
    kv_heads: int
    inner: int
    rope_theta: float = 10000.0
    head_width: int | None = field(default=None, kw_only=True)
    eps: float = field(default=1e-6, kw_only=True)
    rope_scaling: tuple[float, float, float, float] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("width", "heads", "kv_heads", "inner", "rope_theta"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} of a head must be at least 1, got {getattr(self, name)}.")
        if self.head_width is None and self.width % (2 * self.heads):
            raise InputError(f"The width {self.width} of a head must be a multiple of twice its {self.heads} heads.")
        if self.head_width is not None and (self.head_width < 2 or self.head_width % 2):
            raise InputError(f"head_width of a head must be an even number of at least 2, got {self.head_width}.")
        if self.heads % self.kv_heads:
            raise InputError(f"{self.heads} attention heads cannot share {self.kv_heads} key-value heads evenly.")
        if self.eps <= 0:
            raise InputError(f"eps of a head must be above 0, got {self.eps}.")
        stretch = self.rope_scaling
        if stretch is not None and not (len(stretch) == 4 and min(stretch) > 0 and stretch[1] < stretch[2]):
            raise InputError(f"rope_scaling of a head is a factor, low < high and a context, got {stretch}.")


class Norm(nn.RMSNorm):
    """In the numbers of its weights: of a head that is trained, 32 bits, whatever the products around it are in."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.dtype == self.weight.dtype else x.to(self.weight.dtype))


class DecoderLayer(nn.Module):
    """Attention and feed-forward as in Llama: rotary positions, grouped keys, SwiGLU. What attention looks at may be
    wider than the stream it adds to (`seen`)."""

    def __init__(self, config: LayerConfig, seen: int) -> None:
        super().__init__()
        self.config = config
        self.head_width = config.head_width or config.width // config.heads
        own, shared = config.heads * self.head_width, config.kv_heads * self.head_width
        self.q_proj = nn.Linear(seen, own, bias=False)
        self.k_proj = nn.Linear(seen, shared, bias=False)
        self.v_proj = nn.Linear(seen, shared, bias=False)
        self.o_proj = nn.Linear(own, config.width, bias=False)
        self.norm = Norm(config.width, eps=config.eps)
        self.gate_proj = nn.Linear(config.width, config.inner, bias=False)
        self.up_proj = nn.Linear(config.width, config.inner, bias=False)
        self.down_proj = nn.Linear(config.inner, config.width, bias=False)

    def forward(self, seen: Tensor, stream: Tensor, position: Tensor, mask: Tensor, remember: Remember) -> Tensor:
        """seen [R,Q,E], stream [R,Q,D], position [R,Q] (or [1,Q]), mask bool [R,1,Q,S] -> [R,Q,D]."""
        angles = _angles(position, self.head_width, self.config, stream.dtype)
        query = _turn(self._split(self.q_proj(seen)), angles)
        keys, values = remember(_turn(self._split(self.k_proj(seen)), angles), self._split(self.v_proj(seen)))
        grouped = self.config.kv_heads != self.config.heads
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=grouped)
        stream = stream + self.o_proj(mixed.transpose(1, 2).flatten(2))
        normed = self.norm(stream)
        return stream + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))

    def _split(self, projected: Tensor) -> Tensor:
        """[R,Q,H*W] -> [R,H,Q,W]."""
        return projected.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


def _angles(position: Tensor, width: int, config: LayerConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    exact = torch.promote_types(dtype, torch.float32)
    steps = arange(0, width // 2, position.device).to(exact) * (2.0 / width)
    turns = position[:, None, :, None].to(exact) / config.rope_theta**steps
    if config.rope_scaling is not None:
        turns = turns * _stretch(config.rope_theta**-steps, *config.rope_scaling)
    return turns.cos().to(dtype), turns.sin().to(dtype)


def _stretch(speeds: Tensor, factor: float, low: float, high: float, context: float) -> Tensor:
    """How much slower each pair of numbers turns: those that turn more than `high` times over the original context not
    at all, those of fewer than `low` times by `factor`, and those between by something between."""
    share = ((context * speeds / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return share + (1 - share) / factor


def _turn(states: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = angles
    first, second = states.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Scratch:
    """The scratch tokens of one draft, which follow `length` [R,1] remembered places: their slots and who they see."""

    def __init__(self, length: Tensor, longest: int) -> None:
        self._length, self._longest = length, longest
        self._parents: Tensor | None = None  # [R,M], once they branch
        self._fed = 0

    def add(self, fed: int, parents: Tensor | None) -> tuple[Tensor, Tensor, Tensor, int]:
        """For the next `fed` tokens with `parents` [R,fed] (-1: the text, None: a chain): their slots and positions
        [R,fed], their mask [R,1,fed,S], and S."""
        M, device = self._fed, self._length.device
        self._fed += fed
        visible = self._longest + self._fed
        slots = self._length + arange(M, self._fed, device)
        if parents is None:
            assert self._parents is None
            return slots, slots, masks.chain_mask(slots, visible), visible
        self._parents = parents if self._parents is None else torch.cat([self._parents, parents], 1)
        ancestors = closure(self._parents)
        position = self._length + ancestors[:, M:].sum(-1) - 1
        return slots, position, masks.tree_mask(position, self._length, ancestors[:, M:], visible), visible
