"""Equal lengths: what does not fit is refused before anybody runs, and what came out is counted."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.errors import ModelOutputError

from .contest import Plan, Run, Task


def too_long(task: Task, plan: Plan, context: int) -> str | None:
    """Why a task has no room for as many tokens as planned, or None."""
    longest = max(len(prompt) for prompt in task.prompts)
    if longest + plan.tokens <= context:
        return None
    return f"{longest} tokens and {plan.tokens} new ones do not fit a context of {context}"


def counted(name: str, tokens: Sequence[Sequence[int]], task: Task, plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The tokens of every row, if they are as many as planned: who writes less looks fast."""
    lengths = [len(row) for row in tokens]
    if lengths != [plan.tokens] * len(task.prompts):
        raise ModelOutputError(
            f"'{name}' wrote {lengths} tokens for {task.id} instead of {plan.tokens} for each of "
            f"{len(task.prompts)} rows, so its time says nothing."
        )
    return tuple(tuple(int(token) for token in row) for row in tokens)


def cut_short(name: str, task: Task, repeat: int) -> Run:
    """What a run returns that `cancel` ended: no tokens, so that nobody takes it for a whole one."""
    return Run(name, task.id, task.category, repeat, ((),) * len(task.prompts), 0.0, 0.0)
