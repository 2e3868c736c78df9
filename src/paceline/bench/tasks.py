"""Make tasks from prompts: token ids that fit the context, in batches, turn by turn, and with several samplers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.bench.bench_options import BenchOptions
from paceline.bench.candidate import Prompt, Task
from paceline.common.errors import InputError, UnknownNameError
from paceline.common.names import split_spec
from paceline.core.sampling import Sampling
from paceline.engine.prompts import encode
from paceline.models.language_model import LanguageModel


@dataclass(frozen=True)
class Skipped:
    """A prompt, or one turn of it, that no candidate gets, and why."""

    id: str
    reason: str


class Conversation:
    """Tasks that follow one another. This one has one task."""

    def __init__(self, task: Task) -> None:
        self.task, self.turns = task, 1
        self.skipped: list[Skipped] = []  # turns that do not fit the context

    def next_task(self, written: Sequence[Sequence[int]]) -> Task | None:
        """Return the next turn, after the tokens of plain decoding for each row of `task`; None after the last."""
        return None


class PromptConversation(Conversation):
    """Prompts that are decoded together, turn after turn. All candidates continue the text of plain decoding. A sampler
    is the category of its tasks."""

    def __init__(
        self, rows: Sequence[_Row], lm: LanguageModel, room: int, turns: int, sampler: Sampler | None = None
    ) -> None:
        self._rows, self._lm, self._room, self._turn, self._sampler = list(rows), lm, room, 0, sampler
        super().__init__(self._make())
        self.turns = min(turns, max(len(row.prompt.turns) for row in rows))  # if all of them fit

    def next_task(self, written: Sequence[Sequence[int]]) -> Task | None:
        assert len(written) == len(self._rows)
        self._turn += 1
        if self._turn >= self.turns:
            return None
        going = []
        for row, tokens in zip(self._rows, written, strict=True):
            if self._turn >= len(row.prompt.turns):
                continue
            on = _continued(row, tokens, self._turn, self._lm)
            if reason := _too_long(on.ids, self._lm, self._room):
                self.skipped.append(Skipped(_id(row.prompt, self._turn), reason))
            else:
                going.append(on)
        self._rows = going
        if not going:
            return None
        self.task = self._make()
        return self.task

    def _make(self) -> Task:
        task = Task(
            "+".join(_id(row.prompt, self._turn) for row in self._rows),
            self._rows[0].prompt.category,
            tuple(row.ids for row in self._rows),
            tuple(_answers(row.prompt, self._turn) for row in self._rows),
        )
        if self._sampler is None:
            return task
        name = self._sampler.name
        return replace(task, id=f"{task.id}@{name}", category=name, sampling=self._sampler.settings)


@dataclass(frozen=True)
class _Row:
    """One prompt: the ids of the current turn, and the messages before its answer (none: plain text)."""

    prompt: Prompt
    ids: tuple[int, ...]
    messages: tuple[dict[str, str], ...] = ()


def conversations(
    prompts: Sequence[Prompt], lm: LanguageModel, batch: int, room: int, *, turns: int = 1, chat: bool = True,
    samplers: Sequence[Sampler] = (),
) -> tuple[list[Conversation], list[Skipped]]:  # fmt: skip
    """Return groups of `batch` prompts of one category, in order; the last group of a category may have fewer.

    room: tokens that will be written. A prompt that leaves less of the context is skipped. turns: at most, of each
    prompt. chat: use the model's chat template, if it has one. samplers: all groups once for each.
    """
    by_category: dict[str, list[_Row]] = {}
    skipped = []
    for prompt in prompts:
        row = _begun(prompt, lm, chat)
        if reason := _too_long(row.ids, lm, room):
            skipped.append(Skipped(prompt.id, reason))
        else:
            by_category.setdefault(prompt.category, []).append(row)
    groups = [rows[i : i + batch] for rows in by_category.values() for i in range(0, len(rows), batch)]
    each = samplers or (None,)
    return [PromptConversation(rows, lm, room, turns, sampler) for sampler in each for rows in groups], skipped


def text_of(tokens: Sequence[int], lm: LanguageModel) -> str:
    """Return the text up to the end-of-text token. Runs have equal lengths, so tokens may follow it."""
    return str(lm.tokenizer.decode(_until_end(tokens, lm), skip_special_tokens=True))


def _begun(prompt: Prompt, lm: LanguageModel, chat: bool) -> _Row:
    if chat and prompt.chat and getattr(lm.tokenizer, "chat_template", None):
        messages = ({"role": "user", "content": prompt.turns[0]},)
        return _Row(prompt, tuple(encode(messages, lm)), messages)
    return _Row(prompt, tuple(encode(prompt.turns[0], lm)))


def _continued(row: _Row, written: Sequence[int], turn: int, lm: LanguageModel) -> _Row:
    """Return the row with the answer and the user's next message. Plain text continues after an empty line."""
    message = row.prompt.turns[turn]
    if row.messages:
        answer = {"role": "assistant", "content": text_of(written, lm)}
        messages = (*row.messages, answer, {"role": "user", "content": message})
        return _Row(row.prompt, tuple(encode(messages, lm)), messages)
    added = lm.tokenizer.encode(f"\n\n{message}\n\n", add_special_tokens=False)
    return _Row(row.prompt, (*row.ids, *_until_end(written, lm), *added))


def _until_end(tokens: Sequence[int], lm: LanguageModel) -> list[int]:
    end = next((i for i, token in enumerate(tokens) if token in lm.eos), len(tokens))
    return list(tokens[:end])


def _too_long(ids: Sequence[int], lm: LanguageModel, room: int) -> str | None:
    if len(ids) + room <= lm.context:
        return None
    return f"{len(ids)} tokens and {room} to write are more than the context of {lm.context}."


def _id(prompt: Prompt, turn: int) -> str:
    return f"{prompt.id}/{turn + 1}" if turn else prompt.id


def _answers(prompt: Prompt, turn: int) -> tuple[str, ...]:
    if turn == 0:
        return prompt.answers
    return prompt.later_answers[turn - 1] if turn <= len(prompt.later_answers) else ()


# ---- Samplers by name: an evaluation runs every question with each of them, in every mode


ALL_SAMPLERS = "all"
_NOISY = "top-k-noise"
_KEYS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "noise", "dynamic_temperature", "dynamic_exponent")


@dataclass(frozen=True)
class Sampler:
    """A name, and the controls it stands for; no controls is greedy decoding."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def temperature(self) -> float:
        return float(self.settings.get("temperature", 0.0))


# The controls that each sampler sets. `parse_samplers` has their values.
SAMPLERS: dict[str, tuple[str, ...]] = {
    "greedy": (),
    "multinomial": ("temperature",),
    "top-k": ("temperature", "top_k"),
    "nucleus": ("temperature", "top_p"),
    "top-k-nucleus": ("temperature", "top_k", "top_p"),
    _NOISY: ("temperature", "top_k"),
    "dynamic": ("temperature", "dynamic_temperature"),
    "typical": ("temperature", "typical_p"),
}


def parse_samplers(options: BenchOptions) -> list[Sampler]:
    """The samplers that the options name, each once. "all" is every one; "top-k-noise" is one per noise level."""
    temperature, top_p, found = options.temperature or 1.0, options.top_p or 0.9, list[Sampler]()
    usual = {"temperature": temperature, "top_k": options.top_k or 40, "top_p": top_p, "typical_p": top_p,
             "dynamic_temperature": min(0.5, temperature)}  # fmt: skip
    for text in options.samplers:
        for name in SAMPLERS if text.strip() == ALL_SAMPLERS else (text,):
            found += _of(name, usual, options.noise_levels)
    names = [each.name for each in found]
    for each in found:
        Sampling(**each.settings)  # refuses wrong values
        if names.count(each.name) > 1:
            raise InputError(f"The sampler '{each.name}' is named twice; leave one out.")
    return found


def _of(text: str, usual: Mapping[str, float], levels: Sequence[float]) -> Iterator[Sampler]:
    name, controls = split_spec(text)
    if name not in SAMPLERS:
        raise UnknownNameError("sampler", name, [*SAMPLERS, ALL_SAMPLERS])
    settings = {key: usual[key] for key in SAMPLERS[name]}
    settings |= {key: _number(text, key, value) for key, value in controls.items()}
    if name != _NOISY or "noise" in controls:
        yield Sampler(text, settings)
        return
    for level in levels:
        more = ",".join([text.partition(":")[2], f"noise={level:g}"]).strip(",")
        yield Sampler(f"{name}:{more}", {**settings, "noise": level})


def _number(text: str, key: str, value: str) -> float:
    if key not in _KEYS:
        raise UnknownNameError(f"control of the sampler '{text}'", key, _KEYS)
    try:
        return int(value) if key == "top_k" else float(value)
    except ValueError:
        raise InputError(f"{key} of the sampler '{text}' must be a number, got '{value}'.") from None
