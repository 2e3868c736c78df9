"""The audit itself: a rule on toy laws, then a decoder on real prompts."""

from __future__ import annotations

import time
from typing import Any

from paceline.audit.agreement import Cancel, Progress, agreement
from paceline.audit.audit_inputs import PROMPTS, options_of, subject_of
from paceline.audit.audit_verdict import Report
from paceline.audit.statistics import Sampled, law_audit
from paceline.audit.toy_worlds import audit_rule
from paceline.common.errors import InputError
from paceline.core.contracts import Rule
from paceline.engine.decoder import SpeculativeDecoder
from paceline.engine.prompts import encode_all


def audit(
    decoder: SpeculativeDecoder,
    prompts: Any = PROMPTS,
    *,
    tokens: int = 32,
    positions: int = 2,
    samples: int = 256,
    temperature: float = 0.8,
    false_alarm: float = 1e-4,
    seed: int = 0,
    progress: Progress = lambda label, done, total: None,
    cancel: Cancel = lambda: False,
) -> Report:
    """Is this decoder lossless?

    The rule is enumerated on toy laws. Then every prompt is decoded greedily, and with a seed where the rule keeps the
    text, and compared with plain decoding for `tokens` tokens; and at `positions` places `samples` pairs of tokens are
    drawn and tested against the target's own law, with a chance of `false_alarm` that any exact decoder fails.
    """
    check_plan(tokens=tokens, positions=positions, samples=samples, temperature=temperature, false_alarm=false_alarm)
    started = time.perf_counter()
    texts, _ = encode_all(list(prompts) if isinstance(prompts, tuple) else prompts, decoder.target)
    rule = audit_rule(decoder.rule, progress)
    settings = {"max_new_tokens": tokens, "temperature": 0.0, "seed": seed}
    # greedy text beyond its end, so that there is enough of it; sampled text with its end, which is part of it
    greedy, written = agreement(decoder, texts, {**settings, "ignore_eos": True}, progress, cancel)
    seeded = law = None
    if decoder.rule.exact == "text":
        seeded, _ = agreement(decoder, texts, {**settings, "temperature": temperature}, progress, cancel)
    if positions and samples:
        plan = Sampled(positions, samples, temperature, false_alarm, seed)
        law = law_audit(decoder, texts, written, plan, progress, cancel)
    return Report(subject_of(decoder), rule, greedy, seeded, law, time.perf_counter() - started)


def audit_only_rule(rule: Rule, progress: Progress = lambda label, done, total: None) -> Report:
    """The first part alone: no model is needed."""
    started = time.perf_counter()
    found = audit_rule(rule, progress)
    return Report({"rule": rule.name, "rule_options": options_of(rule)}, found, seconds=time.perf_counter() - started)


def check_plan(tokens: int, positions: int, samples: int, temperature: float, false_alarm: float) -> None:
    """Refuse what makes no sense, before a model is read."""
    for name, value, least in (("tokens", tokens, 1), ("positions", positions, 0), ("samples", samples, 0)):
        if value < least:
            raise InputError(f"{name} of an audit must be at least {least}, got {value}.")
    if 0 < samples < 200 and positions:
        raise InputError(f"samples of an audit must be 0 (no statistics) or at least 200, got {samples}.")
    if not temperature > 0:
        raise InputError(f"temperature of an audit must be more than 0, got {temperature}; greedy is tested anyway.")
    if not 0 < false_alarm <= 0.1:
        raise InputError(f"false_alarm must be more than 0 and at most 0.1, got {false_alarm}.")
