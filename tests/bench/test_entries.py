"""What people say of a run becomes an RunSpec with the right types, or one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.bench.candidate import RunSpec, parse_run_spec, parse_run_specs
from paceline.common.errors import InputError, UnknownNameError


def test_a_name_alone_has_the_gamma_of_the_benchmark() -> None:
    assert parse_run_spec("suffix", gamma=7) == RunSpec("suffix", "suffix", {}, 7)


def test_options_go_to_the_drafter_the_rule_and_the_loop_with_their_types() -> None:
    text = "ngram:gamma=8,branches=4,stop_if_unknown=no,rule=typical,nodes=32,rule.epsilon=0.5"
    made = parse_run_spec(text)
    assert made == RunSpec(text, "ngram", {"branches": 4, "stop_if_unknown": False}, 8, 32, "typical", {"epsilon": 0.5})


def test_json_says_the_same() -> None:
    text = '{"name": "ngram", "gamma": 8, "branches": 4, "rule": "ratio", "label": "mine"}'
    wanted = RunSpec("mine", "ngram", {"branches": 4}, 8, None, "ratio")
    assert parse_run_spec(text) == wanted
    assert parse_run_spec({"name": "ngram", "gamma": 8, "branches": 4, "rule": "ratio", "label": "mine"}) == wanted


def test_gamma_may_be_auto_and_is_where_a_drafter_chooses_by_itself() -> None:
    assert parse_run_spec("ngram:gamma=auto").gamma == "auto"
    assert parse_run_spec("auto").gamma == "auto"
    assert parse_run_spec("auto:gamma=4").gamma == 4


def test_a_list_has_commas_of_its_own() -> None:
    made = parse_run_spec("early-exit:skip=1,2,gamma=4")
    assert made.options == {"skip": (1, 2)}
    assert made.gamma == 4


def test_a_drafter_may_have_an_option_called_as_one_of_ours() -> None:
    made = parse_run_spec("recycling:drafter.nodes=12,nodes=20")
    assert made.options == {"nodes": 12}
    assert made.nodes == 20


def test_a_model_is_a_draft(tmp_path: Path) -> None:
    odd = tmp_path / "with:colon"
    odd.mkdir()
    assert parse_run_spec("smollm2-135m:gamma=3,tree=levels") == RunSpec(
        "smollm2-135m:gamma=3,tree=levels", "smollm2-135m", {"tree": "levels"}, 3
    )
    assert parse_run_spec(str(odd)).draft == str(odd)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("sufix", "Did you mean 'suffix'?"),
        ("ngram:brances=4", "Did you mean 'branches'?"),
        ("ngram:rule=rato", "Did you mean 'ratio'?"),
        ("ngram:rule=ratio,rule.lenience=1", "Unknown option of rule 'ratio'"),
        ("early-exit:tree=bush", "Unknown value of tree"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(text: str, part: str) -> None:
    with pytest.raises(UnknownNameError) as refused:
        parse_run_spec(text)
    assert part in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        "ngram:gamma=0", "ngram:gamma=many", "ngram:nodes=-1", "ngram:branches=x", "ngram:branches=99", "ngram:",
        ":gamma=2", "ngram:gamma=1,gamma=2", "ngram:4", '{"name": 3}', "{oops", {"name": "ngram", "branches": True},
        {"name": "ngram", "gamma": True}, {"name": "ngram", "rule": 3}, {"name": "ngram", "label": ""},
    ],
)  # fmt: skip
def test_wrong_values_are_one_sentence(given: Any) -> None:
    with pytest.raises(InputError) as refused:
        parse_run_spec(given)
    assert "\n" not in str(refused.value)


def test_names_are_unique() -> None:
    assert [each.name for each in parse_run_specs(["suffix", "suffix:label=other"])] == ["suffix", "other"]
    for texts in (["suffix", "suffix"], ["suffix:label=plain"]):
        with pytest.raises(InputError, match="called"):
            parse_run_specs(texts)
