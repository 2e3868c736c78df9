"""Models may be shared, decoders are used one text at a time: others wait, and no thread waits for itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache

import pytest

from paceline import InputError, LanguageModel, SpeculativeDecoder
from tests.toys import llama, naive

PROMPTS = [[1, 7, 9, 4, 7, 9, 4, 7], [3, 3, 8], [6], [13, 2]]


@cache
def lm(seed: int = 0) -> LanguageModel:
    return LanguageModel(llama(seed))


def together(*jobs: Callable[[], object]) -> list[object]:
    """Run all at the same time; an exception in one is an exception here."""
    results: dict[int, object] = {}
    failures: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def run(index: int) -> None:
        try:
            start.wait(10)
            results[index] = jobs[index]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]
    return [results[index] for index in range(len(jobs))]


def many(decoder: SpeculativeDecoder, prompt: list[int]) -> Callable[[], object]:
    return lambda: [decoder.generate(prompt, max_new_tokens=15).tokens for _ in range(6)]


def test_two_decoders_may_share_one_model() -> None:
    """Trap 16: a LanguageModel holds no text, so two threads decode with it and feel nothing of each other."""
    decoders = [SpeculativeDecoder(lm(), lm(1), gamma=3), SpeculativeDecoder(lm(), lm(1), gamma=5)]
    got = together(*(many(decoder, prompt) for decoder, prompt in zip(decoders, PROMPTS, strict=False)))
    for texts, prompt in zip(got, PROMPTS, strict=False):
        assert texts == [naive(lm().model, prompt, 15)] * 6


def test_one_decoder_in_many_threads_takes_turns() -> None:
    """Trap 16: a drafter remembers its rows; the second thread waits for its turn and gets its own text."""
    decoder = SpeculativeDecoder(lm(), lm(1), gamma=3)
    got = together(*(many(decoder, prompt) for prompt in PROMPTS))
    for texts, prompt in zip(got, PROMPTS, strict=True):
        assert texts == [naive(lm().model, prompt, 15)] * 6


def test_another_thread_waits_until_a_stream_ends() -> None:
    """Trap 16: it neither fails nor mixes in, and begins when the stream is closed."""
    decoder = SpeculativeDecoder(lm(), "prompt-lookup", gamma=3)
    stream = decoder.stream(PROMPTS[0], max_new_tokens=40)
    first = next(stream).token
    done = threading.Event()
    texts: list[list[int]] = []

    def other() -> None:
        texts.append(decoder.generate(PROMPTS[1], max_new_tokens=9).tokens)
        done.set()

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    assert not done.wait(0.2)
    rest = [piece.token for piece in stream]
    assert done.wait(20)
    assert [first, *rest] == naive(lm().model, PROMPTS[0], 40)
    assert texts == [naive(lm().model, PROMPTS[1], 9)]


def test_a_second_text_inside_a_stream_is_refused_and_the_stream_goes_on() -> None:
    """Trap 16: the same thread would wait for itself for ever; an error says so instead."""
    decoder = SpeculativeDecoder(lm(), "prompt-lookup", gamma=3)
    stream = decoder.stream(PROMPTS[0], max_new_tokens=20)
    tokens = [next(stream).token]
    with pytest.raises(InputError, match="still streaming in this thread"):
        decoder.generate(PROMPTS[1], max_new_tokens=3)
    with pytest.raises(InputError, match="still streaming in this thread"):
        next(decoder.stream(PROMPTS[1], max_new_tokens=3))
    tokens += [piece.token for piece in stream]
    assert tokens == naive(lm().model, PROMPTS[0], 20)
    assert decoder.generate(PROMPTS[1], max_new_tokens=3).tokens == naive(lm().model, PROMPTS[1], 3)


def test_a_failure_frees_the_decoder_for_everybody() -> None:
    """Trap 19: an exception in one thread leaves no lock behind."""
    decoder = SpeculativeDecoder(lm(), draft=None)

    def fails() -> None:
        with pytest.raises(ZeroDivisionError):
            decoder.generate([1], processors=[lambda prefix, logits: logits / (1 // 0)])

    together(fails, fails, many(decoder, PROMPTS[2]))
    assert decoder.generate(PROMPTS[1], max_new_tokens=3).tokens == naive(lm().model, PROMPTS[1], 3)


def test_a_criterion_that_raises_twice_leaves_the_decoder_free() -> None:
    """A deadline that raises while beams run raises again when the search is given up; the lock was kept for ever."""
    asked = 0

    def late(ids: list[int]) -> bool:
        nonlocal asked
        asked += 1
        if asked > 12:
            raise TimeoutError
        return False

    decoder = SpeculativeDecoder(llama(), "prompt-lookup")
    with pytest.raises(TimeoutError):
        decoder.generate([1, 2, 3], max_new_tokens=20, criteria=[late], num_beams=3)
    assert len(decoder.generate([1, 2, 3], max_new_tokens=5).tokens) == 5
