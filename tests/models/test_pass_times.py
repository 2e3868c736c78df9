"""What passes cost: the right medians from a clock that is made up, and a cache that never gets in the way."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.toys import gpt2, llama

from paceline.common.errors import PacelineWarning
from paceline.core.contracts import Reading
from paceline.models import pass_timing as pass_times
from paceline.models.language_model import LanguageModel, ModelRecord
from paceline.models.pass_timing import Usage, costs_for, costs_key, measured_costs, remember, rising


class FakeModel:
    """A target whose passes take given times, on a clock of its own."""

    device, vocabulary, context = torch.device("cpu"), 40, 2048
    capturable = False

    def __init__(self, seconds: Callable[[int, int, int], float]) -> None:
        self.time, self.passes, self._seconds = 0.0, [], seconds
        self.prompt_taps: list[Any] = []

    def clock(self) -> float:
        return self.time

    def reader(self) -> FakeModel:
        return self

    def begin(self, rows: Any, first: int, room: int) -> int:
        return 1

    def extend(self, rows: Any, width: int, tokens: Any = None, parents: Any = None) -> Reading:
        fed = width + (0 if tokens is None else tokens.shape[1])
        self.time += self._seconds(rows.count, fed, len(self.passes))
        self.passes.append((rows.count, fed))
        return Reading(torch.zeros(rows.count, fed, 40))

    def keep(self, rows: Any, path: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    load(monkeypatch, busy=False)


def load(monkeypatch: pytest.MonkeyPatch, lm: LanguageModel | None = None, *, busy: bool) -> None:
    """From here on other processes use the machine, or leave it alone. `lm` is as in a new process."""

    class OtherLoad:
        def begin(self) -> None:
            pass

        def disturbed(self) -> bool:
            return busy

    monkeypatch.setattr(pass_times, "Neighbours", OtherLoad)
    monkeypatch.setattr(pass_times, "_quiet", lambda: not busy)
    if lm is not None:
        lm.record = ModelRecord()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Which numbers of rows are measured from here on."""
    asked: list[tuple[int, ...]] = []
    real = measured_costs

    def measure(lm: Any, **how: Any) -> Any:
        asked.append(tuple(how["rows"]))
        return real(lm, fed=(1, 2, 4), context=8, repeats=1, **how)

    monkeypatch.setattr(pass_times, "measured_costs", measure)
    return asked


def measure(fake: FakeModel, **how: Any) -> Any:
    return measured_costs(fake, clock=fake.clock, **how)  # type: ignore[arg-type]


# ---- measuring


def test_widths_are_interleaved_and_the_first_sweep_does_not_count() -> None:
    fake = FakeModel(lambda rows, fed, number: 100.0 if number < 4 else 0.1 * fed)
    fake.time, output = 0.0, []
    costs = measure(fake, fed=(4, 1, 2), repeats=4, progress=lambda *each: output.append(each))
    assert [fed for _, fed in fake.passes] == [1, *[1, 2, 4] * 4]  # the text, a sweep to warm up, three at least
    assert costs.passes[1] == pytest.approx({1: 0.1, 2: 0.2, 4: 0.4})
    assert output[-1] == ("measuring passes", 3, 3)


def test_as_many_sweeps_as_asked_for_where_they_are_short() -> None:
    fake = FakeModel(lambda rows, fed, number: 0.001)
    measure(fake, fed=(1, 2), repeats=7)
    assert len(fake.passes) == 1 + 2 * 8


def test_a_slow_sweep_and_a_slow_pass_change_nothing() -> None:
    def seconds(rows: int, fed: int, number: int) -> float:
        sweep, place = divmod(number - 1, 3)
        slow = 10.0 if sweep == 2 else 50.0 if (sweep, place) == (4, 1) else 1.0
        return 0.01 * slow * {1: 1.0, 2: 1.6, 8: 2.0}[fed]

    costs = measure(FakeModel(seconds), fed=(1, 2, 8), repeats=5)
    assert costs.passes[1] == pytest.approx({1: 0.01, 2: 0.016, 8: 0.02})
    assert costs.v(8) == pytest.approx(2.0)


def test_a_wider_pass_never_costs_less() -> None:
    costs = measure(FakeModel(lambda rows, fed, number: {1: 0.02, 2: 0.05, 4: 0.04, 8: 0.06}[fed]), fed=(1, 2, 4, 8))
    assert costs.passes[1] == pytest.approx({1: 0.02, 2: 0.045, 4: 0.045, 8: 0.06})


def test_one_slow_width_does_not_make_all_wider_ones_slow() -> None:
    assert rising([1.0, 3.0, 1.5, 1.5, 2.5]) == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.5])
    assert rising([2.0, 1.0, 0.6]) == pytest.approx([1.2, 1.2, 1.2])
    assert rising([1.0, 1.6, 2.0]) == [1.0, 1.6, 2.0]


def test_rows_have_tables_of_their_own() -> None:
    costs = measure(FakeModel(lambda rows, fed, number: 0.001 * rows * fed), rows=(1, 4), fed=(1, 2))
    assert costs.passes[4] == pytest.approx({1: 0.004, 2: 0.008})
    assert costs.seconds(2, rows=2) == pytest.approx(0.004)


def test_of_a_slow_model_only_narrow_passes_are_measured() -> None:
    costs = measure(FakeModel(lambda rows, fed, number: 3.0 * fed))
    assert sorted(costs.passes[1]) == [1, 2, 3, 4]
    assert costs.seconds(64) == pytest.approx(192.0)


@pytest.mark.parametrize("context", [2, 3, 8, 70])
def test_contexts_too_short_for_all_of_it(context: int) -> None:
    lm = LanguageModel(llama(max_position_embeddings=context))
    costs = measured_costs(lm, rows=(1, 2), repeats=1)
    assert 1 in costs.passes[1]
    assert max(costs.passes[2]) < context


def test_learned_positions_and_even_the_narrowest_context() -> None:
    assert measured_costs(LanguageModel(gpt2(n_positions=16)), repeats=1).seconds(4) > 0


# ---- keeping


def test_what_is_known_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counted(monkeypatch)
    lm = LanguageModel(llama())
    first = costs_for(lm)
    assert costs_for(lm) is first
    lm.record = ModelRecord()  # as if in another process
    assert costs_for(LanguageModel(llama(seed=3))) == first  # other weights of the same shape cost the same
    assert asked == [(1,)]
    costs_for(lm, fresh=True)
    assert asked == [(1,), (1,)]


def test_more_rows_are_added_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counted(monkeypatch)
    lm = LanguageModel(llama())
    one = costs_for(lm, 1)
    five = costs_for(lm, 5)
    assert asked == [(1,), (2, 4, 8)]
    assert five.passes[1] == one.passes[1]
    lm.record = ModelRecord()
    assert costs_for(lm, 8) == five
    assert len(asked) == 2


def test_overhead_and_draft_steps_are_kept_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    counted(monkeypatch)
    lm = LanguageModel(llama())
    remember(lm, overhead=0.25)
    remember(lm, drafters={"suffix": 0.5})
    lm.record = ModelRecord()
    costs = costs_for(lm)
    assert (costs.overhead, costs.drafters) == (0.25, {"suffix": 0.5})


def test_the_key_follows_what_costs_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {costs_key(LanguageModel(llama())), costs_key(LanguageModel(llama(seed=1)))}
    assert len(keys) == 1
    keys.add(costs_key(LanguageModel(llama().float())))
    keys.add(costs_key(LanguageModel(llama(num_hidden_layers=3))))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    keys.add(costs_key(LanguageModel(llama())))
    monkeypatch.setattr(pass_times, "package_version", lambda name: "9.9")
    keys.add(costs_key(LanguageModel(llama())))
    assert len(keys) == 5


@pytest.mark.parametrize("content", ["", "[]", "{", *(f'{{"passes": {p}, "overhead": 0, "drafters": {{}}}}' for p in (
    "{}", "3", '{"1": 3}', '{"1": {}}', '{"1": {"1": -1}}', '{"2": {"1": 1.0}}'))])  # fmt: skip
def test_a_broken_file_is_measured_again(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counted(monkeypatch)
    lm = LanguageModel(llama())
    path = tmp_path / "cache" / "costs" / f"{costs_key(lm)}.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert costs_for(lm).seconds(1) > 0
    assert asked == [(1,)]
    assert json.loads(path.read_text())["passes"]["1"]


def test_a_cache_that_cannot_be_written_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted(monkeypatch)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        assert costs_for(LanguageModel(llama())).seconds(1) > 0
        remember(LanguageModel(llama()), overhead=0.5)
    assert [type(warning.message) for warning in found] == [PacelineWarning]
    assert "set PACELINE_CACHE" in str(found[0].message)


# ---- on a busy machine


def test_costs_of_a_busy_machine_are_measured_again_on_a_quiet_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counted(monkeypatch)
    lm = LanguageModel(llama())
    load(monkeypatch, lm, busy=True)
    costs_for(lm)
    remember(lm, overhead=0.25)
    load(monkeypatch, lm, busy=True)
    assert costs_for(lm).overhead == 0.25  # better than no costs
    assert len(asked) == 1
    load(monkeypatch, lm, busy=False)
    assert costs_for(lm).overhead == 0.0
    assert len(asked) == 2
    load(monkeypatch, lm, busy=False)
    costs_for(lm)
    assert len(asked) == 2


def test_costs_of_a_busy_machine_do_not_replace_those_of_a_quiet_one(monkeypatch: pytest.MonkeyPatch) -> None:
    counted(monkeypatch)
    lm = LanguageModel(llama())
    quiet = costs_for(lm)
    load(monkeypatch, lm, busy=True)
    costs_for(lm, fresh=True)
    costs_for(lm, 2)
    remember(lm, overhead=0.25)
    load(monkeypatch, lm, busy=True)
    assert costs_for(lm) == quiet


def test_a_quiet_measurement_ends_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counted(monkeypatch)
    lm = LanguageModel(llama())
    load(monkeypatch, lm, busy=True)
    costs_for(lm)
    busy = lm.record.busy
    load(monkeypatch, lm, busy=False)
    lm.record.busy = busy
    found = costs_for(lm, fresh=True)
    load(monkeypatch, lm, busy=False)
    assert costs_for(lm) == found
    assert len(asked) == 2


def test_the_load_since_the_start_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for used, quiet in ((0.0, True), (3.0, False)):
        monkeypatch.setattr(pass_times, "_STARTED", Usage(0, 0, 0))
        monkeypatch.setattr(pass_times, "read_usage", lambda used=used: Usage(used, 0, 10))
        assert pass_times._quiet() is quiet
    monkeypatch.setattr(pass_times, "_STARTED", None)
    assert not pass_times._quiet()  # unknown: what is known holds
