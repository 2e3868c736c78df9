"""Grade 1 and 3 of the promise: greedy and same-seed sampled text is that of plain decoding, token for token.

Every architecture x every registered drafter x its topologies x {one row, a ragged batch of four}.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from paceline import Generation

from .drafters import PLAIN, Variant, board, on_architectures, some_variants, variants
from .models import CASES, target

NEW = 26
# Ragged, with repetitions for those who look things up, longer than a sliding window, and as short as can be.
PROMPTS = [[1, 7, 9, 4, 7, 9, 4, 7, 9, 11, 2], [3, 3, 8, 3, 3, 8, 3], [6, 21], [13]]
# one row is the first prompt alone; in a batch every row has its own seed
SEEDS = [20, 21, 22, 23]


@cache
def plain(case: str, sampled: bool) -> tuple[tuple[int, ...], ...]:
    """What plain decoding writes, one prompt at a time."""
    decoder = PLAIN.decoder(case)
    written = []
    for prompt, seed in zip(PROMPTS, SEEDS, strict=True):
        settings = {"temperature": 0.9, "seed": seed} if sampled else {}
        written.append(tuple(decoder.generate(prompt, max_new_tokens=NEW, ignore_eos=True, **settings).tokens))
    return tuple(written)


def check_accounts(out: Generation) -> None:
    """Statistics and trace tell the same story as the tokens."""
    assert out.stats.emitted == len(out.tokens) == out.stats.accepted + out.stats.recovered + out.stats.bonus
    assert [token for entry in out.trace.rounds for token in entry.emitted] == out.tokens
    assert len(out.trace.from_draft) == len(out.tokens)
    for entry in out.trace.rounds:
        if entry.own is not None:  # bonus: after the last drafted token of a path; recovered: after a rejection
            last = entry.path[-1] if entry.path else -1
            parents = range(-1, len(entry.drafted) - 1) if entry.parents is None else entry.parents
            assert entry.bonus == (last not in parents)


def check_speculated(outs: list[Generation], variant: Variant) -> None:
    """A drafter that silently does nothing, or a perfect one that is not believed, would pass as plain decoding."""
    assert sum(out.stats.drafted for out in outs) > 0
    if not variant.perfect:
        return
    for out in outs:
        assert all(entry.path for entry in out.trace.rounds if entry.drafted), "a perfect draft was rejected outright"
        if variant.chain:
            assert out.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("case", CASES)
def test_plain_greedy_is_what_transformers_generates(case: str) -> None:
    model = target(case).model
    for prompt, written in zip(PROMPTS, plain(case, False), strict=True):
        ids = torch.tensor([prompt])
        hugging = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert hugging[0, len(prompt) :].tolist() == list(written)


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_no_constant(case: str) -> None:
    """A text of one token repeated would agree with anything."""
    for sampled in (False, True):
        assert len({token for text in plain(case, sampled) for token in text}) > 5
    assert plain(case, False) != plain(case, True)


BLIND = [variant for variant in some_variants(("blind",)) if variant.draft]


@pytest.mark.parametrize(("case", "variant"), board(CASES, variants(("close", "same")), on_architectures))
def test_the_text_is_that_of_plain_decoding(case: str, variant: Variant) -> None:
    check_identity(case, variant, NEW)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "variant"), board(CASES, BLIND, lambda variant: 2))
def test_a_draft_that_is_nearly_always_wrong(case: str, variant: Variant) -> None:
    check_identity(case, variant, NEW // 2)


def check_identity(case: str, variant: Variant, new: int) -> None:
    """One row and a ragged batch, greedy and sampled."""
    decoder = variant.decoder(case, gamma=4)
    outs: list[Generation] = []
    for sampled in (False, True):
        wanted = [text[:new] for text in plain(case, sampled)]
        seeds = SEEDS if sampled else [0] * len(SEEDS)
        settings: dict[str, Any] = {"max_new_tokens": new, "ignore_eos": True, "temperature": 0.9 if sampled else 0.0}
        one = decoder.generate(PROMPTS[0], seed=seeds[0], **settings)
        many = decoder.generate(PROMPTS, seed=seeds, **settings)
        assert tuple(one.tokens) == wanted[0]
        assert [tuple(out.tokens) for out in many] == wanted
        outs += [one, *many]
    for out in outs:
        check_accounts(out)
    check_speculated(outs, variant)
