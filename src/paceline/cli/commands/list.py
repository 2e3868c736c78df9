"""`paceline list`: the names of drafters, rules and models."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from dataclasses import dataclass
from typing import Any, Literal

import typer

from paceline.cli.settings import command_from
from paceline.common.options import option

_WIDTH = 100  # columns of a line in a pipe


@dataclass(frozen=True)
class ListOptions:
    """The options of `paceline list`."""

    kind: Literal["drafters", "rules", "models"] | None = option(None, "What to list; everything by default.",
                                                                 argument=True)  # fmt: skip
    json: bool = option(False, "Write JSON to stdout.")


@command_from(ListOptions, config=False)
def list_names(ctx: typer.Context, options: ListOptions) -> None:
    """List the drafters, the rules and the models of the catalogue."""
    kinds = [options.kind] if options.kind is not None else list(_MAKERS)
    lists = {kind: _MAKERS[kind]() for kind in kinds}
    if options.json:
        content = lists[options.kind] if options.kind is not None else lists
        print(json.dumps(content, ensure_ascii=False, indent=1))
        return
    for number, (kind, entries) in enumerate(lists.items()):
        if options.kind is None:
            print(f"{chr(10) if number else ''}{kind}:")
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


_MAKERS = {"drafters": _drafters, "rules": _rules, "models": _models}


def _print(entries: list[dict[str, Any]]) -> None:
    """Write a table to a terminal, and one paragraph per entry to a pipe, for `grep` and for narrow windows."""
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
    """Return lines that fit: the name, and beside it the summary and the other facts."""
    others = {name: value for name, value in entry.items() if name not in ("name", "summary")}
    facts = "; ".join(f"{name}: {_cell(value)}" for name, value in others.items())
    texts = [entry["summary"], facts] if "summary" in entry else [facts]
    lines = [line for text in texts for line in textwrap.wrap(text, _WIDTH - column, break_on_hyphens=False)]
    return [f"{entry['name'] if number == 0 else '':{column}}{line}" for number, line in enumerate(lines)]


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={'…' if default is None else default}" for name, default in value.items()) or "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
