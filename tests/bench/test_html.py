"""The report as a page."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from paceline.bench.results.metrics import summarise
from paceline.bench.results.outputs import as_html, write_html
from paceline.bench.results.records import Report
from paceline.common.errors import InputError
from tests.bench.made_reports import NASTY, made_report

_VOID = {"meta", "br"}


class Nesting(HTMLParser):
    """Every tag that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page(report: Report) -> str:
    return as_html(report, summarise(report))


def parsed(text: str) -> Nesting:
    parser = Nesting()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


def test_the_page_needs_nothing_else() -> None:
    text = page(made_report())
    assert not re.search(r'(src|href)\s*=\s*"[^#]|url\([^#]|@import|https?://', text)
    assert "script" not in parsed(text).seen
    assert "prefers-color-scheme: dark" in text


def test_everything_is_on_the_page() -> None:
    text = page(made_report())
    assert text.count("<svg") == 5
    for words in ("Speed-up by category", "Slower than plain decoding", "Left out", "Provenance", "A note.", "a CPU",
                 "chat-2", "hf-lookup", "not here.", 'class="bad"', 'class="good"', "versions.torch"):  # fmt: skip
        assert words in text


def test_one_is_not_a_plural() -> None:
    report = made_report()
    one = replace(report, results=tuple(each for each in report.results if each.run.task == "chat-1"))
    text = page(one)
    assert " on 1 prompt, " in text
    assert "1 prompts" not in text
    assert "tiny · a CPU" in text


def test_without_matplotlib_the_page_says_how_to_get_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.bench.results.outputs.can_draw", lambda: False)
    text = page(made_report())
    assert "<svg" not in text
    assert "Charts need matplotlib: pip install &#x27;paceline[bench]&#x27;." in text
    parsed(text)


def test_names_are_escaped_wherever_they_stand() -> None:
    report = made_report()
    members = tuple(replace(m, name=NASTY) if m.name == "suffix" else m for m in report.members)
    results = tuple(
        replace(r, run=replace(r.run, contestant=NASTY if r.run.contestant == "suffix" else r.run.contestant,
                               category=f"{r.run.category}{NASTY}", task=f"{r.run.task}{NASTY}"))
        for r in report.results
    )  # fmt: skip
    text = page(replace(report, members=members, results=results, notes=(NASTY,), provenance={NASTY: NASTY}))
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    parsed(text)


def test_an_interrupted_report_says_so_and_an_empty_one_is_a_page() -> None:
    report = made_report(complete=False)
    assert "Interrupted" in page(report)
    assert "Nothing was measured" in page(replace(report, results=(), skipped=(), costs=None))
    parsed(page(replace(report, results=())))


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    report = made_report()
    with pytest.raises(InputError, match="cannot be written"):
        write_html(report, summarise(report), tmp_path / "no" / "report.html")
    write_html(report, summarise(report), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text("utf-8") == page(report)
