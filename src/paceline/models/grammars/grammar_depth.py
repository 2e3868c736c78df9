"""Bound how deep a grammar goes along its references. llguidance follows them by recursion, and a stack that overflows
ends the process."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from paceline.common.errors import InputError

NESTING = 128  # objects and lists inside one another in a schema
DEEPEST = 768  # levels of all schemas or rules of a chain of references; a stack of 8 MiB holds about 2,000
_LARK = re.compile(
    r'(?://|#)[^\n]*|"(?:\\[\s\S]|[^"\\\n])*"|/(?:\\.|[^/\\])+/'
    r"|(?P<line>\n[ \t?!]*)|(?P<name>[\w-]+)|(?P<open>[(\[{])|(?P<close>[)\]}])"
)


def check_schema(setting: str, schema: Any) -> None:
    """Refuse a JSON schema that is nested too deeply, or whose chains of `$ref` are."""
    depth, refs, bases = _levels(schema)
    if depth > NESTING:
        raise InputError(f"{setting} is nested {depth:,} levels deep, and the limit is {NESTING}; make it flatter.")
    weights, targets = {"#": depth}, {"#": set[str]()}
    waiting = [("#", refs)]
    names: dict[int, str] = {id(schema): "#"}
    while waiting:
        source, refs = waiting.pop()
        for ref in refs:
            found = None if bases else _resolved(schema, ref)
            # A name that is no path from the root can stand for any place of the schema.
            name = ref if found is None else names.setdefault(id(found), ref)
            targets[source].add(name)
            if name not in targets:
                weights[name], inner, _ = (depth, {"#"}, 0) if found is None else _levels(found)
                targets[name] = set()
                waiting.append((name, inner))
    _refuse_chain(setting, "$ref", longest_chain(weights, targets))


def check_lark(setting: str, text: str) -> None:
    """Refuse a Lark grammar whose chains of rules or terminals are too deep."""
    weights: dict[str, int] = {}
    targets: dict[str, set[str]] = {}
    rule, depth, deepest, before, begins = "", 0, 0, 0, False
    for match in _LARK.finditer("\n" + text):
        kind = match.lastgroup
        if kind == "line":
            begins = True
            continue
        if kind == "open":
            depth += 1
            deepest = max(deepest, depth)
        elif kind == "close":
            depth = max(0, depth - 1)
        elif kind == "name" and begins:
            if depth and rule:  # a grammar inside this rule, in braces
                targets[rule].add(match[0])
            rule, deepest = match[0], depth
            before = weights.get(rule, 0)  # another grammar has a rule of this name
            targets.setdefault(rule, set())
        elif kind == "name" and rule:
            targets[rule].add(match[0])
        if rule:
            weights[rule] = before + 1 + deepest
        begins = False
    _refuse_chain(setting, "rules", longest_chain(weights, targets))


def longest_chain(weights: Mapping[str, int], targets: Mapping[str, Collection[str]]) -> int:
    """Return the largest sum of weights on a path. Nodes that reach each other count together."""
    sources: dict[str, list[str]] = {name: [] for name in targets}
    for name, others in targets.items():
        for other in others:
            if other in sources:
                sources[other].append(name)
    longest: dict[str, int] = {}
    for start in reversed(list(_finished(targets))):
        if start in longest:
            continue
        together, waiting = {start}, [start]
        before = 0
        while waiting:
            for source in sources[waiting.pop()]:
                if source in longest:
                    before = max(before, longest[source])
                elif source not in together:
                    together.add(source)
                    waiting.append(source)
        longest.update(dict.fromkeys(together, before + sum(weights[name] for name in together)))
    return max(longest.values(), default=0)


def _finished(targets: Mapping[str, Collection[str]]) -> Iterator[str]:
    """Yield every node after the nodes that it reaches, except for cycles."""
    seen: set[str] = set()
    for root in targets:
        path = [(root, iter(targets[root]))] if root not in seen else []
        seen.add(root)
        while path:
            name, others = path[-1]
            other = next((each for each in others if each in targets and each not in seen), None)
            if other is None:
                path.pop()
                yield name
            else:
                seen.add(other)
                path.append((other, iter(targets[other])))


def _levels(value: Any) -> tuple[int, set[str], int]:
    """Return the depth of a value, its references, and the number of inner objects with a base of their own."""
    deepest, refs, bases, waiting = 0, set[str](), 0, [(value, 1)]
    while waiting:
        each, depth = waiting.pop()
        if isinstance(each, dict):
            if isinstance(each.get("$ref"), str):
                refs.add(each["$ref"])
            bases += depth > 1 and (isinstance(each.get("$id"), str) or isinstance(each.get("id"), str))
        elif not isinstance(each, list):
            continue
        deepest = max(deepest, depth)
        waiting += [(inner, depth + 1) for inner in (each.values() if isinstance(each, dict) else each)]
    return deepest, refs, bases


def _resolved(schema: Any, ref: str) -> Any:
    """Return the place of a JSON pointer; None if there is no such place or it is another kind of reference."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    found = schema
    for part in ref[2:].split("/") if ref != "#" else ():
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and len(key) < 9 and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            return None
    return found if isinstance(found, (dict, list)) else None


def _refuse_chain(setting: str, of: str, levels: int) -> None:
    if levels > DEEPEST:
        raise InputError(
            f"{setting} has a chain of {of} with {levels:,} levels, and the limit is {DEEPEST}; make it shorter."
        )
