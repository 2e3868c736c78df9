"""The audit: a rule on toy distributions, then a decoder on prompts, and the verdict that follows."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from paceline.audit.agreement import Agreement, Cancel, Divergence, Progress, agreement
from paceline.audit.statistics import LawAudit, SamplePlan, law_audit
from paceline.audit.toy_worlds import BOUND, RuleAudit, audit_rule
from paceline.common.errors import InputError
from paceline.common.text_formats import parse_json
from paceline.core.contracts import Drafter, Rule
from paceline.engine.decoder import SpeculativeDecoder
from paceline.engine.prompts import encode_all

# ---- What is audited


def subject_of(decoder: SpeculativeDecoder) -> dict[str, Any]:
    """The target, the drafter and the rule of a decoder with their options, as plain values."""
    lm = decoder.target
    return {
        "target": lm.name,
        "weights": str(lm.weights) or None,
        "dtype": str(lm.dtype).removeprefix("torch."),
        "device": str(lm.device),
        "draft": decoder.drafter.name,
        "drafter_options": options_of(decoder.drafter),
        "gamma": decoder.gamma,
        "nodes": decoder.nodes,
        "rule": decoder.rule.name,
        "rule_options": options_of(decoder.rule),
    }


def options_of(owner: Drafter | Rule) -> dict[str, Any]:
    """The options as plain values; a model is its name."""
    options = getattr(owner, "options", None)
    values = {item.name: getattr(options, item.name) for item in fields(options)} if is_dataclass(options) else {}
    return {name: getattr(value, "name", value) for name, value in values.items()}


# Chat, code, a summary, an edit, a table, a list, arithmetic, a story. Some repeat themselves, so that lookup drafters
# draft something.
PROMPTS = (
    "User: Which is heavier, a litre of water or a litre of oil, and why?\nAssistant:",
    "def area(width, height):\n    return width * height\n\n\ndef perimeter(width, height):\n    return",
    "The ferry leaves at eight. The ferry is late when the wind is strong. Today the wind is strong.\n"
    "Summary: The ferry",
    "Old: The red boat, the red sail and the red flag.\nNew, in blue: The blue boat, the blue",
    "city, river\nVienna, Danube\nLondon, Thames\nParis, Seine\nRome,",
    "Three things to pack for a walk in the mountains:\n1. water\n2.",
    "Q: What is 12 plus 30?\nA: 12 plus 30 is 42.\nQ: What is 25 plus 14?\nA: 25 plus 14 is",
    "Long before the village had a name, an old woman kept bees at the edge of the wood, and",
)


def read_prompts(path: Path) -> list[str]:
    """One prompt per line of a text file; of a .jsonl file the field "prompt" of each line, or the first of "turns"."""
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"The prompts '{path}' cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from error
    if not lines:
        raise InputError(f"The file '{path}' has no prompts; write one per line.")
    if path.suffix != ".jsonl":
        return lines
    return [_prompt_of(line, f"line {number} of '{path}'") for number, line in enumerate(lines, 1)]


def _prompt_of(line: str, where: str) -> str:
    try:
        content: Any = parse_json(line)
    except ValueError as error:
        raise InputError(f"The {where} is not valid JSON: {error}.") from None
    prompt = content.get("prompt", content.get("turns")) if isinstance(content, dict) else content
    if isinstance(prompt, list) and prompt:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise InputError(f"The {where} has no prompt; give a string as 'prompt', or a list of them as 'turns'.")
    return prompt


# ---- The verdict


@dataclass(frozen=True)
class Report:
    """The results of an audit. A part that was not run is None."""

    subject: dict[str, Any]  # see `subject_of`
    rule: RuleAudit
    greedy: Agreement | None = None
    seeded: Agreement | None = None
    law: LawAudit | None = None
    seconds: float = 0.0

    @property
    def findings(self) -> list[str]:
        """What is not lossless, one phrase each."""
        return [*self._of_rule(), *self._of_text(), *self._of_law()]

    @property
    def lossless(self) -> bool:
        return not self.findings

    @property
    def exit_code(self) -> int:
        return 0 if self.lossless else 1

    @property
    def ties(self) -> list[Divergence]:
        return [tie for part in (self.greedy, self.seeded) if part is not None for tie in part.ties]

    @property
    def verdict(self) -> str:
        findings = self.findings
        if findings:
            more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
            return f"NOT LOSSLESS: {findings[0]}{more}"
        exact = f"exact up to ties of {self.subject['dtype']}" if self.ties else "exact"
        drafted = [part.drafted for part in (self.greedy, self.seeded) if part is not None]
        if drafted and not sum(drafted):
            return f"{exact}, but nothing was drafted: only plain decoding was seen"
        return exact

    def _of_rule(self) -> list[str]:
        rule, worst = self.rule, self.rule.worst
        if not rule.keeps:
            return [f"rule '{rule.rule}' is lossy by design; total variation up to {rule.largest:.3f} on toy laws"]
        if worst is None:
            return []
        if worst.failure is not None:
            return [f"rule '{rule.rule}' fails on {worst.case}: {worst.failure}"]
        return [f"rule '{rule.rule}' changes the law: total variation {worst.largest:.3g} on {worst.case}"]

    def _of_text(self) -> list[str]:
        findings = []
        for name, part in (("greedy", self.greedy), ("same-seed", self.seeded)):
            if part is None or not part.bugs:
                continue
            first = part.bugs[0]
            gap = "" if first.gap is None else f", scores {first.gap:.3g} apart where {first.tolerance:.1g} is a tie"
            findings.append(
                f"{name} text differs from plain decoding in {len(part.bugs)} of {part.texts} texts, first in prompt "
                f"{first.prompt + 1} at new token {first.position + 1}{gap}"
            )
        return findings

    def _of_law(self) -> list[str]:
        if self.law is None:
            return []
        return [
            f"the next two tokens after prompt {test.prompt + 1} do not follow the target's law: p = {test.p:.1e}, "
            f"total variation about {test.distance:.3f}"
            for test in self.law.failed
        ]

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        rule = {
            "name": self.rule.rule,
            "keeps": self.rule.keeps,
            "bound": BOUND,
            "largest": self.rule.largest,
            "by_drawn": {
                drawn: {"mean": mean, "largest": largest} for drawn, (mean, largest) in self.rule.by_drawn.items()
            },
            "cases": [asdict(case) for case in self.rule.measured],
        }
        law = None if self.law is None else {**asdict(self.law), "level": self.law.level}
        return {
            "verdict": self.verdict,
            "lossless": self.lossless,
            "findings": self.findings,
            "subject": self.subject,
            "rule": rule,
            "greedy": _agreement(self.greedy),
            "same_seed": _agreement(self.seeded),
            "law": law,
            "seconds": self.seconds,
        }


def _agreement(part: Agreement | None) -> dict[str, Any] | None:
    if part is None:
        return None
    return {**asdict(part), "divergences": [{**asdict(item), "tie": item.tie} for item in part.divergences]}


# ---- The audit


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
    """Test whether a decoder is lossless.

    First the rule is enumerated on toy distributions. Then every prompt is decoded greedily, and with a seed if the
    rule keeps the text, and compared with plain decoding for `tokens` tokens. At last `samples` pairs of tokens at each
    of `positions` positions are tested against the target's distribution. An exact decoder fails this test with the
    probability `false_alarm`.
    """
    check_plan(tokens=tokens, positions=positions, samples=samples, temperature=temperature, false_alarm=false_alarm)
    started = time.perf_counter()
    texts, _ = encode_all(list(prompts) if isinstance(prompts, tuple) else prompts, decoder.target)
    rule = audit_rule(decoder.rule, progress)
    settings = {"max_new_tokens": tokens, "temperature": 0.0, "seed": seed}
    # greedy text continues after EOS, so that it is long enough; sampled text ends with EOS, which is a part of it
    greedy, written = agreement(decoder, texts, {**settings, "ignore_eos": True}, progress, cancel)
    seeded = law = None
    if decoder.rule.exact == "text":
        seeded, _ = agreement(decoder, texts, {**settings, "temperature": temperature}, progress, cancel)
    if positions and samples:
        plan = SamplePlan(positions, samples, temperature, false_alarm, seed)
        law = law_audit(decoder, texts, written, plan, progress, cancel)
    return Report(subject_of(decoder), rule, greedy, seeded, law, time.perf_counter() - started)


def audit_only_rule(rule: Rule, progress: Progress = lambda label, done, total: None) -> Report:
    """The first part of `audit`, which needs no model."""
    started = time.perf_counter()
    result = audit_rule(rule, progress)
    return Report({"rule": rule.name, "rule_options": options_of(rule)}, result, seconds=time.perf_counter() - started)


def check_plan(tokens: int, positions: int, samples: int, temperature: float, false_alarm: float) -> None:
    """Refuse bad values before a model is loaded."""
    for name, value, least in (("tokens", tokens, 1), ("positions", positions, 0), ("samples", samples, 0)):
        if value < least:
            raise InputError(f"{name} of an audit must be at least {least}, got {value}.")
    if 0 < samples < 200 and positions:
        raise InputError(f"samples of an audit must be 0 (no statistics) or at least 200, got {samples}.")
    if not temperature > 0:
        raise InputError(f"temperature of an audit must be more than 0, got {temperature}; greedy is tested anyway.")
    if not 0 < false_alarm <= 0.1:
        raise InputError(f"false_alarm must be more than 0 and at most 0.1, got {false_alarm}.")
