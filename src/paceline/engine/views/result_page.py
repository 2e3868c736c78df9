"""One text as a page: what wrote it, the ribbon, the staircase and the settings. It needs no other files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.common.text_formats import writing
from paceline.engine.views.ribbon import ribbon
from paceline.engine.views.staircase import has_times, stairs_of, svg_of

if TYPE_CHECKING:
    from paceline.engine.request import Generation

_PROMPT = 2000  # characters of the prompt


def page_of(
    result: Generation, about: str = "", settings: Mapping[str, Any] | None = None, plain: Generation | None = None
) -> str:
    """Return the page. about: one line, such as `decoder.describe()`; settings: of the text; plain: the same text from
    plain decoding, as a second stair."""
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>A text and its rounds</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # a browser then loads and runs nothing, whatever a text contains
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<style>\n{files('paceline.engine.views').joinpath('result_page.css').read_text('utf-8')}</style></head>",
            "<body><main><h1>A text and its rounds</h1>",
            *([f'<p class="about">{escape(about)}</p>'] if about else []),
            *_prompt(result),
            ribbon(result),
            *_staircase(result, plain),
            *_settings({**(settings or {}), "seed": result.seed}),
            "</main></body></html>\n",
        ]
    )


def write_page(path: Path, page: str) -> None:
    with writing("The page", path):
        path.write_text(page, "utf-8")


def _prompt(result: Generation) -> list[str]:
    if result.tokenizer is None or not result.prompt_tokens:
        return []
    text = str(result.tokenizer.decode(result.prompt_tokens))
    shown = text if len(text) <= _PROMPT else "… " + text[-_PROMPT:]
    tokens = f"{len(result.prompt_tokens)} tokens"
    return [f"<details><summary>Prompt, {tokens}</summary><pre>{escape(shown)}</pre></details>"]


def _staircase(result: Generation, plain: Generation | None) -> list[str]:
    if not has_times(result) or (plain is not None and not has_times(plain)):
        return []
    stairs = stairs_of(result, plain)
    keys = "".join(f'<li class="s{at}">{escape(stair.label)}</li>' for at, stair in enumerate(stairs))
    turns = " The two were measured one after the other." if plain is not None else ""
    note = f"One step is one round. The time begins with the first round.{turns}"
    return [f"<h2>Tokens by time</h2><ul>{keys}</ul>{svg_of(stairs)}<p>{note}</p>"]


def _settings(settings: Mapping[str, Any]) -> list[str]:
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(_shown(value))}</td></tr>"
        for name, value in settings.items()
        if value is not None
    )
    return [f"<h2>Settings</h2><table>{rows}</table>"]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
