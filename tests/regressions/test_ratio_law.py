"""The rules that judge by a ratio: q is the law a token was drawn from, and every draw is from the right row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper

from paceline import RULES, LanguageModel, SpeculativeDecoder, TokenTree, Verdict
from paceline.core.choice import Choice
from paceline.rules.ratio import Ratio
from tests.toys import from_laws, letters, llama

P = [[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.3, 0.2], [0.7, 0.1, 0.1, 0.1]]
Q = [[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.3, 0.3, 0.2, 0.2], [0.1, 0.1, 0.1, 0.7]]


class Listening(Ratio):
    """The rule itself, with the drafts it was shown."""

    def __init__(self) -> None:
        self.trees: list[TokenTree] = []

    def verify(self, tree: TokenTree, logits: Tensor, choice: Choice) -> Verdict:
        self.trees.append(tree)
        return super().verify(tree, logits, choice)


@dataclass
class Dice:
    """Coins that always fall the same way, and everything that was asked of the random numbers of one row."""

    accept: bool
    chances: list[float] = field(default_factory=list)
    drawn: list[Tensor] = field(default_factory=list)


@contextmanager
def loaded(dice: Dice) -> Iterator[Dice]:
    def coin(self: Choice, probability: Tensor, depth: Tensor, lane: int) -> Tensor:
        dice.chances.append(float(probability[0]))
        return torch.full_like(probability, dice.accept, dtype=torch.bool)

    def draw(self: Choice, weights: Tensor, depth: Tensor) -> Tensor:
        dice.drawn.append(weights[0].clone())
        return weights.argmax(-1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Choice, "coin", coin)
        patch.setattr(Choice, "draw", draw)
        yield dice


@cache
def lm(seed: int = 0) -> LanguageModel:
    return LanguageModel(llama(seed))


def tables() -> tuple[LanguageModel, LanguageModel]:
    return LanguageModel(from_laws(P)), LanguageModel(from_laws(Q))


@pytest.mark.parametrize("options", [{}, {"tree": "levels", "branch": 3}, {"tree": "best-first"}], ids=str)
def test_q_is_the_law_the_token_was_drawn_from(options: dict[str, Any]) -> None:
    """Trap 1, T#47932, T#40949: processors or temperature on one side only; q must be what the draft sampled."""
    rule, prompt = Listening(), [1, 7, 9, 4, 7]
    SpeculativeDecoder(lm(), lm(1), gamma=3, rule=rule, options=options).generate(
        prompt, temperature=1.6, top_k=6, repetition_penalty=1.5, seed=1, max_new_tokens=4
    )
    tree = rule.trees[0]
    assert tree.laws is not None
    assert tree.drawn == ("without_replacement" if options else "iid")
    parents = tree.parents[0].tolist() if tree.parents is not None else list(range(-1, tree.nodes - 1))
    tokens = tree.tokens[0].tolist()
    for node, parent in enumerate(parents):
        path, at = [], parent
        while at >= 0:
            path.insert(0, tokens[at])
            at = parents[at]
        ids = torch.tensor([prompt + path])
        with torch.no_grad():
            scores = lm(1).model(input_ids=ids, use_cache=False).logits[:, -1]
        for step in (RepetitionPenaltyLogitsProcessor(1.5), TemperatureLogitsWarper(1.6), TopKLogitsWarper(6)):
            scores = step(ids, scores)
        elders = [tokens[other] for other in range(node) if parents[other] == parent]
        wanted = scores.softmax(-1)[0].index_fill(0, torch.tensor(elders, dtype=torch.int64), 0.0)
        torch.testing.assert_close(tree.laws[0, node], wanted / wanted.sum(), rtol=1e-9, atol=1e-12)
        assert wanted[tokens[node]] > 0


def test_a_greedy_draft_is_judged_as_certain() -> None:
    """Trap 1, T#32867, E#221: an argmax draft judged with its soft law."""
    rule = Listening()
    decoder = SpeculativeDecoder(*tables(), gamma=2, rule=rule)
    with loaded(Dice(accept=True)) as dice:
        decoder.generate([0], temperature=0.0, max_new_tokens=3)
    assert rule.trees[0].drawn == "certain"
    # after 0 the draft says 0 and the target 3; soft laws would have kept the draft with probability .1 / .4
    assert rule.trees[0].tokens.tolist() == [[0, 0]]
    assert dice.chances == [0.0, 0.0]


@pytest.mark.parametrize("accept", [True, False])
def test_a_looked_up_token_is_kept_with_the_probability_the_target_gives_it(accept: bool) -> None:
    """The one-hot rule of the table: accept with p(x), else p without x; a bonus from the last row (E#47)."""
    target, _ = tables()
    with loaded(Dice(accept)) as dice:
        SpeculativeDecoder(target, "prompt-lookup", gamma=2, rule="ratio").generate(
            [1, 2, 3, 1], temperature=1.0, max_new_tokens=3
        )  # drafts 2, 3 after the last 1
    assert dice.chances[0] == pytest.approx(P[1][2])
    if accept:
        assert dice.chances[:2] == pytest.approx([P[1][2], P[2][3]])
        assert dice.drawn[0].tolist() == pytest.approx(P[3])
    else:
        rest = [P[1][0], P[1][1], 0.0, P[1][3]]
        assert dice.drawn[0].tolist() == pytest.approx([weight / sum(rest) for weight in rest])


def test_the_bonus_token_comes_from_the_row_after_the_last_accepted_token() -> None:
    """E#47: after full acceptance the bonus was drawn from the wrong row."""
    for gamma in (1, 2, 3):
        rule = Listening()
        with loaded(Dice(accept=True)) as dice:
            out = SpeculativeDecoder(*tables(), gamma=gamma, rule=rule).generate(
                [0], temperature=1.0, max_new_tokens=gamma + 1, seed=gamma
            )
        assert out.stats.accepted == gamma
        assert dice.drawn[0].tolist() == pytest.approx(P[out.tokens[gamma - 1]])


def test_a_rejected_token_is_replaced_from_what_the_draft_left_of_its_own_row() -> None:
    """Seed 5: the last q was used for all positions, and the residual was a scalar."""
    rule = Listening()
    with loaded(Dice(accept=False)) as dice:
        SpeculativeDecoder(*tables(), gamma=3, rule=rule).generate([0], temperature=1.0, max_new_tokens=4, seed=0)
    left = [max(0.0, p - q) for p, q in zip(P[0], Q[0], strict=True)]
    assert dice.drawn[0].tolist() == pytest.approx([weight / sum(left) for weight in left])
    token = int(rule.trees[0].tokens[0, 0])
    assert dice.chances[0] == pytest.approx(min(1.0, P[0][token] / Q[0][token]))


def test_an_empty_residual_falls_back_to_the_target() -> None:
    """Trap 5: p = q up to rounding leaves nothing to draw from; it gave NaN."""
    target, _ = tables()
    for draft in (target, "prompt-lookup"):
        with loaded(Dice(accept=False)) as dice:
            SpeculativeDecoder(target, draft, gamma=2, rule="ratio").generate(
                [0, 0], temperature=1.0, max_new_tokens=3, top_k=1
            )
        assert all(weights.sum() == pytest.approx(1.0) for weights in dice.drawn)
        assert not any(weights.isnan().any() for weights in dice.drawn)


def test_a_shared_beginning_is_decided_once() -> None:
    """Trap 4: a prefix that two branches share was decided once per branch, and the best one chosen."""
    target, _ = tables()
    text = [1, 2, 3, 0, 1, 2, 0, 0, 1]  # after "1" came "2 3" and "2 0"
    rule = Listening()
    with loaded(Dice(accept=False)) as dice:
        SpeculativeDecoder(target, "prompt-lookup", gamma=2, rule=rule, options={"branches": 2}).generate(
            text, temperature=1.0, max_new_tokens=3
        )
    tree = rule.trees[0]
    assert tree.parents is not None
    assert sorted(zip(tree.parents[0].tolist(), tree.tokens[0].tolist(), strict=True)) == [(-1, 2), (0, 0), (0, 3)]
    assert len(dice.chances[: tree.nodes]) == 3


def test_children_of_a_late_expanded_node_are_a_sample_of_their_law() -> None:
    """Trap 23 in disguise: which node is expanded may not depend on the noise its children are then drawn with."""
    tiny = 1e-9
    laws = [[tiny, tiny, 0.6, 0.4], [0.25] * 4, [0.9, 0.1, tiny, tiny], [0.5, 0.5, tiny, tiny]]
    draft = LanguageModel(from_laws(laws))
    rows = 1500
    outs = SpeculativeDecoder(
        draft, draft, gamma=3, rule="ratio", nodes=6, rows=rows, options={"tree": "best-first", "branch": 2, "width": 1}
    ).generate([[0]] * rows, temperature=1.0, seed=list(range(rows)), max_new_tokens=4)
    firsts = []
    for out in outs:
        entry = out.trace.rounds[0]
        # the draft of nodes 2 and 3 first went below 2; then, having seen how sure it was there, below 3
        if entry.drafted[:2] == (2, 3) and entry.parents == (-1, -1, 0, 0, 1, 1):
            firsts.append(entry.drafted[4])
    share = firsts.count(0) / len(firsts)
    assert len(firsts) > 40
    assert abs(share - 0.5) < 5 * (0.25 / len(firsts)) ** 0.5, f"{share:.2f} of {len(firsts)} instead of 0.50"


@pytest.mark.parametrize("rule", [name for name in RULES if RULES[name].exact in ("text", "law")])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_no_token_outside_the_vocabulary_comes_out(rule: str, temperature: float) -> None:
    """Trap 13, V#45060, V#46533: ids that only pad the output layer never come out, however likely."""
    target, draft = llama(0), llama(1)
    with torch.no_grad():
        for model in (target, draft):
            model.lm_head.weight[35:] *= 20
    alphabet = letters("abcdefghijklmnopqrstuvwxyz0123456")
    pair = (LanguageModel(target, alphabet), LanguageModel(draft, alphabet))
    assert pair[0].vocabulary == 33
    out = SpeculativeDecoder(*pair, gamma=3, rule=rule).generate(
        "abc", temperature=temperature, seed=2, max_new_tokens=40, logprobs=40
    )
    assert max(out.tokens) < 33
    assert len(out.logprobs[0].top_raw) == 33
    assert min(out.stats.drafted, out.stats.recovered) > 0
