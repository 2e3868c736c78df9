"""Base of all trained heads: they fit one target, can be saved and loaded, and draft from stored hidden states."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from paceline.common.errors import LoadError, UnsupportedError
from paceline.drafters.heads.head_files import check_target, fingerprint, load_head, save_head
from paceline.models.loading.weight_check import built

if TYPE_CHECKING:
    from paceline.models.language_model import LanguageModel

H = TypeVar("H", bound="DraftHead")


class DraftHead(nn.Module):
    """Weights that draft for one target. A subclass has a `kind`, a `Config`, and the `sizes` for a target."""

    kind: ClassVar[str]
    Config: ClassVar[Any]  # a dataclass of plain values: the content of config.json

    def __init__(self, config: Any, made_for: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.made_for = made_for  # the fingerprint of the target

    @property
    def remembers(self) -> int:
        """The width of the vector that is stored for every position."""
        return int(self.config.hidden)

    @classmethod
    def sizes(cls, target: LanguageModel) -> Any:
        """The default config for this target."""
        raise NotImplementedError

    @classmethod
    def random(cls: type[H], target: LanguageModel, seed: int = 0, config: Any = None) -> H:
        """Untrained weights that fit the target, in its dtype and on its device."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = cls(config or cls.sizes(target), fingerprint(target))
        return head.to(target.device, target.dtype)

    def save(self, folder: str | os.PathLike[str], numbers: str | None = None) -> None:
        """numbers: the dtype on disk, float32, bfloat16 or int8. None: the dtype of the weights."""
        config = {**asdict(self.config), "target": self.made_for}
        save_head(folder, self.kind, config, self.own_weights(), numbers)

    def own_weights(self) -> dict[str, Tensor]:
        """The weights that do not belong to the target."""
        return dict(self.state_dict())

    @classmethod
    def load(cls: type[H], folder: str | os.PathLike[str]) -> H:
        """The head as it was saved, dtype included, on the CPU."""
        config, tensors = load_head(folder, cls.kind)
        made_for = config.pop("target")
        dtypes = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
        try:
            sizes = cls.Config(**{name: _frozen(value) for name, value in config.items()})
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
                f"This {self.kind} head reads embeddings of width {wanted}, those of {target.name} have {given}; "
                "use a head trained for this target."
            )


def _frozen(value: Any) -> Any:
    """A tuple for every list, since JSON has no tuples."""
    return tuple(value) if isinstance(value, list) else value


def depths(numbers: Sequence[int], layers: int) -> tuple[float, ...]:
    """The relative depths of hidden states by number (0: the embeddings) in a target with `layers` layers.

    The last one is refused: Paceline applies the final norm to it, the projects that train such heads do not.
    """
    if len(set(numbers)) < len(numbers) or not all(0 <= number < layers for number in numbers):
        raise UnsupportedError(
            f"This head reads the hidden states {', '.join(map(str, numbers))}, which must differ and lie between 0 "
            f"and {layers - 1} in a target of {layers} layers; use a head trained for this target."
        )
    return tuple(number / layers for number in numbers)


class PlaceStore:
    """One hidden state [D] per row and position. Rejected positions are overwritten, so a rewind costs nothing."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._states = torch.zeros(0, 0, width, dtype=dtype, device=device)  # [R,T,D]
        self.storage_version: Hashable = object()  # another one when the tensor is replaced

    def write(self, rows: slice, position: Tensor, states: Tensor, places: int) -> None:
        """Store `states` [R,Q,D] of the rows at `position` [R,Q]; all are below `places`."""
        self.reserve(rows.stop, places)
        states = states.to(self._states.dtype).nan_to_num()  # a NaN of a broken target would stay for ever
        self._states[rows].scatter_(1, position.unsqueeze(-1).expand_as(states), states)

    def at(self, rows: slice, position: Tensor) -> Tensor:
        """[R,Q,D] at `position` [R,Q]; zeros where nothing is stored, such as before the text."""
        self.reserve(rows.stop, 1)
        known = position.clamp(0, self._states.shape[1] - 1)
        states = self._states[rows].gather(1, known.unsqueeze(-1).expand(*known.shape, self._states.shape[2]))
        return states.where((known == position).unsqueeze(-1), 0)

    def states(self, rows: int, places: int) -> Tensor:
        """[R,T,D]: the whole tensor of the first `rows`, with room for `places` positions, for kernels that write."""
        self.reserve(rows, places)
        return self._states[:rows]

    def reserve(self, rows: int, places: int) -> None:
        """Make room for rows and positions. The number of positions doubles."""
        old = self._states
        if rows <= old.shape[0] and places <= old.shape[1]:
            return
        if places > old.shape[1]:
            places = max(places, min(2 * old.shape[1], places + 4096))
        self._states = old.new_zeros(max(rows, old.shape[0]), max(places, old.shape[1]), old.shape[2])
        self._states[: old.shape[0], : old.shape[1]] = old
        self.storage_version = object()

    def reorder(self, source: Sequence[int]) -> None:
        """Row r becomes a copy of row source[r]."""
        self.reserve(len(source), 1)
        self._states[: len(source)] = self._states[list(source)]

    def release(self, row: int, last: int) -> None:
        """Row `last` takes the index of row `row`. Its old states are cleared for the next row."""
        if last < self._states.shape[0]:
            self._states[row] = self._states[last]
            self._states[last] = 0
