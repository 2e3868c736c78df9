"""Triton's interpreter without work that it repeats for each program of a kernel."""

from __future__ import annotations

import sys
from typing import Any


def patch_once() -> None:
    """Let `triton.language` be patched once for all kernels of a file, not for each call of each function.

    The interpreter patches it for each launch and for each call inside. That, the tables of dtypes and the shapes that
    it makes for each number are half of its time. Does nothing where no test has imported the interpreter.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    patch, dtype_of = interpreter._patch_lang, interpreter._get_np_dtype
    patched: dict[int, Any] = {}  # the globals of a file by their address; kept, so that no other ones get it
    dtypes: dict[str, Any] = {}
    tensor = interpreter.tl.core.tensor
    make = tensor.__init__
    alike: dict[str, dict[str, Any]] = {}  # of each type what a tensor holds beside its numbers

    def patch_lang(function: Any) -> Any:
        if id(function.__globals__) not in patched:
            patched[id(function.__globals__)] = function.__globals__
            patch(function)
        return interpreter._LangPatchScope()  # nothing to restore

    def np_dtype(kind: Any) -> Any:
        if kind.name not in dtypes:
            dtypes[kind.name] = dtype_of(kind)
        return dtypes[kind.name]

    def begin(self: Any, handle: Any, type: Any) -> None:
        if type.name not in alike:
            make(self, handle, type)
            alike[type.name] = {name: value for name, value in vars(self).items() if name != "handle"}
        else:
            vars(self).update(alike[type.name], handle=handle)

    interpreter._patch_lang, interpreter._get_np_dtype = patch_lang, np_dtype
    tensor.__init__ = begin
