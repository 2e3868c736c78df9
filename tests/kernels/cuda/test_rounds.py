"""What lies between the passes of a round, by kernels that are interpreted on a CPU: what torch says, number by number,
and whole texts in captured rounds."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engine.graph_devices import Rehearsal
from tests.selection import covering
from tests.toys import llama
from torch import Tensor

import paceline
from paceline.core.choice import NoiseTable
from paceline.core.device_ops import TORCH, DeviceOps
from paceline.core.noise import Purpose
from paceline.core.sampling import Sampling, SamplingBatch
from paceline.core.tree import TokenTree, closure
from paceline.core.verdict import BROKEN, Verdict
from paceline.engine import round_graphs as flight
from paceline.engine.static_rows import StaticRows
from paceline.models import reader as model_reader
from paceline.models.cuda.cuda_ops import CudaOps
from paceline.models.language_model import LanguageModel
from paceline.models.reader import SlotMapping
from paceline.models.synthetic import Script, ScriptedModel
from paceline.rules.match import Match

pytest.importorskip("triton")

from paceline.kernels.cuda import choosing
from paceline.kernels.cuda import cuda_rounds as rounds
from paceline.kernels.cuda.choosing import race

from .passes import cuda_pass

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")


def numbers(*shape: int, most: int, seed: int) -> Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed))


# ---- where the tokens of a tree are


@pytest.mark.parametrize("earlier", [0, 3])
@pytest.mark.parametrize("width", [0, 1, 2])
def test_branches_are_climbed_as_torch_says(width: int, earlier: int) -> None:
    """Of random forests: positions, what is seen of the text, and the slots of each branch in their order."""
    generator, fed = torch.Generator().manual_seed(width), 9
    above = torch.arange(earlier + fed)
    parents = (torch.rand(3, earlier + fed, generator=generator) * (above + 1)).long() - 1
    length = numbers(3, 1, most=50, seed=3) + 4
    slots = length + torch.arange(-width, fed)
    slots[:, width:] += earlier
    ancestors = closure(parents)[:, earlier:]
    position = torch.cat([slots[:, :width], length + ancestors.sum(-1) - 1], 1)
    place, prefix, (branch, deep, texts, leaf) = rounds.climb(parents, length, slots, fed)
    assert torch.equal(place, position)
    assert prefix.tolist() == torch.cat([slots[:, :width] + 1, length.expand(-1, fed)], 1).tolist()
    assert texts.tolist() == length.flatten().tolist()
    members = torch.nn.functional.pad(ancestors, (0, 0, width, 0)).flatten(0, 1)
    assert deep.tolist() == members.sum(-1).tolist()
    begins = length.repeat(1, width + fed).flatten().tolist()
    for slots_of, seen, many, begin in zip(branch, members, deep.tolist(), begins, strict=True):
        assert slots_of[:many].tolist() == [begin + node for node in seen.nonzero().flatten().tolist()]
    has_child = (parents.unsqueeze(1) == above[earlier:].view(1, -1, 1)).any(-1)
    assert leaf.view(3, -1)[:, width:].bool().tolist() == (~has_child).tolist()
    assert bool(leaf.view(3, -1)[:, :width].all())


def test_parents_that_are_no_tree_are_climbed_to_an_end() -> None:
    """A device that follows a circle hangs; what comes out is of no use, and within its bounds."""
    parents, length = torch.tensor([[2, 0, 1]]), torch.tensor([[5]])
    place, _, (branch, deep, _, _) = rounds.climb(parents, length, length + torch.arange(3), 3)
    assert deep.tolist() == [3, 3, 3]
    assert ((branch >= 5) & (branch < 8)).all()
    assert place.shape == (1, 3)


# ---- the race in one launch


@pytest.mark.parametrize("some", [slice(0, 1), slice(2, 3), slice(0, 2), slice(None)])
@pytest.mark.parametrize("rows", [1, 3])
def test_places_may_lie_anywhere(rows: int, some: slice) -> None:
    """Such as those of medusa's heads: torch calls one place of each row contiguous, however far apart rows lie."""
    by_head = numbers(4, rows, 50, most=1000, seed=5).float()
    logits = by_head.transpose(0, 1)[:, some]
    assert race(logits, None, None, None, BROKEN).tolist() == logits.argmax(-1).tolist()
    one = by_head.transpose(0, 1)[:, 2, None]
    assert race(one, None, None, None, BROKEN).tolist() == one.argmax(-1).tolist()


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(("chunk", "V"), [(16, 100), (64, 64), (32, 65), (512, 40)])
def test_counters_are_zeros_again_and_chunks_do_not_matter(
    sampled: bool, chunk: int, V: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties are won by the token that comes first, in whatever chunk it is."""
    logits = numbers(2, 3, V, most=3, seed=1).float()
    batch = SamplingBatch([Sampling(temperature=0.8 * sampled, seed=i) for i in range(2)], [(), ()], "cpu")
    temperatures = batch.column("temperature", torch.float32) if sampled else None
    key, position = (batch.key(Purpose.TARGET), numbers(2, 5, most=99, seed=2)[:, 1:4]) if sampled else (None, None)
    wanted = race(logits, temperatures, key, position, BROKEN)
    if not sampled:
        assert torch.equal(wanted, (logits == logits.amax(-1, keepdim=True)).int().argmax(-1))
    monkeypatch.setattr(choosing, "_CHUNK", chunk)
    done = batch.zeros(6)
    for _ in range(2):
        assert torch.equal(race(logits, temperatures, key, position, BROKEN, done=done), wanted)
        assert not done.any()


def test_few_places_are_cut_smaller() -> None:
    assert choosing._chunk(1, 49152) == choosing._chunk(6, 151936) < choosing._chunk(48, 151936)


def test_tokens_are_written_where_they_belong() -> None:
    logits = numbers(3, 1, 50, most=1000, seed=3).float()
    room = torch.full((4, 3, 1), -9)
    assert race(logits, None, None, None, BROKEN, into=room[2]).data_ptr() == room[2].data_ptr()
    assert room[2].tolist() == logits.argmax(-1).tolist()
    assert (room[[0, 1, 3]] == -9).all()
    wide = torch.full((3, 4), -9)
    race(logits.view(1, 3, 50).expand(3, 3, 50), None, None, None, BROKEN, into=wide[:, 1:])
    assert wide.tolist() == [[-9, *logits.argmax(-1).flatten().tolist()]] * 3


def test_zeros_that_programs_hold_stay() -> None:
    batch = SamplingBatch([Sampling()], [()], "cpu")
    few = batch.zeros(3)
    assert batch.zeros(len(few)) is few
    many = batch.zeros(1000)
    assert len(many) >= 1000
    assert any(each is few for each in batch._zeros)


# ---- beginning, following, committing


@pytest.mark.parametrize("depth", [0, 1, 5, 8])
def test_begin(depth: int) -> None:
    length, end = torch.tensor([[7], [2], [40]]), torch.tensor([[10], [2], [400]])
    position, most = rounds.begin(length, end, depth)
    assert torch.equal(position, length + torch.arange(depth + 1))
    assert torch.equal(most, (end - length - 1).squeeze(1).clamp(0, depth))


@pytest.mark.parametrize(("width", "fed"), [(2, 0), (1, 5), (1, 0), (3, 20), (1, 63)])
@pytest.mark.parametrize("turned", [False, True])
def test_lay(width: int, fed: int, turned: bool) -> None:
    rows: Any = SimpleNamespace(
        text=numbers(6, 90, most=99, seed=1)[::2], length=torch.tensor([[9], [4], [26]]), bound=30
    )
    tokens = None
    if fed:
        tokens = numbers(fed, 3, most=99, seed=2).t() if turned else numbers(3, fed, most=99, seed=2)
    later = [numbers(3, 1, most=99, seed=seed) for seed in (3, 4)]
    message = []
    for ops in (TORCH, CudaOps()):
        layout = SlotMapping(ops)
        message.append([layout.of(rows, 0, width, tokens)])
        message[-1] += [layout.of(rows, fed + step, 0, each) for step, each in enumerate(later)]
        message[-1] += [layout.of(rows, fed + 2, 0, torch.cat(later, 1))]
        layout.forget()
        message[-1] += [layout.of(rows, 0, 0, later[0])]
    for slow, fast in zip(*message, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(slow, fast, strict=True))


@pytest.mark.parametrize("N", [1, 2, 5, 8])
@pytest.mark.parametrize("counted", [False, True])
def test_follow(N: int, counted: bool) -> None:
    picks = numbers(64, N + 1, most=2, seed=N)
    picks[:4, 1:] = BROKEN
    tree = TokenTree(numbers(N, 64, most=2, seed=N + 1).t(), count=numbers(64, most=N + 2, seed=3) if counted else None)
    slow, fast = (
        SimpleNamespace(pick=lambda logits: picks, batch=SimpleNamespace(ops=ops)) for ops in (TORCH, CudaOps())
    )
    wanted = Match().verify(tree, picks, slow)  # type: ignore[arg-type]
    got = Match().verify(tree, picks, fast)  # type: ignore[arg-type]
    assert torch.equal(got.emitted, wanted.emitted)
    assert torch.equal(got.accepted, wanted.accepted)
    assert {0, 1} <= set(wanted.accepted.flatten().tolist())


class Some(StaticRows):
    """Five rows, one of them at its end."""

    def __init__(self, ops: DeviceOps) -> None:
        self.ops = ops
        self.batch = SamplingBatch([Sampling()] * 5, [()] * 5, "cpu")
        self.device = torch.device("cpu")
        store = numbers(8, 40, most=99, seed=1)
        self.text, self.length = store[:5], torch.tensor([[3], [9], [20], [2], [11]])
        self.end = torch.tensor([[30], [12], [21], [2], [30]])
        self._most, self._depth = None, 0


@pytest.mark.parametrize(("N", "reach"), [(0, None), (1, None), (5, None), (1, 1), (5, 3), (9, 1), (4, 4)])
@pytest.mark.parametrize("counted", [False, True])
def test_write(N: int, reach: int | None, counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """reach: of a tree, the longest path."""
    tokens, count = numbers(N, 5, most=99, seed=2).t(), numbers(5, most=N + 1, seed=3) if counted else None
    tree = TokenTree(tokens, None if reach is None else numbers(N, 5, most=99, seed=6).t(), count)
    D = N if reach is None else reach
    path = None if reach is None else numbers(5, N, most=99, seed=7)[:, :D]
    verdict = Verdict(numbers(5, D + 1, most=99, seed=4), numbers(5, 1, most=D + 1, seed=5), path)
    slow, fast = Some(TORCH), Some(CudaOps())
    wanted = slow.write(verdict, tree)
    monkeypatch.setattr(DeviceOps, "commit", None)  # not that way
    assert torch.equal(fast.write(verdict, tree), wanted)
    assert torch.equal(fast.text, slow.text)
    assert torch.equal(fast.length, slow.length)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("keep", [1, 4])
def test_say(steps: int, keep: int) -> None:
    message, ids, length = (
        numbers(30, steps, most=30, seed=1),
        numbers(2, 4, most=30, seed=2),
        torch.tensor([[9], [40]]),
    )
    position = length + torch.arange(-2, 2)
    logits = torch.zeros(2, keep, 32)
    rounds.say(logits[..., :30], message, ids, position, length, 7.0)
    step = (position[:, -keep:] + 1 - length).clamp(0, steps - 1)
    wanted = torch.zeros(2, keep, 32).scatter_(-1, message[ids[:, -keep:], step].unsqueeze(-1), 7.0)
    assert torch.equal(logits, wanted)


# ---- whole texts

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": [3, 4, 5]},
    {"temperature": [0.0, 0.9, 1.2], "seed": 1},
    {"temperature": 0.8, "repetition_penalty": 1.3, "seed": 2},
]


def counting(asked: list[str]) -> DeviceOps:
    """The kernels, and a note of each that is asked."""

    def noted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: asked.append(name) or kernel(*given, **named)

    ops = CudaOps()
    for name, kernel in list(vars(ops).items()):
        setattr(ops, name, noted(name.removesuffix("_kernel"), kernel))
    return ops


def texts(draft: Any, options: dict[str, Any], rows: int, settings: dict[str, Any], scripted: bool) -> list[list[int]]:
    target, small = (paceline.LanguageModel(llama(seed, num_hidden_layers=2 - seed).float()) for seed in (0, 1))
    if scripted:
        script = Script.written(target.vocabulary)
        target, small = ScriptedModel(target, script), ScriptedModel(small, script, (0.9, 0.5))
    named = small if draft == "model" else draft
    decoder = paceline.SpeculativeDecoder(target, named, options=options, gamma=3, rows=rows)
    prompts = [[1, 2, 3, 1, 2], [7, 8], [4, 9, 6]]
    return [out.tokens for out in decoder.generate(prompts, max_new_tokens=[9, 4, 12], **settings)]


@pytest.mark.parametrize(
    ("drafts", "settings"),
    covering(
        [("model", {}, 1, False), ("model", {}, 3, False), ("model", {}, 2, True),
         ("model", {"tree": "levels"}, 2, False), (None, {}, 2, False), ("prompt-lookup", {}, 2, False)],
        SETTINGS,
    ),
)  # fmt: skip
def test_the_same_texts(
    drafts: tuple[Any, dict[str, Any], int, bool], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    draft, options, rows, scripted = drafts
    monkeypatch.setattr(flight, "programs_for", lambda lm: Rehearsal())
    wanted = texts(draft, options, rows, settings, scripted)
    asked: list[str] = []
    monkeypatch.setattr(LanguageModel, "ops", counting(asked))
    assert texts(draft, options, rows, settings, scripted) == wanted
    plain = "repetition_penalty" not in settings
    assert ("race" in asked) == plain
    assert ("say" in asked) == scripted
    assert "slots" in asked


@pytest.mark.parametrize("temperatures", [0.0, 0.8])
def test_how_much_a_round_asks_for(temperatures: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row, a chain of 3: every number is a launch on a device."""
    monkeypatch.setattr(flight, "programs_for", lambda lm: Rehearsal())
    asked: list[str] = []
    monkeypatch.setattr(LanguageModel, "ops", counting(asked))
    whole = flight.GraphRounds._whole_round
    spent = []

    def counted(self: Any, rows: Any) -> Any:
        asked.clear()
        launched = whole(self, rows)
        spent.append({name: asked.count(name) for name in asked})
        return launched

    monkeypatch.setattr(flight.GraphRounds, "_whole_round", counted)
    target, small = (paceline.LanguageModel(llama(seed, num_hidden_layers=2 - seed).float()) for seed in (0, 1))
    decoder = paceline.SpeculativeDecoder(target, small, gamma=3)
    decoder.generate([1, 2, 3], max_new_tokens=12, temperature=temperatures, seed=1)
    assert spent
    assert all(each == {"begin": 1, "slots": 2, "race": 4, "match": 1, "commit": 1} for each in spent)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("rows", "settings"),
    [(1, {}), pytest.param(2, {"temperature": 0.9, "seed": [3, 4]})],
    ids=str,
)
def test_rounds_by_kernels_alone(rows: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes and all: what a device captures."""
    sizes = {"vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128}
    models = [paceline.LanguageModel(llama(seed, num_hidden_layers=2 - seed, **sizes).float()) for seed in (0, 1)]
    prompts, limits = [[1, 2, 3, 1, 2], [7, 8]], {"max_new_tokens": [9, 5], **settings}
    plain = paceline.SpeculativeDecoder(models[0], draft=None, runner="eager").generate(prompts, **limits)

    monkeypatch.setattr(model_reader, "kernel_pass", cuda_pass)
    monkeypatch.setattr(flight, "programs_for", lambda lm: Rehearsal())
    asked: list[str] = []
    monkeypatch.setattr(LanguageModel, "ops", counting(asked))
    found = paceline.SpeculativeDecoder(*models, gamma=3, rows=rows).generate(prompts, **limits)
    assert [out.tokens for out in found] == [out.tokens for out in plain]
    assert {"begin", "slots", "race", "match", "commit"} <= set(asked)


def test_positions_that_are_known_are_not_made_again() -> None:
    batch = SamplingBatch([Sampling()], [()], "cpu")
    known = torch.tensor([[5, 6]])
    assert NoiseTable(batch, torch.tensor([[5]]), 2, known).position is known
    assert NoiseTable(batch, torch.tensor([[5]]), 2).position.tolist() == [[5, 6]]
