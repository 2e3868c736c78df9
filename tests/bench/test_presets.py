"""Benchmarks that have a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.bench.bench_options import PRESETS, BenchOptions, apply_preset, needs_nothing
from paceline.common.errors import UnknownNameError
from paceline.core.contracts import DRAFTERS
from paceline.drafters import shipped
from paceline.drafters.shipped import kinds_of


def test_without_a_preset_nothing_changes() -> None:
    options = BenchOptions(runs=("suffix",))
    assert apply_preset(options) is options


def test_default_has_every_drafter_that_needs_nothing() -> None:
    made = apply_preset(BenchOptions(preset="default"))
    assert {"suffix", "ngram", "prompt-lookup", "recycling", "lookahead", "trigram", "portfolio"} <= set(made.runs)
    assert not {"none", "draft-model", "staged", "cross-vocabulary"} & set(made.runs)
    assert set(made.runs) & {"medusa", "eagle", "prophet"} <= set(kinds_of("smollm2-135m"))
    assert "prediction" not in made.runs  # there is no prediction
    assert ("auto" in made.runs) == ("auto" in DRAFTERS)
    assert made.peers == ("hf", "hf-lookup")
    assert made.preset == "default"  # for the provenance


def test_a_drafter_of_somebody_else_takes_part() -> None:
    runs = set(apply_preset(BenchOptions(preset="default")).runs)
    assert all(needs_nothing(name) for name in runs - set(kinds_of("smollm2-135m")))


def test_what_comes_along_trained_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "smollm2-135m" / "catalogue.json").write_text('{"best": ["eagle", "trigram"]}')
    monkeypatch.setattr(shipped, "ROOT", tmp_path)
    assert apply_preset(BenchOptions(preset="trained")).runs == ("eagle", "trigram", "auto")
    assert apply_preset(BenchOptions(preset="trained")).peers == ("hf", "hf-lookup", "hf-assisted")
    default = apply_preset(BenchOptions(preset="default")).runs
    assert "eagle" in default
    assert default.count("trigram") == 1, "it needs no training, but has one"


def test_gpt2_is_a_pair() -> None:
    made = apply_preset(BenchOptions(preset="gpt2"))
    assert (made.target, made.runs) == ("openai-community/gpt2-medium", ("distilbert/distilgpt2",))
    assert made.peers == ("hf", "hf-assisted")


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_what_was_said_wins(preset: str) -> None:
    options = BenchOptions(target="./mine", runs=("ngram",), peers=("openvino",), limit=3, preset=preset)
    assert apply_preset(options) == BenchOptions(
        target="./mine", runs=("ngram",), peers=("openvino",), limit=3, preset=preset,
        max_new_tokens=apply_preset(BenchOptions(preset=preset)).max_new_tokens,
    )  # fmt: skip


def test_what_was_said_wins_even_where_it_is_the_default() -> None:
    made = apply_preset(BenchOptions(target="smollm2-135m", preset="gpt2"), given={"target", "peers"})
    assert made.target == "smollm2-135m"
    assert made.peers == ()
    assert made.runs == ("distilbert/distilgpt2",)


def test_twice_is_once() -> None:
    once = apply_preset(BenchOptions(preset="training-free"))
    assert apply_preset(once) == once


def test_an_unknown_preset_is_named() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown preset 'gpt3'\. Did you mean 'gpt2'\?"):
        apply_preset(BenchOptions(preset="gpt3"))
