"""Captured rounds as a device repeats them: steps on tensors that stay where they are, without any Python between them.

A round is run as it is, then recorded, and from then on the record is played back; whatever of a draft was worked out
before the recording began is that of the first draft ever after.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import pytest
from tests.toys import gpt2, llama
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import paceline
from paceline.core import law
from paceline.core import tree_shape as ranking
from paceline.core.costs import Costs
from paceline.drafters.heads.eagle import EagleHead
from paceline.drafters.heads.medusa import MedusaHead
from paceline.drafters.heads.prophet import ProphetHead
from paceline.engine import round_graphs as flight
from paceline.models.runners.cuda_graph import Rehearsal

pytestmark = pytest.mark.usefixtures("trees_by_torch")  # a device that is imitated has no kernels of a CPU

T = TypeVar("T")
PROMPTS = [[1, 2, 3, 4, 5, 1, 2], [7, 8, 9], [3, 3, 3, 3, 3], [6, 1]]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.9, "seed": 5, "top_k": 10, "top_p": 0.9, "repetition_penalty": 1.3, "min_new_tokens": 6},
]
FREE = Costs({1: {1: 1.0, 64: 1.01}})
DRAFTS: list[tuple[Any, dict[str, Any]]] = [
    (None, {}),
    ("prompt-lookup", {}),
    ("prompt-lookup", {"branches": 3}),
    ("recycling", {}),
    ("model", {}),
    ("model", {"tree": "levels"}),
    ("model", {"tree": "best-first", "branch": 3}),
    ("model", {"tree": "optimal"}),
    ("medusa", {}),
    ("eagle", {"tree": "levels"}),
    ("prophet", {}),
    ("auto", {"costs": FREE}),
    ("auto", {"costs": FREE, "drafters": ("model", "suffix", "recycling")}),
]
HEADS: dict[Any, Any] = {"medusa": MedusaHead, "eagle": EagleHead, "prophet": ProphetHead}


def memory(tensor: Tensor) -> Any:
    return tensor.untyped_storage()


class Tape(TorchDispatchMode):
    """Notes every step and its tensors. Recording is no round: what was there before is as it was, afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, Any, Any, list[Any]]] = []
        self._made: set[int] = set()  # memory of the record's own, which it holds
        self._before: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in ("_local_scalar_dense", "nonzero", "masked_select")), func
        kwargs, schema = kwargs or {}, func._schema.arguments
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema):
            for where in map(memory, given):
                if where.data_ptr() not in self._made | self._before.keys():
                    self._before[where.data_ptr()] = (where, where.clone())
        known = {memory(each).data_ptr() for each in given}
        result = func(*args, **kwargs)
        leaves = tree_leaves(result)
        self._made |= {memory(each).data_ptr() for each in leaves if isinstance(each, Tensor)} - known
        self._steps.append((func, args, kwargs, leaves))
        return result

    def rewind(self) -> None:
        for where, content in self._before.values():
            where.copy_(content)
        self._before.clear()

    def play(self) -> None:
        for func, args, kwargs, leaves in self._steps:
            for old, new in zip(leaves, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and memory(old).data_ptr() != memory(new).data_ptr():
                    old.copy_(new)


class Replays(Rehearsal):
    """Programs as those of a CUDA device: see `models.runners.cuda_graph`."""

    def __init__(self) -> None:
        self.made: dict[Hashable, tuple[Tape, Any]] = {}
        self.played = 0

    def run(self, key: Hashable, program: Callable[[], T]) -> T:
        if key not in self.made:
            result = program()
            with Tape() as tape:
                again = program()
            tape.rewind()
            self.made[key] = (tape, again)
            return result
        tape, known = self.made[key]
        self.played += 1
        tape.play()
        return known  # type: ignore[no-any-return]

    def forget(self) -> None:
        self.made.clear()


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Replays]:
    return imitated(monkeypatch)


def imitated(monkeypatch: pytest.MonkeyPatch) -> list[Replays]:
    """A device that captures, for whatever is decoded next."""
    made: list[Replays] = []

    def make(lm: Any) -> Replays | None:
        if lm.runner == "eager":
            return None
        made.append(Replays())
        return made[-1]

    monkeypatch.setattr(flight, "programs_for", make)
    for module in (law, ranking):  # a device is not looked at
        monkeypatch.setattr(module, "on_host", lambda scores: False)
    return made


def check_texts(
    family: Any, draft: Any, options: dict[str, Any], settings: dict[str, Any], programs: list[Replays]
) -> None:
    target, small = family(0), family(1)
    lm, little = (paceline.LanguageModel(each) for each in (target, small))
    if draft in HEADS:
        options = {**options, "head": HEADS[draft].random(lm)}
    if "drafters" in options:
        options = {**options, "drafters": tuple(little if each == "model" else each for each in options["drafters"])}
    plain = paceline.SpeculativeDecoder(target, draft=None, runner="eager")
    named = little if draft == "model" else draft
    on_replay = paceline.SpeculativeDecoder(lm, named, options=options)
    settings = {**settings, "max_new_tokens": 24}
    wanted = [plain.generate(prompt, **settings).tokens for prompt in PROMPTS]
    for _ in range(2):
        assert [on_replay.generate(prompt, **settings).tokens for prompt in PROMPTS] == wanted, "one row"
        assert [out.tokens for out in on_replay.generate(PROMPTS, **settings)] == wanted, "ragged batch"
    assert sum(each.played for each in programs) > 10
    if draft == "prompt-lookup" or (draft == "model" and not options):  # others learn from text to text, or look ahead
        eager = paceline.SpeculativeDecoder(target, named, options=options, runner="eager")
        for prompts in ([PROMPTS[0]], [PROMPTS[1]], PROMPTS):
            rounds = [len(out.trace.rounds) for out in on_replay.generate(prompts, **settings)]
            assert rounds == [len(out.trace.rounds) for out in eager.generate(prompts, **settings)]


@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize(("draft", "options"), DRAFTS, ids=str)
def test_the_same_texts(draft: Any, options: dict[str, Any], settings: dict[str, Any], programs: list[Replays]) -> None:
    check_texts(llama, draft, options, settings, programs)


@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize(
    ("draft", "options"), [each for each in DRAFTS if each[0] in ("prompt-lookup", "auto")], ids=str
)
def test_another_architecture(
    draft: Any, options: dict[str, Any], settings: dict[str, Any], programs: list[Replays]
) -> None:
    check_texts(gpt2, draft, options, settings, programs)
