"""`paceline bench`, end to end on a tiny model, and everything that is shown and written."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live

from paceline.bench import machine_use as machine
from paceline.bench.results.metrics import summarise
from paceline.bench.results.records import Recorder, read_records
from paceline.bench.results.tables import as_text, overall, short
from paceline.cli.bench_table import Lines, LiveTable, show
from tests.bench.made_reports import COSTS, made_report
from tests.cli.conftest import refusal, run

QUICK = ("--max-new-tokens", "6", "--repeats", "2", "--warm-up", "0", "--threads", "1")


@pytest.fixture(autouse=True)
def _quickly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What takes seconds is done by one test only: measuring costs, looking at the machine, plotting."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))  # keeps the user's costs unchanged
    if "as_in_life" not in request.fixturenames:
        monkeypatch.setattr("paceline.bench.bench_session.costs_of", lambda *_: (COSTS, []))
        monkeypatch.setattr("paceline.bench.bench_session.how_busy", lambda *_: machine.Busy(0.0))
        monkeypatch.setattr("paceline.bench.results.charts.write_png", lambda *_: [])


@pytest.fixture
def as_in_life() -> None:
    """Nothing is left out."""


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "mine.jsonl"
    lines = [
        {"question_id": 1, "category": "chat", "turns": ["abc abc abc"]},
        {"question_id": 2, "category": "code", "turns": ["one two one two"], "reference": ["x"]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n", "utf-8")
    return str(path)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """The file of a benchmark that was made by hand."""
    report, path = made_report(), tmp_path / "before.jsonl"
    with path.open("w", encoding="utf-8") as file:
        recorder = Recorder(file)
        recorder.add("provenance", report.provenance)
        recorder.add("contestants", report.members)
        recorder.add("costs", COSTS)
        for result in report.results:
            recorder.run(result)
        recorder.finish(True)
    return path


@pytest.mark.usefixtures("as_in_life")
def test_everything_is_shown_and_written(target: str, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("bench", "--target", target, "--prompts", prompts, "--run", "suffix", "--run", "ngram:gamma=3",
                 "--peer", "hf", *QUICK, "--out", str(out))  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "All prompts" in result.stdout
    assert "Speed-up by category" in result.stdout
    for name in ("plain", "suffix", "ngram:gamma=3", "hf"):
        assert name in result.stdout
    assert f"everything is in {out}" in result.stderr
    names = {path.name for path in out.iterdir()}
    assert {"bench.jsonl", "bench.csv", "report.html", "speed-up.png", "v.png"} <= names
    report = read_records(out / "bench.jsonl")
    assert report.complete
    assert len(report.results) == 2 * 2 * 4
    assert report.provenance["arguments"]["runs"] == ["suffix", "ngram:gamma=3"]
    assert report.provenance["weights"] == "float32 from a folder"
    rows = list(csv.DictReader((out / "bench.csv").read_text("utf-8").splitlines()))
    assert {row["category"] for row in rows} == {"chat", "code", "all"}
    assert all(row["same"] == row["compared"] for row in rows if row["contestant"] == "suffix")


def test_json_is_the_record_and_nothing_else(target: str, prompts: str, tmp_path: Path) -> None:
    arguments = ("bench", "--target", target, "--prompts", prompts, "--run", "suffix", *QUICK, "--json")
    alone = run(*arguments)
    assert alone.exit_code == 0, alone.output
    kinds = [json.loads(line)["kind"] for line in alone.stdout.splitlines()]
    assert (kinds[0], kinds[-1], kinds.count("run")) == ("provenance", "summary", 8)
    both = run(*arguments, "--out", str(tmp_path / "out"))
    assert both.stdout == (tmp_path / "out" / "bench.jsonl").read_text("utf-8")


def test_a_csv_of_questions_with_samplers_and_memory_by_line(target: str, tmp_path: Path) -> None:
    questions, out = tmp_path / "qa.csv", tmp_path / "out"
    questions.write_text("question,answer\nabc abc,abc\n")
    result = run("bench", "--target", target, "--prompts", str(questions), "--quality", "--sampler", "greedy",
                 "--sampler", "top-k-noise", "--noise-levels", "0.1,0.4", "--run", "suffix", "--memory",
                 "lines", *QUICK, "--repeats", "1", "--out", str(out), "--versus", "suffix",
                 "--versus", "plain")  # fmt: skip
    assert result.exit_code == 0, result.output
    for words in ("Samplers", "TF-IDF", "top-k-noise:noise=0.4", "Memory by line", "peak"):
        assert words in result.stdout
    page = (out / "report.html").read_text("utf-8")
    assert "Quality by noise" in page
    assert "suffix against plain" in page
    assert run("bench", "--report", str(out / "bench.jsonl")).stdout == result.stdout


@pytest.mark.parametrize("given", [["--memory", "lines"], ["--memory=lines"], ["--memory-lines", "--memory"]])
def test_memory_takes_a_word_or_none(given: list[str]) -> None:
    assert config(*given)["memory-lines"] == "true  # flag"
    assert config(*given)["memory"] == "true  # flag"
    assert config("--memory", "--layers")["memory-lines"] == "false  # default"
    assert config("--memory", "peak")["memory"] == "true  # flag"
    assert run("bench", "--memory", "layers").exit_code == 2


def test_versus_names_two_contestants(record: Path, prompts: str, target: str) -> None:
    base = ("bench", "--target", target, "--prompts", prompts, "--run", "suffix", *QUICK)
    assert "given twice" in refusal(*base, "--versus", "suffix", code=2)
    assert "Did you mean 'suffix'?" in refusal(*base, "--versus", "sufix", "--versus", "plain", code=2)
    assert "candidate" in refusal("bench", "--report", str(record), "--versus", "a", "--versus", "hf", code=2)


def test_ctrl_c_keeps_what_there_is(target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first Ctrl-C does it: from some moment on, `cancel` says yes."""
    done: list[str] = []
    real = Lines.ran

    def counted(self: Lines, made: Any) -> None:
        done.append(made.run.task)
        real(self, made)

    monkeypatch.setattr(Lines, "ran", counted)
    monkeypatch.setattr("paceline.cli.commands.bench.interruptible", lambda: _Pressed(done, 3))
    out = tmp_path / "out"
    result = run("bench", "--target", target, "--prompts", prompts, "--run", "suffix", *QUICK, "--out", str(out))
    assert result.exit_code == 130, result.output
    assert "interrupted" in result.stderr
    assert "All prompts" in result.stdout
    report = read_records(out / "bench.jsonl")
    assert len(report.results) == 3
    assert not report.complete
    assert "Interrupted" in (out / "report.html").read_text("utf-8")
    again = run("bench", "--report", str(out / "bench.jsonl"))
    assert again.exit_code == 0, again.output
    assert again.stdout == result.stdout


class _Pressed:
    """`interruptible` with Ctrl-C after a number of runs."""

    def __init__(self, done: list[str], after: int) -> None:
        self._done, self._after = done, after

    def __enter__(self) -> Any:
        return lambda: len(self._done) >= self._after

    def __exit__(self, *_: object) -> None:
        pass


# ---- from records


def test_a_record_can_be_shown_again(record: Path, tmp_path: Path) -> None:
    page, table = tmp_path / "page.html", tmp_path / "table.csv"
    result = run("bench", "--report", str(record), "--html", str(page), "--csv", str(table))
    assert result.exit_code == 0, result.output
    assert "suffix" in result.stdout
    assert page.is_file()
    assert table.is_file()
    assert run("bench", "--report", str(record), "--json").stdout == record.read_text("utf-8")


def test_comparing_says_what_became_slower(record: Path, tmp_path: Path) -> None:
    same = run("bench", "--report", str(record), "--compare", str(record), "--fail-on-regression")
    assert same.exit_code == 0, same.output
    assert "Compared with before" in same.stdout
    slow = tmp_path / "slow.jsonl"
    slow.write_text("".join(_slowed(line) for line in record.read_text("utf-8").splitlines(True)), "utf-8")
    told = run("bench", "--report", str(slow), "--compare", str(record))
    assert told.exit_code == 0
    assert "slower" in told.stdout
    assert run("bench", "--report", str(slow), "--compare", str(record), "--fail-on-regression").exit_code == 1


def _slowed(line: str) -> str:
    found = json.loads(line)
    if found["kind"] == "run" and found["contestant"] == "suffix":
        found["seconds"] *= 100
    return json.dumps(found) + "\n"


def test_a_trace_is_replayed_without_the_model(target: str, prompts: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    made = run("bench", "--target", target, "--prompts", prompts, "--run", "suffix", *QUICK, "--trace", str(trace))
    assert made.exit_code == 0, made.output
    assert trace.is_file()
    told = run("bench", "--replay", str(trace), "--run", "prompt-lookup:gamma=4")
    assert told.exit_code == 0, told.output
    assert "prompt-lookup:gamma=4" in told.stdout
    assert "suffix:gamma=8" in run("bench", "--replay", str(trace)).stdout
    rows = run("bench", "--replay", str(trace), "--run", "suffix", "--json").stdout.splitlines()
    assert json.loads(rows[0])["knows"] == "exact"


# ---- bad input


def test_mistakes_end_with_2(target: str, prompts: str, tmp_path: Path) -> None:
    base = ("bench", "--target", target, *QUICK)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "a"}\n{"prompt": \n', "utf-8")
    assert "line 2" in refusal(*base, "--run", "suffix", "--prompts", str(broken), code=2).lower()
    told = refusal(*base, "--run", "suffix", "--prompts", prompts, "--category", "chatt", code=2)
    assert "Did you mean 'chat'?" in told
    told = refusal(*base, "--run", "suffix", "--prompts", prompts, "--quality", code=2)
    assert "answer" in told
    assert "Did you mean 'suffix'?" in refusal(*base, "--run", "sufix", "--prompts", prompts, code=2)
    assert "Did you mean 'gpt2'?" in refusal(*base, "--preset", "gpt3", code=2)
    assert "must be a number, got 'x'" in refusal(*base, "--synthetic-acceptance", "0.8,x", code=2)
    assert "from 0 to 1" in refusal(*base, "--synthetic-acceptance", "1.5", code=2)
    assert "--run suffix:gamma=auto" in refusal(*base, "--gamma", "auto", "--run", "suffix", code=2)
    assert "--repeats must be at least 1" in refusal(*base, "--repeats", "0", code=2)


def test_mistakes_in_files_end_with_2(prompts: str, tmp_path: Path) -> None:
    assert "cannot be read" in refusal("bench", "--report", str(tmp_path / "none.jsonl"), code=2)
    assert "no record of a benchmark" in refusal("bench", "--report", prompts, code=2)
    assert "give both" in refusal("bench", "--report", prompts, "--fail-on-regression", code=2)
    assert "use one of them" in refusal("bench", "--report", prompts, "--replay", prompts, code=2)
    assert "does not exist" in refusal("bench", "--html", str(tmp_path / "no" / "x.html"), code=2)
    assert "cannot be made" in refusal("bench", "--out", prompts, code=2)


def test_a_prompt_longer_than_the_context_is_left_out_and_counted(target: str, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "ab " * 2000}) + "\n" + json.dumps({"prompt": "ab ab"}) + "\n", "utf-8")
    out = tmp_path / "out"
    result = run("bench", "--target", target, "--prompts", str(path), "--run", "suffix", *QUICK, "--out", str(out))
    assert result.exit_code == 0, result.output
    (left_out,) = read_records(out / "bench.jsonl").skipped
    assert len(left_out.tasks) == 1
    assert "too long" in left_out.why
    assert "Left out" in result.stdout


# ---- settings


def config(*arguments: str) -> dict[str, str]:
    result = run("bench", *arguments, "--print-config")
    assert result.exit_code == 0, result.output
    return dict(line.split(" = ", 1) for line in result.stdout.splitlines() if " = " in line)


def test_each_source_beats_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "paceline.toml"
    file.write_text(
        '[bench]\nrepeats = 7\nrun = ["suffix", "ngram:gamma=8"]\nlimit = 4\nchat = false\n'
        'synthetic-acceptance = [0.9, 0.8]\nout = "results"\n'
    )
    monkeypatch.setenv("PACELINE_LIMIT", "3")
    monkeypatch.setenv("PACELINE_REPEATS", "6")
    monkeypatch.setenv("PACELINE_COMPARE", "1")  # a switch of `generate`
    monkeypatch.setenv("PACELINE_REPORT", "audit.html")  # what `audit` writes
    found = config("--config", str(file), "--repeats", "5")
    assert found["repeats"] == "5  # flag"
    assert found["limit"] == "3  # environment"
    assert found["run"] == '["suffix", "ngram:gamma=8"]  # config'
    assert found["chat"] == "false  # config"
    assert found["synthetic-acceptance"] == "[0.9, 0.8]  # config"
    assert found["out"] == '"results"  # config'
    assert found["gamma"] == "5  # default"
    assert "compare" not in found
    assert "report" not in found
    again = tmp_path / "again.toml"
    again.write_text(run("bench", "--config", str(file), "--print-config").stdout, "utf-8")
    assert config("--config", str(again))["run"] == '["suffix", "ngram:gamma=8"]  # config'


def test_a_tuned_decoder_takes_part(target: str, prompts: str, tmp_path: Path) -> None:
    file = tmp_path / "tuned.toml"
    file.write_text(
        f'[decoder]\ntarget = "{target}"\ndraft = "ngram"\ngamma = 3\nrule = "match"\n[decoder.drafter]\norder = 3\n'
    )
    result = run("bench", "--config", str(file), "--prompts", prompts, *QUICK, "--json")
    assert result.exit_code == 0, result.output
    members = next(json.loads(line) for line in result.stdout.splitlines() if '"contestants"' in line)["members"]
    assert [(member["name"], member["gamma"]) for member in members] == [("plain", 0), ("tuned", 3)]


# ---- what is seen


def test_a_terminal_has_colours_unless_it_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    report = made_report()
    table = overall(report, summarise(report))

    def shown(**more: Any) -> str:
        file = io.StringIO()
        show(table, Console(file=file, force_terminal=True, width=200, **more))
        return file.getvalue()

    assert "\x1b[32m" in shown(color_system="standard")  # green
    assert "\x1b[31m" in shown(color_system="standard")  # red
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in shown()


def test_plain_columns_line_up() -> None:
    report = made_report()
    for table in short(report, summarise(report)):
        title, header, *rows = as_text(table).splitlines()
        assert title == table.title
        assert header.split()[0] == table.header[0].split()[0]
        assert len(rows) >= len(table.rows)


def test_the_live_table_is_drawn_between_runs_and_not_too_often() -> None:
    report, now, file = made_report(), [0.0], io.StringIO()
    console = Console(file=file, force_terminal=True, width=160, color_system=None)
    drawn: list[float] = []
    with Live(console=console, auto_refresh=False) as live:
        assert not live.auto_refresh
        table = LiveTable(live, clock=lambda: now[0])
        real = live.update

        def counted(renderable: Any, *, refresh: bool = False) -> None:
            drawn.append(now[0])
            real(renderable, refresh=refresh)

        live.update = counted  # type: ignore[method-assign]
        table.started([_Who(m.name, m.library) for m in report.members], len(report.results))  # type: ignore[list-item]
        table.noted("warning: [bold]something")
        for result in report.results:
            now[0] += 0.1
            table.ran(result)
        table.draw()
    assert len(drawn) <= 2 + len(report.results) * 0.1 / 0.5 + 1
    text = file.getvalue()
    assert "warning: [bold]something" in text
    for cell in ("suffix", "× hf", "2.29×", "36/36", "4/4", "2/4"):
        assert cell in text


class _Who:
    def __init__(self, name: str, library: str) -> None:
        self.name, self.library = name, library


def test_without_a_terminal_there_is_a_line_per_prompt() -> None:
    report, told = made_report(), list[str]()
    lines = Lines(told.append)
    lines.started([_Who(m.name, m.library) for m in report.members], len(report.results))  # type: ignore[list-item]
    lines.progress("reading", 1, 2)
    lines.progress("reading", 2, 2)
    for result in report.results:
        lines.ran(result)
    lines.tell()
    assert told[:2] == ["36 runs: plain, suffix, hf", "reading …"]
    assert len(told) == 2 + 4
    assert told[2].endswith("chat-1: suffix 0.80×, hf 0.50×")
    assert told[-1].startswith("[36/36, 0:00 left] code-2: suffix 2.00×")
