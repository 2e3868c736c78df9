"""What may be a prompt: a string, token ids, a conversation; or a list of those."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

from paceline.core.errors import InputError
from paceline.models.language_model import LanguageModel


def encode_all(prompt: Any, lm: LanguageModel) -> tuple[list[list[int]], bool]:
    """The prompts as token ids, and whether a single one was given."""
    if hasattr(prompt, "tolist"):  # a tensor or an array
        prompt = prompt.tolist()
    if isinstance(prompt, str) or _is_ids(prompt) or _is_conversation(prompt):
        return [encode(prompt, lm)], True
    if isinstance(prompt, (list, tuple)) and prompt:
        return [encode(one.tolist() if hasattr(one, "tolist") else one, lm) for one in prompt], False
    if isinstance(prompt, (list, tuple)):
        raise InputError("The prompt is empty; give a string, a list of token ids, or a list of messages.")
    raise InputError(f"A prompt is a string, token ids or a list of messages, not {type(prompt).__name__}.")


def encode(prompt: Any, lm: LanguageModel) -> list[int]:
    """One prompt as token ids."""
    if _is_ids(prompt):
        return [int(token) for token in prompt]
    if isinstance(prompt, (str, list, tuple)) and not prompt:
        raise InputError("The prompt is empty; give at least one token.")
    if lm.tokenizer is None:
        raise InputError(f"{lm.name} has no tokenizer, so a prompt must be token ids; or load it with tokenizer=...")
    if _is_conversation(prompt):
        if not getattr(lm.tokenizer, "chat_template", None):
            raise InputError(f"{lm.name} has no chat template, so it cannot read a conversation; give it plain text.")
        try:
            text = lm.tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs and fail in their own ways
            raise InputError(f"The chat template of {lm.name} cannot write this conversation: {error}.") from error
        return list(lm.tokenizer.encode(text, add_special_tokens=False))
    if not isinstance(prompt, str):
        raise InputError(
            f"A prompt is a string, a list of token ids or a list of messages, not {type(prompt).__name__}."
        )
    return list(lm.tokenizer.encode(prompt))


def encode_prediction(prediction: str | tuple[int, ...] | None, lm: LanguageModel) -> list[int] | None:
    """What the caller expects to be written, as token ids that continue the prompt: no special tokens."""
    if not isinstance(prediction, str):
        for token in prediction or ():
            if not 0 <= token < lm.vocabulary:
                raise InputError(f"The prediction has token {token}, outside the vocabulary of {lm.vocabulary}.")
        return list(prediction) if prediction is not None else None
    if lm.tokenizer is None:
        raise InputError(f"{lm.name} has no tokenizer, so a prediction must be token ids; or load one with it.")
    return list(lm.tokenizer.encode(prediction, add_special_tokens=False))


def _is_ids(prompt: Any) -> bool:
    return (
        isinstance(prompt, (list, tuple))
        and len(prompt) > 0
        and all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompt)
    )


def _is_conversation(prompt: Any) -> bool:
    return (
        isinstance(prompt, (list, tuple))
        and len(prompt) > 0
        and all(isinstance(message, Mapping) and "role" in message and "content" in message for message in prompt)
    )
