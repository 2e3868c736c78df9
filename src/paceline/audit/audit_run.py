"""Audit a rule on toy distributions and a decoder on prompts, give the verdict, and make the sections of the report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from paceline.audit.agreement import KEPT, Agreement, AuditPlan, Divergence, LawAudit, agreement, law_audit
from paceline.audit.enumeration import BOUND, RuleAudit, audit_rule
from paceline.audit.report_page import Page, Section, Table
from paceline.common.errors import InputError
from paceline.common.progress import Cancel, Progress
from paceline.common.text_formats import parse_json, read_text
from paceline.core.contracts import Drafter, Rule
from paceline.engine.decoder import SpeculativeDecoder
from paceline.engine.prompts import encode_all

# ---- The subject of an audit


def subject_of(decoder: SpeculativeDecoder) -> dict[str, Any]:
    """Return the target, the drafter and the rule of a decoder with their options, as plain values."""
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
    """Return the options of a drafter or a rule as plain values. A model is given by its name."""
    options = getattr(owner, "options", None)
    values = {item.name: getattr(options, item.name) for item in fields(options)} if is_dataclass(options) else {}
    return {name: getattr(value, "name", value) for name, value in values.items()}


# Chat, code, a summary, an edit, a table, a list, arithmetic, a story. Some contain repetitions, so that look-up
# drafters draft tokens.
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
    """Return one prompt per line of a text file. In a .jsonl file, it is "prompt" or the first of "turns"."""
    lines = [line for line in read_text(path, "The prompts").splitlines() if line.strip()]
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
    """The results of an audit. A part that did not run is None."""

    subject: dict[str, Any]  # see `subject_of`
    rule: RuleAudit
    greedy: Agreement | None = None
    seeded: Agreement | None = None
    law: LawAudit | None = None
    seconds: float = 0.0

    @property
    def findings(self) -> list[str]:
        """Return a phrase for each difference from plain decoding."""
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
            return f"{exact}, but nothing was drafted: the audit tested only plain decoding"
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
            gap = "" if first.gap is None else f", scores differ by {first.gap:.3g} (a tie: {first.tolerance:.1g})"
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
        """Return the report as a dict for JSON."""
        by_drawn = {drawn: {"mean": mean, "largest": most} for drawn, (mean, most) in self.rule.by_drawn.items()}
        rule = {
            "name": self.rule.rule,
            "keeps": self.rule.keeps,
            "bound": BOUND,
            "largest": self.rule.largest,
            "by_drawn": by_drawn,
            "cases": [asdict(case) for case in self.rule.measured],
        }
        return {
            **{name: getattr(self, name) for name in ("verdict", "lossless", "findings", "subject")},
            "rule": rule,
            "greedy": _agreement(self.greedy),
            "same_seed": _agreement(self.seeded),
            "law": None if self.law is None else {**asdict(self.law), "level": self.law.level},
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
    progress: Progress = lambda *_: None,
    cancel: Cancel = lambda: False,
) -> Report:
    """Test whether a decoder is lossless.

    First the rule is enumerated on toy distributions. Then every prompt is decoded greedily, and also with a seed if
    the rule keeps the text; `tokens` tokens are compared with plain decoding. Then `samples` pairs of tokens at each of
    `positions` positions are tested against the target's distribution. An exact decoder fails this last test with
    probability `false_alarm`.
    """
    plan = AuditPlan(tokens, positions, samples, temperature, false_alarm, seed)
    started = time.perf_counter()
    texts, _ = encode_all(list(prompts) if isinstance(prompts, tuple) else prompts, decoder.target)
    rule = audit_rule(decoder.rule, progress)
    settings = {"max_new_tokens": tokens, "temperature": 0.0, "seed": seed}
    # Greedy text continues after EOS, so that it is long enough. Sampled text ends with EOS, so that the end is tested.
    greedy, written = agreement(decoder, texts, {**settings, "ignore_eos": True}, progress, cancel)
    seeded = law = None
    if decoder.rule.exact == "text":
        seeded, _ = agreement(decoder, texts, {**settings, "temperature": temperature}, progress, cancel)
    if positions and samples:
        law = law_audit(decoder, texts, written, plan, progress, cancel)
    return Report(subject_of(decoder), rule, greedy, seeded, law, time.perf_counter() - started)


def audit_only_rule(rule: Rule, progress: Progress = lambda *_: None) -> Report:
    """Run only the first part of `audit`, which needs no model."""
    started = time.perf_counter()
    result = audit_rule(rule, progress)
    return Report({"rule": rule.name, "rule_options": options_of(rule)}, result, seconds=time.perf_counter() - started)


# ---- The report

TokenText = Callable[[int], str]  # the text of a token


def page_of(report: Report, token_text: TokenText) -> Page:
    """Return the report as a page. A terminal shows long tables only if the rule fails."""
    about = {name: value for name, value in report.subject.items() if value not in ({}, None)}
    sections = [Section("What was audited", [f"{name.replace('_', ' ')}: {_shown(v)}" for name, v in about.items()])]
    sections.append(_rule(report.rule))
    if report.greedy is not None:
        sections.append(_texts("Greedy text", report.greedy, report, token_text))
    if report.seeded is not None:
        sections.append(_texts("Text of the same seed", report.seeded, report, token_text))
    if report.law is not None:
        sections.append(_law(report.law))
    return Page(report.verdict, report.lossless, sections, long_tables=report.rule.worst is not None)


def _shown(value: object) -> str:
    return ", ".join(f"{name} {item}" for name, item in value.items()) if isinstance(value, dict) else str(value)


def _rule(rule: RuleAudit) -> Section:
    keeps = f"claims to keep the {rule.keeps}" if rule.keeps else "is lossy"
    lines = [
        f"Rule {rule.rule} {keeps}; {len(rule.judged)} kinds of draft were enumerated on toy distributions.",
        f"The largest total variation is {rule.largest:.2g}; below {BOUND:g} it is rounding.",
    ]
    for drawn, (mean, largest) in rule.by_drawn.items() if not rule.keeps else ():
        of = " (the worst point mass of each case)" if drawn == "certain" else ""
        lines.append(f"Drawn {drawn}{of}: {mean:.3f} on average over random distributions, {largest:.3f} at most.")
    lines += [f"It fails on {item.case}: {item.failure}" for item in rule.measured if item.failure is not None]
    table: Table = [("drawn", "shape", "temperature", "mean", "largest")]
    for item in rule.judged:
        case = item.case
        shape = f"chain of {len(case.parents)}" if case.chain else f"tree {list(case.parents)}"
        table.append((case.drawn, shape, f"{case.temperature:g}", f"{item.mean:.2g}", f"{item.largest:.2g}"))
    return Section("The rule on toy distributions", lines, table)


def _texts(title: str, part: Agreement, report: Report, token_text: TokenText) -> Section:
    same = part.texts - len(part.divergences)
    share = f"{part.drafted} tokens were drafted, {part.accepted} accepted"
    lines = [f"{same} of {part.texts} texts have the same tokens as plain decoding ({part.tokens} tokens; {share})."]
    if not part.divergences:
        return Section(title, lines)
    dtype = report.subject["dtype"]
    if part.ties:
        lines.append(f"{len(part.ties)} differ at a tie: the scores are closer than the rounding of {dtype}.")
    if part.bugs:
        lines.append(f"{len(part.bugs)} differ without a tie: rounding cannot explain this.")
    table: Table = [("prompt", "new token", "plain", "speculative", "gap", "top-2 gap", "a tie is below", "tie")]
    return Section(title, lines, [*table, *(_row(item, token_text) for item in part.divergences)])


def _row(item: Divergence, token_text: TokenText) -> tuple[str, ...]:
    def token(value: int | None) -> str:
        return "the end" if value is None else f"{value} {token_text(value)}".strip()

    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.3g}"

    return (
        str(item.prompt + 1), str(item.position + 1), token(item.plain), token(item.speculative), number(item.gap),
        number(item.top_gap), number(item.tolerance), "yes" if item.tie else "no",
    )  # fmt: skip


def _law(law: LawAudit) -> Section:
    plan = law.plan
    lines = [
        f"{plan.samples} samples of the next two tokens at each of {len(law.tests)} positions, temperature "
        f"{plan.temperature:g} and top-k {KEPT}, against the target's distribution (chi-square).",
        f"An exact decoder fails one of these tests with probability {plan.false_alarm:g} (each with {law.level:g}).",
        "The last column is the smallest distance that the test can find.",
    ]
    table: Table = [("prompt", "tokens before", "cells", "drafted", "accepted", "p", "distance", "detectable")]
    for test in law.tests:
        table.append(
            (
                str(test.prompt + 1), str(test.length), str(test.cells), str(test.drafted), str(test.accepted),
                f"{test.p:.2g}", f"{test.distance:.3f}", f"{test.detectable:.3f}",
            )
        )  # fmt: skip
    return Section("The distribution of the next two tokens", lines, table)
