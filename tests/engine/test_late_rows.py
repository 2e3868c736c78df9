"""A drafter reads the prompt of a row that joins in pieces, between the rounds of the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.serve.collected import small_model
from tests.toys import llama

import paceline
from paceline.common.errors import DrafterWarning, PacelineWarning
from paceline.core.costs import Costs
from paceline.drafters.adaptive.group import DrafterGroup
from paceline.drafters.heads.eagle import Eagle, EagleHead, Steps
from paceline.drafters.models.draft_lm import DraftLayers
from paceline.drafters.models.draft_model import DraftModel
from paceline.engine import scheduler as scheduling
from paceline.engine.decoder import new_row
from paceline.engine.request import build_requests
from paceline.engine.rows import Row
from paceline.engine.scheduler import Party, Scheduler
from paceline.models.language_model import LanguageModel
from paceline.models.reader import SlotReader

PIECE = 16
LONG = [(n * n + 3 * n) % 40 for n in range(150)]
STREAMS = [[1, 2, 3], [7, 8, 9, 1, 5]]
FREE = Costs({1: {1: 1.0, 64: 1.01}})


@cache
def model() -> LanguageModel:
    return small_model()


@cache
def small_draft() -> LanguageModel:
    return LanguageModel(llama(4, max_position_embeddings=512).float())


MAKERS: dict[str, Callable[[], Any]] = {
    "eagle": lambda: ("eagle", {"head": EagleHead.random(model())}),
    "eagle tree": lambda: ("eagle", {"head": EagleHead.random(model()), "tree": "levels"}),
    "draft-model": lambda: ("draft-model", {"model": small_draft()}),
    "subset": lambda: ("draft-model", {"model": small_draft(), "vocabulary": 12}),
    "on a grid": lambda: ("draft-model", {"model": LanguageModel(llama(4, max_position_embeddings=512))}),
    "draft-lm": lambda: ("draft-lm", {"head": DraftLayers(model(), (0,))}),
    "auto": lambda: ("auto", {"costs": FREE, "drafters": (MAKERS["eagle"](), "suffix", MAKERS["draft-model"]())}),
    "portfolio": lambda: ("portfolio", {"cost": "nodes", "drafters": (MAKERS["eagle"](), "recycling")}),
}


@pytest.fixture(autouse=True)
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time in the scheduler is the number of its questions, so one piece fits between two rounds. It has 16 tokens.
    A draft model without kernels reads pieces of 32."""
    clock = count()
    monkeypatch.setattr(scheduling, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    monkeypatch.setattr(scheduling._Pace, "tokens", lambda self, start, seconds: PIECE)
    monkeypatch.setattr("paceline.models.reader.CHUNK", 2 * PIECE)


class Server:
    """A scheduler that reads prompts between rounds, as in the server."""

    def __init__(self, draft: Any, late: bool = True, rule: str = "match", slots: int = 4) -> None:
        self.decoder = paceline.SpeculativeDecoder(model(), draft, gamma=3, rule=rule)
        self.loop = self.decoder.new_loop()
        self.scheduler = Scheduler(self.loop, slots, total=slots + 2, slot_tokens=300, interleave=True)
        self.scheduler._may_be_late &= late

    @property
    def late(self) -> list[Any]:
        return self.loop.drafting.late

    def submit(self, prompt: Sequence[int], tokens: int, **settings: Any) -> Row:
        (request,) = build_requests(1, {"max_new_tokens": tokens, "ignore_eos": True, **settings})
        row = new_row(model(), 0, list(prompt), request, self.decoder.rule)
        self.scheduler.submit(Party([row]))
        return row

    def until(self, holds: Callable[[], Any]) -> None:
        while not holds():
            assert self.scheduler.busy, "all sequences have ended"
            self.scheduler.step()

    def streams(self, tokens: int = 120) -> list[Row]:
        rows = [self.submit(prompt, tokens, temperature=0.9, seed=at) for at, prompt in enumerate(STREAMS)]
        self.until(lambda: all(len(row.tokens) > 2 for row in rows))
        return rows

    def end(self) -> None:
        while self.scheduler.busy:
            self.scheduler.step()


def check(rows: Sequence[Row]) -> None:
    """Each row has the tokens that its request has alone, without a drafter."""
    plain = paceline.SpeculativeDecoder(model(), None)
    for row in rows:
        settings = {"temperature": row.request.sampling.temperature, "seed": row.request.sampling.seed}
        alone = plain.generate(row.prompt, max_new_tokens=row.limit, ignore_eos=True, **settings)
        assert row.tokens == alone.tokens[: len(row.tokens)]
        assert len(row.tokens) == row.limit or row.stopper.stop.finish_reason == "cancelled"  # type: ignore[union-attr]


def drafts(row: Row) -> dict[int, Any]:
    """The draft of each round that had one, by the number of tokens before it."""
    found, written = {}, 0
    for entry in row.trace.rounds:
        if entry.drafted:
            found[written] = (entry.drafted, tuple(entry.above))
        written += len(entry.emitted)
    return found


def same(here: dict[int, Any], there: dict[int, Any]) -> None:
    """Two drafters that had the same text drafted the same, if both drafted."""
    common = sorted(here.keys() & there.keys())
    assert len(common) >= 10
    # near the end of a row, the longest row of the batch decides how deep the drafts are
    assert [here[at] for at in common[:-2]] == [there[at] for at in common[:-2]]


@pytest.mark.parametrize("name", MAKERS)
def test_texts_are_those_of_each_request_alone(name: str) -> None:
    server = Server(MAKERS[name]())
    rows = server.streams()
    rows += [server.submit(LONG, 60, temperature=0.9, seed=7), server.submit(LONG[:90], 40, temperature=0)]
    server.until(lambda: server.late)
    server.until(lambda: not server.late and rows[3].tokens)
    server.end()
    check(rows)
    late = rows[2].trace.rounds
    assert not any(entry.drafted for entry in late[:8]), "a draft without the whole text"
    assert name == "auto" or any(entry.drafted for entry in late[12:])


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in ("auto", "portfolio")])
def test_the_drafts_after_it_are_those_of_a_drafter_that_read_at_once(name: str) -> None:
    found = []
    for late in (True, False):
        server = Server(MAKERS[name](), late)
        rows = [*server.streams(), server.submit(LONG, 60, temperature=0.9, seed=7)]
        server.end()
        found.append([drafts(row) for row in rows])
    for here, there in zip(*found, strict=True):
        same(here, there)


@pytest.mark.parametrize("name", ["eagle", "draft-model", "draft-lm"])
def test_between_two_rounds_the_drafter_reads_one_piece(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [0]
    entries, pieces, observe = Steps.read, SlotReader.read_piece, Eagle.observe_prompt

    def read_entries(self: Any, rows: Any, some: slice, position: Any, visible: int) -> Any:
        seen[-1] += position.numel()
        return entries(self, rows, some, position, visible)

    def read_piece(self: Any, first: int, ids: Any, start: int, scored: bool = False) -> Any:
        seen[-1] += ids.numel() if self is not server.loop.reader else 0
        return pieces(self, first, ids, start, scored)

    def observed(self: Any, rows: Any, piece: Any) -> None:
        assert piece.taps[0].shape[1] <= PIECE
        observe(self, rows, piece)

    server = Server(MAKERS[name]())
    rows = server.streams()
    monkeypatch.setattr(Steps, "read", read_entries)
    monkeypatch.setattr(SlotReader, "read_piece", read_piece)
    monkeypatch.setattr(Eagle, "observe_prompt", observed)
    run = type(server.loop).step

    def step(self: Any) -> Any:
        between, events = seen[-1], run(self)
        seen[-1] = between  # a draft reads the last tokens again
        seen.append(0)
        return events

    monkeypatch.setattr(type(server.loop), "step", step)
    rows.append(server.submit(LONG, 60))
    server.end()
    assert max(seen) <= PIECE
    assert len(LONG) - 2 <= sum(seen) <= len(LONG) + 12, "the prompt, and what was written meanwhile"
    check(rows)


@pytest.mark.parametrize("name", ["eagle", "draft-model", "on a grid"])
def test_a_draft_reads_nothing_more_for_a_late_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    widths, starts = list[int](), set[int]()
    draft, extend, piece = Steps.draft, SlotReader.extend, SlotReader.read_piece

    def drafted(self: Any, rows: Any, width: int) -> Any:
        widths.append(width)
        return draft(self, rows, width)

    def extended(self: Any, rows: Any, width: int, *arguments: Any) -> Any:
        widths.extend([width] if self is not server.loop.reader else [])
        return extend(self, rows, width, *arguments)

    def read_piece(self: Any, first: int, ids: Any, start: int, scored: bool = False) -> Any:
        starts.update([start] if self is not server.loop.reader else [])
        return piece(self, first, ids, start, scored)

    server = Server(MAKERS[name]())
    server.streams()
    monkeypatch.setattr(Steps, "draft", drafted)
    monkeypatch.setattr(SlotReader, "extend", extended)
    monkeypatch.setattr(SlotReader, "read_piece", read_piece)
    server.submit(LONG, 60)
    server.end()
    assert 1 <= max(widths) <= 4, "the accepted tokens of a round"
    if name == "on a grid":
        assert starts == set(range(0, len(LONG), 2 * PIECE))


@pytest.mark.parametrize("name", ["eagle", "draft-model", "auto"])
@pytest.mark.parametrize("cancelled", [(0,), (2,), (0, 1), (1, 2)])
def test_rows_that_end_while_another_is_late(name: str, cancelled: Sequence[int]) -> None:
    """Row 2 is late. The last row takes the index of a row that ends."""
    server = Server(MAKERS[name]())
    rows = [*server.streams(), server.submit(LONG, 60), server.submit(LONG[10:], 40, temperature=0.7, seed=3)]
    server.until(lambda: server.late and server.late[0].read >= 2 * PIECE)
    assert server.late[0].row is rows[2]
    for index in cancelled:
        rows[index].cancel()
    server.until(lambda: len(server.late) == 1 and server.late[0].row is rows[3])
    server.end()
    check(rows)
    left = [row for index, row in enumerate(rows) if index not in cancelled]
    assert name == "auto" or any(entry.drafted for entry in left[-1].trace.rounds)
    assert not server.late
    assert not any(row.late for row in left)


@pytest.mark.parametrize("ended", [True, False])
def test_a_late_row_is_the_source_of_another_prompt(ended: bool) -> None:
    """The states that a head stores for its prompt are computed then, although its text is unread."""
    found, prompt = [], [*LONG[:130], 1, 2, 3]
    for late in (True, False):
        server = Server(MAKERS["eagle"](), late)
        rows = [*server.streams(), server.submit(LONG, 3 if ended else 60)]
        server.until(lambda server=server, first=rows[2], late=late: server.late or (not late and first.tokens))
        if ended:
            server.until(lambda first=rows[2]: first.stopper.stop)
        rows.append(server.submit(prompt, 60))
        if not ended:
            with torch.inference_mode():
                assert server.scheduler._begin_next(), "the drafter catches up before it begins"
        server.end()
        assert rows[3].cached == 130
        check(rows)
        found.append(drafts(rows[3]))
    same(*found)


@pytest.mark.parametrize("name", ["eagle", "draft-model", "auto"])
@pytest.mark.parametrize("method", ["admit_unread", "catch_up", "propose", "keep"])
def test_a_drafter_that_fails_while_a_row_is_late(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(MAKERS[name]())
    rows = server.streams()
    cls = DraftModel if name == "draft-model" else Eagle
    inner, failures = getattr(cls, method), []

    def failing(self: Any, *arguments: Any) -> Any:
        if not failures and (method == "admit_unread" or (server.late and server.late[0].read >= 2 * PIECE)):
            failures.append(method)
            raise RuntimeError("went wrong")
        return inner(self, *arguments)

    monkeypatch.setattr(cls, method, failing)
    rows.append(server.submit(LONG, 90))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        server.end()
    assert failures or name == "auto", "the test did nothing"
    assert len(caught) == len(failures)
    assert all(issubclass(each.category, (DrafterWarning, PacelineWarning)) for each in caught)
    check(rows)
    assert not rows[2].late
    if name != "auto":
        assert any(entry.drafted for entry in rows[2].trace.rounds), "it drafts again after the pause"


@pytest.mark.parametrize(("draft", "rule"), [("eagle", "ratio"), ("draft-model", "traversal")])
def test_where_the_text_depends_on_drafts_the_drafter_reads_at_once(draft: str, rule: str) -> None:
    server = Server(MAKERS[draft](), rule=rule)
    rows = [*server.streams(), server.submit(LONG, 20, temperature=0.9, seed=1)]
    server.until(lambda: rows[2].tokens or server.late)
    assert not server.late
    server.end()


@pytest.mark.parametrize("draft", [None, "suffix", "self-quantized", "auto"])
def test_a_drafter_that_cannot_catch_up_is_never_late(draft: str | None) -> None:
    server = Server(draft)
    rows = [*server.streams(), server.submit(LONG, 20)]
    server.until(lambda: rows[2].tokens)
    assert not server.late
    server.end()
    check(rows)


def test_the_first_sequence_is_read_at_once() -> None:
    server = Server(MAKERS["eagle"]())
    row = server.submit(LONG, 10)
    server.until(lambda: row.tokens or server.late)
    assert not server.late
    server.end()


def test_a_member_learns_nothing_from_the_draft_of_a_late_row() -> None:
    server = Server(MAKERS["portfolio"]())
    rows = [*server.streams(), server.submit(LONG, 30)]
    server.until(lambda: server.late)
    group: Any = server.loop.drafter
    assert isinstance(group, DrafterGroup)
    before = [stats.gain.weight for stats in group._row_stats[2]]
    server.until(lambda: len(rows[2].tokens) > 3)
    assert server.late
    assert [stats.gain.weight for stats in group._row_stats[2]] == before
    server.until(lambda: not server.late and len(rows[2].tokens) > 20)
    assert [stats.gain.weight for stats in group._row_stats[2]] != before


def test_the_pace_knows_that_later_positions_take_longer() -> None:
    pace = scheduling._Pace()
    for start in range(0, 4000, 50):
        pace.add(start, 50, 50 * (1e-3 + 4e-7 * (start + 25)))
    assert pace.seconds(3000, 50) == pytest.approx(50 * (1e-3 + 4e-7 * 3025), rel=1e-6)
    assert pace.seconds(0, 50) == pytest.approx(50 * (1e-3 + 4e-7 * 25), rel=1e-6)


def test_the_hidden_states_of_a_late_row_are_cut_at_each_stop() -> None:
    from paceline.core.contracts import PromptTaps
    from paceline.engine.drafter_calls import LateRow

    values = torch.arange(30.0).view(1, 30, 1)
    pieces = [PromptTaps(5, 4, (values[:, 4:14],)), PromptTaps(5, 14, (values[:, 14:],))]
    late = LateRow(None, pieces)  # type: ignore[arg-type]
    found = [[(each.first, each.start, each.taps[0].flatten().tolist()) for each in late.take_taps(2, stop)]
             for stop in (3, 8, 16, 40)]  # fmt: skip
    assert found == [
        [],
        [(2, 4, [4, 5, 6, 7])],
        [(2, 8, [8, 9, 10, 11, 12, 13]), (2, 14, [14, 15])],
        [(2, 16, list(range(16, 30)))],
    ]
    assert not late.taps
