"""What may be a prompt: a string, token ids, a conversation; or a list of those, which is a batch."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from paceline.core.errors import InputError, shown
from paceline.models.language_model import LanguageModel

from .messages import as_messages, is_conversation, write_conversation


def encode_all(prompt: Any, lm: LanguageModel) -> tuple[list[list[int]], bool]:
    """The prompts as token ids, and whether a single one was given. An empty list is a batch without prompts."""
    if hasattr(prompt, "tolist"):  # a tensor or an array
        prompt = prompt.tolist() or [[]]  # an empty one is a prompt without tokens
    if isinstance(prompt, str) or _is_ids(prompt) or is_conversation(prompt):
        return [encode(prompt, lm)], True
    if isinstance(prompt, (list, tuple)):
        return [encode(one.tolist() if hasattr(one, "tolist") else one, lm) for one in prompt], False
    raise InputError(f"A prompt is a string, token ids or a list of messages, not {type(prompt).__name__}.")


def encode(prompt: Any, lm: LanguageModel) -> list[int]:
    """One prompt as token ids."""
    if _is_ids(prompt):
        return [int(token) for token in prompt]
    if isinstance(prompt, (str, list, tuple)) and not prompt:
        raise InputError("The prompt is empty; give at least one token.")
    if lm.tokenizer is None:
        raise InputError(f"{lm.name} has no tokenizer, so a prompt must be token ids; or load it with tokenizer=...")
    if is_conversation(prompt):
        text = write_conversation(as_messages(prompt, lm), lm)
        return list(lm.tokenizer.encode(_checked(text), add_special_tokens=False))
    if not isinstance(prompt, str):
        raise InputError(
            f"A prompt is a string, a list of token ids or a list of messages, not {type(prompt).__name__}."
        )
    return list(lm.tokenizer.encode(_checked(prompt)))


def encode_prediction(prediction: str | tuple[int, ...] | None, lm: LanguageModel) -> list[int] | None:
    """What the caller expects to be written, as token ids that continue the prompt: no special tokens."""
    if not isinstance(prediction, str):
        for token in prediction or ():
            if not 0 <= token < lm.vocabulary:
                raise InputError(f"The prediction has token {shown(token)}, outside the vocabulary of {lm.vocabulary}.")
        return list(prediction) if prediction is not None else None
    if lm.tokenizer is None:
        raise InputError(f"{lm.name} has no tokenizer, so a prediction must be token ids; or load one with it.")
    return list(lm.tokenizer.encode(_checked(prediction, "prediction"), add_special_tokens=False))


def _checked(text: str, what: str = "prompt") -> str:
    """The text, if UTF-8 can write it: tokenizers read nothing else."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = shown(text[error.start])
        raise InputError(
            f"Character {error.start} of the {what} is {half}, half of a UTF-16 pair; decode the text as UTF-8."
        ) from None
    return text


def _is_ids(prompt: Any) -> bool:
    return (
        isinstance(prompt, (list, tuple))
        and len(prompt) > 0
        and all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompt)
    )
