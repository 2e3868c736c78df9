"""Samplers by name: an evaluation runs every question with each of them, in every mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.bench.bench_options import BenchOptions
from paceline.bench.candidates.candidate import Task
from paceline.bench.data.tasks import Conversation
from paceline.common.errors import InputError, UnknownNameError
from paceline.common.names import split_spec
from paceline.core.sampling import Sampling

ALL_SAMPLERS = "all"
_NOISY = "top-k-noise"
_WHOLE = ("top_k",)
_KEYS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "noise", "dynamic_temperature", "dynamic_exponent")


@dataclass(frozen=True)
class Sampler:
    """A name, and the controls it stands for; no controls is greedy decoding."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def temperature(self) -> float:
        return float(self.settings.get("temperature", 0.0))


@dataclass(frozen=True)
class _Base:
    """What the samplers have in common: the options of the call, where they are given."""

    temperature: float
    top_k: int
    top_p: float

    @staticmethod
    def of(options: BenchOptions) -> _Base:
        return _Base(options.temperature or 1.0, options.top_k or 40, options.top_p or 0.9)


SAMPLERS: dict[str, Callable[[_Base], dict[str, Any]]] = {
    "greedy": lambda base: {},
    "multinomial": lambda base: {"temperature": base.temperature},
    "top-k": lambda base: {"temperature": base.temperature, "top_k": base.top_k},
    "nucleus": lambda base: {"temperature": base.temperature, "top_p": base.top_p},
    "top-k-nucleus": lambda base: {"temperature": base.temperature, "top_k": base.top_k, "top_p": base.top_p},
    _NOISY: lambda base: {"temperature": base.temperature, "top_k": base.top_k},
    "dynamic": lambda base: {
        "temperature": base.temperature,
        "dynamic_temperature": min(0.5, base.temperature),
    },
    "typical": lambda base: {"temperature": base.temperature, "typical_p": base.top_p},
}


def parse_samplers(options: BenchOptions) -> list[Sampler]:
    """The samplers that the options name, each once. "all" is every one; "top-k-noise" is one per noise level."""
    base, found = _Base.of(options), list[Sampler]()
    for text in options.samplers:
        for name in SAMPLERS if text.strip() == ALL_SAMPLERS else (text,):
            found += _of(name, base, options.noise_levels)
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"The sampler '{name}' is named twice; leave one out.")
    return found


def _of(text: str, base: _Base, levels: Sequence[float]) -> Iterator[Sampler]:
    name, said = split_spec(text)
    if name not in SAMPLERS:
        raise UnknownNameError("sampler", name, [*SAMPLERS, ALL_SAMPLERS])
    settings = {**SAMPLERS[name](base), **{key: _number(text, key, value) for key, value in said.items()}}
    if name != _NOISY or "noise" in said:
        yield _checked(Sampler(text, settings))
        return
    for level in levels:
        more = ",".join([text.partition(":")[2], f"noise={level:g}"]).strip(",")
        yield _checked(Sampler(f"{name}:{more}", {**settings, "noise": level}))


def _number(text: str, key: str, value: str) -> float:
    if key not in _KEYS:
        raise UnknownNameError(f"control of the sampler '{text}'", key, _KEYS)
    try:
        return int(value) if key in _WHOLE else float(value)
    except ValueError:
        raise InputError(f"{key} of the sampler '{text}' must be a number, got '{value}'.") from None


def _checked(sampler: Sampler) -> Sampler:
    Sampling(**sampler.settings)
    return sampler


class SampledConversation(Conversation):
    """A conversation with one sampler. The sampler is the category of its tasks."""

    def __init__(self, conversation: Conversation, sampler: Sampler) -> None:
        self._conversation, self._sampler = conversation, sampler
        super().__init__(self._sampled(conversation.task))
        self.turns, self.skipped = conversation.turns, conversation.skipped

    def next_task(self, written: Sequence[Sequence[int]]) -> Task | None:
        found = self._conversation.next_task(written)
        if found is None:
            return None
        self.task = self._sampled(found)
        return self.task

    def _sampled(self, task: Task) -> Task:
        name = self._sampler.name
        return replace(task, id=f"{task.id}@{name}", category=name, sampling=self._sampler.settings)
