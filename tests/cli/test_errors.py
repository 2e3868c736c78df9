"""Bad input, end to end: one sentence that says what to do, the right exit code, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import CONTEXT, LETTERS, refusal, run, save_model
from tests.models.tiny_gguf import byte_level_vocabulary, tiny_llama, write_gguf

pytestmark = pytest.mark.usefixtures("looks_up")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "smolm2-135m"], ["Unknown model 'smolm2-135m'", "Did you mean 'smollm2-135m'?"]),
        (["--draft", "promt-lookup"], ["Unknown drafter or model 'promt-lookup'", "Did you mean 'prompt-lookup'?"]),
        (["--rule", "mach"], ["Unknown rule 'mach'", "Did you mean 'match'?"]),
        (["--drafter.longst", "4"], ["Unknown option of drafter 'prompt-lookup' 'longst'", "Did you mean 'longest'?"]),
        (["--drafter.longest", "four"], ["--drafter.longest must be a whole number, got 'four'"]),
        (["--drafter.longest", "0"], ["1 <= shortest <= longest"]),
        (["--drafter.longest"], ["--drafter.longest needs a value"]),
        (["--draft", "draft-model", "--drafter.tree", "chian"], ["Did you mean 'chain'?"]),
        (["--draft", "draft-model"], ["draft-model needs a model"]),
        (["--gamma", "0"], ["--gamma must be at least 1, got 0"]),
        (["--nodes", "-1"], ["--nodes must be at least 1, got -1"]),
        (["--temperature", "-0.5"], ["temperature must be in [0, inf), got -0.5"]),
        (["--temperature", "nan"], ["--temperature must be a number, got nan"]),
        (["--top-p", "0"], ["top_p must be in (0, 1], got 0.0"]),
        (["--top-p", "1.5"], ["top_p must be in (0, 1], got 1.5"]),
        (["--max-new-tokens", "0"], ["max_new_tokens must be a whole number of at least 1, got 0"]),
        (["--logit-bias", "5"], ["--logit-bias must be ID=VALUE", "got '5'"]),
        (["--stop", ""], ["stop must be strings that are not empty"]),
        (["--dtype", "float31"], ["Unknown dtype 'float31'"]),
        (["--device", "gpu"], ["The device 'gpu' cannot be used here"]),
        (["--compare", "--draft", "none"], ["--compare needs a drafter"]),
        (["--gama", "3"], ["No such option: --gama", "--gamma", "See 'paceline generate --help'"]),
        (["--gamma", "five"], ["--gamma must be a whole number or auto, got 'five'."]),
        (["--guidance-scale", "x"], ["--guidance-scale must be a number, got 'x'."]),
        (["--ban", "x"], ["--ban must be a whole number, got 'x'."]),
        (["--amateur", ""], ["--amateur is empty"]),
        (["--draft", "staged"], ["staged needs a model, such as --drafter.model"]),
        (["--draft", "portfolio", "--drafter.drafters", '["suffix"'], ["--drafter.drafters begins like JSON"]),
        (["--speculative-config", "{"], ["--speculative-config is not valid JSON"]),
        (["--speculative-config", '{"methd": "ngram"}'], ["Did you mean 'method'?"]),
        (["--speculative-config", '{"method": "mlp"}'], ["Unknown method of --speculative-config 'mlp'"]),
        (["--speculative-config", '{"method": "eagle"}'], ["the method eagle needs a model"]),
        (["--speculative-config", '{"method": "suffix", "prompt_lookup_max": 3}'], ["not for the method suffix"]),
        (["--speculative-config", '{"num_speculative_tokens": 0}'], ["at least 1, got 0"]),
        (["--config", "no/such.toml"], ["The config 'no/such.toml' cannot be read: No such file"]),
    ],
)
def test_what_is_wrong_without_a_model(arguments: list[str], words: list[str]) -> None:
    line = refusal("generate", "Hello", *arguments, code=2)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("stdin", "words"), [("", "The prompt is empty"), ("\n", "The prompt is empty"), (b"\xff\xfe", "not valid UTF-8")]
)
def test_prompts_that_are_none(stdin: str | bytes, words: str) -> None:
    assert words in refusal("generate", "-", code=2, stdin=stdin)


def test_a_prompt_is_needed() -> None:
    assert "The prompt is empty" in refusal("generate", "", code=2)
    assert "The prompt is missing" in refusal("generate", code=2)


def test_a_prompt_longer_than_the_context(target: str) -> None:
    line = refusal("generate", "a" * (CONTEXT + 1), "--target", target, code=2)
    assert f"{CONTEXT + 1} tokens" in line
    assert f"ends at {CONTEXT}" in line


def test_other_words_mean_other_tokens(target: str, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", letters=LETTERS[::-1])
    line = refusal("generate", "Hello", "--target", target, "--draft", str(other), code=3)
    assert "other does not share the vocabulary of tiny" in line
    assert "0 is 'Ġ' / 'Ċ'" in line
    assert "cross-vocabulary" in line


def test_a_token_outside_the_vocabulary(target: str) -> None:
    line = refusal("generate", "Hello", "--target", target, "--ban", "100000", code=2)
    assert "banned_tokens names token 100000, outside the vocabulary" in line


def test_logits_that_are_nan(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny-nan", broken=True)
    assert "the logits are NaN" in refusal("generate", "Hello", "--target", str(folder), code=5)


# ---- weights that cannot be had


def test_missing_and_empty_folders(tmp_path: Path) -> None:
    missing = refusal("generate", "Hello", "--target", str(tmp_path / "not" / "there"), code=4)
    assert "There is no file or folder" in missing
    assert "has no config.json" in refusal("generate", "Hello", "--target", str(tmp_path), code=4)


def test_gguf_files_that_are_no_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    vocabulary = byte_level_vocabulary()
    whole = write_gguf(tmp_path / "whole.gguf", tiny_llama(len(vocabulary["tokens"])), vocabulary)
    truncated = tmp_path / "truncated.gguf"
    truncated.write_bytes(whole.read_bytes()[:-2000])
    corrupt = tmp_path / "corrupt.gguf"
    corrupt.write_bytes(b"GGUF" + b"\xff" * 200)
    for file in (truncated, corrupt, tmp_path / "absent.gguf"):
        assert str(file) in refusal("generate", "Hello", "--target", str(file), code=4)
    assert run("generate", "hello", "--target", str(whole), "--max-new-tokens", "2").exit_code == 0


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    line = refusal("generate", "Hello", "--target", "no-such-owner/nothing", code=4)
    assert "'no-such-owner/nothing' is no folder here and could not be fetched" in line
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    result = run("generate", "Hello", "--target", "gemma3-270m")
    assert result.exit_code == 4, result.output
    assert result.stderr.splitlines()[-1].startswith("error: Could not fetch 'gemma3-270m'")
    assert "Traceback" not in result.stderr


# ---- --debug, and unexpected errors


def test_debug_shows_where_it_arose() -> None:
    result = run("generate", "Hello", "--rule", "mach", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: Unknown rule 'mach'")


def test_an_unforeseen_error_is_a_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr("paceline.cli.commands.generate.read_settings", fail)
    line = refusal("generate", "Hello", code=70)
    assert line == "error: unexpected RuntimeError: out of memory. Run again with --debug to see the traceback."


def test_a_drafter_as_json_may_contain_a_slash() -> None:
    """A path inside is no reason to take the JSON for a path."""
    line = refusal("generate", "Hello", "--draft", '{"name": "eagle", "head": "no/such", "tre": 2}', code=2)
    assert "Unknown option of drafter 'eagle' 'tre'" in line


def test_options_beside_a_drafter_as_json_are_used(target: str) -> None:
    draft = '{"name": "prompt-lookup", "longest": 3}'
    arguments = ("generate", "abcabcabc", "--target", target, "--max-new-tokens", "4", "--draft", draft)
    assert "1 <= shortest <= longest" in refusal(*arguments, "--drafter.shortest", "9", code=2)
