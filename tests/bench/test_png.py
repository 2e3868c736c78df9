"""The same charts as files."""

from __future__ import annotations

import builtins
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.results.charts import Chart, Point, Series, caption_of, charts_of
from paceline.bench.results.metrics import summarise
from paceline.bench.results.png import check_png, figure_of, write_png
from paceline.common.errors import InputError, UnsupportedError
from tests.bench.made_reports import NASTY, made_report

pytest.importorskip("matplotlib")


def test_a_file_per_chart(tmp_path: Path) -> None:
    report = made_report()
    written = write_png(charts_of(report, summarise(report)), tmp_path / "plots")
    assert [path.name for path in written] == ["speed-up.png", "acceptance.png", "v.png", "bound.png", "predicted.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_a_picture_alone_says_which_model_and_machine() -> None:
    report = made_report()
    about = {**report.provenance, "date": "2026-11-18T10:00:00", "versions": {"paceline": "0.1.0"}, "threads": 2}
    chart = charts_of(replace(report, provenance=about), summarise(report))[0]
    assert chart.caption == "tiny · a CPU, 2 threads · 2026-11-18 · paceline 0.1.0"
    figure = figure_of(chart)
    assert figure.get_supxlabel() == chart.caption
    assert min(figure.get_size_inches()) > 5


@pytest.mark.parametrize("about", [{}, {"arguments": "damaged", "versions": None}, {"gpu": "a GPU", "cpu": "a CPU"}])
def test_an_old_or_damaged_record_has_a_caption_too(about: dict[str, Any]) -> None:
    told = caption_of(made_report(provenance=about))
    assert told.startswith("a model")
    assert ("a GPU" in told) == ("gpu" in about)


@pytest.mark.parametrize("kind", ["bars", "lines", "dots"])
def test_names_are_text_not_formulas(kind: str, tmp_path: Path) -> None:
    x = "_$" if kind == "bars" else 1.0
    series = tuple(Series(name, (Point(x, 1.0, 0.5, 1.5), Point(x, 2.0))) for name in (NASTY, "_hidden", r"$\frac"))
    figure = figure_of(Chart("x", r"$\frac", NASTY, "_y", kind, series))  # type: ignore[arg-type]
    figure.savefig(tmp_path / "x.png")
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 3


def test_without_matplotlib_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(UnsupportedError, match=r"need matplotlib: pip install 'paceline\[bench\]'"):
        check_png()
    with pytest.raises(UnsupportedError):
        write_png([], tmp_path)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_png([], tmp_path / "file")
