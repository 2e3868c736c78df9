"""SeveralProcesses texts in one row of a batch: every token once, nothing of what was given or held out is learnt."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.common.errors import InputError
from paceline.training.corpus import Corpus, Text, TokenBatch, collate
from paceline.training.distillation import Batch
from paceline.training.evaluation import walk
from paceline.training.train_options import TrainOptions
from paceline.training.train_run import train
from tests.toys import letters, llama
from tests.training.toys import KINDS, own_texts, recipe_of, target, trained

LENGTH, TOKENS = 40, 160
TEXTS = [Text(list(range(1000 * i, 1000 * i + 9 + i * 5 % 24)), 1 + i % 6) for i in range(200)]
LONG = [Text(list(range(500_000 + 1000 * i, 500_000 + 1000 * i + 96)), 3) for i in range(8)]  # 40, 40 and 16 tokens


def epoch(corpus: Corpus, number: int = 0) -> list[TokenBatch]:
    """The batches of an epoch."""
    before = sum(len(corpus._epoch(each)) for each in range(number))
    return [corpus.batch(before + index) for index in range(len(corpus._epoch(number)))]


def learnt(batches: list[TokenBatch]) -> Counter[int]:
    return Counter(int(token) for batch in batches for token in batch.ids[batch.learn])


def answers(texts: list[Text]) -> Counter[int]:
    return Counter(token for text in texts for token in text.tokens[text.prompt :])


def test_every_token_is_in_one_piece_and_every_answer_is_learnt_once() -> None:
    corpus = Corpus(TEXTS + LONG, LENGTH, TOKENS, 3, join=True)
    known = {text.tokens[0]: text for text in TEXTS}
    for number in (0, 1):
        batches = epoch(corpus, number)
        assert all(batch.ids.shape[1] <= LENGTH and batch.ids.numel() <= TOKENS for batch in batches)
        seen = Counter(int(token) for batch in batches for token in batch.ids.flatten())
        assert all(seen[token] == 1 for piece in corpus.pieces for token in piece.tokens if token)
        missing = answers(corpus.pieces)
        missing.subtract(learnt(batches))
        heads = {piece.tokens[0] for piece in corpus.pieces if not piece.prompt}  # of the rests of long texts
        assert {token for token, count in missing.items() if count} <= heads
        for batch in batches:
            for row in batch.ids.tolist():
                for at, token in enumerate(row):
                    if token in known and (token or at == 0):
                        assert row[at : at + len(known[token].tokens)] == known[token].tokens, "no text is cut"
    rows = sum(len(batch.ids) for batch in epoch(corpus))
    assert rows < 0.7 * len(corpus.pieces), "there is something to join"
    assert rows * LENGTH < 1.2 * sum(len(piece.tokens) for piece in corpus.pieces), "and it is joined"


def test_nothing_of_a_text_that_is_held_out_is_learnt() -> None:
    corpus = Corpus(TEXTS + LONG, LENGTH, TOKENS, 3, join=True, held=5)
    seen = {int(token) // 1000 for batch in epoch(corpus) for token in batch.ids.flatten() if token}
    held = {token // 1000 for piece in corpus.held_out for token in piece.tokens}
    assert not seen & held
    assert any(text.tokens[0] // 1000 in held for text in LONG), "long ones too, with all of their pieces"
    looked = corpus.held_out_batches(10_000)
    assert sum(learnt(looked).values()) >= sum(answers(corpus.held_out).values()) - len(LONG)
    assert sum(len(batch.ids) for batch in looked) < len(corpus.held_out)
    assert learnt(corpus.held_out_batches(7)) == answers(corpus.held_out[:7])


def test_joined_the_same_way_again_and_another_way_in_the_next_epoch() -> None:
    one, other = (Corpus(TEXTS, LENGTH, TOKENS, 3, join=True) for _ in range(2))
    for number in (0, 5, one.batches + 2):
        assert torch.equal(one.batch(number).ids, other.batch(number).ids)
    ways = [{tuple(row) for batch in epoch(one, number) for row in batch.ids.tolist()} for number in (0, 1)]
    assert len(ways[0] & ways[1]) < 0.5 * len(ways[0])
    assert one.frequent(30) == Corpus(TEXTS, LENGTH, TOKENS, 3).frequent(30), "joining changes no counts"


def test_masks_are_those_of_the_texts() -> None:
    batch = collate([[Text([1, 2, 3], 1), Text([4, 5, 6, 7], 2), Text([8, 9])], [Text([1, 2, 3, 4])]])
    assert batch.ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 0, 0, 0, 0, 0]]
    assert batch.learn.int().tolist() == [[0, 1, 1, 0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 0, 0, 0, 0, 0]]


def test_a_draft_is_followed_to_the_end_of_its_text() -> None:
    """Guesses that are always right: what was given within a row is neither tried nor stepped over."""
    lm = target()
    recipe = recipe_of("draft-lm", lm, Corpus(own_texts(lm), 64, 512, seed=1))
    batch = collate([[Text(list(range(1, 9)), 2), Text(list(range(11, 19)), 3)]])
    read = recipe.teacher.read(batch, recipe.taps)
    wanted = recipe.teacher.logits(read.last[0]).argmax(-1)
    ids = read.ids.clone()
    ids[0, 1:] = wanted[:-1]  # a text that never left the target, as far as `walk` looks
    batch = Batch(ids, read.learn, read.taps, read.last)
    perfect = torch.full((3, 1, 16), -1)
    for step in range(3):
        perfect[step, 0, : 14 - step] = wanted[1 + step : 15]
    tried, right = (each[-1] for each in walk(perfect, batch, recipe.teacher))
    assert tried.tolist() == [2 + 2, 2 + 1, 1 + 1], "rounds of 4 and 2 tokens, and of 4 and 1"
    assert right.tolist() == tried.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns_from_joined_texts(kind: str) -> None:
    lm = target()
    texts = own_texts(lm, length=20)
    corpus = Corpus(texts, 90, 512, seed=1, join=True)
    losses = trained(recipe_of(kind, lm, corpus), corpus, 20)
    assert losses[-1] < losses[0]


def test_trained_from_a_file(tmp_path: Path) -> None:
    llama(0, num_hidden_layers=3).float().save_pretrained(tmp_path / "target")
    letters().save_pretrained(tmp_path / "target")
    lines = ['"' + "".join("abcdefghij"[(i * k + k) % 10] for i in range(20)) + '"\n' for k in range(1, 40)]
    (tmp_path / "data.jsonl").write_text("".join(lines))
    args: dict[str, Any] = {
        "target": str(tmp_path / "target"), "data": str(tmp_path / "data.jsonl"), "out": str(tmp_path / "out"),
        "device": "cpu", "kind": "draft-lm", "options": ("layers=1",), "length": 90, "batch": 256, "steps": 8,
        "evaluate": 4, "held_out": 4, "predict": False, "measure": 1,
    }  # fmt: skip
    left = iter([False] * 5)
    with pytest.raises(KeyboardInterrupt):
        train(TrainOptions(**args, join=True), cancel=lambda: next(left, True))
    with pytest.raises(InputError, match="holds training with join = True, not False"):
        train(TrainOptions(**args))
    with pytest.raises(InputError, match="reads 96 tokens at most, so texts cannot be joined to 97"):
        train(TrainOptions(**{**args, "length": 97}, join=True))
    assert (train(TrainOptions(**args, join=True)) / "model.safetensors").exists()
    with pytest.raises(InputError, match="There are 1 texts of 8 or more tokens, and training needs 2"):
        Corpus([Text(list(range(500)))], 50, 100, 0, join=True)
