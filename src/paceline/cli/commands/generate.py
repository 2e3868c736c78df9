"""`paceline generate`: continue a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli import result_lines
from paceline.cli.command_options import GenerateOptions, resolve_drafter
from paceline.cli.decoder_session import fitting, open_decoder, plain_decoder, read_prompt, read_settings
from paceline.cli.settings import command_from
from paceline.cli.terminal import Terminal, info, preparing, write_result, write_text
from paceline.common.process import interruptible
from paceline.common.progress import Cancel
from paceline.common.text_formats import check_writable

if TYPE_CHECKING:
    from paceline.engine.decoder import SpeculativeDecoder
    from paceline.engine.request import Generation


INTERRUPTED = 130
_WARM_UP = 16  # tokens; the first forward passes are slower

EPILOG = """
[bold]Examples[/bold]

paceline generate "Once upon a time" --max-new-tokens 64

paceline generate "Name three rivers." --chat --temperature 0.7 --seed 7

paceline generate - --drafter.longest 4 --show-drafts < notes.txt

paceline generate "Hello" --target ./big --draft ./small --gamma 4 --compare --html page.html

[bold]Colours[/bold] [green]accepted draft[/green], [blue]the target's[/blue], [red strike]rejected draft[/red strike].

[bold]Settings[/bold] flag, else environment (PACELINE_TOP_K), else --config FILE, else default.
"""


@command_from(GenerateOptions, resolve_drafter)
def generate(ctx: typer.Context, options: GenerateOptions) -> None:
    """Continue PROMPT with a target model. Speculation makes it faster and does not change the text."""
    settings, prompt = read_settings(options), read_prompt(options)
    if options.html is not None:
        check_writable(options.html, "The page")
    decoder = open_decoder(options, settings)
    info(result_lines.beginning(decoder, settings))
    if options.compare:
        _compare(decoder, prompt, settings, options)
        return
    recording = None if options.trace is None else result_lines.Recording(options, decoder, settings)
    result = _write(decoder, prompt, settings, options)
    if recording is not None:
        recording.add(result)
    _write_page(decoder, settings, options, result)
    if result.finish_reason == "cancelled":
        raise typer.Exit(INTERRUPTED)


def _write(decoder: SpeculativeDecoder, prompt: Any, settings: dict[str, Any], options: GenerateOptions) -> Generation:
    terminal, tokenizer = Terminal(), decoder.target.tokenizer
    result, shown = write_text(decoder, prompt, settings, options, options.show_drafts, terminal)
    if options.json:
        settings_used = result_lines.settings_of(decoder, settings)
        result_lines.print_json({**result_lines.result_as_dict(result, tokenizer), "settings": settings_used})
    else:
        first, *others = result_lines.beam_lines(result) if options.n_best is not None else [""]
        terminal.write(first)
        shown.finish(terminal, result)
        for line in [*others, *result_lines.logprob_lines(result, tokenizer)]:
            terminal.write(line + "\n")
    info(result_lines.summary(result, speculates=decoder.speculates))
    return result


def _write_page(
    decoder: SpeculativeDecoder,
    settings: dict[str, Any],
    options: GenerateOptions,
    result: Generation,
    plain: Generation | None = None,
) -> None:
    """Write the page of --html, if it was asked for."""
    if options.html is None:
        return
    from paceline.engine.views.result_page import page_of, write_page

    about, used = result_lines.beginning(decoder, settings), result_lines.settings_of(decoder, settings)
    write_page(options.html, page_of(result, about, used, plain))
    info(f"wrote {options.html}")


# ---- --compare: plain and speculative decoding of the same prompt and seed, in turns


@dataclass(frozen=True)
class Side:
    """One way to decode: its last result and the speeds of all its runs."""

    name: str
    result: Generation
    speeds: list[float]

    @property
    def speed(self) -> float:
        return median(self.speeds)

    @property
    def seconds(self) -> float:
        return len(self.result.tokens) / self.speed if self.speed else 0.0

    @property
    def span(self) -> str:
        low, high = f"{min(self.speeds):.1f}", f"{max(self.speeds):.1f}"
        return low if low == high else f"{low}–{high}"


@dataclass(frozen=True)
class Divergence:
    """The first difference of two texts, and the gap of the two best logits of the target there."""

    position: int
    plain: int | None
    speculative: int | None
    gap: float | None


def _compare(decoder: SpeculativeDecoder, prompt: Any, settings: dict[str, Any], options: GenerateOptions) -> None:
    from paceline.core.noise import fresh_seed

    settings = {"seed": fresh_seed(), **settings}
    plain = plain_decoder(decoder.target, decoder.rule)
    with interruptible() as cancelled:
        sides = _in_turns({"plain": plain, decoder.drafter.name: decoder}, prompt, settings, options.repeats, cancelled)
    if sides is None:
        info("cancelled before the comparison was complete")
        raise typer.Exit(INTERRUPTED)
    divergence = _divergence(*sides, plain)
    if options.json:
        content = _as_dict(*sides, divergence, decoder.target.tokenizer)
        result_lines.print_json({**content, "settings": result_lines.settings_of(decoder, settings)})
    else:
        _print(*sides, divergence, decoder, options)
    _write_page(decoder, settings, options, sides[1].result, sides[0].result)


def _in_turns(
    decoders: dict[str, SpeculativeDecoder], prompt: Any, settings: dict[str, Any], repeats: int, cancelled: Cancel
) -> tuple[Side, Side] | None:
    """Warm up each decoder, then run them in turns, so that a busy machine slows both. A drafter that learns from texts
    forgets this text before each run. Return None if the comparison is cancelled."""
    short = {**settings, "max_new_tokens": min(_WARM_UP, settings["max_new_tokens"]), "min_new_tokens": 0}
    for decoder in decoders.values():
        decoder.generate(prompt, cancel=cancelled, **fitting(decoder, short))
    results: dict[str, list[Generation]] = {name: [] for name in decoders}
    with preparing("comparing", announce=False) as progress:
        for run in range(repeats):
            for name, decoder in decoders.items():
                progress(f"run {run + 1} of {repeats}, {name}", 0, None)
                decoder.forget()
                results[name].append(decoder.generate(prompt, cancel=cancelled, **fitting(decoder, settings)))
                if cancelled():
                    return None
    ours, theirs = (Side(name, runs[-1], [r.stats.tokens_per_second for r in runs]) for name, runs in results.items())
    return ours, theirs


def _divergence(plain: Side, speculative: Side, decoder: SpeculativeDecoder) -> Divergence | None:
    ours, theirs = plain.result.tokens, speculative.result.tokens
    if ours == theirs:
        return None
    from paceline.audit.agreement import logits_after
    from paceline.models.reader import common_prefix

    at = common_prefix(ours, theirs)
    # raw logits, without controls
    logits = logits_after(decoder, plain.result.prompt_tokens, ours[:at])
    best = logits.topk(min(2, len(logits))).values.tolist()
    gap = best[0] - best[1] if len(best) > 1 else None
    return Divergence(at, ours[at] if at < len(ours) else None, theirs[at] if at < len(theirs) else None, gap)


def _as_dict(plain: Side, speculative: Side, divergence: Divergence | None, tokenizer: Any) -> dict[str, Any]:
    def content(side: Side) -> dict[str, Any]:
        result = result_lines.result_as_dict(side.result, tokenizer)
        return {**result, "tokens_per_second": side.speed, "runs": side.speeds}

    return {
        "plain": content(plain),
        "speculative": content(speculative),
        "identical": divergence is None,
        "divergence": None if divergence is None else vars(divergence),
        "speed_up": speculative.speed / plain.speed if plain.speed else None,
    }


# ---- output


def _print(
    plain: Side,
    speculative: Side,
    divergence: Divergence | None,
    decoder: SpeculativeDecoder,
    options: GenerateOptions,
) -> None:
    terminal = Terminal()
    if divergence is None:
        write_result(terminal, speculative.result, options.show_drafts)
        terminal.write("\nidentical text\n")
    else:
        for side in (plain, speculative):
            terminal.write(f"[{side.name}]\n")
            write_result(terminal, side.result, options.show_drafts)
        terminal.write(f"\nthe texts differ {_explain(divergence, decoder)}\n")
    terminal.write("\n" + _table(plain, speculative))
    terminal.write(f"\n{_verdict(plain, speculative, options.repeats)}\n")


def _table(plain: Side, speculative: Side) -> str:
    width = max(len(plain.name), len(speculative.name))
    lines = [f"{'':{width}}  tokens  seconds  tokens/s  passes     τ  acceptance"]
    for side in (plain, speculative):
        stats = side.result.stats
        share = f"{stats.acceptance_rate:.0%}, {stats.accepted} of {stats.drafted}" if stats.drafted else "–"
        lines.append(
            f"{side.name:{width}}  {stats.emitted:6}  {side.seconds:7.2f}  {side.speed:8.1f}  {stats.rounds:6}  "
            f"{stats.mean_accepted_length:4.2f}  {share}"
        )
    return "\n".join(lines) + "\n"


def _verdict(plain: Side, speculative: Side, repeats: int) -> str:
    ratio = speculative.speed / plain.speed if plain.speed else 0.0
    runs = f"median of {repeats} runs each, in turns" if repeats > 1 else "one run each"
    spread = f"plain {plain.span}, {speculative.name} {speculative.span} tokens/s"
    if ratio >= 1:
        return f"{ratio:.2f} times as fast with {speculative.name} ({runs}; {spread})"
    stats = speculative.result.stats
    why = "nothing was drafted" if not stats.drafted else f"{stats.acceptance_rate:.0%} of the drafts were accepted"
    return f"speculation was slower here: {ratio:.2f} times the speed of plain decoding, {why} ({runs}; {spread})"


def _explain(divergence: Divergence, decoder: SpeculativeDecoder) -> str:
    def shown(token: int | None) -> str:
        tokenizer = decoder.target.tokenizer
        return "nothing" if token is None else f"{result_lines.token_text(token, tokenizer)!r} (id {token})"

    gap = "" if divergence.gap is None else f"; the target's two best logits are {divergence.gap:.3g} apart there"
    plain, speculative = shown(divergence.plain), shown(divergence.speculative)
    where = f"from new token {divergence.position + 1} on: plain {plain}, speculative {speculative}"
    keeps = {"law": "keeps the distribution of the text, not the text", "": "is lossy"}.get(decoder.rule.exact)
    return f"{where}{gap}{'' if keeps is None else f'; rule {decoder.rule.name!r} {keeps}'}"
