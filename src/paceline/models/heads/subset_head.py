"""A model that says only some of its tokens: most of a small draft model is its output head.

The head becomes a copy of some of its rows, [N,D] instead of [V,D]; everything else, the tokens it can read among them,
is the model's own. Tokens keep the ids they have everywhere: `spread` puts the logits at those ids.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.common.errors import UnsupportedError
from paceline.models.language_model import LanguageModel
from paceline.models.module_views import shell
from paceline.models.packed_linear import kernel_rows

_SHARE = 4  # one row of this number is kept for the tokens of the texts at hand
_SPACES = str.maketrans("", "", "\u2581\u0120")  # how tokenizers write a space before a word


def spread(logits: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    """Logits [...,N] of the tokens `ids` [N] over the whole vocabulary [...,V]; tokens without a row are impossible."""
    everything = logits.new_full((*logits.shape[:-1], vocabulary), float("-inf"))
    return everything.index_copy_(-1, ids, logits)


def usual_tokens(lm: LanguageModel, always: Iterable[int]) -> list[int]:
    """All ids in the order of how usual they are, roughly: those in `always`, single letters and signs (which some
    tokenizers put last), then by id, for tokenizers learn their tokens in the order of frequency."""
    first = [token for token in always if token < lm.vocabulary]
    if lm.tokenizer is not None:
        names = {token: name.translate(_SPACES) for name, token in lm.tokenizer.get_vocab().items()}
        first += sorted(t for t, name in names.items() if len(name) < 2 and name.isascii() and t < lm.vocabulary)
    return list(dict.fromkeys([*first, *range(lm.vocabulary)]))


class SubsetHead:
    """`lm`: a view of a model that says N tokens, `ids` [N] of the model's own. Some rows change with the texts at
    hand: their tokens may come again."""

    def __init__(self, lm: LanguageModel, count: int, always: Iterable[int] = ()) -> None:
        name, self._whole = _head_of(lm)
        chosen = usual_tokens(lm, always)[:count]
        self._fixed = len(chosen) - len(chosen) // _SHARE
        self._next = self._fixed  # the row that is given away next
        self._row = {token: row for row, token in enumerate(chosen)}
        self._usual, self._known = chosen, list(chosen)
        with torch.inference_mode(False):
            self.ids = torch.tensor(chosen, device=lm.device)
            self._head = rows_of(self._whole, self.ids)
        self.lm = copy.copy(lm)
        self.lm.model = shell(lm.model)
        self.lm.model._modules[name] = self._head
        self.lm.vocabulary, self.lm.max_token_id = len(chosen), None

    def learn(self, tokens: Sequence[int]) -> None:
        """Those that it could not say so far it can say from now on, the last ones if they are too many."""
        row = self._row
        new = [token for token in dict.fromkeys(tokens) if token not in row][-(len(self._known) - self._fixed) :]
        if not new or self._fixed == len(self._known):
            return
        places = []
        for token in new:
            del row[self._known[self._next]]
            row[token], self._known[self._next] = self._next, token
            places.append(self._next)
            self._next = self._next + 1 if self._next + 1 < len(self._known) else self._fixed
        self._write(places, new)

    def forget(self) -> None:
        """As in the beginning: other texts, other tokens."""
        if self._known != self._usual:
            self._known, self._next = list(self._usual), self._fixed
            self._row = {token: row for row, token in enumerate(self._known)}
            self._write(range(self._fixed, len(self._known)), self._known[self._fixed :])

    def _write(self, places: Sequence[int], tokens: Sequence[int]) -> None:
        where = torch.tensor(places, device=self.ids.device)
        what = torch.tensor(tokens, device=self.ids.device)
        self.ids.index_copy_(0, where, what)
        for mine, theirs in _tensors(self._head, self._whole):
            mine.index_copy_(0, where, theirs.index_select(0, what))

    def spread(self, logits: Tensor, vocabulary: int) -> Tensor:
        return spread(logits, self.ids, vocabulary)


def _tensors(head: Any, whole: Any) -> list[tuple[Tensor, Tensor]]:
    """Everything of a head that has a row per output, beside the same of another."""
    names = [*whole._parameters, *whole._buffers]
    return [(getattr(head, name).data, getattr(whole, name).data) for name in names if getattr(whole, name) is not None]


def rows_of(whole: Any, ids: Tensor) -> Any:
    """The head of these outputs alone: a plain linear map, or one of our own with packed weights."""
    fresh = shell(whole)
    for kind in ("_parameters", "_buffers"):
        held = {
            name: None if t is None else t.detach().index_select(0, ids) for name, t in whole.__dict__[kind].items()
        }
        made = {n: nn.Parameter(t, False) if kind == "_parameters" and t is not None else t for n, t in held.items()}
        fresh.__dict__[kind] = made
    fresh.out_features = ids.shape[0]
    if hasattr(fresh, "kernel_rows"):
        first = next(t for t in fresh.buffers() if t.is_floating_point())
        fresh.kernel_rows = kernel_rows(first.device, first.dtype, fresh.in_features, ids.shape[0] % 32)
    return fresh


def _head_of(lm: LanguageModel) -> tuple[str, Any]:
    """The output head of a model, and what the model calls it."""
    own = lm.model.get_output_embeddings()
    names = [name for name, child in lm.model._modules.items() if child is own and own is not None]
    if not names or not hasattr(own, "out_features"):
        raise UnsupportedError(
            f"{type(lm.model).__name__} ({lm.architecture.name}) has no output head of its own that could be cut; "
            "leave out the option vocabulary."
        )
    return names[0], own
