"""Can this model be read in pieces, in branches and after a rollback? The probe tries it when the model is loaded.

The given model reads short texts. A small copy of it with windows of a few tokens (`twin.py`) reads texts that are
longer than each window.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedError

from .architecture import study
from .chatter import in_one_line
from .twin import kind_of, small_models, windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .language_model import LanguageModel

_TEXT = 30  # tokens of the longer text
_RAGGED = 5  # how much shorter the other one is
_ROOM = 10  # tokens that are read after a text
_WINDOW = 4  # of a small copy
_BRANCHES = (-1, -1, 0, 1, 2)  # two branches: 0-2-4 and 1-3
_LONGER, _SHORTER = [0, 2, 4], [1, 3]


class ProbeText:
    """Rows of text, as a reader sees them."""

    def __init__(self, tokens: Tensor, lengths: list[int]) -> None:
        self.text = tokens
        self.lengths = lengths
        self.length = torch.tensor(lengths, device=tokens.device).view(-1, 1)
        self.histories = [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]
        self.count = self.capacity = len(lengths)
        self.bound: int | None = None


class _DifferenceError(Exception):
    """Two logits that should be equal are not; says which."""


@torch.inference_mode()
def probe(lm: LanguageModel) -> None:
    """Compare logits through a slot cache with those of the model by itself, for the given model and for a small copy
    with small windows. Raise `UnsupportedError` if they differ, or if a window of the model could not be tried."""
    title = f"{type(lm.model).__name__} ({lm.architecture.name})"
    plain = copy.copy(lm)
    plain.runner = "eager"
    try:
        _alone(plain, _tokens(plain, 1)[0])
    except Exception as error:
        raise UnsupportedError(f"{title} cannot read a text by itself ({_gist(error)}).") from error
    _try(plain, title)
    if lm.reader()._kernels is not None:
        _try(lm, title)
    small = next(small_models(type(lm.model), lm.model.config, _WINDOW), None)
    if small is not None:
        _try(_as_language_model(small, plain), f"A small copy of {title} with windows of {_WINDOW} tokens")
    elif wide := {name: tokens for name, tokens in windows(lm.model.config).items() if tokens > _TEXT}:
        name, tokens = next(iter(wide.items()))
        raise UnsupportedError(
            f"{title} has a window of {tokens} tokens ({name}), and no small copy of the model could be built to try "
            "it; the model is refused because its text could come out wrong."
        )


def _as_language_model(model: PreTrainedModel, other: LanguageModel) -> LanguageModel:
    """A model in place of the one in `other`. It is not probed."""
    small = copy.copy(other)
    small.model, small.architecture = model, study(model)
    small.vocabulary = model.config.get_text_config(decoder=True).vocab_size
    small.context, small.layers = small.architecture.context, len(small.architecture.kinds)
    return small


def _try(lm: LanguageModel, title: str) -> None:
    try:
        _compare_even(lm)
        _compare_branches(lm)
    except _DifferenceError as difference:
        raise UnsupportedError(f"{title} {difference}; it is refused because its text could come out wrong.") from None
    except Exception as error:
        raise UnsupportedError(
            f"{title} cannot be read through a slot cache and a 4-D mask ({_gist(error)})."
        ) from error


def _compare_even(lm: LanguageModel) -> None:
    """Two texts of one length: read at once where the model needs no mask for that, then a draft, then one token."""
    ids = _tokens(lm, 2)
    length = ids.shape[1] - _ROOM
    wanted = [_alone(lm, row) for row in ids]
    for row in (0, 1):
        if not _equal(lm, _alone(lm, ids[row, :length])[-1], wanted[row][length - 1]):
            raise _DifferenceError("gives a token other logits once more text follows it")
    reader: Any = lm.reader()
    start = reader.begin(ProbeText(ids, [length] * 2), 0, ids.shape[1] + _ROOM)
    for width, end, drafted in ((start, length, 3), (2, length + 2, 3), (1, length + 3, 0)):
        rows = ProbeText(ids, [end] * 2)
        seen = reader.extend(rows, width, ids[:, end : end + drafted] if drafted else None).logits
        reader.keep(rows, None)
        for row in (0, 1):
            _compare(lm, seen[row], wanted[row][end - 1 : end + drafted], "texts of one length")


def _compare_branches(lm: LanguageModel) -> None:
    """Two texts of different lengths with a tree behind each; the longer branch is kept, and one more token is read."""
    ids = _tokens(lm, 4)
    ids, drafted = ids[:2], ids[2:, : len(_BRANCHES)]
    length = ids.shape[1] - _ROOM
    lengths = [length, max(1, length - _RAGGED)]
    rows = ProbeText(ids, lengths)
    parents = torch.tensor([_BRANCHES] * 2, device=lm.device)
    reader: Any = lm.reader()
    width = reader.begin(rows, 0, ids.shape[1] + _ROOM)
    seen = reader.extend(rows, width, drafted, parents).logits
    reader.keep(rows, torch.tensor([_LONGER] * 2, device=lm.device))
    kept = ids.clone()
    for row, n in enumerate(lengths):
        kept[row, n : n + 3] = drafted[row, _LONGER]
    later = reader.extend(ProbeText(kept, [n + 4 for n in lengths]), 1).logits
    for row, n in enumerate(lengths):
        whole = _alone(lm, kept[row, : n + 4])
        other = _alone(lm, torch.cat([ids[row, :n], drafted[row, _SHORTER]]))
        nodes = [0, *(1 + node for node in _LONGER)]
        _compare(lm, seen[row, nodes], whole[n - 1 : n + 3], "a draft that branches")
        nodes = [1 + node for node in _SHORTER]
        _compare(lm, seen[row, nodes], other[n:], "a draft that branches")
        _compare(lm, later[row, -1], whole[-1], "a text after a branch was rolled back")


def _tokens(lm: LanguageModel, rows: int) -> Tensor:
    """Random tokens [rows, T], none of which has a meaning by the config (an image, a pad, an end)."""
    special = {
        value
        for config in {id(c): c for c in (lm.model.config, lm.model.config.get_text_config(decoder=True))}.values()
        for name, value in vars(config).items()
        if type(value) is int and kind_of(name) == "token"
    }
    length = max(2, min(_TEXT, lm.context - _ROOM)) + _ROOM
    generator = torch.Generator().manual_seed(0)
    plain = torch.tensor([token for token in range(min(lm.logits, 4096)) if token not in special] or [0])
    return plain[torch.randint(0, len(plain), (rows, length), generator=generator)].to(lm.device)


def _alone(lm: LanguageModel, text: Tensor) -> Tensor:
    """The logits of a text [T] by the model itself, without mask and cache."""
    return lm.model(input_ids=text[None], use_cache=False).logits[0, :, : lm.logits].float()


def _compare(lm: LanguageModel, got: Tensor, wanted: Tensor, what: str) -> None:
    if not _equal(lm, got, wanted):
        raise _DifferenceError(f"reads {what} differently through a slot cache and a 4-D mask than by itself")


def _equal(lm: LanguageModel, got: Tensor, wanted: Tensor) -> bool:
    """Up to rounding."""
    slack = 1e-3 if lm.dtype in (torch.float32, torch.float64) else 0.1
    return torch.allclose(got.float(), wanted, atol=slack * float(wanted.std() + 1e-6), rtol=slack)


def _gist(error: Exception) -> str:
    return f"{type(error).__name__}: {in_one_line(error)}"
