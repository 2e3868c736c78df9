"""`paceline.show` and `paceline generate --html`: a text with its rounds on the terminal, in a notebook, on a page."""

from __future__ import annotations

import json
import sys
from html import unescape
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import paceline
from paceline import Generation
from paceline.cli.terminal import Terminal, write_result
from tests.cli.conftest import refusal, run
from tests.toys import letters, llama


@pytest.fixture(scope="module")
def out() -> Generation:
    model = paceline.LanguageModel(llama(), letters(), name="toy")
    decoder = paceline.SpeculativeDecoder(model, "prompt-lookup", gamma=4)
    return decoder.generate("abcabcabc", max_new_tokens=16, ignore_eos=True)


def notebook(monkeypatch: pytest.MonkeyPatch, **shell: Any) -> list[Any]:
    """Put a stand-in for IPython in its place. Return the list that gets what is displayed."""
    displayed: list[Any] = []
    package, display = ModuleType("IPython"), ModuleType("IPython.display")
    package.get_ipython = lambda: SimpleNamespace(**shell)  # type: ignore[attr-defined]
    display.display = displayed.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return displayed


def test_a_terminal_shows_the_text_and_its_numbers(out: Generation, capsys: pytest.CaptureFixture[str]) -> None:
    paceline.show(out)
    shown = capsys.readouterr()
    assert shown.out == out.text + "\n"
    assert f"{out.stats.accepted} of {out.stats.drafted} drafted tokens accepted" in shown.err


def test_rejected_drafts_are_before_the_token_in_their_place(
    out: Generation, capsys: pytest.CaptureFixture[str]
) -> None:
    rejected = [letters().decode(entry.rejected) for entry in out.trace.rounds if entry.own is not None]
    assert any(rejected)
    write_result(Terminal(), out, drafts=True)
    plain = capsys.readouterr().out
    assert [f"[-{text}-]" in plain for text in rejected if text] == [True] * sum(map(bool, rejected))
    for text in rejected:
        plain = plain.replace(f"[-{text}-]", "", 1)
    assert plain == out.text + "\n"


def test_a_terminal_has_colours(
    out: Generation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    paceline.show([out, out])
    shown = capsys.readouterr().out
    assert shown.count("\x1b[32m") >= 2  # accepted
    assert shown.count("\x1b[34m") >= 2  # the target's own


def test_a_notebook_displays_the_result_itself(
    out: Generation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    displayed = notebook(monkeypatch, kernel=object())
    paceline.show(out)
    assert displayed == [out]
    assert capsys.readouterr().out == ""


def test_ipython_on_a_terminal_is_no_notebook(
    out: Generation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert notebook(monkeypatch) == []
    paceline.show(out)
    assert capsys.readouterr().out


@pytest.mark.parametrize("found", [True, False])
def test_a_browser_opens_the_page(
    found: bool, out: Generation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or found)
    paceline.show(out, browser=True)
    (page,) = tmp_path.iterdir()
    assert opened == [page.as_uri()]
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert capsys.readouterr().err == ("" if found else f"No browser was found. The page is {page}.\n")


# ---- generate --html


def generate(target: str, page: Path, *more: str) -> Any:
    given = ("--target", target, "--max-new-tokens", "12", "--draft", "prompt-lookup", "--html", str(page), *more)
    result = run("generate", "abc abc <i>", *given)
    assert result.exit_code == 0, result.output
    return result


def test_generate_writes_a_page(target: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    result = generate(target, path, "--json", "--seed", "5", "--temperature", "0.25")
    page = path.read_text("utf-8")
    content = json.loads(result.stdout)
    assert f"wrote {path}" in result.stderr
    assert "tiny (" in page  # the first line of the output
    assert "with prompt-lookup, γ=5, rule match" in page
    assert "<pre>abc abc &lt;i&gt;</pre>" in page
    assert "<tr><th>temperature</th><td>0.25</td></tr>" in page
    assert "<tr><th>seed</th><td>5</td></tr>" in page
    assert page.count('tabindex="0"') == content["stats"]["rounds"]
    assert "prompt-lookup: 12 tokens in " in unescape(page)
    assert page.count("<svg") == 1


def test_a_comparison_has_both_stairs(target: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    generate(target, path, "--compare", "--repeats", "1")
    page = path.read_text("utf-8")
    assert "plain decoding: 12 tokens in" in page
    assert 'class="s1" d="M' in page
    assert "The two were measured one after the other." in page


def test_a_page_that_cannot_be_written_is_refused_first(target: str, tmp_path: Path) -> None:
    path = tmp_path / "none" / "page.html"
    told = refusal("generate", "abc", "--target", target, "--html", str(path), code=2)
    assert told == f"error: The page '{path}' cannot be written: No such file or directory."
    assert "it is a folder" in refusal("generate", "abc", "--target", target, "--html", str(tmp_path), code=2)
