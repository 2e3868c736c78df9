"""A drafter remembers the rows of one batch. A second batch is refused while the first one runs; one after the other
works. The order of the threads is fixed by events."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from tests.selection import covering
from tests.toys import llama

from paceline import InputError, LanguageModel, SpeculativeDecoder
from paceline.drafters.resolve import make_drafter
from paceline.engine.loop import Loop
from paceline.rules.match import Match

PROMPT, OTHER = [1, 2, 3, 4, 2, 3], [5, 6, 7, 5, 6]
SETTINGS: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
REFUSED = (
    r"Drafter '{}' already drafts for another batch\. Make a second drafter object, or wait until that batch ends\."
)


@cache
def target() -> LanguageModel:
    return LanguageModel(llama(), name="small")


@cache
def plain(prompt: tuple[int, ...]) -> list[int]:
    return list(SpeculativeDecoder(target(), None).generate(list(prompt), **SETTINGS).tokens)


def _around(name: str) -> Callable[[Any], Any]:
    """A second drafter that holds the first one."""
    inner: dict[str, Callable[[Any], Any]] = {
        "portfolio": lambda drafter: ("portfolio", {"drafters": (drafter, "prompt-lookup")}),
        "auto": lambda drafter: ("auto", {"drafters": (drafter,)}),
        "staged": lambda drafter: ("staged", {"model": target(), "inner": drafter}),
    }
    return lambda drafter: make_drafter(inner[name](drafter))


OUTER: dict[str, Callable[[Any], Any]] = {"itself": lambda drafter: drafter} | {
    name: _around(name) for name in ("portfolio", "auto", "staged")
}
DRAFTERS = ["early-exit", "self-quantized", "prompt-lookup", "suffix"]


def _made(name: str) -> Any:
    return make_drafter((name, {}))


# ---- two threads


class _Held:
    """A batch in another thread, stopped between two rounds until the test lets it continue."""

    def __init__(self, decoder: SpeculativeDecoder, prompt: list[int]) -> None:
        self._inside, self._go = threading.Event(), threading.Event()
        self._calls = 0
        self.result: Any = None
        self._thread = threading.Thread(target=self._run, args=(decoder, prompt))
        self._thread.start()
        assert self._inside.wait(60)

    def _run(self, decoder: SpeculativeDecoder, prompt: list[int]) -> None:
        try:
            self.result = decoder.generate(prompt, cancel=self._between, **SETTINGS)
        finally:
            self._inside.set()

    def _between(self) -> bool:
        self._calls += 1
        if self._calls == 2:  # one round was made
            self._inside.set()
            assert self._go.wait(60)
        return False

    def finish(self) -> list[int]:
        self._go.set()
        self._thread.join(60)
        assert self.result is not None
        return list(self.result.tokens)


@pytest.mark.parametrize(("name", "outer"), covering(DRAFTERS, OUTER))
def test_a_second_batch_is_refused_while_one_runs(name: str, outer: str) -> None:
    drafter = _made(name)
    first = SpeculativeDecoder(target(), drafter, gamma=3)
    second = SpeculativeDecoder(target(), OUTER[outer](drafter), gamma=3)
    held = _Held(first, PROMPT)
    try:
        with pytest.raises(InputError, match=REFUSED.format(name)):
            second.generate(OTHER, **SETTINGS)
    finally:
        text = held.finish()
    assert text == plain(tuple(PROMPT))
    assert second.generate(OTHER, **SETTINGS).tokens == plain(tuple(OTHER))
    assert first.generate(PROMPT, **SETTINGS).tokens == plain(tuple(PROMPT))


@pytest.mark.parametrize("pair", [("portfolio", "auto"), ("staged", "portfolio"), ("staged", "staged")])
def test_two_outer_drafters_share_an_inner_one(pair: tuple[str, str]) -> None:
    drafter = _made("early-exit")
    first, second = (SpeculativeDecoder(target(), OUTER[each](drafter), gamma=3) for each in pair)
    held = _Held(first, PROMPT)
    try:
        with pytest.raises(InputError, match=REFUSED.format("early-exit")):
            second.generate(OTHER, **SETTINGS)
    finally:
        text = held.finish()
    assert text == plain(tuple(PROMPT))
    assert second.generate(OTHER, **SETTINGS).tokens == plain(tuple(OTHER))


def test_gamma_auto_holds_the_drafter_too() -> None:
    drafter = _made("early-exit")
    first, second = (SpeculativeDecoder(target(), drafter, gamma="auto") for _ in range(2))
    held = _Held(first, PROMPT)
    try:
        with pytest.raises(InputError, match=REFUSED.format("early-exit")):
            second.generate(OTHER, **SETTINGS)
    finally:
        assert held.finish() == plain(tuple(PROMPT))


def test_drafters_of_their_own_run_at_once() -> None:
    """So do two decoders without a draft."""
    for draft in ("early-exit", None):
        first, second = (SpeculativeDecoder(target(), draft, gamma=3) for _ in range(2))
        held = _Held(first, PROMPT)
        try:
            assert second.generate(OTHER, **SETTINGS).tokens == plain(tuple(OTHER))
        finally:
            assert held.finish() == plain(tuple(PROMPT))


# ---- one thread


@pytest.mark.parametrize("name", DRAFTERS)
def test_streams_that_overlap(name: str) -> None:
    drafter = _made(name)
    first, second = (SpeculativeDecoder(target(), drafter, gamma=3) for _ in range(2))
    stream = first.stream(PROMPT, **SETTINGS)
    tokens = [next(stream).token]
    late = second.stream(OTHER, **SETTINGS)  # nothing runs yet
    with pytest.raises(InputError, match=REFUSED.format(name)):
        next(late)
    tokens += [piece.token for piece in stream]
    assert tokens == plain(tuple(PROMPT))
    assert second.generate(OTHER, **SETTINGS).tokens == plain(tuple(OTHER))


@pytest.mark.parametrize("name", DRAFTERS)
def test_one_after_the_other(name: str) -> None:
    drafter = _made(name)
    decoders = [SpeculativeDecoder(target(), drafter, gamma=gamma) for gamma in (2, 4)]
    for _ in range(2):
        for decoder, prompt in zip(decoders, (PROMPT, OTHER), strict=True):
            assert decoder.generate(prompt, **SETTINGS).tokens == plain(tuple(prompt))


@pytest.mark.parametrize("how", ["closed", "dropped", "dropped in a cycle", "failed", "cancelled"])
def test_a_batch_that_does_not_end_gives_the_drafter_back(how: str) -> None:
    drafter = _made("early-exit")
    first, second = (SpeculativeDecoder(target(), drafter, gamma=3) for _ in range(2))
    if how == "failed":
        rounds = iter([False, False])
        with pytest.raises(RuntimeError):  # StopIteration inside a generator
            first.generate(PROMPT, cancel=lambda: next(rounds), **SETTINGS)
    elif how == "cancelled":
        first.generate(PROMPT, cancel=lambda: True, **SETTINGS)
    else:
        stream: Any = first.stream(PROMPT, **SETTINGS)
        next(stream)
        gc.disable()
        try:
            if how == "closed":
                stream.close()
            elif how == "dropped in a cycle":
                stream.me = stream
            del stream
            assert second.generate(OTHER, **SETTINGS).tokens == plain(tuple(OTHER))
        finally:
            gc.enable()
    assert second.generate(OTHER, **SETTINGS).tokens == plain(tuple(OTHER))
    assert first.generate(PROMPT, **SETTINGS).tokens == plain(tuple(PROMPT))


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_drafter_is_another_drafter(make: Callable[[Any], Any]) -> None:
    drafter = _made("prompt-lookup")
    stream = SpeculativeDecoder(target(), drafter).stream(PROMPT, **SETTINGS)
    next(stream)
    other = SpeculativeDecoder(target(), make(drafter))
    stream.close()
    assert other.generate(OTHER, **SETTINGS).tokens == plain(tuple(OTHER))


def test_a_refusal_takes_nothing() -> None:
    """Of an outer drafter whose inner one is busy, the others stay free."""
    busy, free = _made("early-exit"), _made("suffix")
    stream = SpeculativeDecoder(target(), busy).stream(PROMPT, **SETTINGS)
    next(stream)
    both = SpeculativeDecoder(target(), make_drafter(("portfolio", {"drafters": (free, busy)})))
    with pytest.raises(InputError, match=REFUSED.format("early-exit")):
        both.generate(OTHER, **SETTINGS)
    assert SpeculativeDecoder(target(), free).generate(OTHER, **SETTINGS).tokens == plain(tuple(OTHER))
    stream.close()
    assert both.generate(OTHER, **SETTINGS).tokens == plain(tuple(OTHER))


@pytest.mark.parametrize("outer", ["portfolio", "auto", "staged"])
def test_a_loop_knows_that_another_has_opened_its_drafter(outer: str) -> None:
    """Also where one of them holds the drafter inside another."""
    drafter = _made("prompt-lookup")

    def loop(draft: Any) -> Loop:
        return Loop(target(), draft, Match(), 3, 8)

    alone = loop(drafter)
    assert alone.owns_drafter
    inside = loop(OUTER[outer](drafter))
    assert inside.owns_drafter
    assert not alone.owns_drafter
    again = loop(drafter)
    assert again.owns_drafter
    assert not inside.owns_drafter
