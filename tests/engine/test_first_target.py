"""`first_target`: the target decides the first token of every sequence in a round without a draft."""

from __future__ import annotations

from typing import Any

import pytest
from tests.conformance.models import draft, target

from paceline import PacelineError, SpeculativeDecoder

PROMPTS = [[1, 7, 9, 4, 7, 9, 4, 7, 9, 11, 2], [3, 3, 8, 3, 3, 8, 3], [6, 21], [13]]
DRAFTS: list[tuple[str, dict[str, Any]]] = [
    ("prompt-lookup", {}),
    ("draft-model", {"model": draft("llama", "close")}),
    ("draft-model", {"model": draft("llama", "close"), "tree": "levels", "branch": 2, "width": 2}),
    ("recycling", {}),
]


@pytest.mark.parametrize(("name", "options"), DRAFTS, ids=["lookup", "chain", "tree", "recycling"])
@pytest.mark.parametrize("rows", [16, 2])
def test_the_first_round_of_every_sequence_has_no_draft(name: str, options: dict[str, Any], rows: int) -> None:
    """With two slots, sequences join while others are past their first token."""
    asked: dict[str, Any] = {"max_new_tokens": [12, 5, 9, 12], "temperature": 0.9, "seed": [1, 2, 3, 4]}
    usual = SpeculativeDecoder(target("llama"), name, options=options, rows=rows).generate(PROMPTS, **asked)
    decoder = SpeculativeDecoder(target("llama"), name, options=options, rows=rows, first_target=True)
    first = decoder.generate(PROMPTS, **asked)
    assert [out.tokens for out in first] == [out.tokens for out in usual]
    for out in first:
        assert out.trace.rounds[0].drafted == ()
        assert len(out.trace.rounds[0].emitted) == 1
    assert any(out.trace.rounds[0].drafted for out in usual)
    assert any(entry.drafted for out in first for entry in out.trace.rounds[1:])


def test_it_is_a_yes_or_no() -> None:
    with pytest.raises(PacelineError, match="first_target must be True or False, got 2"):
        SpeculativeDecoder(target("llama"), "prompt-lookup", first_target=2)


def test_a_config_and_the_command_line_know_it() -> None:
    from paceline.cli.command_options import GenerateOptions

    assert GenerateOptions(prompt="a").first_target is False
    config = {"draft": "prompt-lookup", "first_target": True}
    assert SpeculativeDecoder.from_config(config, target("llama")).first_target is True
