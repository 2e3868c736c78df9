"""A head that writes ahead in features by kernels, interpreted on a CPU: what its modules say, step by step, and whole
texts in captured rounds. How many launches a drafted token costs is counted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.drafters import fitting
from tests.engine.graph_devices import Rehearsal
from tests.selection import covering
from tests.toys import llama
from torch import Tensor

import paceline
from paceline.core.device_ops import TORCH
from paceline.drafters.heads import base as heads
from paceline.drafters.heads.base import PlaceStore
from paceline.drafters.heads.eagle import EagleHead, Steps
from paceline.drafters.heads.foreign_heads import FirstEagleHead
from paceline.engine import round_graphs as flight
from paceline.models import reader as model_reader
from paceline.models.cuda import cuda_head as cuda_draft
from paceline.models.cuda.cuda_head import CudaHead
from paceline.models.cuda.cuda_ops import CudaOps
from paceline.models.heads.head_layers import spread as spread_by_torch
from paceline.models.language_model import LanguageModel

pytest.importorskip("triton")

from paceline.kernels.cuda.cuda_head_steps import note, spread

from .counting import spent
from .passes import cuda_pass

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")

NEW = [8, 4]  # tokens after each prompt
SIZES: dict[str, dict[str, Any]] = {
    "usual": {},
    "few words": {"draft_vocabulary": 30},
    "borrowed words": {"own_output": False},
    "few borrowed words": {"own_output": False, "draft_vocabulary": 30},
    "grouped heads": {"heads": 4, "kv_heads": 2, "inner": 48},
    "wide heads": {"heads": 3, "kv_heads": 1, "head_width": 16, "rope_theta": 500.0},
    "stretched": {"rope_scaling": (8.0, 1.0, 4.0, 16.0), "heads": 2, "kv_heads": 1},
    "others'": {"norm_before_residual": True, "fuse_bias": True, "own_embedding": True, "tap_layers": (0, 1)},
    "narrower": {"width": 16},
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for heads run here; heads that have none run as they are, not in int8."""
    monkeypatch.setattr(cuda_draft, "DEVICE", "cpu")
    monkeypatch.setattr(heads, "drafting", lambda head: head)


@cache
def target() -> paceline.LanguageModel:
    return paceline.LanguageModel(llama(0).float())


def made(**changes: Any) -> EagleHead:
    head = EagleHead.random(target(), 3, replace(EagleHead.sizes(target()), **changes))
    with torch.no_grad():
        for name, weight in head.named_parameters():  # norms that matter
            if "norm" in name:
                weight.copy_(1 + 0.3 * drawn(*weight.shape, seed=len(name)))
    if head.d2t is not None:
        head.d2t += 5
    head.borrow(target())
    return head


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def drafted(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 40, shape, generator=torch.Generator().manual_seed(seed))


# ---- the kernels by themselves


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("V", [30, 1500])
def test_what_is_said_goes_to_its_place(parts: int, V: int) -> None:
    message, ids = drawn(parts, 4, 20), torch.randperm(V, generator=torch.Generator().manual_seed(1))[:20]
    got = spread(message, cuda_draft._numbers(ids, V), V)
    torch.testing.assert_close(got, spread_by_torch(message.sum(0), ids, V))
    torch.testing.assert_close(spread(message, None, 20), message.sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_noted_is_what_torch_writes(dtype: torch.dtype) -> None:
    parts, bias, length = drawn(2, 6, 24), drawn(24, seed=1).to(dtype), torch.tensor([[1], [5]])
    parts[0, 1, 3], parts[1, 4, 5], parts[0, 5, 7] = float("nan"), float("inf"), -float("inf")
    ours, theirs = (PlaceStore(24, dtype, torch.device("cpu")) for _ in range(2))
    note(parts, bias, length, ours.states(2, 9))
    states = (parts.sum(0) + bias).to(dtype).view(2, 3, 24)
    theirs.write(slice(0, 2), length + torch.arange(-1, 2), states, 9)
    torch.testing.assert_close(ours.states(2, 9), theirs.states(2, 9))


# ---- step by step


class Draft:
    """Three texts of different lengths, of which one is too short for what is read again, and a draft after them."""

    LENGTHS = (9, 2, 14)

    def __init__(self, head: Any, kernels: CudaHead | None) -> None:
        self.places = PlaceStore(head.remembers, torch.float32, torch.device("cpu"))
        self.rows: Any = SimpleNamespace(
            text=drafted(3, 40, seed=1), length=torch.tensor(self.LENGTHS).view(3, 1), lengths=list(self.LENGTHS),
            count=3, capacity=4, room=40,
        )  # fmt: skip
        self.places.write(slice(0, 3), torch.arange(13).expand(3, 13), drawn(3, 13, head.remembers, seed=2), 40)
        table = head.words or target().model.get_input_embeddings()
        shared = target().model.get_output_embeddings()
        self.steps = Steps(head, lambda tokens: table(tokens.clamp(0, 39)), shared, self.places, kernels)
        self.steps.cache.reserve(4, 40)

    @torch.no_grad()
    def read(self) -> None:
        """The texts but for their last entries, by modules."""
        position = torch.arange(9).expand(3, 9)
        self.steps.read(self.rows, slice(0, 3), position, 9)

    @torch.no_grad()
    def chain(self, steps: int = 3) -> list[Tensor]:
        expand = self.steps.draft(self.rows, 4)
        return [expand(None, None), *(expand(drafted(3, 1, seed=10 + step), None) for step in range(steps))]

    @torch.no_grad()
    def tree(self) -> list[Tensor]:
        expand = self.steps.draft(self.rows, 4)
        levels = [[[-1, -1, -1]] * 3, [[0, 2], [1, 0], [2, 2]], [[3, 4, 1], [4, 4, 2], [3, 0, 3]]]
        message = [expand(None, None)]
        for number, parents in enumerate(levels):
            message.append(expand(drafted(3, len(parents[0]), seed=20 + number), torch.tensor(parents)))
        return message


def both(head: EagleHead) -> tuple[Draft, Draft]:
    kernels = CudaHead.of(head, head.words or target().model.get_input_embeddings())
    assert kernels is not None
    slow, fast = Draft(head, None), Draft(head, kernels)
    slow.read()
    fast.read()
    return slow, fast


@pytest.mark.parametrize(("sizes", "shape"), covering(SIZES.values(), ["chain", "tree"]))
def test_steps_say_what_modules_say(sizes: dict[str, Any], shape: str) -> None:
    slow, fast = both(made(**sizes))
    for _ in range(2):  # a second draft writes over the first one's memory
        for wanted, got in zip(getattr(slow, shape)(), getattr(fast, shape)(), strict=True):
            assert got.shape == wanted.shape
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    for wanted, got in (
        (slow.steps.cache.keys, fast.steps.cache.keys),
        (slow.steps.cache.values, fast.steps.cache.values),
    ):
        torch.testing.assert_close(got[0][:3], wanted[0][:3], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sizes", [SIZES["usual"], SIZES["others'"], SIZES["narrower"]], ids=str)
@pytest.mark.parametrize("path", [None, [[0, 2], [1, 0], [2, 2]]], ids=["chain", "tree"])
def test_notes_are_what_modules_digest(sizes: dict[str, Any], path: Any) -> None:
    head = made(**sizes)
    slow, fast = both(head)
    path = None if path is None else torch.tensor(path)
    taps = tuple(drawn(3, 4, 32, seed=30 + i) for i in range(head.config.tapped))
    with torch.no_grad():
        assert not slow.steps.note(slow.rows, taps, path)
        assert fast.steps.note(fast.rows, taps, path)
        if path is not None:
            taps = tuple(torch.stack([tap[row, [0, *way]] for row, way in enumerate(path + 1)]) for tap in taps)
        position = slow.rows.length + torch.arange(-1, taps[0].shape[1] - 1)
        slow.places.write(slice(0, 3), position, head.fuse(torch.cat(taps, -1)), 40)
    torch.testing.assert_close(fast.places.states(3, 1), slow.places.states(3, 1), atol=1e-4, rtol=1e-4)


def test_a_step_of_very_many_tokens_is_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels and modules have written by turns is one memory."""
    monkeypatch.setattr(cuda_draft, "_MOST", 6)  # the entries of the texts are more, and the last level of the tree
    slow, fast = both(made())
    asked: list[int] = []
    ahead = CudaHead.ahead
    monkeypatch.setattr(CudaHead, "ahead", lambda self, tokens, *more: asked.append(1) or ahead(self, tokens, *more))
    monkeypatch.setattr(CudaHead, "caught_up", None)
    for shape, times in (("chain", 3), ("tree", 1)):
        asked.clear()
        for wanted, got in zip(getattr(slow, shape)(), getattr(fast, shape)(), strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
        assert len(asked) == times


def test_long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several spans of attention, joined; and a table of angles that has to grow."""
    head = made()
    kernels = CudaHead.of(head, target().model.get_input_embeddings())
    drafts = Draft(head, None), Draft(head, kernels)
    for draft in drafts:
        rows = draft.rows
        rows.text, rows.lengths = drafted(3, 640, seed=1), [600, 300, 20]
        rows.length = torch.tensor(rows.lengths).view(3, 1)
        draft.places.write(slice(0, 3), torch.arange(620).expand(3, 620), drawn(3, 620, 32, seed=2), 640)
        draft.steps.cache.reserve(4, 640)
        with torch.no_grad():
            draft.steps.read(rows, slice(0, 3), torch.arange(599).expand(3, 599), 599)
    for shape in ("chain", "tree"):
        for wanted, got in zip(*(getattr(draft, shape)() for draft in drafts), strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


# ---- where kernels do not apply


def test_heads_that_have_no_kernels() -> None:
    table = target().model.get_input_embeddings()
    assert CudaHead.of(made(), table) is not None
    assert CudaHead.of(made(inner=40), table) is None, "an odd size"
    assert CudaHead.of(made(width=24, heads=1, kv_heads=1, inner=32), table) is None, "an odd width"
    assert CudaHead.of(made(), torch.nn.Embedding(40, 32).double()) is None, "numbers of another kind"
    assert CudaHead.of(made().double(), table) is None
    listened = made()
    listened.layer.o_proj.register_forward_hook(lambda *_: None)
    assert CudaHead.of(listened, table) is None, "a hook is registered"
    scaled = type("Scaled", (torch.nn.Embedding,), {})(40, 32)
    assert CudaHead.of(made(), scaled) is None, "embeddings that do more than to look up"


def test_an_odd_output_layer_says_it_by_itself() -> None:
    head = made(draft_vocabulary=30)
    head.output = torch.nn.Linear(32, 30, bias=True)
    slow, fast = both(head)
    for wanted, got in zip(slow.chain(), fast.chain(), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("runner", ["eager", "cuda_graph", "auto"])
@pytest.mark.parametrize("kind", [EagleHead, FirstEagleHead])
def test_who_drafts_by_kernels(runner: str, kind: Any) -> None:
    decoder = paceline.SpeculativeDecoder(
        target(), "eagle", runner=runner, gamma=2, options={"head": kind.random(target())}
    )
    decoder.generate([1, 2, 3], max_new_tokens=4)
    drafter: Any = decoder.drafter
    assert (drafter._steps._kernels is not None) == (runner == "auto" and kind is EagleHead)


# ---- whole texts


@cache
def fitted() -> EagleHead:
    return fitting.eagle(draft_vocabulary=36)


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes, and what lies between them, by kernels, in rounds of fixed shapes."""
    fitted()  # in float64, by modules

    monkeypatch.setattr(model_reader, "kernel_pass", cuda_pass)
    monkeypatch.setattr(flight, "programs_for", lambda lm: Rehearsal())
    monkeypatch.setattr(LanguageModel, "ops", CudaOps())


def written(head: Any, rows: int, options: dict[str, Any], settings: dict[str, Any]) -> list[Any]:
    decoder = paceline.SpeculativeDecoder(
        target(), "eagle", gamma=3, rows=rows, rule="match", options={"head": copy.deepcopy(head), **options}
    )
    limits = {"max_new_tokens": NEW, "ignore_eos": True, **settings}
    outs: list[Any] = decoder.generate(fitting.PROMPTS[:2], **limits)
    return outs


@pytest.mark.parametrize(
    ("rows", "options", "settings"),
    [(2, {}, {}), pytest.param(1, {}, {"temperature": 0.9, "seed": 3}, marks=pytest.mark.nightly),
     pytest.param(2, {"tree": "levels"}, {}, marks=pytest.mark.nightly),
     pytest.param(1, {"tree": "best-first", "branch": 3}, {}, marks=pytest.mark.nightly)],
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("by_kernels")
def test_texts_and_drafts_are_the_same(
    rows: int, options: dict[str, Any], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose acceptance is the fitted head's: a draft that goes astray would show."""
    plain = paceline.SpeculativeDecoder(target(), draft=None, runner="eager")
    wanted = plain.generate(fitting.PROMPTS[:2], max_new_tokens=NEW, ignore_eos=True, **settings)
    found = written(fitted(), rows, options, settings)
    assert [out.tokens for out in found] == [out.tokens for out in wanted]
    monkeypatch.setattr(cuda_draft, "DEVICE", "nowhere")
    monkeypatch.setattr(model_reader, "kernel_pass", lambda lm, model: None)
    monkeypatch.setattr(LanguageModel, "ops", TORCH)
    slow = written(fitted(), rows, options, settings)
    assert [out.trace.rounds for out in found] == [out.trace.rounds for out in slow]
    if not settings:
        assert sum(out.stats.accepted for out in found) > 0.6 * sum(out.stats.rounds for out in found) * 3


# ---- how much a draft costs


def drafting(head: EagleHead, gamma: int, **options: Any) -> paceline.SpeculativeDecoder:
    return paceline.SpeculativeDecoder(target(), "eagle", gamma=gamma, options={"head": head, **options})


@pytest.mark.usefixtures("by_kernels")
def test_how_much_a_drafted_token_asks_for(
    monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """One row, a chain: every number is a launch on a device. Choosing the token is one of them."""
    found: dict[str, dict[str, Any]] = {}
    for name in ("kernels", "modules"):
        few, many = (spent(drafting(made(draft_vocabulary=30), gamma), monkeypatch) for gamma in (1, 2))
        step = tuple(b - a for a, b in zip(few["propose"], many["propose"], strict=True))
        found[name] = {"a token": step, "a draft of 2": many["propose"], "noting": many["keep"]}
        monkeypatch.setattr(cuda_draft, "DEVICE", "nowhere")
    record_property("measured", f"eagle, (launches, torch): {found}")
    ours = found["kernels"]
    assert ours["a token"] == (12, 0)
    assert ours["a draft of 2"] == (24, 1)  # where its entries end
    assert ours["noting"] == (3, 0)  # what was tapped side by side, the product, and where it belongs
    assert sum(found["modules"]["a token"]) > 36  # more on a device, where norms are several


@pytest.mark.usefixtures("by_kernels")
def test_how_much_a_tree_asks_for(
    monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    head = made()
    kernels = spent(drafting(head, 2, tree="levels"), monkeypatch)["propose"]
    monkeypatch.setattr(cuda_draft, "DEVICE", "nowhere")
    modules = spent(drafting(head, 2, tree="levels"), monkeypatch)["propose"]
    record_property("measured", f"eagle, a tree of 2 levels, (launches, torch): {kernels}, by modules {modules}")
    assert kernels == (25, 2)  # two levels of a chain, the mask, and two launches more than tokens chosen
    assert sum(modules) > 90
