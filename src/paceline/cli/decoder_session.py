"""From options to a decoder ready to run. What can be wrong without a model is checked before one is read."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.command_options import GenerateOptions, PairOptions, WritingOptions
from paceline.cli.settings import PREFIX, show_config, source
from paceline.cli.terminal import preparing
from paceline.common import startup
from paceline.common.errors import InputError, UnknownNameError
from paceline.common.json_text import parse_json
from paceline.core.registry import convert_options

if TYPE_CHECKING:
    from paceline.core.contracts import Drafter, Rule
    from paceline.engine.decoder import SpeculativeDecoder
    from paceline.models import LanguageModel

# ---- What the user said about drafter and rule, in any of the ways to say it, as names and options of the right types

_LEVELS = ("default", "config", "environment", "flag")
_VLLM_METHODS = {"ngram": "prompt-lookup", "[ngram]": "prompt-lookup", "draft_model": "draft-model", "suffix": "suffix",
                 "eagle": "eagle", "eagle3": "eagle", "medusa": "medusa"}  # fmt: skip
_VLLM_OPTIONS = {
    "prompt-lookup": {"prompt_lookup_max": "longest", "prompt_lookup_min": "shortest"},
    "suffix": {"suffix_decoding_min_token_prob": "min_probability"},
}
_VLLM_KEYS = ("method", "model", "num_speculative_tokens", *(k for keys in _VLLM_OPTIONS.values() for k in keys))


@dataclasses.dataclass(frozen=True)
class Drafting:
    """Which drafter, with what, and with what the rule; and where that was said."""

    draft: str
    gamma: int | str | None  # or "auto"; None: not said
    options: dict[str, str]
    rule_options: dict[str, str]
    origins: dict[str, str]


def drafting(ctx: typer.Context, said: PairOptions) -> Drafting:
    """Flags beat --speculative-config, which beats environment and config. Options belong to the drafter named beside
    them: a drafter named on the command line does not inherit those of the one in the config."""
    draft, gamma = said.draft, read_gamma(said.gamma)
    origins = {name: source(ctx, name) for name in ("draft", "gamma", "rule")}
    levels = _levels(ctx, "drafter", said.drafter_options)
    if said.speculative_config is not None:
        theirs = from_vllm(said.speculative_config)
        if origins["draft"] != "flag" and theirs.draft is not None:
            draft, origins["draft"] = theirs.draft, "speculative-config"
            levels = [("flag", theirs.options), *levels]
        if origins["gamma"] != "flag" and theirs.gamma is not None:
            gamma, origins["gamma"] = theirs.gamma, "speculative-config"
    if isinstance(said, WritingOptions) and said.prediction is not None and origins["draft"] == "default":
        draft, origins["draft"] = "prediction", source(ctx, "prediction")
    options = _merged(levels, "flag" if origins["draft"] == "speculative-config" else origins["draft"])
    rule_options = _merged(_levels(ctx, "rule", said.rule_options), origins["rule"])
    return Drafting(draft, gamma, options, rule_options, origins)


def read_gamma(text: str | None) -> int | str | None:
    """What --gamma says: a number of tokens, or "auto"; None: the decoder's own."""
    if text in (None, "auto"):
        return text
    try:
        gamma = int(text)
    except ValueError:
        raise InputError(f"--gamma must be a whole number, got '{text}'; or auto.") from None
    if gamma < 1:
        raise InputError(f"--gamma must be at least 1, got {gamma}.")
    return gamma


def config_of(ctx: typer.Context, said: PairOptions, how: Drafting) -> str:
    """What --print-config shows."""
    values = dataclasses.asdict(dataclasses.replace(said, draft=how.draft, speculative_config=None)) | {
        "gamma": how.gamma
    }
    origins = {name: source(ctx, name) for name in values}
    tables = {"drafter_options": how.options, "rule_options": how.rule_options}
    return show_config(str(ctx.info_name), values, {**origins, **how.origins}, tables)


def _merged(levels: Iterable[tuple[str, dict[str, str]]], named_at: str) -> dict[str, str]:
    """What was said at the level of the name or above it."""
    options: dict[str, str] = {}
    for level, given in levels:
        if _LEVELS.index(level) >= _LEVELS.index(named_at):
            options.update(given)
    return options


def _levels(ctx: typer.Context, owner: str, said: Iterable[str] | None) -> list[tuple[str, dict[str, str]]]:
    """The options of `owner`, drafter or rule, by where they were said."""
    beginning = f"{PREFIX}_{owner.upper()}_"
    environment = {k.removeprefix(beginning).lower(): v for k, v in os.environ.items() if k.startswith(beginning)}
    flags = said if source(ctx, f"{owner}_options") == "flag" else None
    return [
        ("config", _pairs((ctx.default_map or {}).get(f"{owner}_options", ()))),
        ("environment", environment),
        ("flag", _pairs(flags or ())),
    ]


def _pairs(given: Iterable[str]) -> dict[str, str]:
    return {name: value for name, _, value in (each.partition("=") for each in given)}


# ---- vLLM's --speculative-config


@dataclasses.dataclass(frozen=True)
class _Theirs:
    draft: str | None
    gamma: int | None
    options: dict[str, str]


def from_vllm(text: str) -> _Theirs:
    """vLLM's keys, said in ours. As there, one of prompt_lookup_max and prompt_lookup_min stands for both."""
    try:
        config = parse_json(text)
    except ValueError as error:
        raise InputError(f"--speculative-config is not valid JSON: {error}.") from None
    if not isinstance(config, dict):
        raise InputError(f"--speculative-config must be a JSON object, got {text!r}.")
    for key in config:
        if key not in _VLLM_KEYS:
            raise UnknownNameError("key of --speculative-config", key, _VLLM_KEYS)
    gamma = config.get("num_speculative_tokens")
    if gamma is not None and (isinstance(gamma, bool) or not isinstance(gamma, int) or gamma < 1):
        raise InputError(f"num_speculative_tokens must be a whole number of at least 1, got {gamma!r}.")
    model = config.get("model")
    method = config.get("method") or ("ngram" if model in ("ngram", "[ngram]") else "draft_model" if model else None)
    if method is None:
        return _Theirs(None, gamma, {})
    if str(method) not in _VLLM_METHODS:
        known = [name for name in _VLLM_METHODS if name.isidentifier()]
        raise UnknownNameError("method of --speculative-config", str(method), known)
    return _method(str(method), model, gamma, config)


def _method(method: str, model: Any, gamma: int | None, config: dict[str, Any]) -> _Theirs:
    name = _VLLM_METHODS[method]
    known = _VLLM_OPTIONS.get(name, {})
    for key in config.keys() - known.keys() - {"method", "model", "num_speculative_tokens"}:
        raise InputError(f"{key} of --speculative-config is not for the method {method}; leave it out.")
    if name not in _VLLM_OPTIONS:  # it drafts with weights
        if not isinstance(model, str):
            raise InputError(f"--speculative-config with the method {method} needs a model.")
        return _Theirs(model, gamma, {}) if name == "draft-model" else _Theirs(name, gamma, {"head": model})
    given = {ours: config.get(theirs) for theirs, ours in known.items()}
    if name == "prompt-lookup":
        given = {each: given[each] or given[other] for each, other in zip(given, reversed(given), strict=True)}
    return _Theirs(name, gamma, {ours: str(value) for ours, value in given.items() if value is not None})


# ---- From options to a decoder ready to run. What can be wrong without a model is checked before one is read

_GIVEN_AS_IS = (
    "max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "typical_p", "noise",
    "dynamic_temperature", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "logprobs",
    "length_penalty", "length_offset", "beam_top_k", "beams", "n_best",
)  # fmt: skip
_LONGER = {"beams": "num_beams", "n_best": "num_return_sequences"}  # what the library calls them
# a config may say true and false
_EARLY: dict[str, bool | str] = {"yes": True, "true": True, "no": False, "false": False, "never": "never"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "s": " ", "\\": "\\"}


def read_prompt(said: GenerateOptions) -> Any:
    """The text, or a conversation that holds it."""
    text = said.prompt
    if text is None:
        raise InputError("The prompt is missing; give one, or '-' to read it from standard input.")
    try:
        if text == "-":  # one newline at the end is the shell's, not the writer's
            text = sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").removesuffix("\r")
        text.encode("utf-8")
    except UnicodeError:
        raise InputError("The prompt is not valid UTF-8 text; save it as UTF-8.") from None
    if not text:
        raise InputError("The prompt is empty; give at least one word.")
    if not said.chat and said.system is None:
        return text
    system = [] if said.system is None else [{"role": "system", "content": said.system}]
    return [*system, {"role": "user", "content": text}]


def read_settings(said: WritingOptions) -> dict[str, Any]:
    """What `decoder.generate` takes; only what was said."""
    values = asdict(said)
    settings = {_LONGER.get(name, name): values[name] for name in _GIVEN_AS_IS if values.get(name) is not None}
    if said.stop:
        settings["stop"] = [_unescape(string) for string in said.stop]
    if said.ban:
        settings["banned_tokens"] = list(said.ban)
    if said.logit_bias:
        settings["logit_bias"] = dict(_bias(each) for each in said.logit_bias)
    if said.ignore_eos:
        settings["ignore_eos"] = True
    if said.prediction is not None:
        settings["prediction"] = _read_prediction(said.prediction)
    if said.early_stopping is not None:
        early = said.early_stopping.lower()
        if early not in _EARLY:
            raise InputError(f"--early-stopping must be yes, no or never, got '{said.early_stopping}'.")
        settings["early_stopping"] = _EARLY[early]
    return settings


def _read_prediction(text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InputError(f"--prediction {text} cannot be read: {error}.") from None


def _unescape(text: str) -> str:
    r"""\n, \t, \r, \s (a space), \\, \xHH and \uHHHH; any other backslash is one."""

    def replace(found: re.Match[str]) -> str:
        code = found[2] or found[3]
        return chr(int(code, 16)) if code else _ESCAPES[found[1]]

    return re.sub(r"\\(?:([ntrs\\])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4}))", replace, text)


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise InputError(f"--logit-bias must be ID=VALUE, such as 42=-1.5, got '{text}'.") from None


def open_decoder(said: PairOptions, drafting: Drafting, settings: dict[str, Any], rows: int = 16) -> SpeculativeDecoder:
    """Check the names and numbers, load the model or models, and put them together."""
    with preparing(f"loading {said.target}"):
        check_counts(nodes=said.nodes)
        check_running(said.runner, said.quantize)
        check_settings(settings, open_rule(said, drafting))
        _check_branches(said)
        drafter = draft_of(said, drafting)
    made = pair(said, drafting, load_target(said), drafter, rows)
    startup.started()
    return made


def check_settings(settings: dict[str, Any], rule: Rule) -> None:
    """Refuse now what would be refused once there is a prompt; a rule that searches brings its number of beams."""
    from paceline.engine.request import build_requests

    build_requests(1, {"num_beams": rule.num_beams, **settings})


def load_target(said: PairOptions) -> LanguageModel:
    """The target, with a second branch where one was asked for."""
    _check_branches(said)
    target = _load(said, said.target, said.quantize, said.tp_plan)
    if said.strict:
        from paceline.models.runtime import made_strict

        target = made_strict(target)
    from paceline.models.readers.guided import contrast, guided

    if said.amateur is not None:
        return contrast(target, _load(said, said.amateur, said.quantize))
    if said.guidance_scale is not None:
        return guided(target, said.guidance_scale, said.negative_prompt or "")
    return target


def _check_branches(said: PairOptions) -> None:
    if said.negative_prompt is not None and said.guidance_scale is None:
        raise InputError("--negative-prompt is for --guidance-scale; give both.")
    if said.amateur == "":
        raise InputError("--amateur is empty; give the name or the folder of a model.")
    if said.amateur is not None and said.guidance_scale is not None:
        raise InputError("--amateur and --guidance-scale both make a target of two branches; use one of them.")


def _load(said: PairOptions, source: str, quantize: str | None = None, tp_plan: str | None = None) -> LanguageModel:
    with preparing(f"loading {source}") as progress:
        from paceline.models import load
        from paceline.models.runtime import prepare

        lm = load(source, dtype=said.dtype, device=said.device, runner=said.runner, quantize=quantize, tp_plan=tp_plan,
                  progress=progress)  # fmt: skip
        prepare(lm, progress)
        return lm


def check_running(runner: str, quantize: str | None) -> None:
    """Names that nobody knows are refused before a model is read."""
    from paceline.models.runtime import check_kind, check_runner

    check_runner(runner)
    check_kind(quantize)


def pair(
    said: PairOptions, drafting: Drafting, target: LanguageModel, drafter: Drafter | None = None, rows: int = 16
) -> SpeculativeDecoder:
    """A target that is loaded, its drafter and its rule."""
    from paceline.engine.decoder import SpeculativeDecoder

    drafter, rule = drafter or draft_of(said, drafting), open_rule(said, drafting)
    settings: dict[str, Any] = {
        "gamma": drafting.gamma, "nodes": said.nodes, "rows": rows, "first_target": said.first_target
    }  # fmt: skip
    if drafting.gamma == "auto" or drafter.chooses_length:
        _measure_costs(target)
    return SpeculativeDecoder(target, drafter, rule=rule, allow_lossy=said.allow_lossy, **settings)


def _measure_costs(target: LanguageModel) -> None:
    """The first time on this machine: some seconds, so people should see what they wait for."""
    from paceline.models.pass_timing import costs_for

    with preparing("measuring passes") as progress:
        costs_for(target, progress=progress)


def plain_decoder(target: LanguageModel, rule: Rule) -> SpeculativeDecoder:
    """What a decoder with `rule` is compared with: the target alone, searching where the rule searches."""
    from paceline.engine.decoder import SpeculativeDecoder

    return SpeculativeDecoder(target, None, rule=rule if rule.exact == "beam" else "match")


def fitting(decoder: SpeculativeDecoder, settings: dict[str, Any]) -> dict[str, Any]:
    """Plain decoding, and whoever else runs beside, is not told what to expect."""
    return {k: v for k, v in settings.items() if k != "prediction" or decoder.drafter.takes_prediction}


def draft_of(said: PairOptions, drafting: Drafting) -> Drafter:
    return _make_drafter(drafting, lambda source: _load(said, source))


def open_rule(said: PairOptions, drafting: Drafting) -> Rule:
    """The rule with its options, refused if it is lossy and nobody allowed that."""
    from paceline.core.contracts import RULES
    from paceline.engine.decoder import check_lossless, make_rule

    options = convert_options(drafting.rule_options, RULES[said.rule].Options, "rule", said.rule)
    rule = make_rule(said.rule, options)
    check_lossless(rule, said.allow_lossy)
    return rule


def check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise InputError(f"--{name} must be at least 1, got {value}.")


def _make_drafter(drafting: Drafting, load: Callable[[str], Any]) -> Drafter:
    from paceline.core.contracts import DRAFTERS
    from paceline.drafters.resolve import make_drafter, resolve_draft

    name, options, _ = resolve_draft(drafting.draft, drafting.options, text_prefix="--drafter.")
    known = [field.name for field in fields(DRAFTERS[name].Options)]
    if "model" in known and not options.get("model"):  # said in the words of a flag
        raise InputError(f"{name} needs a model, such as --drafter.model FOLDER.")
    if isinstance(options.get("model"), str):
        options["model"] = load(options["model"])
    return make_drafter(name, options)
