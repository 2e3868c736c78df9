"""The options of `paceline generate`, as one dataclass: a field is an option, a key of the config and a variable."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from .settings import read_config

_MODELS, _DRAFT, _CHOICE = "Models", "Drafting (never changes the text)", "Choosing tokens"
_STOP, _SHOW, _SETTINGS = "Stopping", "Output", "Settings"


@dataclass(frozen=True)
class GenerateOptions:
    """What `paceline generate` was told. None means: not said, so the library's own default holds."""

    prompt: Annotated[str, typer.Argument(help="What to continue; '-' reads it from standard input.")]

    target: Annotated[
        str, typer.Option(help="Catalogue name, hub id, folder or .gguf file.", rich_help_panel=_MODELS)
    ] = "smollm2-135m"
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16, float64 or auto.", rich_help_panel=_MODELS)
    ] = None
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps.", rich_help_panel=_MODELS)] = None

    draft: Annotated[
        str,
        typer.Option(
            "--draft", "--drafter", help="A drafter's name, a smaller model, or none.", rich_help_panel=_DRAFT
        ),
    ] = "prompt-lookup"
    gamma: Annotated[int, typer.Option(min=1, help="Tokens drafted in a row.", rich_help_panel=_DRAFT)] = 5
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a drafted tree, in all.", rich_help_panel=_DRAFT)
    ] = None
    rule: Annotated[str, typer.Option(help="What decides about a draft.", rich_help_panel=_DRAFT)] = "match"
    drafter_options: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter.NAME",
            metavar="VALUE",
            allow_from_autoenv=False,
            help="An option of the drafter, such as --drafter.longest 4; `paceline list drafters` shows them.",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    speculative_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help="vLLM's way to say it: method, model, num_speculative_tokens …", rich_help_panel=_DRAFT
        ),
    ] = None

    temperature: Annotated[
        float | None,
        typer.Option(help="0 is greedy, the default; 1 where a sampler below is used.", rich_help_panel=_CHOICE),
    ] = None
    top_k: Annotated[int | None, typer.Option(help="Only the k likeliest tokens.", rich_help_panel=_CHOICE)] = None
    top_p: Annotated[
        float | None, typer.Option(help="Only the likeliest tokens that make up p.", rich_help_panel=_CHOICE)
    ] = None
    min_p: Annotated[
        float | None, typer.Option(help="Only tokens with p times the best one's share.", rich_help_panel=_CHOICE)
    ] = None
    typical_p: Annotated[
        float | None, typer.Option(help="Only tokens of typical surprise.", rich_help_panel=_CHOICE)
    ] = None
    noise: Annotated[
        float | None, typer.Option(help="Gaussian noise on the top-k logits.", rich_help_panel=_CHOICE)
    ] = None
    dynamic_temperature: Annotated[
        float | None, typer.Option(help="Move the temperature with the entropy.", rich_help_panel=_CHOICE)
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Divide the scores of tokens already there.", rich_help_panel=_CHOICE)
    ] = None
    presence_penalty: Annotated[
        float | None, typer.Option(help="Taken off once a token was written.", rich_help_panel=_CHOICE)
    ] = None
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Taken off for every time it was.", rich_help_panel=_CHOICE)
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=VALUE", help="Add to a token's score; may be repeated.", rich_help_panel=_CHOICE),
    ] = None
    ban: Annotated[
        list[int] | None,
        typer.Option(metavar="ID", help="Never write this token; may be repeated.", rich_help_panel=_CHOICE),
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same text.", rich_help_panel=_CHOICE)
    ] = None

    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.", rich_help_panel=_STOP)] = 128
    min_new_tokens: Annotated[
        int | None, typer.Option(help="No end of text before.", rich_help_panel=_STOP)
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(help=r"End before this string; \n and \t are understood; may be repeated.", rich_help_panel=_STOP),
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Write on after an end of text.", rich_help_panel=_STOP)
    ] = False

    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a message; the model's template is applied.")
    ] = False
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message; implies --chat.")] = None

    compare: Annotated[
        bool,
        typer.Option("--compare", help="Plain and speculative decoding in turns: texts, speeds.", rich_help_panel=_SHOW),
    ] = False
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each for --compare.", rich_help_panel=_SHOW)] = 3
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Show the rejected drafts as well.", rich_help_panel=_SHOW)
    ] = False
    stream: Annotated[
        bool | None,
        typer.Option("--stream/--no-stream", help="Show tokens as they come (default on a terminal).",
                     rich_help_panel=_SHOW),  # fmt: skip
    ] = None
    logprobs: Annotated[
        int | None, typer.Option(metavar="K", help="Log-probabilities, with K alternatives.", rich_help_panel=_SHOW)
    ] = None
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.", rich_help_panel=_SHOW)] = False

    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", is_eager=True, callback=read_config, help="Settings from a TOML file, its [generate] table.",
            rich_help_panel=_SETTINGS,
        ),  # fmt: skip
    ] = None
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config", help="Show the settings and where they come from, then stop.", rich_help_panel=_SETTINGS
        ),
    ] = False
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=_SETTINGS)
    ] = False
