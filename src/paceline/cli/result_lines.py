"""A result as lines for people, as JSON for programs, and as a trace (`--trace FILE`)."""

from __future__ import annotations

import json
import math
import platform
from typing import TYPE_CHECKING, Any

from paceline.cli.command_options import GenerateOptions
from paceline.common.errors import InputError
from paceline.common.options import convert_options

if TYPE_CHECKING:
    from paceline.bench.trace_files import TraceWriter
    from paceline.engine.decoder import SpeculativeDecoder
    from paceline.engine.request import BeamResult, Generation, TokenLogprob


def versions() -> dict[str, str]:
    """Return the versions of the main packages, without importing them."""
    from importlib.metadata import version

    from paceline import __version__

    found = {name: version(name) for name in ("torch", "transformers")}
    return {"paceline": __version__, **found, "python": platform.python_version()}


def beginning(decoder: SpeculativeDecoder, settings: dict[str, Any]) -> str:
    """Return the first line: the target, the drafter, and the rule for these settings."""
    text, beams = decoder.describe(), settings.get("num_beams", decoder.rule.num_beams)
    searches = decoder.rule.exact == "beam"
    if beams == 1 and not searches:
        return text
    if decoder.speculates:
        text = text.rpartition(", rule ")[0] + f", rule {'beam' if beams > 1 else 'match'}"
    return f"{text}, {beams} beams" if beams > 1 else text


def summary(result: Generation, speculates: bool) -> str:
    stats = result.stats
    parts = [f"{stats.emitted} tokens in {stats.seconds:.2f} s", f"{stats.tokens_per_second:.1f} tokens/s"]
    if stats.drafted:
        share = f"acceptance {stats.acceptance_rate:.0%} ({stats.accepted} of {stats.drafted} drafted)"
        parts += [f"τ {stats.mean_accepted_length:.2f}", share]
    elif speculates:
        parts.append("nothing was drafted")
    parts += [f"LOSSY (rule {stats.rule})"] if stats.lossy else []
    parts.append(ending(result))
    return ", ".join(parts)


def ending(result: Generation) -> str:
    if result.finish_reason == "length":
        return "ended by length"
    if result.finish_reason == "cancelled":
        return "cancelled"
    return f"ended by {result.stop_reason!r}" if isinstance(result.stop_reason, str) else "ended by end of text"


def settings_of(decoder: SpeculativeDecoder, settings: dict[str, Any]) -> dict[str, Any]:
    """Everything that affects this text and its speed."""
    from paceline.audit.audit_run import subject_of

    return {**subject_of(decoder), **settings}


def result_as_dict(result: Generation, tokenizer: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "seed": result.seed,
        "prompt_tokens": len(result.prompt_tokens),
        "cached_tokens": result.cached_tokens,
        "from_draft": result.trace.from_draft,
        "stats": result.stats.as_dict(),
    }
    if result.beams is not None:
        content["beams"] = [_beam_as_dict(beam, tokenizer) for beam in result.beams]
    if result.logprobs is not None:
        content["logprobs"] = _logprobs_as_dicts(result.logprobs, tokenizer)
    return content


def _beam_as_dict(beam: BeamResult, tokenizer: Any) -> dict[str, Any]:
    content = {name: value for name, value in vars(beam).items() if name != "logprobs"}
    return content if beam.logprobs is None else {**content, "logprobs": _logprobs_as_dicts(beam.logprobs, tokenizer)}


def _logprobs_as_dicts(logprobs: list[TokenLogprob], tokenizer: Any) -> list[dict[str, Any]]:
    return [
        {
            "token": entry.token,
            "text": token_text(entry.token, tokenizer),
            "raw": entry.raw,
            "processed": entry.processed,
            **{
                name: [{"token": t, "text": token_text(t, tokenizer), "logprob": value} for t, value in top]
                for name, top in (("top_raw", entry.top_raw), ("top_processed", entry.top_processed))
            },
        }
        for entry in logprobs
    ]


def token_text(token: int, tokenizer: Any) -> str:
    return "" if tokenizer is None else str(tokenizer.decode([token]))


def dump(content: dict[str, Any]) -> str:
    """Strict JSON. It has no infinity, so the log-probability of a banned token is null."""
    return json.dumps(_finite(content), ensure_ascii=False, allow_nan=False)


def print_json(content: dict[str, Any]) -> None:
    """Write one JSON object with the versions to stdout."""
    print(dump({**content, "versions": versions()}), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def beam_lines(result: Generation) -> list[str]:
    """The texts of a beam search with their scores, best first. The first lacks its text, which is shown in colour."""
    lines = [f"[{rank}, score {beam.score:.3f}] {beam.text}" for rank, beam in enumerate(result.beams or (), 1)]
    return [lines[0].removesuffix(result.text), *lines[1:]] if lines else [""]


def logprob_lines(result: Generation, tokenizer: Any) -> list[str]:
    """One line per token: its log-probability, and the most likely alternatives."""
    lines = []
    for entry in result.logprobs or ():
        others = "  ".join(f"{token_text(t, tokenizer)!r} {value:.3f}" for t, value in entry.top_processed)
        own = f"{token_text(entry.token, tokenizer)!r:>16} {entry.processed:8.3f} (raw {entry.raw:.3f})"
        lines.append(f"{own}  {others}".rstrip())
    return lines


class Recording:
    """A trace file that a text is added to. It is opened once at the start, to find mistakes early."""

    def __init__(self, options: GenerateOptions, decoder: SpeculativeDecoder, settings: dict[str, Any]) -> None:
        from paceline.bench.candidate import RunSpec
        from paceline.bench.trace_files import header_of
        from paceline.core.contracts import RULES
        from paceline.core.protocols import chooses_length
        from paceline.drafters.resolve import resolve_draft

        assert options.trace is not None
        if settings.get("num_beams", decoder.rule.num_beams) > 1:
            raise InputError("--trace records one text, and a beam search writes several; leave one of the two out.")
        draft, values, source = resolve_draft(options.draft, options.options, text_prefix="--drafter.")
        if source is not None and draft == "draft-model":
            draft = values.pop("model")  # a trace names the draft model itself
        rule_values = convert_options(options.rule_options, RULES[options.rule].Options, "rule", options.rule)
        gamma = "auto" if chooses_length(decoder.drafter) else decoder.gamma
        entry = RunSpec(options.draft, draft, values, gamma, options.nodes, options.rule, rule_values)
        self._decoder, self._settings, self._path = decoder, settings, options.trace
        self._header = header_of(decoder.target, entry, settings, provenance={"versions": versions()})
        self._open().close()

    def _open(self) -> TraceWriter:
        from paceline.bench.trace_files import TraceWriter

        return TraceWriter(self._path, self._header, append=True)

    def add(self, result: Generation) -> None:
        from paceline.engine.prompts import encode_prediction

        lm = self._decoder.target
        limit = min(self._settings["max_new_tokens"], lm.context - len(result.prompt_tokens))
        expected = encode_prediction(self._settings.get("prediction"), lm)
        with self._open() as writer:
            writer.add_generation(str(writer.count + 1), "", result, limit, expected)
