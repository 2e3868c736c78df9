"""What is learnt from: pieces of texts in batches, the same for the same seed and step; some are held out.

Texts are mostly short, and prompts of real use are not. So pieces of several texts can be joined, one after the other
in one row of a batch, in another way in every epoch: then what is learnt is learnt far from a row's beginning too.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.common.errors import InputError, LoadError
from paceline.common.json_text import parse_json
from paceline.models.loading.weight_check import reading

# ---- Texts as token ids, on disk: a folder of shards (safetensors) that grows whole shard by whole shard

FORMAT = 1
ENOUGH = "enough"
WANTED = "tokens"  # in the manifest: how many tokens there are to be
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Text:
    """Token ids; the first `prompt` of them were given, the others were written by the target."""

    tokens: list[int]
    prompt: int = 0


def about_texts(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What the manifest of a folder says of its texts; nothing where there is none."""
    path = Path(folder) / _MANIFEST
    if not path.exists():
        return {}
    with reading("The manifest", path):
        found = parse_json(path.read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
    return found


class Shards:
    """A folder of texts. `about` must be the same whenever it is opened: texts of two targets never mix."""

    def __init__(self, folder: str | os.PathLike[str], about: Mapping[str, Any], wanted: int | None = None) -> None:
        """wanted: how many tokens there are to be; it is noted for those who share the texts."""
        self.folder = Path(folder)
        plain = json.loads(json.dumps({"format": FORMAT, **about}))
        path = self.folder / _MANIFEST
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._note({**plain, **({} if wanted is None else {WANTED: wanted})})
        found = about_texts(self.folder)
        for name, value in plain.items():
            if found.get(name) != value:
                raise InputError(
                    f"The texts in '{self.folder}' were made with {name} = {found.get(name)!r}, not {value!r}; "
                    "take another folder, or remove this one."
                )
        if wanted is not None and found.get(WANTED) != wanted:
            self._note({**found, WANTED: wanted})

    def _note(self, found: Mapping[str, Any]) -> None:
        write_whole(self.folder / _MANIFEST, (json.dumps(found, indent=2, sort_keys=True) + "\n").encode())

    def __len__(self) -> int:
        """How many shards there are; the next one gets this number."""
        count = 0
        while self._path(count).exists():
            count += 1
        return count

    @property
    def enough(self) -> bool:
        """Did somebody say that no more are wanted?"""
        return (self.folder / ENOUGH).exists()

    def _path(self, number: int) -> Path:
        return self.folder / f"shard-{number:05}.safetensors"

    def append(self, texts: Sequence[Text]) -> None:
        """One more shard."""
        starts = [0]
        for text in texts:
            starts.append(starts[-1] + len(text.tokens))
        tensors = {
            "tokens": torch.tensor([token for text in texts for token in text.tokens], dtype=torch.int32),
            "starts": torch.tensor(starts, dtype=torch.int64),
            "prompts": torch.tensor([text.prompt for text in texts], dtype=torch.int32),
        }
        number = len(self)
        beside = self._path(number).with_suffix(".part")
        try:
            save_file(tensors, beside)
            beside.replace(self._path(number))
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                beside.unlink()
            raise LoadError(f"The texts of shard {number} cannot be written to '{self.folder}': {error}.") from error

    def texts(self) -> Iterator[Text]:
        """All texts, in the order in which they were written."""
        for number in range(len(self)):
            with reading("The texts in", self._path(number)):
                with safe_open(self._path(number), "pt") as file:
                    tokens, starts, prompts = (file.get_tensor(name) for name in ("tokens", "starts", "prompts"))
                _check(tokens, starts, prompts)
            every, edges = tokens.tolist(), starts.tolist()
            for start, stop, prompt in zip(edges, edges[1:], prompts.tolist(), strict=False):
                yield Text(every[start:stop], prompt)


def _check(tokens: torch.Tensor, starts: torch.Tensor, prompts: torch.Tensor) -> None:
    """Texts lie one after the other, and a prompt is a part of its text. A ValueError says what is wrong."""
    for name, each in (("tokens", tokens), ("starts", starts), ("prompts", prompts)):
        if each.ndim != 1 or each.is_floating_point() or (each < 0).any():
            raise ValueError(f"its '{name}' are no list of whole numbers")
    lengths = starts.diff()
    if len(starts) != len(prompts) + 1 or starts[0] != 0 or starts[-1] != len(tokens) or (lengths < prompts).any():
        raise ValueError(f"its {len(starts)} edges do not fit its {len(tokens)} tokens and {len(prompts)} prompts")


def write_whole(path: Path, content: bytes) -> None:
    """A file that is there whole or not at all; whatever was there before stays if it cannot be written."""
    beside = path.with_name(f".{path.name}.part")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise LoadError(
            f"'{path}' cannot be written: {error.strerror or error}; what was there is untouched."
        ) from error


# ---- What is learnt from: pieces of texts in batches, the same for the same seed and step; some are held out

Row = tuple[int, ...]  # pieces, by number, that follow each other in a row of a batch
_SHORTEST = 8  # tokens; less teaches nothing about what comes next but one
_OPEN = 16  # rows that pieces may still be joined to
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

    def __init__(
        self, texts: Iterable[Text], length: int, tokens: int, seed: int, held: int = 50, join: bool = False
    ) -> None:
        """tokens: in a batch, padding included. join: several pieces in a row of a batch, while they fit in `length`;
        then whole texts are held out, not pieces of them."""
        self.length, self.seed, self.join = length, seed, join
        self._room = max(1, tokens // length)  # pieces of full length in a batch
        cut = [pieces for text in texts if (pieces := _cut(text, length))]
        groups = cut if join else [[piece] for pieces in cut for piece in pieces]
        if len(groups) < 2:
            raise InputError(
                f"There are {len(groups)} texts of {_SHORTEST} or more tokens, and learning needs 2: some to learn "
                "from, and one to see what was learnt; give more data."
            )
        every = max(2, min(held, len(groups) // 4))
        self.held_out = [piece for index, group in enumerate(groups) if index % every == every - 1 for piece in group]
        self.pieces = [piece for index, group in enumerate(groups) if index % every != every - 1 for piece in group]
        self._tokens = max(tokens, length)
        self._epochs: dict[int, list[list[Row]]] = {}

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
        return gathered([[self.pieces[index] for index in row] for row in self._epoch(epoch)[number]])

    def _epoch(self, epoch: int) -> list[list[Row]]:
        if epoch not in self._epochs:
            for old in [known for known in self._epochs if 0 < known < epoch - 1]:
                del self._epochs[old]
            self._epochs[epoch] = self._arranged(epoch)
        return self._epochs[epoch]

    def _arranged(self, epoch: int) -> list[list[Row]]:
        """All pieces in an order of this epoch's own: shuffled, sorted by length a pool at a time, shuffled again."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.pieces), generator=generator).tolist()
        lengths = [len(piece.tokens) for piece in self.pieces]
        rows = self._rows(order, lengths)
        sizes = {row: sum(lengths[index] for index in row) for row in rows}
        pool = _POOL * self._room
        batches: list[list[Row]] = []
        for start in range(0, len(rows), pool):
            batches += self._filled(sorted(rows[start : start + pool], key=sizes.__getitem__), sizes)
        return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]

    def _rows(self, order: Sequence[int], lengths: Sequence[int]) -> list[Row]:
        """Each piece alone, or as many after each other as fit."""
        if not self.join:
            return [(index,) for index in order]
        rows: list[list[int]] = []
        rooms: list[int] = []
        for index in order:
            begun = range(max(0, len(rows) - _OPEN), len(rows))
            fits = next((row for row in begun if rooms[row] >= lengths[index]), len(rows))
            if fits == len(rows):
                rows.append([])
                rooms.append(self.length)
            rows[fits].append(index)
            rooms[fits] -= lengths[index]
        return [tuple(row) for row in rows]

    def _filled(self, sorted_rows: Sequence[Row], sizes: Mapping[Row, int]) -> list[list[Row]]:
        """Batches of so many rows that with their padding they are as many tokens as asked for."""
        batches: list[list[Row]] = [[]]
        for row in sorted_rows:
            if batches[-1] and (len(batches[-1]) + 1) * sizes[row] > self._tokens:
                batches.append([])
            batches[-1].append(row)
        return batches

    def held_out_batches(self, most: int) -> list[Batch]:
        """What is held out, or the first `most` pieces of it."""
        pieces = self.held_out[:most]
        lengths = [len(piece.tokens) for piece in pieces]
        rows = self._rows(range(len(pieces)), lengths)
        rows.sort(key=lambda row: sum(lengths[index] for index in row))
        texts = [[pieces[index] for index in row] for row in rows]
        return [gathered(texts[at : at + self._room]) for at in range(0, len(texts), self._room)]

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


def gathered(rows: Sequence[Sequence[Text]]) -> Batch:
    """Rows of texts, one after the other. How a text begins after another nobody can know: that is not learnt."""
    longest = max(sum(len(text.tokens) for text in row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    learn = torch.zeros(len(rows), longest, dtype=torch.bool)
    for index, row in enumerate(rows):
        at = 0
        for text in row:
            end = at + len(text.tokens)
            ids[index, at:end] = torch.tensor(text.tokens)
            learn[index, at + max(text.prompt, int(at > 0)) : end] = True
            at = end
    return Batch(ids, learn)
