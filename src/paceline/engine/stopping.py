"""Detokenization and stops. Every committed token passes here, one by one."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

# tokens of the prompt that are decoded with the first new token: in some tokenizers the text depends on neighbours
_CONTEXT = 6
_PATIENCE = 8  # tokens to wait for the rest of a character; a character has at most 4 bytes


def decode_with(tokenizer: Any) -> Callable[[list[int]], str]:
    """Return the function that makes text from tokens without special tokens. For a fast tokenizer it is that of the
    library `tokenizers`: the same call through transformers takes ten times as long."""
    passes_on = _only_passes_on(type(tokenizer))  # type: ignore[arg-type]  # a class has a hash
    if passes_on and not {"decode", "_decode"} & vars(tokenizer).keys():
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@lru_cache(maxsize=64)
def _only_passes_on(kind: type) -> bool:
    """Return whether `decode` of this class is that of a fast tokenizer of transformers, which only passes the tokens
    on to the library `tokenizers`."""
    homes = [
        next((each.__module__ for each in kind.__mro__ if name in vars(each)), "") for name in ("decode", "_decode")
    ]
    return homes == ["transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"]


class Detokenizer:
    """Makes text from tokens, piece by piece, and never splits a character."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._decode = decode_with(tokenizer)
        self._ids = list(prompt[-_CONTEXT:])
        # ids[start:told] were returned as text; they are the context of the rest
        self._start, self._told = 0, len(self._ids)
        self._alone: dict[int, str] = {}
        # a prompt can end inside a character, which the first new tokens complete
        self._told_text = self._decode(self._ids).removesuffix("\ufffd")

    def fork(self) -> Detokenizer:
        """Return a copy of the state for other tokens."""
        other = copy.copy(self)
        other._ids = list(self._ids)
        return other

    def push(self, token: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        self._ids.append(token)
        text = self._decode(self._ids[self._start :])
        if not text.endswith("\ufffd"):
            return self._tell(len(self._ids), text)
        if len(self._ids) - self._told < _PATIENCE:
            return ""
        return self._tell(len(self._ids) - 3)  # a character has at most 4 bytes, so older tokens are never completed

    def flush(self) -> str:
        """Return the rest at the end. An incomplete character becomes U+FFFD."""
        return self._tell(len(self._ids))

    def _tell(self, upto: int, text: str | None = None) -> str:
        """Return the new text of ids[:upto]. text: the text of ids[start:upto], if it is known."""
        text = self._decode(self._ids[self._start : upto]) if text is None else text
        piece = text[len(self._told_text) :]
        self._start, self._told = self._told, upto
        self._told_text = self._told_alone(self._ids[self._start : upto])
        return piece

    def _told_alone(self, ids: list[int]) -> str:
        """Return the text of the context, which is nearly always one token and is decoded once."""
        if len(ids) != 1:
            return self._decode(ids)
        known = self._alone.get(ids[0])
        if known is None:
            known = self._alone[ids[0]] = self._decode(ids)
        return known


def special_stops(tokenizer: Any, strings: Sequence[str]) -> dict[int, str]:
    """Return the stop strings that are special tokens of a tokenizer, such as "<|im_end|>", by token id."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return {token: str(entry) for token, entry in added.items() if str(entry) in strings and entry.special}


@dataclass(frozen=True)
class Stop:
    """Why a text ended. `finish_reason` is OpenAI's word; `cause` is the token id or the string that stopped it."""

    finish_reason: str
    cause: int | str | None = None


class Stopper:
    """Commits the tokens of one row one by one and decides when to stop, with and without speculation alike."""

    def __init__(
        self,
        eos: Sequence[int],
        strings: Sequence[str],
        limit: int,
        detokenizer: Detokenizer | None,
        criterion: Callable[[], bool] | None = None,
        special: Mapping[int, str] | None = None,
    ) -> None:
        self._eos = frozenset(eos)
        self._strings = tuple(strings)
        self._longest = max((len(s) for s in strings), default=0)
        self._limit = limit
        self._detokenizer = detokenizer
        self._criterion = criterion
        self._tokens_alone = detokenizer is None and criterion is None and not strings and not special
        self._special = special or {}  # stop strings that are special tokens, which have no text
        self.count = 0
        self.text = ""
        self.shown = 0  # characters that a stream has returned
        self.stop: Stop | None = None

    def strings_only(self) -> Stopper:
        """Return a stopper with the same stop strings and no other stops."""
        return Stopper((), self._strings, sys.maxsize, self._detokenizer, None, self._special)

    def fork(self) -> Stopper:
        """Return a copy of the state for other tokens. It has no criterion, because a criterion reads the tokens of one
        text."""
        assert self._criterion is None
        other = copy.copy(self)
        other._detokenizer = self._detokenizer.fork() if self._detokenizer else None
        return other

    def push(self, token: int, complete: bool = False) -> Stop | None:
        """Commit one token. Stops are tested in this order: stop string, EOS, the caller's criterion or the end of the
        grammar (`complete`), limit."""
        self.count += 1
        if self._tokens_alone:
            if token in self._eos:
                self.stop = Stop("stop", token)
            elif complete or self.count >= self._limit:
                self.stop = Stop("stop" if complete else "length")
            return self.stop
        piece = self._detokenizer.push(token) if self._detokenizer else ""
        chosen = complete or (self._criterion is not None and self._criterion())
        ended = chosen or token in self._eos or token in self._special or self.count >= self._limit
        if ended and self._detokenizer:
            piece += self._detokenizer.flush()
        self.text += piece
        found = self._find(len(piece)) or self._special.get(token)
        if found is not None:
            self.stop = Stop("stop", found)
        elif token in self._eos:
            self.stop = Stop("stop", token)
        elif chosen:
            self.stop = Stop("stop")
        elif self.count >= self._limit:
            self.stop = Stop("length")
        return self.stop

    def end(self) -> None:
        """End a text that may have no tokens."""
        self.stop = Stop("length")

    def cancel(self) -> None:
        self.text += self._detokenizer.flush() if self._detokenizer else ""
        self.stop = Stop("cancelled")

    def _find(self, fresh: int) -> str | None:
        """Return the stop string that occurs first in the text. The text is cut before it."""
        if not self._strings or not fresh:
            return None
        begin = max(0, len(self.text) - fresh - self._longest + 1)
        hits = [(self.text.find(s, begin), -len(s), s) for s in self._strings if s in self.text[begin:]]
        if not hits:
            return None
        at, _, string = min(hits)
        self.text = self.text[:at]
        return string

    def show(self) -> str:
        """Return the new text for a stream, without an end that could be the beginning of a stop string."""
        safe = len(self.text)
        if not safe:
            return ""
        if self.stop is None:
            for size in range(min(self._longest - 1, safe), 0, -1):
                if any(s.startswith(self.text[safe - size :]) for s in self._strings):
                    safe -= size
                    break
        piece = self.text[self.shown : safe] if safe > self.shown else ""
        self.shown = max(self.shown, safe)
        return piece
