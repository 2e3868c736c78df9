"""`paceline chat` over a pipe: every command, side-by-side runs, what is saved, and errors that do not end it."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import Result

from paceline.cli.commands.chat import history_file
from paceline.cli.terminal import silent_keys

from .conftest import run

pytestmark = pytest.mark.usefixtures("looks_up")

SHORT = ("--max-new-tokens", "12", "--ignore-eos")


def talk(target: str, *lines: str, more: tuple[str, ...] = ()) -> Result:
    result = run("chat", "--target", target, *SHORT, *more, stdin="\n".join(lines) + "\n")
    assert result.exit_code == 0, result.output
    return result


def test_an_answer_is_that_of_generate(target: str) -> None:
    alone = run("generate", "hello", "--target", target, "--chat", *SHORT, "--draft", "none").stdout
    assert talk(target, "hello").stdout == alone


def test_the_second_turn_does_not_read_the_first_again(target: str) -> None:
    first, second = map(json.loads, talk(target, "hello", "and again", more=("--json",)).stdout.splitlines())
    assert (first["cached_tokens"], second["cached_tokens"]) == (0, first["prompt_tokens"])


def test_the_conversation_is_remembered_and_cleared(target: str) -> None:
    twice = talk(target, "hello", "hello", "/history").stdout
    assert twice.count("user: hello") == 2
    assert twice.count("assistant: ") == 2
    cleared = talk(target, "hello", "/clear", "/history", "hello").stdout
    assert "user:" not in cleared
    first = talk(target, "hello").stdout
    assert cleared.startswith(first)
    assert cleared.endswith(first), "after /clear the same message gets the same answer"


def test_modes_run_side_by_side_with_one_seed(target: str, draft: str) -> None:
    result = talk(target, "/target on", "/ngram on", "/temperature 0.9", "abcabc", more=("--draft", draft))
    # no seed is given, so the text can be anything, also a bracket
    parts = re.split(r"\[(target|speculative|ngram)\]\n", result.stdout)[1:]
    texts = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(texts) == ["target", "speculative", "ngram"]
    assert len(set(texts.values())) == 1, "the same seed gives the same text with any drafter"
    assert result.stderr.count("times the speed of target, the same text") == 2


def test_the_draft_model_can_run_alone(target: str, draft: str) -> None:
    result = talk(target, "/drafter", "/speculative off", "hello", more=("--draft", draft))
    alone = run("generate", "hello", "--target", draft, "--chat", *SHORT, "--draft", "none").stdout
    assert result.stdout.endswith(alone)
    assert "has no model of its own" in talk(target, "/drafter", "hello").stderr


def test_help_shows_every_current_value(target: str) -> None:
    shown = talk(target, "/gamma 7", "/top-k 9", "/sampler nucleus", "/drafts", "/help").stdout
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip().startswith("/")}
    assert "7" in lines["/gamma"]
    assert "0.9" in lines["/top-p"]
    assert "default" in lines["/top-k"], "a sampler switches off what it does not use"
    assert " on " in lines["/drafts"]
    for name in ("/target", "/speculative", "/ngram", "/drafter", "/chat", "/debug", "/cache", "/save", "/trace"):
        assert name in lines


def test_settings_are_used(target: str) -> None:
    assert len(talk(target, "/length 3", "/chat off", "hello").stdout.splitlines()[-1]) == 3
    hot = talk(target, "/temperature 1.5", "/seed 3", "hello", "/clear", "/seed 4", "hello").stdout.splitlines()
    assert hot[2] != hot[-1]


def test_again_answers_the_last_message_anew(target: str) -> None:
    result = talk(target, "hello", "/gamma 2", "/again", "/history")
    assert result.stdout.count("user: hello") == 1, "the conversation has it once"
    first, _, second = result.stdout.splitlines()[:3]
    assert first == second


@pytest.mark.parametrize("draft", ["suffix", "ngram"])
def test_again_compares_with_a_drafter_that_does_not_know_the_answer(target: str, draft: str) -> None:
    """A drafter that keeps texts would copy its own answer, and the comparison would flatter it."""
    more = ("--draft", draft, *(("--drafter.persistent", "true") if draft == "ngram" else ()))
    result = talk(target, "hello you", "/target on", "/ngram on", "/again", more=more)
    counts = re.findall(r"(?:\((\d+ of \d+) drafted\)|(nothing was drafted))", result.stderr)
    first, again = counts[0], counts[1]
    assert first == again, result.stderr
    assert len(counts) == 3, "speculative, then speculative and ngram beside the target"


def test_a_drafter_and_a_rule_can_be_changed(target: str, draft: str) -> None:
    result = talk(target, f"/draft {draft} tree=levels", "/rule ratio", "/temperature 1", "hello")
    assert "draft-model" in result.stdout
    assert "rule ratio" in result.stdout
    wrong = talk(target, "/draft sufix", "/draft prompt-lookup longest=x", "/rule mach", "hello")
    assert "Did you mean" in wrong.stderr
    assert wrong.stderr.count("error: ") == 3
    assert len(wrong.stdout.splitlines()) == 1, "and the chat goes on with the drafter it had"


def test_save_and_trace(target: str, tmp_path: Path) -> None:
    chat, rounds = tmp_path / "chat.json", tmp_path / "rounds.jsonl"
    result = talk(target, "abcabcabc", f"/save {chat}", f"/trace {rounds}", "/trace")
    saved = json.loads(chat.read_text())
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant"]
    (answer,) = saved["answers"]
    lines = [json.loads(line) for line in rounds.read_text().splitlines()]
    assert len(lines) == answer["stats"]["rounds"]
    emitted = sum(len(entry["path"]) + (entry["own"] is not None) for entry in lines)
    assert emitted == answer["stats"]["emitted"] == 12
    assert result.stdout.count("'") >= 24, "/trace without a file shows the tokens"


@pytest.mark.parametrize("command", ["/save", "/trace"])
def test_a_file_that_exists_is_kept(target: str, tmp_path: Path, command: str) -> None:
    place = tmp_path / "notes.json"
    place.write_text("mine")
    refused = talk(target, "hello", f"{command} {place}")
    assert f"'{place}' exists; write {command} {place} --force to replace it, or name another file." in refused.stderr
    assert place.read_text() == "mine"
    assert "error" not in talk(target, "hello", f"{command} {place} --force").stderr
    assert place.read_text() != "mine"


def test_the_store_is_reset_saved_and_loaded(target: str, tmp_path: Path) -> None:
    place = tmp_path / "store"
    talked = talk(target, "/ngram", "/speculative off", "abcabc", f"/store save {place}", "/store reset")
    assert talked.stderr.count("error") == 0, talked.stderr
    loaded = talk(target, "/ngram", "/speculative off", f"/store load {place}", "abcabc")
    assert loaded.stderr.count("error") == 0, loaded.stderr


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/lenght 3", "Did you mean"),
        ("/gamma 0", "at least 1"),
        ("/gamma x", "whole number"),
        ("/top-p 7", "top_p"),
        ("/gamma", "needs one value"),
        ("/speculative maybe", "on or off"),
        ("/speculative off", "One mode must be on"),
        ("/save", "name of a file"),
        ("/save /nowhere/at/all.json", "cannot be written"),
        ("/again", "no message yet"),
        ("/trace", "no answer yet"),
        ("/store", "reset, save FILE or load FILE"),
        ('/system "', "no command"),
    ],
)
def test_an_error_is_one_line_and_the_chat_goes_on(target: str, line: str, told: str) -> None:
    result = talk(target, line, "hello")
    errors = [each for each in result.stderr.splitlines() if each.startswith("error: ")]
    assert len(errors) == 1
    assert told in errors[0]
    assert "Traceback" not in result.stderr
    assert result.stdout.strip()


def test_json_gives_one_object_per_answer(target: str) -> None:
    lines = talk(target, "hello", "you", more=("--json",)).stdout.splitlines()
    assert [len(json.loads(line)["tokens"]) for line in lines] == [12, 12]


def test_a_backslash_continues_a_line_and_quit_leaves(target: str) -> None:
    result = talk(target, "one\\", "two", "/history", "/quit", "never")
    assert "user: one\ntwo" in result.stdout
    assert "never" not in result.stdout


def test_history_is_kept_where_something_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state folder comes first: the cache may be a read-only folder, or one that is thrown away."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    first = history_file()
    assert first == tmp_path / "state" / "paceline" / "chat_history"
    assert first.stat().st_mode & 0o777 == 0o600
    (tmp_path / "file").write_text("no folder can be below it")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert history_file() == tmp_path / "cache" / "chat_history"
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    assert history_file() is None


def test_a_history_of_an_older_version_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "chat_history").write_text("\n# then\n+hello\n")
    place = history_file()
    assert place is not None
    assert "+hello" in place.read_text()


@pytest.mark.parametrize("foreground", [True, False])
def test_keys_are_silent_while_an_answer_is_written(foreground: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal driver echoes ^C into whatever is on the screen. A background job must not touch the terminal: the
    system would stop it."""
    pty = pytest.importorskip("pty", reason="there are no pseudo-terminals here")
    import termios

    def echoes() -> bool:
        return bool(termios.tcgetattr(slave)[3] & termios.ECHO)

    master, slave = pty.openpty()
    monkeypatch.setattr(os, "tcgetpgrp", lambda keyboard: os.getpgrp() if foreground else -1)
    try:
        with os.fdopen(os.dup(slave)) as keyboard:
            monkeypatch.setattr(sys, "stdin", keyboard)
            assert echoes()
            with silent_keys():
                assert echoes() is not foreground
            assert echoes()
    finally:
        os.close(master)
        os.close(slave)


@pytest.mark.slow
def test_a_terminal_gets_a_prompt_with_history(target: str, tmp_path: Path) -> None:
    """What people see: a prompt that is edited by prompt-toolkit, an answer in colours, and lines that come back."""
    pty = pytest.importorskip("pty", reason="there are no pseudo-terminals here")
    master, slave = pty.openpty()
    folders = {"XDG_STATE_HOME": str(tmp_path), "PACELINE_CACHE": str(tmp_path)}
    environment = {**os.environ, "TERM": "xterm-256color", **folders}
    command = [sys.executable, "-m", "paceline", "chat", "--target", target, *SHORT]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment, close_fds=True)
    os.close(slave)
    shown = _until(master, "›")
    os.write(master, b"hello\r")
    shown += _until(master, "tokens/s")
    os.write(master, b"/quit\r")
    assert process.wait(timeout=60) == 0
    assert "/help lists the commands" in shown
    assert "\x1b[34m" in shown, "the target's own tokens are blue"
    assert "hello" in (tmp_path / "paceline" / "chat_history").read_text()


def _until(descriptor: int, wanted: str) -> str:
    seen = ""
    while wanted not in seen:
        assert select.select([descriptor], [], [], 60)[0], f"no '{wanted}' in {seen!r}"
        seen += os.read(descriptor, 65536).decode("utf-8", "replace")
    return seen
