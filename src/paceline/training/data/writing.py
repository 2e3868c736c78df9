"""Texts that the target writes itself, to be learnt from: the user's turns too, so that no data set is needed.

A chat model is started where the user speaks (with the first words of a question, or with none), writes a question, and
then answers it (Magpie, arXiv 2406.08464). A base model goes on from its first token, or from first words. Everything
about text i follows from the seed and i, so a run that was killed goes on as if nothing had been.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from typing import Any

from paceline.common.errors import InputError, shown
from paceline.common.limits import ROWS_LIMIT, Limited, limited
from paceline.engine.decoder import SpeculativeDecoder
from paceline.models.language_model import LanguageModel
from paceline.models.loading.disk_cache import Progress
from paceline.training.data.corpus import Shards, Text

# ---- How a model writes conversations down: what stands before, between and after the turns, as token ids

_WORDS = ("qzxuone", "qzxatwo", "qzxuthree")  # stand for turns; no template says such things by itself


@dataclass(frozen=True)
class Frame:
    """opening: up to where the user speaks. answer: from the end of the user's words to where the model speaks. again:
    from the end of its answer to where the user speaks again; empty, where the template has no second turn."""

    opening: list[int]
    answer: list[int]
    again: list[int]

    @property
    def user_end(self) -> int:
        """The token by which a user's turn is over."""
        return self.answer[0]


def frame_of(lm: LanguageModel) -> Frame:
    """From the model's own chat template, by looking at what it writes around three turns."""
    tokenizer = lm.tokenizer
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"{lm.name} has no chat template, so it cannot write conversations; use --style text, or give --data."
        )
    first, second, third = _WORDS
    once = _written(tokenizer, lm.name, [("user", first)])
    opening, _, answer = once.partition(first)
    again = ""
    if answer:
        thrice = _written(tokenizer, lm.name, [("user", first), ("assistant", second), ("user", third)], strict=False)
        if thrice.startswith(opening + first + answer) and third in thrice:
            again = thrice.partition(second)[2].partition(third)[0]
    if not answer:
        raise InputError(
            f"The chat template of {lm.name} does not say where an answer begins; use --style text, or give --data."
        )
    return Frame(*(list(tokenizer.encode(text, add_special_tokens=False)) for text in (opening, answer, again)))


def _written(tokenizer: Any, name: str, turns: list[tuple[str, str]], strict: bool = True) -> str:
    messages = [{"role": role, "content": words} for role, words in turns]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # templates are programs and fail in their own ways
        if not strict:
            return ""
        raise InputError(f"The chat template of {name} cannot write a conversation: {error}.") from error


# ---- Texts that the target writes itself, to be learnt from: the user's turns too, so that no data set is needed

# The texts of a shard by its number, doubles included; None where it was asked to stop. Also told: how many shards are
# likely to be wanted from this one on, where that is known.
Shard = Callable[[int, "int | None"], "list[Text] | None"]
_KEY = 48  # tokens of a question by which it is known as one that was asked before
_LEAST = 3  # tokens that a question has
_TRIES = 3  # shards in a row without anything new: then it has said what it has to say


@dataclass(frozen=True)
class WritingPlan(Limited):
    """tokens: to write in all, questions included. temperatures: of the answers, in turn; questions are asked at
    `asking`. question, answer: their lengths at most. twice: the share of conversations with a second turn. led: the
    share of texts that begin with given first words."""

    tokens: int = limited(1_000_000, most=10**12)
    style: str = "auto"  # chat, text, or auto: chat where there is a template
    temperatures: tuple[float, ...] = (0.0, 0.7, 0.0, 1.0)
    asking: float = limited(0.9, 0, 100)
    question: int = limited(192, 1, 2**24)
    answer: int = limited(320, 1, 2**24)
    twice: float = limited(0.25, 0, 1)
    led: float = limited(0.7, 0, 1)
    seed: int = limited(0, -(2**63), 2**63 - 1)
    rows: int = limited(64, 1, ROWS_LIMIT)
    shard: int = limited(256, 1, 2**24)  # texts of a shard, before doubles are left out

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.style not in ("auto", "chat", "text"):
            raise InputError(f"style must be auto, chat or text, got {shown(self.style)}.")
        if self.tokens < 1 or not self.temperatures or min(self.temperatures) < 0:
            raise InputError(
                f"The target writes at least 1 token, at temperatures of 0 or more; got tokens={self.tokens} and "
                f"temperatures={list(self.temperatures)}."
            )

    def settled(self, lm: LanguageModel) -> WritingPlan:
        """With the style that "auto" means for this model."""
        chats = lm.tokenizer is not None and bool(getattr(lm.tokenizer, "chat_template", None))
        return replace(self, style="chat" if chats else "text") if self.style == "auto" else self


def first_words() -> list[str]:
    """Beginnings of questions of many kinds, of our own writing."""
    found: list[str] = json.loads((files("paceline.training.data") / "openings.json").read_text("utf-8"))
    return found


class Writer:
    """Writes shards of texts until there are enough."""

    def __init__(self, lm: LanguageModel, plan: WritingPlan, beginnings: Sequence[str] | None = None) -> None:
        self.plan = plan.settled(lm)
        self._frame: Frame | None = frame_of(lm) if self.plan.style == "chat" else None
        silent = copy.copy(lm)
        silent.tokenizer = None  # tokens are wanted here, and nobody reads along
        self._decoder = SpeculativeDecoder(silent, draft=None, rows=self.plan.rows)
        self._lm = lm
        self._beginnings = self._encoded(first_words() if beginnings is None else beginnings)
        self._known: set[int] = set()

    def _encoded(self, words: Sequence[str]) -> list[list[int]]:
        if self._lm.tokenizer is None:
            return []
        return [list(self._lm.tokenizer.encode(each, add_special_tokens=False)) for each in words]

    def fill(
        self,
        shards: Shards,
        progress: Progress | None = None,
        cancel: Callable[[], bool] | None = None,
        by: Shard | None = None,
    ) -> int:
        """Go on where the shards end, until there are enough; returns how many tokens there are. by: who writes them
        (itself, if not said)."""
        done, number = 0, len(shards)
        for text in shards.texts():
            done += len(text.tokens)
            self._is_new(text)
        shard, idle = by or partial(self._alone, cancel), 0
        while done < self.plan.tokens and idle < _TRIES and not (done and shards.enough):
            mean = done / number if done else None
            raw = shard(number, None if mean is None else math.ceil((self.plan.tokens - done) / mean))
            if raw is None:
                break
            texts = [text for text in raw if self._is_new(text)]
            idle = 0 if texts else idle + 1
            shards.append(texts)
            number += 1
            done += sum(len(text.tokens) for text in texts)
            if progress is not None:
                progress("the target writes", min(done, self.plan.tokens), self.plan.tokens)
        if idle == _TRIES:
            raise InputError(
                f"{self._lm.name} wrote nothing new in {_TRIES * self.plan.shard} texts; raise the temperatures, or "
                "give --data."
            )
        return done

    def _alone(self, cancel: Callable[[], bool] | None, number: int, likely: int | None) -> list[Text] | None:
        return None if cancel is not None and cancel() else self.written(number)

    def _is_new(self, text: Text) -> bool:
        """Has nobody asked this before? Base models are told by how they begin."""
        skip = 0 if self._frame is None else len(self._frame.opening)
        stop = text.prompt if self._frame is not None else len(text.tokens)
        key = hash(tuple(text.tokens[skip : min(stop, skip + _KEY)]))
        if key in self._known:
            return False
        self._known.add(key)
        return True

    def written(self, number: int) -> list[Text]:
        """The texts of shard `number`, doubles included: they follow from the plan and the number alone."""
        chances = [random.Random(f"{self.plan.seed}/{number}/{i}") for i in range(self.plan.shard)]
        led = [self._beginning(chance) for chance in chances]
        heats = [chance.choice(self.plan.temperatures) for chance in chances]
        if self._frame is None:
            return self._texts(led, heats, chances)
        frame = self._frame
        texts = [frame.opening + words for words in led]
        texts = self._turn(texts, chances, self.plan.question, [self.plan.asking] * len(texts), (frame.user_end,))
        asked = [i for i, text in enumerate(texts) if len(text) >= len(frame.opening) + _LEAST]
        chances, heats = [chances[i] for i in asked], [heats[i] for i in asked]
        texts = [texts[i] + frame.answer for i in asked]
        prompts = [len(text) for text in texts]
        texts = self._turn(texts, chances, self.plan.answer, heats, self._lm.eos, keep_end=True)
        more = [i for i, chance in enumerate(chances) if chance.random() < self.plan.twice and frame.again]
        for i, text in zip(more, self._second([texts[i] for i in more], chances, heats, more), strict=True):
            texts[i] = text
        return [Text(text, prompt) for text, prompt in zip(texts, prompts, strict=True)]

    def _second(
        self, texts: list[list[int]], chances: list[random.Random], heats: list[float], which: list[int]
    ) -> list[list[int]]:
        """One more question and its answer."""
        assert self._frame is not None
        frame, mine = self._frame, [chances[i] for i in which]
        ended = [text[:-1] if text[-1] in self._lm.eos else text for text in texts]
        texts = [text + frame.again for text in ended]
        texts = self._turn(texts, mine, self.plan.question, [self.plan.asking] * len(texts), (frame.user_end,))
        texts = [text + frame.answer for text in texts]
        return self._turn(texts, mine, self.plan.answer, [heats[i] for i in which], self._lm.eos, keep_end=True)

    def _texts(self, led: list[list[int]], heats: list[float], chances: list[random.Random]) -> list[Text]:
        """Of a base model. A greedy one would always say the same after the same words, so it begins with some heat."""
        start = [self._first_token()]
        texts = [words or start for words in led]
        prompts = [len(text) for text in texts]
        texts = self._turn(texts, chances, 16, [self.plan.asking] * len(texts), ())
        texts = self._turn(texts, chances, self.plan.answer, heats, self._lm.eos, keep_end=True)
        return [Text(text, prompt) for text, prompt in zip(texts, prompts, strict=True)]

    def _first_token(self) -> int:
        tokenizer, config = self._lm.tokenizer, self._lm.model.config
        for source in (tokenizer, config):
            token = getattr(source, "bos_token_id", None)
            if token is not None:
                return int(token)
        return self._lm.eos[0] if self._lm.eos else 0

    def _beginning(self, chance: random.Random) -> list[int]:
        if not self._beginnings or chance.random() >= self.plan.led:
            return []
        return chance.choice(self._beginnings)

    def _turn(
        self,
        texts: list[list[int]],
        chances: list[random.Random],
        most: int,
        heats: list[float],
        ends: tuple[int, ...],
        keep_end: bool = False,
    ) -> list[list[int]]:
        """Let the target write on, `most` tokens or until one of `ends`; a text that leaves no room stays as it is."""
        seeds = [chance.getrandbits(32) for chance in chances]
        able = [i for i, text in enumerate(texts) if len(text) < self._lm.context - 1]
        if not able:
            return texts
        settings: dict[str, Any] = {
            "max_new_tokens": most,
            "temperature": [heats[i] for i in able],
            "seed": [seeds[i] for i in able],
            **({"eos_token_ids": ends} if ends else {"ignore_eos": True}),
        }
        longer = list(texts)
        for i, written in zip(able, self._decoder.generate([texts[i] for i in able], **settings), strict=True):
            tokens = written.tokens
            if tokens and tokens[-1] in ends and not keep_end:
                tokens = tokens[:-1]
            longer[i] = texts[i] + tokens
        return longer
