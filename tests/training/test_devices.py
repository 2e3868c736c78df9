"""A step of training as it is on a device, found out without one.

What is made without saying where is on the CPU, and on a CUDA device that mixes with nothing. Here the CPU is the
device, and such tensors are made on "meta": code that uses one fails.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from paceline.training.corpus import Corpus
from paceline.training.distillation import LOSSES
from tests.training.toys import KINDS, in_sixteen_bits, own_texts, recipe_of, target

_READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique")


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = [each for each in args if isinstance(each, (list, tuple))]
        by_mask = "index" in str(func) and any(
            isinstance(one, torch.Tensor) and one.dtype == torch.bool for each in masks for one in each
        )
        if by_mask or any(name in str(func) for name in _READS):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Elsewhere(TorchDispatchMode):
    """Refuses tensors that were made without saying where."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_flatten((args, kwargs))[0]
        assert not any(isinstance(each, torch.Tensor) and each.is_meta for each in given), func
        return func(*args, **(kwargs or {}))


def test_what_is_made_elsewhere_is_found() -> None:
    here = torch.ones(3)
    with torch.device("meta"), Elsewhere():
        for act in (lambda: here + torch.ones(3), lambda: here[torch.arange(2)], lambda: torch.tensor(2.0) * here):
            with pytest.raises(AssertionError):
                act()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_is_made_elsewhere(kind: str, loss: str) -> None:
    recipe, corpus = in_sixteen_bits(kind, loss)
    batch = corpus.batch(0)
    with torch.device("meta"), Elsewhere(), torch.autocast("cpu", torch.bfloat16):
        batch = recipe.teacher.read(batch, recipe.taps)
        args = recipe(batch)
        predictions = recipe.predictions(batch)
    assert args.device == predictions.device == batch.last.device == torch.device("cpu")
    args.backward()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_host_reads_little(kind: str, loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many chunks there are: transformers' look at positions, the places to learn from (of a medusa once per
    head), where to begin (prophet), the largest token (of a loss of tokens); nothing in the backward pass."""
    monkeypatch.setattr("paceline.training.distillation._CHUNK", 16)
    lm = target()
    corpus = Corpus(own_texts(lm, 12), 64, 256, seed=1)
    recipe = recipe_of(kind, lm, corpus, loss)
    with Reads() as forward:
        args = recipe(recipe.teacher.read(corpus.batch(0), recipe.taps))
    with Reads() as backward:
        args.backward()
    assert len(forward.seen) <= (4 if kind == "medusa" else 3) + (recipe.depth if loss == "ce" else 0), forward.seen
    assert not backward.seen
