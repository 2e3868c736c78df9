"""Our own decoder as a contestant: equal lengths, the same state at every start, honest numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.bench.candidate import PacelineRun, Plan, RunSpec, Task, parse_run_spec
from paceline.common.errors import DrafterError, ModelOutputError
from paceline.drafters.heads.eagle import EagleHead
from paceline.drafters.heads.medusa import MedusaHead
from paceline.drafters.lookup.suffix import Suffix
from paceline.drafters.models import self_quantized
from paceline.drafters.models.draft_lm import DraftLayers
from paceline.engine import round_graphs as flight
from paceline.models.language_model import LanguageModel
from tests.engine.graph_devices import Rehearsal
from tests.toys import VOCABULARY, fingerprint, llama, scripted

ONE = Task("1", "story", ((1, 2, 3, 4, 5, 1, 2, 3),))
TWO = Task("1+2", "story", ((1, 2, 3, 4, 5, 1, 2, 3), (4, 5, 6)))
PLAN = Plan(tokens=20)
RUNS = (
    "suffix", "ngram:gamma=8,branches=4", "recycling", "lookahead", "self-quantized:gamma=3", "early-exit",
    "early-exit:skip=1", "portfolio", "prompt-lookup:rule=ratio",
)  # fmt: skip


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return LanguageModel(llama(eos_token_id=25))  # the token it likes to begin with


def never() -> bool:
    return False


def ticking() -> Callable[[], float]:
    """A clock that goes on by one second at every look."""
    now = -1.0

    def clock() -> float:
        nonlocal now
        now += 1
        return now

    return clock


@pytest.mark.parametrize("text", RUNS)
@pytest.mark.parametrize("task", [ONE, TWO], ids=["one", "batch"])
def test_everyone_writes_what_plain_decoding_writes_and_as_much(lm: LanguageModel, text: str, task: Task) -> None:
    plain = PacelineRun(lm, plain=True).run(task, PLAN, 0, never)
    ours = PacelineRun(lm, parse_run_spec(text))
    first, second = (ours.run(task, PLAN, repeat, never) for repeat in range(2))
    assert first.tokens == second.tokens == plain.tokens
    assert [len(row) for row in first.tokens] == [20] * len(task.prompts)
    assert first.traces == second.traces  # the second run began where the first did
    assert first.passes == max(len(trace.rounds) for trace in first.traces)
    assert (first.contestant, first.task, first.category, second.repeat) == (text, task.id, "story", 1)
    assert ours.speculates
    assert ours.exact


@pytest.mark.usefixtures("trees_by_torch")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("eagle", {}),
        ("eagle", {"tree": "best-first"}),
        ("eagle", {"tree": "optimal"}),  # this and the last two learn from texts, and every run begins without
        ("medusa", {}),
        ("draft-lm", {}),
        ("draft-lm", {"vocabulary": 24}),
        ("suffix", {}),
        ("portfolio", {"drafters": ("suffix", "recycling")}),
    ],
)
def test_rounds_are_captured_once_for_all_runs(
    lm: LanguageModel, name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that has learned is replaced by a fresh one; the captured graphs stay."""
    made: list[Rehearsal] = []

    def programs(_: LanguageModel) -> Rehearsal:
        made.append(Rehearsal())
        return made[-1]

    monkeypatch.setattr(flight, "programs_for", programs)
    heads = {"eagle": EagleHead.random, "medusa": MedusaHead.random, "draft-lm": lambda lm, _: DraftLayers(lm, (0,))}
    head = {"head": heads[name](lm, 0)} if name in heads else {}
    ours = PacelineRun(lm, RunSpec(name, name, {**head, **options}, gamma=3, nodes=8))
    plain = PacelineRun(lm, plain=True).run(ONE, PLAN, 0, never)
    made.clear()
    runs = [ours.run(ONE, PLAN, repeat, never) for repeat in range(3)]
    assert len(made) == 1
    assert all(run.tokens == plain.tokens and run.traces == runs[0].traces for run in runs)


@pytest.mark.usefixtures("trees_by_torch")
@pytest.mark.parametrize("drafters", [("suffix", ("early-exit", {"layers": 1})), ("early-exit",)])
def test_a_reader_that_was_borrowed_goes_with_its_drafter(
    lm: LanguageModel, drafters: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next drafter brings one too, and then the rounds differ."""
    made: list[Rehearsal] = []
    monkeypatch.setattr(flight, "programs_for", lambda lm: made.append(Rehearsal()) or made[-1])  # type: ignore[func-returns-value]
    ours = PacelineRun(lm, RunSpec("several", "portfolio", {"drafters": drafters}, gamma=3, nodes=8))
    runs = [ours.run(ONE, PLAN, repeat, never) for repeat in range(3)]
    assert len(made) == 3
    plain = PacelineRun(lm, plain=True).run(ONE, PLAN, 0, never)
    assert all(run.tokens == plain.tokens and run.traces == runs[0].traces for run in runs)


def test_plain_decoding_says_of_itself_that_it_is(lm: LanguageModel) -> None:
    plain = PacelineRun(lm, plain=True)
    assert (plain.name, plain.speculates, plain.gamma, plain.drafter, plain.exact) == ("plain", False, 0, "", True)
    run = plain.run(ONE, PLAN, 0, never)
    assert run.passes == 20
    heads, width, layers = 2, 8, 2  # keys and values in float64, for every token but the last and a node beside it
    assert run.cache == 2 * layers * heads * width * 8 * (8 + 20 + 2)


def test_the_clock_is_read_at_every_token_of_the_first_row(lm: LanguageModel) -> None:
    run = PacelineRun(lm, plain=True, clock=ticking()).run(TWO, Plan(3), 0, never)
    assert run.arrivals == (1.0, 2.0, 3.0)
    assert run.first == 1.0
    assert run.seconds == 4.0


def test_sampling_has_a_seed_per_row(lm: LanguageModel) -> None:
    same = Task("1+1", "story", (ONE.prompts[0], ONE.prompts[0]))
    plan = Plan(12, {"temperature": 1.0, "top_k": 20}, seed=3)
    rows = PacelineRun(lm, parse_run_spec("suffix")).run(same, plan, 0, never).tokens
    assert rows[0] != rows[1]
    alone = PacelineRun(lm, plain=True).run(ONE, Plan(12, plan.sampling, seed=4), 0, never)
    assert alone.tokens[0] == rows[1]


def test_what_should_be_the_same_text(lm: LanguageModel) -> None:
    ratio, typical = parse_run_spec("ngram:rule=ratio"), parse_run_spec("ngram:rule=typical")
    assert PacelineRun(lm, ratio).exact
    assert not PacelineRun(lm, ratio, sampled=True).exact
    assert PacelineRun(lm, parse_run_spec("ngram"), sampled=True).exact
    assert not PacelineRun(lm, typical).exact
    assert PacelineRun(lm, typical).lossy


def test_memory_does_not_reach_the_next_run() -> None:
    """`suffix` remembers answers: with one drafter for all runs, the second would know its text beforehand."""
    lm = LanguageModel(scripted(list(range(30))))
    task, plan = Task("1", "x", ((0,),)), Plan(20)
    for text in ("suffix", "portfolio"):
        ours = PacelineRun(lm, parse_run_spec(text))
        rounds = [ours.run(task, plan, repeat, never).passes for repeat in range(3)]
        assert rounds == [20] * 3
    drafter = Suffix()
    kept = PacelineRun(lm, RunSpec("kept", "suffix"))
    kept._next = drafter
    assert kept.run(task, plan, 0, never).passes == 20
    kept._next = drafter
    assert kept.run(task, plan, 1, never).passes < 20  # so this test can fail


def test_nothing_is_loaded_or_quantized_twice(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    made = []
    monkeypatch.setattr(
        self_quantized, "quantized", lambda *given, real=self_quantized.quantized: made.append(1) or real(*given)
    )
    for text in ("self-quantized", '{"name": "portfolio", "drafters": ["self-quantized", "suffix"]}'):
        ours = PacelineRun(lm, parse_run_spec(text))
        for repeat in range(3):
            ours.run(ONE, PLAN, repeat, never)
    assert len(made) == 2
    folder = tmp_path / "draft"
    llama(num_hidden_layers=1).save_pretrained(folder)
    ours = PacelineRun(lm, parse_run_spec(f"{folder}:gamma=3"))
    assert ours.draft_model is not None
    assert ours.draft_model.dtype == lm.dtype
    seen = {id(ours.draft_model.model)}
    for repeat in range(2):
        ours.run(ONE, PLAN, repeat, never)
        seen.add(id(ours._next.lm.model))  # type: ignore[union-attr]
    assert len(seen) == 1


def test_what_does_not_fit_is_refused(lm: LanguageModel) -> None:
    ours = PacelineRun(lm, plain=True)
    assert ours.refuses(ONE, PLAN) is None
    assert ours.refuses(ONE, Plan(lm.context - 8)) is None
    assert (
        ours.refuses(ONE, Plan(lm.context - 7)) == f"8 tokens and {lm.context - 7} new ones do not fit a context of 96"
    )
    with pytest.raises(ModelOutputError, match="instead of 89"):
        ours.run(ONE, Plan(lm.context - 7), 0, never)


def test_a_drafter_that_fails_is_not_measured_as_plain_decoding(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no idea")

    ours = PacelineRun(lm, parse_run_spec("suffix"))
    monkeypatch.setattr(Suffix, "propose", broken)
    with pytest.raises(DrafterError, match="no idea"):
        ours.run(ONE, PLAN, 0, never)


def test_cancelling_leaves_no_half_run(lm: LanguageModel) -> None:
    ours = PacelineRun(lm, parse_run_spec("suffix"))
    looks = iter([False, False] + [True] * 50)
    assert ours.run(TWO, PLAN, 0, lambda: next(looks)).tokens == ((), ())
    assert ours.run(ONE, PLAN, 0, never).emitted == 20


def test_the_model_is_left_as_it_was() -> None:
    model = llama()
    before = fingerprint(model)
    for text in RUNS:
        ours = PacelineRun(LanguageModel(model), parse_run_spec(text))
        ours.run(ONE, Plan(6), 0, never)
        ours.close()
    assert fingerprint(model) == before
    assert model.config.vocab_size == VOCABULARY
