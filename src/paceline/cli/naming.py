"""Names in a call: checked before torch is imported, and completed in a shell."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from paceline.common.errors import InputError
from paceline.common.names import check_draft, check_dtype, check_model, check_name, check_options, names, split_spec

if TYPE_CHECKING:
    from paceline.cli.bench_command_options import BenchSettings
    from paceline.cli.command_options import PairOptions
    from paceline.cli.commands.train import TrainSettings
    from paceline.cli.commands.tune import TuneSettings
    from paceline.cli.decoder_session import Drafting

_OF_A_RUN = ("name", "gamma", "nodes", "rule", "label")  # what is no option of the drafter
_STYLES = ("auto", "chat", "text")


# ---- checking


def check_pair(said: PairOptions, how: Drafting) -> None:
    """The names of a call that decodes."""
    check_running(said.runner, said.quantize, said.dtype)
    check_rule(said.rule, how.rule_options)
    check_draft(how.draft, how.options)
    for model in (how.options.get("model"), said.target, said.amateur or None):
        check_model(model)


def check_running(runner: str, quantize: str | None, dtype: str | None) -> None:
    check_name("runner", runner)
    check_name("quantize", quantize, "kind of quantization")
    check_dtype(dtype)


def check_rule(rule: str, options: Iterable[str] = ()) -> None:
    check_name("rule", rule)
    check_options("rule", rule, options)


# Where a call has many other arguments, a folder that is not there is refused after those.


def check_bench(said: BenchSettings) -> None:
    """The names of a benchmark; a record that is only shown needs none of them."""
    if said.report is not None:
        return
    for run in said.run or ():
        check_run(run)
    if said.replay is not None:
        return
    check_running(said.runner, said.quantize, said.dtype)
    check_name("preset", said.preset)
    for peer in said.peer or ():
        check_name("peer", split_spec(peer)[0])
    for shape in (said.shape, said.draft_shape):
        check_name("shape", None if shape is None else shape.partition(":")[0])
    if said.shape is None:
        check_model(said.target, paths=False)


def check_tune(said: TuneSettings) -> None:
    check_running(said.runner, said.quantize, said.dtype)
    for rule in said.rules.split(","):
        if rule.strip():
            check_name("rule", rule.strip())
    for candidate in said.candidate or ():
        check_run(candidate)
    check_model(said.target, paths=False)


def check_run(text: str) -> None:
    """A run as the command line writes it: "ngram:gamma=8,rule=ratio", JSON, a model or a folder."""
    if text.lstrip().startswith("{") or os.path.exists(text):
        return  # read later, in full
    name, options = split_spec(text)
    if "" in options:
        return
    own = [key.removeprefix("drafter.") for key in options if key not in _OF_A_RUN and not key.startswith("rule.")]
    check_draft(name, own)
    check_rule(options.get("rule", "match"), [key[5:] for key in options if key.startswith("rule.")])


def check_train(said: TrainSettings) -> None:
    check_name("kind", said.kind)
    given = [each.partition("=")[0].strip().replace("-", "_") for each in said.options or () if "=" in each]
    check_options("kind", said.kind, given)
    check_name("loss", said.loss.partition("@")[0])
    if said.style not in _STYLES:
        raise InputError(f"style must be auto, chat or text, got '{said.style}'.")
    if said.numbers not in (known := names("numbers")):
        raise InputError(f"numbers must be one of {', '.join(known)}, got '{said.numbers}'.")
    check_dtype(said.dtype)
    if said.kind != "pair":
        check_model(said.target, paths=False)


# ---- completing

# parameter of a command -> the kinds of names that a shell offers for it
_COMPLETED = {
    "target": ("model",), "amateur": ("model",), "draft": ("drafter", "model"), "rule": ("rule",),
    "runner": ("runner",), "quantize": ("quantize",), "dtype": ("dtype",), "kind": ("kind",), "loss": ("loss",),
    "numbers": ("numbers",), "preset": ("preset",), "peer": ("peer",), "shape": ("shape",), "draft_shape": ("shape",),
    "run": ("drafter", "model"), "candidate": ("drafter", "model"), "rules": ("rule",),
}  # fmt: skip


def completion_of(parameter: str) -> Callable[[str], list[str]] | None:
    """What a shell offers for the value of a parameter; None: files, as it does by itself."""
    return completing(*_COMPLETED[parameter]) if parameter in _COMPLETED else None


def completing(*kinds: str) -> Callable[[str], list[str]]:
    """What a shell offers for an option that takes a name of one of these kinds; else it offers files."""

    def complete(incomplete: str) -> list[str]:
        return [name for kind in kinds for name in names(kind) if name.startswith(incomplete)]

    return complete


def dotted(owner: str, chosen: Any, incomplete: str) -> list[str]:
    """The options that begin so, as flags: `--drafter.longest`, of the drafter or rule that is chosen already."""
    from paceline.common.names import index

    known = index()[owner]
    options = known.get(str(chosen), sorted({option for each in known.values() for option in each}))
    flags = (f"--{owner}.{option.replace('_', '-')}" for option in options)
    return [flag for flag in flags if flag.startswith(incomplete)]
