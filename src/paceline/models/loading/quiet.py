"""Keeping transformers quiet while we call it: a command that prints one line per start has no room for its bars."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import utils as hub
from transformers.utils import logging


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines below errors, no bars and no Python warnings inside; everything is put back afterwards."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_bars = not hub.are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # switches the hub's bars too
        if hub_bars and not bars:
            hub.enable_progress_bars()
        elif bars and not hub_bars:
            hub.disable_progress_bars()


def in_one_line(error: BaseException, limit: int = 200) -> str:
    """The gist of somebody else's error, fit to stand inside one sentence of ours."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
