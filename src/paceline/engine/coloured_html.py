"""A generation as HTML for notebooks: accepted tokens green, the target's own blue, rejected drafts struck."""

from __future__ import annotations

from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

from paceline.engine.stopping import Detokenizer

if TYPE_CHECKING:
    from paceline.engine.request import Generation

_COLOURS = {"accepted": "#1a7f37", "own": "#0969da", "rejected": "#cf222e"}
_CONTEXT = 8  # tokens of the text that a rejected draft is decoded with


def summary_of(result: Generation) -> str:
    """Tokens, τ and the end of a generation, in a few words."""
    stats = result.stats
    return f"{len(result.tokens)} tokens, τ {stats.mean_accepted_length:.2f}, {result.finish_reason}"


def as_html(result: Generation, tokenizer: Any) -> str:
    """The text with one colour per kind of token, and one line of numbers. Everything is escaped."""
    pieces = [piece for piece in _pieces(result, tokenizer) if piece[1]]
    shown = "".join(
        _marked(kind, "".join(text for _, text in group)) for kind, group in groupby(pieces, lambda piece: piece[0])
    )
    legend = " ".join(f'<span style="color:{colour}">{name}</span>' for name, colour in _COLOURS.items())
    return (
        f'<div><pre style="white-space:pre-wrap;margin:0">{shown}</pre>'
        f"<small>{escape(summary_of(result))} · {legend}</small></div>"
    )


def _marked(kind: str, text: str) -> str:
    tag = "del" if kind == "rejected" else "span"
    return f'<{tag} class="{kind}" style="color:{_COLOURS[kind]}">{escape(text)}</{tag}>' if text else ""


def _pieces(result: Generation, tokenizer: Any) -> list[tuple[str, str]]:
    """(kind, text) in the order of the text. The accepted and own pieces together are exactly `result.text`."""
    rounds = result.trace.rounds
    if tokenizer is None or [token for entry in rounds for token in entry.emitted] != list(result.tokens):
        # no texts of tokens, or a beam search, whose rounds are those of several texts
        return [("own", result.text or " ".join(map(str, result.tokens)))]
    stream = Detokenizer(tokenizer, result.prompt_tokens)
    found: list[tuple[str, str]] = []
    written, left = list(result.prompt_tokens), len(result.text)
    for entry in rounds:
        kinds = ["accepted"] * len(entry.path) + ["own"] * (entry.own is not None)
        for kind, token in zip(kinds, entry.emitted, strict=True):
            if kind == "own":
                found.append(("rejected", _in_vain(entry, written, tokenizer)))
            text = stream.push(token)[:left]  # a stop string may have cut the text
            left -= len(text)
            found.append((kind, text))
            written.append(token)
        if entry.own is None:
            found.append(("rejected", _in_vain(entry, written, tokenizer)))
    tail = result.text[len(result.text) - left :] if left else ""
    return [*found, ("own", tail)]


def _in_vain(entry: Any, written: list[int], tokenizer: Any) -> str:
    """The rejected tokens of a round as text after what was written; the branches of a tree are set apart by bars."""
    context = written[-_CONTEXT:]
    known = len(tokenizer.decode(context))
    paths = [list(entry.rejected)] if entry.parents is None else [[token] for token in entry.rejected]
    texts = (str(tokenizer.decode([*context, *path]))[known:] for path in paths if path)
    return "|".join(texts).replace("\n", "↵")  # a line that was rejected does not break the one that was written
