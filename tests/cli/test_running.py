"""`--runner` and `--quantize`: the same words for every command, and and the lines about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.audit import enumeration as toys
from paceline.bench import bench_session as assembly
from paceline.bench.bench_options import BenchOptions
from paceline.common.errors import InputError, UnknownNameError
from paceline.models import runtime as running
from paceline.models.cpu import compile as first_use
from tests.cli.conftest import refusal, run

pytestmark = pytest.mark.usefixtures("looks_up")
TIES = "ties can depend on the batch and the draft"
SHORT = ("--max-new-tokens", "8", "--ignore-eos")


@pytest.mark.parametrize("command", ["generate", "chat", "audit", "tune", "bench"])
def test_names_nobody_knows(command: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before a model is read."""
    monkeypatch.setattr("paceline.models.load", lambda *_, **__: pytest.fail("read"))
    prompt = ["abc"] if command == "generate" else []
    more = ["--force", "--run", "suffix"] if command == "bench" else []
    given = (command, *prompt, "--target", target, *more)
    assert "Unknown runner 'egaer'. Did you mean 'eager'?" in refusal(*given, "--runner", "egaer", code=2)
    assert "Unknown kind of quantization 'int7'" in refusal(*given, "--quantize", "int7", code=2)


def test_the_first_line_says_how_passes_run(target: str) -> None:
    result = run("generate", "abc abc", "--target", target, "--runner", "eager", *SHORT)
    assert result.exit_code == 0, result.output
    first = result.stderr.splitlines()[0]
    assert first.startswith(f"tiny (float32 from a folder, cpu; transformers; {TIES}) with prompt-lookup")


def test_a_runner_that_cannot_be_had(target: str) -> None:
    told = refusal("generate", "abc", "--target", target, "--runner", "kernels", "--dtype", "float64", *SHORT, code=3)
    assert "tiny cannot run by it: kernels are for float32 on a CPU; use runner 'auto'" in told


def test_why_there_are_no_kernels(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "kernels_missing", lambda: "numba cannot be imported (No module named 'numba')")
    monkeypatch.setattr(running, "_compile", lambda progress: None)
    result = run("generate", "abc abc", "--target", target, *SHORT)
    assert f"cpu; transformers (no numba); {TIES})" in result.stderr.splitlines()[0]


def test_a_line_while_kernels_are_compiled(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ready(progress: Any) -> None:
        for done in range(3):
            progress and progress(first_use.LABEL, done, 2)

    monkeypatch.setattr(first_use, "kernels_ready", ready)
    monkeypatch.setattr("paceline.kernels.cpu.machine.missing", lambda: None)
    result = run("generate", "abc abc", "--target", target, *SHORT)
    assert result.exit_code == 0, result.output
    told = [line for line in result.stderr.splitlines() if line.startswith("compiling kernels")]
    assert told == ["compiling kernels for this machine, once …"]


def test_a_quantised_target_and_a_quantised_draft(target: str, draft: str) -> None:
    both = ("--target", target, "--draft", draft, "--runner", "eager", *SHORT)
    result = run("generate", "abc abc", *both, "--quantize", "int8", "--drafter.quantize", "int8")
    assert result.exit_code == 0, result.output
    first = result.stderr.splitlines()[0]
    assert f"tiny in int8 (float32 from a folder, cpu; transformers in int8; {TIES}; exact with respect" in first
    assert "draft-model tinier in int8" in first
    only = run("generate", "abc abc", *both, "--drafter.quantize", "int8").stderr.splitlines()[0]
    assert only.startswith(f"tiny (float32 from a folder, cpu; transformers; {TIES}) with draft-model tinier")


def test_an_audit_says_what_it_is_exact_to(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toys, "CHAINS", ([-1],))
    monkeypatch.setattr(toys, "TREES", ([-1, -1],))
    quick = ("--tokens", "4", "--samples", "0", "--limit", "1", "--runner", "eager", "--json")
    result = run("audit", "--target", target, "--quantize", "int8", *quick)
    assert result.exit_code == 0, result.output
    assert "exact with respect to the int8 model" in result.stderr
    assert json.loads(result.stdout)["subject"]["target"] == "tiny in int8"


def test_a_config_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tuned.toml"
    file.write_text('[decoder]\nrunner = "eager"\nquantize = "int8"\n')
    for command in ("generate", "chat", "audit", "tune", "bench"):
        told = run(command, "--config", str(file), "--print-config").stdout
        assert 'runner = "eager"  # config' in told
        assert 'quantize = "int8"  # config' in told
    monkeypatch.setenv("PACELINE_RUNNER", "kernels")
    assert 'runner = "kernels"  # environment' in run("generate", "--config", str(file), "--print-config").stdout


# ---- the benchmark


def test_a_benchmark_of_a_quantised_target(target: str, draft: str) -> None:
    options = BenchOptions(
        target=target, runs=(f"{draft}:quantize=int8,label=pair",), quantize="int8", runner="eager", limit=1,
        categories=("chat",), max_new_tokens=4, chat=False,
    )  # fmt: skip
    setup = assembly.assemble(options)
    assert setup.lm.name == "tiny in int8"
    pair = setup.own_runs[1]
    assert pair.draft_model is not None
    assert (pair.draft_model.name, pair.draft_model.runner) == ("tinier in int8", "eager")
    assert pair.decoder().target is setup.lm


def test_what_a_benchmark_refuses() -> None:
    with pytest.raises(UnknownNameError, match="Unknown runner"):
        assembly.assemble(BenchOptions(runner="fast"))
    with pytest.raises(InputError, match="this one is synthetic"):
        assembly.assemble(BenchOptions(shape="llama-7b", quantize="int8"))
