"""Runs the steps of EAGLE heads by numba kernels on a CPU (`paceline.kernels.cpu.head_steps`).

A step is one kernel job. A whole greedy chain is one job, too. The bits are those of the head's modules.
`models/cuda/cuda_head.py` runs heads on CUDA devices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.models.cpu import threads as openmp
from paceline.models.cpu.cpu_forward import TOKEN_LISTS, KernelCall
from paceline.models.cpu.cpu_linear import (
    MOST,
    CpuLinear,
    KernelNorm,
    head_kernel,
    listened,
    plain,
    run_kernel,
    threads_for,
)
from paceline.models.heads.head_layers import LightLayer, Scratch
from paceline.models.slot_cache import SlotCache

_STEPS = 64  # of a chain in one job


class CpuHead:
    """The steps of one head for one drafter. `light`: the head with int8 layers. `table`: the embeddings of its tokens.
    `vocabulary`: the size of the target's vocabulary; larger ids are never drafted."""

    def __init__(self, light: Any, table: Tensor, vocabulary: int) -> None:
        from paceline.kernels.cpu import head_steps as drafting
        from paceline.kernels.cpu import llama

        job, says, fuse, config = light.layer.job, light.output.job, light.fuse.job, light.config
        norms = [norm.norm.weight.detach() for norm in (light.norm, light.embed_norm, light.feature_norm)]
        self._ids = None if light.d2t is None else light.d2t.detach().to(torch.int64, copy=True).contiguous()
        self._held = (table, norms, says, fuse)  # the lists contain their addresses
        self._layer, self._job, self._vocabulary, self._D = light.layer, job, config.vocabulary, config.width
        self._says, self._taps = says.numbers[-1], [config.hidden] * config.tapped
        ids = torch.arange(self._says, device="cpu") if self._ids is None else self._ids
        self._chains = bool((ids[1:] > ids[:-1]).all()) and int(ids[-1]) < vocabulary  # sorted ids
        own = dict(zip((*llama.MODEL, *llama.LAYER), job.model.tolist(), strict=True))
        own |= dict(zip(("head", "head_scales", "head_step", "head_product", "bias"), says.numbers, strict=False))
        own |= {"embedding": table.data_ptr(), "wide": table.shape[1], "normed": int(config.norm_before_residual),
                "known": min(table.shape[0], light.made_for["vocabulary"]), "says": self._says,
                "ids": 0 if self._ids is None else self._ids.data_ptr()}  # fmt: skip
        own |= dict(zip(("norm", "token_norm", "feature_norm"), (norm.data_ptr() for norm in norms), strict=True))
        self._model = np.array([own[name] for name in (*llama.MODEL, *llama.LAYER, *drafting.HEAD)], np.int64)
        self._inputs = table.shape[1] + self._D
        sizes = job.sizes | {"x": self._D, "seen": self._inputs, "made": self._D, "token_scores": self._says,
                             "joined": fuse.numbers[-2], "fused": self._D}  # fmt: skip
        names, self._per_step = (*llama.CALL, *drafting.DRAFT), drafting.PER_STEP
        self._call = KernelCall(names, sizes, TOKEN_LISTS, optional=names)
        self._work = job.weights + self._says * self._D
        self._fuse = fuse.numbers

    @classmethod
    def of(cls, light: Any, embedding: nn.Module, vocabulary: int) -> CpuHead | None:
        """Return the head with its tokens' embeddings; None if the kernels cannot run it."""
        table: Any = getattr(embedding, "weight", None)
        if type(embedding) is not nn.Embedding or embedding.max_norm is not None or not _readable(table):
            return None
        layer, maps = light.layer, (light.fuse, light.output)
        norms = (light.norm, light.embed_norm, light.feature_norm)
        if not isinstance(layer, LightLayer) or layer.job is None or not all(type(m) is CpuLinear for m in maps):
            return None
        config, ids = light.config, light.d2t
        if any(each.job.kernel is None for each in maps) or table.shape[1] != config.embedding:
            return None
        if not all(type(norm) is KernelNorm and _readable(norm.norm.weight) for norm in norms):
            return None
        if any(listened(module) for module in (embedding, *light.modules())):
            return None
        if ids is not None and not 0 <= int(ids.min()) <= int(ids.max()) < config.vocabulary:
            return None
        if light.output.out_features != (config.vocabulary if ids is None else len(ids)):
            return None
        return cls(light, table.detach(), vocabulary)

    def takes(self, tokens: int, branches: bool = False) -> bool:
        """Return whether one step can read this number of tokens. The head's modules read branches."""
        return tokens <= MOST and not branches

    # ---- steps: features [R,1,D] and logits [R,1,V]

    def caught_up(
        self, text: Tensor, entries: Tensor, states: Tensor, width: int, cache: SlotCache, visible: int
    ) -> tuple[Tensor, Tensor]:
        """Read the last `width` of `entries` [R,1] of each text again, with the target's features [R,T,D]. Return the
        features and the logits after the last entry."""
        return self._step(self._known(text, states, visible), entries, width, cache, visible)

    def ahead(self, tokens: Tensor, above: Tensor | None, made: Tensor, scratch: Scratch, cache: SlotCache
              ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Read the newest token of a chain [R,1] with the features before it, made [R,1,D]. Return as `caught_up`."""
        tokens, made = tokens.contiguous(), made.contiguous()
        assert above is None
        assert tokens.shape == made.shape[:2] == scratch.length.shape
        assert plain(made)
        assert tokens.dtype is torch.int64
        named = {"tokens": tokens.data_ptr(), "above": made.data_ptr(), "past": scratch.before}
        return self._step(named, scratch.length, 1, cache, scratch.visible)

    def chain(
        self, text: Tensor, entries: Tensor, states: Tensor, width: int, cache: SlotCache, visible: int, steps: int
    ) -> Tensor | None:
        """Return the likeliest tokens [R,steps] after each text, in one job: `caught_up`, then `ahead` for each token.
        None: this head cannot do it."""
        if not self._chains or not 1 <= steps <= _STEPS:
            return None
        picked = torch.empty(steps, entries.shape[0], dtype=torch.int64, device="cpu")
        named = self._known(text, states, visible) | {"steps": steps, "picked": picked.data_ptr()}
        self._run(named, entries, width, cache, visible + steps, steps)
        return picked.t()

    def _known(self, text: Tensor, states: Tensor, visible: int) -> dict[str, int]:
        """Return the arguments for texts and their states, at most `visible` positions of them."""
        places = min(visible, text.shape[1] - 1, states.shape[1])
        assert text.dtype is torch.int64
        assert text.stride(1) == 1
        assert plain(states)
        assert states.stride()[1:] == (self._D, 1)
        assert places > 0
        return {"text": text.data_ptr(), "text_step": 8 * text.stride(0), "states": states.data_ptr(),
                "states_step": 4 * states.stride(0), "places": places}  # fmt: skip

    def _step(
        self, named: dict[str, int], entries: Tensor, Q: int, cache: SlotCache, visible: int
    ) -> tuple[Tensor, Tensor]:
        R = entries.shape[0]
        made = torch.empty(R, 1, self._D, dtype=torch.float32, device="cpu")
        logits = torch.empty(R, 1, self._vocabulary, dtype=torch.float32, device="cpu")
        named |= {"made": made.data_ptr(), "logits": logits.data_ptr()}
        if self._ids is None:
            named["token_scores"] = named["logits"]
        self._run(named, entries, Q, cache, visible, 1)
        return made, logits

    def _run(self, named: dict[str, int], entries: Tensor, Q: int, cache: SlotCache, visible: int, steps: int) -> None:
        n, job = entries.shape[0] * Q, self._job
        cache.allocate(1, job.shared, job.width, torch.float32)
        keys, (cos, sin) = cache.keys[0], self._layer.turns(visible)
        assert entries.dtype is torch.int64
        assert entries.is_contiguous()
        assert visible <= keys.shape[2]
        openmp.rest()
        threads = threads_for(self._work * (n + 1))
        self._call.make_room(n, visible, threads)
        stores = cache.addresses()
        call = self._call.numbers({
            "n": n, "threads": threads, "Q": Q, "entries": entries.data_ptr(), "room": visible,
            "cos": cos.data_ptr(), "sin": sin.data_ptr(), "caches": stores.ctypes.data,
            "row_step": 4 * keys.stride(0), "head_step": 4 * keys.stride(1), "slot_step": 4 * keys.stride(2),
            "inputs": self._inputs, "vocabulary": self._vocabulary, **named,
        }, steps * self._per_step)  # fmt: skip
        run_kernel(threads, head_kernel("run_draft"), self._model, call, job.floats)

    # ---- hidden states of the target

    def note(self, taps: tuple[Tensor, ...], path: Tensor | None, length: Tensor, states: Tensor) -> bool:
        """Fuse the taps [R,Q,H] of the last token of each text and of the tokens after it (in a tree: along the path
        [R,M]) and write them to states [R,T,D]. `length` [R,1] is that of the texts. Return False if the kernels
        cannot."""
        from paceline.kernels.cpu import head_steps as drafting

        R, Q = taps[0].shape[0], taps[0].shape[1] if path is None else path.shape[1] + 1
        if not all(plain(tap) and tap.stride(2) == 1 for tap in taps) or not plain(states):
            return False
        assert [tap.shape[2] for tap in taps] == self._taps
        assert all(tap.shape[:2] == taps[0].shape[:2] for tap in taps)
        assert length.shape == (R, 1)
        assert states.stride()[1:] == (self._D, 1)
        entries, path = length - 1, None if path is None else _checked(path, R, taps[0].shape[1] - 1)
        openmp.rest()
        threads = threads_for(self._fuse[-1] * self._fuse[-2] * (R * Q + 1))
        self._call.make_room(R * Q, 1, threads)
        own = self._call.addresses
        told = [threads, R, Q, len(taps), self._taps[0], 0 if path is None else path.data_ptr(), entries.data_ptr(),
                states.data_ptr(), 4 * states.stride(0), own["joined"], own["fused"]]  # fmt: skip
        where = [number for tap in taps for number in (tap.data_ptr(), 4 * tap.stride(0), 4 * tap.stride(1))]
        lines = 3 * drafting.COUNTER
        call = np.zeros(len(drafting.NOTE) + len(where) + lines, np.int64)
        call[:-lines] = [*self._fuse, *told, *where]
        run_kernel(threads, head_kernel("run_note"), call)
        return True


def _checked(path: Tensor, rows: int, nodes: int) -> Tensor:
    """Return a contiguous path [R,M]. Refuse nodes outside a tree of `nodes`, because kernels do not check them."""
    assert path.dtype is torch.int64
    assert path.shape[0] == rows
    if path.numel() and not 0 <= int(path.min()) <= int(path.max()) < nodes:
        raise IndexError(f"A path goes from node {int(path.min())} to {int(path.max())} of a tree of {nodes}.")
    return path.contiguous()


def _readable(weight: Tensor) -> bool:
    return weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()
