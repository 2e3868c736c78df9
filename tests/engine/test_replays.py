"""Captured rounds as a device repeats them: steps on tensors that stay where they are, without any Python between them.

A round is run as it is, then recorded, and from then on the record is played back; whatever of a draft was worked out
before the recording began stays that of the first draft.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.graph_devices import Replays, imitated
from tests.selection import covering
from tests.toys import gpt2, llama

import paceline
from paceline.core.costs import Costs

pytestmark = pytest.mark.usefixtures("trees_by_torch")  # a device that is imitated has no kernels of a CPU

PROMPTS = [[1, 2, 3, 4, 5, 1, 2], [7, 8, 9], [3, 3, 3, 3, 3], [6, 1]]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.9, "seed": 5, "top_k": 10, "top_p": 0.9, "repetition_penalty": 1.3, "min_new_tokens": 6},
]
FREE = Costs({1: {1: 1.0, 64: 1.01}})
DRAFTS: list[tuple[Any, dict[str, Any]]] = [  # all others: conformance/test_identity.py
    ("prompt-lookup", {"branches": 3}),
    ("model", {}),
    ("model", {"tree": "optimal"}),
    ("auto", {"costs": FREE, "drafters": ("model", "suffix", "recycling")}),
]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Replays]:
    return imitated(monkeypatch)


def check_texts(
    family: Any, draft: Any, options: dict[str, Any], settings: dict[str, Any], programs: list[Replays]
) -> None:
    target, small = family(0), family(1)
    lm, little = (paceline.LanguageModel(each) for each in (target, small))
    if "drafters" in options:
        options = {**options, "drafters": tuple(little if each == "model" else each for each in options["drafters"])}
    plain = paceline.SpeculativeDecoder(target, draft=None, runner="eager")
    named = little if draft == "model" else draft
    on_replay = paceline.SpeculativeDecoder(lm, named, options=options)
    settings = {**settings, "max_new_tokens": 16}
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


@pytest.mark.parametrize(("drafter", "settings"), covering(DRAFTS, SETTINGS))
def test_the_same_texts(drafter: tuple[Any, dict[str, Any]], settings: dict[str, Any], programs: list[Replays]) -> None:
    check_texts(llama, *drafter, settings, programs)


@pytest.mark.parametrize(("drafter", "settings"), covering([DRAFTS[0], DRAFTS[-1]], SETTINGS))
def test_another_architecture(
    drafter: tuple[Any, dict[str, Any]], settings: dict[str, Any], programs: list[Replays]
) -> None:
    check_texts(gpt2, *drafter, settings, programs)
