"""A causal language model of Hugging Face, unmodified, and the text it can read and forget."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.contracts import PromptTaps, Reader, Reading, RowsView, Runner, arange
from paceline.core.device_ops import QUICK
from paceline.core.tree import closure
from paceline.models import masks
from paceline.models.architecture import is_tested, refuse_dropout, study
from paceline.models.cpu import threads as openmp
from paceline.models.cpu.cpu_forward import AttentionSpan, CpuForward, Part, kernel_pass
from paceline.models.cuda.prefill import PromptReader
from paceline.models.loading.catalogue import UNKNOWN, Weights
from paceline.models.runners.eager import EagerRunner
from paceline.models.slot_cache import SlotCache, parting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from paceline.models.cuda.cuda_forward import CudaForward

# ---- Where the tokens of a pass go, and which they are: the end of every text, and what is drafted after it

_MORE = 16  # slots after a text that are worked out together: drafts are seldom longer


class SlotMapping:
    """The slots of one reader's scratch tokens. In a captured round, where a device has a quick way, those of a whole
    draft are worked out with its first pass: the texts do not change before it is forgotten."""

    def __init__(self) -> None:
        self._ahead: Tensor | None = None  # [more,R]: the slots after each text, while scratch tokens are there

    def forget(self) -> None:
        self._ahead = None

    def of(self, rows: RowsView, scratch: int, width: int, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Slots [R,Q] and ids [R,Q] of the last `width` tokens of each text, and of `tokens` [R,fed] that come after so
        many scratch tokens."""
        fed, quick = 0 if tokens is None else tokens.shape[1], QUICK.get(rows.text.device.type)
        if quick is not None and rows.bound is not None and width and not scratch:
            slots, ids, self._ahead = quick.lay(rows.text, rows.length, tokens, width, _MORE)
            return slots, ids
        if self._ahead is not None and not width and tokens is not None and scratch + fed <= _MORE:
            return self._ahead[scratch : scratch + fed].t(), tokens
        slots = rows.length + arange(scratch - width, scratch + fed, rows.text.device)
        if not width:
            assert tokens is not None
            return slots, tokens
        known = rows.text.gather(1, slots[:, :width] if fed else slots)
        return slots, known if tokens is None or not fed else torch.cat([known, tokens], 1)


# ---- A causal language model of Hugging Face, unmodified, and the text it can read and forget

CHUNK = 1024  # tokens of a prompt in one pass of transformers, and of the CUDA kernels


class LanguageModel:
    """Weights, tokenizer and what is known of the architecture. It holds no text: `reader()` does.

    Any number of readers may share one model. The model and its config are never edited.
    """

    largest: int | None = None  # the last token it knows, where it speaks of more (`speaking_as`)
    strict: bool = False  # a token has the same bits in every pass, whatever that costs (`strict`)
    weights: Weights = UNKNOWN  # where they come from, in which form
    runner: str = "auto"  # how passes run: "auto" (kernels of our own where there are some) or "eager" (transformers)

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, name: str | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.architecture = study(model)
        self.name = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
        config = model.config.get_text_config(decoder=True)
        self.vocabulary = _usable_vocabulary(config.vocab_size, tokenizer)
        self.context = self.architecture.context
        self.layers = len(self.architecture.kinds)
        if not is_tested(model):
            from paceline.models.probe import probe

            probe(self)

    @property
    def core(self) -> PreTrainedModel:
        """What passes of its readers run; `model` is what others are given."""
        return self.model

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def numbers(self) -> str:
        """Form and source of the weights, and the dtype in which they are used."""
        return self.weights.read_as(self.dtype)

    @property
    def eos(self) -> tuple[int, ...]:
        """The ids that end a text: the generation config's, else the config's, else the tokenizer's."""
        generation = getattr(self.model, "generation_config", None)
        for source in (generation, self.model.config, self.tokenizer):
            ids = getattr(source, "eos_token_id", None)
            if ids is not None:
                return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
        return ()

    @property
    def logits(self) -> int:
        """How many logits a pass gives: fewer than `vocabulary` where some of its tokens are not this model's own."""
        return self.vocabulary if self.largest is None else self.largest + 1

    def speaking_as(self, target: LanguageModel) -> LanguageModel:
        """The same model with the tokens of a target that knows more or fewer: those it does not know are read as its
        last one, and its logits end before them."""
        if self.vocabulary == target.vocabulary:
            return self
        other = copy.copy(self)
        other.tokenizer, other.vocabulary = target.tokenizer, target.vocabulary
        other.largest = self.vocabulary - 1 if self.vocabulary < target.vocabulary else None
        return other

    def reader(self, taps: Sequence[float] = (), runner: Runner | None = None) -> SlotReader:
        refuse_dropout(self.model)
        runner = runner or EagerRunner()
        if self.strict:
            from paceline.models.readers.strict import StrictReader

            return StrictReader(self, tuple(taps), runner)
        return SlotReader(self, tuple(taps), runner)

    def reader_around(self, shared: Reader) -> Reader:
        """The reader to decode with where a drafter brings one along (early exit): that one, unless there are more."""
        return shared

    def __repr__(self) -> str:
        return f"LanguageModel({self.name!r}, {self.architecture.name}, {self.numbers}, {self.device})"


def _usable_vocabulary(size: int, tokenizer: Any) -> int:
    """Ids that a model pads its vocabulary with are never written: they have no text."""
    if tokenizer is None:
        return size
    try:
        return min(size, max(len(tokenizer), max(tokenizer.get_vocab().values(), default=0) + 1))
    except (AttributeError, NotImplementedError, TypeError):
        return size


class SlotReader:
    """A model reading a batch of texts. Position p of a row lives in slot p; scratch tokens follow the text."""

    def __init__(self, lm: LanguageModel, taps: tuple[float, ...], runner: Runner, model: Any = None) -> None:
        self.lm = lm
        self.cache = SlotCache()
        self._runner = runner
        self._model: Any = lm.model if model is None else model  # what a pass runs: all of it, or one part (early exit)
        self._kernels: CpuForward | CudaForward | None = kernel_pass(lm, self._model)
        self._taps = tuple(round(share * lm.layers) for share in taps)
        self._prompts: PromptReader | None = None  # for CUDA kernels: their passes over prompts are captured
        if self._kernels is not None and not isinstance(self._kernels, CpuForward):
            self._prompts = PromptReader(lm, self._kernels, self._taps)
        self._scratch = 0
        self._layout = SlotMapping()
        self.largest = lm.largest  # token ids above it are read as it
        self._parents: Tensor | None = None  # [R,M] of the scratch tokens, once they branch
        self.prompt_taps: list[PromptTaps] = []
        self._part: Part | None = None  # what of the model the kernels run (early exit)
        self._said = torch.empty(0)  # hidden states of their last pass, before norm and head

    @property
    def branches(self) -> bool:
        return True

    @property
    def storage_version(self) -> int:
        return self.cache.storage_version

    @property
    def capturable(self) -> bool:
        return self._kernels is not None or self.lm.architecture.capturable

    # ---- reading

    def begin(self, rows: RowsView, first: int, room: int) -> int:
        """Read the new rows `first`... but for their last token, which the next `extend` reads as it reads every later
        token; returns 1. `room` is the most slots a row will need."""
        self.prompt_taps = []
        self.cache.reserve(rows.capacity, room)
        self.prefill(rows, first, [length - 1 for length in rows.lengths[first:]])
        return 1

    def prefill(self, rows: RowsView, first: int, upto: Sequence[int]) -> None:
        """Read the first `upto` tokens of the rows `first`...: each row alone, in pieces on a fixed grid. So the bits
        of a prompt depend on no other row and on no draft. CPU kernels give a token the same bits in any pass: they
        read short prompts together. What a shorter row reads past its end is written again before a pass sees it."""
        self.cache.reserve(rows.capacity, max(upto))
        if isinstance(self._kernels, CpuForward) and self._kernels.together(upto):
            return self._read_piece(first, rows.text[first : first + len(upto), : max(upto)].clamp(min=0), 0)
        for row, end in enumerate(upto, first):
            for start in range(0, end, self._grid):
                self._read_piece(row, rows.text[row : row + 1, start : min(start + self._grid, end)], start)

    @property
    def _grid(self) -> int:
        """Tokens from one grid line of a prompt to the next."""
        return self._kernels.piece if isinstance(self._kernels, CpuForward) else CHUNK

    def _read_piece(self, first: int, ids: Tensor, start: int) -> None:
        """Read the tokens `ids` [R,Q] of the rows `first`... from the grid line `start` on."""
        if self.largest is not None:
            ids = ids.clamp(max=self.largest)
        taps = self._piece_taps(first, ids, start)
        if self._taps:
            self.prompt_taps.append(PromptTaps(first, start, taps))

    def _piece_taps(self, first: int, ids: Tensor, start: int) -> tuple[Tensor, ...]:
        """Run the pass of a piece; returns the tapped states [R,Q,D]."""
        if self._prompts is not None:
            return self._prompts.read(self.cache, first, ids, start)
        R, Q = ids.shape
        stop = start + Q
        position = arange(start, stop, ids.device).expand(R, Q)
        self.cache.aim(slice(first, first + R), start, stop, start)
        if isinstance(self._kernels, CpuForward):
            openmp.rest()
            return self._kernels.read(self.cache, first, ids, position, self._taps)
        allowed = None if start == 0 and self._may_omit_mask() else masks.chain_mask(position, stop)
        keys = masks.key_positions(position[:, :1], None, stop)
        return self._pass(ids, position, allowed, keys, keep=1, tapped=Q).taps

    def extend(
        self, rows: RowsView, width: int, tokens: Tensor | None = None, parents: Tensor | None = None
    ) -> Reading:
        """See `core.contracts.Reader`. Chains and trees, even and ragged rows, first and later scratch tokens."""
        fed = 0 if tokens is None else tokens.shape[1]
        parents = parents if fed else None
        M, longest = self._scratch, max(rows.lengths)
        visible = longest + M + fed
        even = rows.bound is None and min(rows.lengths) == longest
        self.cache.reserve(rows.capacity, visible)
        slots, ids = self._layout.of(rows, M, width, tokens)  # for a chain the slots are also the positions
        start = longest + M - width
        self.cache.aim(slice(0, rows.count), start if even else slots, visible, start)
        self._scratch += fed
        keep = fed + (1 if width else 0)
        if self._kernels is not None:
            return self._by_kernels(rows, ids, slots, fed, parents, keep)
        if parents is None and self._parents is None:
            omit = even and (start == 0 or width + fed == 1) and self._may_omit_mask()
            allowed = None if omit else masks.chain_mask(slots, visible)
            keys = masks.key_positions(rows.length, None, visible) if self._positional else None
            return self._pass(ids, slots, allowed, keys, keep)
        depth, ancestors = self._grow(rows.count, fed, parents)
        nodes = rows.length + depth[:, M:]
        position = torch.cat([slots[:, :width], nodes], 1) if width else nodes
        allowed = masks.tree_mask(position, rows.length, ancestors[:, M:], visible)
        return self._pass(ids, position, allowed, masks.key_positions(rows.length, depth, visible), keep)

    def _by_kernels(
        self, rows: RowsView, ids: Tensor, slots: Tensor, fed: int, parents: Tensor | None, keep: int
    ) -> Reading:
        """The pass of an `extend`, by kernels of our own: each token with the slots it sees instead of a mask."""
        assert self._kernels is not None
        position, sight = slots, AttentionSpan(None)
        if parents is not None or self._parents is not None:
            position, sight = self._kernels.in_tree(self._family(rows.count, fed, parents), rows.length, slots, fed)
        if self.largest is not None:
            ids = ids.clamp(max=self.largest)
        openmp.rest()
        reading, self._said = self._kernels(
            self.cache, ids, position, slots, sight, keep, self._taps, vocabulary=self.lm.logits, part=self._part
        )
        return self._heard(reading, ids, position)

    def _grow(self, R: int, fed: int, parents: Tensor | None) -> tuple[Tensor, Tensor]:
        """Depth [R,M] and ancestors [R,M,M] of all scratch tokens."""
        ancestors = closure(self._family(R, fed, parents))
        return ancestors.sum(-1) - 1, ancestors

    def _family(self, R: int, fed: int, parents: Tensor | None) -> Tensor:
        """The parents of all scratch tokens [R,M]; what was fed before without parents was a chain."""
        device, M = self.lm.device, self._scratch - fed
        if self._parents is None:
            self._parents = arange(-1, M - 1, device).expand(R, M)
        if parents is None:
            parents = arange(M - 1, M + fed - 1, device).expand(R, fed)
        self._parents = torch.cat([self._parents, parents], 1) if M else parents
        return self._parents

    @property
    def _positional(self) -> bool:
        """Do masks or biases depend on the positions of keys?"""
        return self.lm.architecture.slides or self.lm.architecture.alibi

    def _may_omit_mask(self) -> bool:
        """Plain causal attention of even rows: SDPA needs no mask for it, if every layer is of that kind."""
        shape = self.lm.architecture
        return not (shape.additive or self._positional)

    def _pass(
        self,
        ids: Tensor,
        position: Tensor,
        allowed: Tensor | None,
        keys: Tensor | None,
        keep: int,
        tapped: int | None = None,
    ) -> Reading:
        """Logits of the last `keep` tokens, taps of the last `tapped` (as many, if not said)."""
        shape = self.lm.architecture
        if self.largest is not None:
            ids = ids.clamp(max=self.largest)
        inputs: dict[str, Any] = {"input_ids": ids, "past_key_values": self.cache, "use_cache": True}
        visible = self.cache.get_mask_sizes(0)[0]
        if shape.alibi:
            inputs.update(key_positions=keys, span=visible, attention_mask=allowed)
        else:
            inputs["attention_mask"] = masks.of_layers(self.lm, allowed, position, keys)
        if "position_ids" in shape.takes:
            inputs["position_ids"] = position.clamp(max=shape.context - 1) if visible > shape.context else position
        if "logits_to_keep" in shape.takes:
            inputs["logits_to_keep"] = keep
        if self._taps:
            inputs["output_hidden_states"] = True
        openmp.work()
        output = self._runner(shape.run, self._model, inputs)
        logits = output.logits
        if logits.shape[1] != keep:
            logits = logits[:, -keep:]
        if logits.shape[2] != self.lm.logits:
            logits = logits[..., : self.lm.logits]
        seen = keep if tapped is None else tapped
        taps = tuple(output.hidden_states[layer][:, -seen:] for layer in self._taps)
        return self._heard(Reading(logits, taps), ids, position)

    def _heard(self, reading: Reading, ids: Tensor, position: Tensor) -> Reading:
        """What a pass said after the tokens `ids` [R,Q] at `position` [R,Q]; its logits are of the last of them."""
        return reading

    # ---- forgetting

    def keep(self, rows: RowsView, path: Tensor | None) -> None:
        """`path` [R,D]: the scratch tokens to keep, in order (None: of a chain, which is in place). Those before a
        token of a path were read before it, so the j-th is number j or later; a smaller number is of nobody."""
        if path is not None and self._parents is not None and path.shape[1] > 0:
            self.cache.reserve(rows.capacity, max(rows.lengths) + path.shape[1])
            steps = arange(0, path.shape[1], path.device)
            if rows.bound is None and path.device.type == "cpu":  # looking is free, and most is where it belongs
                storage_version = np.flatnonzero((path.numpy() > steps.numpy()).any(axis=0)).tolist() or [0, -1]
                some = slice(storage_version[0], storage_version[-1] + 1)
                path, steps = path[:, some], steps[some]
            if path.shape[1]:
                self.cache.move(rows.length, path, steps)
        self.forget()

    def forget(self) -> None:
        """Scratch tokens are forgotten; their slots are written again."""
        self._scratch = 0
        self._parents = None
        self._layout.forget()

    def reorder(self, rows: RowsView, source: Sequence[int]) -> None:
        """Row r becomes a copy of row source[r], scratch tokens included: only from where their texts part."""
        changed = [row for row, other in enumerate(source) if row != other]
        if not changed:
            return
        start = min(parting(rows.histories[row], rows.histories[source[row]]) for row in changed)
        stop = max(rows.lengths[row] for row in changed) + self._scratch
        self.cache.copy_rows([source[row] for row in changed], changed, start, stop)

    def release(self, row: int, last: int, length: int) -> None:
        """Row `last` takes the place of row `row`."""
        if row != last:
            self.cache.move_row(last, row, length)
