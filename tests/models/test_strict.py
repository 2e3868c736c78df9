"""`strict`: every pass after the prompt has one shape, so that a token's bits do not depend on a draft."""

from __future__ import annotations

from typing import Any

import pytest
from tests.toys import gpt2, llama

import paceline
from paceline.common.errors import UnsupportedError
from paceline.models.cpu.cpu_forward import kernels_missing
from paceline.models.reader import TransformersExecutor
from paceline.models.readers.strict import WIDTH

PROMPTS = [[1, 2, 3, 4, 5, 1, 2], [7, 8, 9], [6]]


@pytest.mark.parametrize("family", [llama, gpt2])
@pytest.mark.parametrize("gamma", [3, 11])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "sampled"])
def test_same_texts_in_passes_of_one_shape(
    family: Any, gamma: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: set[tuple[int, ...]] = set()
    run = TransformersExecutor.__call__

    def seen(self: TransformersExecutor, cache: Any, plan: Any, *given: Any) -> Any:
        if self._lm.strict and plan.keep != 1:
            shapes.add((*plan.ids.shape[1:], *plan.visibility[0].shape[2:]))
        return run(self, cache, plan, *given)

    monkeypatch.setattr(TransformersExecutor, "__call__", seen)
    plain = paceline.SpeculativeDecoder(family(0), draft=None)
    wanted = [out.tokens for out in plain.generate(PROMPTS, max_new_tokens=30, **settings)]
    for draft in (None, "prompt-lookup", paceline.LanguageModel(family(1))):
        strict = paceline.SpeculativeDecoder(family(0), draft, gamma=gamma, strict=True)
        assert [out.tokens for out in strict.generate(PROMPTS, max_new_tokens=30, **settings)] == wanted
    assert len(shapes) == 1
    assert next(iter(shapes))[:2] == (WIDTH, WIDTH)


def test_trees_and_readers_of_their_own_are_refused() -> None:
    tree = paceline.SpeculativeDecoder(llama(0), llama(1), options={"tree": "levels"}, strict=True)
    with pytest.raises(UnsupportedError, match="written from chains"):
        tree.generate([1, 2, 3], max_new_tokens=8)
    exits = paceline.SpeculativeDecoder(llama(0), "early-exit", options={"layers": 1}, strict=True)
    with pytest.raises(UnsupportedError, match="would not be strict"):
        exits.generate([1, 2, 3], max_new_tokens=8)


@pytest.mark.skipif(kernels_missing() is not None, reason=f"no kernels here: {kernels_missing()}")
def test_kernels_are_strict_anyhow() -> None:
    target = llama(0).float()
    wanted = paceline.SpeculativeDecoder(target, draft=None).generate([1, 2, 3], max_new_tokens=20).tokens
    strict = paceline.SpeculativeDecoder(target, llama(1).float(), options={"tree": "levels"}, strict=True)
    assert "kernels," in paceline.SpeculativeDecoder(target, draft=None).describe()
    assert strict.generate([1, 2, 3], max_new_tokens=20).tokens == wanted
