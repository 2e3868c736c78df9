"""The default members of `auto`: the int8 copy of the target too, if kernels run it and memory allows."""

from __future__ import annotations

from typing import Any

import pytest
from tests.kernels.zoo import small
from tests.toys import llama

from paceline import SpeculativeDecoder
from paceline.drafters.models import self_quantized
from paceline.models.cpu.cpu_forward import kernels_missing
from paceline.models.runtime import running

pytestmark = pytest.mark.skipif(kernels_missing() is not None, reason="no kernels here")
PROMPT = [3, 9, 27, 4, 11, 9, 27]


def members(target: Any, **more: Any) -> str:
    described = SpeculativeDecoder(target, "auto", **more).drafter.describe()
    return described.removeprefix("auto (").removesuffix(" or none)")


def test_with_kernels_the_target_drafts_in_int8() -> None:
    assert members(small("llama")) == "grammar, suffix, recycling, prediction, self-quantized"


@pytest.mark.parametrize("more", [{"runner": "eager"}, {"quantize": "int8"}], ids=["by torch", "in int8 already"])
def test_not_where_it_would_not_pay(more: dict[str, Any]) -> None:
    assert members(small("llama"), **more) == "grammar, suffix, recycling, prediction"


def test_not_in_float64() -> None:
    assert members(llama()) == "grammar, suffix, recycling, prediction"


@pytest.mark.parametrize(("left", "takes"), [(None, True), (10**12, True), (10**3, False)])
def test_not_where_memory_is_short(left: int | None, takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_quantized, "memory_left", lambda: left)
    assert ("self-quantized" in members(small("llama"))) is takes


def test_a_named_member_stays_alone() -> None:
    assert members(small("llama"), options={"drafters": ("suffix",)}) == "suffix"


def test_a_reset_copy_shares_the_int8_weights() -> None:
    decoder = SpeculativeDecoder(small("llama"), "auto")
    other = SpeculativeDecoder(decoder.target, decoder.drafter.reset_copy())
    first, second = (one.drafter._members[-1].drafter for one in (decoder, other))  # type: ignore[attr-defined]
    assert first is not second
    assert first.draft_of(decoder.target) is second.draft_of(decoder.target)


def test_it_is_used_and_the_text_is_the_targets() -> None:
    target = small("llama")
    plain = SpeculativeDecoder(target, draft=None).generate(PROMPT, max_new_tokens=64, ignore_eos=True)
    decoder = SpeculativeDecoder(target, "auto")
    auto = decoder.generate(PROMPT, max_new_tokens=64, ignore_eos=True)
    assert auto.tokens == plain.tokens
    assert decoder.drafter.credits()["self-quantized"]["asked"] > 0  # type: ignore[attr-defined]


def test_the_twin_runs_as_its_target_does() -> None:
    for runner in ("kernels", "eager"):
        decoder = SpeculativeDecoder(small("llama"), "self-quantized", runner=runner)
        assert running(decoder.drafter.draft_of(decoder.target)).by == runner  # type: ignore[attr-defined]
