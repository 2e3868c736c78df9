"""Maps, norms and layers of heads by kernels, against float64; a row is the same in every company."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.toys import llama
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import paceline
from paceline.drafters.heads.eagle import EagleHead
from paceline.drafters.heads.medusa import MedusaHead
from paceline.drafters.heads.prophet import ProphetHead
from paceline.drafters.models.draft_lm import DraftLayers
from paceline.drafters.models.early_exit import ExitHead
from paceline.kernels.cpu import machine
from paceline.models.cpu import cpu_linear as kernel_linear
from paceline.models.cpu.cpu_linear import CpuLinear, KernelNorm, drafting
from paceline.models.cpu.threads import THREADS
from paceline.models.heads.head_layers import BySlot, DecoderLayer, LayerConfig, Norm, Scratch
from paceline.models.packed_linear import BFloat16Linear, Int4Linear, Int8Linear
from paceline.models.runtime import quantized
from paceline.models.slot_cache import SlotCache

needs_kernels = pytest.mark.skipif(machine.missing() is not None, reason="no kernels here")
SHAPES = [(1, 1), (5, 3), (8, 7), (9, 8), (31, 17), (50, 64), (49, 576), (7, 129), (100, 96)]  # outputs, inputs
EPS = torch.finfo(torch.float32).eps


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def all_threads() -> Iterator[None]:
    """However busy the machine is, jobs run on the threads that a test gives them."""
    with THREADS.governor.ignored():
        yield


@pytest.fixture
def on_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Every job, however small, on this number of threads."""

    def choose(threads: int) -> None:
        monkeypatch.setattr(kernel_linear, "_ALONE", 0)
        monkeypatch.setattr(kernel_linear, "_cores", lambda: threads)
        monkeypatch.setattr(kernel_linear.openmp, "usual_threads", lambda: threads)

    return choose


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_linear, "address", lambda kind: 0)


# ---- one map


@needs_kernels
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_it_is_the_product(outputs: int, inputs: int, biased: bool) -> None:
    bias = drawn(outputs, seed=3) if biased else None
    mapped = CpuLinear.of(drawn(outputs, inputs, seed=1), bias)
    weight = mapped.packed.packed.double() * mapped.packed.scales.double().unsqueeze(1)
    for rows in range(1, 21):
        x = drawn(rows, inputs, seed=2)
        wanted = x.double() @ weight.T + (0 if bias is None else bias.double())
        bound = (inputs / 8 + 6) * EPS * (x.double().abs() @ weight.abs().T + wanted.abs())
        assert bool(((mapped(x) - wanted).abs() <= bound).all()), f"{rows} rows"
    assert mapped(drawn(2, 3, inputs)).shape == (2, 3, outputs)
    assert mapped(drawn(2, 0, inputs)).shape == (2, 0, outputs)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_rows_are_the_same_in_every_company(
    outputs: int, inputs: int, threads: int, on_threads: Callable[[int], None]
) -> None:
    mapped, x = CpuLinear.of(drawn(outputs, inputs, seed=1), drawn(outputs)), drawn(40, inputs)
    alone = torch.cat([mapped(row) for row in x.split(1)])
    on_threads(threads)
    for rows in (*range(1, 21), 40):
        assert torch.equal(mapped(x[:rows]), alone[:rows]), f"{rows} rows"
        assert torch.equal(mapped(x[40 - rows :]), alone[40 - rows :]), f"the last {rows} rows"


@needs_kernels
@pytest.mark.parametrize("Packed", [Int8Linear, Int4Linear, BFloat16Linear])
def test_every_format(Packed: Any) -> None:
    packed = Packed(drawn(33, 64), drawn(33))
    x = drawn(3, 64)
    torch.testing.assert_close(CpuLinear(packed)(x), packed(x), atol=1e-4, rtol=1e-4)


@needs_kernels
def test_what_lies_otherwise_in_memory_is_read_rightly() -> None:
    mapped, x = CpuLinear.of(drawn(6, 8)), drawn(8, 5)
    assert torch.equal(mapped(x.T), mapped(x.T.contiguous()))


def test_without_kernels_torch_multiplies(without_kernels: None) -> None:
    mapped = CpuLinear.of(drawn(9, 7), drawn(9))
    torch.testing.assert_close(mapped(drawn(3, 7)), mapped.packed(drawn(3, 7)))
    head = nn.Sequential(nn.Linear(4, 4))
    assert drafting(head) is head


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_numbers_are_left_to_torch(dtype: torch.dtype) -> None:
    mapped, x = CpuLinear.of(drawn(9, 7).to(dtype)), drawn(3, 7).to(dtype)
    assert mapped(x).dtype == dtype
    torch.testing.assert_close(mapped(x), mapped.packed(x))
    head = nn.Sequential(nn.Linear(4, 4)).to(dtype)
    assert drafting(head) is head


def test_gradients_pass() -> None:
    x = drawn(2, 7).requires_grad_()
    CpuLinear.of(drawn(9, 7))(x).sum().backward()
    assert x.grad is not None


@needs_kernels
def test_copies_have_weights_of_their_own() -> None:
    mapped, x = CpuLinear.of(drawn(33, 40), drawn(33)), drawn(2, 40)
    message = mapped(x)
    other = copy.deepcopy(mapped)
    mapped.packed.packed.zero_()
    assert torch.equal(other(x), message)
    wide = other.double()
    torch.testing.assert_close(wide(x.double()), message.double(), atol=1e-4, rtol=1e-4)
    assert torch.equal(wide.float()(x), message)


@needs_kernels
def test_threads_of_the_user_may_share_a_map(on_threads: Callable[[int], None]) -> None:
    on_threads(2)
    mapped, xs = CpuLinear.of(drawn(500, 96)), [drawn(1 + i % 5, 96, seed=i) for i in range(40)]
    wanted = [mapped(x) for x in xs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert all(map(torch.equal, pool.map(mapped, xs), wanted))


# ---- norms and layers


@needs_kernels
def test_norms() -> None:
    norm = Norm(37, eps=1e-5)
    nn.init.normal_(norm.weight)
    light, x = KernelNorm(norm), drawn(3, 4, 37)
    with torch.no_grad():
        torch.testing.assert_close(light(x), norm(x))
        assert torch.equal(light(x)[1:2, 2:3], light(x[1:2, 2:3]))
        torch.testing.assert_close(light(x.double()), norm(x.double()))


CONFIG = LayerConfig(32, 4, 2, 48)
CONFIGS = {
    "grouped": CONFIG,
    "wide heads": replace(CONFIG, head_width=16, kv_heads=4),
    "odd heads": replace(CONFIG, width=24, kv_heads=1),  # of 6 numbers: no kernel
    "stretched": replace(CONFIG, rope_scaling=(8.0, 1.0, 4.0, 8192.0), eps=1e-4),
}


def rounded(layer: DecoderLayer) -> DecoderLayer:
    """The layer with its weights as int8 has them, in float64."""
    other = copy.deepcopy(layer)
    for module in other.modules():
        if isinstance(module, nn.Linear):
            packed = Int8Linear(module.weight, None)
            module.weight.data = packed.packed * packed.scales.unsqueeze(1)
    return other.double()


class Draft:
    """Two texts of other lengths, read and then gone on with as a tree, level by level or node by node."""

    LENGTHS = (5, 3)
    PARENTS = torch.tensor([[-1, -1, 0, 1, 2, 2], [-1, -1, 1, 0, 2, 3]])
    LEVELS = ((0, 2), (2, 4), (4, 6))

    def __init__(self, layer: DecoderLayer, seen: int, dtype: torch.dtype = torch.float32) -> None:
        self.layer, self.cache = layer, SlotCache()
        self.seen, self.stream = (drawn(2, 11, width, seed=width).to(dtype) for width in (seen, layer.config.width))
        self.cache.reserve(4, 16)
        self.remember = BySlot(self.cache, 0)

    @torch.no_grad()
    def run(self, rows: slice = slice(0, 2)) -> Tensor:
        length = torch.tensor(self.LENGTHS).view(2, 1)[rows]
        R = length.shape[0]
        position = torch.arange(5).expand(R, 5)
        mask = torch.arange(5) <= position[:, None, :, None]
        self.cache.set_next_write(rows, position, 5, 0)
        message = [self.layer(self.seen[rows, :5], self.stream[rows, :5], position, mask, self.remember)]
        scratch = Scratch(length, 5)
        for start, stop in self.LEVELS:
            slots, position, mask, visible = scratch.add(stop - start, self.PARENTS[rows, start:stop])
            self.cache.set_next_write(rows, slots, visible, 0)
            some = slice(5 + start, 5 + stop)
            message.append(self.layer(self.seen[rows, some], self.stream[rows, some], position, mask, self.remember))
        return torch.cat(message, 1)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_layer_is_the_layer(config: LayerConfig, threads: int, on_threads: Callable[[int], None]) -> None:
    layer = DecoderLayer(config, 40)
    wanted = Draft(rounded(layer), 40, torch.float64).run()
    on_threads(threads)
    got = Draft(drafting(layer), 40).run()
    torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=1e-4)


@needs_kernels
def test_a_layer_says_the_same_of_a_row_in_every_company(on_threads: Callable[[int], None]) -> None:
    layer = drafting(DecoderLayer(CONFIG, 40))
    both = Draft(layer, 40).run()
    on_threads(3)
    for row in range(2):
        assert torch.equal(Draft(layer, 40).run(slice(row, row + 1)), both[row : row + 1])


@needs_kernels
def test_a_layer_outlives_what_it_was_made_of() -> None:
    """A drafter continues while its head is cast for another target, or copied and dropped."""
    layer = DecoderLayer(CONFIG, 40)
    light = drafting(layer)
    wanted = Draft(light, 40).run()
    other = copy.deepcopy(light)
    layer.double()
    del layer
    assert torch.equal(Draft(light, 40).run(), wanted)
    del light
    assert torch.equal(Draft(other, 40).run(), wanted)


@needs_kernels
@pytest.mark.parametrize(("slot", "place"), [(16, 0), (-1, 0), (0, 1 << 20), (0, -1)])
def test_a_layer_writes_nowhere_else(slot: int, place: int) -> None:
    draft = Draft(drafting(DecoderLayer(CONFIG, 40)), 40)
    draft.cache.set_next_write(slice(0, 1), torch.tensor([[slot]]), 1, 0)
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with torch.no_grad(), pytest.raises(IndexError, match="there is room for"):
        draft.layer(draft.seen[:1, :1], draft.stream[:1, :1], torch.tensor([[place]]), mask, draft.remember)


class Count(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@needs_kernels
def test_a_layer_is_one_job() -> None:
    """A handful of calls of torch where it made fifty; each is as dear as a small product."""
    plain = DecoderLayer(CONFIG, 40)
    counts = []
    for layer in (plain, drafting(plain)):
        draft = Draft(layer, 40)
        draft.run()
        with Count() as count:
            draft.run()
        counts.append(count.calls)
    assert counts[0] - counts[1] > 4 * 35


# ---- heads


@needs_kernels
def test_heads_are_made_once_and_not_edited() -> None:
    head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3, bias=False))
    before, state = list(head.modules()), {name: value.clone() for name, value in head.state_dict().items()}
    light: Any = drafting(head)
    assert [type(each) for each in light] == [CpuLinear, nn.ReLU, CpuLinear]
    assert drafting(head) is light
    assert list(head.modules()) == before
    assert all(torch.equal(state[name], value) for name, value in head.state_dict().items())
    x = drawn(2, 8)
    with torch.no_grad():
        assert torch.allclose(light(x), head(x), atol=0.05)
        head[0].weight.mul_(2)  # as an optimizer does
        assert drafting(head) is not light
        assert torch.allclose(drafting(head)(x), head(x), atol=0.05)


@needs_kernels
def test_who_is_listened_to_is_left_alone() -> None:
    head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    head[1].register_forward_hook(lambda *_: None)
    assert [type(each) for each in drafting(head)] == [CpuLinear, nn.Linear]


# ---- real weights


SETTINGS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 5}]
BEGINNINGS = ["The capital of France is", "def fibonacci(n):\n"]


@pytest.fixture(scope="module")
def smollm2() -> tuple[paceline.LanguageModel, list[list[list[int]]]]:
    """The model, and what it writes without drafts."""
    lm = paceline.load("smollm2-135m")
    plain = paceline.SpeculativeDecoder(lm, draft=None)
    return lm, [[out.tokens for out in plain.generate(BEGINNINGS, max_new_tokens=20, **each)] for each in SETTINGS]


@pytest.mark.real
@needs_kernels
@pytest.mark.parametrize(
    ("name", "tree"),
    [("eagle", "chain"), ("eagle", "best-first"), ("medusa", "levels"), ("prophet", "chain"), ("prophet", "levels"),
     ("early-exit", "chain"), ("draft-lm", "chain")],
)  # fmt: skip
def test_text_is_that_of_plain_decoding(name: str, tree: str, smollm2: Any) -> None:
    lm, plain = smollm2
    heads: dict[str, Callable[[], Any]] = {
        "eagle": lambda: EagleHead.random(lm, 0, replace(EagleHead.sizes(lm), draft_vocabulary=8192)),
        "medusa": lambda: MedusaHead.random(lm, 0, replace(MedusaHead.sizes(lm), own_output=False)),
        "prophet": lambda: ProphetHead.random(lm, 0, replace(ProphetHead.sizes(lm), own_output=False)),
        "early-exit": lambda: ExitHead.fresh(lm, 20),
        "draft-lm": lambda: DraftLayers(lm, tuple(range(28))),
    }
    drafted = paceline.SpeculativeDecoder(lm, name, options={"head": heads[name](), "tree": tree}, rule="match")
    for settings, wanted in zip(SETTINGS, plain, strict=True):
        assert [out.tokens for out in drafted.generate(BEGINNINGS, max_new_tokens=20, **settings)] == wanted


@needs_kernels
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_the_output_of_a_target_is_shared(quantize: str | None) -> None:
    """One small copy for all drafters of a target; where it is small already, itself."""
    lm = paceline.LanguageModel(llama(0).float())
    if quantize:
        lm = quantized(lm, quantize)
    head = MedusaHead.random(lm, 0, replace(MedusaHead.sizes(lm), own_output=False))
    output = lm.model.get_output_embeddings()
    for _ in range(2):
        decoder = paceline.SpeculativeDecoder(lm, "medusa", options={"head": head})
        decoder.generate([1, 2, 3], max_new_tokens=8)
        assert isinstance(drafting(output), CpuLinear)
        assert decoder.drafter._shared is drafting(output)
    assert (drafting(output).packed is output) == bool(quantize)
