"""Every option of everything that has options takes odd values with one sentence, at once."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest

from paceline import DRAFTERS, RULES, InputError, LanguageModel, SpeculativeDecoder, UnknownNameError
from paceline.bench.bench_options import BenchOptions, TuneOptions
from paceline.bench.candidate import parse_run_spec
from paceline.common.errors import PacelineError, shown
from paceline.common.limits import LARGEST, Limited, limited, plain_types
from paceline.common.options import convert_options
from paceline.common.registry import build_options
from paceline.drafters.resolve import make_drafter
from paceline.training.recipes.base import RECIPES
from paceline.training.train_options import CountingOptions, PairSizes, TrainOptions, WritingPlan
from tests.toys import letters, llama

NUMBERS = (10**10, 10**13, 2**63 - 1, -(2**63), 10**30, 10**400, 10**5000, -(10**5000), float("nan"), float("inf"),
           1e308, True, "3", "x" * 10**5, [1], {"a": 1}, None, b"3", 1j)  # fmt: skip
WORDS = ("x" * 10**5, "\0", "a\nb", 5, ["a"], {}, None, True, float("nan"), b"auto", ("a", "b"))
OPTIONS: dict[str, Any] = {
    **{f"drafter {name}": DRAFTERS[name].Options for name in DRAFTERS},
    **{f"rule {name}": RULES[name].Options for name in RULES},
    **{f"course {name}": RECIPES[name].Options for name in RECIPES},
    "pair": PairSizes, "counting": CountingOptions, "writing": WritingPlan, "tune": TuneOptions, "bench": BenchOptions,
    "train": TrainOptions,
}  # fmt: skip


def one_sentence(error: BaseException) -> None:
    text = str(error)
    assert len(text) < 800, text[:300]
    assert "\n" not in text


@pytest.mark.parametrize("owner", OPTIONS)
def test_every_number_and_name(owner: str) -> None:
    """A value is taken, or refused by InputError: nothing else is raised, and nothing is computed with it yet."""
    cls = OPTIONS[owner]
    needed = {"out": "x"} if owner == "train" else {}
    for field in dataclasses.fields(cls):
        wanted = plain_types(field.type)
        for value in NUMBERS if {"int", "float"} & set(wanted) else WORDS:
            for make in (lambda given: build_options(cls, given, owner), lambda given: cls(**given)):
                try:
                    made = make({**needed, field.name: value})
                except InputError as error:
                    one_sentence(error)
                    continue
                except TypeError:
                    # types that are not plain are the business of the class, and only `build_options` is for users
                    assert not wanted, (owner, field.name, value)
                    continue
                kept = getattr(made, field.name)
                if isinstance(kept, int) and not isinstance(kept, bool) and field.name != "seed":
                    assert abs(kept) <= max(LARGEST, 10**12), (owner, field.name, value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"gamma": 2**63 - 1}, "gamma must be at most 4,096, got 9223372036854775807."),
        ({"nodes": 10**13}, "nodes must be at most 4,096, got 10000000000000."),
        ({"rows": 10**12}, "rows must be at most 65,536, got 1000000000000."),
        ({"draft": "ngram", "options": {"order": 10**10}}, "order must be at most 64, got 10000000000."),
        ({"draft": "ngram", "options": {"order": 10**5000}}, "order must be at most 64, got a number of thousands"),
        ({"draft": "recycling", "options": {"shape": "999x999x999"}}, "A tree shape has at most 4,096 nodes"),
        ({"draft": "prompt-lookup", "options": {"branches": 10**9}}, "branches must be at most 256"),
        ({"runner": ["a"]}, "Unknown runner ['a']."),
        ({"quantize": {"a": 1}}, "Unknown kind of quantization {'a': 1}."),
        ({"rule": ["a"]}, "Unknown rule ['a']."),
        ({"rule": 5}, "Unknown rule 5."),
        ({"draft": '{"name": ' + "[" * 10**5}, "A drafter given as JSON must be valid JSON: it is nested too deep"),
        ({"draft": "x" * 10**6}, "'xxxxx"),
        ({"draft": "~nobody-of-this-name/x"}, ""),
        ({"draft": "a/" + "b" * 10**5}, ""),
        ({"draft": "a\0b"}, ""),
        ({"draft": ["a"]}, "A model is a name"),
        ({"draft": "ngram", "options": {"store": "x" * 5000}}, ""),
        ({"draft": "trigram", "options": {"file": "x" * 4000}}, ""),
        ({"draft": "eagle", "options": {"head": "x" * 4000}}, ""),
        ({"draft": "eagle", "options": {"head": 5}}, ""),
    ],
    ids=lambda value: shown(value)[:50],
)  # fmt: skip
def test_a_decoder(given: dict[str, Any], told: str) -> None:
    with pytest.raises(PacelineError) as error:
        SpeculativeDecoder(LanguageModel(llama(), letters(), "toy"), **given)
    one_sentence(error.value)
    assert str(error.value).startswith(told)


def test_names_of_unusual_lengths_get_no_hint_and_no_wait() -> None:
    for name in ("x" * 10**6, 5, None, ["a"], b"ngram"):
        assert name not in DRAFTERS
        with pytest.raises(UnknownNameError) as error:
            DRAFTERS[name]  # type: ignore[index]
        one_sentence(error.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ngram:order=" + "9" * 5000, "order must be a whole number"),
        ("ngram:order=99999999999", "order must be at most 64"),
        ('{"name": ' + "[" * 10**5, "A run given as JSON must be valid JSON: it is nested too deep"),
        ('{"name": "portfolio", "drafters": ' + "[" * 10**5 + "}", "A run given as JSON must be valid JSON"),
        ("portfolio:drafters=" + "[" * 10**5, ""),
    ],
    ids=lambda value: shown(value)[:40],
)
def test_a_run_of_a_benchmark(text: str, told: str) -> None:
    with pytest.raises(InputError) as error:
        parse_run_spec(text)
    assert str(error.value).startswith(told)


def test_limits_are_declared_once() -> None:
    @dataclasses.dataclass(frozen=True)
    class Options(Limited):
        count: int = limited(3, 1, 5)
        share: float = limited(0.5, above=0, most=1)
        loose: int = 0
        word: str = ""

    @dataclasses.dataclass(frozen=True)
    class Foreign:
        count: int = 3

    assert Options(5, 1.0).count == 5
    for given, told in [
        ({"count": 0}, "count must be at least 1, got 0."),
        ({"count": 6}, "count must be at most 5, got 6."),
        ({"count": 2.0}, "count must be a whole number, got 2.0."),
        ({"share": 0.0}, "share must be more than 0, got 0.0."),
        ({"share": 1.5}, "share must be at most 1, got 1.5."),
        ({"loose": 2**31}, "loose must be at most 2,147,483,647, got 2147483648."),
        ({"loose": -(2**31)}, "loose must be at least -2,147,483,647, got -2147483648."),
        ({"word": "a" * 4097}, "word must have at most 4,096 characters, got 4,097."),
    ]:
        with pytest.raises(InputError) as error:
            Options(**given)
        assert str(error.value) == told
    with pytest.raises(InputError, match=r"count must be at most 2,147,483,647"):
        build_options(Foreign, {"count": 2**40}, "drafter 'foreign'")
    with pytest.raises(InputError, match=r"--x\.count must be a whole number, got '9999.*…"):
        convert_options({"count": "9" * 5000}, Foreign, "x", "foreign")


def test_drafters_of_drafters_have_the_same_limits() -> None:
    with pytest.raises(InputError, match="order must be at most 64"):
        make_drafter({"name": "portfolio", "drafters": [("ngram", {"order": 10**10})]})


# ---- what a decoder is asked


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(LanguageModel(llama(), letters(), "toy"), None)


@pytest.mark.parametrize("name", ["max_new_tokens", "logprobs", "num_beams", "num_return_sequences", "top_k", "seed",
                                  "min_new_tokens", "temperature", "top_p", "noise", "length_penalty", "stop",
                                  "eos_token_ids", "banned_tokens", "logit_bias", "prediction",
                                  "early_stopping", "json_schema", "json_object", "regex", "grammar", "choice",
                                  "constraint"])  # fmt: skip
def test_every_setting(decoder: SpeculativeDecoder, name: str) -> None:
    for value in (*NUMBERS, *WORDS):
        if value is None:
            continue
        try:
            decoder.generate("abc", **{"max_new_tokens": 2, "ignore_eos": True, name: value})
        except PacelineError as error:
            one_sentence(error)


@pytest.mark.parametrize("bias", [{1: float("nan")}, {1: float("inf")}, {1: 10**400}, {"a": 1}])
def test_biases(decoder: SpeculativeDecoder, bias: Any) -> None:
    with pytest.raises(InputError, match="logit_bias must map token ids to numbers"):
        decoder.generate("abc", logit_bias=bias)


def test_an_empty_batch_gives_an_empty_list(decoder: SpeculativeDecoder) -> None:
    assert decoder.generate([]) == []
    assert decoder.generate((), max_new_tokens=3, num_beams=2, length_penalty=1.0) == []
    assert decoder.stream([]).results == []
    with pytest.raises(UnknownNameError):
        decoder.generate([], max_tokns=3)


def test_an_event_cancels(decoder: SpeculativeDecoder) -> None:
    event = threading.Event()
    assert decoder.generate("abc", max_new_tokens=3, cancel=event).finish_reason == "length"
    event.set()
    assert decoder.generate("abc", max_new_tokens=3, cancel=event).finish_reason == "cancelled"
    assert decoder.stream("abc", max_new_tokens=3, cancel=event).results[0].finish_reason == "cancelled"
    with pytest.raises(InputError, match=r"cancel must be a callable without arguments or a threading\.Event, got 5"):
        decoder.generate("abc", cancel=5)  # type: ignore[arg-type]
