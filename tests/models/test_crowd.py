"""Fewer threads while cores are taken away, all of them again when they are not."""

from __future__ import annotations

import pytest
from tests.kernels.zoo import small

from paceline import SpeculativeDecoder
from paceline.models.cpu import cpu_forward as kernel_pass
from paceline.models.cpu.cpu_forward import kernels_missing
from paceline.models.cpu.threads import ThreadGovernor


def passes(mixed: ThreadGovernor, count: int, lost: float, most: int = 2, seconds: float = 0.02) -> list[int]:
    """A number of passes in which, on more than one thread, a share of the time was lost; the threads each ran on."""
    ran = []
    for _ in range(count):
        threads = mixed.threads(most)
        ran.append(threads)
        mixed.see(threads, seconds, lost * seconds if threads > 1 else 0.0)
    return ran


def test_quiet_passes_keep_all_threads() -> None:
    assert set(passes(ThreadGovernor(), 500, lost=0.05)) == {2}


def test_one_long_wait_is_enough() -> None:
    mixed = ThreadGovernor()
    passes(mixed, 10, lost=0.0)
    mixed.see(2, 0.4, 0.38)
    assert mixed.threads(2) == 1


def test_less_than_a_wake_up_does_not_count() -> None:
    assert set(passes(ThreadGovernor(), 500, lost=0.9, seconds=0.001)) == {2}


def test_under_load_nearly_all_passes_run_alone_and_ever_fewer_are_tried() -> None:
    ran = passes(ThreadGovernor(), 4000, lost=0.8)
    tried = [i for i, threads in enumerate(ran) if threads == 2]
    assert len(tried) < 20
    assert tried[-1] - tried[-2] > 900


def test_when_the_load_ends_all_threads_come_back_and_a_new_load_finds_short_pauses() -> None:
    mixed = ThreadGovernor()
    passes(mixed, 300, lost=0.8)
    back = passes(mixed, 2000, lost=0.0)
    assert back[-1] == 2
    assert back.index(2) < 600
    again = passes(mixed, 100, lost=0.8)
    assert again.count(2) > 1  # tried again within a hundred passes


def test_of_many_threads_as_many_as_needed_are_given_up() -> None:
    mixed = ThreadGovernor()
    assert passes(mixed, 3, lost=0.8, most=8)[-1] < 8
    passes(mixed, 30, lost=0.8, most=8)
    assert mixed.threads(8) == 1
    assert mixed.threads(2) == 1


def test_whoever_measures_gets_the_threads_that_were_asked_for() -> None:
    mixed = ThreadGovernor()
    passes(mixed, 8, lost=0.8)
    with mixed.ignored():
        assert mixed.threads(2) == 2
        mixed.see(2, 1.0, 1.0)
    assert mixed.threads(2) == 1


@pytest.mark.skipif(kernels_missing() is not None, reason="no kernels here")
def test_the_text_does_not_depend_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_pass, "threads_here", lambda lm: 3)
    ran: list[int] = []

    class Fickle(ThreadGovernor):
        def threads(self, most: int) -> int:
            ran.append(1 + len(ran) % most)
            return ran[-1]

    target = small("llama")
    settings = {"max_new_tokens": 40, "ignore_eos": True, "logprobs": 1}
    wanted = SpeculativeDecoder(target, draft=None).generate([3, 9, 27], **settings)
    monkeypatch.setattr(kernel_pass.THREADS, "governor", Fickle())
    found = SpeculativeDecoder(target, draft=None).generate([3, 9, 27], **settings)
    assert set(ran) == {1, 2, 3}
    assert found.tokens == wanted.tokens
    assert found.logprobs == wanted.logprobs
