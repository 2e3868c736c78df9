"""Steps of an eagle head as one job: what its modules say, bit for bit, where it is promised and nowhere else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.drafters import fitting
from tests.toys import llama
from torch import Tensor

from paceline import LanguageModel, SpeculativeDecoder
from paceline.core.verdict import NOTHING, Verdict
from paceline.drafters.heads.base import PlaceStore, _followed
from paceline.drafters.heads.eagle import Eagle, EagleHead, Steps
from paceline.kernels.cpu import machine
from paceline.models.cpu import cpu_head as kernel_draft
from paceline.models.cpu import cpu_linear as kernel_linear
from paceline.models.cpu.cpu_head import CpuHead
from paceline.models.cpu.cpu_linear import drafting
from paceline.models.cpu.threads import THREADS

pytestmark = pytest.mark.skipif(machine.missing() is not None, reason="no kernels here")
KINDS: dict[str, dict[str, Any]] = {
    "all words": {},
    "few words": {"draft_vocabulary": 29},
    "borrowed words": {"draft_vocabulary": 33, "own_output": False},
    "normed": {"norm_before_residual": True, "kv_heads": 2, "heads": 4},
    "biased": {"fuse_bias": True, "own_embedding": True, "rope_scaling": (8.0, 1.0, 4.0, 64.0)},
}


@pytest.fixture(autouse=True)
def all_threads() -> Iterator[None]:
    with THREADS.governor.ignored(), torch.inference_mode():
        yield


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(kernel_linear, "_ALONE", 0)
    monkeypatch.setattr(kernel_linear, "_cores", lambda: request.param)
    monkeypatch.setattr(kernel_linear.openmp, "usual_threads", lambda: request.param)
    return int(request.param)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels of the jobs that were run."""
    seen: list[Any] = []
    run = kernel_draft.run_kernel
    monkeypatch.setattr(
        kernel_draft, "run_kernel", lambda threads, kernel, *rest: (seen.append(kernel), run(threads, kernel, *rest))
    )
    return seen


def target() -> LanguageModel:
    return LanguageModel(llama(0).float())


def head_of(lm: LanguageModel, **changes: Any) -> EagleHead:
    sizes = replace(EagleHead.sizes(lm), head_width=8, **changes)
    with torch.inference_mode(False):
        head = EagleHead.random(lm, 3, sizes)
        if head.d2t is not None:
            head.d2t += 5
        head.borrow(lm)
        for parameter in head.parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter)
    return head


class Both:
    """One head, by its modules and by kernels, over the same ragged texts."""

    LENGTHS = (9, 1, 6)

    def __init__(self, lm: LanguageModel, head: EagleHead, vocabulary: int = 40) -> None:
        light, embedding = drafting(head), head.words or lm.model.get_input_embeddings()
        self.kernels = CpuHead.of(light, embedding, vocabulary)
        self.rows: Any = SimpleNamespace(count=3, capacity=4, bound=None, room=24)
        self.rows.text = torch.randint(0, 60, (3, 24), generator=torch.Generator().manual_seed(1))  # some are unknown
        self.commit(self.LENGTHS)
        self.places = [PlaceStore(head.remembers, torch.float32, torch.device("cpu")) for _ in range(2)]
        states = torch.randn(3, 20, head.remembers, generator=torch.Generator().manual_seed(2))
        for places in self.places:
            places.write(slice(0, 3), torch.arange(20).expand(3, 20), states, 20)

        def embed(tokens: Tensor) -> Tensor:
            return embedding(tokens.clamp(0, 39))  # type: ignore[no-any-return]

        self.steps = [Steps(light, embed, embed, self.places[i], (None, self.kernels)[i]) for i in range(2)]
        for steps in self.steps:
            steps.cache.reserve(4, 8)  # less than the drafts need
            steps.read(self.rows, slice(0, 3), torch.arange(8).expand(3, 8), 8)

    def commit(self, lengths: tuple[int, ...]) -> None:
        self.rows.lengths, self.rows.length = list(lengths), torch.tensor(lengths).view(3, 1)

    def memories(self) -> list[Tensor]:
        """What both remember of the texts and the drafts."""
        return [
            torch.stack([steps.cache.keys[0][:3, :, :12], steps.cache.values[0][:3, :, :12]]) for steps in self.steps
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_says_what_the_modules_say(kind: str, threads: int, jobs: list[Any]) -> None:
    lm = target()
    both = Both(lm, head_of(lm, **KINDS[kind]))
    assert both.kernels is not None
    for width in (1, 4):
        modules, kernels = (steps.draft(both.rows, width) for steps in both.steps)
        message, got = modules(None, None), kernels(None, None)
        assert torch.equal(message, got)
        for _ in range(4):
            token = message.argmax(-1)
            message, got = modules(token, None), kernels(token, None)
            assert torch.equal(message, got)
        assert torch.equal(*both.memories())
    assert len(jobs) == 2 * 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 4])
def test_a_chain_is_the_likeliest_step_by_step(kind: str, width: int, threads: int, jobs: list[Any]) -> None:
    lm = target()
    both = Both(lm, head_of(lm, **KINDS[kind]))
    for lengths in (both.LENGTHS, (11, 2, 6)):
        both.commit(lengths)
        modules = both.steps[0].draft(both.rows, width)
        wanted = [modules(None, None).argmax(-1)]
        while len(wanted) < 5:
            wanted.append(modules(wanted[-1], None).argmax(-1))
        got = both.steps[1].chain(both.rows, width, 5)
        assert got is not None
        assert got.tolist() == torch.cat(wanted, 1).tolist()
        assert torch.equal(*both.memories())
    assert len(jobs) == 2


def test_branches_are_left_to_the_modules(threads: int, jobs: list[Any]) -> None:
    """They go on from what the kernels remember."""
    lm = target()
    both = Both(lm, head_of(lm))
    modules, kernels = (steps.draft(both.rows, 2) for steps in both.steps)
    parents = torch.tensor([[-1, -1], [0, 1], [2, 2]])
    assert torch.equal(modules(None, None), kernels(None, None))
    for level in parents:
        ask = (torch.tensor([[3, 7]] * 3), level.expand(3, 2))
        assert torch.equal(modules(*ask), kernels(*ask))
    assert len(jobs) == 1


def test_of_equals_the_first_is_picked_and_what_is_no_number_before_all() -> None:
    lm = target()
    head = head_of(lm, draft_vocabulary=30)
    head.output.weight.data[:] = head.output.weight.data[:1]
    both = Both(lm, head)
    assert both.steps[1].chain(both.rows, 1, 2).tolist() == [[5, 5]] * 3  # type: ignore[union-attr]
    head.norm.weight.data[0] = float("nan")
    both = Both(lm, head)
    message = both.steps[0].draft(both.rows, 1)(None, None)
    assert bool(message.isnan().any())
    assert both.steps[1].chain(both.rows, 1, 1).tolist() == message.argmax(-1).tolist()  # type: ignore[union-attr]


def test_chains_of_words_that_are_of_no_use_go_step_by_step() -> None:
    """And those of words in another order, where the first of equals is another; and endless or empty ones."""
    lm = target()
    head = head_of(lm, draft_vocabulary=30)
    assert Both(lm, head, vocabulary=35).steps[1].chain(Both(lm, head).rows, 1, 2) is not None
    assert Both(lm, head, vocabulary=34).steps[1].chain(Both(lm, head).rows, 1, 2) is None
    both = Both(lm, head)
    assert both.steps[1].chain(both.rows, 1, 65) is None
    assert both.steps[1].chain(both.rows, 1, 0) is None
    assert both.steps[1].chain(both.rows, 65, 2) is None
    assert head.d2t is not None
    head.d2t[:2] = head.d2t[:2].flip(0)
    assert Both(lm, head).steps[1].chain(both.rows, 1, 2) is None


@pytest.mark.parametrize("kind", ["all words", "biased"])
@pytest.mark.parametrize("path", [None, [[0, 1, 3], [2, 2, 2], [1, 0, 0]], [[], [], []]])
def test_what_the_target_thought_is_noted(kind: str, path: list[list[int]] | None, threads: int) -> None:
    lm = target()
    head = head_of(lm, **KINDS[kind])
    both = Both(lm, head)
    drafter = Eagle(Eagle.Options(head=head))
    drafter.light, drafter.places, drafter._steps = drafting(head), both.places[0], both.steps[0]
    wide = torch.randn(3, 3, 7, 32, generator=torch.Generator().manual_seed(4))
    wide[0, 1, 2, 5], wide[1, 1, 0, 0] = float("nan"), float("inf")
    taps = tuple(wide[i, :, 2:] for i in range(3))  # not in one piece
    way = None if path is None else torch.tensor(path, dtype=torch.int64).view(3, -1)
    drafter.note(both.rows, taps, way)
    assert both.steps[1].note(both.rows, taps, way)
    assert torch.equal(*(places.states(3, 1) for places in both.places))
    assert bool(both.places[1].states(3, 1).isfinite().all())


def test_a_path_that_leads_out_of_its_tree_is_refused() -> None:
    lm = target()
    both = Both(lm, head_of(lm))
    taps = tuple(torch.zeros(3, 5, 32) for _ in range(3))
    for wrong in (-1, 4):
        with pytest.raises(IndexError, match="of a tree of 4"):
            both.steps[1].note(both.rows, taps, torch.full((3, 2), wrong))


def test_copies_have_no_addresses_of_somebody_else() -> None:
    lm = target()
    steps = Both(lm, head_of(lm)).steps[1]
    assert steps._kernels is not None
    assert copy.deepcopy(steps)._kernels is None


def test_no_more_is_noted_than_is_gone_on_with() -> None:
    taps = (torch.zeros(2, 5, 3), torch.zeros(2, 5, 3))
    emitted = torch.tensor([[4, 7, NOTHING, NOTHING], [4, NOTHING, NOTHING, NOTHING]])
    kept, path = _followed(taps, Verdict(emitted, torch.tensor([[0], [0]])))  # others may have drafted the 4
    assert [tap.shape[1] for tap in kept] == [2, 2]
    assert path is None
    kept, path = _followed(taps, Verdict(emitted, torch.tensor([[1], [0]]), torch.tensor([[3, 0, 0], [0, 0, 0]])))
    assert [tap.shape[1] for tap in kept] == [5, 5]
    assert path is not None
    assert path.tolist() == [[3], [0]]


# ---- where it is used


def generated(lm: LanguageModel, head: EagleHead, rows: int = 16, new: int = 24, **settings: Any) -> list[Any]:
    options = {"head": head} | {name: settings.pop(name) for name in ("tree",) if name in settings}
    decoder = SpeculativeDecoder(lm, "eagle", gamma=4, rows=rows, rule="match", options=options)
    with torch.inference_mode(False):
        return list(decoder.generate(fitting.PROMPTS, max_new_tokens=new, ignore_eos=True, **settings))


@cache
def fitted() -> EagleHead:
    with torch.inference_mode(False):
        return fitting.eagle()


def calls(jobs: list[Any]) -> tuple[int, int]:
    draft, note = map(kernel_draft.head_kernel, ("run_draft", "run_note"))
    return jobs.count(draft), jobs.count(note)


def test_a_greedy_chain_is_one_job_and_a_drawn_one_a_job_a_step(jobs: list[Any]) -> None:
    lm = target()
    for settings in ({}, {"temperature": 0.9, "seed": 3}):
        jobs.clear()
        outs = generated(lm, head_of(lm), 1, **settings)
        drafted = [len(record.drafted) for out in outs for record in out.trace.rounds]
        assert max(drafted) == 4
        steps = sum(drafted) if settings else sum(1 for count in drafted if count)
        assert calls(jobs) == (steps, len(drafted))


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.9, "seed": 3}, {"tree": "best-first"}, {"repetition_penalty": 1.3}, {"new": 80}]
)
@pytest.mark.parametrize("rows", [1, 4])
def test_rounds_are_those_of_the_modules(settings: Any, rows: int, jobs: list[Any], monkeypatch: Any) -> None:
    """Latecomers, ragged ends, memories that grow: drafted and accepted are the same tokens."""
    lm = target()
    head = copy.deepcopy(fitted()).float()
    got = generated(lm, head, rows, **settings)
    assert jobs
    jobs.clear()
    monkeypatch.setattr(CpuHead, "of", lambda *_: None)
    wanted = generated(lm, head, rows, **settings)
    assert not jobs
    assert [out.trace.rounds for out in got] == [out.trace.rounds for out in wanted]
    assert [out.tokens for out in got] == [out.tokens for out in wanted]


def _hook(head: Any, lm: Any) -> None:
    head.norm.register_forward_hook(lambda *_: None)


def _hook_below(head: Any, lm: Any) -> None:
    lm.model.get_input_embeddings().register_forward_hook(lambda *_: None)


def _eager(head: Any, lm: Any) -> None:
    lm.runner = "eager"


def _double(head: Any, lm: Any) -> None:
    lm.model.double()


def _clipped(head: Any, lm: Any) -> None:
    lm.model.get_input_embeddings().max_norm = 1.0


@pytest.mark.filterwarnings("ignore:Passes run through transformers")  # the target's own passes, too
@pytest.mark.parametrize("change", [_hook, _hook_below, _eager, _double, _clipped])
def test_others_go_by_their_modules(change: Callable[[Any, Any], None], jobs: list[Any]) -> None:
    lm = target()
    head = head_of(lm)
    generated(lm, head)
    assert jobs
    jobs.clear()
    change(head, lm)
    generated(lm, head)
    assert not jobs
