"""`paceline generate`: the text, its settings, and the lines about it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import paceline
from tests.cli.conftest import run

pytestmark = pytest.mark.usefixtures("looks_up")

PROMPT = "abc abc abc abc"


def generated(*arguments: str, **more: str) -> dict:
    """What --json says, of a run that went well; nothing else may stand on stdout."""
    result = run("generate", *arguments, "--json", **more)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def plain(target: str) -> paceline.Generation:
    return paceline.SpeculativeDecoder(paceline.load(target), draft=None).generate(
        PROMPT, max_new_tokens=24, ignore_eos=True
    )


def test_text_alone_goes_to_a_pipe(target: str, plain: paceline.Generation) -> None:
    result = run("generate", PROMPT, "--target", target, "--max-new-tokens", "24", "--ignore-eos")
    assert result.exit_code == 0, result.output
    assert result.stdout == plain.text + "\n" * (not plain.text.endswith("\n"))
    first, last = result.stderr.splitlines()
    assert re.fullmatch(r"tiny \(float32 from a folder, cpu; .+\) with prompt-lookup, γ=5, rule match", first)
    assert last.startswith("24 tokens in ")
    assert "tokens/s, τ " in last
    assert "drafted), ended by length" in last


@pytest.mark.parametrize(
    "drafting",
    [
        ["--draft", "none"],
        ["--gamma", "2"],
        ["--drafter.longest", "2", "--drafter.branches=3", "--nodes", "8"],
        ["--draft", "DRAFT"],
        ["--draft", "draft-model", "--drafter.model", "DRAFT", "--drafter.tree", "best-first"],
        ["--drafter", "prompt-lookup", "--rule", "auto"],
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}'],
        ["--speculative-config", '{"model": "DRAFT", "num_speculative_tokens": 3}'],
        ["--no-stream"],
        ["--stream"],
    ],
)
def test_however_it_is_drafted_the_text_is_the_same(
    drafting: list[str], target: str, draft: str, plain: paceline.Generation
) -> None:
    told = [word.replace("DRAFT", draft) for word in drafting]
    out = generated(PROMPT, "--target", target, "--max-new-tokens", "24", "--ignore-eos", *told)
    assert (out["text"], out["tokens"]) == (plain.text, plain.tokens)


def test_json_tells_everything(target: str) -> None:
    out = generated(PROMPT, "--target", target, "--seed", "3", "--temperature", "0.8", "--top-k", "20",
                    "--top-p", "0.9", "--min-p", "0.01", "--max-new-tokens", "6", "--ban", "0", "--ban", "1",
                    "--logit-bias", "5=-1.5",
                    "--repetition-penalty", "1.1", "--presence-penalty", "0.1", "--frequency-penalty", "0.1",
                    "--typical-p", "0.9", "--noise", "0.1", "--dynamic-temperature", "0.2", "--min-new-tokens", "6",
                    "--logprobs", "2", "--drafter.longest", "4")  # fmt: skip
    settings = out["settings"]
    assert {"text", "tokens", "finish_reason", "stop_reason", "seed", "stats", "versions"} <= out.keys()
    assert (out["seed"], out["finish_reason"], out["stop_reason"]) == (3, "length", None)
    assert out["stats"]["emitted"] == len(out["tokens"]) == len(out["from_draft"]) == 6
    assert out["versions"].keys() == {"paceline", "torch", "transformers", "python"}
    assert settings["drafter_options"]["longest"] == 4
    assert settings["banned_tokens"] == [0, 1]
    assert settings["logit_bias"] == {"5": -1.5}
    assert settings["noise"] == 0.1
    assert [entry["token"] for entry in out["logprobs"]] == out["tokens"]
    assert len(out["logprobs"][0]["top_raw"]) == 2
    again = generated(PROMPT, "--target", target, "--seed", "3", "--max-new-tokens", "6", "--draft", "none",
                      *[f"--{name.replace('_', '-')}={settings[name]}" for name in
                        ("temperature", "top_k", "top_p", "min_p", "typical_p", "noise", "dynamic_temperature",
                         "repetition_penalty", "presence_penalty", "frequency_penalty", "min_new_tokens")],
                      "--ban", "0", "--ban", "1", "--logit-bias", "5=-1.5")  # fmt: skip
    assert again["tokens"] == out["tokens"]


def test_an_impossible_token_has_no_logprob_in_json(target: str) -> None:
    out = generated(PROMPT, "--target", target, "--max-new-tokens", "1", "--logprobs", "3", "--top-k", "1")
    assert out["logprobs"][0]["processed"] == 0
    assert [entry["logprob"] for entry in out["logprobs"][0]["top_processed"]] == [0, None, None]


def test_logprobs_follow_the_text(target: str) -> None:
    result = run("generate", PROMPT, "--target", target, "--max-new-tokens", "2", "--logprobs", "1", "--ignore-eos")
    lines = result.stdout.splitlines()
    assert len(lines) >= 3
    assert all("(raw -" in line for line in lines[-2:])


def test_stop_strings_understand_escapes(target: str, plain: paceline.Generation) -> None:
    wanted = plain.text[9]
    at = plain.text.index(wanted)
    for written in (wanted, f"\\x{ord(wanted):02x}", f"\\u{ord(wanted):04x}"):
        out = generated(PROMPT, "--target", target, "--max-new-tokens", "24", "--ignore-eos", "--stop", written)
        assert (out["text"], out["finish_reason"], out["stop_reason"]) == (plain.text[:at], "stop", wanted)


def test_the_prompt_can_come_from_stdin(target: str, plain: paceline.Generation) -> None:
    out = generated("-", "--target", target, "--max-new-tokens", "24", "--ignore-eos", stdin=PROMPT + "\n")
    assert out["tokens"] == plain.tokens


def test_chat_applies_the_template(target: str) -> None:
    shared = ("--target", target, "--max-new-tokens", "4")
    told = generated("Hello", *shared, "--system", "Be brief.")
    assert told["tokens"] == generated("system: Be brief.\nuser: Hello\nassistant:", *shared)["tokens"]
    assert generated("Hello", *shared, "--chat")["prompt_tokens"] == len("user: Hello\nassistant:")


def test_dtype_and_device(target: str) -> None:
    settings = generated(PROMPT, "--target", target, "--max-new-tokens", "2", "--dtype", "float64", "--device", "cpu")
    assert (settings["settings"]["dtype"], settings["settings"]["device"]) == ("float64", "cpu")


def test_rejected_drafts_are_marked_where_there_is_no_colour(target: str) -> None:
    result = run("generate", PROMPT, "--target", target, "--max-new-tokens", "24", "--ignore-eos", "--show-drafts")
    assert "[-" in result.stdout
    assert result.stdout.index("[-") < result.stdout.index("-]")


def test_colours_where_they_are_wanted(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("generate", PROMPT, "--target", target, "--max-new-tokens", "24", "--ignore-eos", "--show-drafts")
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = run(*arguments).stdout
    assert "\x1b[34m" in coloured  # the target's own in blue
    assert "\x1b[9;31m" in coloured  # rejected drafts in red, struck through
    assert "\x1b[32m" in coloured  # accepted ones in green
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run(*arguments).stdout


def test_a_warning_is_one_line(target: str, draft: str, tmp_path: Path) -> None:
    config = json.loads((Path(draft) / "config.json").read_text())
    short = tmp_path / "short"
    short.mkdir()
    for file in Path(draft).iterdir():
        (short / file.name).write_bytes(file.read_bytes())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 24}))
    result = run(
        "generate", PROMPT, "--target", target, "--draft", str(short), "--max-new-tokens", "24", "--ignore-eos"
    )
    assert result.exit_code == 0, result.output
    warned = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warned) == 1, result.stderr
    assert "context of short (24 tokens)" in warned[0]


def test_plain_decoding_does_not_speak_of_drafts(target: str) -> None:
    result = run("generate", PROMPT, "--target", target, "--max-new-tokens", "2", "--draft", "none")
    assert "plain decoding" in result.stderr
    assert "drafted" not in result.stderr


# ---- --compare


def test_compare_says_that_the_texts_are_identical(target: str, plain: paceline.Generation) -> None:
    result = run("generate", PROMPT, "--target", target, "--max-new-tokens", "24", "--ignore-eos", "--compare",
                 "--repeats", "2")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(plain.text)
    assert "\nidentical text\n" in result.stdout
    rows = {
        line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line.startswith(("plain", "prom"))
    }
    assert rows["plain"][0] == rows["prompt-lookup"][0] == "24"
    assert rows["plain"][4] == "1.00"
    assert "median of 2 runs each, in turns" in result.stdout
    assert ("times as fast with prompt-lookup" in result.stdout) != ("speculation was slower here" in result.stdout)


def test_compare_shows_where_texts_part(target: str, draft: str) -> None:
    arguments = (PROMPT, "--target", target, "--draft", draft, "--rule", "ratio", "--temperature", "1.5", "--seed", "1",
                 "--max-new-tokens", "24", "--ignore-eos", "--compare", "--repeats", "1")  # fmt: skip
    out = generated(*arguments)
    parted = out["divergence"]
    assert not out["identical"]
    at = parted["position"]
    assert out["plain"]["tokens"][:at] == out["speculative"]["tokens"][:at]
    assert out["plain"]["tokens"][at] == parted["plain"] != parted["speculative"] == out["speculative"]["tokens"][at]
    assert parted["gap"] > 0
    assert out["speed_up"] > 0
    shown = run("generate", *arguments).stdout
    assert f"the texts differ from new token {at + 1} on" in shown
    assert "two best logits are" in shown
    assert "rule 'ratio' keeps the distribution of the text, not the text" in shown


def test_a_prediction_is_drafted(
    target: str, plain: paceline.Generation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As text or from a file; without --draft it is the drafter, and a drafter that cannot use it is refused."""
    monkeypatch.delenv("PACELINE_DRAFT")  # where none is asked for, the prediction is drafter enough
    shared = (PROMPT, "--target", target, "--max-new-tokens", "24", "--ignore-eos")
    (tmp_path / "guess.txt").write_text(plain.text)
    for text in (plain.text, f"@{tmp_path / 'guess.txt'}"):
        out = generated(*shared, f"--prediction={text}")
        assert out["tokens"] == plain.tokens
        assert out["settings"]["draft"] == "prediction"
        assert out["stats"]["accepted_prediction_tokens"] == out["stats"]["accepted"] > 15
    result = run("generate", *shared, "--prediction", "x", "--draft", "prompt-lookup")
    assert result.exit_code == 2
    assert "drafter 'prompt-lookup' cannot use one" in result.stderr
    result = run("generate", *shared, "--prediction", "@nowhere.txt")
    assert result.exit_code == 2
    assert "--prediction @nowhere.txt cannot be read" in result.stderr
    assert generated(*shared, f"--prediction={plain.text}", "--compare", "--repeats", "1")["identical"] is True


def test_a_grammar(target: str, tmp_path: Path) -> None:
    """As text or from a file; what cannot be used is an error in one line."""
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 3}
    (tmp_path / "list.json").write_text(json.dumps(schema))
    (tmp_path / "word.lark").write_text('start: "a" /[bc]+/')
    shared = (PROMPT, "--target", target, "--max-new-tokens", "24", "--seed", "1", "--temperature", "1")
    for more, pattern in [
        (("--json-schema", json.dumps(schema)), r"\[[12](,[12]){0,2}\]"),
        (("--json-schema", str(tmp_path / "list.json")), r"\[[12](,[12]){0,2}\]"),
        (("--grammar", str(tmp_path / "word.lark")), r"a[bc]+"),
        (("--grammar", 'root ::= "x" [yz]'), r"x[yz]"),
        (("--regex", "(yes|no)!"), r"(yes|no)!"),
        (("--choice", "one", "--choice", "two"), r"one|two"),
        (("--json-object",), r"\{.*"),
    ]:
        out = generated(*shared, *more)
        assert re.fullmatch(pattern, out["text"], re.DOTALL), more
        assert out["tokens"] == generated(*shared, *more, "--draft", "none")["tokens"]
    for more, told in [
        (("--json-schema", "nowhere.json"), "--json-schema nowhere.json cannot be read"),
        (("--grammar", "nowhere"), "--grammar nowhere cannot be read"),
        (("--regex", "(a"), "regex cannot be used"),
        (("--regex", "a", "--choice", "b"), "both constrain the text"),
    ]:
        result = run("generate", *shared, *more)
        assert result.exit_code == 2
        assert told in " ".join(result.stderr.split())


def test_beams_are_shown_best_first(target: str) -> None:
    arguments = ("generate", "hello", "--target", target, "--max-new-tokens", "6", "--beams", "3", "--n-best", "3")
    shown = run(*arguments).stdout.splitlines()
    told = json.loads(run(*arguments, "--json").stdout)
    scores = [beam["score"] for beam in told["beams"]]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    assert told["text"] == told["beams"][0]["text"]
    assert shown[0] == f"[1, score {scores[0]:.3f}] {told['text']}"
    assert shown[1] == f"[2, score {scores[1]:.3f}] {told['beams'][1]['text']}"


def test_by_default_it_drafts_what_pays(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_DRAFT")
    auto, plain = (run("generate", "abcabcabc", "--target", target, *more) for more in ((), ("--draft", "none")))
    assert auto.exit_code == 0, auto.stderr
    assert auto.stdout == plain.stdout
    assert "auto (grammar, suffix, recycling, prediction, self-quantized or none), γ≤16" in auto.stderr
