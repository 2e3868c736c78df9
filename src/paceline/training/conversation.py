"""How a model writes conversations down: what stands before, between and after the turns, as token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.core.errors import InputError
from paceline.models.language_model import LanguageModel

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
