"""Names are refused before anything heavy is imported, and a shell completes them."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tools.name_index import build, written

from paceline.common import names
from paceline.common.errors import LoadError, UnknownNameError
from paceline.core.contracts import DRAFTERS

HEAVY = ("torch", "transformers", "numba", "numpy", "huggingface_hub", "tokenizers", "safetensors")
WRONG = [
    (["generate", "x", "--draft", "eagel"], "Unknown drafter or model 'eagel'. Did you mean 'eagle'?"),
    (["generate", "x", "--draft", '{"name": "sufix"}'], "Unknown drafter or model 'sufix'. Did you mean 'suffix'?"),
    (["generate", "x", "--draft", "./no-such-folder"], "There is no file or folder './no-such-folder'."),
    (["generate", "x", "--rule", "mach"], "Unknown rule 'mach'. Did you mean 'match'?"),
    (["generate", "x", "--target", "smolm2"], "Unknown model 'smolm2'. Did you mean 'smollm2-135m'?"),
    (["generate", "x", "--target", "no-such.gguf"], "There is no file 'no-such.gguf'."),
    (["generate", "x", "--amateur", "smolm2"], "Unknown model 'smolm2'."),
    (["generate", "x", "--runner", "kernel"], "Unknown runner 'kernel'. Did you mean 'kernels'?"),
    (["generate", "x", "--dtype", "bfloat61"], "Unknown dtype 'bfloat61'"),
    (["generate", "x", "--quantize", "int9"], "Unknown kind of quantization 'int9'."),
    (["generate", "x", "--draft", "suffix", "--drafter.branchs", "2"], "Unknown option of drafter 'suffix' 'branchs'."),
    (
        ["generate", "x", "--draft", "some/model", "--drafter.tre", "2"],
        "Unknown option of drafter 'draft-model' 'tre'.",
    ),
    (["generate", "x", "--rule", "typical", "--rule.epsilom", "2"], "Unknown option of rule 'typical' 'epsilom'."),
    (["chat", "--draft", "eagel"], "Did you mean 'eagle'?"),
    (["audit", "--draft", "eagel"], "Did you mean 'eagle'?"),
    (["audit", "--only-rule", "--rule", "mach"], "Did you mean 'match'?"),
    (["bench", "--run", "sufix"], "Did you mean 'suffix'?"),
    (["bench", "--run", "suffix:branchs=2"], "Unknown option of drafter 'suffix' 'branchs'."),
    (["bench", "--run", "suffix:rule=mach"], "Unknown rule 'mach'."),
    (["bench", "--peer", "hf-lokup"], "Unknown peer 'hf-lokup'."),
    (["bench", "--preset", "defalt"], "Unknown preset 'defalt'."),
    (["bench", "--shape", "llama-7c"], "Unknown shape 'llama-7c'."),
    (["bench", "--target", "smolm2"], "Unknown model 'smolm2'."),
    (["tune", "--candidate", "sufix"], "Did you mean 'suffix'?"),
    (["tune", "--rules", "match,mach"], "Unknown rule 'mach'."),
    (["tune", "--target", "smolm2"], "Unknown model 'smolm2'."),
    (["train", "--kind", "eagel", "--out", "x"], "Unknown kind 'eagel'."),
    (["train", "--option", "stps=3", "--out", "x"], "Unknown option of kind 'eagle' 'stps'."),
    (["train", "--loss", "lk@0.8", "--out", "x"], "Unknown loss 'lk'."),
    (["train", "--style", "chta", "--out", "x"], "Unknown value of --style 'chta'."),
    (["train", "--numbers", "int9", "--out", "x"], "Unknown value of --numbers 'int9'."),
    (["train", "--target", "smolm2", "--out", "x"], "Unknown model 'smolm2'."),
    (["export", "x", "--target", "smolm2", "--to", "hf", "--out", "y"], "Unknown model 'smolm2'."),
    (["genrate", "x"], "No such command 'genrate'."),
    (["generate", "x", "--gama", "3"], "No such option: --gama"),
]
# All calls in one process, which never imports what is heavy.
IN_A_PROCESS = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from paceline.cli.main import app
heavy, calls, found = *json.loads(sys.argv[1]), []
for call in calls:
    with redirect_stderr(io.StringIO()) as told, redirect_stdout(io.StringIO()):
        try:
            app(call, prog_name="paceline")
        except SystemExit as end:
            code = end.code
    found.append([code, told.getvalue(), [name for name in heavy if name in sys.modules]])
print(json.dumps(found))
"""


def test_wrong_names_are_refused_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    calls = json.dumps([HEAVY, [call for call, _ in WRONG]])
    run = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS, calls], capture_output=True, text=True, timeout=600, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    for (call, words), (code, told, heavy) in zip(WRONG, json.loads(run.stdout), strict=True):
        assert code in (2, 4), call
        assert words in told, (call, told)
        assert told.count("\n") == 1, (call, told)
        assert heavy == [], (call, heavy)


def test_a_wrong_name_costs_little() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "paceline", "generate", "x", "--draft", "eagel"]
    assert subprocess.run(command, capture_output=True, timeout=600).returncode == 2
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < 1.0, f"{spent:.2f} s of CPU time; it was 0.2 when this was written"


# ---- the index


def test_the_index_is_what_is_registered() -> None:
    assert names.FILE.read_text("utf-8") == written(build()), "run `python tools/name_index.py`"


def test_a_name_of_this_process_or_of_a_new_file_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests and plugins register drafters; a new file need not be in the index to be used."""
    assert not names.is_known("drafter", "mine")
    monkeypatch.setitem(DRAFTERS._found, "mine", DRAFTERS["none"])
    names.check_draft("mine", ["anything"])
    monkeypatch.undo()
    monkeypatch.setattr(names, "index", lambda: {"drafter": {}})
    monkeypatch.setattr(names, "_added", lambda kind: [])
    assert names.is_known("drafter", "suffix")  # read from drafters/suffix.py
    assert not names.is_known("drafter", "sufix")


def test_a_name_of_another_package_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "theirs"

    monkeypatch.setattr(names, "_points", lambda group: [Point] if group == "paceline.drafters" else [])
    names.check_draft("theirs", ["anything"])
    assert "theirs" in names.names("drafter")
    with pytest.raises(UnknownNameError):
        names.check_name("rule", "theirs")


@pytest.mark.parametrize("source", ["smollm2", "SmolLM2-135M", "some/model", None])
def test_what_may_be_a_model_passes(source: str | None) -> None:
    names.check_model(source)


def test_what_is_on_disk_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    names.check_model("here")
    names.check_draft("here", ["unknown"])  # what it is, is known when it is read
    with pytest.raises(LoadError, match="no file or folder"):
        names.check_model("./there")


@pytest.mark.parametrize("dtype", [None, "auto", "torch.bfloat16", "half", "float8_e4m3fn"])
def test_types_of_numbers_pass(dtype: str | None) -> None:
    names.check_dtype(dtype)


# ---- completing


def completed(*words: str) -> list[str]:
    """What bash is offered for the last word, by the protocol of typer."""
    line = {"COMP_WORDS": " ".join(["paceline", *words]), "COMP_CWORD": str(len(words))}
    run = subprocess.run(
        [sys.executable, "-m", "paceline"], env={**os.environ, **line, "_PACELINE_COMPLETE": "complete_bash"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.stderr == ""
    return run.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("generate", "--draft", "ea"), ["eagle", "early-exit"]),
        (("chat", "--draft", "smol"), ["smollm2-135m"]),
        (("audit", "--rule", "mul"), ["multi-round"]),
        (("generate", "--target", "gem"), ["gemma3-270m"]),
        (("generate", "--runner", "c"), ["cuda_graph"]),
        (("bench", "--run", "suf"), ["suffix"]),
        (("bench", "--peer", "openvino-"), ["openvino-lookup"]),
        (("tune", "--candidate", "ng"), ["ngram"]),
        (("train", "--kind", "ea"), ["eagle", "early-exit"]),
        (("export", "x", "--target", "smol"), ["smollm2-135m"]),
        (("generate", "--draft", "prompt-lookup", "--drafter.l"), ["--drafter.longest"]),
        (("generate", "--rule", "typical", "--rule.ep"), ["--rule.epsilon"]),
        (("gen",), ["generate"]),
    ],
)
def test_a_shell_completes_names(words: tuple[str, ...], offered: list[str]) -> None:
    assert completed(*words) == offered
