"""Trained heads: the base of all heads, the store of their hidden states, and the base of their drafters.

A head is made for one target, can be saved and loaded, and drafts from stored hidden states.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from paceline.common.errors import InputError, LoadError, UnsupportedError, shown
from paceline.core.contracts import Drafter, PromptTaps, Reading, RowsView, arange
from paceline.core.protocols import DraftsOnDevice, Graphable, KeepsStates, Reorderable, RunsModel
from paceline.core.tree_growth import Grower, TreeOptions
from paceline.core.verdict import NOTHING, Verdict
from paceline.drafters.heads.head_files import check_target, fingerprint, load_head, save_head
from paceline.drafters.models.draft_model import over_vocabulary
from paceline.drafters.shipped import trained_for
from paceline.models.cpu.cpu_linear import drafting
from paceline.models.language_model import LanguageModel
from paceline.models.loading.weight_check import built

H = TypeVar("H", bound="DraftHead")


# ---- the head


class DraftHead(nn.Module):
    """A network that drafts for one target. A subclass has a `kind`, a `Config`, and the method `sizes`."""

    kind: ClassVar[str]
    Config: ClassVar[Any]  # a dataclass of plain values: the content of config.json

    def __init__(self, config: Any, made_for: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.made_for = made_for  # the fingerprint of the target

    @property
    def remembers(self) -> int:
        """Return the width of the vector that is stored for every position."""
        return int(self.config.hidden)

    @classmethod
    def sizes(cls, target: LanguageModel) -> Any:
        """Return the default config for this target."""
        raise NotImplementedError

    @classmethod
    def random(cls: type[H], target: LanguageModel, seed: int = 0, config: Any = None) -> H:
        """Return a head with random weights for the target, in its dtype and on its device."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = cls(config or cls.sizes(target), fingerprint(target))
        return head.to(target.device, target.dtype)

    def save(self, folder: str | os.PathLike[str], numbers: str | None = None) -> None:
        """Write the head. numbers: the dtype on disk, float32, bfloat16 or int8. None: the dtype of the weights."""
        config = {**asdict(self.config), "target": self.made_for}
        save_head(folder, self.kind, config, self.own_weights(), numbers)

    def own_weights(self) -> dict[str, Tensor]:
        """Return the weights that do not belong to the target."""
        return dict(self.state_dict())

    @classmethod
    def load(cls: type[H], folder: str | os.PathLike[str]) -> H:
        """Return the head that was saved in a folder, in its dtype on disk, on the CPU."""
        config, tensors = load_head(folder, cls.kind)
        made_for = config.pop("target")
        dtypes = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
        try:
            # JSON has no tuples
            values = {name: tuple(value) if isinstance(value, list) else value for name, value in config.items()}
            sizes = cls.Config(**values)
            head = built(lambda: cls(sizes, made_for), tensors, folder)
            head.to(dtypes[0]).load_state_dict(tensors)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            problem = " ".join(str(error).split()).rstrip(".")
            raise LoadError(
                f"The {cls.kind} head in '{folder}' does not fit its own config.json: {problem}."
            ) from error
        return head

    def check(self, target: LanguageModel) -> None:
        """Raise `UnsupportedError` for a target that the head was not made for."""
        check_target(self.kind, self.made_for, target)
        wanted, given = getattr(self.config, "embedding", None), target.model.get_input_embeddings().embedding_dim
        if wanted not in (None, given) and getattr(self, "words", None) is None:
            raise UnsupportedError(
                f"This {self.kind} head reads embeddings of width {wanted}, but those of {target.name} have {given}; "
                "use a head trained for this target."
            )


def depths(numbers: Sequence[int], layers: int) -> tuple[float, ...]:
    """Return the relative depths of the hidden states `numbers` (0: the embeddings) in a target of `layers` layers.

    The last hidden state is refused: Paceline applies the final norm to it, other projects do not.
    """
    if len(set(numbers)) < len(numbers) or not all(0 <= number < layers for number in numbers):
        raise UnsupportedError(
            f"This head reads the hidden states {', '.join(map(str, numbers))}, which must differ and lie between 0 "
            f"and {layers - 1} in a target of {layers} layers; use a head trained for this target."
        )
    return tuple(number / layers for number in numbers)


class PlaceStore:
    """One hidden state [D] per row and position. Rejected positions are overwritten later, so a rewind does nothing."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._states = torch.zeros(0, 0, width, dtype=dtype, device=device)  # [R,T,D]
        self.storage_version: Hashable = object()  # replaced when the tensor is replaced

    def write(self, rows: slice, position: Tensor, states: Tensor, places: int) -> None:
        """Store `states` [R,Q,D] of the rows at `position` [R,Q]. All positions are below `places`."""
        self.reserve(rows.stop, places)
        states = states.to(self._states.dtype).nan_to_num()  # a NaN of a broken target would never be cleared
        self._states[rows].scatter_(1, position.unsqueeze(-1).expand_as(states), states)

    def at(self, rows: slice, position: Tensor) -> Tensor:
        """Return the states [R,Q,D] at `position` [R,Q]; zeros where none is stored, for example before the text."""
        self.reserve(rows.stop, 1)
        known = position.clamp(0, self._states.shape[1] - 1)
        states = self._states[rows].gather(1, known.unsqueeze(-1).expand(*known.shape, self._states.shape[2]))
        return states.where((known == position).unsqueeze(-1), 0)

    def states(self, rows: int, places: int) -> Tensor:
        """Return the tensor [R,T,D] of the first `rows` rows, with at least `places` positions. Kernels write to it."""
        self.reserve(rows, places)
        return self._states[:rows]

    def reserve(self, rows: int, places: int) -> None:
        """Allocate at least this number of rows and positions. The number of positions doubles if it must grow."""
        old = self._states
        if rows <= old.shape[0] and places <= old.shape[1]:
            return
        if places > old.shape[1]:
            places = max(places, min(2 * old.shape[1], places + 4096))
        self._states = old.new_zeros(max(rows, old.shape[0]), max(places, old.shape[1]), old.shape[2])
        self._states[: old.shape[0], : old.shape[1]] = old
        self.storage_version = object()

    def reorder(self, source: Sequence[int]) -> None:
        """Make row r a copy of row source[r]."""
        self.reserve(len(source), 1)
        self._states[: len(source)] = self._states[list(source)]

    def release(self, row: int, last: int) -> None:
        """Move row `last` to the index `row`. The old place of row `last` is cleared for the next row."""
        if last < self._states.shape[0]:
            self._states[row] = self._states[last]
            self._states[last] = 0


# ---- the drafter


@dataclass(frozen=True)
class HeadOptions(TreeOptions):
    """The options of the tree, and the head: a folder, a hub id, or the module (moved to the target's device and
    dtype). None: the shipped head for the target."""

    head: Any = None
    Head: ClassVar[type[DraftHead]]
    required: ClassVar[tuple[str, ...]] = ("head",)  # the drafter cannot draft without a head

    @classmethod
    def conformance_variants(cls) -> list[Mapping[str, Any]]:
        return [{"head": cls.Head.random}]


class HeadDrafter(DraftsOnDevice, RunsModel, KeepsStates, Graphable, Reorderable):
    """A drafter with a trained head.

    `places` holds the hidden states of the positions 0 ... length-2 of every row. There is none for the last committed
    token: the target has not read it yet when the head drafts.
    """

    prior_acceptance = 0.6
    needs_taps: tuple[float, ...] = (1.0,)

    def __init__(self, options: HeadOptions | None = None) -> None:
        self.options: HeadOptions = options or self.Options()
        # None: `check` loads the shipped head for the target
        self.head: Any = None if self.options.head is None else self._take(self.options.head)
        self.light: Any = self.head  # the head that drafts, set by `open`: on a CPU, its int8 copy
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
        """Return this drafter if it learns nothing from texts, else a copy with the same head."""
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
        """Store the hidden states of the last committed token (index 0 of the taps) and of the accepted path (index
        n+1 for node n). States stored past the end of a path are overwritten later."""
        self._grower.judged(verdict)
        if reading.taps:  # empty: the draft was only timed, or `observe_accepted` gets the taps
            self.note(rows, *_followed(reading.taps, verdict))

    def observe_accepted(self, rows: RowsView, taps: tuple[Tensor, ...]) -> None:
        """Store the hidden states of accepted tokens of another drafter's draft."""
        self.note(rows, taps)

    def note(self, rows: RowsView, taps: tuple[Tensor, ...], path: Tensor | None = None) -> None:
        """Store the hidden states [R,Q,D] of the last committed token and of the tokens after it. path [R,M]: the nodes
        of these tokens, if the taps are those of a tree."""
        if path is not None:
            way = torch.nn.functional.pad(path + 1, (1, 0))
            taps = tuple(tap.gather(1, way.unsqueeze(-1).expand(*way.shape, tap.shape[2])) for tap in taps)
        states = self.digest(taps)
        position = rows.length + arange(-1, states.shape[1] - 1, states.device)
        self.places.write(slice(0, rows.count), position, states, max(rows.lengths) + states.shape[1])

    def digest(self, taps: tuple[Tensor, ...]) -> Tensor:
        """Return the vector [R,Q,D'] to store for each position, from its hidden states."""
        return taps[0]

    # ---- for drafting

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the target's embeddings [R,Q,E] of tokens [R,Q]. Ids are clamped: tokens past the end of a text are
        arbitrary, and inside `staged` a token can be outside the vocabulary."""
        return self._embedding(tokens.clamp(0, self.head.made_for["vocabulary"] - 1))

    def last_state(self, rows: RowsView) -> Tensor:
        """Return [R,1,D]: the hidden state before the last committed token, or zeros if there is none."""
        return self.places.at(slice(0, rows.count), rows.length - 2)

    def shared(self, states: Tensor) -> Tensor:
        """Return logits [...,V] of states [...,D] by the target's output layer, for heads without their own."""
        if self._shared is None:  # made at the first use, because most heads have their own output layer
            self._shared = drafting(self._output)
        return self._shared(states)

    def usable(self, logits: Tensor) -> Tensor:
        """Cut or pad logits to the target's vocabulary."""
        return over_vocabulary(logits, self.vocabulary)


def _followed(taps: tuple[Tensor, ...], verdict: Verdict) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return the taps and the path, cut to the longest accepted path of the batch. On a device they are returned
    unchanged, because the cut needs a host read."""
    path = verdict.path
    if verdict.emitted.device.type != "cpu":
        return taps, path
    most = max([1, *(len(row) - row.count(NOTHING) for row in verdict.emitted.tolist())])
    if path is None:
        return tuple(tap[:, :most] for tap in taps), None
    return taps, path[:, : most - 1]
