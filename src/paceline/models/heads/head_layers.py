"""Layers of trained drafters, and the scratch tokens of their drafts.

The same layer runs over whole texts in training, and over scratch tokens of a KV cache in drafting. The caller passes
the function that returns the keys and values of earlier tokens (`Remember`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.common.errors import InputError, UnsupportedError
from paceline.core.contracts import arange
from paceline.core.tree import closure
from paceline.models.cpu.cpu_linear import MOST, CpuLinear, KernelNorm, LayerJob, plain
from paceline.models.heads.training_attention import Unrolled
from paceline.models.language_model import LanguageModel
from paceline.models.module_views import shell
from paceline.models.packed_linear import kernel_rows
from paceline.models.slot_cache import SlotCache, chain_mask, tree_mask

# (keys, values) [R,H,Q,W] of the fed tokens -> (keys, values) [R,H,S,W] of all visible tokens
Remember = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def alone(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values of these tokens only, for a text that is read as a whole."""
    return keys, values


@dataclass(frozen=True)
class BySlot:
    """Writes keys and values to the next slots of `cache`, and returns the visible ones, when it is called."""

    cache: SlotCache
    layer: int

    def __call__(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.cache.update(keys, values, self.layer)


@dataclass(frozen=True)
class LayerConfig:
    """The sizes of a decoder layer. inner: of its feed-forward part. head_width: of one attention head (None: the width
    over the number of heads). eps: of its norms. rope_scaling: factor, low and high frequency factor and original
    context of Llama 3's RoPE scaling (None: no scaling)."""

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
    """An RMS norm in the dtype of its weights: float32 while a head trains, for any dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.dtype == self.weight.dtype else x.to(self.weight.dtype))

    def light(self) -> KernelNorm:
        return KernelNorm(self)


class DecoderLayer(nn.Module):
    """Attention and feed-forward as in Llama: rotary positions, grouped keys, SwiGLU. The input of attention (`seen`)
    can be wider than the residual stream."""

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

    def forward(
        self, seen: Tensor, stream: Tensor, position: Tensor, mask: Tensor | None, remember: Remember | Unrolled
    ) -> Tensor:
        """Return the stream [R,Q,D] after the layer, from seen [R,Q,E], stream [R,Q,D], position [R,Q] (or [1,Q]) and
        mask bool [R,1,Q,S], which is not used if `remember` is `Unrolled`."""
        angles = _angles(position, self.head_width, self.config, stream.dtype)
        heads, shared = self.config.heads, self.config.kv_heads
        every = self._projected(seen).unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # [R,H+2G,Q,W]
        turned = _turn(every[:, : heads + shared], angles)
        queries, keys, values = turned[:, :heads], turned[:, heads:], every[:, heads + shared :]
        if not isinstance(remember, Unrolled):
            keys, values = remember(keys, values)
        if shared != heads:  # on CUDA, torch's attention with a mask and shared keys writes all scores to memory
            keys, values = (each.repeat_interleave(heads // shared, 1) for each in (keys, values))
        if isinstance(remember, Unrolled):
            mixed = remember.attend(queries, keys, values)
        else:
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        stream = stream + self.o_proj(mixed.transpose(1, 2).flatten(2))
        gate, up = self._gated(self.norm(stream))
        return stream + self.down_proj(F.silu(gate) * up)

    def _projected(self, seen: Tensor) -> Tensor:
        """Return queries, keys and values [R,Q,(H+2G)*W]."""
        return torch.cat([self.q_proj(seen), self.k_proj(seen), self.v_proj(seen)], -1)

    def _gated(self, normed: Tensor) -> Sequence[Tensor]:
        return self.gate_proj(normed), self.up_proj(normed)

    def light(self) -> DecoderLayer:
        """Return the layer for drafting: see `cpu_linear.drafting`."""
        return LightLayer(self)


class LightLayer(DecoderLayer):
    """The layer in int8. Linear layers with the same input are fused. Up to 64 tokens are one kernel job."""

    def __init__(self, layer: DecoderLayer) -> None:
        nn.Module.__init__(self)
        self.config, self.head_width, self.norm = layer.config, layer.head_width, layer.norm
        self.qkv = _joined(layer.q_proj, layer.k_proj, layer.v_proj)
        self.gate_up = _joined(layer.gate_proj, layer.up_proj)
        self.o_proj, self.down_proj = _joined(layer.o_proj), _joined(layer.down_proj)  # type: ignore[assignment]
        maps = (self.qkv, self.o_proj, self.gate_up, self.down_proj)
        sizes = (self.config.heads, self.config.kv_heads, self.head_width)
        even = self.head_width % 8 == 0
        self.job = LayerJob(maps, layer.norm.weight, self.config.eps, *sizes) if even else None  # type: ignore[arg-type]
        self._turns = _all_angles(0, self.head_width, self.config)

    def forward(
        self, seen: Tensor, stream: Tensor, position: Tensor, mask: Tensor | None, remember: Remember | Unrolled
    ) -> Tensor:
        few = seen.shape[0] * seen.shape[1] <= MOST
        if self.job is None or not few or not isinstance(remember, BySlot) or not (plain(seen) and plain(stream)):
            return super().forward(seen, stream, position, mask, remember)
        assert mask is not None
        turns = self.turns(mask.shape[-1])
        return self.job.run(seen, stream, position, mask, remember.cache, remember.layer, turns)

    def turns(self, places: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [P,W] of at least this number of positions."""
        if self._turns[0].shape[0] < places:
            self._turns = _all_angles(places, self.head_width, self.config)
        return self._turns

    def _projected(self, seen: Tensor) -> Tensor:
        return self.qkv(seen)  # type: ignore[no-any-return]

    def _gated(self, normed: Tensor) -> Sequence[Tensor]:
        return self.gate_up(normed).chunk(2, -1)  # type: ignore[no-any-return]


def _all_angles(places: int, width: int, config: LayerConfig) -> tuple[Tensor, Tensor]:
    """Return a table of cos and sin [P,W] of at least this number of positions. A position is never above its slot."""
    cos, sin = angles_at(torch.arange(max(512, 1 << places.bit_length()), device="cpu")[None], width, config)
    return cos[0], sin[0]


def angles_at(position: Tensor, width: int, config: LayerConfig) -> tuple[Tensor, Tensor]:
    """Return cos and sin [R,Q,W] of positions [R,Q], in float32. Both halves of a head have the same angles."""
    cos, sin = _angles(position, width, config, torch.float32)
    return cos[:, 0].repeat(1, 1, 2), sin[:, 0].repeat(1, 1, 2)


def _joined(*maps: nn.Linear) -> CpuLinear:
    return CpuLinear.of(torch.cat([each.weight for each in maps]))


def _angles(position: Tensor, width: int, config: LayerConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    exact = torch.promote_types(dtype, torch.float32)
    slowness, stretch = _rates(width, config.rope_theta, config.rope_scaling, exact, position.device)
    turns = position[:, None, :, None] / slowness
    if stretch is not None:
        turns = turns * stretch
    return turns.cos().to(dtype), turns.sin().to(dtype)


@lru_cache(256)
def _rates(
    width: int, theta: float, scaling: tuple[float, ...] | None, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return two constants [W/2]: the divisor of a position that gives an angle, and the factor of RoPE scaling."""
    with torch.inference_mode(False):
        steps = torch.arange(0, width // 2, device=device).to(dtype) * (2.0 / width)
        return theta**steps, None if scaling is None else _stretch(theta**-steps, *scaling)


def _stretch(speeds: Tensor, factor: float, low: float, high: float, context: float) -> Tensor:
    """Return the factor of each pair's speed: 1 for a pair that turns more than `high` times over the original context,
    1 / factor for a pair that turns fewer than `low` times, and a value between them for the others."""
    share = ((context * speeds / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return share + (1 - share) / factor


def _turn(states: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = angles
    first, second = states.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Scratch:
    """The scratch tokens of one draft, after `length` [R,1] entries of the KV cache: their slots and their masks."""

    def __init__(self, length: Tensor, longest: int) -> None:
        self.length = length
        self.parents: Tensor | None = None  # [R,M], once they branch
        self.before = self.fed = 0  # scratch tokens before the newest ones, and all scratch tokens
        self._longest = longest

    @property
    def visible(self) -> int:
        """S, the number of slots that the newest tokens can see."""
        return self._longest + self.fed

    def more(self, fed: int, parents: Tensor | None) -> None:
        """Add `fed` tokens with `parents` [R,fed] (-1: the text, None: a chain)."""
        self.before, self.fed = self.fed, self.fed + fed
        if parents is None:
            assert self.parents is None
        else:
            self.parents = parents if self.parents is None else torch.cat([self.parents, parents], 1)

    def placed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the slots and positions [R,fed] of the newest tokens, and their mask [R,1,fed,S]."""
        M = self.before
        slots = self.length + arange(M, self.fed, self.length.device)
        if self.parents is None:
            return slots, slots, chain_mask(slots, self.visible)
        ancestors = closure(self.parents)
        position = self.length + ancestors[:, M:].sum(-1) - 1
        return slots, position, tree_mask(position, self.length, ancestors[:, M:], self.visible)

    def add(self, fed: int, parents: Tensor | None) -> tuple[Tensor, Tensor, Tensor, int]:
        """Call `more`, then `placed`. Return slots and positions [R,fed], the mask [R,1,fed,S], and S."""
        self.more(fed, parents)
        return *self.placed(), self.visible


# ---- A model with logits for some of its tokens: most of a small draft model is its output layer. The layer becomes a
# copy of some of its rows, [N,D] instead of [V,D]. Everything else, also the tokens that it reads, is the model's own.
# Tokens keep their ids: `spread` puts the logits at those ids

_SHARE = 4  # a quarter of the rows is for tokens of the current texts
_SPACES = str.maketrans("", "", "\u2581\u0120")  # how tokenizers write a space before a word


def spread(logits: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    """Return logits [...,V] over the vocabulary from logits [...,N] of the tokens `ids` [N]. Others are impossible."""
    everything = logits.new_full((*logits.shape[:-1], vocabulary), float("-inf"))
    return everything.index_copy_(-1, ids, logits)


def usual_tokens(lm: LanguageModel, always: Iterable[int]) -> list[int]:
    """Return all ids roughly by frequency: those in `always`, single letters and signs (which some tokenizers put
    last), then by id, because tokenizers learn their tokens in the order of frequency."""
    first = [token for token in always if token < lm.vocabulary]
    if lm.tokenizer is not None:
        names = {token: name.translate(_SPACES) for name, token in lm.tokenizer.get_vocab().items()}
        first += sorted(t for t, name in names.items() if len(name) < 2 and name.isascii() and t < lm.vocabulary)
    return list(dict.fromkeys([*first, *range(lm.vocabulary)]))


class SubsetHead:
    """`lm` is a view of a model with logits of N tokens only, `ids` [N]. Some rows follow the current texts, because
    their tokens may occur again."""

    def __init__(self, lm: LanguageModel, count: int, always: Iterable[int] = ()) -> None:
        name, self._whole = _head_of(lm)
        chosen = usual_tokens(lm, always)[:count]
        self._fixed = len(chosen) - len(chosen) // _SHARE
        self._next = self._fixed  # the row that the next new token gets
        self._row = {token: row for row, token in enumerate(chosen)}
        self._usual, self._known = chosen, list(chosen)
        with torch.inference_mode(False):
            self.ids = torch.tensor(chosen, device=lm.device)
            self._head = rows_of(self._whole, self.ids)
        self.lm = copy.copy(lm)
        self.lm.model = shell(lm.model)
        self.lm.model._modules[name] = self._head
        self.lm.vocabulary, self.lm.max_token_id = len(chosen), None

    def learn(self, tokens: Sequence[int]) -> None:
        """Give rows to tokens that have none. If there are too many, only the last ones get rows."""
        row = self._row
        new = [token for token in dict.fromkeys(tokens) if token not in row][-(len(self._known) - self._fixed) :]
        if not new or self._fixed == len(self._known):
            return
        places = []
        for token in new:
            del row[self._known[self._next]]
            row[token], self._known[self._next] = self._next, token
            places.append(self._next)
            self._next = self._next + 1 if self._next + 1 < len(self._known) else self._fixed
        self._write(places, new)

    def forget(self) -> None:
        """Restore the first tokens, because other texts have other tokens."""
        if self._known != self._usual:
            self._known, self._next = list(self._usual), self._fixed
            self._row = {token: row for row, token in enumerate(self._known)}
            self._write(range(self._fixed, len(self._known)), self._known[self._fixed :])

    def _write(self, places: Sequence[int], tokens: Sequence[int]) -> None:
        where = torch.tensor(places, device=self.ids.device)
        what = torch.tensor(tokens, device=self.ids.device)
        self.ids.index_copy_(0, where, what)
        for mine, theirs in _tensors(self._head, self._whole):
            mine.index_copy_(0, where, theirs.index_select(0, what))

    def spread(self, logits: Tensor, vocabulary: int) -> Tensor:
        return spread(logits, self.ids, vocabulary)


def _tensors(head: Any, whole: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors of two heads that have a row per output, in pairs."""
    names = [*whole._parameters, *whole._buffers]
    return [(getattr(head, name).data, getattr(whole, name).data) for name in names if getattr(whole, name) is not None]


def rows_of(whole: Any, ids: Tensor) -> Any:
    """Return a head with these outputs only. `whole` is a plain linear layer, or one of ours with packed weights."""
    fresh = shell(whole)
    for kind in ("_parameters", "_buffers"):
        held = {
            name: None if t is None else t.detach().index_select(0, ids) for name, t in whole.__dict__[kind].items()
        }
        made = {n: nn.Parameter(t, False) if kind == "_parameters" and t is not None else t for n, t in held.items()}
        fresh.__dict__[kind] = made
    fresh.out_features = ids.shape[0]
    if hasattr(fresh, "kernel_rows"):
        first = next(t for t in fresh.buffers() if t.is_floating_point())
        fresh.kernel_rows = kernel_rows(first.device, first.dtype, fresh.in_features, ids.shape[0] % 32)
    return fresh


def _head_of(lm: LanguageModel) -> tuple[str, Any]:
    """Return the name and the module of a model's output head."""
    own = lm.model.get_output_embeddings()
    names = [name for name, child in lm.model._modules.items() if child is own and own is not None]
    if not names or not hasattr(own, "out_features"):
        raise UnsupportedError(
            f"{lm.title} has no output head of its own that could be cut; leave out the option vocabulary."
        )
    return names[0], own
