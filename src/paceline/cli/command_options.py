"""The options of the commands, as dataclasses: a field is an option, a key of the config and a variable."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.settings import PREFIX, read_config

_PROMPT, _MODELS, _DRAFT, _CHOICE = "Prompt", "Models", "Drafting", "Choosing tokens"
_STOP, _SHOW, _SETTINGS, _AUDIT = "Stopping", "Output", "Settings", "Audit"


def _value(panel: str, metavar: str, help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, show_envvar=False, **more)


def _flag(panel: str, name: str, help: str) -> Any:
    return _value(panel, "", help, name)


def _dotted(panel: str, name: str, example: str) -> Any:
    """`--drafter.longest 4`: the options of something that is chosen by name."""
    help = f"An option of the {name}, such as --{name}.{example} (see `paceline list {name}s`)."
    return _value(panel, "VALUE", help, f"--{name}.NAME", allow_from_autoenv=False)


def _config(command: str) -> Any:
    help = rf"Settings from the \[{command}] table of a TOML file, and from \[decoder], which `paceline tune` writes."
    return _value(_SETTINGS, "FILE", help, "--config", is_eager=True, callback=read_config)


@dataclass(frozen=True)
class PromptOptions:
    """What to write on from."""

    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What to continue; '-' reads it from standard input.")
    ] = None
    chat: Annotated[bool, _flag(_PROMPT, "--chat", "PROMPT is a message; the model's chat template is applied.")] = (
        False
    )
    system: Annotated[str | None, _value(_PROMPT, "TEXT", "A system message before it; implies --chat.")] = None


@dataclass(frozen=True)
class FirstMessage:
    """What a conversation begins with."""

    prompt: Annotated[
        str | None,
        typer.Argument(metavar="MESSAGE", help="The first message; others follow on the terminal or standard input."),
    ] = None
    system: Annotated[str | None, _value(_PROMPT, "TEXT", "The system message of the conversation.")] = None


@dataclass(frozen=True)
class PairOptions:
    """Which models, which drafter and which rule: the same for every command that decodes."""

    target: Annotated[str, _value(_MODELS, "MODEL", "Catalogue name, hub id, folder or .gguf file.")] = "smollm2-135m"
    guidance_scale: Annotated[
        float | None, _value(_MODELS, "X", "Classifier-free guidance, away from the negative prompt; 1 is off.")
    ] = None
    negative_prompt: Annotated[
        str | None, _value(_MODELS, "TEXT", "What to be guided away from; else the prompt's last token alone.")
    ] = None
    amateur: Annotated[
        str | None, _value(_MODELS, "MODEL", "Contrastive decoding: a weaker model to stay away from.")
    ] = None
    dtype: Annotated[str | None, _value(_MODELS, "TYPE", "float32, bfloat16, float16, float64 or auto.")] = None
    device: Annotated[str | None, _value(_MODELS, "DEVICE", "cpu, cuda, cuda:1 …; CUDA where there is one.")] = None
    runner: Annotated[str, _value(_MODELS, "NAME", "auto, eager, cuda_graph or kernels (docs/gpu.md).")] = "auto"
    tp_plan: Annotated[str | None, _value(_MODELS, "auto", "Share the target out over the processes of torchrun.")] = (
        None
    )
    quantize: Annotated[str | None, _value(_MODELS, "KIND", "The target in int8, int4 or bfloat16; exact to that.")] = (
        None
    )

    draft: Annotated[
        str,
        _value(
            _DRAFT,
            "DRAFT",
            "A drafter's name, a smaller model, none, or auto: what pays here.",
            "--draft",
            "--drafter",
            envvar=[f"{PREFIX}_DRAFT", f"{PREFIX}_DRAFTER"],  # two names of the flag, so two of the variable
        ),
    ] = "auto"
    drafter_options: Annotated[list[str] | None, _dotted(_DRAFT, "drafter", "longest 4")] = None
    gamma: Annotated[
        str | None, _value(_DRAFT, "N", "Tokens drafted in a row (5), or auto: as many as pay (so for --draft auto).")
    ] = None
    nodes: Annotated[int | None, _value(_DRAFT, "N", "Tokens of a drafted tree, in all.")] = None
    rule: Annotated[str, _value(_DRAFT, "RULE", "What decides about a draft (see `paceline list rules`).")] = "match"
    rule_options: Annotated[list[str] | None, _dotted(_DRAFT, "rule", "lenience 0.5")] = None
    allow_lossy: Annotated[
        bool, _flag(_DRAFT, "--allow-lossy", "Permit a rule that changes what is written, for speed.")
    ] = False
    strict: Annotated[
        bool, _flag(_DRAFT, "--strict", "The same bits with and without a draft, in bfloat16 too, at a price.")
    ] = False
    first_target: Annotated[
        bool, _flag(_DRAFT, "--first-target", "The target decides the first token alone; the text is the same.")
    ] = False
    speculative_config: Annotated[
        str | None, _value(_DRAFT, "JSON", "The same in vLLM's words: method, model, num_speculative_tokens …")
    ] = None


@dataclass(frozen=True)
class WritingOptions(PairOptions):
    """How to write on: the same for `generate` and `chat`. None means: not said, so the library's own default holds."""

    prediction: Annotated[
        str | None, _value(_DRAFT, "TEXT", "What you expect to be written, or @FILE: drafted where it fits.")
    ] = None

    temperature: Annotated[
        float | None, _value(_CHOICE, "X", "0 is greedy and the default; 1 where a sampler below is used.")
    ] = None
    top_k: Annotated[int | None, _value(_CHOICE, "N", "Only the N likeliest tokens.")] = None
    top_p: Annotated[float | None, _value(_CHOICE, "X", "Only the likeliest tokens that make up X.")] = None
    min_p: Annotated[float | None, _value(_CHOICE, "X", "Only tokens with X times the best one's share.")] = None
    typical_p: Annotated[float | None, _value(_CHOICE, "X", "Only tokens of typical surprise that make up X.")] = None
    noise: Annotated[float | None, _value(_CHOICE, "X", "Gaussian noise on the top-k logits.")] = None
    dynamic_temperature: Annotated[
        float | None, _value(_CHOICE, "X", "Move the temperature by up to X with the entropy.")
    ] = None
    repetition_penalty: Annotated[
        float | None, _value(_CHOICE, "X", "Weaken the tokens of prompt and text; 1 is off.")
    ] = None
    presence_penalty: Annotated[float | None, _value(_CHOICE, "X", "Weaken the tokens of the new text.")] = None
    frequency_penalty: Annotated[float | None, _value(_CHOICE, "X", "The same, for every time they occur.")] = None
    logit_bias: Annotated[list[str] | None, _value(_CHOICE, "ID=X", "Add X to a token's score; repeatable.")] = None
    ban: Annotated[list[int] | None, _value(_CHOICE, "ID", "Never write this token; repeatable.")] = None
    beams: Annotated[int | None, _value(_CHOICE, "N", "Beam search: the best of N texts at once, greedy only.")] = None
    length_penalty: Annotated[
        float | None, _value(_CHOICE, "X", "Of --beams: scores are divided by ((M + length) / (M + 1)) ** X.")
    ] = None
    length_offset: Annotated[float | None, _value(_CHOICE, "M", "Of --beams: M of the length penalty; 0 is usual.")] = (
        None
    )
    beam_top_k: Annotated[
        int | None, _value(_CHOICE, "N", "Of --beams: each beam proposes its N likeliest tokens.")
    ] = None
    early_stopping: Annotated[
        str | None, _value(_CHOICE, "WHEN", "Of --beams: yes (as soon as N texts ended), no, or never.")
    ] = None
    seed: Annotated[int | None, _value(_CHOICE, "N", "The same seed gives the same text; else a new one.")] = None

    max_new_tokens: Annotated[int, _value(_STOP, "N", "Tokens to write at most.")] = 128
    min_new_tokens: Annotated[int | None, _value(_STOP, "N", "No end of text before so many.")] = None
    stop: Annotated[
        list[str] | None, _value(_STOP, "TEXT", r"End before this text; \n and \t are understood; repeatable.")
    ] = None
    ignore_eos: Annotated[bool, _flag(_STOP, "--ignore-eos", "Write on after an end of text.")] = False

    show_drafts: Annotated[bool, _flag(_SHOW, "--show-drafts", "Show the rejected drafts as well.")] = False
    stream: Annotated[
        bool | None, _value(_SHOW, "", "Show tokens as they come; the default on a terminal.", "--stream/--no-stream")
    ] = None
    json: Annotated[bool, _flag(_SHOW, "--json", "One JSON object per text on stdout and nothing else.")] = False

    print_config: Annotated[
        bool, _flag(_SETTINGS, "--print-config", "Show all settings and where they come from, and stop.")
    ] = False
    debug: Annotated[bool, _flag(_SETTINGS, "--debug", "Show the traceback of an error.")] = False


@dataclass(frozen=True)
class GenerateOptions(WritingOptions, PromptOptions):
    """What `paceline generate` was told."""

    n_best: Annotated[int | None, _value(_CHOICE, "N", "Of --beams: show the N best texts with their scores.")] = None

    compare: Annotated[bool, _flag(_SHOW, "--compare", "Decode plainly and speculatively in turns: is it faster?")] = (
        False
    )
    repeats: Annotated[int, _value(_SHOW, "N", "Runs of each for --compare.")] = 3
    logprobs: Annotated[int | None, _value(_SHOW, "K", "Log-probabilities of the tokens and K others.")] = None
    trace: Annotated[
        str | None, _value(_SHOW, "FILE", "Add the text with its rounds to a trace, for `paceline bench --replay`.")
    ] = None

    config: Annotated[Path | None, _config("generate")] = None


@dataclass(frozen=True)
class ChatOptions(WritingOptions, FirstMessage):
    """What `paceline chat` was told; what belongs to one text alone is not asked for."""

    config: Annotated[Path | None, _config("chat")] = None


@dataclass(frozen=True)
class AuditOptions(PairOptions):
    """What `paceline audit` was told."""

    prompts: Annotated[
        Path | None,
        _value(_AUDIT, "FILE", "Prompts: one per line, or .jsonl with 'prompt' or 'turns'; else a few of our own."),
    ] = None
    limit: Annotated[int | None, _value(_AUDIT, "N", "Only the first N prompts.")] = None
    tokens: Annotated[int, _value(_AUDIT, "N", "Tokens of each text that is compared with plain decoding.")] = 32
    positions: Annotated[int, _value(_AUDIT, "N", "Places where the law of the next two tokens is tested.")] = 2
    samples: Annotated[int, _value(_AUDIT, "N", "Samples at each of them; 0 leaves the statistics out.")] = 256
    temperature: Annotated[float, _value(_AUDIT, "X", "Of the same-seed texts and of the samples.")] = 0.8
    false_alarm: Annotated[float, _value(_AUDIT, "X", "The chance that an exact decoder fails the statistics.")] = 1e-4
    seed: Annotated[int, _value(_AUDIT, "N", "The first seed of the texts and of the samples.")] = 0
    only_rule: Annotated[bool, _flag(_AUDIT, "--only-rule", "Only the rule, on toy laws; no model is read.")] = False

    report: Annotated[Path | None, _value(_SHOW, "FILE", "Write a report; .html or .md.")] = None
    json: Annotated[bool, _flag(_SHOW, "--json", "One JSON object on stdout and nothing else.")] = False

    config: Annotated[Path | None, _config("audit")] = None
    print_config: Annotated[
        bool, _flag(_SETTINGS, "--print-config", "Show all settings and where they come from, and stop.")
    ] = False
    debug: Annotated[bool, _flag(_SETTINGS, "--debug", "Show the traceback of an error.")] = False
