"""Every kind learns, and what it is args to accept while training is what it accepts when it drafts."""

from __future__ import annotations

import pytest
import torch

from paceline.common.errors import InputError
from paceline.core.costs import accepted_of
from paceline.engine.decoder import SpeculativeDecoder
from paceline.training.corpus import Corpus, collate
from paceline.training.distillation import LOSSES, Batch, DistillationLoss, Teacher, divergence, parse_loss
from paceline.training.evaluation import evaluate
from paceline.training.recipes.base import RECIPES, Recipe, make_recipe
from tests.selection import covering
from tests.training.toys import KINDS, in_sixteen_bits, own_texts, recipe_of, target, trained


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns(kind: str) -> None:
    lm = target()
    corpus = Corpus(own_texts(lm), 64, 512, seed=1)
    recipe = recipe_of(kind, lm, corpus)
    held = [recipe.teacher.read(batch, recipe.taps) for batch in corpus.held_out_batches(8)]
    before = evaluate(recipe, held, None, kind)
    losses = trained(recipe, corpus)
    after = evaluate(recipe, held, None, kind)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert after.loss < before.loss
    assert after.tau > before.tau
    assert after.tau == 1 + accepted_of(after.positions)


@pytest.mark.parametrize(("kind", "more"), [*((kind, {}) for kind in KINDS), ("draft-lm", {"kept": 1})])
def test_guesses_are_what_it_drafts(kind: str, more: dict[str, int]) -> None:
    """Rounds of real decoding against those that walk from the predictions along the same text."""
    lm = target()
    corpus = Corpus(own_texts(lm), 64, 512, seed=1)
    recipe = recipe_of(kind, lm, corpus, **more)
    trained(recipe, corpus, 15)
    depth = recipe.depth if kind in ("medusa", "eagle", "prophet") else 3
    decoder = SpeculativeDecoder(lm, recipe.drafter(), gamma=depth)
    most = 1
    for piece in corpus.held_out[:4]:
        prompt = piece.tokens[:6]
        found = decoder.generate(prompt, max_new_tokens=30)
        whole = prompt + found.tokens
        batch = recipe.teacher.read(collate([[type(piece)(whole)]]), recipe.taps)
        per_round = [len(each.path) + 1 for each in found.trace.rounds]
        most = max(most, *per_round[1:])
        assert _accepted(recipe, batch, len(prompt), per_round, depth) == per_round[1:]
    assert most > 1, "something is accepted at all"


@pytest.mark.parametrize(("kind", "loss"), covering(KINDS, LOSSES))
def test_in_sixteen_bits_too(kind: str, loss: str) -> None:
    """A target in bfloat16, weights in float32, products by autocast: what a GPU does."""
    recipe, corpus = in_sixteen_bits(kind, loss)
    batch = recipe.teacher.read(corpus.batch(0), recipe.taps)
    with torch.autocast("cpu", torch.bfloat16):
        recipe(batch).backward()
        assert recipe.predictions(batch).shape == (recipe.depth, *batch.ids.shape)
    weights = [weight for weight in recipe.parameters() if weight.requires_grad]
    assert all(weight.dtype == torch.float32 for weight in weights)
    assert all(weight.grad is not None and bool(weight.grad.isfinite().all()) for weight in weights)


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_leaves_what_is_learnt_in(kind: str) -> None:
    """What drafts for a target in 16 bits is in 16 bits; what is trained for it must stay in 32."""
    recipe, _ = in_sixteen_bits(kind)
    SpeculativeDecoder(recipe.teacher.lm, recipe.drafter()).generate([1, 2, 3], max_new_tokens=8)
    assert all(weight.dtype == torch.float32 for weight in recipe.parameters())


def _accepted(recipe: Recipe, batch: Batch, start: int, per_round: list[int], depth: int) -> list[int]:
    """Emitted tokens of every round but the first, by the predictions at its position."""
    predictions, text = recipe.predictions(batch)[:, 0].tolist(), batch.ids[0].tolist()
    at, found = start + per_round[0], []
    for emitted in per_round[1:]:
        accepted = 0
        while accepted < min(depth, len(text) - at - 1) and predictions[accepted][at - 2] == text[at + accepted]:
            accepted += 1
        found.append(accepted + 1)
        at += emitted
    assert at == len(text)
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_zero_where_laws_agree(name: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 7, dtype=torch.float64)
    law, token = logits.softmax(-1), torch.tensor([0, 1, 2, 3, -1])
    other = torch.randn(5, 7, dtype=torch.float64)
    far = divergence(name, other, law, token)
    assert (far[:4] > 0).all()
    if name == "ce":
        assert far[4] == 0
        assert torch.allclose(far[:4], -other.log_softmax(-1)[range(4), token[:4]])
    else:
        assert divergence(name, logits, law, token).abs().max() < 1e-9
        p, q = law, other.softmax(-1)
        by_hand = {"kl": (p * (p / q).log()).sum(-1), "reverse-kl": (q * (q / p).log()).sum(-1),
                   "tv": (p - q).abs().sum(-1) / 2}[name]  # fmt: skip
        assert torch.allclose(far, by_hand)


@pytest.mark.parametrize(("name", "temperature"), [("kl", 1.0), ("kl", 1.3), ("tv", 0.8)])
def test_a_chunked_loss_has_the_gradient_of_the_whole(
    name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("paceline.training.distillation._CHUNK", 3)
    weight = torch.randn(11, 4, dtype=torch.float64, requires_grad=True)
    states = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    last, tokens = torch.randn(8, 4, dtype=torch.float64), torch.randint(0, 11, (8,))
    teach = lambda each: each @ weight.detach().T * 2  # noqa: E731
    loss_name = name if temperature == 1 else f"{name}@{temperature}"
    loss = DistillationLoss(loss_name, teach)(lambda each: each @ weight.T, states, last, tokens, weights=(weight,))
    found = torch.autograd.grad(loss, (weight, states))
    whole = divergence(name, states @ weight.T / temperature, (teach(last) / temperature).softmax(-1), tokens).mean()
    for one, other in zip(found, torch.autograd.grad(whole, (weight, states)), strict=True):
        assert torch.allclose(one, other)


def test_losses_that_make_no_sense_are_refused() -> None:
    assert parse_loss("tv@0.8") == ("tv", 0.8)
    for wrong in ("tv@0", "kl@hot", "kl@", "tv@nan", "tv@inf"):
        with pytest.raises(InputError, match="at a temperature above 0, such as"):
            parse_loss(wrong)
    with pytest.raises(InputError, match="Did you mean 'tv'"):
        parse_loss("tvv@0.8")


@pytest.mark.parametrize("kind", [*KINDS, "own outputs"])
def test_all_that_a_kind_says_by_is_learnt(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss in chunks has gradients for its argument `weights`; every kind passes all trained weights."""
    lm = target()
    lm.model.double()
    corpus = Corpus(own_texts(lm, 12), 64, 256, seed=1)
    if kind == "own outputs":
        options = [RECIPES[name].Options(own_output=True) for name in ("medusa", "early-exit", "prophet")]
        names = ("medusa", "early-exit", "prophet")
        recipes = [make_recipe(name, Teacher(lm), corpus, "kl", o, 0) for name, o in zip(names, options, strict=True)]
    else:
        recipes = [recipe_of(kind, lm, corpus)]
    for recipe in recipes:
        trained(recipe, corpus, 2)
        batch = recipe.teacher.read(corpus.batch(0), recipe.taps)
        weights = [weight for weight in recipe.parameters() if weight.requires_grad]
        found = torch.autograd.grad(recipe(batch), weights)
        with monkeypatch.context() as patch:
            patch.setattr(DistillationLoss, "__call__", _whole)
            wanted = torch.autograd.grad(recipe(batch), weights)
        for one, other in zip(found, wanted, strict=True):
            assert other.abs().max() > 0
            assert torch.allclose(one, other)


def _whole(self: DistillationLoss, say, states, last, tokens, laws=None, weights=()):  # type: ignore[no-untyped-def]
    return self._sum(say, states, last, tokens, laws) / len(states)


def test_a_draft_has_no_more_layers_than_its_target() -> None:
    with pytest.raises(InputError, match=r"keeps 0 or more of the target's first layers, got -1\."):
        RECIPES["draft-lm"].Options(kept=-1)
    lm = target()
    with pytest.raises(InputError, match=r"has 3 layers at most, including the kept ones; got layers=2 and kept=2\."):
        make_recipe("draft-lm", Teacher(lm), None, "kl", RECIPES["draft-lm"].Options(layers=2, kept=2), 0)  # type: ignore[arg-type]


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match="Did you mean 'medusa'"):
        RECIPES["medussa"]
