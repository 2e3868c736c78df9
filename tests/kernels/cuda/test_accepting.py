"""The ratio test by kernels, interpreted on a CPU: with the same seeds the verdicts of `ratio`, token for token."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.selection import covering
from torch import Tensor

from paceline.core.choice import Choice, NoiseTable
from paceline.core.contracts import RULES
from paceline.core.device_ops import TORCH, DeviceOps
from paceline.core.law import LazyLaws
from paceline.core.noise import Purpose
from paceline.core.noise import uniform as uniforms
from paceline.core.sampling import Sampling, SamplingBatch
from paceline.core.tree import TokenTree
from paceline.core.verdict import BROKEN, NOTHING, Verdict
from paceline.models.cuda.cuda_ops import CudaOps
from paceline.rules.ratio import Ratio

pytest.importorskip("triton")

import triton
import triton.language as tl

from paceline.kernels.cuda import accepting, choosing
from paceline.kernels.cuda.accepting import judge, weigh
from paceline.kernels.cuda.choosing import uniform

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")
NEVER, NAN = float("-inf"), float("nan")


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def a_choice(heats: list[float], N: int, seed: int, ops: DeviceOps | None = None) -> Choice:
    rows = [Sampling(temperature=temperatures, seed=seed * 100 + i) for i, temperatures in enumerate(heats)]
    batch = SamplingBatch(rows, [()] * len(rows), "cpu", ops or CudaOps())
    length = torch.arange(len(heats))[:, None] * 1000 + seed
    return Choice(batch, NoiseTable(batch, length, N + 1), slice(0, N + 1))


def a_draft(choice: Choice, logits: Tensor) -> TokenTree:
    """A chain drawn from logits [R,N,V] as a drafter draws it."""
    places = [Choice(choice.batch, choice.table, slice(i, i + 1)) for i in range(logits.shape[1])]
    drawn = [place.guess(logits[:, i : i + 1], "independent") for i, place in enumerate(places)]
    tokens, laws = torch.cat([token for token, _ in drawn], 1), [law for _, law in drawn if law is not None]
    if not laws:
        return TokenTree(tokens)
    return TokenTree(tokens, drawn="iid", laws=torch.cat([law.dense(logits.shape[-1]) for law in laws], 1))


def same(one: Verdict, other: Verdict) -> bool:
    assert one.path is other.path is None
    return torch.equal(one.emitted, other.emitted) and torch.equal(one.accepted, other.accepted)


def fused(tree: TokenTree, logits: Tensor, choice: Choice) -> Verdict | None:
    return choice.batch.ops.ratio(choice, tree, logits)


def both(tree: TokenTree, logits: Tensor, choice: Choice, monkeypatch: pytest.MonkeyPatch) -> tuple[Verdict, Verdict]:
    """By the kernels, and by the laws."""
    quick = fused(tree, logits, choice)
    assert quick is not None
    with monkeypatch.context() as patch:
        patch.setattr(choice.batch, "ops", TORCH)
        return quick, Ratio().verify(tree, logits, choice)


HEATS = [[0.7], [1.0, 0.0, 0.3, 1.9], [0.0, 0.0]]


def alike(target: Tensor, other: Tensor) -> Tensor:
    return target + 0.5 * other


def equal(target: Tensor, other: Tensor) -> Tensor:
    return target.clone()


def apart(target: Tensor, other: Tensor) -> Tensor:
    """What the one can say, the other cannot."""
    half = target.shape[-1] // 2
    target[..., :half] = NEVER
    other[..., half:] = NEVER
    return other


def tied(target: Tensor, other: Tensor) -> Tensor:
    target.round_()
    return (target + other).round()


def holed(target: Tensor, other: Tensor) -> Tensor:
    other[target > 1.5] = NEVER
    target[target < -1] = NEVER
    return other


def broken(target: Tensor, other: Tensor) -> Tensor:
    """NaN and nothing at all, on either side."""
    drafted = alike(target, other)
    drafted[0, -1, 2], drafted[-1, 0] = NAN, NEVER
    if target.shape[1] > 2:
        target[0, 1], target[-1, 2] = NEVER, NAN
    return drafted


@pytest.mark.parametrize(
    ("drafted", "sizes", "heats"),
    covering(
        [alike, equal, apart, tied, holed, broken],
        [(5, 16, (2, 8)), (37, 16, (1, 3, 5)), (2100, 2048, (2,))],
        HEATS,
    ),
)
def test_verdicts_are_those_of_the_rule(
    heats: list[float], sizes: tuple[int, int, Any], drafted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    V, chunk, lengths = sizes
    monkeypatch.setattr(accepting, "_CHUNK", chunk)
    monkeypatch.setattr(choosing, "_CHUNK", chunk)
    R, taken, rejected = len(heats), 0, 0
    for seed, N in enumerate(lengths):
        choice = a_choice(heats, N, seed)
        target, other = 2 * draw(R, N + 1, V, seed=seed), 2 * draw(R, N, V, seed=seed + 99)
        tree = a_draft(choice, drafted(target[:, :N], other))
        if seed % 2:
            tree = replace(tree, count=(N - torch.arange(R)) % (N + 1))
        quick, slow = both(tree, target, choice, monkeypatch)
        assert same(quick, slow), (N, tree, quick, slow)
        taken += int(quick.accepted.sum())
        rejected += int((quick.accepted.flatten() < (N if tree.count is None else tree.count)).sum())
    assert taken or drafted is not equal
    assert rejected or drafted is not apart


@pytest.mark.parametrize(("heats", "N"), covering(HEATS, [0, 1, 4]))
def test_point_masses_and_no_draft_at_all(heats: list[float], N: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        choice, target = a_choice(heats, N, seed), 2 * draw(len(heats), N + 1, 2050, seed=seed)
        tokens = target[:, :N].topk(3, -1).indices[..., seed]
        assert same(*both(TokenTree(tokens), target, choice, monkeypatch))
        target[0, 0] = NAN
        quick, slow = both(TokenTree(tokens), target, choice, monkeypatch)
        assert same(quick, slow)
        assert quick.emitted[0].tolist() == [BROKEN] + [NOTHING] * N


def test_half_precision_and_logits_inside_a_larger_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, wide = a_choice([0.8, 0.0, 1.2], 3, 5), 2 * draw(3, 5, 96, seed=5).half()
    target = wide[:, :4, :90]
    tree = a_draft(choice, (wide[:, 1:4, 1:91].float() + target[:, :3]).half())
    assert same(*both(tree, target, choice, monkeypatch))


def test_nothing_left_over_falls_back_to_the_law_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """p = q, and yet a token was drafted that neither can say: the residual is zero everywhere."""
    monkeypatch.setattr(accepting, "_CHUNK", 16)
    logits = 2 * draw(4, 2, 50, seed=1)
    logits[:, 0, 7] = NEVER
    choice = a_choice([0.8, 1.0, 1.3, 0.0], 1, 1)
    tree = TokenTree(torch.full((4, 1), 7), drawn="iid", laws=LazyLaws(logits[:, :1].clone(), choice.batch))
    quick, slow = both(tree, logits, choice, monkeypatch)
    assert same(quick, slow)
    assert not quick.accepted.any()
    assert (quick.emitted[:, 0] >= 0).all()


def test_a_token_that_its_draft_cannot_have_said_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, logits = a_choice([0.4, 0.0], 1, 2), 2 * draw(2, 2, 30, seed=2)
    tokens, drafts = logits[:, :1].argmax(-1), logits[:, :1].clone()
    drafts.scatter_(-1, tokens.unsqueeze(-1), torch.tensor([NEVER, -20.0]).view(2, 1, 1))  # greedy: not its favourite
    tree = TokenTree(tokens, drawn="iid", laws=LazyLaws(drafts, choice.batch))
    quick, slow = both(tree, logits, choice, monkeypatch)
    assert same(quick, slow)
    assert not quick.accepted.any()


def test_a_draft_without_a_law_leaves_that_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, logits = a_choice([0.9, 0.0, 1.0], 1, 3), draw(3, 2, 30, seed=3)
    logits[..., 3] = 9.0
    drafts = torch.full((3, 1, 30), -30.0)
    drafts[..., 3] = NAN
    tree = TokenTree(torch.zeros(3, 1, dtype=torch.int64), drawn="iid", laws=LazyLaws(drafts, choice.batch))
    quick, slow = both(tree, logits, choice, monkeypatch)
    assert same(quick, slow)
    assert quick.emitted[:, 0].tolist() == [3, 3, 3]


def test_what_is_equal_is_always_accepted() -> None:
    """To the last bit: the largest coin there is must fall."""
    choice, logits = a_choice([0.01, 0.7, 1.9], 6, 2), 3 * draw(3, 7, 3000, seed=2)
    verdict = fused(a_draft(choice, logits[:, :6].clone()), logits, choice)
    assert verdict is not None
    assert verdict.accepted.tolist() == [[6], [6], [6]]


# ---- drafts


@pytest.mark.parametrize("heats", HEATS, ids=str)
def test_drafts_are_the_same_and_their_laws_are_not_written(
    heats: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    choice, logits = a_choice(heats, 3, 3), 2 * draw(len(heats), 3, 2100, seed=3)
    if any(heats):  # of greedy rows alone, a broken place is a point mass at whatever token
        logits[0, 1, 4] = NAN
    quick = a_draft(choice, logits)
    with monkeypatch.context() as patch:
        patch.setattr(choice.batch, "ops", TORCH)
        slow = a_draft(choice, logits)
    assert torch.equal(quick.tokens, slow.tokens)
    assert quick.drawn == slow.drawn
    assert (type(quick.laws) is LazyLaws) == (slow.laws is not None)
    if quick.laws is not None and slow.laws is not None:
        assert torch.equal(quick.laws.nan_to_num(-1), slow.laws.nan_to_num(-1))
        assert torch.equal(quick.laws[:, 2], slow.laws[:, 2])


LAWFUL = [name for name in RULES if "iid" in RULES[name].judges]


@pytest.mark.parametrize("name", LAWFUL)
def test_every_rule_can_read_such_a_draft(name: str) -> None:
    choice, target = a_choice([0.7, 0.0, 1.4], 3, 4), 2 * draw(3, 4, 60, seed=4)
    tree = a_draft(choice, alike(target[:, :3], draw(3, 3, 60, seed=5)))
    assert tree.laws is not None
    written = replace(tree, laws=tree.laws + 0.0)
    assert type(written.laws) is Tensor
    assert same(RULES[name]().verify(tree, target, choice), RULES[name]().verify(written, target, choice))


@pytest.mark.parametrize("name", LAWFUL)
def test_only_the_test_itself_goes_by_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choice, target = a_choice([0.7], 2, 4), draw(1, 3, 20, seed=4)
    tree, asked = a_draft(choice, target[:, :2]), []
    monkeypatch.setattr(choice.batch.ops, "ratio_kernel", lambda *given: asked.append(given) or judge(*given))
    RULES[name]().verify(tree, target, choice)
    assert bool(asked) == (name in ("ratio", "multi-round"))


def test_what_kernels_cannot_do_goes_by_the_laws() -> None:
    choice, target = a_choice([0.7, 0.9], 2, 4), draw(2, 3, 20, seed=4)
    tree = a_draft(choice, target[:, :2])
    assert fused(tree, target, choice) is not None
    assert fused(tree, target.double(), choice) is None
    assert fused(replace(tree, parents=torch.tensor([[-1, 0]] * 2)), target, choice) is None
    assert fused(replace(tree, laws=tree.laws + 0.0), target, choice) is None  # type: ignore[operator]
    other = SamplingBatch([Sampling(temperature=0.7, top_k=3)] * 2, [()] * 2, "cpu", CudaOps())
    assert fused(tree, target, Choice(other, choice.table, choice.depth)) is None


# ---- numbers


@triton.jit
def _uniforms(key, position, out, lanes, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    drawn = uniform(tl.load(key), tl.load(position), lane)
    tl.store(out + lane, drawn, mask=lane < lanes)


@pytest.mark.parametrize("place", [0, 17, (1 << 40) * 3 + 5])
def test_random_numbers_are_the_same_to_the_bit(place: int) -> None:
    key, position = a_choice([1.0], 0, 9).batch.key(Purpose.ACCEPT), torch.tensor([[place]])
    out = torch.empty(500, dtype=torch.float64)
    _uniforms[(1,)](key, position, out, 500, LANES=512)
    assert torch.equal(out, uniforms(key, position, 500).flatten())


@pytest.mark.parametrize("V", [3, 2048, 32003])
def test_what_the_weights_of_a_place_sum_to(V: int, record_property: Any) -> None:
    """Of scores as float32 has them. The sums behind a float32 law are off by 1e-7."""
    temperatures = torch.tensor([0.3, 1.0, 1.7])
    target, drafts = 8 * draw(3, 2, V, seed=1), draw(3, 1, V, seed=2)
    target[1, 0] += 3e4
    target[2, 1, 1:] = NEVER
    tops, sums, where = weigh(target, drafts, temperatures)
    scores = torch.cat([(each / temperatures.view(3, 1, 1)).flatten(0, 1) for each in (target, drafts)])
    largest = scores.amax(-1, keepdim=True)
    assert torch.equal(tops.amax(-1, keepdim=True), largest)
    assert torch.equal(where.gather(1, tops.argmax(-1, keepdim=True)).flatten().long(), scores.argmax(-1))
    found = (sums * (tops - largest).double().exp()).sum(-1)
    wanted = [math.fsum(math.exp(score) for score in line) for line in (scores.double() - largest.double()).tolist()]
    wrong = max(abs(float(each) / exact - 1) for each, exact in zip(found, wanted, strict=True))
    record_property("measured", f"sums of {V} weights by kernels: off by {wrong:.1e} at most")
    assert wrong < 2e-14
