"""The lossy rules: what each still promises, that none is used by accident, and that results say so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline import RULES, Budget, InputError, SpeculativeDecoder, TokenTree, UnsupportedError
from paceline.audit.enumeration import (
    Drafts,
    World,
    emitted_law,
    enumerate_drafts,
    iid,
    total_variation,
    without_replacement,
)
from paceline.drafters.models.draft_model import DraftModel
from paceline.rules.lenience import Lenience
from paceline.rules.skip_adjustment import SkipAdjustment
from paceline.rules.threshold import Threshold
from paceline.rules.typical import Typical
from tests.conformance.models import draft, target

LOSSY = [name for name in RULES if not RULES[name].exact]
WORLD = World.random(3, 3, 31, likeness=0.3)


def test_they_are_these() -> None:
    assert LOSSY == ["lenience", "skip-adjustment", "threshold", "typical"]


@pytest.mark.parametrize("name", LOSSY)
def test_none_is_used_by_accident(name: str) -> None:
    with pytest.raises(InputError, match=f"'{name}' is lossy.*allow_lossy=True"):
        SpeculativeDecoder(target("llama"), "prompt-lookup", rule=name)
    with pytest.raises(InputError, match="lossy"):
        SpeculativeDecoder(target("llama"), draft=None, rule=RULES[name]())


@pytest.mark.parametrize("name", LOSSY)
def test_the_statistics_say_so(name: str) -> None:
    decoder = SpeculativeDecoder(target("llama"), draft("llama", "close"), rule=name, allow_lossy=True)
    stats = decoder.generate([1, 7, 9, 4], max_new_tokens=8, temperature=1.0, seed=1).stats
    assert stats.lossy
    assert stats.as_dict()["rule"] == name
    assert f"rule {name} (lossy)" in decoder.describe()
    exact = SpeculativeDecoder(target("llama"), draft=None, allow_lossy=True).generate([1], max_new_tokens=1).stats
    assert (exact.rule, exact.lossy) == ("match", False)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize(("parents", "chain"), [([-1, 0], True), ([-1, -1, 0], False)])
def test_they_are_lossy_and_say_it_rightly(name: str, parents: list[int], chain: bool) -> None:
    """A rule that is exact after all should be registered as such."""
    drafts = enumerate_drafts(WORLD, parents, "without_replacement", without_replacement, chain=chain)
    law = emitted_law(RULES[name](), WORLD, drafts, 1.0)
    assert float(law.sum()) == pytest.approx(1.0)
    assert total_variation(RULES[name](), WORLD, drafts) > 0.01


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("how", ["greedy", "batch"])
def test_greedy_text_is_the_targets_own(name: str, how: str) -> None:
    """At temperature 0 the law is a point mass, so there is nothing to be lenient about; also beside a sampled row."""
    prompt = [1, 7, 9, 4, 7, 9, 4]
    wanted = SpeculativeDecoder(target("llama"), draft=None).generate(prompt, max_new_tokens=20, ignore_eos=True).tokens
    decoder = SpeculativeDecoder(
        target("llama"),
        "draft-model",
        options={"model": draft("llama", "close"), "tree": "best-first"},
        rule=name,
        allow_lossy=True,
    )
    temperatures: Any = 0.0 if how == "greedy" else [0.0, 1.0]
    prompts = prompt if how == "greedy" else [prompt, prompt]
    out = decoder.generate(prompts, max_new_tokens=20, ignore_eos=True, temperature=temperatures)
    assert (out if how == "greedy" else out[0]).tokens == wanted


class Coupled(DraftModel):
    """Draws with the target's noise, whatever the rule wants."""

    def propose(self, rows: Any, budget: Budget) -> TokenTree:
        return super().propose(rows, replace(budget, draw="coupled"))


@pytest.mark.parametrize("name", ["lenience", "skip-adjustment"])
def test_who_weighs_by_a_law_refuses_a_draft_without_one(name: str) -> None:
    drafter = Coupled(Coupled.Options(model=draft("llama", "close")))
    decoder = SpeculativeDecoder(target("llama"), drafter, rule=name, allow_lossy=True)
    with pytest.raises(UnsupportedError, match=f"'{name}' cannot judge .* 'coupled'"):
        decoder.generate([1, 7], temperature=1.0, max_new_tokens=4)


# ---- what each of them still promises


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.1])
def test_lenience_never_gives_a_token_more_than_its_share_over_l(lenience: float) -> None:
    rule = Lenience(Lenience.Options(lenience=lenience))
    drafts = enumerate_drafts(WORLD, [-1], "iid", iid, chain=True)
    first = emitted_law(rule, WORLD, drafts, 1.0).sum((0, 2, 3))
    share = (first / WORLD.target[0]).max()
    assert share <= 1 / lenience + 1e-9
    assert lenience == 1.0 or share > 1.01
    assert lenience < 1.0 or total_variation(rule, WORLD, drafts) < 1e-9


def test_skip_adjustment_draws_from_p_after_a_rejection() -> None:
    """One token, by hand: q is served min(p, q), and the rest of the time p."""
    drafts = enumerate_drafts(WORLD, [-1], "iid", iid, chain=True)
    first = emitted_law(SkipAdjustment(), WORLD, drafts, 1.0).sum((0, 2, 3))
    p, q = WORLD.target[0], WORLD.draft[0]
    kept = torch.minimum(p, q)
    torch.testing.assert_close(first, kept + (1 - kept.sum()) * p)


def test_typical_and_threshold_accept_what_is_plausible() -> None:
    law = torch.tensor([[[0.5, 0.3, 0.2, 0.0], [0.97, 0.03, 0.0, 0.0], [0.25] * 4]], dtype=torch.float64)
    entropy = -(law * law.clamp(min=1e-300).log()).sum(-1)
    torch.testing.assert_close(Typical().floor(law), (0.09 * (-entropy).exp()).clamp(max=0.3))
    assert Typical(Typical.Options(epsilon=0.01)).floor(law).tolist() == [[0.01] * 3]
    assert Threshold().floor(law).tolist() == [[0.3, 0.3, 0.25]]
    assert Threshold(Threshold.Options(least=1.0, share=0.5)).floor(law).tolist() == [[0.25, 0.485, 0.125]]


def test_the_longest_plausible_path_wins() -> None:
    """Both first tokens are plausible; only the second one's child is. Then the target's own token follows."""
    p = torch.tensor([0.5, 0.4, 0.1], dtype=torch.float64)
    after = torch.zeros(3, 3, dtype=torch.float64)
    after[0] = torch.tensor([1.0, 0.0, 0.0])
    after[1] = torch.tensor([0.0, 0.0, 1.0])
    after[2] = 1 / 3
    last = torch.zeros(3, 3, 3, dtype=torch.float64)
    last[..., 0] = 1.0
    world = World(3, 3, [p, after, last], [p, after, last])
    tree = TokenTree(torch.tensor([[0, 1, 2, 2]]), torch.tensor([[-1, -1, 0, 1]]))
    law = emitted_law(Threshold(Threshold.Options(least=0.35)), world, Drafts(tree, torch.ones(1).double()), 1.0)
    assert float(law[0, 1, 2, 0]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lenience", {"lenience": 0.0}),
        ("lenience", {"lenience": 1.5}),
        ("typical", {"epsilon": 0.0}),
        ("typical", {"delta": 2.0}),
        ("threshold", {"least": -1.0}),
        ("threshold", {"share": 0.0}),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        SpeculativeDecoder(target("llama"), draft=None, rule=name, rule_options=options, allow_lossy=True)
