"""Write the report of an audit as plain text, as Markdown or as one HTML page: sections of sentences and tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from paceline.common.errors import InputError
from paceline.common.text_formats import writing

Table = list[tuple[str, ...]]  # the first row is the header
_SHORT = 12  # a terminal always shows a table with at most this number of rows


@dataclass(frozen=True)
class Section:
    """One part of a report: sentences and an optional table."""

    title: str
    lines: list[str]
    table: Table = field(default_factory=list)


@dataclass(frozen=True)
class Page:
    """A verdict and the sections with its reasons. long_tables: whether a terminal shows long tables."""

    verdict: str
    lossless: bool
    sections: list[Section]
    long_tables: bool = False

    def as_text(self) -> str:
        """Return the page as text for a terminal."""
        parts = []
        for section in self.sections:
            shown = section.table if len(section.table) <= _SHORT or self.long_tables else []
            parts.append("\n".join([section.title, *(f"  {line}" for line in section.lines), *_columns(shown)]))
        return "\n\n".join(parts) + f"\n\nverdict: {self.verdict}\n"

    def as_markdown(self) -> str:
        parts = [f"# Audit of speculative decoding\n\n**Verdict: {self.verdict}**\n"]
        for section in self.sections:
            parts.append(f"## {section.title}\n\n" + "\n".join(f"- {line}" for line in section.lines) + "\n")
            if section.table:
                head, *rows = [[cell.replace("|", "\\|").replace("\n", "↵") for cell in row] for row in section.table]
                lines = [head, ["---"] * len(head), *rows]
                parts.append("\n".join(f"| {' | '.join(row)} |" for row in lines) + "\n")
        return "\n".join(parts)

    def as_html(self) -> str:
        parts = []
        for section in self.sections:
            parts.append(f"<h2>{escape(section.title)}</h2>")
            parts.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in section.lines) + "</ul>")
            for number, row in enumerate(section.table):
                tag = "th" if number == 0 else "td"
                cells = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
                parts.append(f"{'<table>' if number == 0 else ''}<tr>{cells}</tr>")
            parts += ["</table>"] if section.table else []
        kind = "exact" if self.lossless else "lossy"
        return _PAGE.format(kind=kind, verdict=escape(self.verdict), parts="\n".join(parts))

    def write(self, path: Path) -> None:
        """Write HTML or Markdown, by the suffix of the path."""
        with writing("The report", path):
            path.write_text(self.as_html() if path.suffix == ".html" else self.as_markdown(), "utf-8")


def check_path(path: Path) -> None:
    """Raise `InputError` if no report can be written to this path."""
    if path.suffix not in (".html", ".md"):
        raise InputError(f"The path of a report must end in .html or .md, got '{path}'.")
    if not path.parent.is_dir():
        raise InputError(f"The folder of the report '{path}' does not exist; make it first.")


def _columns(table: Table) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))] if table else []
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]


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
