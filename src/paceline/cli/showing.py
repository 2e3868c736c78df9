"""`paceline.show`: a result in a notebook, on the terminal or in a browser."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from paceline.cli.terminal import Terminal, info, write_result
from paceline.engine.request import Generation
from paceline.engine.views.result_page import page_of, write_page
from paceline.engine.views.ribbon import headline


def show(out: Generation | Sequence[Generation], *, browser: bool = False) -> None:
    """Show a result, or each result of a batch: in a notebook as a ribbon, elsewhere as coloured text on stdout.
    browser: open a page with the ribbon and the staircase in a browser."""
    display = _notebook_display()
    for result in [out] if isinstance(out, Generation) else out:
        if browser:
            _open_page(result)
        elif display is not None:
            display(result)
        else:
            write_result(Terminal(), result, drafts=False)
            info(headline(result))


def _notebook_display() -> Any:
    """Return `IPython.display.display` if this is a notebook, else None. IPython on a terminal shows no HTML."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    return display


def _open_page(result: Generation) -> None:
    """Write the page to a temporary file, which stays, and open it."""
    with NamedTemporaryFile(prefix="paceline-", suffix=".html", delete=False) as file:
        path = Path(file.name)
    write_page(path, page_of(result))
    if not webbrowser.open(path.as_uri()):
        info(f"No browser was found. The page is {path}.")
