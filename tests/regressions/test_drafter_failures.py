"""A drafter that fails or talks nonsense costs speed, never the text; and vocabularies that do not match are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch

from paceline import Budget, Drafter, LanguageModel, PacelineWarning, SpeculativeDecoder, TokenTree, UnsupportedError
from tests.toys import LETTERS, letters, llama, naive

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
LIMITS = [9, 4, 12]  # so that a row is released while others go on


@lru_cache(maxsize=1)
def lm() -> LanguageModel:
    return LanguageModel(llama())


@lru_cache(maxsize=1)
def wanted() -> list[list[int]]:
    return [naive(lm().model, prompt, limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]


class Odd(Drafter):
    """Correct, except for the one given fault."""

    name = "odd"

    @dataclass(frozen=True)
    class Options:
        pass

    def __init__(self, hook: str = "", draft: Callable[[int, Budget], TokenTree | None] | None = None) -> None:
        self.hook, self.draft = hook, draft

    def _maybe(self, hook: str) -> None:
        if hook == self.hook:
            raise ValueError("out of ideas")

    def open(self, target: Any, rows: Any) -> None:
        self._maybe("open")

    def admit(self, rows: Any, first: int) -> None:
        self._maybe("admit")

    def propose(self, rows: Any, budget: Budget) -> Any:
        self._maybe("propose")
        if self.draft is not None:
            return self.draft(rows.count, budget)
        return TokenTree.from_chains([[1, 2]] * rows.count, "cpu")

    def keep(self, rows: Any, verdict: Any, reading: Any) -> None:
        self._maybe("keep")

    def release(self, row: int, last: int, length: int) -> None:
        self._maybe("release")


def check_falls_back(drafter: Drafter, output: str) -> None:
    with pytest.warns(PacelineWarning, match=output) as told:
        outs = SpeculativeDecoder(lm(), drafter, gamma=3, nodes=6).generate(PROMPTS, max_new_tokens=LIMITS)
    assert [out.tokens for out in outs] == wanted()
    assert len(told) == 1
    assert "Drafter 'odd' failed" in str(told[0].message)
    assert "plain decoding for 16 rounds" in str(told[0].message)


@pytest.mark.parametrize("hook", ["open", "admit", "propose", "keep", "release"])
def test_a_drafter_that_raises_costs_one_warning(hook: str) -> None:
    """Traps 18 and 19: it degrades to plain decoding, loudly and once, whichever of its hooks fails."""
    check_falls_back(Odd(hook), "ValueError: out of ideas")


def chain(token: int, depth: int) -> Callable[[int, Budget], TokenTree]:
    return lambda rows, budget: TokenTree.from_chains([[token] * depth] * rows, "cpu")


def tree(tokens: list[int], parents: list[int]) -> Callable[[int, Budget], TokenTree]:
    return lambda rows, budget: TokenTree(torch.tensor([tokens] * rows), torch.tensor([parents] * rows))


NONSENSE: dict[str, tuple[Callable[[int, Budget], Any], str]] = {
    "an id past the vocabulary": (chain(40, 1), "token 40, outside the vocabulary of 40"),
    "a placeholder of -1": (chain(-1, 1), "token -1, outside the vocabulary"),
    "too deep": (chain(3, 4), "4 tokens deep, the budget is 3"),
    "too many": (tree(list(range(7)), [-1] * 7), "7 nodes, the budget is 6"),
    "a cycle": (tree([1, 2], [1, 0]), "parents come before children"),
    "twins": (tree([1, 1], [-1, -1]), "token 1 twice below node -1"),
    "rows missing": (lambda rows, budget: TokenTree.from_chains([[1]], "cpu"), "1 rows for 3 texts"),
    "wrong numbers": (lambda rows, budget: TokenTree(torch.ones(rows, 1)), "int64"),
    "no laws": (lambda rows, budget: TokenTree(torch.ones(rows, 1, dtype=torch.int64), drawn="iid"), "have the laws"),
    "nothing at all": (lambda rows, budget: None, "NoneType"),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_is_refused_and_the_text_is_right(kind: str) -> None:
    """Traps 13 and 18, V#45060, V#46533, V#50021: placeholders accepted, negative counters, ids out of range."""
    draft, output = NONSENSE[kind]
    check_falls_back(Odd(draft=draft), output)


def test_a_draft_model_that_says_nan_changes_nothing() -> None:
    """Trap 18: NaN from the draft is a bad guess, not an error."""
    broken = llama(1)
    with torch.no_grad():
        broken.lm_head.weight[7] = float("nan")
    for rule in ("match", "ratio"):
        for options in ({}, {"tree": "levels"}):
            decoder = SpeculativeDecoder(lm(), LanguageModel(broken), gamma=3, rule=rule, options=options)
            outs = decoder.generate(PROMPTS, max_new_tokens=LIMITS)
            assert [out.tokens for out in outs] == wanted()
            hot = decoder.generate([1, 2, 3], temperature=1.0, seed=1, max_new_tokens=9)
            if rule == "match":
                assert hot.tokens == SpeculativeDecoder(lm(), draft=None).generate(
                    [1, 2, 3], temperature=1.0, seed=1, max_new_tokens=9
                ).tokens  # fmt: skip


def test_a_rule_refuses_a_draft_it_cannot_judge() -> None:
    """Trap 1: coupled tokens come with no law of their own; both names are in the sentence."""
    drafter = Odd(draft=lambda rows, budget: TokenTree(torch.ones(rows, 1, dtype=torch.int64), drawn="coupled"))
    with pytest.raises(UnsupportedError, match=r"Rule 'ratio' cannot judge a draft of 'odd' drawn 'coupled'"):
        SpeculativeDecoder(lm(), drafter, rule="ratio").generate([1], temperature=1.0, max_new_tokens=4)


# ---- vocabularies


def test_a_vocabulary_that_differs_is_refused_by_its_tokens() -> None:
    """Trap 13, S#24051: of the same size and other tokens; sizes are not compared, token strings are."""
    target = LanguageModel(llama(), letters(), name="target")
    draft = LanguageModel(llama(1), letters("bacdefghijklmnopqrstuvwxyz0123456789 ,.!"), name="draft")
    with pytest.raises(UnsupportedError, match=r"4 ids differ \(0 is 'a' / 'b', 1 is 'b' / 'a', 37 is '\.' / ','\)"):
        SpeculativeDecoder(target, draft)


def test_without_tokenizers_sizes_must_be_equal() -> None:
    """Trap 13: with nothing else to compare, another size is another vocabulary."""
    with pytest.raises(UnsupportedError, match=r"has 41 tokens and .* 40"):
        SpeculativeDecoder(lm(), llama(1, vocab_size=41))


@pytest.mark.parametrize("sizes", [(40, 64), (64, 40), (48, 64), (64, 48)])
@pytest.mark.parametrize("rule", ["match", "ratio"])
def test_padded_vocabularies_work_together(sizes: tuple[int, int], rule: str) -> None:
    """V#10913, T#45307: an output layer padded to a round number crashed against one that was padded otherwise."""
    target, draft = llama(0, vocab_size=sizes[0]), llama(1, vocab_size=sizes[1])
    tokenizer = letters()
    pair = LanguageModel(target, tokenizer), LanguageModel(draft, letters())
    truth = naive(target, [1, 2, 3], 20, lambda text, logits: logits[: len(LETTERS)])
    for options in ({}, {"tree": "best-first"}):
        decoder = SpeculativeDecoder(*pair, gamma=3, rule=rule, options=options)
        assert decoder.generate([1, 2, 3], max_new_tokens=20).tokens == truth
        hot = decoder.generate([1, 2, 3], max_new_tokens=20, temperature=1.5, seed=2)
        assert max(hot.tokens) < len(LETTERS)
        if rule == "match":
            plain = SpeculativeDecoder(pair[0], draft=None).generate(
                [1, 2, 3], max_new_tokens=20, temperature=1.5, seed=2
            )
            assert hot.tokens == plain.tokens


@pytest.mark.parametrize("rule", ["match", "ratio"])
def test_a_draft_with_one_more_special_token_works(rule: str) -> None:
    """Trap 13: what only the draft knows is impossible, however much the draft likes it."""
    other = llama(1, vocab_size=48)
    with torch.no_grad():
        other.lm_head.weight[40] *= 20
    target, draft = LanguageModel(llama(), letters()), LanguageModel(other, letters(LETTERS + "?"))
    assert (target.vocabulary, draft.vocabulary) == (40, 41)
    for options in ({}, {"tree": "levels"}):
        decoder = SpeculativeDecoder(target, draft, gamma=3, rule=rule, options=options)
        assert decoder.generate([1, 2, 3], max_new_tokens=12).tokens == naive(target.model, [1, 2, 3], 12)
        assert max(decoder.generate([1, 2, 3], max_new_tokens=12, temperature=1.0).tokens) < 40


def test_a_draft_that_lacks_the_last_tokens_reads_them_as_it_can() -> None:
    """Trap 13: ids the draft model has no row for are no index error (on CUDA: no assert); the text is right."""
    target = LanguageModel(llama(), letters())
    draft = LanguageModel(llama(1, vocab_size=37), letters(LETTERS[:37]))
    out = SpeculativeDecoder(target, draft, gamma=3).generate([1, 39, 2], max_new_tokens=12)
    assert out.tokens == naive(target.model, [1, 39, 2], 12)
    assert out.stats.drafted > 0
