"""Run Llama-like models by our own kernels on a CUDA device (`paceline.kernels.cuda`).

The kernels use the model's own weights and the reader's slot cache. They read a weight once for all tokens of a pass,
and a token has the same bits in all passes of up to 64 tokens (strict: of any number). Only constants are kept from one
pass to the next, so a pass can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.core.contracts import Reading
from paceline.models.cpu.cpu_forward import AttentionSpan, ForwardPlan, LayerRange
from paceline.models.cpu.cpu_plan import misfit
from paceline.models.cuda_graph import programs_for
from paceline.models.slot_cache import SlotCache

if TYPE_CHECKING:
    from paceline.models.language_model import LanguageModel

KINDS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Layer:
    """The weights of one layer."""

    before: Tensor  # norms
    after: Tensor
    qkv: tuple[Tensor, Tensor, Tensor]
    qkv_bias: Tensor | None
    norms: tuple[Tensor, Tensor] | None  # of queries and keys
    o: Tensor
    o_bias: Tensor | None
    gate: Tensor
    up: Tensor
    down: Tensor
    window: int


@dataclass
class CudaPlan:
    """The weights and sizes of a model, by their purpose."""

    table: Tensor
    norm: Tensor
    head: Tensor
    layers: list[Layer]
    rotary: nn.Module
    heads: int
    kv: int
    width: int
    eps: float
    scale: float
    angles: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # captured passes still read the shorter ones

    def turned(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [P,width] in float32 of at least this number of positions."""
        if not self.angles or self.angles[-1][0].shape[0] < positions:
            many = max(4096, 1 << (positions - 1).bit_length())
            places = torch.arange(many, device=self.table.device)[None]
            cos, sin = self.rotary(torch.zeros(1, dtype=torch.float32, device=self.table.device), places)
            self.angles.append((cos[0].float().contiguous(), sin[0].float().contiguous()))
        return self.angles[-1]


class CudaForward:
    """Runs passes of one model. It holds no KV cache: the reader does."""

    strict: bool  # the same bits also for passes in which torch's product is faster

    def read(
        self, cache: SlotCache, first: int, ids: Tensor, position: Tensor, taps: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """Read a piece of the prompts of the rows `first`..., with ids and positions [R,Q], without logits.
        Return the taps, [R,Q,D] each."""
        layers, Q = len(self.plan.layers), ids.shape[1]
        strict: bool = self.strict
        self._first, self.strict = first, False  # a prompt is read once, and with the same bits in every batch
        try:
            forward = ForwardPlan(ids, position, position, AttentionSpan(None), keep=Q, tapped=Q)
            return self(cache, forward, taps, vocabulary=0, part=LayerRange(0, layers, head=False))[0].taps
        finally:
            self._first, self.strict = 0, strict

    @staticmethod
    def in_tree(parents: Tensor, length: Tensor, slots: Tensor, fed: int) -> tuple[Tensor, AttentionSpan]:
        """See `cpu_forward.CpuForward`."""
        from paceline.kernels.cuda.cuda_rounds import climb

        position, prefix, tree = climb(parents, length, slots, fed)
        return position, AttentionSpan(prefix, tree=tree)

    def __init__(self, plan: CudaPlan, strict: bool = False) -> None:
        from paceline.kernels.cuda.cuda_attention import COUNTS

        self.plan = plan
        self.strict = strict
        self._first = 0  # the first row that is being read
        self._done = torch.zeros(COUNTS, dtype=torch.int32, device=plan.table.device)

    def __call__(
        self, cache: SlotCache, forward: ForwardPlan, taps: Sequence[int] = (), *, vocabulary: int,
        part: LayerRange | None = None,
    ) -> tuple[Reading, Tensor]:  # fmt: skip
        """See `cpu_forward.CpuForward`."""
        from paceline.kernels.cuda.cuda_layers import add_norm, embed_norm
        from paceline.kernels.cuda.cuda_product import product

        plan, (R, Q), keep = self.plan, forward.ids.shape, forward.keep
        part = part or LayerRange(0, len(plan.layers))
        D, kind, device = plan.table.shape[1], plan.table.dtype, plan.table.device
        cache.allocate(len(plan.layers), plan.kv, plan.width, kind, device)
        seen = ForwardInputs(self, cache, forward.positions, forward.slots, forward.visibility, Q)
        stream = torch.empty(R * Q, D, dtype=kind, device=device)
        hidden = torch.empty_like(stream)
        first = plan.layers[min(part.start, len(plan.layers) - 1)].before
        if part.given is None:
            embed_norm(forward.ids.flatten().contiguous(), plan.table, stream, first, hidden, plan.eps)
        else:
            stream.copy_(part.given.reshape(-1, D))
            add_norm(None, stream, hidden, weight=first, eps=plan.eps)
        tapped: dict[int, Tensor] = {}
        added: Tensor | None = None
        for index in range(part.start, part.stop):
            if added is not None:
                add_norm(added, stream, hidden, weight=plan.layers[index].before, eps=plan.eps)
            if index in taps:
                tapped[index] = stream.view(R, Q, D)[:, Q - keep :].clone()
            added = self.layer(index, seen, stream, hidden)
        logits = torch.empty(R, keep, 0, device=device)
        if not part.head and len(plan.layers) not in taps:
            add_norm(added, stream, None)
        else:
            normed = torch.empty(R * keep, D, dtype=kind, device=device)
            add_norm(added, stream, normed, weight=plan.norm, eps=plan.eps, of=(keep, Q - keep))
            tapped[len(plan.layers)] = normed.view(R, keep, D)
        if part.head:
            parts = product(normed, [plan.head], self.strict)
            logits = parts[0]
            for more in parts[1:]:
                logits = logits + more
            logits = logits.view(R, keep, -1)[..., :vocabulary]
        return Reading(logits, tuple(tapped[layer] for layer in taps)), stream.view(R, Q, D)

    def layer(
        self, index: int, seen: ForwardInputs, stream: Tensor, hidden: Tensor, between: Tensor | None = None
    ) -> Tensor:
        """Run one layer on `hidden`, and return its output in parts, which the caller adds to the stream. The layer
        writes its second norm to `between` (None: over `hidden`)."""
        from paceline.kernels.cuda.cuda_attention import attend
        from paceline.kernels.cuda.cuda_layers import add_norm, turn
        from paceline.kernels.cuda.cuda_product import gated, product

        plan, layer, M = self.plan, self.plan.layers[index], stream.shape[0]
        between = hidden if between is None else between
        memory = (seen.cache.keys[index][self._first :], seen.cache.values[index][self._first :])
        qkv = product(hidden, layer.qkv, self.strict)
        q = torch.empty(M, plan.heads, plan.width, dtype=stream.dtype, device=stream.device)
        turn(qkv, seen.angles, seen.position, seen.slots, q, memory, seen.per_row, bias=layer.qkv_bias,
             norms=layer.norms, eps=plan.eps)  # fmt: skip
        mixed = torch.empty_like(q)
        attend(q, memory, seen.prefix, mixed, seen.per_row, seen.visible, plan.scale, done=self._done,
               tree=seen.tree, window=layer.window, ahead=seen.ahead)  # fmt: skip
        add_norm(
            product(mixed.view(M, -1), [layer.o], self.strict),
            stream,
            between,
            weight=layer.after,
            bias=layer.o_bias,
            eps=plan.eps,
        )
        return product(gated(between, layer.gate, layer.up, self.strict), [layer.down], self.strict)


class ForwardInputs:
    """The positions, slots and visible slots of the tokens of a pass, flattened for the kernels."""

    def __init__(
        self, run: CudaForward, cache: SlotCache, position: Tensor, slots: Tensor, sight: AttentionSpan, per_row: int
    ) -> None:
        self.cache, self.per_row = cache, per_row
        self.visible = cache.get_mask_sizes(0)[0]
        self.angles = run.plan.turned(self.visible)
        self.slots = slots.flatten().contiguous()
        self.position = self.slots if position is slots else position.flatten().contiguous()
        self.prefix = self.slots if sight.prefix is None else sight.prefix.flatten().contiguous()
        self.ahead = 1 if sight.prefix is None else 0
        self.tree = sight.tree


# ---- the plan of a model


def cuda_plan(model: Any, kinds: tuple[str, ...], window: int | None, logits: int | None = None) -> CudaPlan | str:
    """Return the plan of a model on a CUDA device, or in a few words why it has none."""
    problem = misfit(model, kinds)
    if problem is not None:
        return problem
    if model.dtype not in KINDS:
        return f"kernels are for bfloat16, float16 and float32, not {str(model.dtype).removeprefix('torch.')}"
    if importable() is not None:
        return importable()  # type: ignore[return-value]
    weights = [module.weight for module in model.modules() if getattr(module, "weight", None) is not None]
    if any(type(module) is not nn.Linear for module in _maps(model)):
        return "its linear maps are not plain ones"
    if any(w.dtype != model.dtype or w.device != model.device or not w.is_contiguous() for w in weights):
        return "its weights are not all of one type, on one device and contiguous"
    if any(m.in_features % 16 for m in _maps(model)):
        return "some of its weights are of an odd size"
    problem = _misshapen(model)
    if problem is not None:
        return problem
    base, a = model.model, model.model.layers[0].self_attn
    if (logits or 0) > model.lm_head.weight.shape[0]:
        return f"its output layer has {model.lm_head.weight.shape[0]} tokens of {logits}"
    layers = [
        _layer_of(layer, (window or 0) if kind == "sliding_attention" else 0)
        for layer, kind in zip(base.layers, kinds, strict=True)
    ]
    if any(w.shape[0] % 16 for layer in layers for w in (*layer.qkv, layer.o, layer.gate)):
        return "some of its weights are of an odd size"
    config = model.config
    return CudaPlan(base.embed_tokens.weight.detach(), base.norm.weight.detach(), model.lm_head.weight.detach(), layers,
                    base.rotary_emb, config.num_attention_heads, config.num_key_value_heads, a.head_dim,
                    base.norm.variance_epsilon, a.scaling)  # fmt: skip


def importable() -> str | None:
    """Return why Triton cannot be used here; None if it can."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"No module named triton ({error})"
    return None


def _misshapen(model: Any) -> str | None:
    """Return which weight has another size than in the config, or that some of queries, keys, values lack biases."""
    config, a = model.config, model.model.layers[0].self_attn
    hidden, inner, width = config.hidden_size, config.intermediate_size, a.head_dim
    mixed, few = config.num_attention_heads * width, config.num_key_value_heads * width
    wanted = {"embed_tokens": (config.vocab_size, hidden), "q_proj": (mixed, hidden), "k_proj": (few, hidden),
              "v_proj": (few, hidden), "o_proj": (hidden, mixed), "gate_proj": (inner, hidden),
              "up_proj": (inner, hidden), "down_proj": (hidden, inner), "q_norm": (width,), "k_norm": (width,),
              "norm": (hidden,), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}  # fmt: skip
    for name, module in model.named_modules():
        shape = wanted.get(name.rpartition(".")[2])
        if shape is not None and tuple(module.weight.shape) != shape:
            return f"{name} is of shape {list(module.weight.shape)} where its config says {list(shape)}"
    if tuple(model.lm_head.weight.shape)[1:] != (hidden,):
        return f"lm_head is of shape {list(model.lm_head.weight.shape)} where its config says {hidden} inputs"
    for layer in model.model.layers:
        a = layer.self_attn
        if len({linear.bias is None for linear in (a.q_proj, a.k_proj, a.v_proj)}) > 1:
            return "only some of its queries, keys and values have biases"
    return None


def _maps(model: Any) -> list[Any]:
    found: list[Any] = [model.lm_head]
    for layer in model.model.layers:
        a, f = layer.self_attn, layer.mlp
        found += [a.q_proj, a.k_proj, a.v_proj, a.o_proj, f.gate_proj, f.up_proj, f.down_proj]
    return found


def _layer_of(layer: Any, window: int) -> Layer:
    a, f = layer.self_attn, layer.mlp
    biases = [linear.bias for linear in (a.q_proj, a.k_proj, a.v_proj)]
    norms = [getattr(a, name, None) for name in ("q_norm", "k_norm")]
    return Layer(
        layer.input_layernorm.weight.detach(),
        layer.post_attention_layernorm.weight.detach(),
        (a.q_proj.weight.detach(), a.k_proj.weight.detach(), a.v_proj.weight.detach()),
        None if biases[0] is None else torch.cat([bias.detach() for bias in biases]),
        None if norms[0] is None else (norms[0].weight.detach(), norms[1].weight.detach()),  # type: ignore[union-attr]
        a.o_proj.weight.detach(),
        None if a.o_proj.bias is None else a.o_proj.bias.detach(),
        f.gate_proj.weight.detach(),
        f.up_proj.weight.detach(),
        f.down_proj.weight.detach(),
        window,
    )


# ---- Pieces of prompts, padded to one of a few lengths, in captured passes

_LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def padded(length: int) -> int:
    """Return the padded length for this number of tokens."""
    return next((known for known in _LENGTHS if known >= length), length)


class PromptReader:
    """Reads pieces of prompts by CUDA kernels, for one reader. The slots of padding after a prompt are overwritten
    before any pass sees them.

    A prompt is read alone, and the padded length of a piece depends on its own length only. So its bits depend on the
    text only. The last piece of a prompt has other bits than the same tokens in a longer piece.

    A piece of the first row is captured at its first use. Rows that join a batch have many different pieces, so a piece
    of theirs is captured at its second use.
    """

    def __init__(self, lm: LanguageModel, kernels: CudaForward, taps: Sequence[int] = ()) -> None:
        self._kernels, self._taps = kernels, taps
        self._programs = programs_for(lm)
        self._pieces: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._met: set[tuple[int, ...]] = set()  # pieces of rows after the first that were used once
        self._moved: object = None

    def read(self, cache: SlotCache, row: int, ids: Tensor, start: int) -> tuple[Tensor, ...]:
        """Read the tokens `ids` [1,Q] of a row from `start` on. Return the taps, [1,Q,D] each."""
        Q, device = ids.shape[1], ids.device
        length = padded(Q)
        cache.reserve(row + 1, start + length)
        if self._moved != cache.storage_version:
            self._moved = cache.storage_version
            self._pieces.clear()
            self._met.clear()
            if self._programs is not None:
                self._programs.forget()
        key = (row, length, start)
        tokens, position = self._pieces.get(key) or _places(length, start, device)
        tokens[:, :Q] = ids
        cache.set_next_write(slice(row, row + 1), start, start + length, start)
        if self._programs is None or not self._comes_again(key):
            return tuple(tap[:, :Q] for tap in self._kernels.read(cache, row, tokens, position, self._taps))
        self._pieces[key] = (tokens, position)
        taps = self._programs.run(key, lambda: self._kernels.read(cache, row, tokens, position, self._taps))
        return tuple(tap[:, :Q].clone() for tap in taps)  # a replay overwrites the taps

    def _comes_again(self, key: tuple[int, ...]) -> bool:
        if key[0] == 0 or key in self._met:
            return True
        self._met.add(key)
        return False


def _places(length: int, start: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return room for the tokens of a piece, and their positions, [1,length] each."""
    position = torch.arange(start, start + length, device=device)[None]
    return torch.zeros_like(position), position
