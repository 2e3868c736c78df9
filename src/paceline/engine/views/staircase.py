"""The staircase: the tokens of a text by the time, with one step per round. As SVG for pages, and by matplotlib."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING

from paceline.common.drawing import escape_label, finish_axes, new_figure
from paceline.common.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from paceline.engine.request import Generation

_COLOURS, _DASHES = ("#009e73", "#0072b2"), ("-", "--")
_X, _Y = "time (ms)", "tokens"
_WIDTH, _HEIGHT = 640, 260  # of the SVG
_LEFT, _TOP, _RIGHT, _BOTTOM = 46, 12, 14, 40  # margins of the SVG
_TICKS = 5  # labelled values of an axis, at most


@dataclass(frozen=True)
class Stair:
    """The ends of the rounds of one text: milliseconds from its first round, and tokens so far."""

    name: str
    times: list[float]
    tokens: list[int]

    @property
    def label(self) -> str:
        return f"{self.name}: {self.tokens[-1]} tokens in {self.times[-1]:.0f} ms, {len(self.times)} rounds"


def stairs_of(result: Generation, plain: Generation | None = None) -> list[Stair]:
    """Return the stair of a result, and that of plain decoding if it is given."""
    return [_stair(each) for each in (result, plain) if each is not None]


def has_times(result: Generation) -> bool:
    """Return whether every round of the text has a measured time."""
    return 0 < len(result.trace.rounds) == len(result.trace.seconds)


def _stair(result: Generation) -> Stair:
    if not has_times(result):
        raise InputError("This result has no time for each round, as of a beam search; plot the result of `generate`.")
    plain = not any(entry.drafted for entry in result.trace.rounds)
    name = "plain decoding" if plain else result.drafter or "speculative decoding"
    times = [1000 * seconds for seconds in accumulate(result.trace.seconds)]
    return Stair(name, times, list(accumulate(len(entry.emitted) for entry in result.trace.rounds)))


def figure_of(stairs: list[Stair]) -> Figure:
    """Return a figure of matplotlib."""
    figure, axes = new_figure(7.0, 3.6)
    for stair, colour, dash in zip(stairs, _COLOURS, _DASHES, strict=False):
        label = escape_label(stair.label)
        axes.step([0, *stair.times], [0, *stair.tokens], where="post", color=colour, linestyle=dash, label=label)
    finish_axes(axes, "Tokens by time", _X, _Y)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="lower right")
    return figure


def svg_of(stairs: list[Stair]) -> str:
    """Return an `svg` element. The CSS of the page gives the colours and the dashes of its paths."""
    last = max(1e-3, *(stair.times[-1] for stair in stairs))
    most = max(1, *(stair.tokens[-1] for stair in stairs))
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    base = _HEIGHT - _BOTTOM

    def x(time: float) -> str:
        return f"{_LEFT + wide * time / last:.1f}"

    def y(tokens: float) -> str:
        return f"{base - high * tokens / most:.1f}"

    lines = [f'<path class="g" d="M{_LEFT} {y(value)}h{wide}"/>' for value in _ticks(most)]
    marks = [f'<text x="{_LEFT - 6}" y="{y(v)}" dy=".35em" text-anchor="end">{v:g}</text>' for v in _ticks(most)]
    marks += [f'<text x="{x(v)}" y="{base + 16}" text-anchor="middle">{v:g}</text>' for v in _ticks(last)]
    marks.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">{_X}</text>')
    for number, stair in enumerate(stairs):
        steps = "".join(f"H{x(time)}V{y(tokens)}" for time, tokens in zip(stair.times, stair.tokens, strict=True))
        lines.append(f'<path class="s{number}" d="M{_LEFT} {base}{steps}"/>')
    told = escape("; ".join(stair.label for stair in stairs))
    return (
        f'<svg role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}" aria-label="{_Y} by {_X}. {told}">'
        f"{''.join(lines)}{''.join(marks)}</svg>"
    )


def _ticks(top: float) -> list[float]:
    """Return round values from 0 to at most `top`."""
    power = 10.0 ** math.floor(math.log10(top / _TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if top / (power * factor) <= _TICKS)
    return [round(number * step, 10) for number in range(int(top / step + 1e-9) + 1)]
