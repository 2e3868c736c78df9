"""The Katz model: its laws are laws, it believes what it counted, and a file holds the same table."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.toys import letters, llama, naive

from paceline import InputError, LanguageModel, LoadError, SpeculativeDecoder, UnsupportedError
from paceline.drafters.lookup.trigram import Trigram, TrigramTable, own_samples, read_texts, train_trigram


def chatter(count: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Texts of frequent and rare words."""
    dice = random.Random(seed)
    return [[min(int(dice.expovariate(0.3)), vocabulary - 1) for _ in range(dice.randint(1, 90))] for _ in range(count)]


@pytest.mark.parametrize(
    ("texts", "vocabulary"),
    [
        (chatter(60, 12), 12),  # small counts and large ones
        (chatter(400, 40), 40),  # enough for Good and Turing
        (chatter(3, 300), 300),
        ([[0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1]], 2),  # every pair that can be was seen often
        ([[0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0]], 2),  # every triple
        ([[3]], 5),
        ([], 5),
    ],
)
def test_every_law_sums_to_one(texts: list[list[int]], vocabulary: int) -> None:
    """Back-off weights that are not normalised make a law that sums to .9 or 1.2, and ratio rules judge wrongly."""
    table = train_trigram(texts, vocabulary)
    contexts = [
        [],
        *([v] for v in range(vocabulary)),
        *(text[i : i + 2] for text in texts[:40] for i in range(len(text))),
    ]
    contexts += [[vocabulary - 1, 0], [0, vocabulary - 1]]
    for words in contexts:
        law = table.law(words)
        assert law.shape == (vocabulary,)
        assert float(law.min()) >= 0
        assert abs(float(law.sum()) - 1) < 1e-9, words
        assert torch.allclose(table.logits(words).double().exp(), law, atol=1e-6)


def test_seen_trigrams_are_discounted_and_the_rest_backs_off() -> None:
    table = train_trigram([[1, 2, 3], [1, 2, 3], [1, 2, 4], [5, 2, 6]], 10)
    after = table.law([1, 2])
    assert float(after[3]) > float(after[4]) > float(after[6]) > float(after[7]) > 0
    assert float(after[3]) < 2 / 3  # discounted
    alone = table.law([2])
    # 6 and 7 were never seen after 1 2: they keep their proportion after 2
    assert float(after[6] / after[7]) == pytest.approx(float(alone[6] / alone[7]))
    assert torch.equal(table.law([9, 2]), alone)  # an unknown pair of words: the shorter context
    assert table.best([1, 2]) == 3


def test_a_file_says_what_the_table_said(tmp_path: Path) -> None:
    table = train_trigram(chatter(50, 40), 40)
    table.save(tmp_path / "t.safetensors")
    again = TrigramTable.load(tmp_path / "t.safetensors")
    for words in ([], [3], [1, 2], [0, 0], [39, 39]):
        assert torch.equal(again.law(words), table.law(words))
    lm = LanguageModel(llama())
    out = SpeculativeDecoder(lm, "trigram", options={"file": str(tmp_path / "t.safetensors")}).generate(
        [7, 8], max_new_tokens=12
    )
    assert out.tokens == naive(lm.model, [7, 8], 12)
    assert out.stats.drafted > 0


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("nothing")
    with pytest.raises(LoadError, match="cannot be read"):
        TrigramTable.load(tmp_path / "x")
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "y")
    with pytest.raises(LoadError, match="is not a trigram model"):
        TrigramTable.load(tmp_path / "y")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trained_on_a_models_own_samples_it_drafts_them(temperature: float) -> None:
    """And with its law coupled to the target's noise also where that one samples."""
    lm = LanguageModel(llama())
    plain = SpeculativeDecoder(lm, draft=None)
    settings: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature, "seed": 5}
    table = train_trigram(own_samples(lambda p: plain.generate(p, **settings), [[7, 8], [3]]), lm.vocabulary)
    out = SpeculativeDecoder(lm, "trigram", options={"table": table}).generate([7, 8], **settings)
    assert out.tokens == plain.generate([7, 8], **settings).tokens
    assert out.stats.mean_accepted_length > 1.5


def test_the_quick_way_drafts_what_the_laws_say() -> None:
    """Greedy chains take a short cut past the laws; a penalty of no effect sends them the long way."""
    lm = LanguageModel(llama())
    drafted = []
    for bias in ({}, {0: 0.0}):
        decoder = SpeculativeDecoder(lm, Trigram(Trigram.Options(table=train_trigram(chatter(30, 40), 40))))
        out = decoder.generate([7, 8, 1], max_new_tokens=20, logit_bias=bias)
        drafted.append([entry.drafted for entry in out.trace.rounds])
    assert drafted[0] == drafted[1]


def test_texts_are_read_by_the_targets_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    assert list(read_texts([tmp_path / "a.txt"], letters())) == [[0, 1, 2]]


def test_what_does_not_fit_is_refused() -> None:
    table = train_trigram([[1, 2]], 30)
    with pytest.raises(UnsupportedError, match="has 30 tokens and"):
        SpeculativeDecoder(llama(), "trigram", options={"table": table})
    with pytest.raises(InputError, match="outside the vocabulary of 3"):
        train_trigram([[1, 3]], 3)
    with pytest.raises(InputError, match="table must be a TrigramTable, got int"):
        Trigram.Options(table=3)
    with pytest.raises(InputError, match="by file or by table"):
        Trigram.Options(table=table, file="x")
