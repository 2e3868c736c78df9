"""EAGLE: one decoder layer predicts the next hidden states of the target, and an output layer gives their logits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.common.errors import InputError, UnsupportedError
from paceline.core.contracts import DRAFTERS, Budget, Drafter, RowsView, arange
from paceline.core.per_row import ReadCursor
from paceline.core.protocols import CatchesUp, Rewindable
from paceline.core.tree import TokenTree
from paceline.core.tree_growth import Expand
from paceline.drafters.heads.base import DraftHead, HeadDrafter, HeadOptions, PlaceStore, depths
from paceline.models.cpu.cpu_head import CpuHead
from paceline.models.cuda.cuda_head import CudaHead
from paceline.models.heads.head_layers import (
    BySlot,
    DecoderLayer,
    LayerConfig,
    Norm,
    Remember,
    Scratch,
    rows_of,
    spread,
)
from paceline.models.heads.training_attention import Unrolled
from paceline.models.language_model import LanguageModel
from paceline.models.slot_cache import SlotCache, chain_mask

# ---- The steps of an EAGLE head, for entries of the text and for drafted tokens. They use one KV cache


class Steps:
    """Runs an EAGLE head. An entry is the feature of one position and the token after it.

    light: the head in the dtype of drafting. kernels: the kernels of the device for this head, or None. Sizes that the
    kernels cannot process run with the modules. Both use the same KV cache; only the modules need masks.
    """

    def __init__(
        self, light: Any, embed: Shared, shared: Shared, places: PlaceStore, kernels: CudaHead | CpuHead | None
    ) -> None:
        self._light, self._embed, self._shared, self._places, self._kernels = light, embed, shared, places, kernels
        self.cache = SlotCache()
        self._remember = BySlot(self.cache, 0)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kernels": None}  # the kernels hold addresses, which are not valid in a copy

    def note(self, rows: RowsView, taps: tuple[Tensor, ...], path: Tensor | None = None) -> bool:
        """Run `HeadDrafter.note` with kernels. Return False if the kernels cannot do it."""
        R, Q = taps[0].shape[0], taps[0].shape[1] if path is None else path.shape[1] + 1
        if self._kernels is None or not self._kernels.takes(R * Q):
            return False
        return self._kernels.note(taps, path, rows.length, self._places.states(R, max(rows.lengths) + Q))

    def read(self, rows: RowsView, some: slice, position: Tensor, visible: int) -> Tensor:
        """Read the entries of the text at `position` [R,Q] of some rows, and return the next features [R,Q,D]."""
        self.cache.set_next_write(some, position, visible, 0)
        embedded = self._embed(rows.text[some].gather(1, position + 1))
        mask = chain_mask(position, visible)
        features = self._places.at(some, position)
        return self._light.step(embedded, features, position, mask, self._remember)  # type: ignore[no-any-return]

    def draft(self, rows: RowsView, width: int) -> Expand:
        """Return the function that reads first the last `width` entries of the text, with the target's features, and
        then drafted tokens, each with the output of its parent as its feature."""
        longest = max(rows.lengths) - 1
        scratch = Scratch(rows.length - 1, longest)
        made: Tensor = torch.empty(0)  # [R,1+M,D]: the features after the text and after every scratch token

        def expand(tokens: Tensor | None, parents: Tensor | None) -> Tensor:
            nonlocal made
            if tokens is None:
                made, logits = self._caught_up(rows, scratch.length, width, max(longest, 1))
                return logits
            scratch.more(tokens.shape[1], parents)
            self.cache.reserve(rows.capacity, scratch.visible)
            fresh, logits = self._ahead(tokens, parents, made, scratch)
            made = fresh if parents is None else torch.cat([made, fresh], 1)
            return logits

        return expand

    def chain(self, rows: RowsView, width: int, depth: int) -> Tensor | None:
        """Return the likeliest chain [R,depth], drafted in one kernel call. None: the kernels cannot do it."""
        if self._kernels is None or not self._kernels.takes(rows.count * width):
            return None
        entries = max(1, max(rows.lengths) - 1)
        self.cache.reserve(rows.capacity, entries + depth)
        about = (rows.text, rows.length - 1, self._places.states(rows.count, 1), width, self.cache)
        return self._kernels.chain(*about, entries, depth)

    def _caught_up(self, rows: RowsView, entries: Tensor, width: int, visible: int) -> tuple[Tensor, Tensor]:
        """Return the feature after the text [R,1,D] and its logits [R,1,V]. A row with fewer than `width` new entries
        reads older ones again, with the same result. A text of one token has no entry and reads an arbitrary one."""
        self.cache.reserve(rows.capacity, visible)
        if self._kernels is not None and self._kernels.takes(rows.count * width):
            states = self._places.states(rows.count, 1)
            return self._kernels.caught_up(rows.text, entries, states, width, self.cache, visible)
        position = (entries + arange(-width, 0, entries.device)).clamp(min=0)
        made = self.read(rows, slice(0, rows.count), position, visible)[:, -1:]
        return made, self._light.logits(made, self._shared)

    def _ahead(self, tokens: Tensor, parents: Tensor | None, made: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Return the features [R,Q,D] after the drafted tokens [R,Q], and their logits [R,Q,V]."""
        if self._kernels is not None and self._kernels.takes(tokens.numel(), parents is not None):
            return self._kernels.ahead(tokens, parents, made, scratch, self.cache)
        slots, position, mask = scratch.placed()
        self.cache.set_next_write(slice(0, tokens.shape[0]), slots, scratch.visible, 0)
        above = made[:, -1:]
        if parents is not None:
            above = made.gather(1, (parents + 1).unsqueeze(-1).expand(*parents.shape, made.shape[2]))
        fresh = self._light.step(self._embed(tokens), above, position, mask, self._remember)
        return fresh, self._light.logits(fresh, self._shared)


# ---- The head

_CHUNK = 1024  # positions of a prompt in one forward pass
_PUBLISHED = 3  # hidden states that a head reads if its files do not name them


Shared = Callable[[Tensor], Tensor]  # states [...,D] -> logits [...,V]


@dataclass(frozen=True)
class EagleConfig(LayerConfig):
    """Sizes of an EAGLE head.

    hidden, embedding: the widths of the target. taps: the relative depths of the hidden states that the head reads.
    draft_vocabulary: the number of tokens with logits (None: all). tap_layers: numbers of hidden states instead of
    taps, for heads of other projects; () is 2, L//2, L-3. norm_before_residual: the residual is the normed feature.
    """

    hidden: int = 0
    embedding: int = 0
    vocabulary: int = 0
    taps: tuple[float, ...] = (0.1, 0.5, 0.9)
    draft_vocabulary: int | None = None
    tap_layers: tuple[int, ...] | None = field(default=None, kw_only=True)
    norm_before_residual: bool = field(default=False, kw_only=True)
    fuse_bias: bool = field(default=False, kw_only=True)
    own_embedding: bool = field(default=False, kw_only=True)
    own_output: bool = field(default=True, kw_only=True)  # false: rows of the target's output layer

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.taps or not all(0 <= share <= 1 for share in self.taps):
            raise InputError(f"taps of an eagle head are depths from 0 to 1, such as 0.1, 0.5, 0.9; got {self.taps}.")
        size = self.vocabulary if self.draft_vocabulary is None else self.draft_vocabulary
        if not 1 <= size <= self.vocabulary:
            raise InputError(f"draft_vocabulary must be from 1 to the target's {self.vocabulary}, got {size}.")

    @property
    def tapped(self) -> int:
        """Return the number of hidden states that the head reads."""
        return len(self.taps) if self.tap_layers is None else len(self.tap_layers) or _PUBLISHED

    def taps_of(self, layers: int) -> tuple[float, ...]:
        """Return the relative depths of the hidden states that the head reads, in a target of `layers` layers."""
        if self.tap_layers is None:
            return self.taps
        return depths(self.tap_layers or (2, layers // 2, layers - 3), layers)


class EagleHead(DraftHead):
    """EAGLE-3 (arXiv 2503.01840): joins hidden states of three depths to a feature; one layer predicts the next one.

    Entry j has the feature of position j and token j+1, and predicts token j+2. After the text, the output of the layer
    is used as the feature.
    """

    kind = "eagle"
    Config = EagleConfig
    d2t: Tensor | None

    def __init__(self, config: EagleConfig, made_for: dict[str, Any]) -> None:
        super().__init__(config, made_for)
        D, size = config.width, config.draft_vocabulary
        self.fuse: nn.Module = nn.Linear(config.tapped * config.hidden, D, bias=config.fuse_bias)
        self.feature_norm = Norm(D, eps=config.eps)
        self.embed_norm = Norm(config.embedding, eps=config.eps)
        self.layer = DecoderLayer(config, config.embedding + D)
        self.norm = Norm(D, eps=config.eps)
        self.output: Any = None  # see `borrow`
        if config.own_output:
            self.output = nn.Linear(D, config.vocabulary if size is None else size, bias=False)
        # the target's id of every draft id; training fills it with the most frequent tokens
        self.register_buffer("d2t", None if size is None else torch.arange(size))
        self.words = nn.Embedding(config.vocabulary, config.embedding) if config.own_embedding else None

    @classmethod
    def sizes(cls, target: LanguageModel) -> EagleConfig:
        config = target.model.config.get_text_config(decoder=True)
        heads = max(1, config.hidden_size // 64)
        width = 2 * heads * max(1, config.hidden_size // (2 * heads))
        embedding = target.model.get_input_embeddings().embedding_dim
        layers = target.layers
        low, high = min(2, layers) / layers, max(0, layers - 3) / layers
        taps = tuple(sorted((low, 0.5, high))) if layers > 5 else (0.1, 0.5, 0.9)
        sizes = (width, heads, heads, 3 * width, 10000.0, config.hidden_size, embedding, config.vocab_size)
        return EagleConfig(*sizes, taps=taps)

    @property
    def remembers(self) -> int:
        return int(self.config.width)

    def check(self, target: LanguageModel) -> None:
        super().check(target)
        self.borrow(target)

    def borrow(self, target: LanguageModel) -> None:
        """Set the output layer to rows of the target's output layer, if the head has none."""
        if self.output is not None:
            return
        whole = target.model.get_output_embeddings()
        if getattr(whole, "in_features", None) != self.config.width:
            raise UnsupportedError(
                f"This eagle head uses the target's output layer, but that of {target.name} is not a linear layer of "
                f"{self.config.width} features; train one with own_output=true."
            )
        ids = arange(0, self.config.vocabulary, target.device) if self.d2t is None else self.d2t.to(target.device)
        with torch.inference_mode(False):
            self.output = rows_of(whole, ids)

    def own_weights(self) -> dict[str, Tensor]:
        lent = "" if self.config.own_output else "output."
        return {name: tensor for name, tensor in super().own_weights().items() if not lent or not name.startswith(lent)}

    def step(
        self, embedded: Tensor, features: Tensor, position: Tensor, mask: Tensor | None, remember: Remember | Unrolled
    ) -> Tensor:
        """Return the next features [R,Q,D] from embedded tokens [R,Q,E] and features [R,Q,D]."""
        normed = self.feature_norm(features)
        seen = torch.cat([self.embed_norm(embedded), normed], -1)
        stream = normed if self.config.norm_before_residual else features
        return self.layer(seen, stream, position, mask, remember)  # type: ignore[no-any-return]

    def logits(self, features: Tensor, shared: Shared | None = None) -> Tensor:
        """Return logits [...,V] over the target's vocabulary from features [...,D].

        Tokens outside the draft vocabulary have -inf. shared: the target's output layer, for heads without their own.
        """
        logits: Tensor = self.output(self.norm(features))
        return logits if self.d2t is None else spread(logits, self.d2t, self.config.vocabulary)

    def forward(
        self, embedded: Tensor, taps: Sequence[Tensor], steps: int, shared: Shared | None = None
    ) -> list[Tensor]:
        """Return the logits [R,T,V] of each of `steps` steps over whole texts, see `unrolled`."""
        return [self.logits(features, shared) for features in self.unrolled(embedded, taps, steps)]

    def unrolled(self, embedded: Tensor, taps: Sequence[Tensor], steps: int) -> Iterator[Tensor]:
        """Run whole texts as in drafting ("training-time test"), and yield the features [R,T,D] of each step. embedded
        [R,T,E]: the tokens after the positions of `taps` [R,T,D]. At position t, step s has true features up to t-s."""
        features = self.fuse(torch.cat(list(taps), -1))
        position = arange(0, features.shape[1], features.device).unsqueeze(0)
        remember = Unrolled()
        for _ in range(steps):
            features = self.step(embedded, features, position, None, remember)
            yield features
            features = torch.nn.functional.pad(features, (0, 0, 1, 0))[:, :-1]


@DRAFTERS.register("eagle")
class Eagle(HeadDrafter, CatchesUp, Rewindable):
    """Draft with one trained layer that predicts the target's next hidden states."""

    needs_taps = EagleConfig.taps

    @dataclass(frozen=True)
    class Options(HeadOptions):
        Head = EagleHead

        @classmethod
        def conformance_variants(cls) -> list[Mapping[str, Any]]:
            return [{"head": _with_few_tokens}, {"head": _with_shared_output}]

    def __init__(self, options: HeadOptions | None = None) -> None:
        super().__init__(options)
        known = self.head is not None and self.head.config.tap_layers is None
        self.needs_taps = self.head.config.taps if known else ()  # else `check` sets them
        self._read = ReadCursor()  # entries in the KV cache that were computed from hidden states of the target
        self._graph_width = 0  # entries that a draft inside a CUDA graph reads first

    def reset_copy(self) -> Drafter:
        fresh = super().reset_copy()
        assert isinstance(fresh, Eagle)
        fresh.needs_taps = self.needs_taps
        return fresh

    # ---- rows come and go

    def check(self, target: LanguageModel) -> None:
        super().check(target)
        self.needs_taps = self.head.config.taps_of(target.layers)

    def open(self, target: LanguageModel, rows: RowsView) -> None:
        super().open(target, rows)
        self._embedding = self.head.words or self._embedding
        ours = type(self.head) is EagleHead and target.runner in ("auto", "kernels")
        kernels: CudaHead | CpuHead | None = None
        if ours:
            kernels = CudaHead.of(self.head, self._embedding)
            kernels = kernels or CpuHead.of(self.light, self._embedding, self.vocabulary)
        self._steps = Steps(self.light, self.embed, self.shared, self.places, kernels)
        self._cache = self._steps.cache
        self._read.reset()

    def note(self, rows: RowsView, taps: tuple[Tensor, ...], path: Tensor | None = None) -> None:
        self._check_taps(taps)
        if not self._steps.note(rows, taps, path):
            super().note(rows, taps, path)

    def digest(self, taps: tuple[Tensor, ...]) -> Tensor:
        self._check_taps(taps)
        return self.light.fuse(torch.cat(taps, -1))

    def _check_taps(self, taps: tuple[Tensor, ...]) -> None:
        if len(taps) != self.head.config.tapped:
            raise UnsupportedError(
                f"This eagle head reads {self.head.config.tapped} hidden states and got {len(taps)}. Inside another "
                "drafter, pass load_drafter(folder, target) instead of the folder."
            )

    def admit(self, rows: RowsView, first: int) -> None:
        """Read the entries of the prompts, except the last one of each, which the first draft reads."""
        self.admit_unread(rows, first)
        self._read_entries(rows, slice(first, rows.count), 0, max(rows.lengths[first:]) - 2)
        for row in range(first, rows.count):
            self._read.catch_up(row, max(0, rows.lengths[row] - 2), done=True)

    def admit_unread(self, rows: RowsView, first: int) -> None:
        super().admit(rows, first)
        self._read.settle(rows.lengths[:first])
        self._read.admit_late(first, rows.count)
        self._cache.reserve(rows.capacity, rows.room)

    def catch_up(self, rows: RowsView, row: int, stop: int) -> None:
        if row in self._read.late:
            last = rows.lengths[row] - 1
            end = max(self._read[row], min(stop, last - 1))
            self._read_entries(rows, slice(row, row + 1), self._read[row], end)
            self._read.catch_up(row, end, done=stop >= last)

    def _read_entries(self, rows: RowsView, some: slice, first: int, end: int) -> None:
        """Read the entries `first`...`end`-1 of some rows. Those past the end of a text are overwritten later."""
        for start in range(first, end, _CHUNK):
            stop = min(start + _CHUNK, end)
            position = arange(start, stop, rows.text.device).expand(some.stop - some.start, stop - start)
            self._steps.read(rows, some, position, stop)

    @property
    def storage_version(self) -> Hashable:
        return super().storage_version, self._cache.storage_version

    def on_replay(self) -> None:
        if self._graph_width:  # a sequence has one entry less than tokens
            self._read.replayed(1 + self._graph_width)

    def rewind(self, lengths: list[int]) -> None:
        self._read.rewind(lengths)

    def reorder(self, rows: RowsView, source: Sequence[int]) -> bool:
        self._cache.copy_rows(list(source), list(range(len(source))), 0, max(rows.lengths))
        self._read.reorder(source)
        return super().reorder(rows, source)

    def release(self, row: int, last: int, length: int) -> None:
        super().release(row, last, length)
        if last < len(self._read) and row != last:
            self._cache.move_row(last, row, length)
        self._read.release(row, last)

    # ---- drafting

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        if rows.bound is not None:  # inside a CUDA graph: a round commits at most this many tokens
            self._graph_width = budget.depth + 1
            return self._grower.run(rows, budget, self._expand(rows, self._graph_width))
        self._read.settle(rows.lengths)
        width = self._read.most_missing([length - 1 for length in rows.lengths])
        chain = partial(self._steps.chain, rows, width)
        tree = self._grower.run(rows, budget, self._expand(rows, width), chain)
        read = [length - 1 for length in rows.lengths]
        for row in self._read.late:  # what they read above is wrong, and is overwritten
            read[row] = self._read[row]
        self._read[:] = read
        return tree

    def _expand(self, rows: RowsView, width: int) -> Expand:
        """Return `Steps.draft` with logits over the target's vocabulary. It first reads the last `width` entries."""
        draft = self._steps.draft(rows, width)
        return lambda tokens, parents: self.usable(draft(tokens, parents))


def _with_shared_output(target: LanguageModel) -> EagleHead:
    """Return a head for the conformance suite that uses rows of the target's output layer."""
    whole = target.model.get_output_embeddings()
    return _with_few_tokens(target, own=getattr(whole, "in_features", None) != EagleHead.sizes(target).width)


def _with_few_tokens(target: LanguageModel, own: bool = True) -> EagleHead:
    """Return a head for the conformance suite, with random weights and a draft vocabulary."""
    sizes = EagleHead.sizes(target)
    few = replace(sizes, draft_vocabulary=sizes.vocabulary * 3 // 4, own_output=own)
    head = EagleHead.random(target, 0, few)
    assert head.d2t is not None
    head.d2t += sizes.vocabulary // 8
    return head
