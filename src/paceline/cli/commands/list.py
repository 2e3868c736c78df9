"""`paceline list`: what there is to choose from."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from enum import Enum
from typing import Annotated, Any

import typer

_WIDTH = 100  # columns of a line in a pipe


class Kind(str, Enum):
    """What can be listed."""

    DRAFTERS = "drafters"
    RULES = "rules"
    MODELS = "models"


def list_names(
    kind: Annotated[Kind | None, typer.Argument(help="What to list; everything without it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="JSON on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", metavar="", help="Show the traceback of an error.")] = False,
) -> None:
    """List the drafters, the rules or the models that have a name here."""
    made = {each.value: _MAKERS[each]() for each in ([kind] if kind is not None else Kind)}
    if as_json:
        print(json.dumps(made[kind.value] if kind is not None else made, ensure_ascii=False, indent=1))
        return
    for name, entries in made.items():
        if kind is None:
            print(f"{'' if name == Kind.DRAFTERS.value else chr(10)}{name}:")
        _print(entries)


def _drafters() -> list[dict[str, Any]]:
    import paceline.drafters  # noqa: F401  registers them
    from paceline.core.contracts import DRAFTERS

    return [
        {"name": name, "summary": DRAFTERS.summary(name), "options": _options(DRAFTERS[name].Options)}
        for name in DRAFTERS
    ]


def _options(cls: type) -> dict[str, Any]:
    return {f.name: None if f.default is dataclasses.MISSING else f.default for f in dataclasses.fields(cls)}


def _rules() -> list[dict[str, Any]]:
    import paceline.rules  # noqa: F401  registers them
    from paceline.core.contracts import RULES

    return [
        {
            "name": name,
            "summary": RULES.summary(name),
            "keeps": RULES[name].exact or "nothing: lossy",
            "options": _options(RULES[name].Options),
        }
        for name in RULES
    ]


def _models() -> list[dict[str, Any]]:
    from paceline.models.loading import hub
    from paceline.models.loading.catalogue import CATALOGUE
    from paceline.models.loading.disk_cache import WeightCache

    entries = WeightCache().entries
    return [
        {
            "name": entry.name,
            "hub": entry.hub_id,
            "megabytes": round(entry.download_bytes / 1e6),
            "licence": entry.license,
            "cached": (entries / entry.key).is_dir() or hub.cached(entry.hub_id) is not None,
        }
        for entry in CATALOGUE
    ]


_MAKERS = {Kind.DRAFTERS: _drafters, Kind.RULES: _rules, Kind.MODELS: _models}


def _print(entries: list[dict[str, Any]]) -> None:
    """A table on a terminal; in a pipe one paragraph per entry, for `grep` and for narrow windows."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False)
    if console.is_terminal:
        console.print(_table(entries))
        return
    column = max((len(entry["name"]) for entry in entries), default=0) + 2
    for entry in entries:
        print("\n".join(_paragraph(entry, column)))


def _table(entries: list[dict[str, Any]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in entries[0] if entries else ():
        table.add_column(column, no_wrap=column == "name", overflow="fold")
    for entry in entries:
        table.add_row(*(_cell(value) for value in entry.values()))
    return table


def _paragraph(entry: dict[str, Any], column: int) -> list[str]:
    """The name, and beside it the summary and what else there is to say, in lines that no terminal breaks."""
    others = {name: value for name, value in entry.items() if name not in ("name", "summary")}
    facts = "; ".join(f"{name}: {_cell(value)}" for name, value in others.items())
    told = [entry["summary"], facts] if "summary" in entry else [facts]
    lines = [line for text in told for line in textwrap.wrap(text, _WIDTH - column, break_on_hyphens=False)]
    return [f"{entry['name'] if number == 0 else '':{column}}{line}" for number, line in enumerate(lines)]


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={'…' if default is None else default}" for name, default in value.items()) or "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
