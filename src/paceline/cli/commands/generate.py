"""`paceline generate`: write on from a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.command_options import GenerateOptions, resolve_drafter
from paceline.cli.decoder_session import open_decoder, read_prompt, read_settings
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
from paceline.cli.settings import command_from
from paceline.cli.terminal import Terminal, TokenPrinter, counted, info, silent_keys
from paceline.common.errors import PacelineError
from paceline.common.process import interruptible

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


@command_from(GenerateOptions, resolve_drafter)
def generate(ctx: typer.Context, options: GenerateOptions) -> None:
    """Continue PROMPT with a target model. Speculation makes it faster and does not change the text."""
    settings, prompt = read_settings(options), read_prompt(options)
    decoder = open_decoder(options, settings)
    info(beginning(decoder, settings))
    if options.compare:
        from paceline.cli.compare import compare

        compare(decoder, prompt, settings, options)
        return
    recording = None if options.trace is None else Recording(options, decoder, settings)
    result = _write(decoder, prompt, settings, options)
    if recording is not None:
        recording.add(result)
    if result.finish_reason == "cancelled":
        raise typer.Exit(INTERRUPTED)


def _write(decoder: SpeculativeDecoder, prompt: Any, settings: dict[str, Any], options: GenerateOptions) -> Generation:
    terminal = Terminal()
    tokenizer = decoder.target.tokenizer
    live = terminal.is_terminal if options.stream is None else options.stream
    live = live and not options.json and options.n_best is None  # beam search returns all texts at once, with scores
    with silent_keys(), interruptible() as cancelled:
        stream = decoder.stream(prompt, cancel=cancelled, **settings)
        shown = TokenPrinter(stream, terminal if live else None, tokenizer, options.show_drafts)
        try:
            for piece in counted(stream, "writing", live):
                shown.add(piece)
        except KeyboardInterrupt:  # the second Ctrl-C: the text so far is kept
            stream.close()
        except PacelineError:
            if terminal.last:
                terminal.end()
            raise
        (result,) = stream.results
    if options.json:
        content = result_as_dict(result, tokenizer)
        print(dump({**content, "settings": settings_of(decoder, settings), "versions": versions()}), flush=True)
    else:
        first, *others = beam_lines(result) if options.n_best is not None else [""]
        terminal.write(first)
        shown.finish(terminal, result)
        for line in [*others, *logprob_lines(result, tokenizer)]:
            terminal.write(line + "\n")
    info(summary(result, speculates=decoder.speculates))
    return result
