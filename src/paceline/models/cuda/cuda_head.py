"""Run the steps of EAGLE heads by our own kernels on a CUDA device (`paceline.kernels.cuda`).

The kernels use the head's own weights. A step is a dozen launches: the input of the layer, the layer (as `cuda_forward`
runs a model's layers), the output layer. There are no masks and no host reads, and only constants are kept, so a draft
can be captured. Bits can differ from those of the head's modules, because a draft needs no exact bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline.models.cpu.cpu_forward import AttentionSpan
from paceline.models.cpu.cpu_linear import listened
from paceline.models.cuda.cuda_forward import KINDS, CudaForward, CudaPlan, ForwardInputs, Layer, importable
from paceline.models.heads.head_layers import LayerConfig, Scratch, angles_at, spread
from paceline.models.slot_cache import SlotCache

DEVICE = "cuda"  # where these kernels run
_MOST = 2048  # tokens of one step; for more, torch's attention is faster
_EVEN = 16  # numbers that kernels take at a time


class _Turns(nn.Module):
    """The angles of a head's positions, with the interface of a model's rotary embedding."""

    def __init__(self, width: int, config: LayerConfig) -> None:
        super().__init__()
        self._width, self._config = width, config

    def forward(self, _: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        return angles_at(position, self._width, self._config)


class CudaHead:
    """The steps of one head for one drafter, with its own counters. head: an `EagleHead`."""

    def __init__(self, head: Any, table: Tensor) -> None:
        from paceline.kernels.cuda.cuda_head_steps import Pair

        config, layer = head.config, head.layer
        maps = (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj, layer.gate_proj, layer.up_proj, layer.down_proj)
        q, k, v, o, gate, up, down = (each.weight.detach() for each in maps)
        norms = (head.embed_norm, head.feature_norm, layer.norm, head.norm)
        of_words, of_features, after, last = (each.weight.detach() for each in norms)
        own = Layer(of_features, after, (q, k, v), None, None, o, None, gate, up, down, 0)
        with torch.inference_mode(False):
            self._pass = CudaForward(CudaPlan(table, last, o, [own], _Turns(layer.head_width, config), config.heads,
                                           config.kv_heads, layer.head_width, config.eps,
                                           layer.head_width**-0.5))  # fmt: skip
            self._where = None if head.d2t is None else _numbers(head.d2t, config.vocabulary)
        most = min(table.shape[0], head.made_for["vocabulary"]) - 1
        self._pair = Pair(table, of_words, of_features, config.eps, most, config.norm_before_residual)
        self._said, self._d2t, self._vocabulary = head.output, head.d2t, config.vocabulary
        says = _plain(head.output, table) and head.output.bias is None
        self._output = head.output.weight.detach() if says else None
        fuses = _plain(head.fuse, table) and head.fuse.in_features % _EVEN == 0
        self._fuse = head.fuse.weight.detach() if fuses else None
        self._bias = head.fuse.bias.detach() if fuses and head.fuse.bias is not None else None

    @classmethod
    def of(cls, head: Any, embedding: nn.Module) -> CudaHead | None:
        """Return the head with its tokens' embeddings; None if the kernels cannot run it."""
        table: Any = getattr(embedding, "weight", None)
        if type(embedding) is not nn.Embedding or embedding.max_norm is not None or importable() is not None:
            return None
        if table.device.type != DEVICE or table.dtype not in KINDS or not table.is_contiguous():
            return None
        layer, config = head.layer, head.config
        maps = [module for module in layer.children() if module is not layer.norm]
        norms = [norm.weight for norm in (head.embed_norm, head.feature_norm, layer.norm, head.norm)]
        if not all(_plain(each, table) and each.bias is None for each in maps):
            return None
        if any((norm.dtype, norm.device) != (table.dtype, table.device) for norm in norms):
            return None
        if any(size % _EVEN for each in maps for size in each.weight.shape) or config.embedding % _EVEN:
            return None
        if any(listened(module) for module in (embedding, *head.modules())):
            return None
        return cls(head, table.detach())

    def takes(self, tokens: int, branches: bool = False) -> bool:
        """Return whether one step can read this number of tokens, in a chain or in branches."""
        return tokens <= _MOST

    def chain(self, *_: Any) -> None:
        """Return None: there is no kernel for whole chains."""

    # ---- steps: features [R,K,D] and logits [R,K,V]

    def caught_up(
        self, text: Tensor, length: Tensor, states: Tensor, width: int, cache: SlotCache, visible: int
    ) -> tuple[Tensor, Tensor]:
        """Read the last `width` of `length` [R,1] entries of each text again, with the target's features [R,T,D].
        Return the features and the logits after the last entry."""
        pair = self._pair.known(text, length, states, width)
        return self._step(pair, cache, visible, pair[2], AttentionSpan(None), 1)

    def ahead(
        self, tokens: Tensor, above: Tensor | None, made: Tensor, scratch: Scratch, cache: SlotCache
    ) -> tuple[Tensor, Tensor]:
        """Read the newest scratch tokens [R,Q], whose parents are `above` [R,Q] (-1: the text, None: a chain). made
        [R,1+M,D]: the features so far; a chain needs only the last. Return features and logits after each token."""
        pair = self._pair.drafted(tokens, scratch.length, scratch.before, made, above)
        position, sight = pair[2], AttentionSpan(None)
        if scratch.parents is not None:
            position, sight = self._pass.in_tree(scratch.parents, scratch.length, pair[2], tokens.shape[1])
        return self._step(pair, cache, scratch.visible, position, sight, tokens.shape[1])

    def _step(
        self,
        pair: tuple[Tensor, Tensor, Tensor],
        cache: SlotCache,
        visible: int,
        position: Tensor,
        sight: AttentionSpan,
        keep: int,
    ) -> tuple[Tensor, Tensor]:
        from paceline.kernels.cuda.cuda_layers import add_norm

        (looked, stream, slots), plan = pair, self._pass.plan
        (R, Q), D = slots.shape, stream.shape[1]
        cache.set_next_write(slice(0, R), slots, visible, 0)
        cache.allocate(1, plan.kv, plan.width, stream.dtype, stream.device)
        seen = ForwardInputs(self._pass, cache, position, slots, sight, Q)
        added = self._pass.layer(0, seen, stream, looked, torch.empty_like(stream))
        normed = torch.empty(R * keep, D, dtype=stream.dtype, device=stream.device)
        add_norm(added, stream, normed, weight=plan.norm, eps=plan.eps, of=(keep, Q - keep))
        return stream.view(R, Q, D)[:, Q - keep :], self._say(normed).view(R, keep, -1)

    def _say(self, normed: Tensor) -> Tensor:
        """Return logits [M,V]; see `EagleHead.say`."""
        from paceline.kernels.cuda import cuda_head_steps as drafting
        from paceline.kernels.cuda import cuda_product as product

        if self._output is None:
            logits: Tensor = self._said(normed)
            return logits if self._d2t is None else spread(logits, self._d2t, self._vocabulary)
        return drafting.spread(product.product(normed, [self._output]), self._where, self._vocabulary)

    # ---- hidden states of the target

    def note(self, taps: tuple[Tensor, ...], path: Tensor | None, length: Tensor, states: Tensor) -> bool:
        """Fuse the taps [R,Q,H] of the last token of each text, of `length` [R,1], and of the tokens after it (in a
        tree: along the path [R,M]), and write them to states [R,T,D]. Return False if the kernels cannot."""
        from paceline.kernels.cuda import cuda_head_steps as drafting
        from paceline.kernels.cuda import cuda_product as product
        from paceline.kernels.cuda import cuda_tree_paths as branches

        if self._fuse is None or any(tap.dtype != self._fuse.dtype for tap in taps):
            return False
        joined = branches.along(taps, path)
        drafting.note(product.product(joined, [self._fuse]), self._bias, length, states)
        return True


def _plain(module: Any, like: Tensor) -> bool:
    """Return whether a module is a plain linear layer whose weights kernels can read."""
    if type(module) is not nn.Linear:
        return False
    weight = module.weight
    return weight.is_contiguous() and (weight.dtype, weight.device) == (like.dtype, like.device)


def _numbers(d2t: Tensor, vocabulary: int) -> Tensor:
    """Return [V]: the draft id of every id of the target; -1 if it has none."""
    where = torch.full((vocabulary,), -1, dtype=torch.int32, device=d2t.device)
    numbers = torch.arange(d2t.shape[0], dtype=torch.int32, device=d2t.device)
    return where.index_copy_(0, d2t.detach(), numbers)
