"""Grammars over tokens: the masks of a cursor, the way back, what is refused, and hostile grammars."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.toys import VOCABULARY, letters, llama

from paceline import InputError, LanguageModel, UnsupportedError
from paceline.models.grammars import token_grammar
from paceline.models.grammars.grammar_sources import LONGEST
from paceline.models.grammars.token_grammar import Grammar, GrammarCursor, grammars_of

ALPHABET = '{}[]":,.-0123456789 ~!abcdefghijnorstuyl'
END = ALPHABET.index("~")
WORDS = ("ab", "abc", "bad", "bade", "j")


@cache
def model() -> LanguageModel:
    return LanguageModel(llama(), letters(ALPHABET), "toy")


def ids(text: str) -> tuple[int, ...]:
    return tuple(ALPHABET.index(letter) for letter in text)


def text_of(allowed: torch.Tensor) -> str:
    return "".join(ALPHABET[token] for token in allowed.nonzero().flatten().tolist())


def compiled(**setting: Any) -> Grammar:
    ((name, value),) = setting.items()
    return grammars_of(model()).compile(name, value)


def written(grammar: Grammar, text: str, ends: Sequence[int] = (END,)) -> GrammarCursor:
    cursor = grammar.start(ends)
    for token in ids(text):
        cursor.commit(token)
    return cursor


# ---- masks


def test_an_end_token_that_is_text_comes_only_where_the_text_may_end() -> None:
    grammar = compiled(regex="j[ab]{2}c?")
    ends = ids("a")
    for text, allowed in (("", "j"), ("j", "b"), ("jb", "ab"), ("jbb", "ac")):
        assert text_of(written(grammar, text, ends).allowed([()])[0]) == allowed, text
    cursor = written(grammar, "j", ends)
    assert [text_of(mask) for mask in cursor.allowed([(), ids("b"), ids("bb")])] == ["b", "ab", "ac"]
    cursor.commit(ids("b")[0])
    cursor.commit(ids("a")[0])
    assert not cursor.problem


def test_a_text_that_needs_an_end_token_too_early_ends_with_an_error() -> None:
    cursor = written(compiled(regex="jaab"), "j", ids("a"))
    assert not cursor.allowed([()]).any()
    assert "end the text too early" in cursor.problem


def following(begin: str) -> set[str]:
    """What may follow this beginning of one of the words: letters, and ~ for an end."""
    letters_after = {word[len(begin)] for word in WORDS if word.startswith(begin) and word != begin}
    return letters_after | ({"~"} if begin in WORDS and letters_after else set())


def test_a_mask_is_what_may_follow() -> None:
    grammar = compiled(choice=WORDS)
    for begin in {word[:end] for word in WORDS for end in range(len(word))}:
        cursor = written(grammar, begin)
        assert set(text_of(cursor.allowed([()])[0])) == following(begin), begin


def test_the_masks_of_a_tree_are_those_of_its_paths() -> None:
    """Also that of the place after the last node, where the bonus token comes from."""
    cursor = written(compiled(choice=WORDS), "b")
    paths = [(), ids("a"), ids("ad"), ids("ade")[:1], ids("ad")]
    found = [set(text_of(mask)) for mask in cursor.allowed(paths)]
    assert found == [{"a"}, {"d"}, {"e", "~"}, {"d"}, {"e", "~"}]


def test_a_path_that_is_not_of_the_grammar_does_no_harm() -> None:
    cursor = written(compiled(choice=WORDS), "a")
    everything = cursor.allowed([ids("x" if "x" in ALPHABET else "9"), ids("bc!"), ids("b~b"), (END,), (-1,), (99,)])
    assert everything.all()
    assert set(text_of(cursor.allowed([ids("b")])[0])) == {"c", "~"}
    assert cursor.problem == ""


def test_masks_of_other_paths_are_dropped() -> None:
    cursor = compiled(choice=WORDS).start((END,))
    assert text_of(cursor.allowed([ids("ba")])[0]) == "d"
    cursor.commit(ids("a")[0])
    assert cursor.allowed([ids("a")]).all()  # "aa" is not of the grammar


def test_an_end_may_come_where_the_grammar_accepts() -> None:
    grammar = compiled(regex="a+b?")
    assert text_of(written(grammar, "").allowed([()])[0]) == "a"
    assert text_of(written(grammar, "a").allowed([()])[0]) == "~ab"
    assert text_of(written(grammar, "a", ends=(END, 0)).allowed([()])[0]) == "{~ab"
    assert text_of(written(grammar, "a", ends=()).allowed([()])[0]) == "ab"


def test_a_text_is_complete_when_only_an_end_may_follow() -> None:
    cursor = compiled(choice=WORDS).start((END,))
    assert [cursor.commit(token) for token in ids("bade")] == [False, False, False, True]
    assert text_of(cursor.allowed([()])[0]) == "~"
    # nothing follows, and a rule that looks at later places of a draft needs a distribution there
    assert written(compiled(choice=WORDS), "bade", ends=()).allowed([()]).all()
    number = compiled(json_schema={"type": "integer"}).start((END,))
    assert [number.commit(token) for token in ids("120")] == [False, False, False]


def test_after_an_end_nothing_is_asked_of_the_grammar() -> None:
    """A draft may go on after the end of a text (openvino.genai #4081 crashed there)."""
    cursor = written(compiled(choice=WORDS), "ab")
    assert cursor.allowed([(END,), (END, 3, 4)]).all()
    assert not cursor.commit(END)
    assert cursor.allowed([(), ids("abc")]).all()
    assert cursor.forced(5) == []
    assert cursor.problem == ""


def test_a_token_that_is_not_of_the_grammar_forbids_all_that_follow() -> None:
    """It fails closed: only a lossy rule can commit such a token."""
    cursor = written(compiled(choice=WORDS), "a!")
    assert not cursor.allowed([(), ids("b")]).any()
    assert "not of the grammar" in cursor.problem


def test_forced_tokens() -> None:
    grammar = compiled(json_schema={"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"],
                                    "additionalProperties": False})  # fmt: skip
    cursor = grammar.start(())
    assert cursor.forced(64) == list(ids('{"age":'))
    assert cursor.forced(2) == list(ids('{"'))
    assert cursor.forced(0) == []
    cursor.allowed([ids('{"'), ids('{"ag')])  # the cursor comes back from every path
    assert cursor.forced(64) == list(ids('{"age":'))


def test_json_is_compact() -> None:
    """With free space a model may write spaces without end (vLLM #38696, #55313)."""
    cursor = compiled(json_object=True).start(())
    assert text_of(cursor.allowed([()])[0]) == "{"
    assert text_of(cursor.allowed([ids("{")])[0]) == '}"'
    assert text_of(cursor.allowed([ids('{"a":')])[0]).find(" ") < 0
    spaced = compiled(json_schema={"type": "object", "x-guidance": {"whitespace_flexible": True}}).start(())
    assert " " in text_of(spaced.allowed([ids("{")])[0])


# ---- the way back

GRAMMARS = [
    ("choice", list(WORDS)),
    ("regex", "(ab|[0-9]{2,4})*(,j)?"),
    ("json_schema", {"type": "array", "items": {"enum": ["ab", "abc", 12, 120]}}),
    ("grammar", 'start: "[" start "]" | "ab" | /[0-9]/'),
]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(GRAMMARS), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10**6)), max_size=12))
def test_masks_do_not_depend_on_what_was_asked_before(given: tuple[str, Any], steps: list[tuple[int, int]]) -> None:
    """Commits, looks ahead along any paths and jumps to other texts: every mask is that of a fresh cursor."""
    grammar = compiled(**{given[0]: given[1]})
    cursor, text = grammar.start((END,)), list[int]()
    for kind, dice in steps:
        paths = [_path(grammar, text, dice + turn) for turn in range(3)]
        if kind == 0:
            cursor.allowed(paths)
        elif kind == 1:
            cursor.forced(dice % 5)
        elif kind == 2 and paths[0]:
            text.append(paths[0][0])
            assert cursor.commit(text[-1]) == _fresh(grammar, text)[1]
        elif kind == 3:
            text = [*text[: dice % (len(text) + 1)], *paths[1]]
            assert cursor.seek(text) == _fresh(grammar, text)[1]
    for path in [(), *paths] if steps else [()]:
        fresh, _ = _fresh(grammar, text)
        assert torch.equal(cursor.allowed([path]), fresh.allowed([path]))


def _path(grammar: Grammar, text: list[int], dice: int) -> tuple[int, ...]:
    """A path after the text: mostly of the grammar."""
    path: list[int] = []
    while dice and len(path) < 4:
        ways = _fresh(grammar, [*text, *path])[0].allowed([()])[0].nonzero().flatten().tolist() or [0]
        path.append(ways[dice % len(ways)] if dice % 7 else dice % VOCABULARY)
        dice //= 5
    return tuple(path)


def _fresh(grammar: Grammar, text: list[int]) -> tuple[GrammarCursor, bool]:
    cursor, complete = grammar.start((END,)), False
    for token in text:
        complete = cursor.commit(token)
    return cursor, complete


def test_sequences_do_not_share_a_matcher() -> None:
    """vLLM #11312: the choices of one request moved one matcher."""
    grammar = compiled(choice=WORDS)
    one, other = grammar.start(()), grammar.start(())
    one.commit(ids("b")[0])
    assert text_of(other.allowed([()])[0]) == "abj"
    other.commit(ids("j")[0])
    assert text_of(one.allowed([()])[0]) == "a"


def test_an_error_on_one_path_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matcher with an error stays so for ever, and a mask of llguidance would then allow the end of the text."""
    many = " | ".join(f"r{i}" for i in range(40))
    rules = "\n".join(f'r{i}: "c" /[0-9]{{{i + 1}}}/ "d" r{i} | "e"' for i in range(40))
    monkeypatch.setitem(token_grammar._LIMITS, "max_items_in_row", 60)
    cursor = compiled(grammar=f'start: "a" many | "b" "j"\nmany: {many}\n{rules}').start((END,))
    masks = cursor.allowed([ids("a"), (), ids("b"), ids("ac")])
    assert [text_of(mask) for mask in masks[1:3]] == ["ab", "j"]
    assert not masks[0].any()
    assert cursor.problem == ""
    assert not cursor.commit(ids("a")[0])
    assert not cursor.allowed([()]).any()
    assert "items" in cursor.problem


# ---- what is refused


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "", "no text but the empty one"),
        ("regex", 5, "regex must be a string, got 5"),
        ("regex", "\ud800", "half of a UTF-16 pair"),
        ("choice", [], "choice must be a list of texts"),
        ("choice", ["a", ""], "choice must be a list of texts"),
        ("grammar", "hello", "neither Lark"),
        ("grammar", "start: foo", "unknown name"),
        ("grammar", "root ::= " + "(" * 5000, "nested too deeply"),
        ("grammar", 'start: start "a"', "it allows no text"),
        ("json_schema", "{", "json_schema is not valid JSON"),
        ("json_schema", "[" * 100_000, "nested too deeply"),
        ("json_schema", 5, "json_schema must be a JSON object, got 5"),
        ("json_schema", False, "json_schema must be a JSON object, got False"),
        ("json_schema", {"type": object()}, "cannot be written as JSON"),
        ("json_schema", {"type": "foo"}, "Invalid type"),
        ("json_schema", {"not": {"type": "string"}}, "Unimplemented keys"),
        ("json_schema", {"type": "string", "format": "of-a-dream"}, "Unknown format"),
        ("json_schema", {"$ref": "#"}, "it allows no text"),
        ("json_schema", {"$ref": "http://example.com/schema"}, "json_schema cannot be used"),
    ],
)
def test_what_cannot_be_used_is_refused(name: str, value: Any, told: str) -> None:
    """A grammar that cannot be read is never ignored (llama.cpp #19051)."""
    with pytest.raises(InputError, match=told) as found:
        compiled(**{name: value})
    assert str(found.value).startswith(name)
    assert str(found.value).count("\n") == 0
    assert len(str(found.value)) < 400


def test_the_package_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match=r"regex needs .* pip install 'paceline\[grammar\]'"):
        compiled(regex="a")


def test_a_model_without_a_tokenizer_has_no_grammars() -> None:
    with pytest.raises(InputError, match="regex needs a tokenizer"):
        grammars_of(LanguageModel(llama())).compile("regex", "a")


def test_a_tokenizer_that_cannot_be_read_is_named() -> None:
    class Odd:
        def get_vocab(self) -> dict[str, int]:
            raise NotImplementedError("no list of tokens")

    compiler = token_grammar.GrammarCompiler(Odd(), VOCABULARY, "toy")
    with pytest.raises(UnsupportedError, match="regex cannot be used with the tokenizer of toy: no list of tokens"):
        compiler.compile("regex", "a")


def test_a_schema_may_be_a_mapping_a_text_or_a_model_of_pydantic() -> None:
    import pydantic

    class Point(pydantic.BaseModel):
        a: int
        b: bool

    for schema in (Point, Point.model_json_schema(), json.dumps(Point.model_json_schema())):
        assert compiled(json_schema=schema).start(()).forced(64) == list(ids('{"a":'))


def test_the_vocabulary_is_read_once() -> None:
    lm = LanguageModel(llama(), letters(ALPHABET), "toy")
    compiler = grammars_of(lm)
    compiler.compile("regex", "a")
    tokens = compiler._tokens
    grammars_of(lm).compile("regex", "b")
    assert grammars_of(lm)._tokens is tokens


# ---- hostile grammars


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


HOSTILE = {
    "nested schema": {"json_schema": nested(2000)},
    "a large enum": {"json_schema": {"enum": [f"value {i}" for i in range(8000)]}},
    "a huge enum": {"json_schema": {"enum": [f"value {i}" for i in range(300_000)]}},
    "many properties": {"json_schema": {"properties": {f"p{i}": {} for i in range(4000)}}},
    "many alternatives": {"json_schema": {"anyOf": [{"properties": {f"a{i}": {}}} for i in range(2500)]}},
    "a product of alternatives": {
        "json_schema": {"allOf": [{"anyOf": [{"required": [f"a{i}{j}"]} for i in range(6)]} for j in range(14)]}
    },
    "a cycle": {
        "json_schema": {"$defs": {f"a{i}": {"$ref": f"#/$defs/a{1 - i}"} for i in (0, 1)}, "$ref": "#/$defs/a0"}
    },
    "a large multiple": {"json_schema": {"type": "integer", "multipleOf": 982451653}},
    "many items": {"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}},
    "nested repetitions": {"regex": "((a{500}){500}){500}"},
    "an exponential automaton": {"regex": "(a|b)*a(a|b){40}"},
    "nested stars": {"regex": "((a*)*b*)*(a|b)*j"},
    "a large grammar": {"grammar": "start: " + " | ".join(f'"x{i}" start' for i in range(6000))},
    "an ambiguous grammar": {"grammar": 'start: start start start | "a" | "b" start'},
    "many choices": {"choice": [f"no choice {i}" for i in range(6000)]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_or_used_in_little_time(name: str) -> None:
    """Compiling, and every step of a text."""
    started = time.process_time()
    try:
        cursor = compiled(**HOSTILE[name]).start((END,))
    except InputError:
        assert time.process_time() - started < 5
        return
    for step in range(20):
        ways = cursor.allowed([()])[0].nonzero().flatten().tolist()
        if not ways or cursor.commit(ways[step % len(ways)]):
            break
    assert time.process_time() - started < 5


def references(count: int, root: str = "#/$defs/") -> dict[str, Any]:
    chain = {f"a{i}": {"type": "array", "items": {"$ref": f"{root}a{i + 1}"}} for i in range(count)}
    return {"$ref": f"{root}a0", "$defs": {**chain, f"a{count}": {"type": "integer"}}}


def rules(count: int, name: str = "a") -> str:
    lines = [f'{name}{i}: "b" {name}{i + 1} | "c"' for i in range(count)]
    return "\n".join([f"start: {name}0", *reversed(lines), f'{name}{count}: "j"'])


@pytest.mark.parametrize(
    "deep",
    [
        {"json_schema": references(2000)},
        {"json_schema": references(2000, "#a")},
        {"grammar": rules(2000)},
        {"grammar": rules(2000, "A")},
        {"grammar": rules(2000, "a-")},
        {"grammar": rules(2000).replace('"b" ', "/\n/ ").replace("|", '/"/ |')},
        {"grammar": "start: %lark {\n" + rules(2000) + "\n}"},
        {"grammar": "start: %json " + json.dumps(references(2000))},
        {"grammar": rules(2000).replace("start:", "root:").replace(":", " ::=")},
    ],
    ids=[
        "references",
        "anchors",
        "rules",
        "terminals",
        "names with a hyphen",
        "lines in a regex",
        "Lark in Lark",
        "a schema in Lark",
        "GBNF",
    ],
)
def test_a_chain_that_would_overflow_the_stack_is_refused(
    deep: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import llguidance

    def reached(*_: Any, **__: Any) -> None:
        raise AssertionError("llguidance must not see this grammar: it can end the process")

    for name in ("grammar_from_lark", "grammar_from_json_schema"):
        monkeypatch.setattr(llguidance.LLMatcher, name, reached)
    ((setting, _),) = deep.items()
    with pytest.raises(InputError, match=rf"^{setting} has a chain of .*, and the limit is 768; make it shorter"):
        compiled(**deep)


def test_chains_and_cycles_of_usual_lengths_are_used() -> None:
    tree = {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}
    assert text_of(written(compiled(json_schema=tree), "[[").allowed([()])[0]) == "[]"
    assert text_of(written(compiled(json_schema=references(200)), "[[").allowed([()])[0]) == "[]"
    assert text_of(written(compiled(grammar=rules(300)), "bb").allowed([()])[0]) == "bc"


def test_thousands_of_choices_are_possible() -> None:
    cursor = compiled(choice=[f"all {i}" for i in range(4096)]).start((END,))
    masks = cursor.allowed([ids("all 40"), ids("all 409"), ids("all 4095")])
    assert [text_of(mask) for mask in masks] == ["0123456789~", "012345~", "~"]


def test_the_length_is_limited() -> None:
    with pytest.raises(InputError, match="regex has 131,073 characters, and the limit is 131,072"):
        compiled(regex="a" * (LONGEST + 1))
