"""A whole pass: what transformers says, and bit for bit what the same token alone would have been told."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.conformance.test_cache import Journey, Texts
from tests.conformance.trees import paths_of, random_parents
from tests.kernels.zoo import MODELS, VOCABULARY, Alone, in_float64, reader_of, small
from tests.models.test_early_exit import SplitJourney
from tests.selection import covering
from torch import Tensor

from paceline import LanguageModel
from paceline.models.readers.drafting_ahead import SplitReader

ROUNDS = 7


class Truth:
    """Logits of transformers' own forward, in float32 and in float64; ours differ by this share of the largest."""

    def __init__(self, name: str) -> None:
        self._models = (small(name).model, in_float64(name))
        self.worst = [0.0, 0.0, 0.0]

    def check(self, got: Tensor, text: list[int], what: str) -> None:
        ids = torch.tensor([text])
        near, far = (model(input_ids=ids, use_cache=False).logits[0, -1].double() for model in self._models)
        size = float(far.abs().max())
        pairs = ((got, near), (got, far), (near, far))
        errors = [float((one.double() - other).abs().max()) / size for one, other in pairs]
        self.worst = [max(pair) for pair in zip(self.worst, errors, strict=True)]
        assert errors[0] < 5e-5, f"{what}: off by {errors[0]:.1e} of transformers in float32"
        assert errors[1] < 5e-5, f"{what}: off by {errors[1]:.1e} of the model in float64"


class Rounds(Journey):
    """A journey of the conformance suite on a model of ours: chains, trees, ragged rows that come and go."""

    def __init__(self, lm: LanguageModel, truth: Any, seed: int, threads: int = 1) -> None:
        self.dice = random.Random(f"{lm.name} {seed}")
        self.lm, self.reality, self.width = lm, truth, 1
        self.rows, self.reader = Texts(), reader_of(lm, threads)

    def go(self, first: list[int], later: list[int]) -> None:
        self.admit(first)
        for step in range(ROUNDS):
            self.round()
            if step == 2:
                self.release()
            if step == 3:
                self.admit(later)
        self.settle()


class SplitRounds(SplitJourney, Rounds):
    """The same in two parts: early exit."""

    def __init__(self, lm: LanguageModel, truth: Any, seed: int, threads: int = 1) -> None:
        Rounds.__init__(self, lm, truth, seed)
        self.parted = self.reader = SplitReader(lm, 1)
        assert self.parted.kernels is not None
        self.parted.kernels.threads = threads


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_pass_says_what_transformers_says(name: str, record_property: Any) -> None:
    truth = Truth(name)
    Rounds(small(name), truth, 0).go([4, 1, 9], [6, 2])
    SplitRounds(small(name), truth, 1, threads=2).go([3, 7], [1])
    _, ours, theirs = truth.worst
    record_property("measured", f"{name}: off by {ours:.0e} of float64, transformers' own float32 by {theirs:.0e}")
    assert ours < 3 * theirs


@pytest.mark.parametrize(("name", "threads"), covering(MODELS, [1, 2, 3]))
@torch.inference_mode()
def test_a_row_has_the_bits_of_the_token_alone(name: str, threads: int) -> None:
    """Logits equal row for row: whatever else is in the pass, in chains, trees and ragged batches, on any number of
    threads, whole or in two parts."""
    alone = Alone(small(name))
    Rounds(small(name), alone, threads, threads).go([1, 1, 1], [1, 1])
    SplitRounds(small(name), alone, threads, threads).go([1, 1], [1])


@pytest.mark.parametrize("name", ["llama", "llama-even", "mistral-window", "qwen3"])
@torch.inference_mode()
def test_at_every_number_of_tokens(name: str) -> None:
    lm, dice = small(name), random.Random(5)
    alone, text = Alone(small(name)), [dice.randrange(VOCABULARY) for _ in range(70)]
    for count in [*range(1, 18), 33, 70]:
        rows, reader = Texts(), reader_of(lm, threads=2)
        rows.admit([text[:1]])
        reader.begin(rows, 0, 8)  # too little room: the cache grows
        logits = reader.extend(rows, 1, torch.tensor([text[1:count]]) if count > 1 else None).logits[0]
        for end in range(count):
            alone.check(logits[end], text[: end + 1], f"token {end} of {count}")


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
@torch.inference_mode()
def test_in_batches_of_other_texts_at_other_lengths(name: str) -> None:
    """One text of interest; batch-mates, their lengths and their trees change."""
    lm, alone, dice = small(name), Alone(small(name)), random.Random(6)
    text = [dice.randrange(VOCABULARY) for _ in range(12)]
    tree = [-1, -1, 0, 1, 2, 2]
    drafted = [dice.randrange(VOCABULARY) for _ in tree]
    for mates in range(4):
        place = dice.randrange(mates + 1)
        texts = [[dice.randrange(VOCABULARY) for _ in range(dice.randint(1, 20))] for _ in range(mates)]
        texts.insert(place, text)
        rows, reader = read_by_kernels(lm, texts, 1 + mates % 3)
        parents = [random_parents(len(tree), dice) for _ in texts]
        parents[place] = tree
        fed = [[dice.randrange(VOCABULARY) for _ in tree] for _ in texts]
        fed[place] = drafted
        logits = reader.extend(rows, 1, torch.tensor(fed), torch.tensor(parents)).logits
        for row, (own, above) in enumerate(zip(texts, parents, strict=True)):
            alone.check(logits[row, 0], own, f"text of row {row} of {len(texts)}")
            for node, path in enumerate(paths_of(above)):
                alone.check(logits[row, node + 1], own + [fed[row][n] for n in path], f"node {node} of row {row}")


def read_by_kernels(lm: LanguageModel, texts: list[list[int]], threads: int) -> tuple[Texts, Any]:
    """Rows that hold these texts but for their last token, none of it read by transformers."""
    rows, reader = Texts(), reader_of(lm, threads)
    rows.admit([text[:1] for text in texts])
    reader.begin(rows, 0, 8)
    while rows.histories != texts:
        most = max(len(text) - len(row) for text, row in zip(texts, rows.histories, strict=True))
        width = min(3, most)
        due = [text[len(row) : len(row) + width] for text, row in zip(texts, rows.histories, strict=True)]
        reader.extend(rows, 1, torch.tensor([more + [0] * (width - len(more)) for more in due]))
        reader.keep(rows, None)
        rows.commit(due)
    return rows, reader


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2-windows", "qwen3"])
@torch.inference_mode()
def test_taps_at_every_depth(name: str) -> None:
    """What each layer was given, and after the last what the output head is given; the same bits in any pass."""
    lm = small(name)
    text, drafted = [3, 9, 27, 4, 11], [7, 30, 2]
    taps = (0.0, 1 / 3, 2 / 3, 1.0)
    rows, reader = Texts(), reader_of(lm, 2, taps)
    rows.admit([text])
    reader.begin(rows, 0, 16)
    taps_piece = reader.prompt_taps[0]
    got = reader.extend(rows, 1, torch.tensor([drafted])).taps
    wanted = lm.model(torch.tensor([text + drafted]), output_hidden_states=True).hidden_states
    assert len(got) == 4
    for depth, (tap, read) in enumerate(zip(got, taps_piece.taps, strict=True)):
        torch.testing.assert_close(tap, wanted[depth][:, -4:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(read, wanted[depth][:, :4], rtol=1e-4, atol=1e-5)
    one_by_one = [reader_taps(lm, text + drafted[:count], taps) for count in range(4)]
    for depth in range(4):
        pieces = torch.cat([each[depth] for each in one_by_one], 1)
        assert torch.equal(pieces, reader_taps(lm, text, taps, drafted)[depth])


def reader_taps(lm: LanguageModel, text: list[int], taps: tuple[float, ...], drafted: Any = None) -> tuple[Tensor, ...]:
    rows, reader = Texts(), reader_of(lm, 1, taps)
    rows.admit([text[:1]])
    reader.begin(rows, 0, 16)
    reader.extend(rows, 1, torch.tensor([text[1:]]))
    reader.keep(rows, None)
    rows.commit([text[1:]])
    return reader.extend(rows, 1, None if drafted is None else torch.tensor([drafted])).taps
