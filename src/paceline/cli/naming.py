"""Names in a call: checked before torch is imported, and completed in a shell."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paceline.common.names import check_draft, check_dtype, check_model, check_name, check_options, names, split_spec
from paceline.common.options import Declared

_RUN_KEYS = ("name", "gamma", "nodes", "rule", "label")  # of a run; its other keys are options of the drafter


# ---- checking


def check_names(fields: Iterable[Declared], values: Mapping[str, Any]) -> None:
    """Refuse a misspelt name in a call. `Option.names` of a field says which kind of name its value is."""
    fields = list(fields)
    for field in fields:
        value = values[field.field]
        check = _CHECKS.get(field.about.names)
        if field.about.names == "":
            continue
        for name in value if isinstance(value, tuple) else (value,):
            if not name:
                continue
            if check is not None:
                check(str(name))
            else:
                check_name(field.about.names, str(name))
        for table in fields:
            if table.about.of == field.field and value:
                _check_table(field.about.names, str(value), values[table.field])


def _check_table(kind: str, name: str, table: Any) -> None:
    """The options that belong to a name: a table, or texts such as "layers=2"."""
    if not isinstance(table, Mapping):
        table = {text.partition("=")[0].strip().replace("-", "_"): text for text in table if "=" in text}
    if kind != "draft":
        check_options(kind, name, table)
        return
    check_draft(name, table)
    model = table.get("model")
    check_model(model if isinstance(model, str) else None)


def check_run(text: str) -> None:
    """A run as the command line writes it: "ngram:gamma=8,rule=ratio", JSON, a model or a folder."""
    if text.lstrip().startswith("{") or os.path.exists(text):
        return  # `bench.candidate` reads it in full
    name, options = split_spec(text)
    if "" in options:
        return
    own = [key.removeprefix("drafter.") for key in options if key not in _RUN_KEYS and not key.startswith("rule.")]
    check_draft(name, own)
    check_name("rule", options.get("rule", "match"))
    check_options("rule", options.get("rule", "match"), [key[5:] for key in options if key.startswith("rule.")])


# kind of name -> its check; the others are names of the index. "model path": a missing folder is reported later.
_CHECKS: dict[str, Callable[[str], None]] = {
    "model": check_model,
    "model path": lambda name: check_model(name, paths=False),
    "dtype": check_dtype,
    "draft": check_draft,
    "run": check_run,
    "quantize": lambda name: check_name("quantize", name, "kind of quantization"),
    "peer": lambda name: check_name("peer", split_spec(name)[0]),
    "shape": lambda name: check_name("shape", name.partition(":")[0]),
    "loss": lambda name: check_name("loss", name.partition("@")[0]),
}

# ---- completing

_COMPLETED = {"draft": ("drafter", "model"), "run": ("drafter", "model"), "model path": ("model",)}


def completion_of(kind: str, choices: Iterable[str] = ()) -> Callable[[str], list[str]] | None:
    """What a shell offers for a value; None: files, as it does by itself."""
    choices = list(choices)
    if not kind and not choices:
        return None

    def complete(incomplete: str) -> list[str]:
        known = [*choices, *(name for one in _COMPLETED.get(kind, (kind,)) if one for name in names(one))]
        return [name for name in known if name.startswith(incomplete)]

    return complete


def dotted(owner: str, chosen: Any, incomplete: str) -> list[str]:
    """The flags that start so, such as `--drafter.longest`, of the chosen drafter or rule."""
    from paceline.common.names import index

    known = index()[owner]
    options = known.get(str(chosen), sorted({option for names in known.values() for option in names}))
    flags = (f"--{owner}.{option.replace('_', '-')}" for option in options)
    return [flag for flag in flags if flag.startswith(incomplete)]
