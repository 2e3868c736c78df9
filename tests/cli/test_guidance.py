"""Targets of two branches on the command line."""

from __future__ import annotations

import json

import pytest

import paceline
from tests.cli.conftest import run

PROMPT = "abc abc abc"
COMMON = ("--max-new-tokens", "16", "--ignore-eos", "--json")


def written(*arguments: str) -> list[int]:
    result = run("generate", PROMPT, *arguments, *COMMON)
    assert result.exit_code == 0, result.output
    tokens: list[int] = json.loads(result.stdout)["tokens"]
    return tokens


def test_the_branches_are_those_of_the_library(target: str, draft: str) -> None:
    lm = paceline.load(target)
    two = {
        ("--guidance-scale", "3"): paceline.guided(lm, 3.0),
        ("--guidance-scale", "3", "--negative-prompt", "xyz"): paceline.guided(lm, 3.0, "xyz"),
        ("--amateur", draft): paceline.contrast(lm, draft),
    }
    texts = []
    for arguments, made in two.items():
        out = paceline.SpeculativeDecoder(made, draft=None).generate(PROMPT, max_new_tokens=16, ignore_eos=True)
        assert written("--target", target, *arguments) == out.tokens
        texts.append(tuple(out.tokens))
    assert len({*texts, tuple(written("--target", target))}) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--negative-prompt", "x"], "is for --guidance-scale"),
        (["--guidance-scale", "2", "--amateur", "smollm2-135m"], "use one of them"),
    ],
)
def test_what_does_not_go_together(arguments: list[str], words: str) -> None:
    result = run("generate", PROMPT, "--target", "nowhere/at-all", *arguments)
    assert result.exit_code == 2
    assert words in result.output
