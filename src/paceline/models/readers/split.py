"""A model read in two parts: the lower layers write a draft, the upper ones go on from where those stopped.

The lower part is the model with its first k layers alone, so what it says comes through the model's own norm and head.
Its last layer hands its hidden states over. The upper part is the model with its other layers alone; its first layer
takes the hidden states that were handed over instead of those it is given, so that no architecture needs to be known:
whatever a model does before its layers is done again (a lookup) and not looked at. Both write to one cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from paceline.common.errors import InputError, UnsupportedError
from paceline.core.contracts import Reading, RowsView, Runner, arange
from paceline.core.tree import TokenTree
from paceline.models.architecture import refuse_dropout
from paceline.models.cpu.cpu_forward import Part
from paceline.models.language_model import LanguageModel, SlotReader
from paceline.models.module_views import layers_of, with_layers
from paceline.models.probe import ProbeText
from paceline.models.readers.drafting_ahead import AheadReader
from paceline.models.runners.eager import EagerRunner

Head = Callable[[Tensor], Tensor]  # hidden states [R,Q,D] -> logits [R,Q,V]


class _Handover:
    """The hidden states on their way from one part to the other."""

    hidden: Tensor | None = None

    def take(self) -> Tensor:
        hidden, self.hidden = self.hidden, None
        if hidden is None:
            raise UnsupportedError("The model did not run the layers it was asked to, so it cannot be cut into parts.")
        return hidden


class _Edge(nn.Module):
    """A layer at the edge of a part; it looks like the layer it holds."""

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
    """The last layer of the lower part: what it says is also handed over."""

    def forward(self, *args: Any, **named: Any) -> Any:
        said = self.layer(*args, **named)
        self.handover.hidden = said[0] if isinstance(said, tuple) else said
        return said


class _Entry(_Edge):
    """The first layer of the upper part: it goes on from what was handed over."""

    def forward(self, hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        given = self.handover.take()
        assert given.shape == hidden_states.shape
        return self.layer(given.to(hidden_states.device), *args, **named)


class _TrainedHead(nn.Module):
    """Stands where the output head was: a head of the exit's own, on what the last layer said before any norm."""

    def __init__(self, head: Head, handover: _Handover) -> None:
        super().__init__()
        self.head, self.handover = head, handover

    def forward(self, normed: Tensor) -> Tensor:
        assert self.handover.hidden is not None
        return self.head(self.handover.hidden[:, -normed.shape[1] :])


class Split:
    """The two parts of a model. `silent` is the lower one without its output head, where nobody asks what it says."""

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
    """A model can be left after any of its layers but the last."""
    if not 0 < depth < lm.layers:
        raise InputError(
            f"{lm.name} has {lm.layers} layers and cannot be left after {depth}; use 1 to {lm.layers - 1}."
        )


class SplitReader(AheadReader):
    """A reader whose lower part can run ahead; `extend` then goes on from there, and reads only what is new.

    `lower` reads scratch tokens in the order in which a draft grows; `hand_over` says which nodes of the tree they
    became. An `extend` over that very tree continues it, any other reads all layers as ever.
    """

    def __init__(self, lm: LanguageModel, depth: int, head: Head | None = None, runner: Runner | None = None) -> None:
        refuse_dropout(lm.model)
        super().__init__(lm, (), runner or EagerRunner())
        self._split = Split(lm, depth, head)
        self._ahead: list[Tensor] = []  # hidden states [R,Q,D] that were handed over: of the text, then of scratch
        self._plan: tuple[TokenTree, Tensor | None, bool] | None = None

    # ---- the lower part runs ahead

    def lower(self, rows: RowsView, tokens: Tensor | None, parents: Tensor | None) -> Tensor:
        """Logits of the exit after the text (tokens=None: a new draft begins), then after scratch tokens [R,W]."""
        if tokens is None:
            self._forget()
        return self._below(self._split.lower, rows, self.due(rows) if tokens is None else 0, tokens, parents).logits

    def hand_over(self, tree: TokenTree, slots: Tensor | None, pruned: bool) -> None:
        """The draft is ready. `slots` [R,N]: the number of each node among the scratch tokens that `lower` read, -1 for
        none (None: a chain, of which the first ones were read). `pruned`: not all that was read may be in the tree."""
        self._plan = (tree, slots, pruned)

    def _below(self, part: Any, rows: RowsView, width: int, tokens: Tensor | None, parents: Tensor | None) -> Reading:
        reading = self._through(part, rows, width, tokens, parents)
        if self._kernels is None:
            self._ahead.append(self._split.handover.take())
            return reading
        self._ahead.append(self._said.clone())
        if part is self._split.silent or self._split.head is None:
            return reading
        return Reading(self._split.head(self._ahead[-1][:, -reading.logits.shape[1] :]))

    def _through(self, part: Any, rows: RowsView, width: int, tokens: Tensor | None, parents: Tensor | None) -> Reading:
        self._model, self._part = part, self._kernel_part(part)
        try:
            return super().extend(rows, width, tokens, parents)
        finally:
            self._model, self._part = self.lm.model, None

    def _kernel_part(self, part: Any) -> Part | None:
        if self._kernels is None:
            return None
        split = self._split
        if part is split.upper:
            return Part(split.depth, self.lm.layers, split.handover.take())
        return Part(0, split.depth, head=part is split.lower and split.head is None)

    def _forget(self) -> None:
        """What the lower part read ahead counts no longer; its slots are written again."""
        if self._ahead:
            self._scratch, self._parents = 0, None
        self._ahead, self._plan = [], None

    # ---- the upper part goes on

    def extend(
        self, rows: RowsView, width: int, tokens: Tensor | None = None, parents: Tensor | None = None
    ) -> Reading:
        """See `SlotReader.extend`. The draft that was handed over is told by its tensors: nothing is compared."""
        plan = self._plan
        if plan and plan[0].tokens is tokens and plan[0].parents is parents and 0 < width <= self._ahead[0].shape[1]:
            hidden = self._rest(rows, *plan)
            text = self._ahead[0][:, -width:]
            self._forget()
            self._split.handover.hidden = torch.cat([text, hidden], 1)
            reading = self._through(self._split.upper, rows, width, tokens, parents)
        else:
            self._forget()
            reading = super().extend(rows, width, tokens, parents)
        self._hold(rows)
        return reading

    def _rest(self, rows: RowsView, tree: TokenTree, slots: Tensor | None, pruned: bool) -> Tensor:
        """Hidden states [R,N,D] of all nodes: the lower part reads those it has not seen, and its keys and values move
        from the order in which they were read to the order of the tree."""
        read = self._scratch
        if slots is None:
            self._below(self._split.silent, rows, 0, tree.tokens[:, read:], None)
            return torch.cat(self._ahead[1:], 1)
        assert tree.parents is not None
        # where read nodes were pruned away, rows differ in how many are unread: a host read, but only then
        unread = int((slots < 0).sum(1).max()) if pruned else tree.nodes - read
        if unread:
            nodes = (slots >= 0).to(torch.int8).argsort(dim=1, stable=True)[:, :unread]
            above = torch.nn.functional.pad(slots, (1, 0), value=-1).gather(1, tree.parents.gather(1, nodes) + 1)
            self._below(self._split.silent, rows, 0, tree.tokens.gather(1, nodes), above)
            slots = slots.scatter(1, nodes, arange(read, read + unread, nodes.device).expand_as(nodes))
        self.cache.move(rows.length, slots, arange(0, tree.nodes, slots.device), self._split.depth)
        hidden = torch.cat(self._ahead[1:], 1)
        return hidden.gather(1, slots.unsqueeze(-1).expand(*slots.shape, hidden.shape[-1]))


# ---- tried out, not believed

_SPLIT: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()  # models that passed, and where they were cut


@torch.inference_mode()
def check_split(lm: LanguageModel, depth: int) -> None:
    """Read a chain and a tree in two parts and whole, once per model; refuse the model where the logits differ."""
    check_depth(lm, depth)
    if depth in _SPLIT.setdefault(lm.model, set()):
        return
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, lm.vocabulary, (2, 24), generator=generator).to(lm.device)
    rows: Any = ProbeText(ids, [9, 8])
    drafted = torch.randint(0, lm.vocabulary, (2, 5), generator=generator).to(lm.device)
    branches = torch.tensor([[-1, -1, 0, 1, 2]] * 2, device=lm.device)
    for parents in (None, branches):
        whole, parted = SlotReader(lm, (), EagerRunner()), SplitReader(lm, depth)
        for reader in (whole, parted):
            reader.begin(rows, 0, 32)
        wanted = whole.extend(rows, 1, drafted, parents).logits.float()
        try:
            got = _in_parts(parted, rows, drafted, parents).float()
        except Exception as error:
            raise UnsupportedError(
                f"{_title(lm)} cannot be cut after layer {depth} ({type(error).__name__}: {error}); "
                "use another drafter."
            ) from error
        slack = 1e-3 if lm.dtype in (torch.float32, torch.float64) else 0.1
        if not torch.allclose(got, wanted, atol=slack * float(wanted.std() + 1e-6), rtol=slack):
            raise UnsupportedError(
                f"{_title(lm)} reads a draft differently when it is cut after layer {depth}; use another drafter."
            )
    _SPLIT[lm.model].add(depth)


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


def _title(lm: LanguageModel) -> str:
    return f"{type(lm.model).__name__} ({lm.architecture.name})"
