"""What is learnt from: pieces of texts in batches, the same for the same seed and step; some are held out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.errors import InputError

from .shards import Text

_SHORTEST = 8  # tokens; less teaches nothing about what comes next but one
_POOL = 64  # batches whose pieces are sorted by length together, so that little is padding


@dataclass(frozen=True)
class Batch:
    """ids [R,T], padded at the end; learn [R,T]: the tokens that the target wrote, and not the padding."""

    ids: Tensor
    learn: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(self.ids.to(device, non_blocking=True), self.learn.to(device, non_blocking=True))


class Corpus:
    """Pieces of at most `length` tokens. One in `held` is held out: of those nothing is ever learnt."""

    def __init__(self, texts: Iterable[Text], length: int, tokens: int, seed: int, held: int = 50) -> None:
        """tokens: in a batch, padding included."""
        self.length, self.seed = length, seed
        self._room = max(1, tokens // length)  # pieces of full length in a batch
        pieces = [piece for text in texts for piece in _cut(text, length)]
        if len(pieces) < 2:
            raise InputError(
                f"There are {len(pieces)} texts of {_SHORTEST} or more tokens, and learning needs 2: some to learn "
                "from, and one to see what was learnt; give more data."
            )
        every = max(2, min(held, len(pieces) // 4))
        self.held_out = [piece for index, piece in enumerate(pieces) if index % every == every - 1]
        self.pieces = [piece for index, piece in enumerate(pieces) if index % every != every - 1]
        self._tokens = max(tokens, length)
        self._epochs: dict[int, list[list[int]]] = {}

    @property
    def size(self) -> int:
        """Tokens to learn from in one epoch."""
        return sum(len(piece.tokens) - piece.prompt for piece in self.pieces)

    @property
    def batches(self) -> int:
        """Of one epoch; epochs differ by a few."""
        return len(self._epoch(0))

    def batch(self, number: int) -> Batch:
        """Batch `number`, counted through all epochs."""
        epoch = 0
        while number >= len(self._epoch(epoch)):
            number -= len(self._epoch(epoch))
            epoch += 1
        return gathered([self.pieces[index] for index in self._epoch(epoch)[number]])

    def _epoch(self, epoch: int) -> list[list[int]]:
        if epoch not in self._epochs:
            for old in [known for known in self._epochs if 0 < known < epoch - 1]:
                del self._epochs[old]
            self._epochs[epoch] = self._arranged(epoch)
        return self._epochs[epoch]

    def _arranged(self, epoch: int) -> list[list[int]]:
        """All pieces in an order of this epoch's own: shuffled, sorted by length a pool at a time, shuffled again."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.pieces), generator=generator).tolist()
        pool = _POOL * self._room
        batches: list[list[int]] = []
        for start in range(0, len(order), pool):
            some = sorted(order[start : start + pool], key=lambda index: len(self.pieces[index].tokens))
            batches += self._filled(some)
        return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]

    def _filled(self, sorted_pieces: Sequence[int]) -> list[list[int]]:
        """Batches of so many pieces that with their padding they are as many tokens as asked for."""
        batches: list[list[int]] = [[]]
        for index in sorted_pieces:
            longest = len(self.pieces[index].tokens)
            if batches[-1] and (len(batches[-1]) + 1) * longest > self._tokens:
                batches.append([])
            batches[-1].append(index)
        return batches

    def held_out_batches(self, most: int) -> list[Batch]:
        """What is held out, or the first `most` pieces of it."""
        pieces = sorted(self.held_out[:most], key=lambda piece: len(piece.tokens))
        return [gathered(pieces[at : at + self._room]) for at in range(0, len(pieces), self._room)]

    def frequent(self, count: int, always: Iterable[int] = ()) -> list[int]:
        """The `count` most frequent tokens of what the target wrote, sorted by id; those in `always` among them."""
        seen: Counter[int] = Counter()
        for piece in self.pieces:
            seen.update(piece.tokens[piece.prompt :])
        first = list(dict.fromkeys([*always, *(token for token, _ in seen.most_common())]))
        return sorted(first[:count])


def _cut(text: Text, length: int) -> list[Text]:
    """Pieces of a text; the last one may be shorter, and what is too short is left out."""
    pieces = []
    for start in range(0, len(text.tokens), length):
        tokens = text.tokens[start : start + length]
        prompt = min(max(0, text.prompt - start), len(tokens))
        if len(tokens) >= _SHORTEST and len(tokens) - prompt >= 2:
            pieces.append(Text(tokens, prompt))
    return pieces


def gathered(pieces: Sequence[Text]) -> Batch:
    longest = max(len(piece.tokens) for piece in pieces)
    ids = torch.zeros(len(pieces), longest, dtype=torch.int64)
    learn = torch.zeros(len(pieces), longest, dtype=torch.bool)
    for row, piece in enumerate(pieces):
        ids[row, : len(piece.tokens)] = torch.tensor(piece.tokens)
        learn[row, piece.prompt : len(piece.tokens)] = True
    return Batch(ids, learn)
