"""Model folders of a few kilobytes: a random Llama over printable ASCII, saved by transformers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from paceline.cli.main import app

CONTEXT = 2048
LETTERS = [" ", *(chr(code) for code in range(33, 127)), "\n"]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def save_model(folder: Path, *, seed: int = 0, letters: list[str] = LETTERS, broken: bool = False) -> Path:
    bytes_of = {" ": "Ġ", "\n": "Ċ"}  # as byte-level tokenizers write them
    vocabulary = {bytes_of.get(letter, letter): i for i, letter in enumerate(letters)}
    made = Tokenizer(models.BPE({**vocabulary, "<eos>": len(vocabulary)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=len(vocabulary),
        initializer_range=0.4,
    )
    model = LlamaForCausalLM(config).eval()
    if broken:
        model.lm_head.weight.data.fill_(float("nan"))
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what a drafter shows and remembers: one whose drafts do not depend on a clock."""
    monkeypatch.setenv("PACELINE_DRAFT", "prompt-lookup")


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "tinier", seed=1))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "PACELINE_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    """`paceline ...` in this process."""
    return CliRunner().invoke(app, list(arguments), input=stdin, prog_name="paceline")


def demo(*more: str, prompt: str | None = None) -> Result:
    """What `make demo` (PROMPT=...) runs, with further flags, in this process."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    (usual,) = re.findall(r"^PROMPT +\?= (.*)$", makefile, re.MULTILINE)
    (command,) = re.findall(r"^\t@?\$\(VENV\)/bin/paceline (.*)$", makefile, re.MULTILINE)
    return run(*shlex.split(command.replace("$(PROMPT)", prompt or usual)), *more)


def refusal(*arguments: str, code: int, stdin: str | bytes | None = None) -> str:
    """The one line that `paceline ...` refuses with, and nothing else: no text, no traceback."""
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = [
        line
        for line in result.stderr.splitlines()
        if not line.startswith(("tiny", "checking", "converting", "compiling kernels"))
    ]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert "Traceback" not in result.stderr
    return lines[0]
