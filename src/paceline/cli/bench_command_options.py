"""The options of `paceline bench` that only the command line has, and the benchmark that they describe."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from paceline.bench.bench_options import BenchOptions
from paceline.cli.settings import decoder_table
from paceline.common.errors import InputError
from paceline.common.limits import GAMMA_LIMIT
from paceline.common.options import option
from paceline.common.toml_files import read_toml

_SHOW, _OTHER = "Output", "Without measuring"


@dataclass(frozen=True)
class BenchCommandOptions(BenchOptions):
    """Every option of `paceline bench`."""

    # also "auto", because the [decoder] table of a config may have it
    gamma: int | Literal["auto"] = option(  # type: ignore[assignment]
        BenchOptions.gamma, "Tokens drafted in a row, for runs without a gamma.", "Who takes part", metavar="N",
        least=1, most=GAMMA_LIMIT,
    )  # fmt: skip

    out: Path | None = option(None, "Write bench.jsonl, bench.csv, report.html and charts there.", _SHOW,
                              metavar="FOLDER")  # fmt: skip
    resume: bool = option(False, "Continue the incomplete record of --out.", _SHOW)
    json: bool = option(False, "The record as JSON lines on stdout and nothing else.", _SHOW)
    csv: Path | None = option(None, "Write a line per candidate and category.", _SHOW, metavar="FILE")
    html: Path | None = option(None, "Write a report as one page.", _SHOW, metavar="FILE")
    png: Path | None = option(None, "Write the charts (needs matplotlib).", _SHOW, metavar="FOLDER")
    trace: Path | None = option(None, "Record every round of the Paceline runs, for --replay.", _SHOW, metavar="FILE")
    wandb: bool = option(False, "Log to Weights & Biases; offline without a key.", _SHOW)
    wandb_project: str = option("paceline", "The project there.", _SHOW, metavar="NAME")
    versus: tuple[str, ...] = option((), "Two candidates in one chart: give it twice, as --versus prophet --versus "
                                     "early-exit.", _SHOW, metavar="NAME")  # fmt: skip
    compare: Path | None = option(None, "Compare with an earlier bench.jsonl.", _SHOW, metavar="FILE",
                                  environment=())  # fmt: skip
    fail_on_regression: bool = option(False, "Exit with 1 if --compare finds something slower.", _SHOW)

    report: Path | None = option(None, "Show an existing bench.jsonl; nothing runs.", _OTHER, metavar="FILE",
                                 environment=())  # fmt: skip
    replay: Path | None = option(None, "What each --run would have given on a trace; no model is loaded.", _OTHER,
                                 metavar="FILE")  # fmt: skip


def bench_options(options: BenchCommandOptions, config: Path | None) -> BenchOptions:
    """The part that decides what is measured. gamma = "auto" in the [decoder] table belongs to that decoder alone."""
    values = {field.name: getattr(options, field.name) for field in fields(BenchOptions)}
    if values["gamma"] == "auto":
        if _decoder(config).get("gamma") != "auto":
            raise InputError("--gamma auto is for a single run here, such as --run suffix:gamma=auto.")
        values["gamma"] = BenchOptions.gamma
    return BenchOptions(**values)


def tuned(config: Path | None) -> tuple[str, ...]:
    """The run that the [decoder] table of a config describes, as `paceline tune` writes it; none without a draft."""
    table = _decoder(config)
    if "draft" not in table:
        return ()
    own = {name: table[name] for name in ("gamma", "nodes", "rule") if name in table}
    rule = _prefixed("rule", table.get("rule_options", {}))
    drafter = _prefixed("drafter", table.get("drafter", {}))
    return (json.dumps({"name": table["draft"], "label": "tuned", **own, **rule, **drafter}),)


def _decoder(config: Path | None) -> dict[str, Any]:
    return {} if config is None else decoder_table(config, read_toml(config).get("decoder", {}))


def _prefixed(owner: str, options: dict[str, Any]) -> dict[str, Any]:
    return {f"{owner}.{name.replace('-', '_')}": value for name, value in options.items()}
