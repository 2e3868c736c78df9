"""The options of `generate`, `chat` and `audit`, as dataclasses: a field is a flag, a key of the config file and an
environment variable."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.cli.settings import Given
from paceline.common.errors import InputError, UnknownNameError
from paceline.common.limits import SEED, Limited
from paceline.common.options import check_known, like, option
from paceline.common.text_formats import parse_json
from paceline.engine.decoder_config import DecoderOptions, RunnerOptions
from paceline.serve.server_options import ServerOptions

_PROMPT, _MODELS, _DRAFT, _CHOICE = "Prompt", "Models", "Drafting", "Choosing tokens"
_GRAMMAR = "Grammar (docs/grammars.md)"
_STOP, _SHOW, _AUDIT, _SERVER = "Stopping", "Output", "Audit", "Audit of a server"


@dataclass(frozen=True)
class PromptOptions(Limited):
    """The prompt of `generate`."""

    prompt: str | None = option(None, "The text to continue; '-' reads standard input.", argument=True,
                                metavar="PROMPT")  # fmt: skip
    chat: bool = option(False, "PROMPT is a message; apply the model's chat template.", _PROMPT)
    system: str | None = option(None, "A system message before PROMPT; implies --chat.", _PROMPT, metavar="TEXT")


@dataclass(frozen=True)
class FirstMessage(Limited):
    """The start of a conversation."""

    prompt: str | None = option(None, "The first message; others follow on the terminal or standard input.",
                                argument=True, metavar="MESSAGE")  # fmt: skip
    system: str | None = option(None, "The system message of the conversation.", _PROMPT, metavar="TEXT")


@dataclass(frozen=True)
class PairOptions(RunnerOptions):
    """The models, the drafter and the rule, for every command that decodes."""

    target: str = like(RunnerOptions, "target", names="model")
    runner: str = like(RunnerOptions, "runner", help="auto, eager, cuda_graph or kernels (docs/gpu.md).")
    guidance_scale: float | None = option(None, "Classifier-free guidance, away from the negative prompt; 1 is off.",
                                          _MODELS)  # fmt: skip
    negative_prompt: str | None = option(None, "The negative prompt; else the last token of the prompt.", _MODELS,
                                         metavar="TEXT")  # fmt: skip
    amateur: str | None = option(None, "Contrastive decoding: a weaker model to stay away from.", _MODELS,
                                 metavar="MODEL", names="model")  # fmt: skip
    tp_plan: str | None = option(None, "Split the target over the processes of torchrun.", _MODELS, metavar="auto")

    draft: str = like(DecoderOptions, "draft")
    options: dict[str, Any] = like(DecoderOptions, "options", default=dict)
    gamma: int | Literal["auto"] | None = like(DecoderOptions, "gamma")
    nodes: int | None = like(DecoderOptions, "nodes")
    rule: str = like(DecoderOptions, "rule")
    rule_options: dict[str, Any] = like(DecoderOptions, "rule_options", default=dict)
    allow_lossy: bool = like(DecoderOptions, "allow_lossy")
    strict: bool = like(DecoderOptions, "strict")
    first_target: bool = like(DecoderOptions, "first_target")
    speculative_config: str | None = option(None, "vLLM's keys for this group: method, model, num_speculative_tokens …",
                                            _DRAFT, metavar="JSON")  # fmt: skip


@dataclass(frozen=True)
class WritingOptions(PairOptions):
    """The options of both `generate` and `chat`. None: the default of the library."""

    prediction: str | None = option(None, "The text you expect, or @FILE; it is drafted where it fits.", _DRAFT,
                                    metavar="TEXT")  # fmt: skip

    temperature: float | None = option(None, "0 is greedy and the default; 1 with one of the next options.", _CHOICE)
    top_k: int | None = option(None, "Only the N most likely tokens.", _CHOICE)
    top_p: float | None = option(None, "Only the most likely tokens with a total probability of X.", _CHOICE)
    min_p: float | None = option(None, "Only tokens with at least X times the highest probability.", _CHOICE)
    typical_p: float | None = option(None, "Only the most typical tokens with a total probability of X.", _CHOICE)
    noise: float | None = option(None, "Gaussian noise on the top-k logits.", _CHOICE)
    dynamic_temperature: float | None = option(None, "Change the temperature by up to X with the entropy.", _CHOICE)
    repetition_penalty: float | None = option(None, "Weaken tokens of the prompt and the text; 1 is off.", _CHOICE)
    presence_penalty: float | None = option(None, "Weaken the tokens of the new text.", _CHOICE)
    frequency_penalty: float | None = option(None, "Weaken them for each time they occur.", _CHOICE)
    logit_bias: tuple[str, ...] = option((), "Add X to the logit of a token; repeatable.", _CHOICE, metavar="ID=X")
    ban: tuple[int, ...] = option((), "Never write this token; repeatable.", _CHOICE, metavar="ID")
    beams: int | None = option(None, "Beam search with N beams; greedy only.", _CHOICE)
    length_penalty: float | None = option(None, "For --beams: divide scores by ((M + length) / (M + 1)) ** X.", _CHOICE)
    length_offset: float | None = option(None, "For --beams: M of the length penalty; 0 by default.", _CHOICE,
                                         metavar="M")  # fmt: skip
    beam_top_k: int | None = option(None, "For --beams: each beam proposes its N most likely tokens.", _CHOICE)
    early_stopping: bool | Literal["never"] | None = option(
        None, "For --beams: yes (as soon as N texts end), no or never.", _CHOICE, metavar="WHEN"
    )
    seed: int | None = option(None, "The same seed gives the same text; a new one by default.", _CHOICE, **SEED)

    json_schema: str | None = option(None, "The text is JSON of this schema.", _GRAMMAR, metavar="FILE|JSON")
    json_object: bool = option(False, "The text is a JSON object.", _GRAMMAR)
    regex: str | None = option(None, "The text matches all of this expression.", _GRAMMAR, metavar="REGEX")
    grammar: str | None = option(None, "The text follows this grammar, in Lark or GBNF.", _GRAMMAR,
                                 metavar="FILE|TEXT")  # fmt: skip
    choice: tuple[str, ...] = option((), "The text is this one, or another --choice; repeatable.", _GRAMMAR,
                                     metavar="TEXT")  # fmt: skip

    max_new_tokens: int = option(128, "The most tokens to write.", _STOP)
    min_new_tokens: int | None = option(None, "Write at least N tokens before an end of text.", _STOP)
    stop: tuple[str, ...] = option((), r"End before this text; \n and \t are understood; repeatable.", _STOP,
                                   metavar="TEXT")  # fmt: skip
    ignore_eos: bool = option(False, "Continue after an end of text.", _STOP)

    show_drafts: bool = option(False, "Also show rejected drafts.", _SHOW)
    stream: bool | None = option(None, "Show tokens as they come; the default on a terminal.", _SHOW)
    json: bool = option(False, "Write one JSON object per text to stdout and nothing else.", _SHOW)


@dataclass(frozen=True)
class GenerateOptions(WritingOptions, PromptOptions):
    """The options of `paceline generate`."""

    n_best: int | None = option(None, "For --beams: show the N best texts with their scores.", _CHOICE)
    compare: bool = option(False, "Compare the speed with plain decoding, in turns.", _SHOW)
    repeats: int = option(3, "Runs of each for --compare.", _SHOW, least=1)
    logprobs: int | None = option(None, "Show log-probabilities of the tokens and of K others.", _SHOW, metavar="K")
    trace: str | None = option(None, "Add the text with its rounds to a trace, for `paceline bench --replay`.", _SHOW,
                               metavar="FILE")  # fmt: skip

    html: Path | None = option(None, "Write a page with the rounds of the text.", _SHOW, metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compare and self.draft == "none":
            raise InputError("--compare needs a drafter to compare plain decoding with, and --draft is none.")
        if self.compare and self.trace is not None:
            raise InputError("--trace records one text, and --compare writes it several times; leave one of them out.")


@dataclass(frozen=True)
class ChatOptions(WritingOptions, FirstMessage):
    """The options of `paceline chat`."""


@dataclass(frozen=True)
class ServeOptions(PairOptions, ServerOptions):
    """The options of `paceline serve`."""


@dataclass(frozen=True)
class PlaygroundOptions(ServeOptions):
    """The options of `paceline playground`."""

    browser: bool = option(True, "Open the page in a browser.", _SHOW)


@dataclass(frozen=True)
class AuditOptions(PairOptions):
    """The options of `paceline audit`."""

    prompts: Path | None = option(None, "Prompts: one per line, or .jsonl with 'prompt' or 'turns'.", _AUDIT,
                                  metavar="FILE")  # fmt: skip
    limit: int | None = option(None, "Only the first N prompts.", _AUDIT, least=1)
    tokens: int = option(32, "Tokens of each text that is compared with plain decoding.", _AUDIT)
    positions: int = option(2, "Positions where the distribution of the next two tokens is tested.", _AUDIT)
    samples: int = option(256, "Samples at each position; 0 omits the statistics.", _AUDIT)
    temperature: float = option(0.8, "Temperature of the texts and of the samples.", _AUDIT)
    false_alarm: float = option(1e-4, "The chance that an exact decoder fails the statistics.", _AUDIT)
    seed: int = option(0, "The first seed of the texts and of the samples.", _AUDIT, **SEED)
    only_rule: bool = option(False, "Test only the rule, on small distributions; no model is read.", _AUDIT)

    server: str | None = option(None, "Audit this server with OpenAI's API, and load no model.", _SERVER, metavar="URL")
    against: str | None = option(None, "Another server of the same model, such as one without speculation.", _SERVER,
                                 metavar="URL")  # fmt: skip
    model: str | None = option(None, "The name of the model at both servers; the only one by default.", _SERVER,
                               metavar="NAME")  # fmt: skip
    api_key: str | None = option(None, "The key of --server.", _SERVER, metavar="KEY", secret=True)
    against_api_key: str | None = option(None, "The key of --against.", _SERVER, metavar="KEY", secret=True)
    requests: int = option(16, "Requests of each run: greedy and sampled, chat and completions.", _SERVER)
    concurrency: int = option(8, "Requests at a time under load.", _SERVER, least=2)
    timeout: float = option(300.0, "Seconds that a request may take.", _SERVER, above=0)

    report: Path | None = option(None, "Write a report; .html or .md.", _SHOW, metavar="FILE")
    json: bool = option(False, "Write one JSON object to stdout and nothing else.", _SHOW)


# ---- values that depend on other values


def resolve_drafter(given: Given) -> None:
    """Flags replace --speculative-config, which replaces the environment and the config file."""
    values, origins, options = given.values, given.origins, given.tables["options"]
    if values["speculative_config"] is not None:
        vllm = from_vllm(values["speculative_config"])
        if origins["draft"] != "flag" and vllm.draft is not None:
            values["draft"], origins["draft"] = vllm.draft, "speculative-config"
            options.insert(0, ("flag", vllm.options))
        if origins["gamma"] != "flag" and vllm.gamma is not None:
            values["gamma"], origins["gamma"] = vllm.gamma, "speculative-config"
        values["speculative_config"] = None
    if values.get("prediction") is not None and origins["draft"] == "default":
        values["draft"], origins["draft"] = "prediction", origins["prediction"]


_VLLM_METHODS = {"ngram": "prompt-lookup", "[ngram]": "prompt-lookup", "draft_model": "draft-model", "suffix": "suffix",
                 "eagle": "eagle", "eagle3": "eagle", "medusa": "medusa"}  # fmt: skip
_VLLM_OPTIONS = {
    "prompt-lookup": {"prompt_lookup_max": "longest", "prompt_lookup_min": "shortest"},
    "suffix": {"suffix_decoding_min_token_prob": "min_probability"},
}
_VLLM_KEYS = ("method", "model", "num_speculative_tokens", *(k for keys in _VLLM_OPTIONS.values() for k in keys))


@dataclass(frozen=True)
class VllmConfig:
    """vLLM's --speculative-config in Paceline's names."""

    draft: str | None
    gamma: int | None
    options: dict[str, str] = field(default_factory=dict)


def from_vllm(text: str) -> VllmConfig:
    """Read vLLM's JSON. As in vLLM, one of prompt_lookup_max and prompt_lookup_min sets both."""
    try:
        config = parse_json(text)
    except ValueError as error:
        raise InputError(f"--speculative-config is not valid JSON: {error}.") from None
    if not isinstance(config, dict):
        raise InputError(f"--speculative-config must be a JSON object, got {text!r}.")
    check_known(config, _VLLM_KEYS, "key of --speculative-config")
    gamma = config.get("num_speculative_tokens")
    if gamma is not None and (isinstance(gamma, bool) or not isinstance(gamma, int) or gamma < 1):
        raise InputError(f"num_speculative_tokens must be a whole number of at least 1, got {gamma!r}.")
    model = config.get("model")
    method = config.get("method") or ("ngram" if model in ("ngram", "[ngram]") else "draft_model" if model else None)
    if method is None:
        return VllmConfig(None, gamma)
    if str(method) not in _VLLM_METHODS:
        known = [name for name in _VLLM_METHODS if name.isidentifier()]
        raise UnknownNameError("method of --speculative-config", str(method), known)
    return _vllm_method(str(method), model, gamma, config)


def _vllm_method(method: str, model: Any, gamma: int | None, config: dict[str, Any]) -> VllmConfig:
    name = _VLLM_METHODS[method]
    known = _VLLM_OPTIONS.get(name, {})
    for key in config.keys() - known.keys() - {"method", "model", "num_speculative_tokens"}:
        raise InputError(f"{key} of --speculative-config is not for the method {method}; leave it out.")
    if name not in _VLLM_OPTIONS:  # it drafts with weights
        if not isinstance(model, str):
            raise InputError(f"--speculative-config with the method {method} needs a model.")
        return VllmConfig(model, gamma) if name == "draft-model" else VllmConfig(name, gamma, {"head": model})
    values = {ours: config.get(theirs) for theirs, ours in known.items()}
    if name == "prompt-lookup":
        values = {key: values[key] or values[other] for key, other in zip(values, reversed(values), strict=True)}
    return VllmConfig(name, gamma, {key: str(value) for key, value in values.items() if value is not None})
