"""A report as plain text, as Markdown and as one HTML page, all with the same sections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from paceline.audit.agreement import Agreement, Divergence
from paceline.audit.audit_run import Report
from paceline.audit.statistics import KEPT, LawAudit
from paceline.audit.toy_worlds import BOUND, RuleAudit
from paceline.common.errors import InputError

TokenText = Callable[[int], str]  # the text of a token
Table = list[tuple[str, ...]]  # the first row is the header


@dataclass(frozen=True)
class Section:
    """One part of a report: sentences and an optional table."""

    title: str
    lines: list[str]
    table: Table = field(default_factory=list)


def write_report(report: Report, path: Path, token_text: TokenText) -> None:
    """Write HTML or Markdown, by the suffix of the path."""
    check_path(path)
    content = as_html(report, token_text) if path.suffix == ".html" else as_markdown(report, token_text)
    try:
        path.write_text(content, "utf-8")
    except OSError as error:
        raise InputError(f"The report '{path}' cannot be written: {error.strerror or error}.") from error


def check_path(path: Path) -> None:
    if path.suffix not in (".html", ".md"):
        raise InputError(f"A report ends in .html or .md, got '{path}'.")
    if not path.parent.is_dir():
        raise InputError(f"The folder of the report '{path}' does not exist; make it first.")


# ---- the sections


def sections(report: Report, token_text: TokenText) -> Iterator[Section]:
    about = {name: value for name, value in report.subject.items() if value not in ({}, None)}
    yield Section("What was audited", [f"{name.replace('_', ' ')}: {_shown(value)}" for name, value in about.items()])
    yield _rule(report.rule)
    if report.greedy is not None:
        yield _texts("Greedy text", report.greedy, report, token_text)
    if report.seeded is not None:
        yield _texts("Text of the same seed", report.seeded, report, token_text)
    if report.law is not None:
        yield _law(report.law)


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return str(value)


def _rule(rule: RuleAudit) -> Section:
    keeps = f"claims to keep the {rule.keeps}" if rule.keeps else "is lossy"
    lines = [
        f"Rule {rule.rule} {keeps}; {len(rule.judged)} kinds of draft were enumerated on toy distributions.",
        f"The largest total variation is {rule.largest:.2g}; below {BOUND:g} it is rounding.",
    ]
    for drawn, (mean, largest) in rule.by_drawn.items() if not rule.keeps else ():
        of = " (of each point mass the worst)" if drawn == "certain" else ""
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
    lines = [
        f"{same} of {part.texts} texts are those of plain decoding, token for token ({part.tokens} tokens; {share})."
    ]
    if not part.divergences:
        return Section(title, lines)
    dtype = report.subject["dtype"]
    if part.ties:
        lines.append(f"{len(part.ties)} differ at a tie of {dtype}: the scores are closer than its rounding.")
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
        f"An exact decoder fails any of them with probability {plan.false_alarm:g} (each at {law.level:g}).",
        "The test does not see smaller differences than the last column.",
    ]
    table: Table = [("prompt", "tokens before", "cells", "drafted", "accepted", "p", "distance", "seen from")]
    for test in law.tests:
        table.append(
            (
                str(test.prompt + 1), str(test.length), str(test.cells), str(test.drafted), str(test.accepted),
                f"{test.p:.2g}", f"{test.distance:.3f}", f"{test.detectable:.3f}",
            )
        )  # fmt: skip
    return Section("The distribution of the next two tokens", lines, table)


# ---- text, Markdown, HTML


def as_text(report: Report, token_text: TokenText) -> str:
    """For a terminal: the sentences, and the tables that are short or show a failure."""
    parts = []
    for section in sections(report, token_text):
        shown = section.table if len(section.table) <= 12 or report.rule.worst is not None else []
        parts.append("\n".join([section.title, *(f"  {line}" for line in section.lines), *_columns(shown)]))
    return "\n\n".join(parts) + f"\n\nverdict: {report.verdict}\n"


def _columns(table: Table) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))] if table else []
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]


def as_markdown(report: Report, token_text: TokenText) -> str:
    parts = [f"# Audit of speculative decoding\n\n**Verdict: {report.verdict}**\n"]
    for section in sections(report, token_text):
        parts.append(f"## {section.title}\n\n" + "\n".join(f"- {line}" for line in section.lines) + "\n")
        if section.table:
            head, *rows = [[cell.replace("|", "\\|").replace("\n", "↵") for cell in row] for row in section.table]
            lines = [head, ["---"] * len(head), *rows]
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in lines) + "\n")
    return "\n".join(parts)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Audit of speculative decoding</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
.verdict {{ padding: .8rem 1rem; border-left: .4rem solid; font-weight: 600; }}
.exact {{ color: #14532d; background: #dcfce7; }} .lossy {{ color: #7f1d1d; background: #fee2e2; }}
table {{ border-collapse: collapse; font-size: .9rem; }} td, th {{ padding: .2rem .7rem; text-align: left; }}
tr + tr {{ border-top: 1px solid #ddd; }}
</style></head><body>
<h1>Audit of speculative decoding</h1>
<p class="verdict {kind}">{verdict}</p>
{parts}
</body></html>
"""


def as_html(report: Report, token_text: TokenText) -> str:
    parts = []
    for section in sections(report, token_text):
        parts.append(f"<h2>{escape(section.title)}</h2>")
        parts.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in section.lines) + "</ul>")
        for number, row in enumerate(section.table):
            tag = "th" if number == 0 else "td"
            cells = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
            parts.append(f"{'<table>' if number == 0 else ''}<tr>{cells}</tr>")
        parts += ["</table>"] if section.table else []
    kind = "exact" if report.lossless else "lossy"
    return _PAGE.format(kind=kind, verdict=escape(report.verdict), parts="\n".join(parts))
