"""A byte-level tokenizer one can read: every token is some bytes, and characters may span tokens."""

from __future__ import annotations

from collections.abc import Sequence

from .models import EOS, VOCABULARY

_ODD = ["é", "€", "😀", "日"]
# letters and pairs of letters, so that a stop string may begin and end inside a token; then the bytes of odd characters
PIECES: list[bytes] = [b"a", b"b", b"c", b"ab", b"bc", b"", b"ca", b"abc", b" ", b". ", b"\n", b"x", b"xy", b"yx", b"y"]
PIECES += [bytes([byte]) for letter in _ODD for byte in letter.encode()]
PIECES += [letter.encode() for letter in _ODD]
PIECES += [b"\xf0\x9f", b"\x98\x80 ", b"a\xe2", b"\xacz"]  # halves of characters, with and without a letter
PIECES += [bytes([97 + i]) for i in range(3, 3 + VOCABULARY - len(PIECES))]
assert len(PIECES) == VOCABULARY
assert PIECES[EOS] == b""


class ByteTokenizer:
    """As much of a tokenizer as the engine asks for. Ids may have any bytes; what is no UTF-8 shows as U+FFFD."""

    eos_token_id = EOS

    def __init__(self, pieces: Sequence[bytes] = PIECES) -> None:
        self.pieces = list(pieces)

    def __len__(self) -> int:
        return len(self.pieces)

    def get_vocab(self) -> dict[str, int]:
        return {f"{token}:{piece!r}": token for token, piece in enumerate(self.pieces)}

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, clean_up_tokenization_spaces: bool = False
    ) -> str:
        return b"".join(self.pieces[token] for token in ids).decode("utf-8", errors="replace")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The longest piece first."""
        left, ids = text.encode(), []
        while left:
            token = max(
                (t for t, p in enumerate(self.pieces) if p and left.startswith(p)), key=lambda t: len(self.pieces[t])
            )
            ids.append(token)
            left = left[len(self.pieces[token]) :]
        return ids
