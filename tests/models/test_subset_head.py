"""A model with a part of its vocabulary: its logits and ids are those of the full model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.conformance.chi_square import ALPHA, first_tokens, p_value
from tests.toys import llama

from paceline import InputError, LanguageModel, SpeculativeDecoder
from paceline.models.heads.head_layers import SubsetHead, spread, usual_tokens
from paceline.models.runtime import quantized

V = 40
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


def model(seed: int = 1, dtype: torch.dtype = torch.float64) -> LanguageModel:
    return LanguageModel(llama(seed, vocab_size=V, max_position_embeddings=256, dtype=dtype))


class Words:
    """A tokenizer as far as it is asked for its tokens."""

    def get_vocab(self) -> dict[str, int]:
        return {"<s>": 0, "\u2581the": 1, "the": 2, "\u2581": 37, ".": 38, "\u2581a": 39, "\u00e9": 36}


def logits_of(lm: LanguageModel) -> torch.Tensor:
    from paceline.models.readers.scratch_reader import ScratchRows

    rows, reader = ScratchRows(lm.device), lm.reader()
    rows.admit([TEXT])
    with torch.inference_mode():
        return reader.extend(rows, reader.begin(rows, 0, 32)).logits[0, -1]


def test_letters_and_signs_come_first_and_then_the_ids() -> None:
    lm = model()
    assert usual_tokens(lm, [7])[:3] == [7, 0, 1]
    lm.tokenizer = Words()
    assert usual_tokens(lm, [7])[:6] == [7, 37, 38, 39, 0, 1]
    assert sorted(usual_tokens(lm, [])) == list(range(lm.vocabulary))


@pytest.mark.parametrize("kind", [None, "int8", "int4", "bfloat16"])
def test_it_says_of_its_tokens_what_the_model_says(kind: str | None) -> None:
    lm = model(dtype=torch.float32)
    lm = lm if kind is None else quantized(lm, kind)
    whole, words = logits_of(lm), SubsetHead(lm, 16, [33])
    assert words.lm.vocabulary == 16
    message = logits_of(words.lm)
    assert torch.allclose(message, whole[words.ids], atol=1e-5)
    words.learn([35, 2, 36, 35])
    assert {33, 35, 36} < set(words.ids.tolist())
    assert torch.allclose(logits_of(words.lm), whole[words.ids], atol=1e-5)
    assert torch.equal(logits_of(lm), whole)


def test_what_it_cannot_say_is_impossible() -> None:
    over = spread(torch.tensor([[1.0, 2.0]]), torch.tensor([5, 3]), 7)
    assert over.tolist() == [[-torch.inf, -torch.inf, -torch.inf, 2.0, -torch.inf, 1.0, -torch.inf]]


def test_the_tokens_of_the_texts_at_hand_take_turns() -> None:
    words = SubsetHead(model(), 16)
    words.learn(range(20, 40))  # four rows are for them
    assert words.ids.tolist() == [*range(12), 36, 37, 38, 39]
    words.learn([39, 20, 21])
    assert words.ids.tolist() == [*range(12), 20, 21, 38, 39]
    words.forget()
    assert words.ids.tolist() == list(range(16))
    assert torch.equal(words._head.weight, words._whole.weight[:16])


@pytest.mark.parametrize("tree", ["chain", "levels", "best-first"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 3}])
def test_the_text_is_that_of_plain_decoding(tree: str, settings: dict[str, Any]) -> None:
    target, draft = model(1), model(1)
    plain = SpeculativeDecoder(target, draft=None).generate(TEXT, max_new_tokens=40, ignore_eos=True, **settings)
    decoder = SpeculativeDecoder(target, "draft-model", options={"model": draft, "vocabulary": 24, "tree": tree})
    out = decoder.generate(TEXT, max_new_tokens=40, ignore_eos=True, **settings)
    assert out.tokens == plain.tokens
    assert "24 tokens" in decoder.describe()
    assert out.stats.mean_accepted_length > 1.5
    again = decoder.generate(TEXT, max_new_tokens=40, ignore_eos=True, **settings)
    assert again.trace.rounds == out.trace.rounds  # what the first text taught is forgotten


def test_what_was_written_can_be_drafted_from_then_on() -> None:
    target = model(2)
    decoder = SpeculativeDecoder(target, "draft-model", options={"model": target, "vocabulary": 24}, gamma=3)
    out = decoder.generate([0, 1], max_new_tokens=60, ignore_eos=True)
    words = decoder.drafter._subset  # type: ignore[attr-defined]
    assert max(out.tokens[:-8]) >= 24
    assert set(out.tokens[-12:-8]) < set(words.ids.tolist())


@pytest.mark.parametrize(
    "rule", ["block", *(pytest.param(rule, marks=pytest.mark.nightly) for rule in ("ratio", "traversal"))]
)
def test_rules_that_look_at_laws_keep_the_targets(rule: str) -> None:
    """The draft's law is over the tokens it can say, and nothing elsewhere; what it cannot say is written as often as
    the target wants."""
    few = {"vocab_size": 12, "max_position_embeddings": 64, "dtype": torch.float64}
    target, draft = LanguageModel(llama(3, **few)), LanguageModel(llama(4, **few))
    decoder = SpeculativeDecoder(
        target, "draft-model", options={"model": draft, "vocabulary": 8}, rule=rule, gamma=2, rows=1500
    )
    counts = sum(
        first_tokens(decoder, [1, 2, 3], 2, range(start, start + 1500), temperature=1.0) for start in (0, 1500)
    )
    with torch.inference_mode():
        texts = torch.tensor([[1, 2, 3, token] for token in range(12)])
        message = target.model(texts).logits.softmax(-1)
    law = message[0, 2].unsqueeze(1) * message[:, 3]
    assert float(law[9:].sum()) > 0.02  # tokens that cannot be drafted at first
    assert p_value(counts.flatten(), law.flatten()) > ALPHA


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(InputError, match="vocabulary must be at least 8 tokens, got 3; try 8000"):
        SpeculativeDecoder(model(), "draft-model", options={"model": model(), "vocabulary": 3})


def test_as_many_tokens_as_there_are_change_nothing() -> None:
    decoder = SpeculativeDecoder(model(), "draft-model", options={"model": model(), "vocabulary": 4000})
    assert decoder.generate(TEXT, max_new_tokens=12, ignore_eos=True).stats.acceptance_rate == 1.0
