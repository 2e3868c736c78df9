"""List the process-wide mutable objects of a package: module-level names that functions change, and unbounded caches.

Found by the syntax tree: a module-level name, also of a class, counts when a function of its module (a) declares it
`global`, (b) assigns or deletes an item or attribute of it, (c) calls a method of it that changes built-in containers,
or (d) when it is an instance of a class of the package whose methods assign to `self` after `__init__`, a
`threading.local`, or a weak container. A function with an argument and `functools.cache` (or `lru_cache(None)`) counts,
too.

    python tools/process_state.py [FOLDER]
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "paceline"
CHANGES = {"append", "appendleft", "add", "clear", "discard", "extend", "insert", "pop", "popitem", "remove",
           "setdefault", "update", "__setitem__"}  # fmt: skip
ALWAYS = {"local", "WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "count"}  # classes that exist to change


@dataclass(frozen=True)
class State:
    """One object: `module:name`, and how it is known to change."""

    name: str
    why: str


def states(folder: Path = PACKAGE) -> list[State]:
    trees = {_module(path, folder): ast.parse(path.read_text("utf-8")) for path in sorted(folder.rglob("*.py"))}
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    changing = {cls.name for cls in classes if _changes_itself(cls)}
    changing |= {cls.name for cls in classes if _makes(cls) & (changing | ALWAYS | _local_classes(classes))}
    return [State(f"{module}:{name}", why) for module, tree in trees.items() for name, why in _of(tree, changing)]


def _module(path: Path, folder: Path) -> str:
    return ".".join(path.relative_to(folder).with_suffix("").parts)


def _of(tree: ast.Module, changing: set[str]) -> Iterator[tuple[str, str]]:
    bound = dict(_bound(tree))
    changed = {name: why for function in _functions(tree) for name, why in _changed(function)}
    for name, value in bound.items():
        cls = _called(value)
        if cls in ALWAYS:
            yield name, f"is a {cls}"
        elif name in changed:
            yield name, changed[name]
        elif cls in changing:
            yield name, f"is a {cls}, which changes itself"
    for function in _functions(tree):
        arguments = function.args.args or function.args.posonlyargs or function.args.kwonlyargs or function.args.vararg
        if arguments and any(_is_unbounded(decorator) for decorator in function.decorator_list):
            yield function.name, "is a cache without a limit"


def _bound(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    """Module-level names and the expressions they are bound to."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        elif isinstance(node, ast.ClassDef):
            yield node.name, None


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def _changed(function: ast.AST) -> Iterator[tuple[str, str]]:
    """Names that a function changes and does not bind itself."""
    own = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    shared = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
    own |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    yield from ((name, "is declared global") for name in shared)
    for node in ast.walk(function):
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            changed, why = node.value, "has an item or attribute assigned"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            changed, why = node.func.value, f"has `{node.func.attr}` called"
        else:
            continue
        if isinstance(changed, ast.Name) and (changed.id not in own or changed.id in shared):
            yield changed.id, why


def _makes(cls: ast.ClassDef) -> set[str | None]:
    """The names of the classes and functions that it calls for an attribute of its objects."""
    found: set[str | None] = set()
    for node in ast.walk(cls):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Attribute) for target in targets):
            found.add(_called(node.value))  # type: ignore[attr-defined]
    return found


def _local_classes(classes: list[ast.ClassDef]) -> set[str]:
    """Classes whose objects are different in every thread."""
    return {cls.name for cls in classes for base in cls.bases if getattr(base, "attr", None) == "local"}


def _changes_itself(node: ast.ClassDef) -> bool:
    """Has it a method that changes `self` after the object is made?"""
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name != "__init__"]
    return any(_changes_self(method) for method in methods)


def _changes_self(method: ast.FunctionDef) -> bool:
    for node in ast.walk(method):
        held = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        if held and isinstance(node.ctx, (ast.Store, ast.Del)):
            return True
        target = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            target = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            target = node.func.value
        if isinstance(target, ast.Attribute):
            target = target.value
        if isinstance(target, ast.Name) and target.id == "self":
            return True
    return False


def _called(value: ast.expr | None) -> str | None:
    """The name of the class or function that an expression calls."""
    if not isinstance(value, ast.Call):
        return None
    function = value.func.value if isinstance(value.func, ast.Subscript) else value.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)


def _is_unbounded(decorator: ast.expr) -> bool:
    name = decorator.func if isinstance(decorator, ast.Call) else decorator
    named = name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "")
    if named in ("cache", "once"):
        return True
    if named != "lru_cache" or not isinstance(decorator, ast.Call):
        return False
    limits = [*decorator.args[:1], *(word.value for word in decorator.keywords if word.arg == "maxsize")]
    return any(isinstance(limit, ast.Constant) and limit.value is None for limit in limits)


if __name__ == "__main__":
    for state in states(Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE):
        print(f"{state.name}  {state.why}")
