"""Greedy text and text sampled with the same seed are those of plain decoding, token for token.

Every registered drafter x its topologies x architectures x {one row, a ragged batch of four}, and x runners.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from paceline import Generation, LanguageModel, SpeculativeDecoder
from paceline.core.contracts import DRAFTERS
from paceline.core.device_ops import TORCH
from paceline.core.protocols import Adaptive
from tests.engine.graph_devices import imitated, watched

from .constraints import Winding
from .drafters import PLAIN, Variant, board, identity_board, marks_of_runner, some_variants, variants
from .models import CASES, CLASSES, target

NEW = 16
# Ragged. With repetitions for drafters that look tokens up, one longer than a sliding window, one of a single token.
PROMPTS = [[1, 7, 9, 4, 7, 9, 4, 7, 9, 11, 2], [3, 3, 8, 3, 3, 8, 3], [6, 21], [13]]
SEEDS = [20, 21, 22, 23]


@cache
def plain(case: str, sampled: bool, constrained: bool = False) -> tuple[tuple[int, ...], ...]:
    """The tokens of plain decoding, one prompt at a time."""
    decoder = PLAIN.decoder(case)
    written = []
    for prompt, seed in zip(PROMPTS, SEEDS, strict=True):
        settings: dict[str, Any] = {"temperature": 0.9, "seed": seed} if sampled else {}
        settings |= {"constraint": Winding()} if constrained else {}
        written.append(tuple(decoder.generate(prompt, max_new_tokens=NEW, ignore_eos=True, **settings).tokens))
    return tuple(written)


def check_accounts(out: Generation) -> None:
    """Statistics and trace agree with the tokens."""
    assert out.stats.emitted == len(out.tokens) == out.stats.accepted + out.stats.recovered + out.stats.bonus
    assert [token for entry in out.trace.rounds for token in entry.emitted] == out.tokens
    assert len(out.trace.from_draft) == len(out.tokens)
    for entry in out.trace.rounds:
        if entry.own is not None:  # bonus: after the last drafted token of a path; recovered: after a rejection
            last = entry.path[-1] if entry.path else -1
            parents = range(-1, len(entry.drafted) - 1) if entry.parents is None else entry.parents
            assert entry.bonus == (last not in parents)


def check_speculated(outs: list[Generation], variant: Variant) -> None:
    """It has drafted, and a perfect draft was accepted. Without this an idle drafter would pass."""
    assert sum(out.stats.drafted for out in outs) > 0 or variant.may_be_idle
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


# The settings of the batch and of the row alone: greedy, sampled, or both kinds in one batch.
GREEDY, SAMPLED, MIXED = [False] * 4, [True] * 4, [False, True, True, False]
WAYS = [(MIXED, False), (GREEDY, True), (SAMPLED, False)]


@pytest.mark.parametrize(("case", "variant"), identity_board(variants(("close", "same"))))
def test_the_text_is_that_of_plain_decoding(case: str, variant: Variant) -> None:
    turn = list(CASES).index(case) + len(str(variant))
    check_identity(case, variant, *WAYS[turn % len(WAYS)])


BLIND = [variant for variant in some_variants(("blind",)) if variant.draft]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "variant"), board(CLASSES, BLIND, lambda variant: 2))
def test_a_draft_that_is_nearly_always_wrong(case: str, variant: Variant) -> None:
    check_identity(case, variant)


RUNNERS = {
    "CPU kernels": "llama-float32",
    "watched graphs": "llama",  # run eagerly; a host read in a captured round fails
    "replayed graphs": "llama",  # recorded once, then played without any Python of the round
}


@pytest.mark.parametrize(
    ("runner", "variant"),
    [
        pytest.param(runner, variant, id=f"{runner}-{variant}", marks=marks_of_runner(i, j, variant))
        for j, variant in enumerate([PLAIN, *variants(("close", "same"))])
        for i, runner in enumerate(RUNNERS)
    ],
)
def test_every_runner_writes_that_text(runner: str, variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    case = RUNNERS[runner]
    plain(case, False), plain(case, True)  # before the device is imitated
    graphs: list[Any] = []
    if "graphs" in runner:
        monkeypatch.setattr(LanguageModel, "ops", TORCH)  # such a device has no kernels of a CPU
        graphs = (watched if runner == "watched graphs" else imitated)(monkeypatch)
    decoder = variant.decoder(case, gamma=4)
    for batch, alone in WAYS[:2] if graphs else [WAYS[2]]:  # the second batch uses the graphs of the first
        check_identity(case, variant, batch, alone, decoder)
    if runner == "CPU kernels":
        assert target(case).reader().kernels is not None
    # the shapes that an adaptive drafter chooses depend on measured times, and each one has its graph
    least = 1 if issubclass(DRAFTERS[variant.drafter], Adaptive) else 2
    assert not graphs or variant.is_never_captured or sum(graph.reused for graph in graphs) >= least


def check_identity(
    case: str,
    variant: Variant,
    batch: Sequence[bool] = MIXED,
    alone: bool = False,
    decoder: SpeculativeDecoder | None = None,
) -> None:
    """The texts of a ragged batch and of one row. `batch`: which rows are sampled; `alone`: whether that one row is."""
    decoder = decoder or variant.decoder(case, gamma=4)
    settings: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}
    constrained = variant.is_constrained
    settings |= {"constraint": Winding()} if constrained else {}
    many = decoder.generate(
        PROMPTS,
        temperature=[0.9 if sampled else 0.0 for sampled in batch],
        seed=[seed if sampled else 0 for sampled, seed in zip(batch, SEEDS, strict=True)],
        **settings,
    )
    one = decoder.generate(PROMPTS[0], temperature=0.9 if alone else 0.0, seed=SEEDS[0] if alone else 0, **settings)
    for row, (sampled, out) in enumerate(zip([*batch, alone], [*many, one], strict=True)):
        assert tuple(out.tokens) == plain(case, sampled, constrained)[row % len(PROMPTS)], f"row {row}"
        check_accounts(out)
    if variant.drafter != "none":
        check_speculated([one, *many], variant)
