"""Draft with a trigram model (Spector & Ré 2023, arXiv 2308.04623; Katz 1987)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.common.errors import InputError, LoadError, UnsupportedError, shown
from paceline.common.text_formats import parse_json
from paceline.core.contracts import DRAFTERS, Budget, Reading, RowsView
from paceline.core.protocols import Replayable
from paceline.core.tree import TokenTree
from paceline.core.tree_growth import Expand, Grower, TreeOptions
from paceline.core.verdict import Verdict
from paceline.drafters.heads.head_files import warn_of_other_weights
from paceline.drafters.lookup.base import HostDrafter
from paceline.drafters.shipped import made_for, shipped, weights_of
from paceline.models.loading.weight_check import reading

# ---- A Katz back-off trigram model: trained by counting, stored in sorted arrays, mapped into memory

_FORMAT = "paceline-trigram-1"
_ARRAYS = ("unigram", "keys2", "starts2", "tokens2", "logs2", "open2", "keys3", "starts3", "tokens3", "logs3", "open3")
_SMALL = 5  # Katz: larger counts are not discounted
_LEAST = 0.1  # added to the count of every unigram, so that no token has probability 0

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class _Level:
    """The n-grams of one order. keys [K]: the contexts, sorted. The followers of context i are the tokens and the
    log-probabilities starts[i]:starts[i+1]. open [K]: the log of the back-off weight of each context."""

    keys: Array
    starts: Array
    tokens: Array
    logs: Array
    open: Array

    def check(self, vocabulary: int) -> None:
        """Raise ValueError if the arrays of a file do not fit together or hold values that are not tokens."""
        keys, starts, tokens = self.keys, self.starts, self.tokens
        whole = all(array.ndim == 1 and array.dtype.kind in "iu" for array in (keys, starts, tokens))
        if not whole or self.logs.shape != tokens.shape or self.open.shape != keys.shape:
            raise ValueError("its arrays do not fit together")
        if (
            len(starts) != len(keys) + 1
            or starts[0] != 0
            or starts[-1] != len(tokens)
            or (starts[1:] < starts[:-1]).any()
        ):
            raise ValueError("its followers do not fit its contexts")
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise ValueError(f"it names tokens outside its vocabulary of {vocabulary}")

    def find(self, key: int) -> tuple[slice, float] | None:
        at = int(self.keys.searchsorted(key))
        if at == len(self.keys) or self.keys[at] != key:
            return None
        return slice(int(self.starts[at]), int(self.starts[at + 1])), float(self.open[at])


@dataclass
class TrigramTable:
    """P(w | u v): discounted if u v w was counted; the rest of the probability is distributed like P(w | v)."""

    vocabulary: int
    unigram: Array  # [V] log-probabilities
    pairs: _Level
    triples: _Level
    _best: dict[tuple[int, ...], int] = field(default_factory=dict)

    def logits(self, words: Sequence[int]) -> Tensor:
        """Return the float32 log-probabilities [V] of the next token after the last two of `words`."""
        return torch.from_numpy(self._row(words, np.empty(self.vocabulary, dtype=np.float32)))

    def law(self, words: Sequence[int]) -> Tensor:
        """Return the float64 probabilities [V] of the next token after the last two of `words`. Their sum is 1."""
        return torch.from_numpy(self._row(words, np.empty(self.vocabulary))).exp()

    def _row(self, words: Sequence[int], row: Array) -> Array:
        """Fill `row` with the log-probabilities of unigrams, then with those of known pairs and triples; return it."""
        pair = self.pairs.find(int(words[-1])) if len(words) else None
        triple = self.triples.find(int(words[-2]) * self.vocabulary + int(words[-1])) if len(words) > 1 else None
        left = triple[1] if triple else 0.0
        np.add(self.unigram, left + (pair[1] if pair else 0.0), out=row, casting="same_kind")
        if pair is not None:
            row[self.pairs.tokens[pair[0]]] = self.pairs.logs[pair[0]] + left
        if triple is not None:
            row[self.triples.tokens[triple[0]]] = self.triples.logs[triple[0]]
        return row

    def best(self, words: Sequence[int]) -> int:
        """Return the likeliest next token, from a cache."""
        key = tuple(words[-2:])
        if key not in self._best:
            self._best[key] = int(self.logits(key).argmax())
        return self._best[key]

    def save(self, path: str | os.PathLike[str]) -> None:
        pairs, triples = self.pairs, self.triples
        arrays = (self.unigram, pairs.keys, pairs.starts, pairs.tokens, pairs.logs, pairs.open,
                  triples.keys, triples.starts, triples.tokens, triples.logs, triples.open)  # fmt: skip
        tensors = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in zip(_ARRAYS, arrays, strict=True)}
        about = {"format": _FORMAT, "about": json.dumps({"vocabulary": self.vocabulary, "triples": len(triples.logs)})}
        beside = Path(f"{os.fspath(path)}.{os.getpid()}.part")  # another process never reads an incomplete file
        save_file(tensors, beside, about)
        beside.replace(path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> TrigramTable:
        """Return the table of a file. The arrays are mapped into memory: unused parts are not read."""
        with reading("The trigram model", path):
            with safe_open(os.fspath(path), "pt") as file:
                about = file.metadata() or {}
                if about.get("format") != _FORMAT:
                    raise LoadError(f"{path} is not a trigram model; make one with train_trigram(...).save(path).")
                arrays = [file.get_tensor(name).numpy() for name in _ARRAYS]
            vocabulary = parse_json(about["about"])["vocabulary"]
            if type(vocabulary) is not int or arrays[0].shape != (vocabulary,):
                raise ValueError(f"its vocabulary is {shown(vocabulary)}, with {len(arrays[0])} unigrams")
            pairs, triples = _Level(*arrays[1:6]), _Level(*arrays[6:])
            for level in (pairs, triples):
                level.check(vocabulary)
        return TrigramTable(vocabulary, arrays[0], pairs, triples)


# ---- training


def train_trigram(sequences: Iterable[Sequence[int]], vocabulary: int, least: int = 1) -> TrigramTable:
    """Return a model trained by counting. sequences: texts as token ids, from files (`read_texts`) or from a model
    (`own_samples`). least: pairs and triples with a smaller count are ignored, for a smaller table."""
    texts = [np.asarray(list(text), dtype=np.int64) for text in sequences]
    texts = [text for text in texts if len(text)]
    for text in texts:
        if text.min() < 0 or text.max() >= vocabulary:
            raise InputError(f"A text has token {text.max()}, outside the vocabulary of {vocabulary}.")
    all_tokens = np.concatenate(texts) if texts else np.zeros(0, dtype=np.int64)
    counts = np.bincount(all_tokens, minlength=vocabulary) + _LEAST
    unigram = np.log(counts / counts.sum())
    pairs, triples = [], []
    for text in texts:
        pairs.append(text[:-1] * vocabulary + text[1:])
        triples.append(pairs[-1][:-1] * vocabulary + text[2:])
    keys, second = _level(pairs, vocabulary, least, lambda keys: unigram[keys % vocabulary])
    # if u v w was counted, v w was counted too, so the shorter n-gram is in the table of pairs
    place = lambda grams: keys.searchsorted(grams % (vocabulary * vocabulary))  # noqa: E731
    _, third = _level(triples, vocabulary, least, lambda grams: second.logs[place(grams)])
    return TrigramTable(vocabulary, unigram, second, third)


def _level(grams: list[Array], vocabulary: int, least: int, below: Callable[[Array], Array]) -> tuple[Array, _Level]:
    """Return the sorted distinct n-grams, and their level. `below` returns log-probabilities with a shorter context."""
    every = np.concatenate(grams) if grams else np.zeros(0, dtype=np.int64)
    keys, counts = np.unique(every, return_counts=True)
    keys, counts = keys[counts >= least], counts[counts >= least]
    contexts, starts = np.unique(keys // vocabulary, return_index=True)
    if not len(keys):
        none = np.zeros(0)
        return keys, _Level(keys, np.zeros(1, dtype=np.int64), keys.astype(np.int32), none, none)
    sizes = np.diff(np.append(starts, len(keys)))

    def total(values: Array) -> Array:
        """Return [K]: the sum over the followers of each context."""
        return np.add.reduceat(values.astype(np.float64), starts)

    share = _discounted(counts) / total(counts).repeat(sizes)
    rest = 1.0 - total(np.exp(below(keys)))  # the probability that shorter contexts give to all other tokens
    full = (rest < 1e-9) | (sizes == vocabulary)  # there are no other tokens
    seen = total(share)
    wanted = np.where(full, 1.0, np.minimum(seen, total(counts) / (total(counts) + 0.5)))  # else < 1
    logs = np.log(share * (wanted / seen).repeat(sizes))
    left = 1.0 - total(np.exp(logs))
    safe = np.where(full, 1.0, rest)
    weight = np.where(full, 0.0, np.log(np.maximum(left, 1e-300) / safe))
    return keys, _Level(contexts, np.append(starts, len(keys)), (keys % vocabulary).astype(np.int32), logs, weight)


def _discounted(counts: Array) -> Array:
    """Return discounted counts: by Good-Turing for small counts, as in Katz. If the text is too small for Good-Turing,
    all counts get absolute discounting."""
    n = np.bincount(np.minimum(counts, _SMALL + 2), minlength=_SMALL + 3)[: _SMALL + 2].astype(np.float64)
    r = np.arange(1, _SMALL + 1)
    common = (_SMALL + 1) * n[_SMALL + 1] / max(n[1], 1.0)
    if (n[1:] > 0).all() and common < 1:
        ratio = ((r + 1) * n[2:] / (r * n[1:-1]) - common) / (1 - common)
        if ((ratio > 0) & (ratio < 1)).all():
            table = np.concatenate([[1.0], ratio])
            return np.where(counts <= _SMALL, table[np.minimum(counts, _SMALL)], 1.0) * counts
    constant = n[1] / (n[1] + 2 * n[2]) if n[1] else 0.5
    return counts - min(max(constant, 0.1), 0.9)


def read_texts(paths: Iterable[str | os.PathLike[str]], tokenizer: Any) -> Iterator[list[int]]:
    """Yield the token ids of each text file."""
    for path in paths:
        yield list(tokenizer.encode(Path(path).read_text(encoding="utf-8"), add_special_tokens=False))


def own_samples(generate: Callable[[Any], Any], prompts: Iterable[Any]) -> Iterator[list[int]]:
    """Yield the token ids of each prompt with the text that a model writes after it. generate: the method of a decoder,
    or a function whose result has `tokens` and `prompt_tokens`. Training on such texts gives a higher acceptance."""
    for prompt in prompts:
        written = generate(prompt)
        for text in written if isinstance(written, list) else [written]:
            yield [*text.prompt_tokens, *text.tokens]


# ---- The drafter


@DRAFTERS.register("trigram")
class Trigram(Replayable, HostDrafter[TrigramTable]):
    """Draft with a trigram model, trained on texts or on the target's own samples, else on the prompt."""

    @dataclass(frozen=True)
    class Options(TreeOptions):
        file: str | None = None  # a model written by train_trigram(...).save(path)
        table: Any = None  # or a TrigramTable; without both, the shipped model, else one trained on the prompt

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.file is not None and self.table is not None:
                raise InputError("A trigram model is given by file or by table; leave one of them out.")
            if self.table is not None and not isinstance(self.table, TrigramTable):
                raise InputError(f"table must be a TrigramTable, got {type(self.table).__name__}.")

        @classmethod
        def conformance_variants(cls) -> list[dict[str, Any]]:
            """Return options with a small table for the target."""

            def trained(lm: Any) -> TrigramTable:
                texts = torch.randint(0, lm.vocabulary, (12, 60), generator=torch.Generator().manual_seed(1))
                return train_trigram(texts.tolist(), lm.vocabulary)

            return [{"table": trained}, {"table": trained, "tree": "best-first"}]

    def __init__(self, options: Options | None = None) -> None:
        self.options = options = options or self.Options()
        self._given: TrigramTable | None = options.table
        self._file = options.file
        if options.file is not None:
            self._given = TrigramTable.load(options.file)
        self._grower = Grower(options)

    def describe(self) -> str:
        shape = "" if self.options.tree == "chain" else f", tree {self.options.tree}"
        return f"trigram {'of the prompt' if self._given is None else self.options.file or 'table'}{shape}"

    def reset_copy(self) -> Trigram:
        return Trigram(replace(self.options, file=None, table=self._given))

    def check(self, target: Any) -> None:
        if self._given is None and self.name in shipped(target):
            self._file = weights_of(self.name, shipped(target)[self.name])["file"]
            self._given = TrigramTable.load(self._file)
        if self._given is not None and self._given.vocabulary != target.vocabulary:
            raise UnsupportedError(
                f"The trigram model has {self._given.vocabulary} tokens and {target.name} has {target.vocabulary}; "
                "train one with the target's tokenizer."
            )
        trained_on = None if self._file is None else made_for(self.name, Path(self._file).parent)
        if trained_on is not None:
            warn_of_other_weights(self.name, trained_on, target)

    def open(self, target: Any, rows: RowsView) -> None:
        super().open(target, rows)
        self._vocabulary: int = target.vocabulary

    def begin(self, rows: RowsView, row: int) -> TrigramTable:
        """Return the given model, or one trained on the prompt."""
        return self._given or train_trigram([rows.histories[row]], self._vocabulary)

    def reorder(self, rows: RowsView, source: Sequence[int]) -> bool:
        self._grower.reorder(source)
        return True

    def keep(self, rows: RowsView, verdict: Verdict, reading: Reading) -> None:
        self._grower.judged(verdict)  # the grower measures which ranks are accepted

    # ---- drafting

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        first = rows.choice(slice(0, 1))
        plain = not rows.needs_path and (first.batch.deterministic or budget.draw == "certain")
        if plain and self.options.tree == "chain":
            known = zip(self._states, rows.histories, budget.limits, strict=True)
            return TokenTree.from_chains([_likeliest(*each, budget.depth) for each in known], "cpu")
        return self._grower.run(rows, budget, self._expand(rows))

    def _expand(self, rows: RowsView) -> Expand:
        """Return a function that computes logits after the text and after nodes, from the last two tokens."""
        asked: list[list[list[int]]] = [
            [text[-2:]] for text in rows.histories
        ]  # per row: the last two tokens of the text, and of the path to every node

        def expand(tokens: Tensor | None, parents: Tensor | None) -> Tensor:
            start = 0
            if tokens is not None:
                known, above = tokens.tolist(), None if parents is None else parents.tolist()
                start = len(asked[0])
                for row, paths in enumerate(asked):
                    for i, token in enumerate(known[row]):
                        before = paths[-1] if above is None else paths[above[row][i] + 1]
                        paths.append([*before, token][-2:])
            logits = [[self._states[row].logits(path) for path in paths[start:]] for row, paths in enumerate(asked)]
            return torch.stack([torch.stack(of_row) for of_row in logits]).to(rows.text.device)

        return expand


def _likeliest(table: TrigramTable, text: list[int], limit: int, depth: int) -> list[int]:
    """Return the likeliest chain. The table caches the likeliest token, so no logits are computed."""
    words = text[-2:]
    for _ in range(min(limit, depth)):
        words.append(table.best(words[-2:]))
    return words[len(text[-2:]) :]
