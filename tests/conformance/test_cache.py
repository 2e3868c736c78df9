"""Cache equality: after any sequence of reading, keeping, releasing and admitting, the logits are those of the model.

Every logit of every pass is compared with a fresh forward of transformers, without a cache, over the very text (and
path of scratch tokens) it stands for. The bounds are those of models.py, `Case.tolerance`.
"""

from __future__ import annotations

import random
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from paceline import LanguageModel
from paceline.models import reader as model_reader

from .models import CASES, CONTEXT, VOCABULARY, Case, target
from .trees import depths_of, paths_of, random_parents

ROUNDS = 9
ROOM = 24  # the smallest room a test asks for, so that the cache has to grow


class Texts:
    """Rows as a reader sees them (`core.contracts.RowsView`), changed by hand."""

    bound: int | None = None

    def __init__(self) -> None:
        self.histories: list[list[int]] = []
        self._sync()

    @property
    def capacity(self) -> int:
        return self.count

    @property
    def room(self) -> int:
        return max(self.lengths)

    def _sync(self) -> None:
        self.lengths = [len(row) for row in self.histories]
        self.length = torch.tensor(self.lengths, dtype=torch.int64).view(-1, 1)
        wide = max(self.lengths, default=0) + 16
        # past its end a text holds anything, as in the engine
        self.text = torch.tensor([row + [VOCABULARY - 1] * (wide - len(row)) for row in self.histories])

    @property
    def count(self) -> int:
        return len(self.histories)

    def admit(self, new: list[list[int]]) -> int:
        self.histories += [list(text) for text in new]
        self._sync()
        return self.count - len(new)

    def release(self, row: int) -> None:
        self.histories[row] = self.histories[-1]
        del self.histories[-1]
        self._sync()

    def commit(self, new: list[list[int]]) -> None:
        for text, more in zip(self.histories, new, strict=True):
            text += more
        self._sync()


class Reality:
    """The model itself: logits after a text, from a fresh forward. Prefixes come for free, so they are remembered."""

    def __init__(self, lm: LanguageModel, case: Case) -> None:
        self._model, self._tolerance = lm.model, case.tolerance
        self._known = lru_cache(maxsize=None)(self._forward)
        self.worst = 0.0

    def _forward(self, text: tuple[int, ...]) -> Tensor:
        return self._model(input_ids=torch.tensor([text]), use_cache=False).logits[0]

    def check(self, got: Tensor, text: list[int], what: str) -> None:
        error = float((got - self._known(tuple(text))[-1]).abs().max())
        self.worst = max(self.worst, error)
        assert error < self._tolerance, f"{what}: logits are off by {error:.2e}"


class Journey:
    """One random sequence of everything a reader may be asked to do."""

    def __init__(self, name: str, seed: int) -> None:
        self.dice = random.Random(f"{name} {seed}")
        self.lm = target(name)
        self.rows, self.reader = Texts(), self.lm.reader()
        self.reality = Reality(self.lm, CASES[name])
        self.width = 1

    def tokens(self, count: int) -> list[int]:
        return [self.dice.randrange(VOCABULARY) for _ in range(count)]

    def admit(self, lengths: list[int]) -> None:
        first = self.rows.admit([self.tokens(length) for length in lengths])
        self.width = self.reader.begin(self.rows, first, ROOM)

    def release(self) -> None:
        row, last = self.dice.randrange(self.rows.count), self.rows.count - 1
        self.reader.release(row, last, self.rows.lengths[last])
        self.rows.release(row)

    def round(self) -> None:
        kind = self.dice.choice(["plain", "chain", "chain in steps", "tree", "tree in steps"])
        nodes = 0 if kind == "plain" else self.dice.randint(1, 9)
        drafted = torch.tensor([self.tokens(nodes) for _ in range(self.rows.count)], dtype=torch.int64)
        branches = "tree" in kind
        parents = [
            random_parents(nodes, self.dice) if branches else list(range(-1, nodes - 1)) for _ in range(self.rows.count)
        ]
        above = torch.tensor(parents, dtype=torch.int64).view(-1, nodes) if branches else None
        # once it is settled what has to be read, some of the text may be read again
        width = self.width if self.width > 1 else self.dice.randint(1, min(3, *self.rows.lengths, 3))
        if kind == "plain":
            logits = self.reader.extend(self.rows, width).logits
        elif "steps" in kind:
            logits = self._in_steps(width, drafted, above)
        else:
            logits = self.reader.extend(self.rows, width, drafted, above).logits
        self.width = 1
        self._compare(logits, drafted.tolist(), parents, kind)
        self._keep(drafted.tolist(), parents, branches)

    def _in_steps(self, width: int, drafted: Tensor, above: Tensor | None) -> Tensor:
        """As a draft model grows its draft: first the text, then one or two scratch tokens at a time."""
        pieces = [self.reader.extend(self.rows, width).logits]
        start, nodes = 0, drafted.shape[1]
        while start < nodes:
            stop = min(nodes, start + self.dice.randint(1, 3))
            part = None if above is None else above[:, start:stop]
            pieces.append(self.reader.extend(self.rows, 0, drafted[:, start:stop], part).logits)
            start = stop
        return torch.cat(pieces, 1)

    def _compare(self, logits: Tensor, drafted: list[list[int]], parents: list[list[int]], kind: str) -> None:
        for row, text in enumerate(self.rows.histories):
            self.reality.check(logits[row, 0], text, f"{kind}, the text of row {row}")
            for node, path in enumerate(paths_of(parents[row])):
                continued = text + [drafted[row][n] for n in path]
                self.reality.check(
                    logits[row, node + 1], continued, f"{kind}, row {row}, node {node} of {parents[row]}"
                )

    def _keep(self, drafted: list[list[int]], parents: list[list[int]], branches: bool) -> None:
        """A random path of every row is accepted, from nothing to a whole branch, then a token of the target's own."""
        paths = [self.dice.choice([[], *paths_of(above)]) for above in parents]
        deepest = max((max(depths_of(above), default=-1) + 1 for above in parents), default=0)
        padded = torch.tensor([path + [0] * (deepest - len(path)) for path in paths]).view(len(paths), deepest)
        self.reader.keep(self.rows, padded if branches else None)
        own = self.tokens(len(paths))
        self.rows.commit(
            [[drafted[row][node] for node in path] + [own[row]] for row, path in enumerate(paths)],
        )

    def settle(self) -> None:
        """The cache at the end agrees with the texts."""
        logits = self.reader.extend(self.rows, self.width).logits
        self.reader.keep(self.rows, None)
        for row, text in enumerate(self.rows.histories):
            self.reality.check(logits[row, -1], text, f"at the end, row {row}")


@pytest.mark.parametrize(
    ("seed", "chunk"),
    [(0, 1024), pytest.param(1, 3, marks=pytest.mark.slow),
     *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in ((1, 1024), (0, 3), (2, 1024), (2, 3)))],
)  # fmt: skip
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_a_reader_says_what_the_model_says(name: str, seed: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_reader, "CHUNK", chunk)
    journey = Journey(name, seed)
    journey.admit([7, 7] if seed % 2 else [4, 1, 9])
    for step in range(ROUNDS):
        journey.round()
        if step % 4 == 1:
            journey.release()
        if step % 4 == 2:
            journey.admit([journey.dice.choice([1, 2, 8]) for _ in range(journey.dice.randint(1, 2))])
        if max(journey.rows.lengths) > CONTEXT - 12:
            break
    journey.settle()


@torch.inference_mode()
def test_a_tree_may_grow_out_of_a_chain() -> None:
    """The contract of `Reader.extend`: scratch tokens are numbered since the last keep; parents point among them."""
    journey = Journey("gemma3", 9)
    journey.admit([6, 3])
    drafted = torch.tensor([journey.tokens(5) for _ in range(2)])
    parents = [-1, 0, 1, 0, 3]
    first = journey.reader.extend(journey.rows, 1, drafted[:, :2]).logits
    above = torch.tensor([parents[2:], parents[2:]])
    second = journey.reader.extend(journey.rows, 0, drafted[:, 2:], above).logits
    journey._compare(torch.cat([first, second], 1), drafted.tolist(), [parents, parents], "chain, then tree")
    journey._keep(drafted.tolist(), [parents, parents], True)
    journey.settle()
