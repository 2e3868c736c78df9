"""Read a batch of sequences with a language model: plan forward passes, and run them in one of two ways.

`SlotReader` plans every pass (`ForwardPlan`). An executor runs the plan: `TransformersExecutor`, or `KernelExecutor`
for our own kernels. Position p of a row is in slot p of the KV cache; scratch tokens follow the sequence.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.common.errors import InputError, UnsupportedError
from paceline.core.contracts import PromptTaps, Reading, RowsView, arange
from paceline.core.device_ops import DeviceOps, slots_after
from paceline.core.tree import closure
from paceline.models.cpu import threads as openmp
from paceline.models.cpu.cpu_forward import AttentionSpan, CpuForward, ForwardPlan, LayerRange, kernel_pass
from paceline.models.cuda.cuda_forward import PromptReader
from paceline.models.device import without_planned_attention
from paceline.models.slot_cache import SlotCache, chain_mask, key_positions, masks_of_layers, tree_mask

if TYPE_CHECKING:
    from paceline.models.cuda.cuda_forward import CudaForward
    from paceline.models.language_model import LanguageModel

CHUNK = 1024  # tokens of a prompt in one pass of transformers, and of the CUDA kernels
_MORE = 16  # slots after a sequence that are computed together: drafts are seldom longer


class SlotMapping:
    """Computes the slots and ids of a pass.

    In a CUDA graph, one kernel computes the slots of a whole draft with its first pass. They hold until the scratch
    tokens are discarded, because the sequences do not change before that.
    """

    def __init__(self, ops: DeviceOps) -> None:
        self._ops = ops
        self._ahead: Tensor | None = None  # [_MORE,R]: the slots after each sequence

    def forget(self) -> None:
        self._ahead = None

    def of(self, rows: RowsView, scratch: int, width: int, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return slots [R,Q] and ids [R,Q] of the last `width` tokens of each sequence and of `tokens` [R,fed], which
        follow `scratch` scratch tokens."""
        if rows.bound is not None and width and not scratch:
            slots, ids, self._ahead = self._ops.slot_mapping(rows.text, rows.length, tokens, width, _MORE)
            return slots, ids
        if self._ahead is not None and not width and tokens is not None and scratch + tokens.shape[1] <= _MORE:
            return self._ahead[scratch : scratch + tokens.shape[1]].t(), tokens
        return slots_after(rows.text, rows.length, tokens, width, scratch)


# ---- the two ways to run a pass


class TransformersExecutor:
    """Runs passes by the model's own forward, with 4-D masks. `visibility` is (mask or None, positions of the keys)."""

    def __init__(self, lm: LanguageModel, model: Any, taps: tuple[int, ...]) -> None:
        self._lm, self._model, self._taps, self._logits = lm, model, taps, lm.logits
        shape = lm.architecture
        self._positional = shape.slides or shape.alibi  # masks or biases depend on the positions of keys
        self._may_omit_mask = not (shape.additive or self._positional)

    @property
    def piece(self) -> int:
        """Tokens of a prompt in one pass."""
        return CHUNK

    def reads_together(self, lengths: Sequence[int]) -> bool:
        """Return False, because a prompt has the same bits in every batch only if it is read alone."""
        return False

    def chain(self, slots: Tensor, visible: int, causal: bool) -> Any:
        """Return the visibility of tokens that see all slots up to their own. causal: SDPA needs no mask for that."""
        allowed = None if causal and self._may_omit_mask else chain_mask(slots, visible)
        keys = arange(0, visible, slots.device).expand(len(slots), visible) if self._positional else None
        return allowed, keys

    def tree(self, parents: Tensor, length: Tensor, slots: Tensor, fed: int, visible: int) -> tuple[Tensor, Any]:
        """Return positions [R,Q] and visibility of a pass whose last `fed` tokens are the last of the scratch tokens
        with these parents [R,M]."""
        ancestors = closure(parents)
        depth = ancestors.sum(-1) - 1
        width, before = slots.shape[1] - fed, parents.shape[1] - fed
        nodes = length + depth[:, before:]
        positions = torch.cat([slots[:, :width], nodes], 1) if width else nodes
        allowed = tree_mask(positions, length, ancestors[:, before:], visible)
        return positions, (allowed, key_positions(length, depth, visible))

    @property
    def grid(self) -> int:
        """Tokens of a prompt that are always read in one pass: they would get other bits in smaller passes."""
        return self.piece

    def read_piece(self, cache: SlotCache, first: int, ids: Tensor, start: int, scored: bool = False) -> Reading:
        """Read the tokens `ids` [R,Q] of the rows `first`... at the slots `start`... Return the taps [R,Q,D], and with
        `scored` the logits [R,Q,V]."""
        R, Q = ids.shape
        positions = arange(start, start + Q, ids.device).expand(R, Q)
        cache.set_next_write(slice(first, first + R), start, start + Q, start)
        visibility = self.chain(positions, start + Q, causal=start == 0)
        keep = Q if scored else 1
        return self(cache, ForwardPlan(ids, positions, positions, visibility, keep=keep, tapped=Q))[0]

    def __call__(self, cache: SlotCache, plan: ForwardPlan, layers: LayerRange | None = None) -> tuple[Reading, None]:
        lm, shape = self._lm, self._lm.architecture
        visible = cache.get_mask_sizes(0)[0]
        allowed, keys = plan.visibility
        inputs: dict[str, Any] = {"input_ids": plan.ids, "past_key_values": cache, "use_cache": True}
        if shape.alibi:
            inputs.update(key_positions=keys, span=visible, attention_mask=allowed)
        else:
            inputs["attention_mask"] = masks_of_layers(lm, allowed, plan.positions, keys)
        if "position_ids" in shape.takes:
            inside = visible <= shape.context
            inputs["position_ids"] = plan.positions if inside else plan.positions.clamp(max=shape.context - 1)
        if "logits_to_keep" in shape.takes:
            inputs["logits_to_keep"] = plan.keep
        if self._taps:
            inputs["output_hidden_states"] = True
        openmp.work()
        output = self.run(self._model if layers is None else layers.module, inputs)
        logits = output.logits
        if logits.shape[1] != plan.keep:
            logits = logits[:, -plan.keep :]
        if logits.shape[2] != self._logits:
            logits = logits[..., : self._logits]
        return Reading(logits, tuple(output.hidden_states[layer][:, -plan.tapped :] for layer in self._taps)), None

    def run(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Call the model."""
        if inputs["input_ids"].is_cuda:
            with without_planned_attention():
                return self._lm.architecture.run(model, inputs)
        return self._lm.architecture.run(model, inputs)


class KernelExecutor:
    """Runs passes by our own kernels. `visibility` is an `AttentionSpan`: the slots that each token sees."""

    def __init__(self, lm: LanguageModel, kernels: CpuForward | CudaForward, taps: tuple[int, ...]) -> None:
        self._kernels, self._taps, self._logits = kernels, taps, lm.logits
        self._chain = AttentionSpan(None)
        # on CUDA, the passes over prompts are captured
        self._prompts = None if isinstance(kernels, CpuForward) else PromptReader(lm, kernels, taps)

    @property
    def piece(self) -> int:
        return self._kernels.piece if isinstance(self._kernels, CpuForward) else CHUNK

    @property
    def grid(self) -> int:
        """CPU kernels give a token the same bits in every pass."""
        return 1 if isinstance(self._kernels, CpuForward) else CHUNK

    def reads_together(self, lengths: Sequence[int]) -> bool:
        """Return True if one pass over several prompts of these lengths is faster than one for each. CPU kernels give a
        token the same bits in every pass."""
        return isinstance(self._kernels, CpuForward) and self._kernels.together(lengths)

    def chain(self, slots: Tensor, visible: int, causal: bool) -> Any:
        return self._chain

    def tree(self, parents: Tensor, length: Tensor, slots: Tensor, fed: int, visible: int) -> tuple[Tensor, Any]:
        return self._kernels.in_tree(parents, length, slots, fed)

    def read_piece(self, cache: SlotCache, first: int, ids: Tensor, start: int, scored: bool = False) -> Reading:
        if self._prompts is not None:
            if scored:
                raise UnsupportedError("CUDA kernels read prompts without logits; use runner='eager' to score prompts.")
            return Reading(ids.new_empty(0), self._prompts.read(cache, first, ids, start))
        R, Q = ids.shape
        positions = arange(start, start + Q, ids.device).expand(R, Q)
        cache.set_next_write(slice(first, first + R), start, start + Q, start)
        openmp.rest()
        assert isinstance(self._kernels, CpuForward)
        return self._kernels.read(cache, first, ids, positions, self._taps, self._logits if scored else 0)

    def __call__(self, cache: SlotCache, plan: ForwardPlan, layers: LayerRange | None = None) -> tuple[Reading, Tensor]:
        """Return the reading, and the hidden states [R,Q,D] of the last layer that ran, until the next pass."""
        openmp.rest()
        return self._kernels(cache, plan, self._taps, vocabulary=self._logits, part=layers)


# ---- the reader of a batch


class SlotReader:
    """Reads a batch of sequences with a model and a KV cache that can discard. See `core.contracts.Reader`."""

    branches = True

    def __init__(self, lm: LanguageModel, taps: Sequence[float] = (), model: Any = None) -> None:
        """model: the module to run, if it is another one than `lm.model`."""
        self.lm = lm
        self._model = lm.model if model is None else model
        self.ops = lm.ops
        self.cache = SlotCache(self.ops)
        self.max_token_id = lm.max_token_id  # larger token ids are read as this one
        self.prompt_taps: list[PromptTaps] = []
        self._taps = tuple(round(share * lm.layers) for share in taps)
        self._slots = SlotMapping(self.ops)
        self._scratch = 0
        self._parents: Tensor | None = None  # [R,M] of the scratch tokens, once they branch
        self.use_kernels(kernel_pass(lm, self._model))

    def use_kernels(self, kernels: CpuForward | CudaForward | None) -> None:
        """Run passes by these kernels; None: by transformers."""
        self.kernels = kernels
        self._executor: TransformersExecutor | KernelExecutor = (
            TransformersExecutor(self.lm, self._model, self._taps)
            if kernels is None
            else KernelExecutor(self.lm, kernels, self._taps)
        )

    @property
    def storage_version(self) -> Hashable:
        return self.cache.storage_version

    @property
    def capturable(self) -> bool:
        return self.kernels is not None or self.lm.architecture.capturable

    # ---- prompts

    def begin(self, rows: RowsView, first: int, room: int, prefilled: bool = False) -> int:
        """Read the new rows `first`... except their last token, and return 1, the number of tokens that the next
        `extend` must read. room: the largest number of slots that a row needs. prefilled: the KV cache and
        `prompt_taps` have these rows already."""
        self.cache.reserve(rows.capacity, room)
        if not prefilled:
            self.prompt_taps = []
            self.prefill(rows, first, [length - 1 for length in rows.lengths[first:]])
        return 1

    def prefill(self, rows: RowsView, first: int, upto: Sequence[int]) -> None:
        """Read the first `upto` tokens of the rows `first`...

        Each row is read alone, in pieces on a fixed grid, so the bits of a prompt depend on no other row and on no
        draft. Short prompts share a pass where that changes no bits; what a shorter row reads past its end is
        overwritten before a pass sees it.
        """
        self.cache.reserve(rows.capacity, max(upto))
        if self._executor.reads_together(upto):
            self.read_piece(first, rows.text[first : first + len(upto), : max(upto)].clamp(min=0), 0)
            return
        piece = self._executor.piece
        for row, end in enumerate(upto, first):
            for start in range(0, end, piece):
                self.read_piece(row, rows.text[row : row + 1, start : min(start + piece, end)], start)

    def read_piece(self, first: int, ids: Tensor, start: int, scored: bool = False) -> Reading:
        """Read the tokens `ids` [R,Q] of the rows `first`... from the position `start` on. Add the hidden states
        of the drafter to `prompt_taps`. The logits are those of all tokens with `scored`, and else have no meaning."""
        reading = self._executor.read_piece(self.cache, first, self._known(ids), start, scored)
        if self._taps:
            self.prompt_taps.append(PromptTaps(first, start, reading.taps))
        return reading

    @property
    def piece(self) -> int:
        """Tokens of a prompt in one pass, at most."""
        return self._executor.piece

    @property
    def grid(self) -> int:
        """A piece of a prompt begins at a multiple of this, and ends at the next one or at the end of the prompt.
        Another piece would have other bits."""
        return self._executor.grid

    @property
    def scores(self) -> bool:
        """Whether `read_piece` can give logits: CUDA kernels read prompts without them."""
        return self.kernels is None or isinstance(self.kernels, CpuForward)

    def reserve_rows(self, rows: int, slots: int) -> None:
        """Make room in the KV cache for prompts that are read before they join the batch."""
        self.cache.reserve(rows, slots)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of a row of the KV cache to another row."""
        self.cache.move_row(source, target, length)

    def swap_rows(self, one: int, other: int, length: int) -> None:
        """Exchange the first `length` slots of two rows of the KV cache."""
        self.cache.swap_rows(one, other, length)

    def _known(self, ids: Tensor) -> Tensor:
        return ids if self.max_token_id is None else ids.clamp(max=self.max_token_id)

    # ---- decoding

    def extend(
        self, rows: RowsView, width: int, tokens: Tensor | None = None, parents: Tensor | None = None
    ) -> Reading:
        """See `core.contracts.Reader`."""
        return self._executor(self.cache, self._plan(rows, width, tokens, parents))[0]

    def _plan(self, rows: RowsView, width: int, tokens: Tensor | None, parents: Tensor | None) -> ForwardPlan:
        """Plan the pass of an `extend`, and make room for it in the KV cache."""
        fed = 0 if tokens is None else tokens.shape[1]
        before, longest = self._scratch, max(rows.lengths)
        visible, start = longest + before + fed, longest + before - width
        same_length = rows.bound is None and min(rows.lengths) == longest
        self.cache.reserve(rows.capacity, visible)
        if rows.bound is None:
            slots, ids = slots_after(rows.text, rows.length, tokens, width, before)
        else:
            slots, ids = self._slots.of(rows, before, width, tokens)
        self.cache.set_next_write(slice(0, rows.count), start if same_length else slots, visible, start)
        self._scratch += fed
        if self._parents is None and (parents is None or not fed):  # a chain: slots are positions
            causal = same_length and (start == 0 or width + fed == 1)
            positions, visibility = slots, self._executor.chain(slots, visible, causal)
        else:
            family = self._family(rows.count, fed, parents if fed else None)
            positions, visibility = self._executor.tree(family, rows.length, slots, fed, visible)
        if self.max_token_id is not None:
            ids = ids.clamp(max=self.max_token_id)
        keep = fed + (1 if width else 0)
        return ForwardPlan(ids, positions, slots, visibility, keep, keep)

    def _family(self, R: int, fed: int, parents: Tensor | None) -> Tensor:
        """Return the parents of all scratch tokens [R,M]. Tokens that came without parents continue a chain."""
        device, M = self.lm.device, self._scratch - fed
        if self._parents is None:
            self._parents = arange(-1, M - 1, device).expand(R, M)
        if parents is None:
            parents = arange(M - 1, M + fed - 1, device).expand(R, fed)
        self._parents = torch.cat([self._parents, parents], 1) if M else parents
        return self._parents

    # ---- keeping and discarding

    def keep(self, rows: RowsView, path: Tensor | None) -> None:
        """Keep the scratch tokens `path` [R,D], in order; None: the chain, which is in place. Parents come before their
        children, so entry j of a path is at least j; a smaller entry is padding."""
        if path is not None and self._parents is not None and path.shape[1] > 0:
            self.cache.reserve(rows.capacity, max(rows.lengths) + path.shape[1])
            steps = arange(0, path.shape[1], path.device)
            if rows.bound is None and path.device.type == "cpu":  # host reads are free here; most are in place
                moved = np.flatnonzero((path.numpy() > steps.numpy()).any(axis=0)).tolist() or [0, -1]
                some = slice(moved[0], moved[-1] + 1)
                path, steps = path[:, some], steps[some]
            if path.shape[1]:
                self.cache.move(rows.length, path, steps)
        self.forget()

    def forget(self) -> None:
        """Discard the scratch tokens; later passes overwrite their slots."""
        self._scratch = 0
        self._parents = None
        self._slots.forget()

    def reorder(self, rows: RowsView, source: Sequence[int]) -> None:
        """Make row r a copy of row source[r], with its scratch tokens. Only the slots that differ are copied."""
        changed = [row for row, other in enumerate(source) if row != other]
        if not changed:
            return
        start = min(common_prefix(rows.histories[row], rows.histories[source[row]]) for row in changed)
        stop = max(rows.lengths[row] for row in changed) + self._scratch
        self.cache.copy_rows([source[row] for row in changed], changed, start, stop)

    def release(self, row: int, last: int, length: int) -> None:
        """Move row `last`, of `length` tokens, to the place of row `row`."""
        if row != last:
            self.cache.move_row(last, row, length)


def common_prefix(first: Sequence[object], second: Sequence[object], start: int = 0) -> int:
    """Return the length of the common beginning of two sequences, which are equal up to `start`. Slices are compared,
    which is much faster than a loop over tokens."""
    low, high = start, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low


def check_prompt(tokens: Sequence[int], lm: LanguageModel) -> None:
    """Refuse a prompt that is empty, leaves no room for a token in the context, or has ids that the model lacks."""
    if not tokens:
        raise InputError("The prompt is empty; give at least one token.")
    if len(tokens) >= lm.context:
        raise InputError(
            f"The prompt has {len(tokens)} tokens, the context of {lm.name} ends at {lm.context}; shorten it."
        )
    for token in tokens:
        if not 0 <= token < lm.vocabulary:
            raise InputError(f"The prompt has token id {token}, outside the vocabulary of {lm.vocabulary} tokens.")
