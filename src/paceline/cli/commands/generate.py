"""`paceline generate`: write on from a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.command_options import GenerateOptions
from paceline.cli.decoder_session import check_counts, config_of, drafting, open_decoder, read_prompt, read_settings
from paceline.cli.naming import check_pair
from paceline.cli.result_lines import (
    Recording,
    beam_lines,
    beginning,
    dump,
    logprob_lines,
    result_as_dict,
    settings_of,
    summary,
    versions,
)
from paceline.cli.settings import takes
from paceline.cli.terminal import Terminal, TokenPrinter, counted, plain_warnings, say, silent_keys
from paceline.common.errors import InputError, PacelineError
from paceline.common.interrupts import interruptible

if TYPE_CHECKING:
    from paceline.engine.decoder import SpeculativeDecoder
    from paceline.engine.request import Generation


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
    if said.compare and how.draft == "none":
        raise InputError("--compare needs a drafter to compare plain decoding with, and --draft is none.")
    if said.compare and said.trace is not None:
        raise InputError("--trace records one text, and --compare writes it several times; leave one of them out.")
    if said.print_config:
        typer.echo(config_of(ctx, said, how))
        return
    check_counts(repeats=said.repeats)
    check_pair(said, how)
    with plain_warnings(said.debug):
        settings = read_settings(said)
        prompt = read_prompt(said)
        decoder = open_decoder(said, how, settings)
        say(beginning(decoder, settings))
        if said.compare:
            from paceline.cli.compare import compare

            compare(decoder, prompt, settings, said)
        else:
            recording = None if said.trace is None else Recording(said, how, decoder, settings)
            result = _write(decoder, prompt, settings, said)
            if recording is not None:
                recording.add(result)
            if result.finish_reason == "cancelled":
                raise typer.Exit(INTERRUPTED)


def _write(decoder: SpeculativeDecoder, prompt: Any, settings: dict[str, Any], said: GenerateOptions) -> Generation:
    ink = Terminal()
    tokenizer = decoder.target.tokenizer
    wanted = ink.is_terminal if said.stream is None else said.stream
    live = wanted and not said.json and said.n_best is None  # the texts of a search come all at once, each with a score
    with silent_keys(), interruptible() as cancelled:
        stream = decoder.stream(prompt, cancel=cancelled, **settings)
        shown = TokenPrinter(stream, ink if live else None, tokenizer, said.show_drafts)
        try:
            for piece in counted(stream, "writing", live):
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
        first, *others = beam_lines(result) if said.n_best is not None else [""]
        ink.write(first)
        shown.finish(ink, result)
        for line in [*others, *logprob_lines(result, tokenizer)]:
            ink.write(line + "\n")
    say(summary(result, speculates=decoder.drafter.speculates))
    return result
