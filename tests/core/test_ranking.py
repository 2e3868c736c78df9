"""The best of very many scores: bit for bit what sorting all of them gives, in every batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.core import law, ranking
from paceline.core.law import SamplingBatch
from paceline.core.ranking import best, first_best, nucleus, top
from paceline.core.sampling import Sampling

WIDTHS = (37, 1000, 4096, 50257)


def scores(width: int, spread: float, ties: bool, seed: int = 0) -> Tensor:
    found = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(seed)) * spread
    return (found * 4).round() / 4 if ties else found


def sorted_law(batch: SamplingBatch, logits: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch:
        for room in (law, ranking):
            patch.setattr(room, "on_host", lambda some: False)
        return batch.law(logits, None, None).dense(logits.shape[-1])


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_nucleus_is_that_of_the_sorted_vocabulary(
    width: int, spread: float, ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = scores(width, spread, ties)
    for other in ({"temperature": 0.0}, {"temperature": 1.3, "top_p": 0.5}, {"temperature": 0.7}):
        rows = [Sampling(temperature=0.8, top_p=0.9), Sampling(**other)]  # type: ignore[arg-type]
        found = SamplingBatch(rows, [(), ()], "cpu").law(logits, None, None).dense(width)
        for r, row in enumerate(rows):
            alone = sorted_law(SamplingBatch([row], [()], "cpu"), logits[r : r + 1], monkeypatch)
            assert torch.equal(found[r : r + 1], alone)


def test_a_place_has_its_law_whoever_else_is_in_the_batch() -> None:
    logits = scores(4096, 3.0, False)
    flat = torch.zeros(1, 1, 4096)  # its law has thousands of tokens
    alone = nucleus(logits[:1, :1], [0.9], [False])
    among = nucleus(torch.cat([logits[:1, :1], flat], 1), [0.9], [False])
    count = alone[0].shape[-1]
    assert among[0].shape[-1] > 3000
    assert torch.equal(among[0][:, :1, :count], alone[0])
    assert torch.equal(among[1][:, :1, :count], alone[1])
    assert len(set(among[1][0, 0].tolist())) == among[1].shape[-1]  # tokens without weight, none of them twice


def test_what_is_no_number_is_noticed() -> None:
    batch = SamplingBatch([Sampling(temperature=0.8, top_p=0.9)], [()], "cpu")
    for bad in (float("nan"), float("inf")):
        logits = scores(1000, 3.0, False)[:1]
        logits[0, 2, 7] = bad
        weights = batch.law(logits, None, None).weights
        assert weights[0, 2].isnan().any()
        assert not weights[0, [0, 1, 3, 4]].isnan().any()


@pytest.mark.parametrize("k", [1, 8, 50])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_k_best_are_those_of_a_sort(width: int, k: int) -> None:
    for ties in (False, True):
        some = scores(width, 3.0, ties)
        ranked = some.sort(dim=-1, descending=True, stable=True)
        values, ids = best(some, min(k, width))
        assert torch.equal(values, ranked.values[..., :k])
        assert torch.equal(ids, ranked.indices[..., :k])
        values, ids = top(some, min(k, width))
        assert torch.equal(values, ranked.values[..., :k])
        assert torch.equal(some.gather(-1, ids), values)
        assert all(len(set(line)) == len(line) for line in ids.flatten(0, 1).tolist())


def test_nan_comes_before_everything() -> None:
    some = scores(50257, 3.0, True)
    some[1, 2, 4000] = float("nan")
    assert best(some, 5)[1][1, 2, 0] == 4000
    assert top(some, 5)[0][1, 2, 0].isnan()
    assert first_best(some)[1, 2] == 4000


def test_the_first_of_equals_is_the_best() -> None:
    for ties in (False, True):
        some = scores(4096, 1.0, ties)
        assert torch.equal(first_best(some), some.max(-1).indices)
        assert torch.equal(first_best(some.half()), some.half().argmax(-1))
    assert first_best(torch.zeros(1, 1, 9)).item() == 0
