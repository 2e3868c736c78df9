"""The charts of a report, as values and as drawn; and its tables."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.results import charts
from paceline.bench.results.charts import (
    Chart,
    Point,
    Series,
    as_svg,
    caption_of,
    charts_of,
    figure_of,
    write_png,
)
from paceline.bench.results.metrics import Ratio, compare, differences, summarise
from paceline.bench.results.records import Report
from paceline.bench.results.tables import (
    by_category,
    changed,
    flat,
    layers,
    overall,
    quality,
    slower,
    speed_up,
    tables_of,
)
from paceline.common import drawing
from paceline.common.errors import InputError, UnsupportedError
from tests.bench.made_reports import COSTS, NASTY, made_report

pytest.importorskip("matplotlib")


def chart(name: str) -> Chart:
    report = made_report()
    return next(each for each in charts_of(report, summarise(report)) if each.name == name)


def test_a_report_has_five_charts() -> None:
    report = made_report()
    names = [each.name for each in charts_of(report, summarise(report))]
    assert names == ["speed-up", "acceptance", "v", "bound", "predicted"]


def test_speed_ups_are_over_plain_decoding_and_losses_are_shown_too() -> None:
    found = chart("speed-up")
    assert [series.name for series in found.series] == ["suffix", "hf"]  # plain decoding is the line at 1
    assert found.level == 1.0
    points = {point.x: point for point in found.series[0].points}
    assert points["chat"].y == pytest.approx(0.8)
    assert points["code"].y == pytest.approx(2.0)
    assert list(points) == ["all", "chat", "code"]
    low, high = points["code"].low, points["code"].high
    assert low is not None
    assert high is not None
    assert low <= points["code"].y <= high


def test_acceptance_is_unconditional() -> None:
    (series,) = chart("acceptance").series
    first, *_, last = series.points
    assert (first.x, first.y) == (1, 6 / 8)
    assert (last.x, last.y) == (4, 0.0)


def test_v_is_in_passes_over_one_token() -> None:
    one, four = chart("v").series
    assert [(point.x, point.y) for point in one.points] == [(n, COSTS.v(n)) for n in (1, 2, 6)]
    assert four.name == "4 rows"


def test_bound_and_reached_stand_side_by_side() -> None:
    limit, reached = chart("bound").series
    assert limit.points[0].x == reached.points[0].x == "suffix"
    assert limit.points[0].y > 0
    assert reached.points[0].y > 0


@pytest.mark.parametrize("busy", [False, True])
def test_more_than_the_bound_is_explained_where_it_is_shown(busy: bool) -> None:
    report = made_report()
    fair = summarise(report)
    assert not any("Above S" in each.note for each in charts_of(report, fair))
    costs = replace(COSTS, passes={1: {1: 0.01, 6: 0.2}})  # as if reading a draft were dear
    report = made_report(costs=costs, provenance={**report.provenance, "loaded": busy})
    summary = summarise(report)
    note = next(each.note for each in charts_of(report, summary) if each.name == "bound")
    table = next(table for table in tables_of(report, summary) if table.title == "Rounds")
    for words in (note, table.note):
        assert "Above S: suffix." in words
        assert "measured apart" in words
        assert ("The machine was busy" in words) is busy


def test_two_contestants_in_one_chart() -> None:
    report = made_report()
    assert not [each for each in charts_of(report, summarise(report)) if each.name.startswith("versus")]
    asked = made_report(versus=("suffix", "hf"))
    bars = next(each for each in charts_of(asked, summarise(asked)) if each.name == "versus")
    assert bars.title == "suffix against hf"
    ours, theirs = ({point.x: point.y for point in series.points} for series in bars.series)
    line = summarise(asked).of("suffix")
    assert line is not None
    assert ours["tokens per round"] == line.tau
    assert ours["acceptance"] == line.acceptance_rate
    assert set(theirs) == {"speed-up"}  # transformers does not say more


def test_two_of_ours_are_compared_without_being_asked() -> None:
    report = made_report()
    second = replace(report.members[1], name="ngram")
    more = [replace(each, run=replace(each.run, contestant="ngram")) for each in report.results
            if each.run.contestant == "suffix"]  # fmt: skip
    both = made_report(members=(*report.members, second), results=(*report.results, *more))
    found = {each.name: each for each in charts_of(both, summarise(both))}
    assert [series.name for series in found["versus"].series] == ["suffix", "ngram"]
    depths = [point.y for point in found["versus-positions"].series[0].points]
    assert depths == pytest.approx([6 / 8, 10 / 8, 12 / 8, 12 / 8])  # accepted per round, up to each position


def test_a_candidate_has_one_colour_everywhere() -> None:
    assert {series.colour for name in ("speed-up", "acceptance") for series in chart(name).series[:1]} == {1}
    looks = {(charts._colour(each), charts._marker(each)) for each in (Series("x", (), n) for n in range(16))}
    assert len(looks) == 16


def test_nothing_measured_gives_no_chart() -> None:
    empty = Report({}, made_report().members)
    assert charts_of(empty, summarise(empty)) == []
    assert [table.title for table in tables_of(empty, summarise(empty))] == []


# ---- drawing


KINDS = pytest.mark.parametrize("kind", ["bars", "lines", "dots"])


def nasty_chart(kind: Any, count: int = 1) -> Chart:
    x = NASTY if kind == "bars" else 1.0
    series = tuple(Series(f"{NASTY}{n}", (Point(x, 1.0, 0.5, 1.5), Point(x, 2.0)), n) for n in range(count))
    return Chart("x", NASTY, NASTY, r"$\frac", kind, (*series, Series("_hidden", series[0].points)), level=1.0)


@KINDS
@pytest.mark.parametrize("count", [1, 100])
def test_an_svg_is_text_that_is_escaped_and_the_same_again(kind: str, count: int) -> None:
    drawn = as_svg(nasty_chart(kind, count))
    assert drawn == as_svg(nasty_chart(kind, count))
    assert "<script" not in drawn
    assert "&lt;script&gt;" in drawn
    assert "_hidden</text>" in drawn
    assert "currentColor" in drawn
    assert not re.search(r"https?://|xmlns|<metadata", drawn)


def test_a_file_per_chart(tmp_path: Path) -> None:
    report = made_report()
    written = write_png(charts_of(report, summarise(report)), tmp_path / "plots")
    assert [path.name for path in written] == ["speed-up.png", "acceptance.png", "v.png", "bound.png", "predicted.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_a_picture_alone_says_which_model_machine_and_commit() -> None:
    report = made_report()
    about = {**report.provenance, "date": "2026-11-18T10:00:00", "versions": {"paceline": "0.1.0"}, "threads": 2}
    one = charts_of(replace(report, provenance=about), summarise(report))[0]
    assert one.caption == "tiny · a CPU, 2 threads · 2026-11-18 · paceline 0.1.0 · commit abc"
    assert figure_of(one).get_supxlabel() == one.caption
    assert as_svg(one).count(one.caption) == 1


@pytest.mark.parametrize("about", [{}, {"arguments": "damaged", "versions": None}, {"gpu": "a GPU", "cpu": "a CPU"}])
def test_an_old_or_damaged_record_has_a_caption_too(about: dict[str, Any]) -> None:
    caption = caption_of(made_report(provenance=about))
    assert caption.startswith("a model")
    assert ("a GPU" in caption) == ("gpu" in about)


def test_without_matplotlib_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(drawing, "can_draw", lambda: False)
    for refused in (drawing.check_drawing, lambda: write_png([], tmp_path)):
        with pytest.raises(UnsupportedError, match=r"need matplotlib: pip install 'paceline\[bench\]'"):
            refused()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_png([], tmp_path / "file")


# ---- tables


def test_the_table_of_all_candidates() -> None:
    report = made_report()
    table = overall(report, summarise(report))
    assert table.header[:6] == ("candidate", "tokens/s", "speed-up", "spread", "τ", "acceptance")
    rows = {row[0].text: dict(zip(table.header, row, strict=True)) for row in table.rows}
    assert rows["plain"]["speed-up"].text == "1.00×"
    assert rows["suffix"]["τ"].text == "2.50"
    assert rows["suffix"]["acceptance"].text == "40%"
    assert rows["suffix"]["× hf"].text == "2.29×"
    assert rows["hf"]["× hf"].text == "–"
    assert rows["hf"]["same text"].text == "2/4, from 5"
    assert rows["hf"]["speed-up"].tone == "bad"
    assert rows["suffix"]["speed-up"].tone == "good"


def test_the_table_of_categories() -> None:
    report = made_report()
    table = by_category(report, summarise(report))
    assert table.header == ("candidate", "chat", "code", "all")
    rows = {row[0].text: row for row in table.rows}
    assert rows["plain"][1].text.endswith("tok/s")
    assert rows["suffix"][1].text.startswith("0.80× (")
    assert (rows["suffix"][1].tone, rows["suffix"][2].tone) == ("bad", "good")


def test_where_ours_is_slower_is_said() -> None:
    report = made_report()
    table = slower(report, summarise(report))
    assert [(row[0].text, row[1].text) for row in table.rows] == [("suffix", "chat-1"), ("suffix", "chat-2")]
    assert table.note.startswith("2 of 4 pairs")


@pytest.mark.parametrize(
    ("found", "tone"),
    [(Ratio(1.2, 1.1, 1.3), "good"), (Ratio(1.1, 0.9, 1.3), ""), (Ratio(0.8, 0.7, 0.9), "bad"), (Ratio(2.0), "")],
)
def test_colour_is_for_what_lies_beyond_the_spread(found: Ratio, tone: str) -> None:
    assert speed_up(found).tone == tone


def test_what_became_slower_stands_first() -> None:
    old = made_report()
    slow = tuple(
        replace(each, run=replace(each.run, seconds=each.run.seconds * 3)) if each.run.contestant == "suffix" else each
        for each in old.results
    )
    new = replace(old, results=slow, provenance={**old.provenance, "cpu": "another"})
    table = changed(compare(old, new), differences(old, new))
    first = {name: cell.text for name, cell in zip(table.header, table.rows[0], strict=True)}
    assert (first["candidate"], first["verdict"], first["now/then"]) == ("suffix", "slower", "0.33×")
    assert table.rows[0][-1].tone == "bad"
    assert "cpu: a CPU then, another now" in table.note
    assert table.note.startswith("3 of ")


def test_layers_have_bytes_and_times() -> None:
    layer = {"name": "0", "parameters": 2_000_000, "per_token": 512, "dtype": "float32", "seconds": 0.0015}
    (row,) = layers(made_report(layers=(layer,))).rows
    assert [cell.text for cell in row] == ["0", "2.0 MB", "512 B", "float32", "1.5 ms"]


def test_quality_has_a_column_per_measure() -> None:
    table = quality(made_report(quality={"plain": {"exact_match": 0.5}, "hf": {"exact_match": 0.25}}))
    assert table.header == ("candidate", "exact match")
    assert [row[1].text for row in table.rows] == ["0.500", "0.250"]


def test_provenance_is_flat() -> None:
    assert dict(flat({"a": {"b": 1, "c": [1, 2]}, "d": None})) == {"a.b": "1", "a.c": "1, 2", "d": "–"}
