"""A faster start of the command line: imports of transformers that a single process does not use are delayed.

transformers imports torch's compiler (for decorators) and torch's distributed tensors: a quarter of the start. Here the
compiler is imported when it is first used, and transformers sees no distributed tensors, which it supports. Only short
commands of one process do this (`common.process`); in other programs nothing changes.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_TRIED = "2.13."  # the version of torch that the tests run with; in 2.11 for CUDA the import cannot be delayed
_MARKS = ("allow_in_graph", "assume_constant_result")  # decorators that return what they are given


class LazyPackage(ModuleType):
    """A package whose code runs when it is first used. Its submodules can be imported before."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        part = sys.modules.get(f"{self.__name__}.{name}")
        if part is not None:
            return part
        waiting: list[tuple[str, Callable[..., Any]]] = self.__dict__["__waiting__"]
        if name in _MARKS:
            return partial(_marked, waiting, name)
        if name == "disable":
            return _disabled
        return getattr(_loaded(self), name)


def _loaded(package: ModuleType) -> ModuleType:
    """Run the code of the package, and apply the delayed decorators."""
    with package.__dict__["__lock__"]:
        if type(package) is LazyPackage:
            waiting = package.__dict__.pop("__waiting__")
            package.__class__ = ModuleType  # type: ignore[assignment]
            spec = package.__spec__
            assert spec is not None
            assert spec.loader is not None
            spec.loader.exec_module(package)
            for name, function in waiting:
                getattr(package, name)(function)
    return package


def _marked(waiting: list[tuple[str, Callable[..., Any]]], name: str, function: Callable[..., Any]) -> Any:
    waiting.append((name, function))
    return function


def _disabled(function: Any = None, recursive: bool = True, **more: Any) -> Any:
    """Apply `torch.compiler.disable` after the compiler is imported: before that nothing can be compiled."""
    if function is None:
        return partial(_disabled, recursive=recursive, **more)
    made: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        compiler: Any = sys.modules[_COMPILER]
        if type(compiler) is LazyPackage:
            return function(*arguments, **named)
        if not made:
            made.append(compiler.disable(function, recursive, **more))
        return made[0](*arguments, **named)

    return call


def put_off(name: str) -> None:
    """Delay the import of a subpackage until it is first used. Does nothing if it is imported already."""
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return
    package = importlib.util.module_from_spec(spec)
    package.__dict__["__waiting__"] = []
    package.__dict__["__lock__"] = threading.RLock()
    package.__class__ = LazyPackage
    sys.modules[name] = package
    parent, _, child = name.rpartition(".")
    setattr(sys.modules[parent], child, package)


def may_put_off(version: str, cuda: str | None) -> bool:
    """Return True if this torch was tested. Any other torch imports its compiler as usual, and starts more slowly."""
    return version.startswith(_TRIED) and cuda is None


def slim_transformers() -> None:
    """Delay the imports. Call this before transformers is imported."""
    import torch

    if may_put_off(torch.__version__, torch.version.cuda):
        put_off(_COMPILER)
    from transformers import utils
    from transformers.utils import import_utils

    for module in (utils, import_utils):
        if hasattr(module, "is_torch_distributed_available"):
            module.is_torch_distributed_available = lambda: False
