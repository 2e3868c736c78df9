"""Grammars with every drafter and rule: the text is plain's, and it is of the grammar.

The tokens are characters, so that most grammars have many places with one or two possible tokens.
"""

from __future__ import annotations

import json
import re
from contextlib import nullcontext, suppress
from functools import cache
from typing import Any

import pytest

from paceline import RULES, Generation, LanguageModel, UnsupportedError
from paceline.core.contracts import DRAFTERS
from paceline.core.protocols import FollowsConstraint
from tests.toys import letters

from .drafters import PLAIN, Variant, some_variants
from .models import EOS, VOCABULARY, target
from .rules import RuleVariant, law_rules
from .test_identity import PROMPTS, SEEDS, check_accounts

CASE = "llama"
NEW = 24
ALPHABET = '{}[]"' + "~" + ":,.-0123456789abcdefghilnorstuy! \n"
assert ALPHABET.index("~") == EOS
assert len(ALPHABET) == VOCABULARY

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "to": {"enum": ["bo", "al", "bob"]}, "is": {"type": "boolean"}},
    "required": ["age", "to"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "json_schema": {"json_schema": SCHEMA},
    "json_object": {"json_object": True},
    "regex": {"regex": r"(yes|no)(, (yes|no)){0,5}!?"},
    "lark": {"grammar": 'start: word ("-" word)* "."\nword: /[a-e]{1,3}/'},
    "gbnf": {"grammar": 'root ::= "[" [0-9]+ ("," [0-9]+)* "]"'},
    "choice": {"choice": ["a", "ab", "abc", "bca"]},
}
WHOLE = {  # what a complete text matches
    "regex": r"(yes|no)(, (yes|no)){0,5}!?",
    "lark": r"[a-e]{1,3}(-[a-e]{1,3})*\.",
    "gbnf": r"\[[0-9]+(,[0-9]+)*\]",
    "choice": r"a|ab|abc|bca",
}


@cache
def model() -> LanguageModel:
    tokenizer = letters(ALPHABET)
    tokenizer.add_special_tokens({"eos_token": "~"})
    return LanguageModel(target(CASE).model, tokenizer, CASE)


def settings_of(name: str) -> dict[str, Any]:
    """Rows with the grammar and a row without one, greedy and sampled."""
    mine = {key: [value, None, value, value] for key, value in GRAMMARS[name].items()}
    return {"max_new_tokens": NEW, "temperature": [0.0, 0.0, 1.0, 1.3], "seed": SEEDS, **mine}


@cache
def plain(name: str) -> list[Generation]:
    """One prompt at a time, one token at a time."""
    decoder = PLAIN.decoder(CASE, model())
    rows = [{key: value if key == "max_new_tokens" else value[row] for key, value in settings_of(name).items()}
            for row in range(len(PROMPTS))]  # fmt: skip
    return [decoder.generate(prompt, **row) for prompt, row in zip(PROMPTS, rows, strict=True)]


def check_text(name: str, out: Generation) -> None:
    """A text that ended by itself is whole. One that was cut is the beginning of a text."""
    text = out.text
    if out.finish_reason == "length":
        assert set(text) <= set(ALPHABET) - {"~", "\n"}
    elif name == "json_object":
        assert isinstance(json.loads(text), dict)
    elif name == "json_schema":
        found = json.loads(text)
        assert isinstance(found["age"], int)
        assert found["to"] in ("bo", "al", "bob")
        assert set(found) <= {"age", "to", "is"}
        assert text == json.dumps(found, separators=(",", ":"))
    else:
        assert re.fullmatch(WHOLE[name], text), text


@pytest.mark.parametrize("name", GRAMMARS)
def test_plain_text_is_of_the_grammar(name: str) -> None:
    outs = plain(name)
    for row in (0, 2, 3):
        check_text(name, outs[row])
    assert any(out.finish_reason == "stop" for out in outs) or name == "json_object"
    assert len({out.text for out in outs}) > 1, "the grammar leaves no choice, so that the test says nothing"


def pairs() -> list[Any]:
    """Every variant meets two grammars, and all of them nightly."""
    return [
        pytest.param(name, variant, id=f"{name}-{variant}",
                     marks=[] if (i + j) % (len(GRAMMARS) // 2) == 0 else [pytest.mark.nightly])
        for j, variant in enumerate(some_variants())
        for i, name in enumerate(GRAMMARS)
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "variant"), pairs())
def test_the_text_is_that_of_plain_decoding(name: str, variant: Variant) -> None:
    outs = variant.decoder(CASE, model(), gamma=4).generate(PROMPTS, **settings_of(name))
    for out, expected in zip(outs, plain(name), strict=True):
        assert (out.tokens, out.text) == (expected.tokens, expected.text)
        assert (out.finish_reason, out.stop_reason) == (expected.finish_reason, expected.stop_reason)
        check_accounts(out)
    if issubclass(DRAFTERS[variant.drafter], FollowsConstraint) and name not in ("json_object", "gbnf", "lark"):
        assert sum(out.stats.accepted for out in outs) > 0


RULE_VARIANTS = list({RULES[rule.name].verify: rule for rule in law_rules()}.values())


@pytest.mark.parametrize("rule", RULE_VARIANTS, ids=str)
def test_every_rule_keeps_to_the_grammar(rule: RuleVariant) -> None:
    """Greedy text is plain's. A sampled text may be another one, and is of the grammar."""
    for variant in [variant for variant in some_variants() if variant.draft == "close"][:2]:
        # a rule for chains refuses a drafter of trees
        refused = nullcontext() if RULES[rule.name].branches else suppress(UnsupportedError)
        with refused:
            decoder = variant.decoder(CASE, model(), gamma=4, rule=rule.make())
            outs = decoder.generate(PROMPTS, **settings_of("json_schema"))
            assert outs[0].tokens == plain("json_schema")[0].tokens
            for row in (0, 2, 3):
                check_text("json_schema", outs[row])


@pytest.mark.parametrize("name", ["json_schema", "regex", "choice"])
def test_beams_keep_to_the_grammar(name: str) -> None:
    beams = {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True}
    settings = {**GRAMMARS[name], **beams, "max_new_tokens": 40}
    expected = PLAIN.decoder(CASE, model()).generate(PROMPTS[0], **settings)
    assert expected.beams is not None
    for beam in expected.beams:
        assert beam.finish_reason == "stop" or name == "json_schema"
        if beam.finish_reason == "stop":
            assert name == "json_schema" or re.fullmatch(WHOLE[name], beam.text)
    tree = next(v for v in some_variants() if v.draft == "close" and not v.chain)
    for variant in (tree, Variant("grammar"), Variant("suffix", {"branches": 3})):
        out = variant.decoder(CASE, model(), gamma=4).generate(PROMPTS[0], **settings)
        assert out.beams is not None
        assert [(beam.text, beam.score) for beam in out.beams] == [(beam.text, beam.score) for beam in expected.beams]
