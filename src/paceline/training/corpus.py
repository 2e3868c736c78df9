"""Training data: where texts come from, texts on disk as shards of token ids, and batches of pieces of them.

Texts come from the target, a folder that several trainings share, or a file of the user (plain text, or jsonl with
texts, prompts with answers, or conversations). The batches follow from the seed and the step. A part of the texts is
held out. Several pieces can be joined in one row of a batch, in another order in every epoch: most texts are short, and
prompts of real use are long.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.common.errors import InputError
from paceline.common.text_formats import json_lines, parse_json, read_text
from paceline.models.language_model import LanguageModel
from paceline.models.loading.disk_cache import replacing
from paceline.models.loading.weight_check import reading
from paceline.training.train_options import TrainOptions, WritingPlan

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
    """Return the manifest of a folder of texts; {} if there is none."""
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
        """Return the number of shards, which is also the number of the next one."""
        count = 0
        while self._path(count).exists():
            count += 1
        return count

    def _path(self, number: int) -> Path:
        return self.folder / f"shard-{number:05}.safetensors"

    def append(self, texts: Sequence[Text]) -> None:
        """Write one more shard."""
        tensors = {
            "tokens": torch.tensor([token for text in texts for token in text.tokens], dtype=torch.int32),
            "starts": torch.tensor([0, *accumulate(len(text.tokens) for text in texts)], dtype=torch.int64),
            "prompts": torch.tensor([text.prompt for text in texts], dtype=torch.int32),
        }
        with replacing(self._path(len(self)), "The texts ", "the texts before them are intact") as part:
            save_file(tensors, part)

    def texts(self) -> Iterator[Text]:
        """Yield all texts, in the order of writing."""
        for number in range(len(self)):
            with reading("The texts in", self._path(number)):
                with safe_open(self._path(number), "pt") as file:
                    tokens, starts, prompts = (file.get_tensor(name) for name in ("tokens", "starts", "prompts"))
                if any(t.ndim != 1 or t.is_floating_point() or (t < 0).any() for t in (tokens, starts, prompts)):
                    raise ValueError("its tokens, starts or prompts are no list of whole numbers")
                fits = len(starts) == len(prompts) + 1 and starts[0] == 0 and starts[-1] == len(tokens)
                if not fits or (starts.diff() < prompts).any():
                    raise ValueError(
                        f"its {len(starts)} edges do not fit its {len(tokens)} tokens and {len(prompts)} prompts"
                    )
            ids = tokens.tolist()
            for (start, stop), prompt in zip(pairwise(starts.tolist()), prompts.tolist(), strict=True):
                yield Text(ids[start:stop], prompt)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file completely or not at all."""
    with replacing(path) as part:
        part.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")


# ---- Batches of pieces of texts

Row = list[Text]  # pieces that follow each other in a row of a batch
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
    """Pieces of at most `length` tokens. One piece in `held` is held out and never trained on."""

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
        """The number of batches in the first epoch; other epochs have a few more or less."""
        return len(self._epoch(0))

    def batch(self, number: int) -> TokenBatch:
        """Return batch `number`, counted through all epochs."""
        epoch = 0
        while number >= len(self._epoch(epoch)):
            number -= len(self._epoch(epoch))
            epoch += 1
        return collate(self._epoch(epoch)[number])

    def _epoch(self, epoch: int) -> list[list[Row]]:
        if epoch not in self._epochs:
            for old in [known for known in self._epochs if 0 < known < epoch - 1]:
                del self._epochs[old]
            self._epochs[epoch] = self._arrange(epoch)
        return self._epochs[epoch]

    def _arrange(self, epoch: int) -> list[list[Row]]:
        """Return batches of all pieces: shuffle the pieces, sort pools of them by length, shuffle the batches."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.pieces), generator=generator).tolist()
        rows = self._rows([self.pieces[index] for index in order])
        pool = _POOL * self._rows_of_full_length
        batches: list[list[Row]] = []
        for start in range(0, len(rows), pool):
            batches.append([])
            for row in sorted(rows[start : start + pool], key=_size):
                if batches[-1] and (len(batches[-1]) + 1) * _size(row) > self._tokens:
                    batches.append([])
                batches[-1].append(row)
        return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]

    def _rows(self, pieces: Sequence[Text]) -> list[Row]:
        """Return rows with one piece each, or with `join` as many pieces as fit."""
        if not self.join:
            return [[piece] for piece in pieces]
        rows: list[Row] = []
        for piece in pieces:
            room = self.length - len(piece.tokens)
            row = next((row for row in rows[-_OPEN_ROWS:] if _size(row) <= room), None)
            if row is None:
                rows.append([piece])
            else:
                row.append(piece)
        return rows

    def held_out_batches(self, most: int) -> list[TokenBatch]:
        """Return the first `most` held-out pieces in batches."""
        rows, count = sorted(self._rows(self.held_out[:most]), key=_size), self._rows_of_full_length
        return [collate(rows[start : start + count]) for start in range(0, len(rows), count)]

    def frequent(self, count: int, always: Iterable[int] = ()) -> list[int]:
        """The `count` most frequent tokens that the target wrote, sorted by id, with those in `always` among them."""
        counts = Counter(token for piece in self.pieces for token in piece.tokens[piece.prompt :])
        first = list(dict.fromkeys([*always, *(token for token, _ in counts.most_common())]))
        return sorted(first[:count])


def _size(row: Row) -> int:
    return sum(len(piece.tokens) for piece in row)


def _pieces(text: Text, length: int) -> list[Text]:
    """Return pieces of a text. The last one may be shorter than `length`; a piece that is too short is left out."""
    pieces = []
    for start in range(0, len(text.tokens), length):
        tokens = text.tokens[start : start + length]
        prompt = min(max(0, text.prompt - start), len(tokens))
        if len(tokens) >= _SHORTEST and len(tokens) - prompt >= 2:
            pieces.append(Text(tokens, prompt))
    return pieces


def collate(rows: Sequence[Row]) -> TokenBatch:
    """Return a batch whose rows hold their texts one after the other. The first token of a later text does not follow
    from the text before it, so it is not learned."""
    longest = max(map(_size, rows))
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


# ---- Where texts come from

_ANSWERS = ("answer", "completion", "response", "output")
_PROMPTS = ("prompt", "question", "instruction")
_WRITING = {"style", "temperatures", "question", "answer", "shard"}  # options that change the texts
_NOT_IN_MANIFEST = ("tokens", "rows")  # options that do not change a text
_PART = 1 << 16  # characters of a plain text that are tokenized at once: tokenizers are slow on megabytes


@dataclass(frozen=True)
class TextSource:
    """The texts follow from `plan` (the target writes them), or from `data` (a file). If both are None, the texts are
    in the folder. `about`: what the manifest of the folder must contain."""

    about: dict[str, Any]
    plan: WritingPlan | None = None
    data: Path | None = None


def source_of(
    options: TrainOptions, manifest: Mapping[str, Any], lm: LanguageModel, given: Collection[str] | None = None
) -> TextSource:
    """Return where the texts come from. manifest: of the folder of shared texts, or {}. given: the options that the
    user set, which may contradict the manifest; None takes those that differ from their defaults."""
    if given is None:
        given = [field.name for field in fields(options) if getattr(options, field.name) != field.default]
    is_set = set(given)
    if options.data is not None:
        return TextSource({"data": str(Path(options.data).resolve())}, data=Path(options.data))
    if "data" in manifest and not is_set & _WRITING:
        return TextSource({"data": manifest["data"]})
    # The options of the shared texts hold, except those that the user set. The seed of the texts is always theirs;
    # --seed is then for weights and order only.
    names = {field.name for field in fields(WritingPlan)} & manifest.keys() - {"rows"} - (is_set & {*_WRITING, WANTED})
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value := manifest[name], list) else value for name in names
    }
    plan = replace(options.writing_plan(), **values).resolve_style(lm)
    return TextSource({name: value for name, value in asdict(plan).items() if name not in _NOT_IN_MANIFEST}, plan)


# ---- Files of the user


def read_data(path: Path, lm: LanguageModel) -> list[Text]:
    """Return the texts of a file as token ids. An error names the line that cannot be used."""
    if lm.tokenizer is None:
        raise InputError(f"{lm.name} has no tokenizer, so '{path}' cannot be read for it; load it with one.")
    content = read_text(path, "The data")
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        lines = json_lines(content, path)
        texts = [_text_of_entry(entry, f"Line {number} of '{path}'", lm) for number, entry in lines]
    else:
        texts = [Text(_encode(part, lm)) for part in _parts(content)]
    texts = [text for text in texts if text.tokens]
    if not texts:
        raise InputError(f"The data '{path}' are empty; give a file with at least a few texts.")
    return texts


def _encode(text: str, lm: LanguageModel) -> list[int]:
    return list(lm.tokenizer.encode(text, add_special_tokens=False))


def _parts(content: str) -> Iterator[str]:
    """Yield a plain text in large parts, cut at the ends of lines."""
    part = ""
    for line in content.splitlines(keepends=True):
        part += line
        if len(part) > _PART:
            yield part
            part = ""
    yield part


def _text_of_entry(entry: Any, where: str, lm: LanguageModel) -> Text:
    if isinstance(entry, str):
        entry = {"text": entry}
    if not isinstance(entry, Mapping):
        raise InputError(f"{where} is neither an object nor a text.")
    for name in ("messages", "conversations"):
        if isinstance(entry.get(name), list):
            return _conversation(entry[name], where, lm)
    if isinstance(entry.get("text"), str):
        return Text(_encode(entry["text"], lm))
    prompt = next((entry[name] for name in _PROMPTS if isinstance(entry.get(name), str)), None)
    answer = next((entry[name] for name in _ANSWERS if isinstance(entry.get(name), str)), None)
    if prompt is None or answer is None:
        raise InputError(f"{where} has neither 'text', nor 'messages', nor a 'prompt' with an 'answer'.")
    if getattr(lm.tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        return _conversation(turns, where, lm)
    prompt_ids = list(lm.tokenizer.encode(prompt))
    return Text(prompt_ids + _encode(answer, lm), len(prompt_ids))


def _conversation(messages: list[Any], where: str, lm: LanguageModel) -> Text:
    """Return a conversation as a text. The turns before the first answer are its prompt."""
    turns = [_turn(message, where) for message in messages]
    if not getattr(lm.tokenizer, "chat_template", None):
        raise InputError(f"{where} is a conversation, and {lm.name} has no chat template; give plain texts.")
    first = next((index for index, turn in enumerate(turns) if turn["role"] == "assistant"), None)
    if first is None:
        raise InputError(f"{where} has no answer of the assistant to learn from.")
    try:
        render = partial(lm.tokenizer.apply_chat_template, tokenize=False)
        before, whole = render(turns[:first], add_generation_prompt=True), render(turns, add_generation_prompt=False)
    except Exception as error:  # templates are programs and fail in their own ways
        raise InputError(f"{where} does not fit the chat template of {lm.name}: {error}.") from error
    prompt = before if whole.startswith(before) else ""
    prompt_ids = _encode(prompt, lm) if prompt else []
    return Text(prompt_ids + _encode(whole[len(prompt) :], lm), len(prompt_ids))


def _turn(message: Any, where: str) -> dict[str, str]:
    """Return a message with a role and a content, also from the names of ShareGPT."""
    if isinstance(message, Mapping):
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        role = {"human": "user", "gpt": "assistant"}.get(str(role), role)
        if isinstance(role, str) and isinstance(content, str):
            return {"role": role, "content": content}
    raise InputError(f"{where} has a message without a role and a content.")
