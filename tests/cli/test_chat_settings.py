"""Settings of a chat: what they leave alone, what is refused at once, and what `paceline chat` does not take."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from .conftest import refusal, run
from .test_chat import SHORT, talk

pytestmark = pytest.mark.usefixtures("looks_up")


def contexts(store: Path) -> int:
    with safe_open(store, "pt") as file:
        return sum(file.get_slice(name).get_shape()[0] for name in file.keys())  # noqa: SIM118  no mapping


@pytest.mark.parametrize("line", ["/temperature 0.5", "/seed 3", "/gamma 2", "/rule ratio", "/draft suffix"])
def test_a_setting_leaves_the_store_as_it_was(target: str, tmp_path: Path, line: str) -> None:
    """What was learned in a long chat is gone otherwise with the next /temperature."""
    before, after = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    talk(target, "/ngram on", "abcabcabcabc", f"/store save {before}", line, f"/store save {after}")
    assert contexts(after) == contexts(before) > 10


def test_a_setting_does_not_load_the_draft_model_again(
    target: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import paceline.models

    loaded, load = [], paceline.models.load
    monkeypatch.setattr("paceline.models.load", lambda source, **more: (loaded.append(source), load(source, **more))[1])
    talk(target, "hello", "/temperature 0.5", "/gamma 2", "/rule ratio", "hello", more=("--draft", draft))
    assert sorted(loaded) == sorted([target, draft])


def test_a_store_that_cannot_be_read_leaves_the_old_one(target: str, tmp_path: Path) -> None:
    result = talk(target, "/ngram on", "/speculative off", "/store load /nowhere/at-all", "hello")
    assert result.stderr.count("error: ") == 1
    assert "tokens/s" in result.stderr


def test_noise_is_set_beside_the_top_k_it_needs(target: str) -> None:
    result = talk(target, "/sampler top-k-noise", "/noise 0.2", "hello")
    assert "error" not in result.stderr
    assert "noise = 0.2" in result.stdout
    taken = talk(target, "/sampler top-k-noise", "/top-k off", "hello")
    assert taken.stderr.count("error: ") == 1, "refused at once, so the message is answered"
    assert "needs top_k" in taken.stderr


def test_a_rule_takes_options_and_a_bad_one_changes_nothing(target: str) -> None:
    result = talk(target, "/rule lenience lenience=0.3", "/settings", "hello", more=("--allow-lossy",))
    assert "error" not in result.stderr
    assert "rule lenience lenience=0.3" in result.stdout
    wrong = talk(target, "/rule typical", "/rule beam beams=3", "/rule ratio x", "/settings", "hello")
    assert wrong.stderr.count("error: ") == 3
    assert "rule match" in wrong.stdout
    assert "tokens/s" in wrong.stderr


def test_a_search_is_compared_with_a_search(target: str) -> None:
    result = talk(target, "/rule beam num_beams=3", "/target on", "abcabcabc")
    assert "rule beam, 3 beams" in result.stdout
    assert "the same text" in result.stderr
    refused = talk(target, "/rule beam", "/temperature 1", "hello")
    assert "num_beams=4 searches" in refused.stderr
    assert "tokens/s" in refused.stderr


def test_a_prediction_is_drafted_by_the_drafter_that_can(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_DRAFT")  # where none is asked for, the prediction is drafter enough
    result = talk(target, "/target on", "/ngram on", "hello", "/draft suffix", "hello", more=("--prediction", "abc"))
    assert "with prediction" in result.stderr.splitlines()[0]
    assert result.stderr.count("error: ") == 1
    assert "drafter 'suffix' cannot use one" in result.stderr
    assert result.stderr.count("tokens/s") == 6
    asked = ("chat", "--target", target, "--prediction", "abc", "--draft", "suffix")
    assert "cannot use one" in refusal(*asked, code=2)


@pytest.mark.parametrize("option", ["--n-best=2", "--logprobs=2", "--repeats=2", "--chat", "--compare"])
def test_what_a_chat_would_drop_is_no_option_of_it(option: str) -> None:
    assert f"No such option: {option.split('=')[0]}" in refusal("chat", option, code=2)


def test_a_dash_is_no_message(target: str) -> None:
    arguments = ("--target", target, *SHORT)
    assert run("chat", "-", *arguments, stdin="hello\n").stdout == run("chat", *arguments, stdin="hello\n").stdout


def test_the_table_of_the_config_is_named(tmp_path: Path) -> None:
    assert "[chat] and [decoder] tables" in " ".join(run("chat", "--help").stdout.split())
    file = tmp_path / "paceline.toml"
    file.write_text("[chat]\ngamma = 3\n[generate]\ngamma = 4\n")
    assert "gamma = 3  # config" in run("chat", "--config", str(file), "--print-config").stdout


def test_what_every_message_would_be_refused_for_is_refused_at_the_start(target: str) -> None:
    assert "needs top_k" in refusal("chat", "--target", target, "--noise", "0.2", code=2)
