"""Distances of laws by kernels, interpreted on a CPU: what torch says, and its slope."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.training import distillation
from paceline.training.distillation import DistillationLoss

pytest.importorskip("triton")

from paceline.kernels.cuda import divergence

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return 4 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("V", [7, 64, 5000])
def test_log_sums(V: int) -> None:
    logits = draw(3, V + 3)
    logits[1, 2] = 90.0
    logits[2, :3] = float("-inf")
    assert torch.allclose(divergence.log_sums(logits[:, :V]), logits[:, :V].logsumexp(-1), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("V", [7, 5000])
@pytest.mark.parametrize("more", [0, 30])
@pytest.mark.parametrize("name", divergence.FAST)
def test_distances_and_slopes_are_those_of_torch(name: str, V: int, more: int) -> None:
    """Also where the teacher can say more than the student, and where rows lie apart in memory."""
    message, whole = draw(4, V + 1)[:, :V].requires_grad_(), draw(4, V + more, seed=1)
    whole[0, 3] = float("-inf")
    wanted = whole[:, :V]
    wanted_law = whole.softmax(-1)[:, :V]
    far = distillation.divergence(name, message, wanted_law, torch.zeros(4, dtype=torch.int64))
    found, slope = divergence.far(name, message.detach(), wanted, divergence.log_sums(whole))
    assert torch.allclose(found, far, rtol=1e-5, atol=1e-5)
    assert torch.allclose(slope, torch.autograd.grad(far.sum(), message)[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("name", ["kl", "tv", "tv@0.7", "kl@1.5"])
def test_what_learns_by_them_learns_the_same(name: str, some: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor([0, 3, 4, 9]) if some else None
    weight, states, last = draw(11, 6).requires_grad_(), draw(8, 6, seed=1).requires_grad_(), draw(8, 6, seed=2)
    teacher = draw(11, 6, seed=3)
    monkeypatch.setattr(distillation, "_CHUNK", 3)
    found = []
    for kernels in (None, divergence):
        monkeypatch.setattr(distillation, "_kernels", lambda device, kernels=kernels: kernels)
        measure = DistillationLoss(name, lambda each: each @ teacher.T, ids)
        for laws in (None, measure.teacher_logits(last)):
            say = lambda each: each @ (weight if ids is None else weight[ids]).T  # noqa: E731
            loss = measure(say, states, last, torch.zeros(8, dtype=torch.int64), laws, (weight,))
            found.append((loss.detach(), *torch.autograd.grad(loss, (weight, states))))
    for other in found[1:]:
        for one, another in zip(found[0], other, strict=True):
            assert torch.allclose(one, another, rtol=1e-4, atol=1e-5)
