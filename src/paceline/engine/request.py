"""The types of the arguments of `generate` and `stream`: prompts and settings.

`Request` and `Sampling` declare the settings and check their values. A test compares the names here with theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, TypedDict, TypeVar, Union

import torch

from paceline.common.errors import InputError, UnknownNameError, UnsupportedError, shown
from paceline.common.limits import BEAMS_LIMIT, LARGEST, TYPES, check_number
from paceline.core.noise import fresh_seed
from paceline.core.sampling import Constraint, Processor, Sampling
from paceline.core.trace import Stats, Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---- Requests, settings per prompt, and results

# names of transformers and vLLM, and our names for them
ALIASES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "eos_token_id": "eos_token_ids",
    "stop_strings": "stop",
    "logits_processor": "processors",
    "stopping_criteria": "criteria",
    "bad_token_ids": "banned_tokens",
}
_SAMPLERS = ("top_k", "top_p", "min_p", "typical_p", "noise", "dynamic_temperature")
# A stopping criterion of the caller: takes all token ids so far, with the prompt, and returns whether to stop
Criterion = Callable[[list[int]], bool]

_HEAD = 40  # characters of the text in a repr
_MOST_PENALTY = 100  # a length of 2^31 tokens to this power is still a finite float

# settings whose value is a list: a list of lists has one per prompt
_LISTS = frozenset({"stop", "eos_token_ids", "banned_tokens", "processors", "criteria", "choice"})
GRAMMARS = ("json_schema", "json_object", "regex", "grammar", "choice")  # settings that give a text a grammar


@dataclass(frozen=True)
class Request:
    """The settings of one prompt."""

    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] | None = None  # None: the model's own
    ignore_eos: bool = False
    criteria: tuple[Criterion, ...] = ()
    logprobs: int | None = None  # how many likeliest tokens to report besides each token's own log-probability
    num_beams: int = 1  # above 1: beam search
    length_penalty: float = 1.0  # α: a beam's score is its log-probability over ((m + length) / (m + 1)) ** α
    length_offset: float = 0.0  # m of that formula; 0 is transformers' length ** α
    beam_top_k: int | None = None  # each beam proposes this number of its likeliest tokens (None: no limit)
    # True: when num_beams texts ended; "never": only when no better text is possible
    early_stopping: bool | str = False
    num_return_sequences: int = 1  # beams to return
    prediction: str | tuple[int, ...] | None = None  # the output that the caller expects
    max_draft: int | None = None  # tokens drafted in a row at most; 0: plain decoding; None: the decoder's gamma
    json_schema: Any = None  # the text is JSON of this schema: a mapping, JSON, or a model of pydantic
    json_object: bool = False  # the text is a JSON object
    regex: str | None = None  # the text matches all of it
    grammar: str | None = None  # of Lark or GBNF
    choice: tuple[str, ...] | None = None  # the text is one of these
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        _check_beams(self)
        check_number("max_new_tokens", self.max_new_tokens, 1, LARGEST)
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise InputError(f"stop must be strings that are not empty, got {shown(list(self.stop))}.")
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos must be True or False, got {shown(self.ignore_eos)}.")
        if self.logprobs is not None:
            check_number("logprobs", self.logprobs, 0, LARGEST)
        if self.max_draft is not None:
            check_number("max_draft", self.max_draft, 0, LARGEST)
        if not isinstance(self.json_object, bool):
            raise InputError(f"json_object must be True or False, got {shown(self.json_object)}.")
        self.grammar_setting()
        if self.sampling.min_new_tokens > self.max_new_tokens:
            raise InputError(
                f"min_new_tokens={self.sampling.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}."
            )

    def grammar_setting(self) -> tuple[str, Any] | None:
        """Return the name and the value of the setting that gives the text a grammar, if there is one."""
        found = [(name, getattr(self, name)) for name in GRAMMARS if getattr(self, name) != getattr(Request, name)]
        if self.sampling.constraint is not None:
            found.append(("constraint", self.sampling.constraint))
        if len(found) > 1:
            raise InputError(f"{found[0][0]} and {found[1][0]} both constrain the text; give one of them.")
        return found[0] if found else None


def _check_beams(request: Request) -> None:
    for name in ("num_beams", "num_return_sequences"):
        check_number(name, getattr(request, name), 1, BEAMS_LIMIT)
    top_k, offset = request.beam_top_k, request.length_offset
    if top_k is not None:
        check_number("beam_top_k", top_k, 1, LARGEST)
    if not TYPES["float"][0](offset) or offset < 0:
        raise InputError(f"length_offset must be a finite number of at least 0, got {shown(offset)}.")
    if offset > LARGEST:
        raise InputError(f"length_offset must be at most {LARGEST:,}, got {shown(offset)}.")
    penalty, early = request.length_penalty, request.early_stopping
    if not TYPES["float"][0](penalty):
        raise InputError(f"length_penalty must be a finite number, got {shown(penalty)}; use 0 to switch it off.")
    if abs(penalty) > _MOST_PENALTY:
        raise InputError(f"length_penalty must be from -{_MOST_PENALTY} to {_MOST_PENALTY}, got {shown(penalty)}.")
    if not isinstance(early, bool) and early != "never":
        raise InputError(f"early_stopping must be True, False or 'never', got {shown(early)}.")
    if request.num_return_sequences > request.num_beams:
        raise InputError(
            f"num_return_sequences={request.num_return_sequences} is more than num_beams={request.num_beams}; "
            "ask for fewer texts (--n-best), or search with more beams (--beams)."
        )
    if request.num_beams == 1:
        return
    if not request.sampling.greedy:
        raise UnsupportedError(
            f"num_beams={request.num_beams} searches and {_sampler_of(request.sampling)} samples; "
            "use num_beams=1 or leave the sampling out."
        )


def _sampler_of(sampling: Sampling) -> str:
    """Return the setting that asks for sampling: a sampler without a temperature samples at temperature 1."""
    samplers = [name for name in _SAMPLERS if getattr(sampling, name) != getattr(Sampling, name)]
    name = samplers[0] if samplers else "temperature"
    return f"{name}={getattr(sampling, name):g}"


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities of one emitted token: of the logits (raw), and after every control (processed; at temperature 0
    before the argmax)."""

    token: int
    raw: float
    processed: float
    top_raw: tuple[tuple[int, float], ...] = ()
    top_processed: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class BeamResult:
    """One of the best texts of a beam search. `score` includes the length penalty; the sum of the processed
    log-probabilities is the score without it."""

    text: str
    tokens: list[int]
    score: float
    finish_reason: str
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True)
class Generation:
    """The result for one prompt. `tokens` has the token that ended it; `text` ends before a stop string."""

    text: str
    tokens: list[int]
    finish_reason: str  # "stop", "length" or "cancelled"
    stop_reason: int | str | None  # the EOS id or the stop string
    stats: Stats
    trace: Trace
    prompt_tokens: list[int]
    seed: int
    logprobs: list[TokenLogprob] | None = None
    beams: list[BeamResult] | None = None  # the num_return_sequences best texts of a beam search, this one first
    cached_tokens: int = field(default=0, compare=False)  # tokens of the prompt that were in the KV cache

    # attributes and not fields, because they are no part of the result
    tokenizer: ClassVar[Any] = None
    drafter: ClassVar[str] = ""  # its name

    def shown_by(self, tokenizer: Any, drafter: str) -> Generation:
        """Return the same object. The ribbon shows its tokens as texts of this tokenizer, and names this drafter."""
        self.__dict__.update(tokenizer=tokenizer, drafter=drafter)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "tokenizer"}

    def __repr__(self) -> str:
        head = self.text if len(self.text) <= _HEAD else self.text[: _HEAD - 1] + "…"
        summary = f"{len(self.tokens)} tokens, τ {self.stats.mean_accepted_length:.2f}, {self.finish_reason}"
        return f"Generation({head!r}, {summary})"

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        from paceline.engine.views.ribbon import ribbon

        return ribbon(self)

    def plot(self, plain: Generation | None = None) -> Figure:
        """Return a chart of matplotlib: the tokens of the text by the time, with one step per round. plain: the same
        text from plain decoding, as a second stair."""
        from paceline.engine.views.staircase import figure_of, stairs_of

        return figure_of(stairs_of(self, plain))


@dataclass(frozen=True)
class Piece:
    """One token of a stream. Its text may be empty while a character or a possible stop string is incomplete."""

    text: str
    token: int
    from_draft: bool
    index: int = 0  # which prompt of the batch
    finish_reason: str | None = None  # on the last piece of a prompt


# ---- From settings to requests


def build_requests(count: int, settings: Mapping[str, Any]) -> list[Request]:
    """Return one `Request` per prompt. A setting given as a list holds one value per prompt."""
    settings = {name: _plain(value) for name, value in settings.items() if value is not None}
    for name in ALIASES.keys() & settings.keys():
        if ALIASES[name] in settings:
            raise InputError(f"{name} and {ALIASES[name]} are two names of one setting; give one of them.")
    settings = {ALIASES.get(name, name): value for name, value in settings.items()}
    known = {f.name for f in (*fields(Request), *fields(Sampling))} - {"sampling"} | {"do_sample"}
    for name in settings:
        if name not in known:
            raise UnknownNameError("setting", name, known | set(ALIASES))
    if count == 0:
        return []
    requests = [_one({name: _of(name, value, i, count) for name, value in settings.items()}) for i in range(count)]
    for name in ("length_penalty", "length_offset", "early_stopping", "beam_top_k"):
        if name in settings and all(request.num_beams == 1 for request in requests):
            raise InputError(f"{name} belongs to beam search; give num_beams (--beams) as well.")
    return requests


def _plain(value: Any) -> Any:
    """Convert numbers and lists of numpy and torch to those of Python."""
    return value.tolist() if hasattr(value, "tolist") else value


def _of(name: str, value: Any, index: int, count: int) -> Any:
    """Return the value of a setting for one prompt."""
    if name == "prediction":  # a string or token ids are one; a list of those is one per prompt
        shared = isinstance(value, str) or not isinstance(value, Sequence) or all(isinstance(v, int) for v in value)
    elif name in _LISTS:
        shared = isinstance(value, str) or not isinstance(value, Sequence)
        shared = shared or not all(isinstance(v, (list, tuple)) or v is None for v in value) or not value
    else:
        shared = not isinstance(value, (list, tuple))
    if shared:
        return value
    if len(value) != count:
        raise InputError(f"{name} has {len(value)} values for {count} prompts; give one per prompt, or a single one.")
    return value[index]


def _one(settings: dict[str, Any]) -> Request:
    settings = {name: value for name, value in settings.items() if value is not None}
    for name in _LISTS:
        if name in settings:
            value = settings[name]
            single = isinstance(value, (str, bytes)) or not isinstance(value, Iterable)
            single = single or (callable(value) and not isinstance(value, Sequence))
            settings[name] = (value,) if single else tuple(value)
    if "prediction" in settings:
        settings["prediction"] = _prediction(_plain(settings["prediction"]))
    if "processors" in settings:
        settings["processors"] = tuple(_adapt(p) for p in settings["processors"])
    if "criteria" in settings:
        settings["criteria"] = tuple(_adapt_criterion(c) for c in settings["criteria"])
    do_sample = settings.pop("do_sample", None)
    wanted = {name: settings.pop(name) for name in [f.name for f in fields(Sampling)] if name in settings}
    if do_sample and wanted.get("temperature") == 0:
        raise InputError("do_sample=True and temperature=0 contradict each other; give one of them.")
    if do_sample is False:  # as in transformers, the samplers then have no effect
        wanted = {name: value for name, value in wanted.items() if name not in _SAMPLERS}
        wanted["temperature"] = 0.0
    elif "temperature" not in wanted and (do_sample or any(name in wanted for name in _SAMPLERS)):
        wanted["temperature"] = 1.0  # a sampler is never ignored without a message
    wanted.setdefault("seed", fresh_seed())
    wanted["logit_bias"] = _bias(wanted.get("logit_bias", {}))
    return Request(**settings, sampling=Sampling(**wanted))


def _prediction(given: Any) -> str | tuple[int, ...] | None:
    ids = isinstance(given, Sequence) and all(isinstance(token, int) and not isinstance(token, bool) for token in given)
    if not isinstance(given, str) and not ids:
        raise InputError(f"prediction must be a string or token ids, got {shown(given)}.")
    return given if isinstance(given, str) else tuple(given)


def _bias(given: Any) -> dict[int, float]:
    try:
        found = {int(token): float(value) for token, value in given.items()}
        if any(value != value or value == float("inf") for value in found.values()):
            raise ValueError("no token can be chosen then")
        return found
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        told = f"logit_bias must map token ids to numbers, such as {{42: -1.5}}, got {shown(given)}."
        raise InputError(told) from error


def refuse_memory(process: Any) -> None:
    """Refuse processors that rely on one call per token: they cannot process the nodes of a draft."""
    name = type(process).__name__
    if name == "UnbatchedClassifierFreeGuidanceLogitsProcessor":
        raise UnsupportedError(
            f"{name} keeps a memory from token to token, so it cannot judge drafts; leave guidance_scale out and give "
            "the SpeculativeDecoder paceline.guided(model, scale) as its target."
        )
    if name == "SynthIDTextWatermarkLogitsProcessor":
        raise UnsupportedError(f"{name} keeps a memory from token to token, so it cannot judge drafts; leave it out.")


def _adapt_criterion(criterion: Any) -> Criterion:
    """Return a function of a list of ids. A StoppingCriteria of transformers gets a batch of one."""
    if not callable(criterion):
        raise InputError(f"criteria must be callables (token ids) -> bool, got {shown(criterion)}.")
    if not any(base.__name__ == "StoppingCriteria" for base in type(criterion).__mro__):
        return criterion  # type: ignore[no-any-return]
    return lambda tokens: bool(torch.as_tensor(criterion(torch.tensor([tokens]), None)).all())


def _adapt(process: Any) -> Processor:
    """Return a function of one row. A LogitsProcessor of transformers gets a batch of one."""
    if not callable(process):
        raise InputError(f"processors must be callables (prefix ids, logits) -> logits, got {shown(process)}.")
    refuse_memory(process)
    if not any(base.__name__ == "LogitsProcessor" for base in type(process).__mro__):
        return process  # type: ignore[no-any-return]

    def call(prefix: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return process(prefix[None], logits[None])[0]  # type: ignore[no-any-return]

    return call


# ---- The types of the arguments of `generate` and `stream`: prompts and settings

T = TypeVar("T")
# one value for all prompts, or a list with one value per prompt; None is the default
PerPrompt: TypeAlias = Union[T, "Sequence[T | None]", None]

Conversation: TypeAlias = "Sequence[Mapping[str, Any]]"  # messages with a role and a content
OnePrompt: TypeAlias = "str | Sequence[int] | Conversation"
# `Sequence[str]` would also match a string, which is one prompt
Batch: TypeAlias = "list[str] | tuple[str, ...] | Sequence[Sequence[int]] | Sequence[Conversation]"


class Array(Protocol):
    """A tensor or an array of token ids; its shape says whether it is one prompt or a batch."""

    def tolist(self) -> Any: ...


class Settings(TypedDict, total=False):
    """Every setting of `generate` and `stream`, with the names that transformers and vLLM use for some of them."""

    # ---- length and end of the text
    max_new_tokens: PerPrompt[int]
    min_new_tokens: PerPrompt[int]
    stop: PerPrompt[str | Sequence[str]]
    eos_token_ids: PerPrompt[int | Sequence[int]]
    ignore_eos: PerPrompt[bool]
    criteria: PerPrompt[Criterion | Sequence[Criterion]]

    # ---- choice of tokens
    seed: PerPrompt[int]
    temperature: PerPrompt[float]
    top_k: PerPrompt[int]
    top_p: PerPrompt[float]
    min_p: PerPrompt[float]
    typical_p: PerPrompt[float]
    noise: PerPrompt[float]
    dynamic_temperature: PerPrompt[float]
    dynamic_exponent: PerPrompt[float]
    repetition_penalty: PerPrompt[float]
    presence_penalty: PerPrompt[float]
    frequency_penalty: PerPrompt[float]
    logit_bias: PerPrompt[Mapping[int, float]]
    banned_tokens: PerPrompt[int | Sequence[int]]
    processors: PerPrompt[Processor | Sequence[Processor]]
    do_sample: PerPrompt[bool]

    # ---- the grammar of the text
    json_schema: PerPrompt[Mapping[str, Any] | str | bool | type]
    json_object: PerPrompt[bool]
    regex: PerPrompt[str]
    grammar: PerPrompt[str]
    choice: PerPrompt[Sequence[str]]
    constraint: PerPrompt[Constraint]

    # ---- beam search
    num_beams: PerPrompt[int]
    length_penalty: PerPrompt[float]
    length_offset: PerPrompt[float]
    beam_top_k: PerPrompt[int]
    early_stopping: PerPrompt[bool | str]
    num_return_sequences: PerPrompt[int]

    # ---- draft and result
    prediction: PerPrompt[str | Sequence[int] | Array]
    max_draft: PerPrompt[int]
    logprobs: PerPrompt[int]

    # ---- other names of the same settings
    max_tokens: PerPrompt[int]
    min_tokens: PerPrompt[int]
    eos_token_id: PerPrompt[int | Sequence[int]]
    stop_strings: PerPrompt[str | Sequence[str]]
    logits_processor: PerPrompt[Any]
    stopping_criteria: PerPrompt[Any]
    bad_token_ids: PerPrompt[int | Sequence[int]]
