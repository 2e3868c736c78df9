"""Where kernels cannot run, or cannot be compiled, passes run through transformers and the text is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.kernels.zoo import build

from paceline import LanguageModel, SpeculativeDecoder
from paceline.common.errors import PacelineWarning
from paceline.kernels.cpu import machine
from paceline.models.cpu import compile as first_use
from paceline.models.cpu import cpu_forward as kernel_pass

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [3, 9, 27, 4, 11, 9, 27]


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Whether there are kernels is asked once in a process."""
    kernel_pass.kernels_missing.cache_clear()
    kernel_pass.tell_why.cache_clear()
    yield
    kernel_pass.kernels_missing.cache_clear()
    kernel_pass.tell_why.cache_clear()


def text(runner: str = "auto") -> list[int]:
    lm = LanguageModel(build("llama"))
    lm.runner = runner
    return list(SpeculativeDecoder(lm, "prompt-lookup").generate(PROMPT, max_new_tokens=24, ignore_eos=True).tokens)


def without_kernels() -> bool:
    return LanguageModel(build("llama")).reader().kernels is None


# ---- what a machine may lack


def numba_with(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    numba = pytest.importorskip("numba")
    for name, value in settings.items():
        monkeypatch.setattr(numba.config, name, value)


def processor(monkeypatch: pytest.MonkeyPatch, name: str, features: dict[str, bool]) -> None:
    binding = pytest.importorskip("llvmlite.binding")
    monkeypatch.setattr(machine.platform, "machine", lambda: name)
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: features)
    numba_with(monkeypatch, CPU_FEATURES=None, ENABLE_AVX=1, DISABLE_JIT=0)


@pytest.mark.parametrize("word", ["off", "OFF", "0", "no", " false "])
def test_people_may_want_out(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_KERNELS", word)
    assert machine.missing() == "PACELINE_KERNELS is off"
    assert without_kernels()
    assert text() == text("eager")


@pytest.mark.parametrize(("features", "lacking"), [
    ({"avx2": True, "fma": False}, "fma"),
    ({"avx2": False, "fma": True}, "avx2"),
    ({"sse4.2": True}, "avx2 and fma"),
    ({}, "avx2 and fma"),
])  # fmt: skip
def test_an_old_processor(features: dict[str, bool], lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processor(monkeypatch, "x86_64", features)
    assert str(machine.missing()).endswith(f"this processor lacks {lacking}")
    assert without_kernels()
    assert text() == text("eager")


@pytest.mark.parametrize("name", ["x86_64", "AMD64"])
def test_a_new_processor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processor(monkeypatch, name, {"avx2": True, "fma": True, "avx512f": False})
    assert machine.missing() is None


@pytest.mark.parametrize("name", ["arm64", "aarch64"])
def test_an_arm_needs_nothing_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processor(monkeypatch, name, {})
    assert machine.missing() is None


def test_another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    processor(monkeypatch, "riscv64", {"fma": True})
    assert "riscv64" in str(machine.missing())


def test_numbers_the_other_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.sys, "byteorder", "big")
    assert "little-endian" in str(machine.missing())


def test_a_small_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.sys, "maxsize", 2**31 - 1)
    assert "64-bit" in str(machine.missing())


@pytest.mark.parametrize("settings", [
    {"DISABLE_JIT": 1},
    {"ENABLE_AVX": 0, "CPU_FEATURES": None},
    {"CPU_FEATURES": "+sse2,-avx2"},
    {"CPU_FEATURES": ""},
])  # fmt: skip
def test_numba_told_to_do_without(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    processor(monkeypatch, "x86_64", {"avx2": True, "fma": True})
    numba_with(monkeypatch, **settings)
    assert machine.missing() is not None
    assert without_kernels()


def test_a_system_that_llvm_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    processor(monkeypatch, "x86_64", {})

    def unknown() -> Any:
        raise RuntimeError("not implemented for this platform")

    monkeypatch.setattr(pytest.importorskip("llvmlite.binding"), "get_host_cpu_features", unknown)
    assert "lacks avx2 and fma" in str(machine.missing())


# ---- kernels that cannot be compiled


@pytest.mark.skipif(machine.missing() is not None, reason="no kernels here")
@pytest.mark.parametrize(
    "error", [SyntaxError("x"), TypeError("No\nmatching   definition"), OSError(28, "No space left")]
)
def test_kernels_that_do_not_compile_are_told_of_once(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise error

    monkeypatch.setattr(first_use, "kernels_ready", failing)
    with pytest.warns(PacelineWarning) as seen:
        written = text()
    assert len(seen) == 1
    output = str(seen[0].message)
    assert "\n" not in output
    assert type(error).__name__ in output
    assert written == text("eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert text() == written


@pytest.mark.skipif(machine.missing() is not None, reason="no kernels here")
def test_a_format_that_does_not_compile_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are compiled when a model needs them, after the pass itself was."""
    from paceline.kernels.cpu import product

    def failing(kind: str) -> None:
        raise ValueError(f"no product for {kind}")

    monkeypatch.setattr(product, "compiled", failing)
    with pytest.warns(PacelineWarning, match="no product for float32") as seen:
        written = [text(), text()]
    assert len(seen) == 1
    assert written == [text("eager")] * 2


def test_nothing_is_compiled_for_a_model_that_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: Any) -> None:
        raise AssertionError("no model needs them")

    monkeypatch.setattr(first_use, "kernels_ready", asked)
    assert LanguageModel(build("llama").double()).reader().kernels is None


def test_an_interrupt_while_they_compile_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    if machine.missing() is not None:
        pytest.skip("no kernels here")

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(first_use, "kernels_ready", stopped)
    with pytest.raises(KeyboardInterrupt):
        kernel_pass.kernels_missing()
    monkeypatch.undo()
    assert kernel_pass.kernels_missing() is None


# ---- machines without numba, in processes of their own

# One process imports what is slow to import and forks for each case: what is hidden, and more that it runs first.
_WITHOUT = """
import json, os, sys, warnings
import torch, transformers.models.llama.modeling_llama, pytest
assert not {"numba", "llvmlite", "paceline"} & set(sys.modules)
for hidden, more in json.loads(sys.argv[1]):
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"without {hidden}: exit status {os.waitstatus_to_exitcode(status)}")
        continue
    warnings.simplefilter("error")
    for name in hidden:
        sys.modules[name] = None  # an import of it fails
    exec(more)
    from tests.kernels.test_machine import text
    from paceline.models.cpu import cpu_forward as kernel_pass
    missing = kernel_pass.kernels_missing()
    print(json.dumps([text(), str(missing)]), flush=True)
    sys.exit()
"""
# Its import fails in the middle, after numba's: one warning, and the text is the same.
_BROKEN = """
import importlib.abc, importlib.machinery
class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "paceline.kernels.cpu.attention":
            raise ValueError("this file is broken")
sys.meta_path.insert(0, Broken())
from paceline.common.errors import PacelineWarning
warnings.simplefilter("ignore", PacelineWarning)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_without_numba_and_with_a_broken_kernel_file() -> None:
    cases = [(hidden, "") for hidden in (("numba", "llvmlite"), ("llvmlite",), ("numba",))]
    cases += [((), _BROKEN)] if machine.missing() is None else []
    command = [sys.executable, "-c", _WITHOUT, json.dumps(cases)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert [tokens for tokens, _ in found] == [text("eager")] * len(cases)
    for (hidden, _), (_, output) in zip(cases, found, strict=True):
        if hidden:
            assert "No module named" in output or "import of" in output
        else:
            assert "ValueError: this file is broken" in output
