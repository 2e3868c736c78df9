"""The texts of tokens and the tokens of texts, for one thread at a time."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any

from paceline.common.errors import InputError
from paceline.models.translation import Pieces


class TooLongError(InputError):
    """A text has more characters than the tokens of a context."""


class TokenTexts:
    """Holds a copy of a tokenizer, because a fast tokenizer of Hugging Face fails if two threads use it. It has the
    attributes of a `LanguageModel` that prompts need."""

    def __init__(self, tokenizer: Any, name: str, vocabulary: int) -> None:
        self.tokenizer, self.name, self.vocabulary = copy.deepcopy(tokenizer), name, vocabulary
        self._known: dict[int, str] = {}

    def fork(self) -> TokenTexts:
        """Return a copy for another thread."""
        return TokenTexts(self.tokenizer, self.name, self.vocabulary)

    @cached_property
    def _bytes(self) -> Pieces:
        return Pieces(self.tokenizer, self.vocabulary)

    def prepare(self) -> None:
        """Read the bytes of all tokens now, so that no answer with log-probabilities waits for it."""
        assert self._bytes is not None

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        names = [name.encode() for name in self._bytes.special.values()]
        return max(map(len, [*self._bytes.of.values(), *names]), default=1)

    def check_length(self, text: str, limit: int) -> None:
        """Refuse a text that is too long for `limit` tokens of any kind, without encoding it."""
        if len(text) > limit * self.longest:
            raise TooLongError(
                f"The prompt has {len(text):,} characters, more than a context of {limit:,} tokens holds; shorten it."
            )

    def token(self, token: int) -> str:
        """Return the text of one token."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
        return known

    def token_bytes(self, token: int) -> list[int]:
        """Return the bytes of one token, which may be a part of a character."""
        piece = self._bytes.of.get(token)
        return list(piece if piece is not None else self.token(token).encode("utf-8"))

    def decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
