"""Tuning on a clock that only passes of the target move: what is predicted and measured can then be worked out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import InputError, LanguageModel, SpeculativeDecoder
from paceline.bench import tuning as room
from paceline.bench.candidate import Prompt, Run, RunSpec
from paceline.bench.machine_use import Busy
from paceline.bench.tuning import (
    ONE_REPEAT,
    Trial,
    TuneOptions,
    Tuning,
    candidates,
    forecast,
    ranked,
    rounds_of,
    shortened,
    steps_of,
    tune,
)
from paceline.common.text_formats import read_toml
from paceline.core.costs import Costs
from paceline.core.trace import Round, Trace
from paceline.models.reader import TransformersExecutor
from tests.toys import TableModel, letters, llama

CYCLE = "abcdefghij"
PROMPTS = [Prompt(str(n), "x", (CYCLE[n:] + CYCLE + CYCLE[:n],)) for n in range(2)]
FED = (1, 2, 4, 8, 16, 32, 64)


class WorkClock:
    """A pass over n tokens takes 1 + slope (n-1) milliseconds; nothing else takes any time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slope: float) -> None:
        self.time, self.slope = 0.0, slope
        self.costs = Costs({1: {fed: self.seconds(fed) for fed in FED}})
        run = TransformersExecutor.run

        def timed(executor: Any, model: Any, inputs: dict[str, Any]) -> Any:
            self.time += self.seconds(inputs["input_ids"].shape[1])
            return run(executor, model, inputs)

        monkeypatch.setattr(TransformersExecutor, "run", timed)

    def seconds(self, fed: int) -> float:
        return 0.001 * (1 + self.slope * (fed - 1))

    def __call__(self) -> float:
        return self.time


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(room, "how_busy", lambda device: Busy(0.0))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def cyclic() -> LanguageModel:
    """Writes the letters in their order, round and round."""
    table = torch.zeros(40, 40)
    for here in range(len(CYCLE)):
        table[here, (here + 1) % len(CYCLE)] = 9.0
    return LanguageModel(TableModel(table), letters(), "cyclic")


def tuned(lm: LanguageModel, clock: WorkClock, *candidate: str, **how: Any) -> Tuning:
    options = {"candidates": candidate, "only": bool(candidate), "tokens": 30, "repeats": 2, **how}
    return tune(lm, PROMPTS, TuneOptions(**options), costs=clock.costs, clock=clock)


@pytest.fixture
def read(tmp_path: Path) -> Callable[[Tuning], dict[str, Any]]:
    """What the file of a tuning says."""

    def parsed(found: Tuning) -> dict[str, Any]:
        (tmp_path / "tuned.toml").write_text(found.toml(), "utf-8")
        return read_toml(tmp_path / "tuned.toml")

    return parsed


Read = Callable[[Tuning], "dict[str, Any]"]

# ---- the whole of it


def test_the_best_is_found_and_predicted(cyclic: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuned(cyclic, WorkClock(monkeypatch, 0.05), "prompt-lookup", "trigram", gammas=(1, 4, 8), trees=(1,))
    best = found.chosen
    assert best is not None
    assert best is found.trials[0]
    assert best.entry.gamma == 8  # of either: both draft the same here
    assert (best.same, best.acceptance) == (True, 1.0)
    assert best.tau == pytest.approx(30 / 4)  # 9, 9, 9 and the last 3
    measured = [trial for trial in found.trials if trial.measured is not None]
    assert len(measured) >= 2
    for trial in measured:
        assert trial.predicted == pytest.approx(trial.measured, rel=0.1)
    assert found.verdict.startswith(f"Use {best.entry.name}: ")
    assert {trial.entry.draft for trial in found.trials} == {"prompt-lookup", "trigram"}


def test_what_is_slower_than_plain_decoding_is_never_chosen(
    cyclic: LanguageModel, monkeypatch: pytest.MonkeyPatch, read: Read
) -> None:
    found = tuned(cyclic, WorkClock(monkeypatch, 1.2), "prompt-lookup", "prompt-lookup:gamma=2", trees=(1,))
    assert found.chosen is None
    assert 'draft = "none"' in found.verdict
    assert read(found)["decoder"] == {"target": "cyclic", "draft": "none"}


def test_drafters_that_need_the_target_are_tried_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = LanguageModel(llama(max_position_embeddings=200), letters())
    found = tuned(lm, WorkClock(monkeypatch, 0.0), "recycling", "lookahead", gammas=(2, 5, 16), finalists=1)
    names = {trial.entry.name for trial in found.trials}
    assert names == {f"{name}:gamma={gamma}" for name in ("recycling", "lookahead") for gamma in (2, 5)}
    assert all(trial.predicted for trial in found.trials)
    assert sum(trial.measured is not None for trial in found.trials) == 1


def test_every_drafter_that_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = LanguageModel(llama(max_position_embeddings=200), letters())
    found = tuned(lm, WorkClock(monkeypatch, 0.1), gammas=(3,), trees=(1,), tokens=8, repeats=1, finalists=2)
    assert {"auto", "suffix", "ngram", "early-exit"} <= {trial.entry.draft for trial in found.trials}
    assert not [trial.note for trial in found.trials if trial.note]
    assert next(trial for trial in found.trials if trial.entry.draft == "auto").measured is not None


def test_rules_are_tried_on_the_best_only(cyclic: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuned(
        cyclic, WorkClock(monkeypatch, 0.05), "prompt-lookup", gammas=(2, 4, 8), trees=(1,), finalists=1,
        rules=("match", "ratio"), sampling={"temperature": 0.5}, seed=3,
    )  # fmt: skip
    measured = {trial.entry.name: trial for trial in found.trials if trial.measured is not None}
    assert set(measured) == {"prompt-lookup:gamma=8", "prompt-lookup:gamma=8,rule=ratio"}
    assert measured["prompt-lookup:gamma=8,rule=ratio"].entry.rule == "ratio"
    assert measured["prompt-lookup:gamma=8,rule=ratio"].same is None  # the law, not the text


def test_who_cannot_take_part_is_told(cyclic: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuned(cyclic, WorkClock(monkeypatch, 0.05), "prompt-lookup:gamma=3", "./nowhere/at/all")
    refused = [trial for trial in found.trials if trial.note]
    assert {trial.entry.draft for trial in refused} == {"./nowhere/at/all"}
    assert found.chosen is not None


@pytest.mark.parametrize("calls", [0, 3, 9, 60, 300])
def test_stopped_at_any_time_it_tells_what_it_knows(
    calls: int, cyclic: LanguageModel, monkeypatch: pytest.MonkeyPatch, read: Read
) -> None:
    clock, left = WorkClock(monkeypatch, 0.05), [calls]

    def cancel() -> bool:
        left[0] -= 1
        return left[0] < 0

    options = TuneOptions(candidates=("prompt-lookup",), only=True, tokens=30, repeats=3)
    found = tune(cyclic, PROMPTS, options, costs=clock.costs, clock=clock, cancel=cancel)
    assert not found.complete
    assert "stopped before" in found.toml()
    SpeculativeDecoder.from_config(read(found), cyclic)
    assert found.as_dict()["complete"] is False


def test_prompts_that_do_not_fit(cyclic: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no prompt to tune with"):
        tune(cyclic, [], TuneOptions())
    long = Prompt("long", "x", (CYCLE * 20,))
    lm, clock = LanguageModel(llama(max_position_embeddings=96), letters()), WorkClock(monkeypatch, 0.1)
    options = TuneOptions(candidates=("suffix",), only=True, tokens=8, repeats=1)
    found = tune(lm, [*PROMPTS, long], options, costs=clock.costs, clock=clock)
    assert found.notes == ("1 prompts do not fit the context and are left out.", ONE_REPEAT)
    with pytest.raises(InputError, match="more than the context of 96"):
        tune(lm, [long], options, costs=clock.costs, clock=clock)


# ---- who is tried


def names(*candidate: str, **how: Any) -> list[str]:
    return [entry.name for entry in candidates(TuneOptions(candidates=candidate, only=True, **how))]


def test_variants() -> None:
    assert names("ngram:order=3", gammas=(2, 4), trees=(1, 2)) == [
        "ngram:order=3,gamma=2", "ngram:order=3,gamma=4",
        "ngram:order=3,gamma=2,branches=2", "ngram:order=3,gamma=4,branches=2",
    ]  # fmt: skip
    assert names("suffix:gamma=7,branches=3") == ["suffix:gamma=7,branches=3"]
    assert names("recycling", "recycling", gammas=(4, 8, 12)) == ["recycling:gamma=4", "recycling:gamma=8"]
    assert names("auto") == ["auto"]
    (entry,) = candidates(TuneOptions(candidates=('{"name": "suffix", "gamma": 3}',), only=True, trees=(2,)))
    assert (entry.draft, entry.gamma, entry.options["branches"]) == ("suffix", 3, 2)


def test_by_default_everything_that_needs_nothing() -> None:
    drafts = {entry.draft for entry in candidates(TuneOptions())}
    assert {"prompt-lookup", "ngram", "suffix", "auto"} <= drafts
    assert not {"none", "draft-model", "medusa", "prediction"} & drafts


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"rules": ("typical",)}, "lossy"),
        ({"rules": ("mach",)}, "Did you mean 'match'"),
        ({"gammas": ()}, "gammas is empty"),
        ({"gammas": (0,)}, "at least 1, got 0"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"only": True}, "none is given"),
    ],
)
def test_options_that_are_wrong(how: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        TuneOptions(**how)


# ---- predicting


def entry_of(drafted: int, accepted: int) -> Round:
    return Round(tuple(range(drafted)), None, tuple(range(accepted)), 39, accepted == drafted)


def test_rounds_shorter_than_those_recorded() -> None:
    trace = Trace([entry_of(4, 4), entry_of(4, 1), entry_of(4, 0), entry_of(4, 2)])
    assert steps_of(trace) == 16
    whole = rounds_of(trace, 0.5)
    assert (whole.fed, whole.accepted, whole.emitted, whole.drafting) == ((5, 5, 5, 5), 7, 11, 0.5)
    assert shortened(trace, 4, 0.5 / 16) == whole
    half = shortened(trace, 2, 1.0)
    # 2, 1, 0 and 2 accepted and a token each: 9 instead of 11, so rounds are needed 11/9 times as often
    assert (half.fed, half.count) == ((3, 3, 3, 3), pytest.approx(4 * 11 / 9))
    assert half.drafting == pytest.approx(8 * 11 / 9)


def test_a_forecast_counts_in_rounds_of_plain_decoding() -> None:
    plain = Run("plain", "1", "x", 0, ((1,) * 11,), seconds=3.0, first=1.0)  # 0.2 for every token after the first
    costs = Costs({1: {1: 0.1, 5: 0.15}}, overhead=0.1)
    rounds = rounds_of(Trace([entry_of(4, 4), entry_of(4, 4)]), drafting=0.1)
    # two rounds of 0.15 + 0.1 and 0.1 of drafting are three plain ones; the first is in the first second
    assert forecast(plain, rounds, costs) == pytest.approx(1.0 + 0.2 * 2)


# ---- what is written


def made(*trials: Trial, **how: Any) -> Tuning:
    facts = {"cpu": "a machine", "threads": 2}
    target = {"target": "./big", "dtype": "bfloat16"}
    return Tuning(ranked(list(trials)), facts, target, "big (bfloat16, cpu)", "2026-01-01", 3, 64, **how)


def test_the_file_says_what_was_chosen(tmp_path: Path, cyclic: LanguageModel, read: Read) -> None:
    entry = RunSpec("x", "ngram", {"order": 3, "branches": 2, "store": None}, 7, 20, "ratio")
    found = made(Trial(entry, 1.5, 1.4, 0.02), Trial(RunSpec("y", "suffix"), 1.2))
    text = found.toml()
    assert text.startswith("# paceline tune, 2026-01-01: big (bfloat16, cpu) on a machine, 2 threads\n# Use x: 1.40x")
    assert read(found) == {
        "decoder": {"target": "./big", "dtype": "bfloat16", "draft": "ngram", "gamma": 7, "nodes": 20, "rule": "ratio",
                    "drafter": {"order": 3, "branches": 2}}
    }  # fmt: skip
    decoder = SpeculativeDecoder.from_config(tmp_path / "tuned.toml", cyclic)
    assert (decoder.drafter.name, decoder.gamma, decoder.rule.name) == ("ngram", 7, "ratio")


@pytest.mark.parametrize(
    ("measured", "spread", "chosen"), [(1.05, 0.01, True), (1.05, 0.1, False), (1.05, None, False), (0.99, None, False)]
)
def test_only_what_is_surely_not_slower(measured: float, spread: float | None, chosen: bool) -> None:
    found = made(Trial(RunSpec("x", "suffix"), 1.5, measured, spread))
    assert (found.chosen is not None) == chosen
    assert ('draft = "none"' in found.toml()) != chosen


def test_nothing_measured_nothing_chosen() -> None:
    found = made(Trial(RunSpec("x", "suffix"), 9.0), complete=False)
    assert found.chosen is None
    assert "Nothing was measured" in found.verdict
