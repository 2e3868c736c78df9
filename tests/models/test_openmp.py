"""Torch's threads rest during a round that kernels read, and only those of the thread that decodes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from tests.kernels.zoo import small

from paceline import SpeculativeDecoder
from paceline.models.cpu import threads as openmp
from paceline.models.cpu.cpu_forward import kernels_missing
from paceline.models.reader import SlotReader, TransformersExecutor

pytestmark = pytest.mark.skipif(openmp.found() is None, reason="torch's OpenMP is not found here")


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_rest_and_work_are_undone_at_the_end_of_a_round() -> None:
    with openmp.own_threads():
        assert torch.get_num_threads() == 3
        openmp.rest()
        assert torch.get_num_threads() == 1
        assert openmp.usual_threads() == 3
        openmp.work()
        assert torch.get_num_threads() == 3
        openmp.rest()
    assert torch.get_num_threads() == openmp.usual_threads() == 3


def test_outside_of_a_round_nothing_is_changed() -> None:
    openmp.rest()
    assert torch.get_num_threads() == 3


def test_a_round_inside_a_round_ends_with_the_outer_one() -> None:
    with openmp.own_threads():
        with openmp.own_threads():
            openmp.rest()
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


def test_an_error_inside_a_round_changes_nothing() -> None:
    @openmp.own_threads()
    def round_that_fails() -> None:
        openmp.rest()
        raise KeyError

    with pytest.raises(KeyError):
        round_that_fails()
    assert torch.get_num_threads() == 3


def test_other_threads_keep_theirs() -> None:
    seen: list[int] = []
    with openmp.own_threads():
        openmp.rest()
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert torch.get_num_threads() == 1
    assert seen == [3]


@pytest.mark.skipif(kernels_missing() is not None, reason="no kernels here")
@pytest.mark.parametrize("runner", ["kernels", "eager"])
def test_while_a_text_is_written(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They rest after every pass by kernels. transformers' passes and the caller of a stream have them."""
    after: list[int] = []
    extend, run = SlotReader.extend, TransformersExecutor.run

    def watched(self: SlotReader, *given: object) -> object:
        reading = extend(self, *given)  # type: ignore[arg-type]
        after.append(torch.get_num_threads())
        return reading

    def at_work(self: TransformersExecutor, *given: object) -> object:
        assert torch.get_num_threads() == 3
        return run(self, *given)  # type: ignore[arg-type]

    decoder = SpeculativeDecoder(small("llama"), "self-quantized", runner=runner)
    decoder.generate([3], max_new_tokens=2)  # by now it is known how many threads are fastest
    monkeypatch.setattr(SlotReader, "extend", watched)
    monkeypatch.setattr(TransformersExecutor, "run", at_work)
    for _ in decoder.stream([3, 9, 27, 4, 11], max_new_tokens=8, ignore_eos=True):
        assert torch.get_num_threads() == 3
    assert len(after) > 2
    assert set(after) == ({1} if runner == "kernels" else {3})
