"""The text does not depend on draft length, tree, nodes, other rows, their order, rows at once or streaming."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from paceline import Generation

from .drafters import PLAIN, Variant, some_variants
from .models import VOCABULARY
from .test_identity import PROMPTS

CASE = "llama"
NEW = 18
SETTINGS: dict[str, Any] = {
    "temperature": [0.0, 0.9, 0.0, 1.2],
    "top_k": [0, 0, 0, 9],
    "repetition_penalty": [1.0, 1.0, 1.3, 1.0],
    "seed": [1, 2, 3, 4],
}
RUNNERS = some_variants()


def settings_of(row: int) -> dict[str, Any]:
    return {name: value[row] for name, value in SETTINGS.items()}


@cache
def plain() -> list[list[int]]:
    decoder = PLAIN.decoder(CASE)
    return [
        decoder.generate(prompt, max_new_tokens=NEW, ignore_eos=True, **settings_of(row)).tokens
        for row, prompt in enumerate(PROMPTS)
    ]


def batch(decoder: Any, order: list[int] | None = None) -> list[list[int]]:
    order = list(range(len(PROMPTS))) if order is None else order
    settings = {name: [value[row] for row in order] for name, value in SETTINGS.items()}
    outs: list[Generation] = decoder.generate(
        [PROMPTS[row] for row in order], max_new_tokens=NEW, ignore_eos=True, **settings
    )
    return [out.tokens for out in outs]


# γ, nodes, rows at once, order of the prompts: every pair of values that could meet in `Budget` or `Rows`
COVERING: list[tuple[int, int | None, int, list[int]]] = [
    (1, 1, 3, [3, 2, 1, 0]),
    (3, 2, 16, [2, 0]),
    (5, 9, 1, [0, 0, 0, 1]),
    (17, None, 3, [1, 3, 0]),
]


@pytest.mark.parametrize("variant", [PLAIN, *RUNNERS], ids=str)
def test_lengths_nodes_rows_and_order_do_not_matter(variant: Variant) -> None:
    for gamma, nodes, rows, order in COVERING:
        texts = batch(variant.decoder(CASE, gamma=gamma, nodes=nodes, rows=rows), order)
        assert texts == [plain()[row] for row in order], (gamma, nodes, rows, order)


@pytest.mark.nightly
@pytest.mark.parametrize("gamma", [1, 2, 5, 17])
@pytest.mark.parametrize("nodes", [1, 2, 9, None])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("variant", [PLAIN, *RUNNERS], ids=str)
def test_their_product(variant: Variant, rows: int, nodes: int | None, gamma: int) -> None:
    assert batch(variant.decoder(CASE, gamma=gamma, nodes=nodes, rows=rows)) == plain()


@pytest.mark.parametrize("variant", [v for v in RUNNERS if not v.chain and v.draft], ids=str)
def test_the_shape_of_the_tree_does_not_matter(variant: Variant) -> None:
    for wide in ({"branch": 1, "width": 3}, {"branch": 4, "width": 1}, {"branch": 3, "width": 4}):
        shaped = Variant(variant.drafter, {**variant.options, **wide}, variant.draft)
        assert batch(shaped.decoder(CASE, gamma=4)) == plain(), wide


@pytest.mark.parametrize("variant", [PLAIN, *RUNNERS], ids=str)
def test_streaming_does_not_matter(variant: Variant) -> None:
    stream = variant.decoder(CASE, gamma=4).stream(PROMPTS, max_new_tokens=NEW, ignore_eos=True, **SETTINGS)
    texts: list[list[int]] = [[] for _ in PROMPTS]
    drafted: list[list[bool]] = [[] for _ in PROMPTS]
    reasons: list[list[str | None]] = [[] for _ in PROMPTS]
    for piece in stream:
        texts[piece.index].append(piece.token)
        drafted[piece.index].append(piece.from_draft)
        reasons[piece.index].append(piece.finish_reason)
    assert texts == plain()
    assert drafted == [out.trace.from_draft for out in stream.results]
    assert all(row == [None] * (NEW - 1) + ["length"] for row in reasons)


@pytest.mark.parametrize("variant", [PLAIN, RUNNERS[0]], ids=str)
def test_other_seeds_do_matter(variant: Variant) -> None:
    """The tests above would pass if seeds were ignored."""
    decoder = variant.decoder(CASE)
    texts = decoder.generate(
        [PROMPTS[0]] * 8, max_new_tokens=NEW, ignore_eos=True, temperature=0.9, seed=list(range(8))
    )
    assert len({tuple(out.tokens) for out in texts}) == 8
    assert all(0 <= token < VOCABULARY for out in texts for token in out.tokens)
