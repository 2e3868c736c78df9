"""The optional protocols of drafters. Other code tests `isinstance(drafter, Protocol)`, and never the drafter's name.

A drafter inherits the protocols that it needs instead of `Drafter`. The functions below also accept other drafters.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from paceline.core.contracts import Drafter, PromptTaps, Reader, RowsView, Rule


class DraftsNothing(Drafter):
    """Never drafts: plain decoding. It holds no state, so any number of batches can share it."""


class DraftsOnDevice(Drafter):
    """Makes no host read in `propose`. Its trees are valid by construction, so the loop does not check them."""


class RunsModel(Drafter):
    """Runs a model, so a draft costs time on the device."""

    prior_acceptance: float | None = None  # assumed acceptance rate before it is measured; None: no model runs


class NeedsHiddenStates(Drafter):
    """Reads hidden states of the target. `keep` gets the hidden states of the drafted tokens in its `Reading`."""

    needs_taps: tuple[float, ...] = ()  # relative depths of the hidden states

    @abstractmethod
    def observe_prompt(self, rows: RowsView, taps_piece: PromptTaps) -> None:
        """Take the hidden states of one piece of the prompts. The loop calls this before `admit`."""

    def observe_accepted(self, rows: RowsView, taps: tuple[Tensor, ...]) -> None:
        """Take the hidden states [R,1+M,D] of the last committed token and of the accepted tokens after it.

        A group calls this if the target read the tree of another drafter; the `Reading` of `keep` then has no hidden
        states. Values past the accepted tokens of a row are arbitrary. The rows commit the tokens next.
        """


class KeepsStates(NeedsHiddenStates):
    """Stores states by position, computed from hidden states, so that the target need not read a known prefix again."""

    @abstractmethod
    def states_of(self, row: int, length: int) -> Any:
        """Return a copy of the states of the first `length` positions of a row: a tensor [1,length,D], or a dict of
        such tensors. None: there are no states."""

    @abstractmethod
    def restore_states(self, rows: RowsView, row: int, states: Any) -> None:
        """Store these states for a new row. The loop calls this before `observe_prompt`."""


class CatchesUp(Drafter):
    """Can read the prompts of new rows in pieces, between later rounds. It drafts nothing for a row before it has read
    all of its text."""

    @property
    def catches_up(self) -> bool:
        """Return whether it can do that for this batch."""
        return True

    @abstractmethod
    def admit_unread(self, rows: RowsView, first: int) -> None:
        """Begin the rows from `first` on as `admit` does, and read nothing of their texts."""

    @abstractmethod
    def catch_up(self, rows: RowsView, row: int, stop: int) -> None:
        """Read the text of a row that `admit_unread` began, from where the last call ended up to the position `stop`.
        After a call with the position of its last token, which the next draft reads, the row is as after `admit`."""


class BuiltFromTarget(Drafter):
    """Runs layers of the target, or layers like them. Its drafts depend on the architecture of the target."""


class SharesReader(Drafter):
    """Drafts through a reader of the target that the loop uses too, such as one that stops after some layers."""

    @abstractmethod
    def reader(self, target: Any) -> Reader | None:
        """Return the shared reader, or None if this target needs none. The loop calls this once, after `open`."""


class Graphable(Drafter):
    """Can draft inside a CUDA graph.

    Inside a graph, `rows.bound` is set, and `propose` and `keep` read nothing on the host. What they keep from one
    round to the next is in tensors that stay at their addresses.
    """

    graph_key: int = 0  # part of the key of the graph: another number selects another graph

    @abstractmethod
    def graphable(self, longest: int) -> bool:
        """Return whether it can draft inside a graph for sequences of up to `longest` tokens."""

    @property
    def storage_version(self) -> Hashable:
        """Return a value that changes when the tensors are replaced. Graphs that use them are then captured again."""
        return 0

    def on_replay(self) -> None:
        """Note that a graph replayed one round, without a call of `propose` and `keep`."""


class Adaptive(Drafter):
    """Decides what to draft by measured times. So its drafts differ from machine to machine."""

    reasons: Sequence[str] = ()  # per row: why the last draft has its length and its source (for the trace)
    model_seconds: float = 0.0  # expected time of the models that ran for the last draft
    failures: int = 0  # how often a drafter inside it failed

    def on_round_read(self, tokens: Sequence[int], away: float) -> None:
        """Take the result of a round that the host has read: the number of emitted tokens per row. The next round may
        already run. `away` is the time in seconds that the caller used since the round before."""


class ChoosesLength(Adaptive):
    """Chooses the length of the draft itself. Then γ is only a limit."""

    depth: int | None = None  # the limit if the caller gives no γ


class Replayable(Drafter):
    """Can draft again for a recorded text, without the target (`bench.replay`)."""

    @classmethod
    def replay_needs(cls, options: Any) -> str | None:
        """Return the inputs that it needs besides tokens and the prediction, as a short phrase. None: no others."""
        return None


class HoldsDrafters(Drafter):
    """Calls other drafters. Its constructor takes `(options, device)` and loads their models to that device."""

    @abstractmethod
    def inside(self) -> Sequence[Drafter]:
        """Return the drafters that it calls."""


class Reorderable(Drafter):
    """Can reorder its state when rows change places, as in beam search."""

    def reorder(self, rows: RowsView, source: Sequence[int]) -> bool:
        """Make the state of row r a copy of that of row source[r], with the last draft. `rows` are still in the old
        order. Return False if that is impossible: the loop then calls `restart` after the commit, and not `keep`."""
        return True

    def restart(self, rows: RowsView, count: int) -> None:
        """Rebuild the state from the sequences of all rows. The first `count` rows changed places and did not end, so
        the drafter must not learn from them as ended texts."""
        restart_rows(self, rows, count)


class Rewindable(Drafter):
    """Keeps state by position, and can discard the last positions."""

    @abstractmethod
    def rewind(self, lengths: list[int]) -> None:
        """Cut the state to these lengths of the sequences. Only a drafter that calls this one does that."""


class Resolvable(Drafter):
    """Can replace itself by another drafter that suits the target."""

    @abstractmethod
    def resolve_for(self, target: Any, rule: Rule) -> Drafter:
        """Return the drafter for this target and rule. The decoder calls this after `check`."""


class TakesPrediction(Drafter):
    """Drafts from the output that the caller expects (`rows.predictions`)."""

    takes_prediction: bool = True
    needs_prediction: bool = False  # without a prediction it drafts nothing


class FollowsConstraint(Drafter):
    """Drafts only for rows with a constraint (`rows.cursors`)."""


class FillsNodes(Drafter):
    """Grows its trees to the largest size permitted, if `uses_all_nodes`."""

    uses_all_nodes: bool = False


# ---- The properties of a drafter, with or without the protocol


def speculates(drafter: Drafter) -> bool:
    return not isinstance(drafter, DraftsNothing)


def chooses_length(drafter: Drafter) -> bool:
    return isinstance(drafter, ChoosesLength)


def taps_of(drafter: Drafter) -> tuple[float, ...]:
    return drafter.needs_taps if isinstance(drafter, NeedsHiddenStates) else ()


def prior_acceptance(drafter: Drafter) -> float | None:
    return drafter.prior_acceptance if isinstance(drafter, RunsModel) else None


def catches_up(drafter: Drafter) -> bool:
    return isinstance(drafter, CatchesUp) and drafter.catches_up


def takes_prediction(drafter: Drafter) -> bool:
    return isinstance(drafter, TakesPrediction) and drafter.takes_prediction


def can_draft(drafter: Drafter, rows: RowsView) -> bool:
    """Return whether the drafter can draft for at least one row. It may need a prediction or a constraint."""
    if isinstance(drafter, FollowsConstraint):
        return any(cursor is not None for cursor in rows.cursors)
    needs = isinstance(drafter, TakesPrediction) and drafter.needs_prediction
    return not needs or any(prediction is not None for prediction in rows.predictions)


def uses_all_nodes(drafter: Drafter) -> bool:
    return isinstance(drafter, FillsNodes) and drafter.uses_all_nodes


def reads_verdicts(drafter: Drafter) -> bool:
    """Return whether the drafter overrides `keep`."""
    return type(drafter).keep is not Drafter.keep


def graphable(drafter: Drafter, longest: int) -> bool:
    return isinstance(drafter, Graphable) and drafter.graphable(longest)


def storage_version(drafter: Drafter) -> Hashable:
    return drafter.storage_version if isinstance(drafter, Graphable) else 0


def on_replay(drafter: Drafter) -> None:
    if isinstance(drafter, Graphable):
        drafter.on_replay()


def reorder(drafter: Drafter, rows: RowsView, source: Sequence[int]) -> bool:
    return isinstance(drafter, Reorderable) and drafter.reorder(rows, source)


def restart(drafter: Drafter, rows: RowsView, count: int) -> None:
    """Make the drafter rebuild its state from the sequences of all rows. It knows the first `count` of them."""
    if isinstance(drafter, Reorderable):
        drafter.restart(rows, count)
    else:
        restart_rows(drafter, rows, count)


def restart_rows(drafter: Drafter, rows: RowsView, count: int) -> None:
    """Release `count` rows, and admit all rows."""
    for row in range(count - 1, -1, -1):
        drafter.release(row, row, rows.lengths[row])
    drafter.admit(rows, 0)


def rewind(drafter: Drafter, lengths: list[int]) -> None:
    if isinstance(drafter, Rewindable):
        drafter.rewind(lengths)


def replay_needs_of(cls: type[Drafter], options: Any) -> str | None:
    """Return the inputs that a replay needs besides tokens and the prediction. None: no others."""
    return cls.replay_needs(options) if issubclass(cls, Replayable) else "a model's logits"
