"""How passes run: the names of runners, what they select, and the messages if one cannot run."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from tests.conformance.models import CASES, build
from tests.toys import gpt2, llama

from paceline import InputError, LanguageModel, SpeculativeDecoder, UnsupportedError, guided
from paceline.common.errors import UnknownNameError
from paceline.models import load
from paceline.models import runtime as running
from paceline.models.pass_timing import costs_key, machine_key
from paceline.models.runtime import Running, parts, prepare, quantization_of, quantize_as, with_runner

PROMPT = [1, 2, 3, 4]


@pytest.fixture
def lm() -> LanguageModel:
    return LanguageModel(llama().float(), name="small")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were kernels here, on three threads, and nothing to compile."""
    monkeypatch.setattr(running, "kernels_missing", lambda: None)
    monkeypatch.setattr(running, "threads_here", lambda lm: 3)
    monkeypatch.setattr(running, "_compile", lambda progress: None)


@pytest.fixture
def no_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "numba cannot be imported (No module named 'numba')"
    monkeypatch.setattr(running, "kernels_missing", lambda: why)
    monkeypatch.setattr(running, "_compile", lambda progress: None)


# ---- names


@pytest.mark.parametrize("call", [load, SpeculativeDecoder])
def test_unknown_names(lm: LanguageModel, call: Any) -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown runner 'kernel'\. Did you mean 'kernels'"):
        call(lm, runner="kernel")
    with pytest.raises(UnknownNameError, match=r"'int9'\. Did you mean 'int8'.* Available: .*int4, int8"):
        call(lm, quantize="int9")


def test_a_runner_is_another_view(lm: LanguageModel) -> None:
    other = with_runner(lm, "eager")
    assert (lm.runner, other.runner) == ("auto", "eager")
    assert other.model is lm.model
    assert with_runner(lm, None) is lm
    assert with_runner(lm, "auto") is lm
    assert with_runner(other, None).runner == "eager"  # the runner of the given model stays


def test_both_branches_of_a_target_change(lm: LanguageModel) -> None:
    two = guided(lm, 1.5, [3])
    other = with_runner(two, "eager")
    assert [each.runner for each in parts(other)] == ["eager", "eager"]
    assert [each.runner for each in parts(two)] == ["auto", "auto"]
    assert type(other) is type(two)
    text = SpeculativeDecoder(two, draft=None).generate(PROMPT, max_new_tokens=8).tokens
    assert SpeculativeDecoder(other, draft=None).generate(PROMPT, max_new_tokens=8).tokens == text


# ---- messages


def test_kernels_are_said(lm: LanguageModel, kernels: None) -> None:
    assert running.running(lm) == Running("kernels", threads=3)
    decoder = SpeculativeDecoder(lm, "prompt-lookup", gamma=3)
    assert decoder.describe() == "small (float32, cpu; kernels, 3 threads) with prompt-lookup, γ=3, rule match"
    plain = SpeculativeDecoder(lm, draft=None, runner="eager").describe()
    assert "cpu; transformers; ties can depend on the batch and the draft)" in plain
    assert "cpu; kernels, 3 threads, strict)" in SpeculativeDecoder(lm, draft=None, strict=True).describe()
    by_torch = SpeculativeDecoder(lm, draft=None, runner="eager", strict=True)
    assert "cpu; transformers, strict)" in by_torch.describe()
    experts = SpeculativeDecoder(build(CASES["mixtral"]), draft=None, strict=True).describe()
    assert "strict (MixtralForCausalLM has no kernels); ties can depend on the draft)" in experts


@pytest.mark.parametrize(
    ("model", "why"),
    [(gpt2, "GPT2LMHeadModel has no kernels"), (llama, "kernels are for float32 on a CPU")],
)
def test_why_there_are_none(model: Any, why: str, kernels: None) -> None:
    lm = LanguageModel(model(), name="small")
    assert f"cpu; transformers ({why}); ties" in SpeculativeDecoder(lm, draft=None).describe()
    with pytest.raises(UnsupportedError, match=f"'kernels' was asked for, and small cannot run by it: {why}; use"):
        SpeculativeDecoder(lm, draft=None, runner="kernels")


def test_without_numba(lm: LanguageModel, no_numba: None) -> None:
    assert "transformers (no numba)" in SpeculativeDecoder(lm, draft=None).describe()
    prepare(with_runner(lm, "eager"))
    with pytest.raises(UnsupportedError, match="No module named 'numba'"):
        SpeculativeDecoder(lm, draft=None, runner="kernels")


def test_what_cannot_have_kernels_compiles_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_compile", lambda progress: pytest.fail("compiled"))
    monkeypatch.setattr(running, "kernels_missing", lambda: pytest.fail("asked"))
    prepare(LanguageModel(gpt2()))
    prepare(with_runner(LanguageModel(llama().float()), "eager"))


def test_the_draft_takes_the_targets_runner(lm: LanguageModel, tmp_path: Any, kernels: None) -> None:
    llama(1).float().save_pretrained(tmp_path)
    eager: Any = SpeculativeDecoder(lm, str(tmp_path), runner="eager").drafter
    assert eager.lm.runner == "eager"
    assert SpeculativeDecoder(lm, str(tmp_path)).drafter.lm.runner == "auto"  # type: ignore[attr-defined]
    mine = LanguageModel(llama(1).float())
    given: Any = SpeculativeDecoder(lm, mine, runner="eager").drafter
    assert given.lm is mine  # a model in memory is as its owner wants it


def test_a_draft_that_cannot_have_what_was_demanded(lm: LanguageModel, kernels: None) -> None:
    draft = with_runner(LanguageModel(llama(1), name="double"), "kernels")
    with pytest.raises(UnsupportedError, match="double cannot run by it"):
        SpeculativeDecoder(lm, draft)


# ---- other numbers


def test_a_quantised_target(lm: LanguageModel) -> None:
    decoder = SpeculativeDecoder(lm, "prompt-lookup", quantize="int8")
    assert decoder.target.model is not lm.model
    assert (quantization_of(decoder.target), quantization_of(lm)) == ("int8", None)
    assert "exact with respect to the int8 model)" in decoder.describe()
    plain = SpeculativeDecoder(lm, draft=None, quantize="int8")
    assert plain.target.model is decoder.target.model  # quantised once
    wanted = plain.generate(PROMPT, max_new_tokens=24).tokens
    assert decoder.generate(PROMPT, max_new_tokens=24).tokens == wanted


def test_the_runner_stays_with_the_numbers(lm: LanguageModel) -> None:
    assert quantize_as(with_runner(lm, "eager"), "int8").runner == "eager"
    assert quantize_as(lm, "int8").runner == "auto"
    assert quantize_as(lm, None) is lm


def test_both_branches_are_quantised(lm: LanguageModel) -> None:
    other = quantize_as(guided(lm, 1.5, [3]), "int8")
    assert [quantization_of(each) for each in parts(other)] == ["int8", "int8"]
    assert other.model is parts(other)[0].model
    SpeculativeDecoder(other, draft=None).generate(PROMPT, max_new_tokens=4)


def test_the_model_that_was_given_may_go() -> None:
    """What was quantised is not kept in memory twice."""
    lm = LanguageModel(llama().float())
    made, given = quantize_as(lm, "int8"), weakref.ref(lm.model.lm_head.weight)
    del lm
    gc.collect()
    assert given() is None
    assert made.runner == "auto"


def test_a_quantised_draft(lm: LanguageModel) -> None:
    decoder: Any = SpeculativeDecoder(lm, LanguageModel(llama(1).float(), name="little"), options={"quantize": "int8"})
    assert quantization_of(decoder.drafter.lm) == "int8"
    assert quantization_of(decoder.target) is None
    assert "draft-model little in int8" in decoder.describe()
    assert "exact with respect" not in decoder.describe()
    assert decoder.drafter.reset_copy().lm.model is decoder.drafter.lm.model
    wanted = SpeculativeDecoder(lm, draft=None).generate(PROMPT, max_new_tokens=24).tokens
    assert decoder.generate(PROMPT, max_new_tokens=24).tokens == wanted
    with pytest.raises(InputError, match="Unknown kind of quantization 'int3'"):
        SpeculativeDecoder(lm, lm, options={"quantize": "int3"})


# ---- what costs are kept under


def test_costs_are_of_a_way_to_run(lm: LanguageModel, kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [costs_key(lm), costs_key(with_runner(lm, "eager")), costs_key(quantize_as(lm, "int8"))]
    monkeypatch.setattr(running, "threads_here", lambda lm: 2)
    keys.append(costs_key(lm))
    monkeypatch.setattr("paceline.models.pass_timing.fingerprint", lambda: "other kernels")
    keys.append(costs_key(lm))
    assert len(set(keys)) == len(keys)
    assert costs_key(lm) == costs_key(with_runner(lm, "kernels"))  # asked for otherwise, run alike
    assert machine_key(lm) == machine_key(copy.copy(lm))


def test_threads_of_torch_are_part_of_it(lm: LanguageModel, kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = costs_key(lm)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert costs_key(lm) != before
