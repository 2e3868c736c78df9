"""The ribbon: a text as HTML, with the rounds that wrote it. It has no scripts and needs no other file.

`u` is an accepted draft, `b` a token of the target, `s` a rejected draft above the place where it failed. A `span` of
the class `r` is a round; its details are a `span` of the class `d`, which CSS shows while the round has the pointer or
the focus. Without CSS, the tags still differ: underlined, bold and struck through.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import TYPE_CHECKING

from paceline.core.trace import Round
from paceline.engine.views.token_spans import RoundSpan, SpanReader, TokenSpan, branches_of, children_of

if TYPE_CHECKING:
    from paceline.engine.request import Generation, TokenLogprob

MOST_ROUNDS = 200  # later rounds have no details
_GHOST = 20  # characters of a rejected branch above the text
_GHOSTS = 2  # branches above one place of the text
_NODES = 24  # nodes of a tree in the details
_LONGEST = 200  # characters of a rejected chain in the details
_LIKELIEST = 5  # tokens of the target in the details
_TAGS = {"accepted": "u", "own": "b"}


def ribbon(result: Generation) -> str:
    """Return a fragment of HTML: the text with its rounds, a legend, and room for the details of a round."""
    reader = SpanReader(result, result.tokenizer)
    spans = reader.rounds()
    if spans is None:
        text = escape(result.text or " ".join(map(str, result.tokens)))
        why = "its rounds belong to several texts" if result.beams else "its rounds or its tokenizer are not known"
        body, legend = f'<div class="t">{text}</div>', f"<p>The text has no colours: {why}.</p>"
    else:
        writer = _Ribbon(result, reader, len(spans))
        body = f'<div class="t" role="group" aria-label="{_LABEL}">{writer.text(spans)}</div>'
        body += f'<div class="p">{_HINT}</div>' if spans else ""
        legend = f"<p>{_LEGEND}</p>{_rest(spans[MOST_ROUNDS:])}"
    style = files("paceline.engine.views").joinpath("ribbon.css").read_text("utf-8") + _pointed(spans or [], result)
    return f'<div class="plr"><style>{style}</style><p>{escape(headline(result))}</p>{legend}{body}</div>'


_LEGEND = '<u>accepted draft</u> <b>token of the target</b> <s>rejected draft</s> <span class="r">one round</span>'
_LABEL = "The text, round by round"
_HINT = "Point at a round, or press Tab, to see its drafter, its time and what was rejected."


def headline(result: Generation) -> str:
    """Return one line of numbers."""
    stats = result.stats
    parts = [f"{len(result.tokens)} tokens in {stats.rounds} rounds, τ {stats.mean_accepted_length:.2f}"]
    parts += [f"{stats.accepted} of {stats.drafted} drafted tokens accepted"] if stats.drafted else []
    parts += [f"{stats.tokens_per_second:.1f} tokens/s"] if stats.seconds else []
    parts += [f"LOSSY (rule {stats.rule})"] if stats.lossy else []
    return " · ".join([*parts, result.finish_reason])


class _Ribbon:
    """Writes the rounds of one result."""

    def __init__(self, result: Generation, reader: SpanReader, count: int) -> None:
        self._reader, self._count, self._drafter = reader, count, result.drafter
        self._logprobs = result.logprobs or []

    def text(self, spans: Sequence[RoundSpan]) -> str:
        rounds = "".join(self._round(span) for span in spans[:MOST_ROUNDS])
        later = [token for span in spans[MOST_ROUNDS:] for token in span.tokens]
        kinds = ((kind, "".join(each.text for each in run)) for kind, run in groupby(later, lambda each: each.kind))
        return rounds + "".join(f"<{_TAGS[kind]}>{escape(text)}</{_TAGS[kind]}>" for kind, text in kinds)

    def _round(self, span: RoundSpan) -> str:
        tokens = "".join(self._token(span, depth, token) for depth, token in enumerate(span.tokens))
        after = self._ghosts(span, len(span.tokens)) if span.entry.own is None else ""
        unused = f"<ruby>{after}</ruby>" if after else ""
        details = "<br>".join(self._details(span))
        return f'<span class="r" tabindex="0">{tokens}{unused}<span class="d" hidden>{details}</span></span>'

    def _token(self, span: RoundSpan, depth: int, token: TokenSpan) -> str:
        tag, ghosts = _TAGS[token.kind], self._ghosts(span, depth)
        mark = ' class="e"' if not token.text else ' class="n"' if token.text[0] == "\n" else ""
        if not ghosts:
            return f"<{tag}{mark}>{escape(token.text)}</{tag}>"
        # a ruby has no line break, so spaces and new lines are around it
        line, newline, rest = token.text.partition("\n")
        word = line.lstrip()
        space = line[: len(line) - len(word)]
        return f"<{tag}{mark}>{space}<ruby>{escape(word)}{ghosts}</ruby>{newline}{escape(rest)}</{tag}>"

    def _ghosts(self, span: RoundSpan, depth: int) -> str:
        """Return the rejected branches after `depth` tokens of the round, for the line above the text."""
        branches = branches_of(span.entry, depth)
        if not branches:
            return ""
        texts = [self._reader.drafted(span, depth, branch).strip(" ") for branch in branches[:_GHOSTS]]
        shown = "".join(f"<s>{_line(text, _GHOST)}</s>" for text in texts)
        more = f"<i>+{len(branches) - _GHOSTS}</i>" if len(branches) > _GHOSTS else ""
        return f"<rt>{shown}</rt>" if span.entry.parents is None else f'<rt><span class="y">{shown}{more}</span></rt>'

    # ---- the details of a round

    def _details(self, span: RoundSpan) -> Iterator[str]:
        entry = span.entry
        parts = [f"Round {span.number} of {self._count}"]
        counts = f"{len(entry.path)} of {len(entry.drafted)} drafted tokens accepted"
        parts.append(counts if entry.drafted else "nothing was drafted")
        parts += [_time(span)] if span.seconds is not None else []
        drafter = "" if self._drafter == "none" else self._drafter
        parts += filter(None, [": ".join(filter(None, (drafter, entry.why)))])
        yield escape(" · ".join(parts))
        if entry.drafted:
            yield self._verdict(span)
        if entry.parents is not None:
            yield from self._tree(entry)
        if self._logprobs:
            yield "".join(map(self._likeliest, self._logprobs[span.start : span.start + len(span.tokens)], span.tokens))

    def _verdict(self, span: RoundSpan) -> str:
        """Return what became of the draft, in one sentence."""
        entry = span.entry
        own = "" if entry.own is None else f"the target wrote <b>{self._alone(entry.own)}</b>"
        if not entry.rejected:
            return f"The whole draft was accepted{f', then {own}' if own else ''}."
        if entry.parents is not None:
            text = f"{len(entry.rejected)} nodes"
        else:
            branch = list(range(len(entry.path), len(entry.drafted)))
            text = f"<s>{_line(self._reader.drafted(span, len(entry.path), branch), _LONGEST)}</s>"
        return f"Rejected: {text}; {own}." if own else f"Not used, because the text ended: {text}."

    def _tree(self, entry: Round) -> Iterator[str]:
        """Yield a line per node, in the order of the branches."""
        children, kept, depths = children_of(entry), set(entry.path), entry.depths
        waiting, shown = list(reversed(children.get(-1, []))), 0
        while waiting and shown < _NODES:
            node = waiting.pop()
            waiting += reversed(children.get(node, []))
            tag = "u" if node in kept else "s"
            yield f"{'  ' * depths[node]}└ <{tag}>{self._alone(entry.drafted[node])}</{tag}>"
            shown += 1
        if waiting:
            yield f"and {len(entry.drafted) - shown} more nodes"

    def _alone(self, token: int) -> str:
        """Return one token. Its first space is visible, because ` a` and `a` are two tokens."""
        text = self._reader.alone(token)
        return _line("␣" + text[1:] if text[:1] == " " else text)

    def _likeliest(self, entry: TokenLogprob, token: TokenSpan) -> str:
        """Return a line with the likeliest tokens of the target at the place of this token, after every control."""
        top = entry.top_processed[:_LIKELIEST] or ((entry.token, entry.processed),)
        shares = " · ".join(f"{math.exp(value):.1%} {self._alone(other)}" for other, value in top)
        tag = _TAGS[token.kind]
        return f'<span class="w"><{tag}>{self._alone(token.token)}</{tag}> · likeliest {shares}</span>'


def _time(span: RoundSpan) -> str:
    """Return the milliseconds of a round, with those of its parts if there was a draft."""
    whole = f"{(span.seconds or 0.0) * 1000:.1f} ms"
    if span.parts is None or not span.entry.drafted:
        return whole
    draft, forward = span.parts
    return f"{whole} (draft {draft * 1000:.1f}, forward pass {forward * 1000:.1f})"


def _line(text: str, most: int = _GHOST) -> str:
    """Return a text as one short line of HTML."""
    text = text.replace("\n", "↵") or "▫"
    return escape(text if len(text) <= most else text[: most - 1] + "…")


def _rest(spans: Sequence[RoundSpan]) -> str:
    """Return a line about the rounds without details, if there are any."""
    if not spans:
        return ""
    tokens = sum(len(span.tokens) for span in spans)
    accepted, drafted = sum(len(span.entry.path) for span in spans), sum(len(span.entry.drafted) for span in spans)
    return (
        f'<p class="m">Rounds {spans[0].number} to {spans[-1].number} are shown without details: {tokens} tokens, '
        f"{accepted} of {drafted} drafted tokens accepted.</p>"
    )


def _pointed(spans: Iterable[RoundSpan], result: Generation) -> str:
    """Return CSS for log-probabilities, if there are any: more room, and the line of the token under the pointer."""
    most = max((len(span.tokens) for span in spans), default=0) if result.logprobs else 0
    pairs = (f".plr .r:has(>:nth-child({at}):hover) .w:nth-of-type({at})" for at in range(1, most + 1))
    return f"{','.join(pairs)}{{font-weight:600}}.plr .p,.plr .d{{height:10em}}" if most else ""
