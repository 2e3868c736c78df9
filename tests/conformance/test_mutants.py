"""A test that cannot fail is decoration: wrong rules and lying drafts go through the same checks, and fail them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline import SpeculativeDecoder
from paceline.core.contracts import Rule
from paceline.core.tree import Drawn
from paceline.rules.match import Match
from paceline.rules.ratio import Ratio

from .enumeration import Law, World, enumerate_drafts, iid, total_variation, without_replacement
from .models import draft, target
from .mutants import MUTANTS, RedrawOnMismatch, ResidualIgnored, SoftGreedy
from .test_enumeration import BOUND, check_rule
from .test_identity import NEW, PROMPTS, SEEDS, plain

# where each mistake must show: (how the draft is drawn, topology, is it a chain, temperature)
CAUGHT: dict[type[Rule], list[tuple[Drawn, list[int], bool, float]]] = {
    SoftGreedy: [("certain", [-1], True, 0.0), ("iid", [-1, 0], True, 0.0), ("certain", [-1, -1], False, 0.0)],
    RedrawOnMismatch: [("certain", [-1], True, 1.0), ("certain", [-1, -1], False, 1.0)],
    ResidualIgnored: [("iid", [-1], True, 1.0), ("certain", [-1, 0], True, 1.0), ("iid", [-1, -1], False, 1.0)],
}


def test_every_mutant_is_listed() -> None:
    assert set(CAUGHT) == set(MUTANTS)


@pytest.mark.parametrize("case", [0, 1, 2])
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda rule: rule.name)
def test_enumeration_catches(mutant: type[Rule], case: int) -> None:
    where = CAUGHT[mutant][case % len(CAUGHT[mutant])]
    with pytest.raises(AssertionError, match="total variation"):
        check_rule(mutant(), *where)


def same_text(rule: Rule, sampled: bool) -> bool:
    """The identity check of test_identity.py, for any rule."""
    decoder = SpeculativeDecoder(target("llama"), draft("llama", "close"), rule=rule)
    settings = {"temperature": 0.9, "seed": SEEDS} if sampled else {}
    outs = decoder.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True, **settings)
    return tuple(tuple(out.tokens) for out in outs) == plain("llama", sampled)


def test_text_identity_catches() -> None:
    assert same_text(Match(), sampled=False)
    assert same_text(Match(), sampled=True)
    assert same_text(Ratio(), sampled=False)
    assert not same_text(SoftGreedy(), sampled=False)
    assert not same_text(RedrawOnMismatch(), sampled=True)


# ---- drafts that lie about how they were drawn


def sharper(law: Tensor, elders: list[int]) -> Tensor:
    """A processor applied on one side only (trap 1)."""
    return (law**2 / (law**2).sum()).clone()


def best(law: Tensor, elders: list[int]) -> Tensor:
    """The most probable token, as lookahead and greedy drafts give it."""
    return torch.zeros_like(law).index_fill_(0, law.argmax(), 1.0)


def elders_kept(law: Tensor, elders: list[int]) -> Tensor:
    """Siblings were drawn without replacement, but the law still has the tokens of the elders."""
    return law


LIES: dict[str, tuple[list[int], Drawn, Law, Law]] = {
    "a processor on one side": ([-1, 0], "iid", iid, sharper),
    "an argmax judged as a sample": ([-1, 0], "iid", best, iid),
    "a sample judged as an argmax with a law": ([-1], "iid", iid, best),
    "elder siblings still in the law": ([-1, -1], "without_replacement", without_replacement, elders_kept),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_draft_is_caught(lie: str) -> None:
    parents, drawn, draw, declare = LIES[lie]
    world = World.random(3, 3, 21, likeness=0.4)
    honest = enumerate_drafts(world, parents, drawn, draw)
    lying = enumerate_drafts(world, parents, drawn, draw, declare)
    assert total_variation(Ratio(), world, honest) < BOUND
    assert total_variation(Ratio(), world, lying) > 1e-3


def test_calling_a_sample_certain_costs_acceptance_but_not_the_law() -> None:
    """Every point mass is judged exactly, so it does not matter where it came from: slower, never wrong."""
    world = World.random(3, 3, 22)
    assert total_variation(Ratio(), world, enumerate_drafts(world, [-1, 0], "certain", iid)) < BOUND
