"""Base of drafters with trained heads: where the head comes from, and the hidden states that it drafts from."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.common.errors import InputError, shown
from paceline.core.contracts import Drafter, PromptTaps, Reading, RowsView, arange
from paceline.core.protocols import DraftsOnDevice, Graphable, KeepsStates, Reorderable, RunsModel
from paceline.core.tree_growth import Grower, TreeOptions
from paceline.core.verdict import NOTHING, Verdict
from paceline.drafters.heads.head_modules import DraftHead, PlaceStore
from paceline.drafters.models.draft_model import over_vocabulary
from paceline.drafters.shipped import trained_for
from paceline.models.cpu.cpu_linear import drafting
from paceline.models.language_model import LanguageModel


@dataclass(frozen=True)
class HeadOptions(TreeOptions):
    """The tree, and the head: a folder or hub id, or the module itself (moved to the target's device and dtype). None:
    the shipped head for the target."""

    head: Any = None
    Head: ClassVar[type[DraftHead]]
    required: ClassVar[tuple[str, ...]] = ("head",)  # there is no drafting without a head

    @classmethod
    def conformance_variants(cls) -> list[Mapping[str, Any]]:
        return [{"head": cls.Head.random}]


class HeadDrafter(DraftsOnDevice, RunsModel, KeepsStates, Graphable, Reorderable):
    """A drafter with a trained head.

    `places` holds the hidden states of positions 0 ... length-2 of every row. The target has not read the last
    committed token when a draft is made.
    """

    prior_acceptance = 0.6
    needs_taps: tuple[float, ...] = (1.0,)

    def __init__(self, options: HeadOptions | None = None) -> None:
        self.options: HeadOptions = options or self.Options()
        # None: the shipped head, once the target is known (`check`)
        self.head: Any = None if self.options.head is None else self._take(self.options.head)
        self.light: Any = self.head  # the head as it drafts, after `open`: on a CPU in int8
        self._grower = Grower(self.options)

    def _take(self, given: Any) -> DraftHead:
        Head = self.options.Head
        if isinstance(given, Head):
            return given
        if isinstance(given, (str, os.PathLike)):
            from paceline.drafters.resolve import read_head  # it imports all heads

            return read_head(given, Head)
        raise InputError(
            f"{self.name} needs a trained head: options={{'head': a folder, or a {Head.__name__}}}, got {shown(given)}."
        )

    def describe(self) -> str:
        return self.name if self.options.tree == "chain" else f"{self.name}, tree {self.options.tree}"

    def reset_copy(self) -> Drafter:
        """Itself, if it learns nothing from a text."""
        learns = self.options.tree == "optimal"
        return type(self)(replace(self.options, head=self.head)) if learns else self

    # ---- rows come and go

    def check(self, target: LanguageModel) -> None:
        if self.head is None:
            self.head = self._take(str(trained_for(target, self.name)))
        self.head.check(target)

    def open(self, target: LanguageModel, rows: RowsView) -> None:
        with torch.inference_mode(False):  # weights that are moved here must remain trainable
            self.head.to(target.device, target.dtype)
        self.light = drafting(self.head)
        self._output: Any = target.model.get_output_embeddings()
        self._shared: Any = None
        self.vocabulary = target.vocabulary
        self._embedding = target.model.get_input_embeddings()
        self.places = PlaceStore(self.head.remembers, target.dtype, target.device)

    def admit(self, rows: RowsView, first: int) -> None:
        self.places.reserve(rows.capacity, rows.room)

    def release(self, row: int, last: int, length: int) -> None:
        self.places.release(row, last)

    def graphable(self, longest: int) -> bool:
        return self.options.tree != "optimal"

    @property
    def storage_version(self) -> Hashable:
        return self.places.storage_version

    def reorder(self, rows: RowsView, source: Sequence[int]) -> bool:
        self.places.reorder(source)
        self._grower.reorder(source)
        return True

    def observe_prompt(self, rows: RowsView, taps_piece: PromptTaps) -> None:
        states = self.digest(taps_piece.taps)
        R, Q, _ = states.shape
        position = arange(taps_piece.start, taps_piece.start + Q, states.device).expand(R, Q)
        self.places.write(slice(taps_piece.first, taps_piece.first + R), position, states, max(rows.lengths))

    def states_of(self, row: int, length: int) -> Tensor:
        return self.places.states(row + 1, length)[row : row + 1, :length].clone()

    def restore_states(self, rows: RowsView, row: int, states: Tensor) -> None:
        position = arange(0, states.shape[1], states.device).unsqueeze(0)
        self.places.write(slice(row, row + 1), position, states, max(rows.lengths))

    def keep(self, rows: RowsView, verdict: Verdict, reading: Reading) -> None:
        """Take the hidden states of the last committed token (position 0) and of the accepted path (node n is position
        n+1). States written past that path are overwritten later."""
        self._grower.judged(verdict)
        if reading.taps:  # none: the draft was made to time it, or the taps follow in `observe_accepted`
            self.note(rows, *_followed(reading.taps, verdict))

    def observe_accepted(self, rows: RowsView, taps: tuple[Tensor, ...]) -> None:
        """The same states in the order of the text, where another drafter made the draft."""
        self.note(rows, taps)

    def note(self, rows: RowsView, taps: tuple[Tensor, ...], path: Tensor | None = None) -> None:
        """Store the hidden states [R,Q,D] of the last committed token and of those that follow. path [R,M]: the nodes
        of a tree that follow."""
        if path is not None:
            way = torch.nn.functional.pad(path + 1, (1, 0))
            taps = tuple(tap.gather(1, way.unsqueeze(-1).expand(*way.shape, tap.shape[2])) for tap in taps)
        states = self.digest(taps)
        position = rows.length + arange(-1, states.shape[1] - 1, states.device)
        self.places.write(slice(0, rows.count), position, states, max(rows.lengths) + states.shape[1])

    def digest(self, taps: tuple[Tensor, ...]) -> Tensor:
        """The vector to store for the hidden states [R,Q,D] of a position."""
        return taps[0]

    # ---- for drafting

    def embed(self, tokens: Tensor) -> Tensor:
        """[R,Q] -> [R,Q,E] with the target's embedding. Tokens past the end of a text are arbitrary, and a draft model
        inside `staged` may not know a token."""
        return self._embedding(tokens.clamp(0, self.head.made_for["vocabulary"] - 1))

    def last_state(self, rows: RowsView) -> Tensor:
        """[R,1,D]: the hidden state before the last committed token; zeros if there is none."""
        return self.places.at(slice(0, rows.count), rows.length - 2)

    def shared(self, states: Tensor) -> Tensor:
        """[...,D] -> [...,V] with the target's output layer, for heads without their own."""
        if self._shared is None:  # made at the first use: most heads have their own
            self._shared = drafting(self._output)
        logits: Tensor = self._shared(states)
        return logits

    def usable(self, logits: Tensor) -> Tensor:
        """Cut or pad logits to the target's vocabulary."""
        return over_vocabulary(logits, self.vocabulary)


def _followed(taps: tuple[Tensor, ...], verdict: Verdict) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Cut the taps and the path to the longest accepted path, if that costs no wait for a device. Most of a draft may
    have been rejected."""
    path = verdict.path
    if verdict.emitted.device.type != "cpu":
        return taps, path
    most = max([1, *(len(row) - row.count(NOTHING) for row in verdict.emitted.tolist())])
    if path is None:
        return tuple(tap[:, :most] for tap in taps), None
    return taps, path[:, : most - 1]
