"""The bytes of the tokens of a tokenizer, or the names of those that are no text."""

from __future__ import annotations

import codecs
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # how sentencepiece writes a space


def _byte_alphabet() -> dict[str, int]:
    """The letters that byte-level tokenizers write bytes with: printable ones stand for themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def split_incomplete(data: bytes) -> tuple[str, bytes]:
    """The text of some bytes, and the beginning of a character at their end. What is no UTF-8 becomes U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    return text, decoder.getstate()[0]


class Pieces:
    """The bytes of every token of a tokenizer, and the way back from bytes to tokens."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.tokenizer, self.size = tokenizer, size
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        special = set(getattr(tokenizer, "all_special_ids", ())) | {i for i, token in added.items() if token.special}
        names = {i: name for name, i in tokenizer.get_vocab().items() if i < size}
        self.special = {i: names[i] for i in sorted(special) if i in names}
        self.of: dict[int, bytes] = _read({i: n for i, n in names.items() if i not in special}, set(added))
        self.byte_tokens = {i for i, name in names.items() if _BYTE_TOKEN.fullmatch(name)}
        self._adds_space = self.join(self._encode("a")) == b" a"

    @cached_property
    def by_bytes(self) -> dict[bytes, int]:
        """The token of some bytes; a whole word rather than a byte written out, and of twins the lower id."""
        order = sorted(self.of, key=lambda token: (token in self.byte_tokens, token), reverse=True)
        return {self.of[token]: token for token in order}

    @cached_property
    def _sorted(self) -> list[bytes]:
        return sorted(self.by_bytes)

    @cached_property
    def lead(self) -> list[int]:
        """The tokens that the tokenizer puts before a text."""
        whole, bare = list(self.tokenizer.encode("a")), self._encode("a")
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start]
        return []

    def could_grow(self, token: int) -> bool:
        """True if a longer token begins with this one."""
        piece = self.of.get(token)
        if not piece:
            return False
        after = bisect_right(self._sorted, piece)
        return after < len(self._sorted) and self._sorted[after].startswith(piece)

    def join(self, tokens: Iterable[int]) -> bytes:
        return b"".join(self.of.get(token, b"") for token in tokens)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text in the middle of another: nothing is put before it."""
        if not text or not self._adds_space:
            return self._encode(text)
        if text[0] == " ":
            return self._encode(text[1:])  # the space that is put before it is its own
        data = text.encode()
        tokens = self._encode("\n" + text)
        start = self.boundary(tokens, len(self.join(tokens)) - len(data))
        return self._encode(text) if start is None else tokens[start:]

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def boundary(self, tokens: Sequence[int], offset: int) -> int | None:
        """The token that begins after `offset` bytes, if one does."""
        at = 0
        for index, token in enumerate(tokens):
            if at >= offset:
                return index if at == offset else None
            at += len(self.of.get(token, b""))
        return len(tokens) if at == offset else None

    def agreeing(self, tokens: Sequence[int], data: bytes) -> list[int]:
        """The first of the tokens that really spell the data: a tokenizer may not know all of it."""
        at = 0
        for index, token in enumerate(tokens):
            piece = self.of.get(token)
            if not piece or data[at : at + len(piece)] != piece:
                return list(tokens[:index])
            at += len(piece)
        return list(tokens)


def _read(names: dict[int, str], added: set[int]) -> dict[int, bytes]:
    """Bytes from names: byte-level alphabets, sentencepiece with its bytes written out, or plain words."""
    words = [name for i, name in names.items() if i not in added]
    by_bytes = all(letter in _BYTES for name in words for letter in name)
    pieces = any(_SPACE in name for name in words)
    found: dict[int, bytes] = {}
    for i, name in names.items():
        written_out = _BYTE_TOKEN.fullmatch(name)
        if i in added:
            found[i] = name.encode()
        elif by_bytes and not written_out:
            found[i] = bytes(_BYTES[letter] for letter in name)
        elif written_out:
            found[i] = bytes([int(written_out[1], 16)])
        else:
            found[i] = (name.replace(_SPACE, " ") if pieces else name).encode()
    return found
