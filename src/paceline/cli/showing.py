"""The tokens of an answer on their way to the screen: accepted green, the target's own blue, rejected red."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .terminal import ACCEPTED, OWN, Ink

if TYPE_CHECKING:
    from rich.style import Style

    from paceline.engine.request import Generation, Piece
    from paceline.engine.stream import Stream


class Shown:
    """The pieces of a stream on their way to stdout: at once where there is ink, else kept until the end."""

    def __init__(self, stream: Stream, ink: Ink | None, tokenizer: Any, drafts: bool) -> None:
        self._stream, self._ink, self._tokenizer, self._drafts = stream, ink, tokenizer, drafts
        self._tokens: list[int] = []
        self._length = 0  # characters of the text that were handed out
        self._waiting: list[tuple[str, str, Style]] = []

    def add(self, piece: Piece) -> None:
        rejected = self._rejected() if self._drafts and not piece.from_draft else ""
        text = piece.text if self._tokenizer is not None else f"{piece.token} "  # ids where there are no words
        self._tokens.append(piece.token)
        self._length += len(piece.text)
        self._waiting.append((rejected, text, ACCEPTED if piece.from_draft else OWN))
        if self._ink is not None:
            self._empty(self._ink)

    def finish(self, ink: Ink, result: Generation) -> None:
        """What is left, and what was held back because it might have become a stop string or a character."""
        self._empty(ink)
        ink.flow(result.text[self._length :], OWN)
        ink.end()

    def _empty(self, ink: Ink) -> None:
        for rejected, text, style in self._waiting:
            ink.rejected(rejected)
            ink.flow(text, style)
        self._waiting.clear()

    def _rejected(self) -> str:
        """What this round drafted in vain, as it would have read after the text; branches are set apart by bars."""
        last = self._stream.traces[0].rounds[-1]
        if self._tokenizer is None:
            return " ".join(str(token) for token in last.rejected)
        context = self._tokens[-8:]
        known = len(self._tokenizer.decode(context))
        paths = [list(last.rejected)] if last.parents is None else [[token] for token in last.rejected]
        return "|".join(self._tokenizer.decode([*context, *path])[known:] for path in paths if path)
