"""Every rule with every drafter, as a chain and as a tree, on a ragged batch of greedy and sampled rows.

Greedy text is plain decoding's, sampled text has its accounts in order, and a rule for chains refuses drafts of trees.
"""

from __future__ import annotations

from typing import Any

import pytest

from paceline import DRAFTERS, RULES, UnsupportedError
from paceline.core.protocols import ChoosesLength

from .drafters import Variant, some_variants, topologies
from .rules import RuleVariant
from .test_identity import PROMPTS, SEEDS, check_accounts, plain

CASE, NEW = "llama", 8
TEMPERATURES = [0.0, 0.9, 0.9, 0.0]
ALL_RULES = [
    RuleVariant(name, options)
    for name in RULES
    if RULES[name].exact != "beam"  # tests/rules/test_beam.py has that one with every drafter
    for options in topologies(RULES[name].Options)
]


def write(variant: Variant, rule: Any, **settings: Any) -> list[Any]:
    decoder = variant.decoder(CASE, gamma=4, rule=rule, allow_lossy=True)
    return decoder.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True, **settings)


@pytest.mark.parametrize("variant", some_variants(), ids=str)
def test_every_rule_with_every_drafter(variant: Variant) -> None:
    wanted = [list(text[:NEW]) for text in plain(CASE, False)]
    traces = [out.trace for out in write(variant, "match")]
    branches = any(entry.parents is not None for trace in traces for entry in trace.rounds)
    for rule in ALL_RULES:
        if branches and not RULES[rule.name].branches and not issubclass(DRAFTERS[variant.drafter], ChoosesLength):
            with pytest.raises(UnsupportedError, match="judges chains"):
                write(variant, rule.make())
            continue
        outs = write(variant, rule.make(), temperature=TEMPERATURES, seed=SEEDS)
        for out, text, temperature in zip(outs, wanted, TEMPERATURES, strict=True):
            assert temperature or out.tokens == text, str(rule)
            check_accounts(out)
            assert out.stats.rule == rule.name
            assert out.stats.lossy == (RULES[rule.name].exact == "")


def test_every_rule_is_here() -> None:
    assert {rule.name for rule in ALL_RULES} == set(RULES) - {"beam"}
