"""The kernels for CUDA devices, run by Triton's interpreter on a CPU: what they compute. That rows are alike to the bit
is the device's to show (`tests/gpu`)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.selection import covering, nightly
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from paceline.core.choice import Choice, NoiseTable
from paceline.core.sampling import Sampling, SamplingBatch
from paceline.core.verdict import BROKEN
from paceline.models.language_model import LanguageModel
from paceline.models.readers.scratch_reader import ScratchRows

pytest.importorskip("triton")

from paceline.kernels.cuda import cuda_product as products
from paceline.kernels.cuda.choosing import race
from paceline.kernels.cuda.cuda_attention import COUNTS, attend
from paceline.kernels.cuda.cuda_layers import add_norm
from paceline.kernels.cuda.cuda_rounds import climb

from .passes import cuda_pass


def close(got: Tensor, wanted: Tensor, within: float) -> None:
    assert torch.isfinite(got).all()
    assert (got.double() - wanted.double()).norm() <= within * wanted.double().norm()


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    covering(
        [torch.float32, torch.float16],  # the interpreter has no bfloat16
        [(1, (32,), 64), (3, (64, 32, 32), 80), (16, (48,), 576), (17, (100,), 144), (64, (16, 16, 16), 16)],
    ),
)
def test_product(dtype: torch.dtype, shape: tuple[int, tuple[int, ...], int]) -> None:
    (M, sizes, K), within = shape, 1e-6 if dtype == torch.float32 else 1e-3
    x, weights = draw(M, K, dtype=dtype), [draw(n, K, seed=i + 1, dtype=dtype) for i, n in enumerate(sizes)]
    got = products.product(x, weights)
    assert got.shape[1:] == (M, sum(sizes))
    close(got.sum(0), x.double() @ torch.cat(weights).double().t(), within)


@pytest.mark.parametrize(("M", "N", "K"), [(1, 48, 64), (5, 33, 80), (65, 96, 32)])
def test_gated(M: int, N: int, K: int) -> None:
    x, gate, up = draw(M, K), draw(N, K, seed=1), draw(N, K, seed=2)
    wanted = torch.nn.functional.silu(x.double() @ gate.double().t()) * (x.double() @ up.double().t())
    close(products.gated(x, gate, up), wanted, 1e-5)


def test_a_matrix_is_cut_by_its_shape_and_the_parts_cover_it() -> None:
    for N, K in [(12288, 4096), (4096, 11008), (960, 576), (576, 1536), (32000, 4096), (48, 16), (64, 208)]:
        how = products.cut(N, K)
        assert (how.parts - 1) * how.steps(K) * how.inner < K <= how.parts * how.steps(K) * how.inner
        assert 64 % how.outputs == 0


@pytest.mark.parametrize("parts", [None, 1, 4])
@pytest.mark.parametrize(("take", "skip"), [(1, 0), (2, 3)])
def test_add_norm(parts: int | None, take: int, skip: int) -> None:
    M, D, eps = 10, 40, 1e-5
    stream, weight, bias = draw(M, D), draw(D, seed=1), draw(D, seed=2)
    added = None if parts is None else draw(parts, M, D, seed=3)
    picked = torch.arange(M).view(-1, take + skip)[:, skip:].flatten()
    after = stream.clone()
    if added is not None:
        after += added.sum(0) + bias
    wanted = after[picked] * torch.rsqrt(after[picked].square().mean(-1, keepdim=True) + eps) * weight
    out = torch.full((len(picked), D), float("nan"))
    add_norm(added, stream, out, weight=weight, bias=bias, eps=eps, of=(take, skip))
    close(out, wanted, 1e-5)
    close(stream, after, 1e-6)


def path_to(parents: list[int], node: int) -> list[int]:
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of rows that are padding
@pytest.mark.parametrize(
    ("heads", "window", "lengths", "parents"),
    covering(
        [(4, 4, 16), (6, 2, 24), (9, 3, 64)],
        [0, 20],
        [(300, 517), (90, 249)],
        [None, [-1, 0, 0, 2], [-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 3, 12, 12, 5, -1]],
    ),
)
def test_attention(
    heads: tuple[int, int, int], window: int, lengths: tuple[int, int], parents: list[int] | None
) -> None:
    """Of a chain, or of the last token of a text and the nodes of a tree at the slots that follow it."""
    query_heads, kv, width = heads
    R, Q, S = 2, 5 if parents is None else 1 + len(parents), 600
    ends = torch.tensor(lengths)
    keys, values = draw(3, kv, S, width), draw(3, kv, S, width, seed=1)
    q = draw(R * Q, query_heads, width, seed=2)
    if parents is None:
        prefix = (ends[:, None] + torch.arange(Q)).flatten()
        tree, branches = None, [[list(range(p)) for p in row] for row in prefix.view(R, Q).tolist()]
    else:
        slots = ends[:, None] + torch.arange(-1, Q - 1)
        _, whole, tree = climb(torch.tensor([parents] * R), ends[:, None], slots, Q - 1)
        prefix = whole.flatten()
        paths = [[], *(path_to(parents, node) for node in range(len(parents)))]
        branches = [[list(range(n)) + [n + node for node in path] for path in paths] for n in lengths]
    out = torch.full_like(q, float("nan"))
    done = torch.zeros(COUNTS, dtype=torch.int32)
    attend(q, (keys, values), prefix - 1, out, Q, 530, 0.3, done=done, tree=tree, window=window, ahead=1)
    assert not done.any()
    wanted = torch.zeros_like(q, dtype=torch.float64)
    for r in range(R):
        for i in range(Q):
            slots = branches[r][i][-window:] if window else branches[r][i]
            for h in range(query_heads):
                k, v = (
                    keys[r, h // (query_heads // kv), slots].double(),
                    values[r, h // (query_heads // kv), slots].double(),
                )
                wanted[r * Q + i, h] = ((k @ q[r * Q + i, h].double()) * 0.3).softmax(0) @ v
    close(out, wanted, 1e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(("heats", "V"), covering([(0.0, 0.0), (0.8, 1.3), (0.7, 0.0)], [40, 2048, 5000]))
def test_race_picks_what_the_law_picks(heats: tuple[float, float], V: int) -> None:
    batch = SamplingBatch(
        [Sampling(temperature=temperatures, seed=7 + i) for i, temperatures in enumerate(heats)], [(), ()], "cpu"
    )
    length = torch.tensor([[11], [300]])
    choice = Choice(batch, NoiseTable(batch, length, 4), slice(0, 4))
    logits = draw(2, 4, V, seed=3) * 3
    logits[0, 1] = float("nan")
    logits[1, 2, 5] = float("nan")
    logits[1, 3] = float("-inf")
    from paceline.core.noise import Purpose

    some = None if not any(heats) else batch.column("temperature", torch.float32)
    key = None if some is None else batch.key(Purpose.TARGET)
    got = race(logits, some, key, choice.position, BROKEN)
    wanted = choice.pick(logits)
    assert got.tolist() == wanted.tolist()
    assert (got == BROKEN).sum() == 3


MODELS: dict[str, Any] = {
    "llama": LlamaConfig,
    "mistral with a window": lambda **more: MistralConfig(sliding_window=24, **more),
    "qwen2 with biases": Qwen2Config,
    "qwen3 with norms": lambda **more: Qwen3Config(head_dim=16, **more),
    "llama of odd heads": lambda **more: LlamaConfig(**{**more, "num_attention_heads": 6, "head_dim": 24}),
}


def model(name: str) -> LanguageModel:
    sizes = {"vocab_size": 80, "hidden_size": 96, "intermediate_size": 80, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
             "initializer_range": 0.3}  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return LanguageModel(AutoModelForCausalLM.from_config(MODELS[name](**sizes)).float().eval())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", ["qwen3 with norms", *nightly(set(MODELS) - {"qwen3 with norms"})])
@torch.inference_mode()
def test_a_pass_says_what_transformers_says(name: str) -> None:
    """A prompt of ragged rows, a tree, a chain after it, and the rows that were kept."""
    lm = model(name)
    eager = copy.copy(lm)
    eager.runner = "eager"
    texts = [[(7 * i + r) % 80 for i in range(length)] for r, length in enumerate((26, 2, 9))]
    tokens = torch.arange(3 * 5).view(3, 5) * 5 % 80
    parents = torch.tensor([-1, 0, 0, 2, -1]).expand(3, 5)
    message = []
    for kernels in (None, cuda_pass(lm)):
        rows = ScratchRows(lm.device)
        rows.admit(texts)
        reader = eager.reader()
        reader.use_kernels(kernels)
        width = reader.begin(rows, 0, 64)
        tree = reader.extend(rows, width, tokens, parents).logits
        reader.keep(rows, torch.tensor([0, 2, 3]).expand(3, 3))
        rows.rewrite(rows.lengths, [[int(tokens[r, node]) for node in (0, 2, 3)] + [9] for r in range(3)])
        chain = reader.extend(rows, 1, tokens[:, :3].contiguous()).logits
        message.append((tree, chain))
    for theirs, ours in zip(*message, strict=True):
        close(ours, theirs, 2e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", ["mistral with a window", *nightly(set(MODELS) - {"mistral with a window"})])
@torch.inference_mode()
def test_a_prompt_is_read_alike_for_those_who_look_at_it(name: str) -> None:
    """To the bit: a text must not depend on whether a drafter reads hidden states."""
    lm = model(name)
    lm.runner = "eager"
    rows = ScratchRows(lm.device)
    rows.admit([[(7 * i + r) % 80 for i in range(length)] for r, length in enumerate((26, 2, 9))])
    readers = []
    for taps, kernels in (((), cuda_pass(lm)), ((0.0, 0.5, 1.0), cuda_pass(lm)), ((0.0, 0.5, 1.0), None)):
        readers.append(reader := lm.reader(taps))
        reader.use_kernels(kernels)
        assert reader.begin(rows, 0, 64) == 1
    plain, watched, theirs = readers
    for ours, other in zip(
        watched.cache.keys + watched.cache.values, plain.cache.keys + plain.cache.values, strict=True
    ):
        assert all(torch.equal(ours[r, :, : n - 1], other[r, :, : n - 1]) for r, n in enumerate(rows.lengths))
    for seen, wanted in zip(watched.prompt_taps, theirs.prompt_taps, strict=True):
        assert (seen.first, seen.start) == (wanted.first, wanted.start)
        for ours, other in zip(seen.taps, wanted.taps, strict=True):
            assert ours.shape == other.shape == (1, rows.lengths[seen.first] - 1, other.shape[2])
            close(ours, other, 2e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@torch.inference_mode()
def test_a_prompt_is_read_alike_in_every_batch() -> None:
    """To the bit, keys and values: all of them together would be more than our own products take."""
    lm = model("llama")
    lm.runner = "eager"
    texts = [[(7 * i + r) % 80 for i in range(length)] for r, length in enumerate((40, 3, 17))]
    memories = []
    for some in (texts, *([text] for text in texts)):
        rows = ScratchRows(lm.device)
        rows.admit(some)
        reader = lm.reader()
        reader.use_kernels(cuda_pass(lm))
        reader.begin(rows, 0, 128)
        memories.append([*reader.cache.keys, *reader.cache.values])
    together, *alone = memories
    for row, (text, mine) in enumerate(zip(texts, alone, strict=True)):
        end = len(text) - 1
        assert all(torch.equal(a[row, :, :end], b[0, :, :end]) for a, b in zip(together, mine, strict=True))
