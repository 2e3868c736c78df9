"""Every control of `Sampling`, alone and together, per row of a batch and per node of a tree: the text is plain's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import NoRepeatNGramLogitsProcessor

from paceline import RULES, Generation, Sampling, UnsupportedError

from .constraints import Winding
from .drafters import PLAIN, Variant, board, in_full, some_variants
from .models import EOS, VOCABULARY
from .rules import RuleVariant, law_rules
from .test_identity import PROMPTS, check_accounts

CASE = "llama"
NEW = 20
SEEDS = [30, 31, 32, 33]


def by_prefix(prefix: Tensor, logits: Tensor) -> Tensor:
    """A user's own control that depends on every token before: a wrong prefix moves the bonus to another token."""
    weights = torch.arange(1, len(prefix) + 1)
    lucky = int((prefix * weights).sum()) % VOCABULARY
    return logits + 4.0 * (torch.arange(VOCABULARY) == lucky)


def in_place(prefix: Tensor, logits: Tensor) -> Tensor:
    """A control that edits what it is given: it must not reach anything else."""
    logits[prefix[-1]] = -1e9
    return logits


# greedy controls work at any temperature; the others only where something is sampled
EDITS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.6},
    "repetition reward": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.0},
    "presence and frequency, negative": {"presence_penalty": -1.0, "frequency_penalty": -0.5},
    "bias": {"logit_bias": {3: 3.0, 8: -4.0, 12: 2.0, 33: -100.0}},
    "bans": {"banned_tokens": [25, 33, 12, 11, 3, 8]},
    "callable": {"processors": by_prefix},
    "callable in place": {"processors": [in_place, by_prefix]},
    "transformers' own": {"processors": NoRepeatNGramLogitsProcessor(1)},
    "constraint": {"constraint": Winding()},
    "minimum length": {"min_new_tokens": 9, "eos_token_ids": [25, 12, 33, EOS, 7], "ignore_eos": False},
}
SAMPLERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 2.5},
    "top-k": {"top_k": 3},
    "top-k of one": {"top_k": 1},
    "top-p": {"top_p": 0.6},
    "min-p": {"min_p": 0.3},
    "typical": {"typical_p": 0.5},
    "top-k with noise": {"top_k": 6, "noise": 1.5},
    "noise, greedy": {"temperature": 0.0, "top_k": 6, "noise": 1.5},
    "dynamic temperature": {"temperature": 1.2, "dynamic_temperature": 1.0},
    "dynamic temperature, bent": {"temperature": 1.2, "dynamic_temperature": 1.0, "dynamic_exponent": 3.0},
}
TOGETHER: dict[str, dict[str, Any]] = {
    "samplers": {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9},
    "all": {
        "temperature": 1.5,
        "dynamic_temperature": 0.5,
        "top_k": 15,
        "noise": 0.5,
        "top_p": 0.95,
        "min_p": 0.01,
        "typical_p": 0.95,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {3: 2.0},
        "banned_tokens": [33],
        "processors": by_prefix,
        "constraint": Winding(),
    },
}
# one row each: greedy, sampled, penalised, edited by everything, with a callable of its own
MIXED: dict[str, Any] = {
    "temperature": [0.0, 0.8, 0.0, 1.4],
    "top_k": [0, 0, 0, 7],
    "top_p": [1.0, 0.9, 1.0, 1.0],
    "typical_p": [0.4, 1.0, 1.0, 0.8],
    "noise": [0.0, 0.0, 0.0, 1.0],
    "repetition_penalty": [1.0, 1.0, 1.5, 1.0],
    "frequency_penalty": [0.0, 0.7, 0.0, 0.0],
    "logit_bias": [{}, {}, {3: 4.0}, {}],
    "banned_tokens": [[], [25, 33], [], [12]],
    "min_new_tokens": [0, 5, 0, 0],
    "processors": [[], [], [by_prefix], [in_place]],
    "constraint": [None, Winding(), None, Winding()],
}
CONTROLS: dict[str, dict[str, Any]] = {
    **{name: {"temperature": 0.0, **control} for name, control in EDITS.items()},
    **{f"{name}, sampled": {"temperature": 0.9, **control} for name, control in EDITS.items()},
    **{name: {"temperature": 1.0, **control} for name, control in {**SAMPLERS, **TOGETHER}.items()},
    "mixed rows": MIXED,
}


def on_controls(variant: Variant) -> int:
    """Of `in_full` the tree meets every control and the chain every second one; others every twelfth, and `OFTEN`."""
    chain, tree = in_full()
    return 1 if variant == tree else 2 if variant == chain else 12


def run(decoder: Any, control: dict[str, Any]) -> list[Generation]:
    return decoder.generate(PROMPTS, **{"max_new_tokens": NEW, "ignore_eos": True, "seed": SEEDS, **control})


def row_of(control: dict[str, Any], row: int) -> dict[str, Any]:
    """The settings of one row of a batch."""
    return {name: value[row] if control is MIXED else value for name, value in control.items()}


@cache
def plain(name: str) -> list[list[int]]:
    """One prompt at a time, one token at a time."""
    decoder = PLAIN.decoder(CASE)
    texts = []
    for row, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True)):
        settings = {"max_new_tokens": NEW, "ignore_eos": True, "seed": seed, **row_of(CONTROLS[name], row)}
        texts.append(decoder.generate(prompt, **settings).tokens)
    return texts


def test_every_control_is_here() -> None:
    """A control that is added to `Sampling` must be added above."""
    tried = {name for control in CONTROLS.values() for name in control}
    assert {entry.name for entry in dataclasses.fields(Sampling)} - {"seed"} <= tried


@pytest.mark.parametrize("name", [name for name in CONTROLS if name != "temperature"])
def test_every_control_does_something(name: str) -> None:
    base = CONTROLS[name].get("temperature", 0.0) if name != "mixed rows" else MIXED["temperature"]
    settings = {"temperature": base, "ignore_eos": CONTROLS[name].get("ignore_eos", True)}
    settings["eos_token_ids"] = CONTROLS[name].get("eos_token_ids")
    without = run(PLAIN.decoder(CASE), {key: value for key, value in settings.items() if value is not None})
    if name == "hot":
        without = run(PLAIN.decoder(CASE), CONTROLS["temperature"])
    assert [out.tokens for out in without] != plain(name)


@pytest.mark.parametrize(("name", "variant"), board(CONTROLS, [PLAIN, *some_variants()], on_controls))
def test_the_text_is_that_of_plain_decoding(name: str, variant: Variant) -> None:
    outs = run(variant.decoder(CASE, gamma=4), CONTROLS[name])
    assert [out.tokens for out in outs] == plain(name)
    for out in outs:
        check_accounts(out)
        # the controls are on the draft as on the target, or a perfect draft would not be perfect
        if variant.perfect and variant.chain and out.finish_reason == "length":
            assert out.stats.accepted == out.stats.drafted - _beyond_the_end(outs, out)


def _beyond_the_end(outs: list[Generation], out: Generation) -> int:
    """Rows that end first are drafted for past their end: the rows of a batch share one depth."""
    return sum(len(entry.drafted) - len(entry.path) for entry in out.trace.rounds[-1:] if entry.own is None)


OFTEN = ["all", "mixed rows", "callable, sampled", "constraint"]


@pytest.mark.parametrize("variant", [variant for variant in some_variants() if variant not in in_full()], ids=str)
def test_every_variant_with_controls_together(variant: Variant) -> None:
    decoder = variant.decoder(CASE, gamma=4)
    for name in OFTEN:
        assert [out.tokens for out in run(decoder, CONTROLS[name])] == plain(name), name


def law_pairs() -> list[Any]:
    """The ways to draft and the rules that keep the law, each once however many names it has: one rule for every
    variant, a second one nightly, spread so that every rule has its share."""
    rules = list({RULES[rule.name].verify: rule for rule in law_rules()}.values())
    return [
        pytest.param(rule, variant, id=f"{rule}-{variant}", marks=[pytest.mark.nightly] * turn)
        for j, variant in enumerate(some_variants())
        for i, rule in enumerate(rules)
        if (turn := (i + j) % len(rules)) < 2  # the second one nightly
    ]


@pytest.mark.parametrize(("rule", "variant"), law_pairs())
def test_every_rule_that_keeps_the_law_keeps_greedy_text(rule: RuleVariant, variant: Variant) -> None:
    for name in ("repetition penalty", "callable", "bans", "constraint"):
        # a rule for chains refuses a drafter of trees
        refused = nullcontext() if RULES[rule.name].branches else suppress(UnsupportedError)
        with refused:
            outs = run(variant.decoder(CASE, gamma=4, rule=rule.make()), CONTROLS[name])
            assert [out.tokens for out in outs] == plain(name)


Process = Callable[[Tensor, Tensor], Tensor]


@pytest.mark.parametrize("variant", [PLAIN, *some_variants()], ids=str)
def test_a_callable_sees_the_text_it_continues(variant: Variant) -> None:
    """Among the prefixes it is shown is every prefix of the text that was written, and each begins with the prompt."""
    seen: set[tuple[int, ...]] = set()

    def note(prefix: Tensor, logits: Tensor) -> Tensor:
        seen.add(tuple(prefix.tolist()))
        return logits

    out = variant.decoder(CASE).generate(PROMPTS[0], max_new_tokens=12, ignore_eos=True, processors=note)
    whole = PROMPTS[0] + out.tokens
    assert {tuple(whole[:end]) for end in range(len(PROMPTS[0]), len(whole))} <= seen
    assert all(prefix[: len(PROMPTS[0])] == tuple(PROMPTS[0]) for prefix in seen)
