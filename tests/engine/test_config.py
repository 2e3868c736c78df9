"""A decoder from a file or a mapping: the same names as the arguments and as the flags."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from tests.toys import llama

from paceline import InputError, LanguageModel, SpeculativeDecoder
from paceline.common.errors import UnknownNameError
from paceline.engine.decoder_config import DecoderOptions

TUNED = """# measured somewhere
[decoder]
target = "never-loaded"
dtype = "float64"
draft = "ngram"
gamma = 7
nodes = 20
rule = "typical"
rows = 3
allow-lossy = true
[decoder.drafter]
order = 3
branches = 2
stop-if-unknown = false
[decoder.rule-options]
epsilon = 0.4
[generate]
temperature = 0.5
"""


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return LanguageModel(llama())


def test_everything_a_decoder_takes(lm: LanguageModel, tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    path.write_text(TUNED)
    made = SpeculativeDecoder.from_config(path, lm)
    assert made.target is lm
    assert (made.drafter.name, made.gamma, made.nodes, made.rows) == ("ngram", 7, 20, 3)
    options: Any = made.drafter.options  # type: ignore[attr-defined]
    assert (options.order, options.branches, options.stop_if_unknown) == (3, 2, False)
    assert (made.rule.name, made.rule.options.epsilon) == ("typical", 0.4)
    assert made.generate([1, 2, 3], max_new_tokens=5).stats.lossy


def test_a_mapping_in_the_words_of_the_arguments(lm: LanguageModel) -> None:
    message = {"target": lm, "draft": "prompt-lookup", "options": {"longest": 2}, "gamma": 3}
    made = SpeculativeDecoder.from_config(message)
    assert (made.drafter.name, made.gamma, made.rule.name) == ("prompt-lookup", 3, "match")
    assert SpeculativeDecoder.from_config({"decoder": message}).gamma == 3


def test_what_is_said_beside_counts_more(lm: LanguageModel) -> None:
    message = {"draft": "ngram", "options": {"order": 3}, "rule": "typical", "rule_options": {"epsilon": 0.4}}
    made = SpeculativeDecoder.from_config(message, lm, draft="suffix", rule="ratio", gamma=2)
    assert (made.drafter.name, made.rule.name, made.gamma) == ("suffix", "ratio", 2)
    assert SpeculativeDecoder.from_config({"draft": "none"}, target=lm).speculates is False


def test_the_target_is_loaded_as_it_says(tmp_path: Path) -> None:
    llama().float().save_pretrained(tmp_path / "model")
    path = tmp_path / "tuned.toml"
    path.write_text(f'target = "{(tmp_path / "model").as_posix()}"\ndtype = "float64"\ndevice = "cpu"\n')
    assert str(SpeculativeDecoder.from_config(str(path)).target.dtype) == "torch.float64"


def test_how_passes_run(lm: LanguageModel, tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    path.write_text('[decoder]\nrunner = "eager"\nquantize = "int8"\n')
    made = SpeculativeDecoder.from_config(path, lm)
    assert (made.target.runner, made.target.name) == ("eager", f"{lm.name} in int8")
    assert SpeculativeDecoder.from_config(path, lm, quantize=None, runner="auto").target is lm
    with pytest.raises(UnknownNameError, match="Did you mean 'eager'"):
        SpeculativeDecoder.from_config({"runner": "eagr"}, lm)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"drfat": "suffix"}, "Did you mean 'draft'?"),
        ({"decodr": {"draft": "suffix"}}, "Did you mean 'decoder'?"),
        ({"decoder": {"gama": 3}}, "Did you mean 'gamma'?"),
        ({"decoder": 3}, "must be a table"),
        ({"decoder": {"gamma": 3}, "draft": "suffix"}, "stands outside of [decoder]"),
        ({"draft": "suffix"}, "names no target"),
        (3, "a TOML file or a mapping"),
        ("/nowhere/at/all.toml", "cannot be read"),
    ],
)
def test_refusals(message: Any, words: str) -> None:
    with pytest.raises(InputError) as error:
        SpeculativeDecoder.from_config(message)
    assert words in str(error.value)


def test_unknown_overrides(lm: LanguageModel) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'gamma'"):
        SpeculativeDecoder.from_config({}, lm, gama=3)


def test_the_options_of_a_decoder_are_its_arguments() -> None:
    """`DecoderOptions` and the constructor have the same names and defaults."""
    arguments = inspect.signature(SpeculativeDecoder.__init__).parameters
    found = {name: each.default for name, each in arguments.items() if name not in ("self", "aliases")}
    found["target"] = MISSING
    assert found == {field.name: field.default for field in fields(DecoderOptions)}
