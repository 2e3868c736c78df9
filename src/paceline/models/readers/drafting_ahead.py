"""Readers of a target in whose KV cache a cheaper model can run ahead and draft: a twin, or its own lower layers.

A split model is read in two parts. The lower part is the model with its first layers only, so its logits come through
the model's own norm and output layer. Its last layer hands its hidden states over. The upper part is the model with its
other layers only; its first layer takes the hidden states that were handed over instead of its input. So no
architecture needs special code: what a model does before its layers (a lookup) runs again without effect. Both parts
write to one KV cache.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.common.errors import InputError, UnsupportedError
from paceline.core.contracts import Reading, RowsView, arange
from paceline.core.per_row import ReadCursor
from paceline.core.tree import TokenTree
from paceline.models.architecture import refuse_dropout
from paceline.models.cpu.cpu_forward import LayerRange
from paceline.models.language_model import LanguageModel
from paceline.models.module_views import layers_of, with_layers
from paceline.models.probe import ProbeText, nearly_equal
from paceline.models.reader import SlotReader


class AheadReader(SlotReader):
    """A reader that knows how much of each sequence its KV cache holds, so that a draft can continue from there."""

    capturable = False  # the host counts the tokens in the KV cache

    def __init__(self, lm: LanguageModel) -> None:
        refuse_dropout(lm.model)
        super().__init__(lm)
        self._held = ReadCursor()

    # ---- rows come and go

    def begin(self, rows: RowsView, first: int, room: int, prefilled: bool = False) -> int:
        self._discard_ahead()
        self._held.settle(rows.lengths[:first])
        rest = super().begin(rows, first, room, prefilled)
        self._held[first:] = [length - rest for length in rows.lengths[first:]]
        return rest

    def release(self, row: int, last: int, length: int) -> None:
        super().release(row, last, length)
        self._held.release(row, last)

    def keep(self, rows: RowsView, path: Tensor | None) -> None:
        super().keep(rows, path)
        self._held.replayed(1)  # all of the sequence but its last token is in the KV cache

    def reorder(self, rows: RowsView, source: Sequence[int]) -> None:
        super().reorder(rows, source)
        self._held.reorder(source)

    def rewind(self, lengths: list[int]) -> None:
        """Follow sequences that were cut back to these lengths."""
        self._held.rewind(lengths)

    def _hold(self, rows: RowsView) -> None:
        """Note that a pass has read the whole sequences."""
        self._held.settle(rows.lengths)
        self._held[:] = rows.lengths

    # ---- running ahead

    def due(self, rows: RowsView) -> int:
        """Return how many committed tokens a draft has to read first."""
        self._held.settle(rows.lengths)
        return max(length - held for length, held in zip(rows.lengths, self._held, strict=True))

    def ready(self, rows: RowsView) -> bool:
        """Return whether a draft can continue: no row may be shorter than the tokens that others must read."""
        return self.due(rows) <= min(rows.lengths)

    @abstractmethod
    def lower(self, rows: RowsView, tokens: Tensor | None, parents: Tensor | None) -> Tensor:
        """The draft's logits after the sequence (tokens=None: a new draft begins), then after scratch tokens [R,W]."""

    @abstractmethod
    def hand_over(self, tree: TokenTree, slots: Tensor | None, pruned: bool) -> None:
        """Take the finished draft; see `SplitReader.hand_over`."""

    @abstractmethod
    def _discard_ahead(self) -> None:
        """Discard what was read ahead; later passes overwrite its slots."""


class TwinReader(AheadReader):
    """A model and a twin of it (the same layers with quantized weights) that share one KV cache.

    The twin drafts with the keys and values of the model itself, so it reads no prompt and has no KV cache of its own.
    What it writes for drafted tokens, the model overwrites when it reads them.
    """

    def __init__(self, lm: LanguageModel, twin: LanguageModel) -> None:
        super().__init__(lm)
        self._twin = twin.reader()
        self._twin.cache = self.cache

    def lower(self, rows: RowsView, tokens: Tensor | None, parents: Tensor | None) -> Tensor:
        if tokens is None:
            self._discard_ahead()
        self._twin.max_token_id = self.max_token_id
        return self._twin.extend(rows, self.due(rows) if tokens is None else 0, tokens, parents).logits

    def ready(self, rows: RowsView) -> bool:
        """Return whether the twin overwrites only the last token, which the model reads next. Earlier entries of the KV
        cache must stay the model's own."""
        return self.due(rows) == 1

    def hand_over(self, tree: TokenTree, slots: Tensor | None, pruned: bool) -> None:
        """Do nothing: the model reads the whole draft."""

    def extend(
        self, rows: RowsView, width: int, tokens: Tensor | None = None, parents: Tensor | None = None
    ) -> Reading:
        self._discard_ahead()
        reading = super().extend(rows, width, tokens, parents)
        self._hold(rows)
        return reading

    def _discard_ahead(self) -> None:
        self._twin.forget()


Head = Callable[[Tensor], Tensor]  # hidden states [R,Q,D] -> logits [R,Q,V]


# ---- a model that is read in two parts


class _Handover:
    """Passes hidden states from the lower part to the upper one."""

    hidden: Tensor | None = None

    def take(self) -> Tensor:
        hidden, self.hidden = self.hidden, None
        if hidden is None:
            raise UnsupportedError("The model did not run the layers it was asked to, so it cannot be cut into parts.")
        return hidden


class _Edge(nn.Module):
    """A layer at the edge of a part. It has the attributes of the layer that it holds."""

    def __init__(self, layer: nn.Module, handover: _Handover) -> None:
        super().__init__()
        self.layer = layer
        self.handover = handover

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


class _Exit(_Edge):
    """The last layer of the lower part. It also hands its output over."""

    def forward(self, *args: Any, **named: Any) -> Any:
        output = self.layer(*args, **named)
        self.handover.hidden = output[0] if isinstance(output, tuple) else output
        return output


class _Entry(_Edge):
    """The first layer of the upper part. It continues from the hidden states of the lower part."""

    def forward(self, hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        given = self.handover.take()
        assert given.shape == hidden_states.shape
        return self.layer(given.to(hidden_states.device), *args, **named)


class _TrainedHead(nn.Module):
    """The exit's own output layer, in place of the model's. It reads the output of the last layer before any norm."""

    def __init__(self, head: Head, handover: _Handover) -> None:
        super().__init__()
        self.head, self.handover = head, handover

    def forward(self, normed: Tensor) -> Tensor:
        assert self.handover.hidden is not None
        return self.head(self.handover.hidden[:, -normed.shape[1] :])


class Split:
    """The two parts of a model. `silent` is the lower one without its output layer, for passes that need no logits."""

    def __init__(self, lm: LanguageModel, depth: int, head: Head | None = None) -> None:
        check_depth(lm, depth)
        self.depth, self.head, self.handover = depth, head, _Handover()
        layers, kinds = layers_of(lm), lm.architecture.kinds
        below = [*layers[: depth - 1], _Exit(layers[depth - 1], self.handover)]
        trained = None if head is None else _TrainedHead(head, self.handover)
        self.lower = with_layers(lm, below, kinds[:depth], trained)
        self.silent = with_layers(lm, below, kinds[:depth], nn.Identity())
        above = [_Entry(layers[depth], self.handover), *layers[depth + 1 :]]
        self.upper = with_layers(lm, above, kinds[depth:], None)


def check_depth(lm: LanguageModel, depth: int) -> None:
    """Refuse a depth that leaves no layers for one of the parts."""
    if not 0 < depth < lm.layers:
        raise InputError(
            f"{lm.name} has {lm.layers} layers and cannot be left after {depth}; use 1 to {lm.layers - 1}."
        )


class SplitReader(AheadReader):
    """A reader whose lower part can run ahead. `extend` then continues from there, and reads only new tokens.

    `lower` reads scratch tokens in the order in which a draft grows; `hand_over` gives their nodes in the tree. An
    `extend` over that tree continues from the lower part, any other `extend` reads through all layers.
    """

    def __init__(self, lm: LanguageModel, depth: int, head: Head | None = None) -> None:
        super().__init__(lm)
        self._split = Split(lm, depth, head)
        self._ahead: list[Tensor] = []  # hidden states [R,Q,D] that were handed over: of the sequence, then of scratch
        self._draft: tuple[TokenTree, Tensor | None, bool] | None = None

    # ---- the lower part runs ahead

    def lower(self, rows: RowsView, tokens: Tensor | None, parents: Tensor | None) -> Tensor:
        """Logits of the exit after the sequence (tokens=None: a new draft begins), then after scratch tokens [R,W]."""
        if tokens is None:
            self._discard_ahead()
        return self._below(rows, self.due(rows) if tokens is None else 0, tokens, parents).logits

    def hand_over(self, tree: TokenTree, slots: Tensor | None, pruned: bool) -> None:
        """Take the finished draft. slots [R,N]: the number of each node among the scratch tokens that `lower` read; -1:
        not read (None: a chain, of which the first nodes were read). pruned: read tokens may not be in the tree."""
        self._draft = (tree, slots, pruned)

    def _below(
        self, rows: RowsView, width: int, tokens: Tensor | None, parents: Tensor | None, logits: bool = True
    ) -> Reading:
        """Read with the lower part, and store its hidden states."""
        split, by_kernels = self._split, self.kernels is not None
        apply_head = by_kernels and logits and split.head is not None  # `split.lower` applies it by itself
        layers = LayerRange(0, split.depth, None, logits and not apply_head, split.lower if logits else split.silent)
        reading, hidden = self._executor(self.cache, self._plan(rows, width, tokens, parents), layers)
        self._ahead.append(split.handover.take() if hidden is None else hidden.clone())
        if not apply_head:
            return reading
        assert split.head is not None
        return Reading(split.head(self._ahead[-1][:, -reading.logits.shape[1] :]))

    def _discard_ahead(self) -> None:
        if self._ahead:
            self.forget()
        self._ahead, self._draft = [], None

    # ---- the upper part continues

    def extend(
        self, rows: RowsView, width: int, tokens: Tensor | None = None, parents: Tensor | None = None
    ) -> Reading:
        """See `core.contracts.Reader`. The finished draft is recognised by its tensor objects, without a host read."""
        draft = self._draft
        if draft and draft[0].tokens is tokens and draft[0].parents is parents and 0 < width <= self._ahead[0].shape[1]:
            nodes = self._hidden_of(rows, *draft)
            hidden = torch.cat([self._ahead[0][:, -width:], nodes], 1)
            self._discard_ahead()
            if self.kernels is None:
                self._split.handover.hidden = hidden
            layers = LayerRange(self._split.depth, self.lm.layers, hidden, module=self._split.upper)
            reading, _ = self._executor(self.cache, self._plan(rows, width, tokens, parents), layers)
        else:
            self._discard_ahead()
            reading = super().extend(rows, width, tokens, parents)
        self._hold(rows)
        return reading

    def _hidden_of(self, rows: RowsView, tree: TokenTree, slots: Tensor | None, pruned: bool) -> Tensor:
        """Hidden states [R,N,D] of all nodes. The lower part reads the nodes that it has not seen, and its keys and
        values move from the order in which they were read to the order of the tree."""
        read = self._scratch
        if slots is None:
            self._below(rows, 0, tree.tokens[:, read:], None, logits=False)
            return torch.cat(self._ahead[1:], 1)
        assert tree.parents is not None
        # if read nodes were pruned, rows differ in how many are unread: only then a host read is needed
        unread = int((slots < 0).sum(1).max()) if pruned else tree.nodes - read
        if unread:
            nodes = (slots >= 0).to(torch.int8).argsort(dim=1, stable=True)[:, :unread]
            above = torch.nn.functional.pad(slots, (1, 0), value=-1).gather(1, tree.parents.gather(1, nodes) + 1)
            self._below(rows, 0, tree.tokens.gather(1, nodes), above, logits=False)
            slots = slots.scatter(1, nodes, arange(read, read + unread, nodes.device).expand_as(nodes))
        self.cache.move(rows.length, slots, arange(0, tree.nodes, slots.device), self._split.depth)
        hidden = torch.cat(self._ahead[1:], 1)
        return hidden.gather(1, slots.unsqueeze(-1).expand(*slots.shape, hidden.shape[-1]))


@torch.inference_mode()
def check_split(lm: LanguageModel, depth: int) -> None:
    """Read a chain and a tree in two parts and whole, once per model. Refuse the model if the logits differ."""
    check_depth(lm, depth)
    if depth in lm.record.split_depths:
        return
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, lm.vocabulary, (2, 24), generator=generator).to(lm.device)
    rows: Any = ProbeText(ids, [9, 8])
    drafted = torch.randint(0, lm.vocabulary, (2, 5), generator=generator).to(lm.device)
    branches = torch.tensor([[-1, -1, 0, 1, 2]] * 2, device=lm.device)
    for parents in (None, branches):
        whole, parted = SlotReader(lm), SplitReader(lm, depth)
        for reader in (whole, parted):
            reader.begin(rows, 0, 32)
        wanted = whole.extend(rows, 1, drafted, parents).logits.float()
        try:
            got = _in_parts(parted, rows, drafted, parents).float()
        except Exception as error:
            raise UnsupportedError(
                f"{lm.title} cannot be cut after layer {depth} ({type(error).__name__}: {error}); use another drafter."
            ) from error
        if not nearly_equal(lm, got, wanted):
            raise UnsupportedError(
                f"{lm.title} reads a draft differently when it is cut after layer {depth}; use another drafter."
            )
    lm.record.split_depths.add(depth)


def _in_parts(reader: SplitReader, rows: Any, drafted: Tensor, parents: Tensor | None) -> Tensor:
    reader.lower(rows, None, None)
    tree = TokenTree(drafted, parents)
    if parents is None:
        reader.lower(rows, drafted[:, :1], None)
        reader.hand_over(tree, None, False)
    else:  # node 1, then 0, then 2 below 0
        reader.lower(rows, drafted[:, [1, 0]], torch.full_like(drafted[:, :2], -1))
        reader.lower(rows, drafted[:, 2:3], torch.ones_like(drafted[:, :1]))
        reader.hand_over(tree, torch.tensor([[1, 0, 2, -1, -1]] * 2, device=drafted.device), False)
    return reader.extend(rows, 1, tree.tokens, tree.parents).logits
