"""The τ that training shows is that of decoding: rounds begin where decoding would begin them."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch

from paceline.core.costs import accepted_of
from paceline.engine.decoder import SpeculativeDecoder
from paceline.training import evaluation
from paceline.training.corpus import Corpus, Text, collate
from paceline.training.distillation import Batch
from paceline.training.evaluation import evaluate, round_starts, walk
from paceline.training.recipes.base import Recipe
from tests.training.toys import KINDS, own_texts, recipe_of, target, trained

PROMPT, LENGTH, BEYOND = 6, 44, 12  # texts are decoded further than they are looked at: none ends within a draft


def decoded(recipe: Recipe, starts: list[list[int]], gamma: int) -> tuple[list[Text], list[list[int]]]:
    """Texts by greedy decoding with the drafter as it is now, and the accepted tokens of their rounds."""
    decoder = SpeculativeDecoder(recipe.teacher.lm, recipe.drafter(), gamma=gamma)
    found = decoder.generate(starts, max_new_tokens=LENGTH + BEYOND - PROMPT)
    texts = [Text((start + each.tokens)[:LENGTH], PROMPT) for start, each in zip(starts, found, strict=True)]
    return texts, [[len(each.path) for each in one.trace.rounds] for one in found]


def counted(
    recipe: Recipe, texts: list[Text], accepted: list[list[int]], predictions: torch.Tensor, gamma: int
) -> list[list[int]]:
    """tried and right at every depth, by what was really decoded; predictions [S,R,T] say where there is one at all."""
    tried, right = [0] * recipe.depth, [0] * recipe.depth
    for row, (text, per_round) in enumerate(zip(texts, accepted, strict=True)):
        for at, many in zip(places(per_round), per_round, strict=True):
            for step in range(min(many + 1, gamma, len(text.tokens) - at)):
                known = int(predictions[step, row, at - 2]) >= 0
                tried[step] += known
                right[step] += known and step < many
    return [tried, right]


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_are_those_of_decoding(kind: str) -> None:
    """Texts that the target writes greedily, so that none leaves it: every round, and every token of it."""
    lm = target()
    corpus = Corpus(own_texts(lm), 64, 512, seed=1)
    recipe = recipe_of(kind, lm, corpus)
    trained(recipe, corpus, 30)
    for gamma in (recipe.depth, 2, 1):
        texts, accepted = decoded(recipe, [piece.tokens[:PROMPT] for piece in corpus.held_out[:6]], gamma)
        batch = recipe.teacher.read(collate([[text] for text in texts]), recipe.taps)
        predictions = recipe.predictions(batch)
        wanted = counted(recipe, texts, accepted, predictions, gamma)
        assert [each[gamma - 1].tolist() for each in walk(predictions, batch, recipe.teacher)] == wanted
        assert wanted[1][0] > 0, "something is accepted at all"


def test_easy_stretches_have_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memorized texts beside others: decoding has few rounds in those, so counting every position is wrong."""
    lm = target()
    every = own_texts(lm, 32, LENGTH + BEYOND)
    corpus = Corpus(every[:12], 64, 512, seed=1)
    recipe = recipe_of("draft-lm", lm, corpus)
    trained(recipe, corpus, 200)
    starts = [text.tokens[:PROMPT] for text in (*corpus.pieces[:4], *every[-4:])]
    texts, accepted = decoded(recipe, starts, recipe.depth)
    begun = [many for row in accepted for at, many in zip(places(row), row, strict=True) if at < LENGTH]
    real = 1 + sum(begun) / len(begun)
    batches = [recipe.teacher.read(collate([[text] for text in texts]), recipe.taps)]
    assert evaluate(recipe, batches, None, "draft-lm").tau == pytest.approx(real, rel=0.03)
    monkeypatch.setattr(evaluation, "round_starts", lambda ahead: ahead > 0)
    assert evaluate(recipe, batches, None, "draft-lm").tau > 1.2 * real, "the estimate of an earlier version"


def test_where_rounds_begin() -> None:
    """By hand: after the accepted tokens and one more token, and at the start of each stretch to learn."""
    ahead = np.array([
        [0, 0, 1, 3, 9, 9, 1, 0, 0, 2, 9, 1],
        [4, 9, 9, 9, 2, 1, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 6],
    ])  # fmt: skip
    assert [np.flatnonzero(row).tolist() for row in round_starts(ahead)] == [
        [2, 3, 6, 9, 11],
        [0, 4, 7, 8],
        [],
        [*range(12)],
    ]


def test_half_of_a_text_is_easy() -> None:
    """60 tokens in rounds of 4, and 60 of which none is guessed: τ is 120 tokens in 75 rounds."""
    lm = target()
    recipe = recipe_of("draft-lm", lm, Corpus(own_texts(lm, 12), 64, 256, seed=1))
    states = recipe.teacher.read(collate([[Text([*range(1, 33)] * 4)]]), recipe.taps).last
    wanted = recipe.teacher.logits(states[0]).argmax(-1)
    ids = torch.cat([torch.tensor([1]), wanted])[None, :122]  # it never leaves the target, as far as `walk` looks
    batch = Batch(ids, torch.arange(122)[None] >= 2, (), states[:, :122])
    predictions = torch.stack([torch.cat([ids[0, 2 + step :], ids.new_full((2 + step,), -1)]) for step in range(3)])
    predictions[:, 60:] = (predictions[:, 60:] + 1) % lm.vocabulary
    tried, right = (each[-1] for each in walk(predictions.unsqueeze(1), batch, recipe.teacher))
    assert tried.tolist() == [75, 15, 15]
    assert right.tolist() == [15, 15, 15]
    assert 1 + accepted_of((right / tried).tolist()) == 120 / 75


def test_a_text_that_left_the_target_counts_no_further() -> None:
    """Kaplan and Meier: a draft that was right where the text was not is neither right nor wrong from there on. The
    next round begins after the token that left."""
    lm = target()
    recipe = recipe_of("draft-lm", lm, Corpus(own_texts(lm, 12), 64, 256, seed=1))
    read = recipe.teacher.read(collate([[Text([*range(1, 23)], 2)]]), recipe.taps)
    wanted = recipe.teacher.logits(read.last[0]).argmax(-1)
    ids = torch.cat([torch.tensor([1]), wanted[:-1]])[None]
    predictions = torch.full((3, 1, 22), -1)
    for step in range(3):
        predictions[step, 0, : 20 - step] = wanted[1 + step : 21]
    tried, right = (each[-1] for each in walk(predictions, replace(read, ids=ids), recipe.teacher))
    assert tried.tolist() == right.tolist() == [5, 5, 5], "20 tokens, 4 in every round"
    ids[0, 3] = (ids[0, 3] + 1) % lm.vocabulary  # the second one of the first draft
    tried, right = (each[-1] for each in walk(predictions, replace(read, ids=ids), recipe.teacher))
    assert tried.tolist() == right.tolist() == [6, 6, 4], "2 tokens, then 18 in rounds of 4: the last has 2"


def places(accepted: list[int]) -> list[int]:
    """Where rounds begin, by what is accepted of each."""
    return list(accumulate((many + 1 for many in accepted[:-1]), initial=PROMPT))
