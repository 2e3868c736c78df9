"""The program `llm`: prompts, streams, conversations, schemas and the log of usage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., str]


@pytest.fixture(scope="module")
def llm(url: str, model: str, work: Path) -> Run:
    """Runs `llm` with a folder of its own."""
    folder = work / "llm"
    folder.mkdir(exist_ok=True)
    (folder / "logs.db").unlink(missing_ok=True)
    entries = [
        {
            "model_id": "ours",
            "model_name": model,
            "api_base": f"{url}/v1",
            "supports_schema": True,
            "supports_tools": True,
        },
        {"model_id": "plain", "model_name": model, "api_base": f"{url}/v1", "completion": True},
    ]
    lines = [
        ("- " if at == 0 else "  ") + f"{key}: {json.dumps(value)}"
        for entry in entries
        for at, (key, value) in enumerate(entry.items())
    ]
    (folder / "extra-openai-models.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def run(*arguments: str, code: int = 0) -> str:
        environment = {**os.environ, "LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"}
        ended = subprocess.run(
            [sys.executable, "-m", "llm", *arguments], env=environment, capture_output=True, text=True, timeout=120
        )
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr if code else ended.stdout

    return run


SETTINGS = ("-o", "seed", "3", "-o", "max_tokens", "16")


def test_a_prompt_and_a_stream(llm: Run) -> None:
    text = llm("-m", "ours", "Tell me about cats.", *SETTINGS)
    assert text.strip()
    assert llm("-m", "ours", "--no-stream", "Tell me about cats.", *SETTINGS) == text


def test_a_conversation_goes_on(llm: Run) -> None:
    llm("-m", "ours", "Tell me about cats.", *SETTINGS)
    assert llm("-c", "Go on.", "-o", "max_tokens", "8").strip()


def test_a_completion(llm: Run) -> None:
    assert llm("-m", "plain", "Once upon a time", "-o", "max_tokens", "8").strip()


def test_the_log_has_usage(llm: Run) -> None:
    llm("-m", "ours", "Tell me about cats.", "-o", "max_tokens", "5")
    (entry,) = json.loads(llm("logs", "--json", "-n", "1"))
    assert entry["output_tokens"] == 5
    assert entry["input_tokens"] > 5


def test_a_schema(llm: Run, url: str) -> None:
    schema = {
        "type": "object",
        "properties": {"legs": {"enum": [3, 4]}},
        "required": ["legs"],
        "additionalProperties": False,
    }
    asked = ("-m", "ours", "--schema", json.dumps(schema), "A pet", "-o", "max_tokens", "32")
    try:
        text = llm(*asked)
    except AssertionError as error:
        if "which this version of Paceline does not have" in str(error):
            pytest.skip("this version of the server has no grammars")
        raise
    assert json.loads(text)["legs"] in (3, 4)


def test_an_error_is_a_sentence(llm: Run) -> None:
    assert "the context of this server is" in llm("-m", "ours", "x", "-o", "max_tokens", "99999", code=1)
