"""End to end, by sampling: the texts of many seeds follow the target's law (chi-square, alpha 1e-6).

Enumeration (test_enumeration.py) proves the rules. This also covers the noise, the draws of drafters and the loop. Each
test prints N and the smallest total variation that it would detect.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import LanguageModel, SpeculativeDecoder
from paceline.core.contracts import RULES

from .chi_square import ALPHA, critical, detectable, first_tokens, p_value, tail
from .drafters import model_drafters
from .models import CASES, build
from .mutants import ResidualIgnored
from .rules import RuleVariant, law_rules
from .tables import TableModel

Tell = Callable[[str, object], None]
START = 2
# The most probable draft token is nearly always rejected, and its probability decides whether another branch is drawn.
# A draw that decides about another draw shows here.
TARGET = TableModel([[0.10, 0.78, 0.12], [0.34, 0.32, 0.34], [0.02, 0.96, 0.02]])
DRAFT = TableModel([[0.10, 0.78, 0.12], [0.34, 0.32, 0.34], [0.76, 0.22, 0.02]])
# Half of the drafts are rejected, and two tokens are left over. A random number that is used twice shows here: for two
# siblings, or for a draft and for the token after its rejection.
WORLDS = {"adverse": (TARGET, DRAFT), "even": (TableModel([[0.2, 0.5, 0.3]] * 3), TableModel([[0.6, 0.3, 0.1]] * 3))}


def report(counts: Tensor, law: Tensor, tell: Tell, what: str) -> None:
    N, freedom = int(counts.sum()), int((law > 0).sum()) - 1
    p = p_value(counts, law)
    tell("measured", f"{what}: N={N}, p={p:.2g}, total variation from {detectable(N, freedom):.4f} on would be seen")
    assert p > ALPHA, f"{what}: p = {p:.1e}; total variation about {float((counts / N - law).abs().sum() / 2):.4f}"


def sample(
    target: LanguageModel, rule: RuleVariant, name: str, options: dict, N: int, tokens: int, **controls: Any
) -> Tensor:
    decoder = SpeculativeDecoder(target, name, options=options, rule=rule.make(), gamma=3, nodes=6, rows=N)
    total = torch.zeros([target.vocabulary] * tokens, dtype=torch.int64)
    for start in range(0, N, 10_000):
        total += first_tokens(
            decoder, [START], tokens, range(start, min(N, start + 10_000)), **(controls or {"temperature": 1.0})
        )
    return total


def others() -> list[tuple[RuleVariant, str, dict]]:
    """The other rules, each `verify` once: on a chain, and on the tree whose growth depends most on its draws."""
    hard = [(name, options) for name, options in model_drafters() if name == "draft-model"]
    seen, found = {(RULES[JUDGE.name].verify, JUDGE.make().draw)}, []
    for rule in law_rules():
        kind = RULES[rule.name].verify, rule.make().draw
        shapes = ("best-first", "chain") if RULES[rule.name].branches else ("chain",)
        if kind not in seen:
            found += [
                (rule, name, options)
                for name, options in hard
                if options["tree"] in shapes and "vocabulary" not in options
            ]
        seen.add(kind)
    return found


# Every drafter in every topology is verified by the rule that looks at most of it. `match` writes the same text for
# every draft, so it needs one drafter.
JUDGE = RuleVariant("traversal")
RUNS = [(RuleVariant("match"), "none", {}), *((JUDGE, *drafter) for drafter in [("none", {}), *model_drafters()])]
DAILY, NIGHTLY = 3_000, 15_000  # texts
SMALL_EFFECT = 60_000  # texts, where one draw may decide about another one


def table_cases() -> list[Any]:
    """Daily each run meets one of the two worlds with few texts, nightly both with many."""
    cases = []
    for i, (rule, name, options) in enumerate([*RUNS, *others()]):
        for j, world in enumerate(WORLDS):
            hard = world == "adverse" and options.get("tree") == "best-first"
            counts = {SMALL_EFFECT if hard else NIGHTLY: [pytest.mark.nightly]}
            if hard and rule == JUDGE and name == "draft-model":
                counts = {SMALL_EFFECT: []}
            elif (i + j) % 2 == 0:
                counts[DAILY] = []
            for N, marks in counts.items():
                cases.append(
                    pytest.param(rule, name, options, world, N, id=f"{rule}-{name}-{options}-{world}-{N}", marks=marks)
                )
    return cases


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "name", "options", "world", "N"), table_cases())
def test_tables(rule: RuleVariant, name: str, options: dict, world: str, N: int, record_property: Tell) -> None:
    target, draft = WORLDS[world]
    given = {**options, "model": draft} if name != "none" else {}
    chain = options.get("tree", "chain") == "chain"
    # four tokens are two rounds and more: positions that a rule rejected are drafted again
    tokens = 4 if world == "even" and chain else 2
    counts = sample(target, rule, name, given, N, tokens)
    report(counts, target.joint(START, tokens), record_property, f"{rule}, {name} {options}, {world}")


# every third run daily
SOME_RUNS = [pytest.param(*run, marks=[pytest.mark.nightly] * (i % 3 > 0)) for i, run in enumerate(RUNS)]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "name", "options"), SOME_RUNS, ids=str)
def test_a_real_model(rule: RuleVariant, name: str, options: dict, record_property: Tell) -> None:
    """A tiny Llama and its own law, from a forward of transformers over all texts of two tokens."""
    small = {"vocab_size": 5, "eos_token_id": None, "initializer_range": 0.5}
    target = LanguageModel(build(CASES["llama"], 1, **small))
    given = {**options, "model": LanguageModel(build(CASES["llama"], 2, **small))} if name != "none" else {}
    texts = torch.tensor([[START, *pair] for pair in itertools.product(range(5), repeat=2)])
    with torch.inference_mode():
        logs = target.model(input_ids=texts).logits.log_softmax(-1)
    law = sum(logs[torch.arange(25), at, texts[:, at + 1]] for at in range(2)).exp().view(5, 5)
    report(sample(target, rule, name, given, DAILY, 2), law, record_property, f"{rule}, {name} {options}, llama")


CONTROLS: dict[str, Any] = {"temperature": 0.8, "top_k": 2, "presence_penalty": 0.9, "logit_bias": {1: -0.7}}


def controlled(logits: Tensor, before: list[int]) -> Tensor:
    """The law that CONTROLS make, by hand."""
    scores = logits.clone()
    for token in set(before):
        scores[token] -= 0.9
    scores[1] -= 0.7
    scores = scores / 0.8
    scores[scores.argmin()] = float("-inf")  # two of three stay
    return scores.softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "name", "options"), SOME_RUNS, ids=str)
def test_controls(rule: RuleVariant, name: str, options: dict, record_property: Tell) -> None:
    """The texts follow the law after all controls; the draft is verified with its own law after them."""
    target, draft = WORLDS["even"]
    given = {**options, "model": draft} if name != "none" else {}
    logs = target.laws.log()
    rows = [controlled(logs[START], [])[one] * controlled(logs[one], [one]) for one in range(3)]
    counts = sample(target, rule, name, given, DAILY, 2, **CONTROLS)
    report(counts, torch.stack(rows), record_property, f"{rule}, {name} {options}, with controls")


def test_the_test_can_fail() -> None:
    """A residual that is ignored is seen with a tenth of the texts."""
    decoder = SpeculativeDecoder(TARGET, "draft-model", options={"model": DRAFT}, rule=ResidualIgnored(), rows=10_000)
    counts = first_tokens(decoder, [START], 2, range(10_000), temperature=1.0)
    assert p_value(counts, TARGET.joint(START, 2)) < ALPHA


def test_the_tail_is_that_of_chi_square() -> None:
    assert tail(3.841458820694124, 1) == pytest.approx(0.05)
    assert tail(18.307038053275146, 10) == pytest.approx(0.05)
    assert critical(8) == pytest.approx(42.70, abs=0.01)
    assert detectable(100_000, 26) < 0.02
