"""flag > environment > config > default, and `--print-config`, whose output says the same again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from paceline.cli.command_options import from_vllm
from paceline.cli.decoder_session import _unescape
from paceline.common.errors import InputError
from paceline.common.options import convert_options
from paceline.drafters.adaptive.portfolio import Portfolio
from paceline.engine.decoder import SpeculativeDecoder
from tests.cli.conftest import refusal, run


def config(*arguments: str) -> dict[str, str]:
    """`--print-config` as {setting: value and origin}."""
    result = run("generate", *arguments, "--print-config")
    assert result.exit_code == 0, result.output
    return dict(line.split(" = ", 1) for line in result.stdout.splitlines() if " = " in line)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "paceline.toml"
    path.write_text(
        '[generate]\ntemperature = 0.7\ntop_k = 40\nstop = "\\n\\n"\nban = [3, 4]\nchat = true\n'
        "[generate.drafter]\nlongest = 4\nshortest = 2\n[generate.logit-bias]\n5 = -1.5\n"
    )
    return path


def test_each_source_beats_the_next(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TOP_K", "30")
    monkeypatch.setenv("PACELINE_TEMPERATURE", "0.6")
    monkeypatch.setenv("PACELINE_DRAFTER_SHORTEST", "3")
    found = config("--config", str(file), "--temperature", "0.5", "--drafter.branches", "2")
    assert found["temperature"] == "0.5  # flag"
    assert found["top-k"] == "30  # environment"
    assert found["ban"] == "[3, 4]  # config"
    assert found["stop"] == '["\\n\\n"]  # config'
    assert found["logit-bias"] == '["5=-1.5"]  # config'
    assert found["draft"] == '"auto"  # default'
    assert (found["longest"], found["shortest"], found["branches"]) == ("4", "3", "2")


def test_the_config_can_be_named_in_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CONFIG", str(file))
    assert config()["chat"] == "true  # config"


def test_what_is_printed_is_a_config(file: Path, tmp_path: Path) -> None:
    first = run("generate", "--config", str(file), "--print-config", "--system", 'Say "é\\n"').stdout
    again = tmp_path / "again.toml"
    again.write_text(first, "utf-8")
    second = run("generate", "--config", str(again), "--print-config").stdout

    def values(text: str) -> list[str]:
        return [line.split("  # ")[0] for line in text.splitlines()]

    assert values(second) == values(first)


def test_options_belong_to_the_drafter_named_beside_them(file: Path) -> None:
    assert "longest" not in config("--config", str(file), "--draft", "none")
    assert config("--config", str(file), "--draft", "none", "--drafter.x", "1")["x"] == "1"


def test_vllm_words_beat_the_environment_and_yield_to_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_GAMMA", "9")
    theirs = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    found = config("--speculative-config", theirs)
    assert found["gamma"] == "3  # speculative-config"
    assert (found["longest"], found["shortest"]) == ("4", "2")
    found = config("--speculative-config", theirs, "--gamma", "7", "--draft", "none")
    assert (found["gamma"], found["draft"]) == ("7  # flag", '"none"  # flag')
    assert "longest" not in found


def test_vllm_methods() -> None:
    assert from_vllm('{"method": "ngram", "prompt_lookup_max": 4}').options == {"longest": "4", "shortest": "4"}
    assert from_vllm('{"model": "[ngram]"}').draft == "prompt-lookup"
    assert from_vllm('{"method": "draft_model", "model": "a/b"}').draft == "a/b"
    assert from_vllm('{"num_speculative_tokens": 2}').draft is None
    suffix = from_vllm('{"method": "suffix", "suffix_decoding_min_token_prob": 0.2}')
    assert (suffix.draft, suffix.options) == ("suffix", {"min_probability": "0.2"})
    for method, name in (("eagle", "eagle"), ("eagle3", "eagle"), ("medusa", "medusa")):
        theirs = from_vllm(f'{{"method": "{method}", "model": "a/b"}}')
        assert (theirs.draft, theirs.options) == (name, {"head": "a/b"})
    with pytest.raises(InputError, match="needs a model"):
        from_vllm('{"method": "draft_model"}')
    with pytest.raises(InputError, match="must be a JSON object"):
        from_vllm("[]")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[generate]\ntemprature = 1", "Did you mean 'temperature'?"),
        ("[genrate]\ntemperature = 1", "Did you mean 'generate'?"),
        ("generate = 1", "must be a table"),
        ("[generate]\ntemperature = ", "is not valid TOML"),
        ("[generate]\ntemperature = 'hot'", "--temperature must be a number, got 'hot'"),
        ("[generate]\nprompt = 'x'", "Unknown setting"),
    ],
)
def test_configs_that_are_wrong(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(content)
    assert words in refusal("generate", "Hello", "--config", str(path), code=2)


def test_a_config_that_is_a_folder_or_not_text(tmp_path: Path) -> None:
    assert "cannot be read" in refusal("generate", "Hello", "--config", str(tmp_path), code=2)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refusal("generate", "Hello", "--config", str(tmp_path / "bytes"), code=2)


@dataclass
class Options:
    count: int = 1
    share: float = 0.5
    shape: Literal["chain", "tree"] = "chain"
    eager: bool = False
    limit: int | None = None
    sizes: tuple[int, ...] = ()
    anything: Any = None


def test_options_get_the_types_of_their_fields() -> None:
    given = {
        "count": "3",
        "share": "0.25",
        "shape": "tree",
        "eager": "yes",
        "limit": "none",
        "sizes": "1, 2",
        "anything": "x",
    }
    made = convert_options(given, Options, "drafter", "d")
    assert made == {
        "count": 3,
        "share": 0.25,
        "shape": "tree",
        "eager": True,
        "limit": None,
        "sizes": (1, 2),
        "anything": "x",
    }
    assert convert_options({"limit": "7", "eager": "off"}, Options, "drafter", "d") == {"limit": 7, "eager": False}
    for wrong in ({"share": "half"}, {"eager": "maybe"}, {"shape": "bush"}, {"limit": "x"}, {"colour": "red"}):
        with pytest.raises(InputError):
            convert_options(wrong, Options, "drafter", "d")


def test_a_list_in_json_may_have_commas_of_its_own(tmp_path: Path) -> None:
    """The drafters of a portfolio have options; cut at every comma they could not be shown."""
    suffix = {"name": "suffix", "branches": 2}
    for text, wanted in (
        ('{"name": "suffix", "branches": 2}', (suffix,)),
        ('[["suffix", {"branches": 2}], "ngram"]', (["suffix", {"branches": 2}], "ngram")),
        ("suffix,ngram", ("suffix", "ngram")),
    ):
        made = convert_options({"drafters": text}, Portfolio.Options, "drafter", "portfolio")
        assert made == {"drafters": wanted}
    file = tmp_path / "paceline.toml"
    file.write_text(
        '[generate]\ndraft = "portfolio"\n[generate.drafter]\ndrafters = [{name = "suffix", branches = 2}, "ngram"]\n'
    )
    shown = json.loads(config("--config", str(file))["drafters"])
    assert json.loads(shown) == [suffix, "ngram"]


def test_the_drafter_has_two_names_in_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DRAFTER", "suffix")
    assert config()["draft"] == '"suffix"  # environment'
    monkeypatch.setenv("PACELINE_DRAFT", "ngram")
    assert config()["draft"] == '"ngram"  # environment'


def test_escapes() -> None:
    assert _unescape(r"a\n\t\\n\x41\u00e9\q\s") == "a\n\t\\nAé\\q "


# ---- [decoder]: one file for every command and for `SpeculativeDecoder.from_config`


@pytest.fixture
def tuned(tmp_path: Path, target: str) -> Path:
    path = tmp_path / "tuned.toml"
    path.write_text(
        f'[decoder]\ntarget = "{target}"\ndraft = "ngram"\ngamma = 8\nnodes = 32\nrule = "ratio"\nrows = 4\n'
        "[decoder.drafter]\norder = 3\nbranches = 2\n"
    )
    return path


@pytest.mark.parametrize("command", ["generate", "chat", "audit"])
def test_every_command_takes_the_decoder(command: str, tuned: Path, target: str) -> None:
    shown = run(command, "--config", str(tuned), "--print-config").stdout
    for line in ('draft = "ngram"  # config', "gamma = 8  # config", 'rule = "ratio"  # config', "nodes = 32  # config",
                 f'target = "{target}"  # config', "order = 3", "branches = 2"):  # fmt: skip
        assert line in shown


def test_a_command_s_own_table_and_flags_lie_over_it(tuned: Path) -> None:
    tuned.write_text(tuned.read_text() + "[generate]\ngamma = 3\ntemperature = 0.5\n")
    found = config("--config", str(tuned), "--rule", "match")
    assert (found["gamma"], found["rule"], found["nodes"]) == ("3  # config", '"match"  # flag', "32  # config")
    assert found["order"] == "3"
    tuned.write_text(tuned.read_text() + 'draft = "suffix"\n')
    assert "order" not in config("--config", str(tuned))


def test_it_decodes_as_the_library_does(tuned: Path) -> None:
    written = run("generate", "abcabc", "--config", str(tuned), "--max-new-tokens", "8", "--json")
    told = json.loads(written.stdout)
    made = SpeculativeDecoder.from_config(tuned)
    assert told["tokens"] == made.generate("abcabc", max_new_tokens=8).tokens
    assert "ngram" in written.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[decoder]\ngama = 3", "Did you mean 'gamma'?"),
        ("[decoder]\ntemperature = 1", "Unknown setting of [decoder]"),
        ("decoder = 3", "must be a table"),
        ("[decodr]\ngamma = 3", "Did you mean 'decoder'?"),
    ],
)
def test_decoder_tables_that_are_wrong(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(content)
    assert words in refusal("generate", "Hello", "--config", str(path), code=2)


def test_gamma_may_be_auto(tmp_path: Path) -> None:
    assert config("--gamma", "auto")["gamma"] == '"auto"  # flag'
    path = tmp_path / "auto.toml"
    path.write_text('[decoder]\ngamma = "auto"\n')
    assert config("--config", str(path))["gamma"] == '"auto"  # config'
    assert config("--config", str(path), "--gamma", "4")["gamma"] == "4  # flag"
