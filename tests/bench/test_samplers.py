"""Samplers by name, and an evaluation over questions x samplers x modes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import bench_session
from paceline.bench.bench_options import BenchOptions
from paceline.bench.bench_session import BenchSession
from paceline.bench.machine_use import Busy
from paceline.bench.results.charts import charts_of
from paceline.bench.results.metrics import summarise
from paceline.bench.results.outputs import as_html
from paceline.bench.results.records import read_records
from paceline.bench.results.tables import evaluation
from paceline.bench.tasks import SAMPLERS, parse_samplers
from paceline.common.errors import InputError, UnknownNameError
from paceline.core.costs import Costs
from paceline.models.language_model import LanguageModel
from tests.toys import letters, llama


def parsed(*names: str, **more: Any) -> dict[str, dict[str, Any]]:
    found = parse_samplers(BenchOptions(samplers=names, **more))
    return {each.name: dict(each.settings) for each in found}


def test_all_is_every_sampler_and_noise_has_levels() -> None:
    found = parsed("all", temperature=0.7, top_k=20, noise_levels=(0.1, 0.5))
    assert {name.partition(":")[0] for name in found} == set(SAMPLERS)
    assert found == {
        "greedy": {},
        "multinomial": {"temperature": 0.7},
        "top-k": {"temperature": 0.7, "top_k": 20},
        "nucleus": {"temperature": 0.7, "top_p": 0.9},
        "top-k-nucleus": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        "top-k-noise:noise=0.1": {"temperature": 0.7, "top_k": 20, "noise": 0.1},
        "top-k-noise:noise=0.5": {"temperature": 0.7, "top_k": 20, "noise": 0.5},
        "dynamic": {"temperature": 0.7, "dynamic_temperature": 0.5},
        "typical": {"temperature": 0.7, "typical_p": 0.9},
    }
    assert parsed("multinomial") == {"multinomial": {"temperature": 1.0}}
    assert parsed("dynamic", temperature=0.3)["dynamic"]["dynamic_temperature"] == 0.3


def test_a_sampler_takes_controls_of_its_own() -> None:
    assert parsed("top-k:top_k=7,temperature=0.5") == {
        "top-k:top_k=7,temperature=0.5": {"temperature": 0.5, "top_k": 7}
    }
    noisy = parsed("top-k-noise:top_k=7", noise_levels=(0.3,))
    assert noisy == {"top-k-noise:top_k=7,noise=0.3": {"temperature": 1.0, "top_k": 7, "noise": 0.3}}
    assert list(parsed("top-k-noise:noise=0.2")) == ["top-k-noise:noise=0.2"]


@pytest.mark.parametrize(
    ("names", "more", "words"),
    [
        (("topk",), {}, "Did you mean 'top-k'"),
        (("top-k:topk=3",), {}, "Did you mean 'top_k'"),
        (("top-k:top_k=many",), {}, "top_k of the sampler"),
        (("nucleus:top_p=3",), {}, "top_p must be in"),
        (("greedy", "all"), {}, "'greedy' is named twice"),
        (("top-k-noise",), {"noise_levels": (0.0,)}, "noise_levels must be above 0"),
        (("greedy",), {"shape": "tiny"}, "samplers need prompts"),
    ],
)
def test_mistakes(names: tuple[str, ...], more: dict[str, Any], words: str) -> None:
    with pytest.raises((InputError, UnknownNameError), match=words):
        parsed(*names, **more)


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(bench_session, "how_busy", lambda device: Busy(0.0))
    monkeypatch.setattr(
        "paceline.bench.bench_session.measured_costs", lambda *_, **__: Costs({1: {1: 0.001, 8: 0.002}})
    )
    monkeypatch.setattr("paceline.bench.bench_session.load", lambda *_, **__: LanguageModel(llama(), letters(), "toy"))
    path = tmp_path / "qa.csv"
    path.write_text("question,answer\nabcabc,abc | cab\nhello hello,hello\n")
    return path


def test_questions_by_samplers_by_modes(questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench.jsonl"
    options = BenchOptions(
        prompts=(str(questions),), samplers=("all",), noise_levels=(0.1, 0.4), quality=True, runs=("suffix",),
        peers=("hf",), max_new_tokens=10, repeats=1, warm_up=0,
    )  # fmt: skip
    with out.open("w") as file:
        report = BenchSession(options, out=file).run()
    names = [each.name for each in parse_samplers(options)]
    assert report.categories == tuple(names)
    rows = {(row["sampler"], row["contestant"]): row for row in report.evaluation}
    for name in names:
        plain, ours = rows[name, "plain"], rows[name, "suffix"]
        assert ours["same"] == ours["compared"] == 2  # the promise, with every sampler
        assert ours["quality"] == plain["quality"]
        assert plain["quality"]["texts"] == 2
        assert {"exact_match", "token_f1", "similarity", "tf_idf", "distinct_1", "distinct_2"} < {*plain["quality"]}
        assert plain["temperature"] == (0.0 if name == "greedy" else 1.0)
        assert ours["tokens_per_second"] > 0
    texts = {result.run.tokens for result in report.results if result.run.contestant == "plain"}
    assert len(texts) > 2  # samplers do differ
    assert ("top-k", "hf") in rows
    assert ("top-k-noise:noise=0.1", "hf") not in rows  # transformers has no such control
    assert any("noise" in each.why for each in report.skipped)
    again = read_records(out)
    assert again.evaluation == tuple(json.loads(json.dumps(report.evaluation)))
    table = evaluation(again)
    assert table.header[:4] == ("sampler", "mode", "temperature", "noise")
    assert "TF-IDF" in table.header
    charts = {chart.name: chart for chart in charts_of(again, summarise(again))}
    quality = {series.name: series.points for series in charts["noise-quality"].series}
    assert [point.x for point in quality["TF-IDF"]] == [0.0, 0.1, 0.4]
    wanted = [rows[name, "plain"]["quality"]["tf_idf"] for name in ("top-k", "top-k-noise:noise=0.1")]
    assert [point.y for point in quality["TF-IDF"]][:2] == wanted
    assert [series.name for series in charts["noise-acceptance"].series] == ["suffix"]
    assert "Quality by noise" in as_html(again, summarise(again))


def test_without_answers_the_samplers_are_measured_only(questions: Path) -> None:
    options = BenchOptions(
        prompts=(str(questions),), samplers=("greedy", "typical"), runs=("suffix",), max_new_tokens=4, repeats=1,
        warm_up=0,
    )  # fmt: skip
    report = BenchSession(options).run()
    assert [row["quality"] for row in report.evaluation] == [None] * 4
    assert not [chart for chart in charts_of(report, summarise(report)) if chart.name.startswith("noise")]
    assert evaluation(report).rows


def test_a_trace_has_one_sampler(questions: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="leave --sampler or --trace out"):
        BenchSession(BenchOptions(prompts=(str(questions),), samplers=("greedy",)), trace=tmp_path / "trace.jsonl")


def test_a_record_of_an_older_version_can_be_resumed(questions: Path, tmp_path: Path) -> None:
    """Options that did not exist then have their defaults."""
    out = tmp_path / "bench.jsonl"
    options = BenchOptions(prompts=(str(questions),), runs=("suffix",), max_new_tokens=4, repeats=1, warm_up=0)
    with out.open("w") as file:
        BenchSession(options, out=file).run()
    old = read_records(out)
    for name in ("samplers", "noise_levels", "memory_lines", "require_quiet"):
        del old.provenance["arguments"][name]  # type: ignore[attr-defined]
    assert len(BenchSession(options, earlier=old).run().results) == len(old.results)
