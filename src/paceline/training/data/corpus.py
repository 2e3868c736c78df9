"""Training data: texts on disk as shards of token ids, and batches of pieces of them.

The batches follow from the seed and the step. A part of the texts is held out. Several pieces can be joined in one row
of a batch, in another order in every epoch: most texts are short, and prompts of real use are long.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.common.errors import InputError, LoadError
from paceline.common.text_formats import parse_json
from paceline.models.loading.weight_check import reading

# ---- Texts on disk: a folder of shards (safetensors) that grows by whole shards

FORMAT = 1
STOP_FILE = "enough"  # a file of this name ends the writing of texts, or the training in its folder
WANTED = "tokens"  # in the manifest: the number of tokens that the folder shall have
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Text:
    """Token ids. The first `prompt` of them were given; the target wrote the others."""

    tokens: list[int]
    prompt: int = 0


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a folder of texts; {} if there is none."""
    path = Path(folder) / _MANIFEST
    if not path.exists():
        return {}
    with reading("The manifest", path):
        manifest = parse_json(path.read_text("utf-8"))
        if not isinstance(manifest, dict):
            raise ValueError("it is no JSON object")
    return manifest


class Shards:
    """A folder of texts. `about` must be equal whenever the folder is opened, so texts of two targets never mix."""

    def __init__(self, folder: str | os.PathLike[str], about: Mapping[str, Any], wanted: int | None = None) -> None:
        """wanted: the number of tokens to write. The manifest keeps it for other trainings that share the texts."""
        self.folder = Path(folder)
        plain = json.loads(json.dumps({"format": FORMAT, **about}))
        if not (self.folder / _MANIFEST).exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / _MANIFEST, {**plain, **({} if wanted is None else {WANTED: wanted})})
        manifest = read_manifest(self.folder)
        for name, value in plain.items():
            if manifest.get(name) != value:
                raise InputError(
                    f"The texts in '{self.folder}' were made with {name} = {manifest.get(name)!r}, not {value!r}; "
                    "take another folder, or remove this one."
                )
        if wanted is not None and manifest.get(WANTED) != wanted:
            write_json(self.folder / _MANIFEST, {**manifest, WANTED: wanted})

    def __len__(self) -> int:
        """The number of shards, which is also the number of the next one."""
        count = 0
        while self._path(count).exists():
            count += 1
        return count

    @property
    def stop_requested(self) -> bool:
        """Did the user ask to stop the writing with a file?"""
        return (self.folder / STOP_FILE).exists()

    def _path(self, number: int) -> Path:
        return self.folder / f"shard-{number:05}.safetensors"

    def append(self, texts: Sequence[Text]) -> None:
        """Write one more shard."""
        starts = [0]
        for text in texts:
            starts.append(starts[-1] + len(text.tokens))
        tensors = {
            "tokens": torch.tensor([token for text in texts for token in text.tokens], dtype=torch.int32),
            "starts": torch.tensor(starts, dtype=torch.int64),
            "prompts": torch.tensor([text.prompt for text in texts], dtype=torch.int32),
        }
        with replacing(self._path(len(self)), "The texts ", "the texts before them are intact") as part:
            save_file(tensors, part)

    def texts(self) -> Iterator[Text]:
        """All texts, in the order of writing."""
        for number in range(len(self)):
            with reading("The texts in", self._path(number)):
                with safe_open(self._path(number), "pt") as file:
                    tokens, starts, prompts = (file.get_tensor(name) for name in ("tokens", "starts", "prompts"))
                _check(tokens, starts, prompts)
            ids, edges = tokens.tolist(), starts.tolist()
            for start, stop, prompt in zip(edges, edges[1:], prompts.tolist(), strict=False):
                yield Text(ids[start:stop], prompt)


def _check(tokens: Tensor, starts: Tensor, prompts: Tensor) -> None:
    """Raise ValueError unless the texts follow each other without gaps and no prompt is longer than its text."""
    for name, tensor in (("tokens", tokens), ("starts", starts), ("prompts", prompts)):
        if tensor.ndim != 1 or tensor.is_floating_point() or (tensor < 0).any():
            raise ValueError(f"its '{name}' are no list of whole numbers")
    lengths = starts.diff()
    if len(starts) != len(prompts) + 1 or starts[0] != 0 or starts[-1] != len(tokens) or (lengths < prompts).any():
        raise ValueError(f"its {len(starts)} edges do not fit its {len(tokens)} tokens and {len(prompts)} prompts")


@contextmanager
def replacing(path: Path, what: str = "", left: str = "what was there is untouched") -> Iterator[Path]:
    """A file to write inside. It replaces `path` when it is complete; if it cannot be written, the old file stays."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            part.unlink()
        problem = getattr(error, "strerror", None) or error
        raise LoadError(f"{what}'{path}' cannot be written: {problem}; {left}.") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file completely or not at all."""
    with replacing(path) as part:
        part.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")


# ---- Batches of pieces of texts

Row = tuple[int, ...]  # the numbers of pieces that follow each other in a row of a batch
_SHORTEST = 8  # tokens of a piece: a shorter one has too little context
_OPEN_ROWS = 16  # rows to which a piece may still be joined
_POOL = 64  # batches whose pieces are sorted by length together, so that there is little padding


@dataclass(frozen=True)
class TokenBatch:
    """ids [R,T], padded at the end. learn [R,T]: True at tokens that the target wrote."""

    ids: Tensor
    learn: Tensor

    def to(self, device: torch.device) -> TokenBatch:
        return TokenBatch(self.ids.to(device, non_blocking=True), self.learn.to(device, non_blocking=True))


class Corpus:
    """Pieces of at most `length` tokens. One in `held` is held out and never trained on."""

    def __init__(
        self, texts: Iterable[Text], length: int, tokens: int, seed: int, held: int = 50, join: bool = False
    ) -> None:
        """tokens: of a batch, with its padding. join: put several pieces in a row of a batch while they fit in
        `length`; then whole texts are held out, not pieces."""
        self.length, self.seed, self.join = length, seed, join
        self._rows_of_full_length = max(1, tokens // length)  # in a batch
        cut = [pieces for text in texts if (pieces := _pieces(text, length))]
        groups = cut if join else [[piece] for pieces in cut for piece in pieces]
        if len(groups) < 2:
            raise InputError(
                f"There are {len(groups)} texts of {_SHORTEST} or more tokens, and training needs 2: one to train on "
                "and one to evaluate on; give more data."
            )
        every = max(2, min(held, len(groups) // 4))
        self.held_out = [piece for index, group in enumerate(groups) if index % every == every - 1 for piece in group]
        self.pieces = [piece for index, group in enumerate(groups) if index % every != every - 1 for piece in group]
        self._tokens = max(tokens, length)
        self._epochs: dict[int, list[list[Row]]] = {}

    @property
    def size(self) -> int:
        """Tokens to train on in one epoch."""
        return sum(len(piece.tokens) - piece.prompt for piece in self.pieces)

    @property
    def batches(self) -> int:
        """Of the first epoch; other epochs have a few more or less."""
        return len(self._epoch(0))

    def batch(self, number: int) -> TokenBatch:
        """Batch `number`, counted through all epochs."""
        epoch = 0
        while number >= len(self._epoch(epoch)):
            number -= len(self._epoch(epoch))
            epoch += 1
        return collate([[self.pieces[index] for index in row] for row in self._epoch(epoch)[number]])

    def _epoch(self, epoch: int) -> list[list[Row]]:
        if epoch not in self._epochs:
            for old in [known for known in self._epochs if 0 < known < epoch - 1]:
                del self._epochs[old]
            self._epochs[epoch] = self._arrange(epoch)
        return self._epochs[epoch]

    def _arrange(self, epoch: int) -> list[list[Row]]:
        """Batches of all pieces: shuffle the pieces, sort pools of them by length, shuffle the batches."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.pieces), generator=generator).tolist()
        lengths = [len(piece.tokens) for piece in self.pieces]
        rows = self._rows(order, lengths)
        sizes = {row: sum(lengths[index] for index in row) for row in rows}
        pool = _POOL * self._rows_of_full_length
        batches: list[list[Row]] = []
        for start in range(0, len(rows), pool):
            batches += self._fill(sorted(rows[start : start + pool], key=sizes.__getitem__), sizes)
        return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]

    def _rows(self, order: Sequence[int], lengths: Sequence[int]) -> list[Row]:
        """One piece per row, or with `join` as many as fit."""
        if not self.join:
            return [(index,) for index in order]
        rows: list[list[int]] = []
        free: list[int] = []
        for index in order:
            open_rows = range(max(0, len(rows) - _OPEN_ROWS), len(rows))
            row = next((row for row in open_rows if free[row] >= lengths[index]), len(rows))
            if row == len(rows):
                rows.append([])
                free.append(self.length)
            rows[row].append(index)
            free[row] -= lengths[index]
        return [tuple(row) for row in rows]

    def _fill(self, sorted_rows: Sequence[Row], sizes: Mapping[Row, int]) -> list[list[Row]]:
        """Batches that have at most `tokens` tokens with their padding."""
        batches: list[list[Row]] = [[]]
        for row in sorted_rows:
            if batches[-1] and (len(batches[-1]) + 1) * sizes[row] > self._tokens:
                batches.append([])
            batches[-1].append(row)
        return batches

    def held_out_batches(self, most: int) -> list[TokenBatch]:
        """The first `most` held-out pieces."""
        pieces = self.held_out[:most]
        lengths = [len(piece.tokens) for piece in pieces]
        rows = self._rows(range(len(pieces)), lengths)
        rows.sort(key=lambda row: sum(lengths[index] for index in row))
        texts = [[pieces[index] for index in row] for row in rows]
        count = self._rows_of_full_length
        return [collate(texts[start : start + count]) for start in range(0, len(texts), count)]

    def frequent(self, count: int, always: Iterable[int] = ()) -> list[int]:
        """The `count` most frequent tokens that the target wrote, sorted by id, with those in `always` among them."""
        counts: Counter[int] = Counter()
        for piece in self.pieces:
            counts.update(piece.tokens[piece.prompt :])
        first = list(dict.fromkeys([*always, *(token for token, _ in counts.most_common())]))
        return sorted(first[:count])


def _pieces(text: Text, length: int) -> list[Text]:
    """Pieces of a text. The last one may be shorter than `length`; a piece that is too short is left out."""
    pieces = []
    for start in range(0, len(text.tokens), length):
        tokens = text.tokens[start : start + length]
        prompt = min(max(0, text.prompt - start), len(tokens))
        if len(tokens) >= _SHORTEST and len(tokens) - prompt >= 2:
            pieces.append(Text(tokens, prompt))
    return pieces


def collate(rows: Sequence[Sequence[Text]]) -> TokenBatch:
    """Each row holds its texts one after the other. The first token of a later text does not follow from the text
    before it, so it is not learned."""
    longest = max(sum(len(text.tokens) for text in row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    learn = torch.zeros(len(rows), longest, dtype=torch.bool)
    for index, row in enumerate(rows):
        start = 0
        for text in row:
            end = start + len(text.tokens)
            ids[index, start:end] = torch.tensor(text.tokens)
            learn[index, start + max(text.prompt, int(start > 0)) : end] = True
            start = end
    return TokenBatch(ids, learn)
