"""From options to a decoder ready to run. What can be wrong without a model is checked before one is read."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core import startup
from paceline.core.errors import InputError
from paceline.core.registry import convert_options

from .drafting import Drafting
from .options import GenerateOptions, PairOptions, WritingOptions
from .terminal import preparing

if TYPE_CHECKING:
    from paceline.core.contracts import Drafter, Rule
    from paceline.engine.decoder import SpeculativeDecoder
    from paceline.models import LanguageModel

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
        from paceline.models.running import made_strict

        target = made_strict(target)
    from paceline.models.guided import contrast, guided

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
        from paceline.models.running import prepare

        lm = load(source, dtype=said.dtype, device=said.device, runner=said.runner, quantize=quantize, tp_plan=tp_plan,
                  progress=progress)  # fmt: skip
        prepare(lm, progress)
        return lm


def check_running(runner: str, quantize: str | None) -> None:
    """Names that nobody knows are refused before a model is read."""
    from paceline.models.running import check_kind, check_runner

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
    from paceline.models.pass_times import costs_for

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
    from paceline.engine.arguments import check_lossless, make_rule

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
    from paceline.drafters.loading import holds
    from paceline.drafters.making import make_drafter
    from paceline.models import is_model

    draft: Any = drafting.draft
    held = None if draft in DRAFTERS else holds(draft)  # a folder with a trained head
    if draft not in DRAFTERS and held is None and not is_model(draft):
        return make_drafter(draft, {})  # says what is wrong with the name
    name = draft if draft in DRAFTERS else held[0] if held else "draft-model"
    options = convert_options(drafting.options, DRAFTERS[name].Options, "drafter", name)
    if draft not in DRAFTERS:
        return make_drafter(draft if held else load(draft), options)
    known = [field.name for field in fields(DRAFTERS[name].Options)]
    if "model" in known and not options.get("model"):  # said in the words of a flag
        raise InputError(f"{name} needs a model, such as --drafter.model FOLDER.")
    if isinstance(options.get("model"), str):
        options["model"] = load(options["model"])
    return make_drafter(draft, options)
