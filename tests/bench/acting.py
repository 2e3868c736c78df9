"""Candidates that only act: their seconds and texts are given beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.bench_options import BenchOptions
from paceline.bench.bench_session import BenchSession, Weigh
from paceline.bench.candidate import Cancel, Plan, Run, Task
from paceline.bench.results.records import Recorder, Report, Watcher
from paceline.bench.tasks import Conversation
from paceline.core.trace import Round, Trace
from paceline.models.pass_timing import Neighbours


@dataclass
class Actor:
    """Takes `seconds(task, repeat)` for a text that counts up from the length of the prompt."""

    name: str
    seconds: Callable[[str, int], float] = lambda task, repeat: 1.0
    log: list[tuple[str, str, int, int]] = field(default_factory=list)  # name, task, repeat, tokens
    library: str = "paceline"
    speculates: bool = False
    gamma: int = 0
    drafter: str = ""
    exact: bool = True
    off: int = 0  # how many tokens it writes too many
    fails: Callable[[str, int], Exception | None] = lambda task, repeat: None
    refuses_tasks: Sequence[str] = ()
    changed_at: int | None = None  # its text is another from there on
    accepted: int = 0  # drafted tokens that are accepted in every round, of gamma

    def refuses(self, task: Task, plan: Plan) -> str | None:
        return "it cannot" if task.id in self.refuses_tasks else None

    def run(self, task: Task, plan: Plan, repeat: int, cancel: Cancel) -> Run:
        self.log.append((self.name, task.id, repeat, plan.tokens))
        error = self.fails(task.id, repeat)
        if error is not None:
            raise error
        seconds, count = self.seconds(task.id, repeat), plan.tokens + self.off
        rows = [[len(prompt) + place for place in range(count)] for prompt in task.prompts]
        if self.changed_at is not None:
            for row in rows:
                row[self.changed_at :] = [0] * (count - self.changed_at)
        arrivals = tuple(seconds * (place + 1) / count for place in range(count))
        tokens = tuple(tuple(row) for row in rows)
        traces = tuple(Trace(self._rounds(row)) for row in tokens) if self.library == "paceline" else ()
        return Run.finished(self.name, task, plan, repeat, tokens, seconds, arrivals, traces=traces, passes=count)

    def _rounds(self, row: Sequence[int]) -> list[Round]:
        rounds, at = [], 0
        while at < len(row):
            room = len(row) - at - 1
            drafted, kept = min(self.gamma, room), min(self.accepted, room)
            draft = (*row[at : at + kept], *[999] * (drafted - kept))
            rounds.append(Round(tuple(draft), None, tuple(range(kept)), row[at + kept], kept == drafted))
            at += kept + 1
        return rounds

    def close(self) -> None:
        pass


class Chat(Conversation):
    """A conversation of one or more turns, each after what was written before."""

    def __init__(self, task: Task, turns: int = 1) -> None:
        super().__init__(task)
        self.turns = turns

    def next_task(self, written: Sequence[Sequence[int]]) -> Task | None:
        if self.turns == 1:
            return None
        self.turns -= 1
        prompts = tuple((*prompt, *row) for prompt, row in zip(self.task.prompts, written, strict=True))
        self.task = Task(f"{self.task.id}/2", self.task.category, prompts)
        return self.task


def chats(*names: str, category: str = "chat", turns: int = 1) -> list[Chat]:
    return [Chat(Task(name, category, ((1, 2, 3),)), turns) for name in names]


class Alone(Neighbours):
    """No other process uses the machine."""

    def begin(self) -> None:
        pass

    def disturbed(self) -> bool | None:
        return False


def act(
    actors: Sequence[Actor],
    conversations: Sequence[Conversation],
    tokens: int,
    recorder: Recorder | None = None,
    **how: Any,
) -> Report:
    """Measure actors as a benchmark measures candidates, and finish the record."""
    recorder = Recorder() if recorder is None else recorder
    return recorder.finish(measured(actors, conversations, tokens, recorder, **how))


def measured(
    actors: Sequence[Actor],
    conversations: Sequence[Conversation],
    tokens: int,
    recorder: Recorder,
    *,
    watcher: Watcher | None = None,
    cancel: Cancel = lambda: False,
    weigh: Weigh | None = None,
    **options: Any,
) -> bool:
    session = BenchSession(BenchOptions(**{"warm_up": 0, **options}), watcher, cancel=cancel)
    session.neighbours, session.weigh, session.recorder = Alone(), weigh, recorder
    return session.measure(actors, conversations, Plan(tokens=tokens))
