"""`paceline generate`: write on from a prompt."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer

from paceline.core.errors import InputError, PacelineError

from .drafting import Drafting, drafting
from .options import GenerateOptions
from .report import beam_lines, dump, logprob_lines, result_as_dict, settings_of, summary, versions
from .session import check_counts, open_decoder, read_prompt, read_settings
from .settings import show_config, source, takes
from .showing import Shown
from .terminal import Ink, interruptible, plain_warnings, say

if TYPE_CHECKING:
    from paceline.engine.decoder import SpeculativeDecoder


INTERRUPTED = 130

EPILOG = """
[bold]Examples[/bold]

paceline generate "Once upon a time" --max-new-tokens 64

paceline generate "Name three rivers." --chat --temperature 0.7 --seed 7

paceline generate - --drafter.longest 4 --show-drafts < notes.txt

paceline generate "Hello" --target ./big --draft ./small --gamma 4 --compare

[bold]Colours[/bold] [green]accepted draft[/green], [blue]the target's[/blue], [red strike]rejected draft[/red strike].

[bold]Settings[/bold] flag, else environment (PACELINE_TOP_K), else --config FILE, else default.
"""


@takes(GenerateOptions)
def generate(ctx: typer.Context, said: GenerateOptions) -> None:
    """Continue PROMPT with a target model, faster by speculation, with the text the target alone would write."""
    how = drafting(ctx, said)
    if said.prediction is not None and how.origins["draft"] == "default":
        how = replace(how, draft="prediction")
    if said.compare and how.draft == "none":
        raise InputError("--compare needs a drafter to compare plain decoding with, and --draft is none.")
    if said.print_config:
        typer.echo(_config(ctx, said, how))
        return
    check_counts(repeats=said.repeats)
    with plain_warnings(said.debug):
        settings = read_settings(said)
        prompt = read_prompt(said)
        decoder = open_decoder(said, how, settings)
        say(decoder.describe())
        if said.compare:
            from .compare import compare

            compare(decoder, prompt, settings, said)
        else:
            _write(decoder, prompt, settings, said)


def _config(ctx: typer.Context, said: GenerateOptions, how: Drafting) -> str:
    values = asdict(replace(said, draft=how.draft, gamma=how.gamma, speculative_config=None))
    origins = {name: source(ctx, name) for name in values}
    tables = {"drafter_options": how.options, "rule_options": how.rule_options}
    return show_config(str(ctx.info_name), values, {**origins, **how.origins}, tables)


def _write(decoder: SpeculativeDecoder, prompt: Any, settings: dict[str, Any], said: GenerateOptions) -> None:
    ink = Ink()
    tokenizer = decoder.target.tokenizer
    live = not said.json and (ink.is_terminal if said.stream is None else said.stream)
    with interruptible() as cancelled:
        stream = decoder.stream(prompt, cancel=cancelled, **settings)
        shown = Shown(stream, ink if live else None, tokenizer, said.show_drafts)
        try:
            for piece in stream:
                shown.add(piece)
        except KeyboardInterrupt:  # the second Ctrl-C: what was written is kept all the same
            stream.close()
        except PacelineError:
            if ink.last:
                ink.end()  # an error has its own line
            raise
        (result,) = stream.results
    if said.json:
        told = result_as_dict(result, tokenizer)
        print(dump({**told, "settings": settings_of(decoder, settings), "versions": versions()}), flush=True)
    else:
        shown.finish(ink, result)
        for line in [*beam_lines(result), *logprob_lines(result, tokenizer)]:
            ink.write(line + "\n")
    say(summary(result, speculates=decoder.drafter.speculates))
    if result.finish_reason == "cancelled":
        raise typer.Exit(INTERRUPTED)
