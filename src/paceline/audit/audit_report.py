"""A report to read: the same sections as plain text, as Markdown, and as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from paceline.audit.agreement import Agreement, Divergence
from paceline.audit.audit_verdict import Report
from paceline.audit.statistics import KEPT, LawAudit
from paceline.audit.toy_worlds import BOUND, RuleAudit
from paceline.common.errors import InputError

Say = Callable[[int], str]  # the text of a token
Table = list[tuple[str, ...]]  # the header first


@dataclass(frozen=True)
class Section:
    """One part of a report: sentences, and maybe a table."""

    title: str
    lines: list[str]
    table: Table = field(default_factory=list)


def write_report(report: Report, path: Path, say: Say) -> None:
    """By the ending of the name."""
    check_path(path)
    content = as_html(report, say) if path.suffix == ".html" else as_markdown(report, say)
    try:
        path.write_text(content, "utf-8")
    except OSError as error:
        raise InputError(f"The report '{path}' cannot be written: {error.strerror or error}.") from error


def check_path(path: Path) -> None:
    if path.suffix not in (".html", ".md"):
        raise InputError(f"A report ends in .html or .md, got '{path}'.")
    if not path.parent.is_dir():
        raise InputError(f"The folder of the report '{path}' does not exist; make it first.")


# ---- what there is to say


def sections(report: Report, say: Say) -> Iterator[Section]:
    about = {name: value for name, value in report.subject.items() if value not in ({}, None)}
    yield Section("What was audited", [f"{name.replace('_', ' ')}: {_shown(value)}" for name, value in about.items()])
    yield _rule(report.rule)
    if report.greedy is not None:
        yield _texts("Greedy text", report.greedy, report, say)
    if report.seeded is not None:
        yield _texts("Text of the same seed", report.seeded, report, say)
    if report.law is not None:
        yield _law(report.law)


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return str(value)


def _rule(rule: RuleAudit) -> Section:
    keeps = f"says that it keeps the {rule.keeps}" if rule.keeps else "is lossy"
    lines = [
        f"Rule {rule.rule} {keeps}; {len(rule.judged)} kinds of draft were enumerated on toy laws.",
        f"The largest total variation is {rule.largest:.2g}; below {BOUND:g} it is rounding.",
    ]
    for drawn, (mean, largest) in rule.by_drawn.items() if not rule.keeps else ():
        of = " (of each point mass the worst)" if drawn == "certain" else ""
        lines.append(f"Drawn {drawn}{of}: {mean:.3f} on average over random laws, {largest:.3f} at most.")
    lines += [f"It fails on {each.case}: {each.failure}" for each in rule.measured if each.failure is not None]
    table: Table = [("drawn", "shape", "temperature", "mean", "largest")]
    for each in rule.judged:
        case = each.case
        shape = f"chain of {len(case.parents)}" if case.chain else f"tree {list(case.parents)}"
        table.append((case.drawn, shape, f"{case.temperature:g}", f"{each.mean:.2g}", f"{each.largest:.2g}"))
    return Section("The rule on toy laws", lines, table)


def _texts(title: str, part: Agreement, report: Report, say: Say) -> Section:
    same = part.texts - len(part.divergences)
    share = f"{part.drafted} tokens were drafted, {part.accepted} accepted"
    lines = [
        f"{same} of {part.texts} texts are those of plain decoding, token for token ({part.tokens} tokens; {share})."
    ]
    if not part.divergences:
        return Section(title, lines)
    dtype = report.subject["dtype"]
    if part.ties:
        lines.append(f"{len(part.ties)} part at a tie of {dtype}: the scores are closer than its rounding.")
    if part.bugs:
        lines.append(f"{len(part.bugs)} part where there is no tie: that is no rounding.")
    table: Table = [("prompt", "new token", "plain", "speculative", "gap", "top-2 gap", "a tie is below", "tie")]
    return Section(title, lines, [*table, *(_row(each, say) for each in part.divergences)])


def _row(each: Divergence, say: Say) -> tuple[str, ...]:
    def token(found: int | None) -> str:
        return "the end" if found is None else f"{found} {say(found)}".strip()

    def number(found: float | None) -> str:
        return "–" if found is None else f"{found:.3g}"

    return (
        str(each.prompt + 1), str(each.position + 1), token(each.plain), token(each.speculative), number(each.gap),
        number(each.top_gap), number(each.tolerance), "yes" if each.tie else "no",
    )  # fmt: skip


def _law(law: LawAudit) -> Section:
    plan = law.plan
    lines = [
        f"{plan.samples} samples of the next two tokens at each of {len(law.tests)} positions, temperature "
        f"{plan.temperature:g} and top-k {KEPT}, against the target's own law (chi-square).",
        f"An exact decoder fails any of them with probability {plan.false_alarm:g} (each at {law.level:g}).",
        "Smaller differences than the last column would go unseen.",
    ]
    table: Table = [("prompt", "tokens before", "cells", "drafted", "accepted", "p", "distance", "seen from")]
    for test in law.tests:
        table.append(
            (
                str(test.prompt + 1), str(test.length), str(test.cells), str(test.drafted), str(test.accepted),
                f"{test.p:.2g}", f"{test.distance:.3f}", f"{test.detectable:.3f}",
            )
        )  # fmt: skip
    return Section("The law of the next two tokens", lines, table)


# ---- three ways to write it down


def as_text(report: Report, say: Say) -> str:
    """For a terminal: the sentences, and the tables that show something wrong or are short."""
    parts = []
    for section in sections(report, say):
        shown = section.table if len(section.table) <= 12 or report.rule.worst is not None else []
        parts.append("\n".join([section.title, *(f"  {line}" for line in section.lines), *_columns(shown)]))
    return "\n\n".join(parts) + f"\n\nverdict: {report.verdict}\n"


def _columns(table: Table) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))] if table else []
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]


def as_markdown(report: Report, say: Say) -> str:
    parts = [f"# Audit of speculative decoding\n\n**Verdict: {report.verdict}**\n"]
    for section in sections(report, say):
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


def as_html(report: Report, say: Say) -> str:
    parts = []
    for section in sections(report, say):
        parts.append(f"<h2>{escape(section.title)}</h2>")
        parts.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in section.lines) + "</ul>")
        for number, row in enumerate(section.table):
            tag = "th" if number == 0 else "td"
            cells = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
            parts.append(f"{'<table>' if number == 0 else ''}<tr>{cells}</tr>")
        parts += ["</table>"] if section.table else []
    kind = "exact" if report.lossless else "lossy"
    return _PAGE.format(kind=kind, verdict=escape(report.verdict), parts="\n".join(parts))
