"""The rounds of a result as texts: what each token adds to the text, and what was drafted in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from paceline.core.trace import Round
from paceline.engine.stopping import Detokenizer

if TYPE_CHECKING:
    from paceline.engine.request import Generation

_CONTEXT = 8  # tokens of the text that a rejected draft is decoded with


@dataclass
class TokenSpan:
    """One token: its kind, its place in the text, and the characters that it adds. An end token, a part of a character
    and a token of a stop string add none."""

    token: int
    kind: Literal["accepted", "own"]
    place: int
    text: str = ""


@dataclass(frozen=True)
class RoundSpan:
    """One round. number: from 1; start: the place of its first token; seconds: its time; parts: of it, those of the
    draft and of the forward pass. None: not measured."""

    number: int
    entry: Round
    start: int
    tokens: list[TokenSpan]
    seconds: float | None = None
    parts: tuple[float, float] | None = None


def children_of(entry: Round) -> dict[int, list[int]]:
    """Return the nodes after each node of a draft; -1 is the text."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(entry.above):
        children.setdefault(parent, []).append(node)
    return children


def branches_of(entry: Round, depth: int) -> list[list[int]]:
    """Return the rejected branches of a draft after `depth` accepted tokens: lists of nodes from there to a leaf. In a
    chain there is at most one, after the last accepted token."""
    children, kept = children_of(entry), set(entry.path)
    found = list[list[int]]()
    waiting = [[node] for node in children.get(entry.path[depth - 1] if depth else -1, []) if node not in kept][::-1]
    while waiting:
        branch = waiting.pop()
        below = children.get(branch[-1], [])
        waiting += [[*branch, node] for node in reversed(below)]
        found += [] if below else [branch]
    return found


class SpanReader:
    """Makes texts from the tokens of one result. Without a tokenizer a token is its id."""

    def __init__(self, result: Generation, tokenizer: Any) -> None:
        self._result, self._tokenizer = result, tokenizer
        self._all = [*result.prompt_tokens, *result.tokens]
        self._alone: dict[int, str] = {}

    def rounds(self) -> list[RoundSpan] | None:
        """Return the rounds. Together their tokens have the text of the result. None: the rounds do not belong to this
        text (beam search), or a tokenizer is needed and missing."""
        result = self._result
        entries = result.trace.rounds
        if result.beams is not None or (self._tokenizer is None and result.text):
            return None
        if [token for entry in entries for token in entry.emitted] != list(result.tokens):
            return None
        trace, unknown = result.trace, [None] * len(entries)
        seconds = trace.seconds if len(trace.seconds) == len(entries) else unknown
        parts = trace.parts if len(trace.parts) == len(entries) else unknown
        spans, place = list[RoundSpan](), 0
        for number, (entry, whole, each) in enumerate(zip(entries, seconds, parts, strict=True), 1):
            tokens = [
                TokenSpan(token, "accepted" if at < len(entry.path) else "own", place + at)
                for at, token in enumerate(entry.emitted)
            ]
            spans.append(RoundSpan(number, entry, place, tokens, whole, each))
            place += len(tokens)
        self._write_texts([token for span in spans for token in span.tokens])
        return spans

    def _write_texts(self, tokens: list[TokenSpan]) -> None:
        if self._tokenizer is None:
            for token in tokens:
                token.text = f"{token.token} "
            return
        stream, left = Detokenizer(self._tokenizer, self._result.prompt_tokens), self._result.text
        for token in tokens:
            token.text = stream.push(token.token)[: len(left)]  # a stop string may have cut the text
            left = left[len(token.text) :]
        if tokens:
            tokens[-1].text += left

    def drafted(self, span: RoundSpan, depth: int, branch: list[int]) -> str:
        """Return the text of a branch that was drafted after `depth` tokens of the round."""
        tokens = [span.entry.drafted[node] for node in branch]
        if self._tokenizer is None:
            return " ".join(map(str, tokens))
        end = len(self._result.prompt_tokens) + span.start + depth
        context = self._all[max(0, end - _CONTEXT) : end]
        return self._decode([*context, *tokens])[len(self._decode(context)) :]

    def alone(self, token: int) -> str:
        """Return the text of a token in the middle of a text."""
        if self._tokenizer is None:
            return str(token)
        if token not in self._alone:  # some tokenizers leave out the space before the first token
            context = self._all[:1]
            text = self._decode([*context, token])[len(self._decode(context)) :]
            self._alone[token] = text or self._decode([token])
        return self._alone[token]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
