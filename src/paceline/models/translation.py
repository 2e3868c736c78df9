"""Translate between two tokenizers: find equal tokens, and write a text of one in the tokens of the other."""

from __future__ import annotations

import codecs
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from paceline.common.errors import UnsupportedError
from paceline.models.language_model import LanguageModel

_WINDOW = 64  # after this number of tokens a text without words is cut anywhere
_RECENT = 16  # a continuation is encoded together with this number of tokens of the text


class Translation:
    """Translates the target's tokens to the draft's, and back."""

    def __init__(self, target: LanguageModel, draft: LanguageModel) -> None:
        self.vocabularies = (target.vocabulary, draft.vocabulary)
        if _same(target, draft):
            self.pieces: tuple[Pieces, Pieces] | None = None  # the ids are the strings
            pairs = {token: token for token in range(min(self.vocabularies))}
        else:
            self.pieces = (Pieces(target.tokenizer, target.vocabulary), Pieces(draft.tokenizer, draft.vocabulary))
            pairs = _pairs(*self.pieces, target, draft)
        self.shared = len(pairs)
        self.special = {ours: pairs[ours] for ours in self.pieces[0].special if ours in pairs} if self.pieces else {}
        self._endings = {theirs: ours for ours, theirs in self.special.items()}
        known = torch.full((target.vocabulary,), -1)
        known[list(pairs)] = torch.tensor(list(pairs.values()), dtype=torch.int64)
        self.common = (known >= 0).to(draft.device)  # [V] of the target
        self.to_draft = known.clamp(min=0).to(draft.device)  # [V] of the target: the draft's id, or 0
        self.known = torch.zeros(draft.vocabulary, dtype=torch.bool, device=draft.device)  # [V] of the draft
        self.known[self.to_draft[self.common]] = True

    def logits(self, logits: Tensor) -> Tensor:
        """Return the draft's logits by the target's ids; a token that only one of them knows is impossible."""
        return logits[..., self.to_draft].masked_fill(~self.common, float("-inf"))

    # ---- the target's text in the draft's tokens

    def encode(self, tokens: Sequence[int]) -> tuple[list[int], bool]:
        """Return the draft's tokens, and whether they are the whole text: a character may be incomplete at the end."""
        if self.pieces is None:
            return list(tokens), True
        ours, theirs = self.pieces
        found: list[int] = []
        run = b""
        for token in tokens:
            if token in self.special:
                found += theirs.encode(split_incomplete(run)[0])
                found.append(self.special[token])
                run = b""
            else:
                run += ours.of.get(token) or ours.special.get(token, "").encode()
        text, pending = split_incomplete(run)
        found += theirs.encode(text)
        rest = [theirs.by_bytes.get(bytes([byte])) for byte in pending]
        return found + [token for token in rest if token is not None], None not in rest

    def word_start(self, tokens: Sequence[int], most: int) -> int:
        """Return where the last word begins that has two tokens after its first; any place for more than `most`."""
        if self.pieces is None:
            return max(0, len(tokens) - 1)
        ours = self.pieces[0]
        for index in range(len(tokens) - 3, 0, -1):
            if tokens[index] in ours.special or ours.of.get(tokens[index], b"")[:1] in (b" ", b"\n"):
                return index
        middle = max(0, len(tokens) - most // 2)
        while middle and split_incomplete(ours.join(tokens[:middle]))[1]:
            middle -= 1  # not inside a character
        return middle if len(tokens) > most else 0

    # ---- the draft's text in the target's tokens

    def decode(self, text: Sequence[int], written: Sequence[int]) -> list[int]:
        """Return the target's tokens that continue its `text`, if the draft wrote `written` after it."""
        if self.pieces is None:
            return list(written)
        ours, theirs = self.pieces
        data, ending = b"", None
        for token in written:
            if token in theirs.special:
                ending = self._endings.get(token)
                break
            data += theirs.of.get(token, b"")
        else:
            token = -1
        ended = token in theirs.special
        found = self._continue(text, data)
        if not ended and len(found) > 1 and ours.could_grow(found[-1]):
            found.pop()  # the draft's next characters may belong to this token
        return found if ending is None else [*found, ending]

    def _continue(self, text: Sequence[int], data: bytes) -> list[int]:
        assert self.pieces is not None
        ours = self.pieces[0]
        recent = list(text[-_RECENT:])
        recent = recent[self.word_start(recent, 2 * _RECENT) :]
        while any(token in ours.special for token in recent):
            recent.pop(0)
        before = ours.join(recent)
        head, pending = split_incomplete(before)
        if pending:
            return self._finish(pending, data)
        more = split_incomplete(data)[0]
        whole = ours.encode(head + more)
        start = ours.boundary(whole, len(ours.join(whole)) - len(more.encode()))
        # a token across the end of the text means that the target has already decided otherwise
        found = ours.encode(more) if start is None else whole[start:]
        return ours.agreeing(found, data)

    def _finish(self, pending: bytes, data: bytes) -> list[int]:
        """Return the tokens of the rest of a character that the text began, and of the data after it."""
        assert self.pieces is not None
        ours = self.pieces[0]
        for count in range(1, min(4, len(data)) + 1):
            if not split_incomplete(pending + data[:count])[1]:
                rest = [ours.by_bytes.get(bytes([byte])) for byte in data[:count]]
                whole = ours.by_bytes.get(data[:count])
                first = [whole] if whole is not None else [token for token in rest if token is not None]
                if whole is None and None in rest:
                    return []
                after = data[count:]
                return first + ours.agreeing(ours.encode(split_incomplete(after)[0]), after)
        return []


class Transcript:
    """One text of the target in the tokens of the draft. As it grows, only its end is encoded again."""

    def __init__(self, translation: Translation, filler: int) -> None:
        self._translation, self._filler = translation, filler
        self._anchors = [(0, 0)]  # (target tokens, draft tokens): places where a word begins in both
        self.ids: list[int] = []
        self.complete = True  # the ids are the whole text

    def follow(self, text: list[int]) -> int:
        """Update the text, which is unchanged up to the last `rewind`. Return how many ids are unchanged."""
        start, kept = self._anchors[-1]
        window = text[start:]
        del self.ids[kept:]
        if start == 0 and self._translation.pieces is not None:
            lead = self._translation.pieces[1].lead
            given = self._translation.special.get(window[0]) if window else None
            self.ids += [] if lead and given == lead[0] else lead  # a token that begins the text is not added twice
        cut = self._translation.word_start(window, _WINDOW)
        if cut:
            self.ids += self._translation.encode(window[:cut])[0]
            self._anchors.append((start + cut, len(self.ids)))
        rest, self.complete = self._translation.encode(window[cut:])
        self.ids += rest
        if not self.ids:
            self.ids.append(self._filler)  # a model must read something
        return kept

    def rewind(self, length: int) -> None:
        """Forget the anchors after this length, because the text was cut back to it."""
        while len(self._anchors) > 1 and self._anchors[-1][0] > length:
            self._anchors.pop()


def _same(target: LanguageModel, draft: LanguageModel) -> bool:
    """Return whether equal ids are equal tokens. Without tokenizers, vocabularies of equal size count as equal."""
    if target.tokenizer is None or draft.tokenizer is None:
        if target.vocabulary != draft.vocabulary:
            raise UnsupportedError(
                f"{draft.name} ({draft.vocabulary} tokens) and {target.name} ({target.vocabulary} tokens) have "
                "different vocabularies and not both a tokenizer to translate with; load both with a tokenizer."
            )
        return True
    return target.tokenizer is draft.tokenizer or target.tokenizer.get_vocab() == draft.tokenizer.get_vocab()


def _pairs(ours: Pieces, theirs: Pieces, target: LanguageModel, draft: LanguageModel) -> dict[int, int]:
    """The draft's id of every token of the target that both know: by its bytes, its name if special, or its role."""
    pairs = {token: theirs.by_bytes[piece] for token, piece in ours.of.items() if piece in theirs.by_bytes}
    names = {name: token for token, name in theirs.special.items()}
    pairs |= {token: names[name] for token, name in ours.special.items() if name in names}
    for role in ("bos_token_id", "eos_token_id"):
        mine: Any = getattr(target.tokenizer, role, None)
        other: Any = getattr(draft.tokenizer, role, None)
        if mine in ours.special and other in theirs.special:
            pairs.setdefault(mine, other)
    return pairs


_ADVICE = "use a model with the same tokenizer, or, to draft with this one, the drafter 'cross-vocabulary'"


def check_same_vocabulary(target: Any, draft: Any) -> None:
    """Refuse a draft model whose ids mean other tokens, naming the first that differ."""
    if target.tokenizer is None or draft.tokenizer is None:
        if target.vocabulary != draft.vocabulary:
            raise UnsupportedError(
                f"{draft.name} has {draft.vocabulary} tokens and {target.name} {target.vocabulary}; "
                "a draft model needs the target's vocabulary (give both a tokenizer to compare the tokens themselves)."
            )
        return
    if target.tokenizer is draft.tokenizer:
        return
    ours = {token: name for name, token in target.tokenizer.get_vocab().items()}
    theirs = {token: name for name, token in draft.tokenizer.get_vocab().items()}
    differ = [i for i in sorted(ours.keys() & theirs.keys()) if ours[i] != theirs[i]]
    if differ:
        shown = ", ".join(f"{i} is {ours[i]!r} / {theirs[i]!r}" for i in differ[:3])
        raise UnsupportedError(
            f"{draft.name} does not share the vocabulary of {target.name}: {len(differ)} ids differ ({shown}); "
            f"{_ADVICE}."
        )
    shared = len(ours.keys() & theirs.keys())
    if shared < 0.9 * max(len(ours), len(theirs)):
        raise UnsupportedError(
            f"{draft.name} knows {len(theirs)} tokens and {target.name} {len(ours)}, of which {shared} are the same; "
            f"{_ADVICE}."
        )


# ---- the bytes of tokens

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # how sentencepiece writes a space


def _byte_alphabet() -> dict[str, int]:
    """Return the letters that byte-level tokenizers write bytes with: printable ones stand for themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def split_incomplete(data: bytes) -> tuple[str, bytes]:
    """Return the text of bytes, and an incomplete character at their end. Other invalid bytes become U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    return text, decoder.getstate()[0]


class Pieces:
    """The bytes of every token of a tokenizer, and the tokens of bytes."""

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
        """The token of some bytes. A byte token comes last, and of equal tokens the lowest id counts."""
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
        """Return True if a longer token begins with this one."""
        piece = self.of.get(token)
        if not piece:
            return False
        after = bisect_right(self._sorted, piece)
        return after < len(self._sorted) and self._sorted[after].startswith(piece)

    def join(self, tokens: Iterable[int]) -> bytes:
        return b"".join(self.of.get(token, b"") for token in tokens)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text in the middle of another text, without tokens that begin a text."""
        if not text or not self._adds_space:
            return self._encode(text)
        if text[0] == " ":
            return self._encode(text[1:])  # the tokenizer adds this space itself
        data = text.encode()
        tokens = self._encode("\n" + text)
        start = self.boundary(tokens, len(self.join(tokens)) - len(data))
        return self._encode(text) if start is None else tokens[start:]

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def boundary(self, tokens: Sequence[int], offset: int) -> int | None:
        """Return the index of the token that begins after `offset` bytes, or None."""
        at = 0
        for index, token in enumerate(tokens):
            if at >= offset:
                return index if at == offset else None
            at += len(self.of.get(token, b""))
        return len(tokens) if at == offset else None

    def agreeing(self, tokens: Sequence[int], data: bytes) -> list[int]:
        """Return the first tokens, as far as they spell the data. A tokenizer may not know all of the data."""
        at = 0
        for index, token in enumerate(tokens):
            piece = self.of.get(token)
            if not piece or data[at : at + len(piece)] != piece:
                return list(tokens[:index])
            at += len(piece)
        return list(tokens)


def _read(names: dict[int, str], added: set[int]) -> dict[int, bytes]:
    """Return the bytes of tokens by names: byte-level alphabets, sentencepiece with byte tokens, or plain words."""
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
