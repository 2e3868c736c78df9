"""Make a decoder from the options of a command. Checks that need no model run before a model is read."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.command_options import GenerateOptions, PairOptions, WritingOptions
from paceline.cli.terminal import preparing
from paceline.common import process
from paceline.common.errors import InputError, in_one_line
from paceline.common.options import convert_options

if TYPE_CHECKING:
    from paceline.core.contracts import Drafter, Rule
    from paceline.engine.decoder import SpeculativeDecoder
    from paceline.models import LanguageModel

# options -> arguments of `decoder.generate`; an option that is None is left out
_SETTINGS = {
    **{name: name for name in (
        "max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "typical_p", "noise",
        "dynamic_temperature", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "logprobs",
        "length_penalty", "length_offset", "beam_top_k", "early_stopping",
    )},
    "beams": "num_beams",
    "n_best": "num_return_sequences",
}  # fmt: skip
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "s": " ", "\\": "\\"}


# ---- the prompt and the settings of a text


def read_prompt(options: GenerateOptions) -> Any:
    """Return the text, or a conversation that contains it."""
    text = options.prompt
    if text is None:
        raise InputError("The prompt is missing; give one, or '-' to read it from standard input.")
    try:
        if text == "-":  # the shell adds one newline at the end
            text = sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").removesuffix("\r")
        text.encode("utf-8")
    except UnicodeError:
        raise InputError("The prompt is not valid UTF-8 text; save it as UTF-8.") from None
    if not text:
        raise InputError("The prompt is empty; give at least one word.")
    if not options.chat and options.system is None:
        return text
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [*system, {"role": "user", "content": text}]


def read_settings(options: WritingOptions) -> dict[str, Any]:
    """Return the arguments of `decoder.generate`, without those that were not given."""
    values = {name: getattr(options, name, None) for name in _SETTINGS}
    settings = {_SETTINGS[name]: value for name, value in values.items() if value is not None}
    if options.stop:
        settings["stop"] = [_unescape(text) for text in options.stop]
    if options.ban:
        settings["banned_tokens"] = list(options.ban)
    if options.logit_bias:
        settings["logit_bias"] = dict(_bias(text) for text in options.logit_bias)
    if options.ignore_eos:
        settings["ignore_eos"] = True
    if options.prediction is not None:
        settings["prediction"] = _read_prediction(options.prediction)
    return {**settings, **_grammar(options)}


def _grammar(options: WritingOptions) -> dict[str, Any]:
    """Return the setting that gives the text a grammar, if there is one."""
    settings: dict[str, Any] = {"json_object": True} if options.json_object else {}
    if options.json_schema is not None:
        given = options.json_schema
        settings["json_schema"] = given if given.lstrip()[:1] in ("{", "") else _read_file("--json-schema", given)
    if options.regex is not None:
        settings["regex"] = options.regex
    if options.grammar is not None:
        text = options.grammar
        settings["grammar"] = text if ":" in text and not Path(text).is_file() else _read_file("--grammar", text)
    if options.choice:
        settings["choice"] = list(options.choice)
    return settings


def _read_prediction(text: str) -> str:
    return _read_file("--prediction", text, text[1:]) if text.startswith("@") else text


def _read_file(flag: str, given: str, path: str | None = None) -> str:
    try:
        return Path(given if path is None else path).read_text(encoding="utf-8")
    except (OSError, UnicodeError, ValueError) as error:
        raise InputError(f"{flag} {given} cannot be read: {in_one_line(error)}.") from None


def _unescape(text: str) -> str:
    r"""Replace \n, \t, \r, \s (a space), \\, \xHH and \uHHHH. Any other backslash stays."""

    def replace(match: re.Match[str]) -> str:
        code = match[2] or match[3]
        return chr(int(code, 16)) if code else _ESCAPES[match[1]]

    return re.sub(r"\\(?:([ntrs\\])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4}))", replace, text)


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise InputError(f"--logit-bias must be ID=VALUE, such as 42=-1.5, got '{text}'.") from None


# ---- models, drafter and rule


def open_decoder(options: PairOptions, settings: dict[str, Any], rows: int = 16) -> SpeculativeDecoder:
    """Check the settings, load the models and make the decoder."""
    with preparing(f"loading {options.target}"):
        rule = open_rule(options)
        check_settings(settings, rule)
        _check_branches(options)
        drafter = open_drafter(options)
    decoder = make_decoder(options, _load_target(options), drafter, rule, rows)
    process.started()
    return decoder


def check_settings(settings: dict[str, Any], rule: Rule) -> None:
    """Refuse settings that the first prompt would be refused for. A beam-search rule sets the number of beams."""
    from paceline.engine.request import build_requests

    build_requests(1, {"num_beams": rule.num_beams, **settings})


def _check_branches(options: PairOptions) -> None:
    if options.negative_prompt is not None and options.guidance_scale is None:
        raise InputError("--negative-prompt is for --guidance-scale; give both.")
    if options.amateur == "":
        raise InputError("--amateur is empty; give the name or the folder of a model.")
    if options.amateur is not None and options.guidance_scale is not None:
        raise InputError("--amateur and --guidance-scale both make a target of two branches; use one of them.")


def _load_target(options: PairOptions) -> LanguageModel:
    """Load the target. Guidance and contrastive decoding give it a second branch."""
    target = _load(options, options.target, options.quantize, options.tp_plan)
    if options.strict:
        from paceline.models.runtime import with_strict

        target = with_strict(target)
    from paceline.models.readers.guided import contrast, guided

    if options.amateur is not None:
        return contrast(target, _load(options, options.amateur, options.quantize))
    if options.guidance_scale is not None:
        return guided(target, options.guidance_scale, options.negative_prompt or "")
    return target


def _load(options: PairOptions, source: str, quantize: str | None = None, tp_plan: str | None = None) -> LanguageModel:
    with preparing(f"loading {source}") as progress:
        from paceline.models import load
        from paceline.models.runtime import prepare

        lm = load(source, dtype=options.dtype, device=options.device, runner=options.runner, quantize=quantize,
                  tp_plan=tp_plan, progress=progress)  # fmt: skip
        prepare(lm, progress)
        return lm


def open_drafter(options: PairOptions) -> Drafter:
    """Make the drafter with its options. A draft model is loaded in the same way as the target."""
    from paceline.core.contracts import DRAFTERS
    from paceline.drafters.resolve import make_drafter, resolve_draft

    name, values, _ = resolve_draft(options.draft, options.options, text_prefix="--drafter.")
    if "model" in (field.name for field in fields(DRAFTERS[name].Options)) and not values.get("model"):
        raise InputError(f"{name} needs a model, such as --drafter.model FOLDER.")
    if isinstance(values.get("model"), str):
        values["model"] = _load(options, values["model"])
    return make_drafter(name, values)


def open_rule(options: PairOptions) -> Rule:
    """Make the rule with its options. A lossy rule is refused without --allow-lossy."""
    from paceline.core.contracts import RULES
    from paceline.engine.decoder import check_lossless, make_rule

    values = convert_options(options.rule_options, RULES[options.rule].Options, "rule", options.rule)
    rule = make_rule(options.rule, values)
    check_lossless(rule, options.allow_lossy)
    return rule


def make_decoder(
    options: PairOptions, target: LanguageModel, drafter: Drafter, rule: Rule, rows: int = 16
) -> SpeculativeDecoder:
    """Make the decoder of a loaded target, a drafter and a rule."""
    from paceline.core.protocols import chooses_length
    from paceline.engine.decoder import SpeculativeDecoder

    if options.gamma == "auto" or chooses_length(drafter):
        _measure_costs(target)
    return SpeculativeDecoder(target, drafter, rule=rule, allow_lossy=options.allow_lossy, gamma=options.gamma,
                              nodes=options.nodes, rows=rows, first_target=options.first_target)  # fmt: skip


def _measure_costs(target: LanguageModel) -> None:
    """Measure forward passes. The first measurement on a machine takes some seconds, so it shows its progress."""
    from paceline.models.pass_timing import costs_for

    with preparing("measuring forward passes") as progress:
        costs_for(target, progress=progress)


def plain_decoder(target: LanguageModel, rule: Rule) -> SpeculativeDecoder:
    """Return a decoder without a drafter. It uses beam search if the rule does."""
    from paceline.engine.decoder import SpeculativeDecoder

    return SpeculativeDecoder(target, None, rule=rule if rule.exact == "beam" else "match")


def fitting(decoder: SpeculativeDecoder, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, without `prediction` if the drafter cannot use one."""
    from paceline.core.protocols import takes_prediction

    return {k: v for k, v in settings.items() if k != "prediction" or takes_prediction(decoder.drafter)}
