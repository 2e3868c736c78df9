"""Draw with matplotlib: its absence as one sentence, figures without windows, and one style for all charts."""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from paceline.common.errors import UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HOW_TO_GET = "Charts need matplotlib: pip install 'paceline[bench]'."
INK, DIM = "#010203", "#818283"  # in an SVG the first becomes the colour of the page's text
_NOTEBOOK_DOTS = 80  # per inch, as in the pictures of notebooks


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def check_drawing() -> None:
    """Raise `UnsupportedError` if there is no matplotlib."""
    if not can_draw():
        raise UnsupportedError(HOW_TO_GET)


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure and its axes. The figure has its own Agg canvas: no window, no global state. A notebook shows it
    once, with or without pyplot."""
    check_drawing()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class Chart(Figure):
        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=_NOTEBOOK_DOTS)
            return file.getvalue()

    figure = Chart(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def finish_axes(axes: Axes, title: str, x: str, y: str, grid: Literal["x", "y"] = "y") -> None:
    """Set the title and the labels, and draw the frame and the grid."""
    axes.set_title(escape_label(title), color=INK, fontsize=13)
    axes.set_xlabel(escape_label(x), color=INK)
    axes.set_ylabel(escape_label(y), color=INK)
    axes.tick_params(color=DIM, labelcolor=INK)
    for side, spine in axes.spines.items():
        spine.set(color=DIM, visible=side in ("left", "bottom"))
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color=DIM, alpha=0.35, linewidth=0.6)


def escape_label(text: str) -> str:
    """Escape a label: matplotlib reads a formula after a dollar sign, and skips a label that begins with _."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
