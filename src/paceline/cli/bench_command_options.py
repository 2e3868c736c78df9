"""What `paceline bench` was told, and what it measures because of that."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.bench.bench_options import BenchOptions
from paceline.cli.annotated_options import _config, _flag, _value
from paceline.cli.settings import decoder_table, source
from paceline.common.errors import InputError
from paceline.common.options import from_text
from paceline.common.toml_files import read_toml

_MODELS, _WHO, _TEXTS, _CHOICE = "Models", "Who takes part", "Texts", "Choosing tokens"
_MEASURE, _SHOW, _OTHER, _SETTINGS = "Measuring", "Output", "Without measuring", "Settings"
# the fields of BenchOptions that are called otherwise here: a flag that is repeated has the name of one
_FIELDS = {"runs": "run", "peers": "peer", "categories": "category", "samplers": "sampler"}


@dataclass(frozen=True)
class BenchSettings:
    """What `paceline bench` was told."""

    target: Annotated[str, _value(_MODELS, "MODEL", "Catalogue name, hub id, folder or .gguf file.")] = "smollm2-135m"
    dtype: Annotated[str | None, _value(_MODELS, "TYPE", "float32, bfloat16, float16, float64 or auto.")] = None
    device: Annotated[str | None, _value(_MODELS, "DEVICE", "cpu, cuda, cuda:1 …; CUDA where there is one.")] = None
    runner: Annotated[str, _value(_MODELS, "NAME", "auto, eager (transformers), kernels or cuda_graph.")] = "auto"
    quantize: Annotated[str | None, _value(_MODELS, "KIND", "The target in int8, int4 or bfloat16; exact to that.")] = (
        None
    )
    shape: Annotated[
        str | None, _value(_MODELS, "NAME", "A random model of a named shape instead, such as llama-7b.")
    ] = None
    draft_shape: Annotated[str | None, _value(_MODELS, "NAME", "The shape of its draft; else its usual one.")] = None
    synthetic_acceptance: Annotated[
        list[str] | None,
        _value(_MODELS, "RATES", "The draft is right so often, as 0.8, or 0.9,0.8,0.7 by position."),
    ] = None
    construction: Annotated[
        float | None, _value(_MODELS, "EPS", "Agreement by construction: layers past the draft's add so little.")
    ] = None

    preset: Annotated[
        str | None, _value(_WHO, "NAME", "default, trained, training-free or gpt2; other flags win over it.")
    ] = None
    run: Annotated[
        list[str] | None,
        _value(_WHO, "SPEC", "One of ours, as suffix or ngram:gamma=8,branches=4,rule=ratio; repeatable."),
    ] = None
    peer: Annotated[
        list[str] | None,
        _value(
            _WHO,
            "NAME",
            "hf, hf-assisted, hf-lookup, hf-early-exit, llama-cpp, llama-cpp-ngram, llama-cpp-q8, openvino or "
            "openvino-lookup; repeatable.",
        ),
    ] = None
    gamma: Annotated[str, _value(_WHO, "N", "Tokens drafted in a row, where a run does not say.")] = "5"

    prompts: Annotated[
        list[str] | None,
        _value(_TEXTS, "FILE", "A set of prompts: .jsonl, .csv or .txt, or builtin; repeatable."),
    ] = None
    category: Annotated[list[str] | None, _value(_TEXTS, "NAME", "Only this category; repeatable.")] = None
    limit: Annotated[int | None, _value(_TEXTS, "N", "Prompts of each category at most.")] = None
    turns: Annotated[int, _value(_TEXTS, "N", "2: the second turns of conversations as well.")] = 1
    chat: Annotated[
        bool, _value(_TEXTS, "", "Through the model's chat template, if it has one.", "--chat/--no-chat")
    ] = True
    batch: Annotated[int, _value(_TEXTS, "N", "Texts written at once.")] = 1
    prompt_tokens: Annotated[int, _value(_TEXTS, "N", "Tokens of the random prompts of a named shape.")] = 128
    max_new_tokens: Annotated[int, _value(_TEXTS, "N", "Tokens everybody writes for each prompt.")] = 128

    temperature: Annotated[float, _value(_CHOICE, "X", "0 is greedy.")] = 0.0
    top_k: Annotated[int | None, _value(_CHOICE, "N", "Only the N likeliest tokens.")] = None
    top_p: Annotated[float | None, _value(_CHOICE, "X", "Only the likeliest tokens that make up X.")] = None
    min_p: Annotated[float | None, _value(_CHOICE, "X", "Only tokens with X times the best one's share.")] = None
    sampler: Annotated[
        list[str] | None,
        _value(
            _CHOICE,
            "NAME",
            "Every prompt with this sampler: greedy, multinomial, top-k, nucleus, top-k-nucleus, top-k-noise, dynamic, "
            "typical, or all; repeatable. As top-k:top_k=20,temperature=0.7 with its own controls.",
        ),
    ] = None
    noise_levels: Annotated[
        list[str] | None, _value(_CHOICE, "X,X", "Noise levels of top-k-noise; 0.1,0.2,0.3,0.4,0.5 by default.")
    ] = None
    seed: Annotated[int, _value(_CHOICE, "N", "The same for everybody.")] = 0

    repeats: Annotated[int, _value(_MEASURE, "N", "Times everybody writes every text, in turns.")] = 3
    warm_up: Annotated[int, _value(_MEASURE, "N", "Tokens of a first run of each that is not timed.")] = 16
    threads: Annotated[int | None, _value(_MEASURE, "N", "Threads of torch on a CPU.")] = None
    require_quiet: Annotated[
        bool, _flag(_MEASURE, "--require-quiet", "Refuse a busy machine; else it is measured and the result marked.")
    ] = False
    force: Annotated[
        bool, _flag(_MEASURE, "--force", "The default: a busy machine is measured. Kept for older calls.")
    ] = False
    memory: Annotated[
        bool,
        _flag(_MEASURE, "--memory", "Peak memory and bytes of keys and values as well; --memory lines: see below."),
    ] = False
    memory_lines: Annotated[
        bool,
        _flag(_MEASURE, "--memory-lines", "The same as --memory lines: the source lines that hold the most memory."),
    ] = False
    layers: Annotated[bool, _flag(_MEASURE, "--layers", "Bytes and seconds of every layer as well.")] = False
    quality: Annotated[bool, _flag(_MEASURE, "--quality", "Judge the texts by the answers of the prompts.")] = False

    out: Annotated[
        Path | None, _value(_SHOW, "FOLDER", "Write bench.jsonl, bench.csv, report.html and plots there.")
    ] = None
    resume: Annotated[bool, _flag(_SHOW, "--resume", "Go on with the record of --out that broke off.")] = False
    json: Annotated[bool, _flag(_SHOW, "--json", "The record as JSON lines on stdout and nothing else.")] = False
    csv: Annotated[Path | None, _value(_SHOW, "FILE", "Write a line per contestant and category.")] = None
    html: Annotated[Path | None, _value(_SHOW, "FILE", "Write a report as one page.")] = None
    png: Annotated[Path | None, _value(_SHOW, "FOLDER", "Write the plots (needs matplotlib).")] = None
    trace: Annotated[Path | None, _value(_SHOW, "FILE", "Record every round of our own runs, for --replay.")] = None
    wandb: Annotated[bool, _flag(_SHOW, "--wandb", "Log to Weights & Biases; offline where there is no key.")] = False
    wandb_project: Annotated[str, _value(_SHOW, "NAME", "The project there.")] = "paceline"
    versus: Annotated[
        list[str] | None,
        _value(_SHOW, "NAME", "Two contestants in one chart: give it twice, as --versus prophet --versus early-exit."),
    ] = None
    compare: Annotated[
        Path | None,
        _value(_SHOW, "FILE", "Compare with an earlier bench.jsonl.", allow_from_autoenv=False),
    ] = None  # PACELINE_COMPARE is a yes or no of `generate`
    fail_on_regression: Annotated[
        bool, _flag(_SHOW, "--fail-on-regression", "Exit with 1 where --compare finds something slower.")
    ] = False

    report: Annotated[
        Path | None,
        _value(_OTHER, "FILE", "Show a bench.jsonl that is there; nothing is run.", allow_from_autoenv=False),
    ] = None  # PACELINE_REPORT is what `audit` writes
    replay: Annotated[
        Path | None, _value(_OTHER, "FILE", "From a trace: what each --run would have given; no model is read.")
    ] = None

    config: Annotated[Path | None, _config("bench")] = None
    print_config: Annotated[
        bool, _flag(_SETTINGS, "--print-config", "Show all settings and where they come from, and stop.")
    ] = False
    debug: Annotated[bool, _flag(_SETTINGS, "--debug", "Show the traceback of an error.")] = False


def measured(said: BenchSettings) -> BenchOptions:
    """The part of it that decides what is measured."""
    values = {field.name: getattr(said, _FIELDS.get(field.name, field.name)) for field in fields(BenchOptions)}
    lists = {name: tuple(values[name] or ()) for name in ("runs", "peers", "categories", "samplers")}
    rates = _numbers("synthetic-acceptance", "a rate, or rates with commas", said.synthetic_acceptance)
    levels = _numbers("noise-levels", "numbers with commas", said.noise_levels) or BenchOptions.noise_levels
    prompts = tuple(said.prompts or BenchOptions.prompts)
    texts = {"synthetic_acceptance": rates, "noise_levels": levels, "prompts": prompts, "gamma": _gamma(said)}
    return BenchOptions(**{**values, **lists, **texts})


def tuned(said: BenchSettings) -> list[str]:
    """The run that the table [decoder] of the config describes, as `paceline tune` writes it; none without a draft."""
    table = _decoder(said)
    if "draft" not in table:
        return []
    ours = {name: table[name] for name in ("gamma", "nodes", "rule") if name in table}
    rule = _prefixed("rule", table.get("rule_options", {}))
    options = _prefixed("drafter", table.get("drafter", {}))
    return [json.dumps({"name": table["draft"], "label": "tuned", **ours, **rule, **options})]


def _decoder(said: BenchSettings) -> dict[str, Any]:
    return {} if said.config is None else decoder_table(said.config, read_toml(said.config).get("decoder", {}))


def _prefixed(owner: str, options: dict[str, Any]) -> dict[str, Any]:
    return {f"{owner}.{name.replace('-', '_')}": value for name, value in options.items()}


def named(ctx: typer.Context) -> set[str]:
    """The fields of BenchOptions that were given, by whatever way."""
    names = (field.name for field in fields(BenchOptions))
    return {name for name in names if source(ctx, _FIELDS.get(name, name)) != "default"}


def _gamma(said: BenchSettings) -> int:
    """Of runs that do not say. A config may say auto of its own drafter: that is of this one alone (see `tuned`)."""
    if said.gamma != "auto":
        return int(from_text("--gamma", said.gamma, int))
    if _decoder(said).get("gamma") == "auto":
        return BenchOptions.gamma
    raise InputError("--gamma auto is for a single run here, such as --run suffix:gamma=auto.")


def _numbers(flag: str, what: str, texts: list[str] | None) -> tuple[float, ...]:
    try:
        return tuple(float(each) for text in texts or () for each in text.split(","))
    except ValueError:
        raise InputError(f"--{flag} must be {what}, got '{','.join(texts or ())}'.") from None
