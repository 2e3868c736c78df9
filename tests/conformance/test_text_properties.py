"""Text from tokens: characters that span tokens, stop strings anywhere, and streams that add up."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from paceline.engine.stopping import Detokenizer, Stopper

from .tokenizer import ByteTokenizer

thoroughly = settings(deadline=None, derandomize=True, max_examples=150)
TEXT = st.text(st.sampled_from("ab cé€😀日\n"), min_size=1, max_size=14)


def chunks(data: bytes, cuts: list[int]) -> list[bytes]:
    """The bytes in pieces: tokens may end anywhere."""
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(edges)]


@st.composite
def tokenised(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    text = draw(TEXT)
    data = text.encode()
    if draw(st.booleans()):
        return text, [bytes([byte]) for byte in data]
    return text, chunks(data, draw(st.lists(st.integers(0, 60), max_size=12)))


def settled(pieces: list[bytes]) -> str:
    """What may be streamed: everything up to the last token that ends where a character ends."""
    for count in range(len(pieces), 0, -1):
        try:
            return b"".join(pieces[:count]).decode()
        except UnicodeDecodeError:
            continue
    return ""


def a_detokenizer(pieces: list[bytes], prompt: str = "") -> Detokenizer:
    tokenizer = ByteTokenizer([*pieces, prompt.encode()])
    return Detokenizer(tokenizer, [len(pieces)] if prompt else [])


@thoroughly
@given(tokenised(), TEXT)
def test_pieces_add_up_and_split_no_character(written: tuple[str, list[bytes]], prompt: str) -> None:
    text, pieces = written
    detokenizer = a_detokenizer(pieces, prompt)
    told = ""
    for token in range(len(pieces)):
        piece = detokenizer.push(token)
        assert "\ufffd" not in piece
        told += piece
        assert text.startswith(told)
        assert told == settled(pieces[: token + 1])
    assert told + detokenizer.flush() == text


@thoroughly
@given(tokenised(), st.integers(0, 6))
def test_an_unfinished_character_shows_at_the_end(written: tuple[str, list[bytes]], missing: int) -> None:
    pieces = [bytes([byte]) for byte in b"".join(written[1])]
    pieces = pieces[: max(1, len(pieces) - missing)]
    detokenizer = a_detokenizer(pieces)
    told = "".join(detokenizer.push(token) for token in range(len(pieces)))
    assert told + detokenizer.flush() == b"".join(pieces).decode(errors="replace")


@thoroughly
@given(st.lists(st.sampled_from([0xE2, 0x82, 0xAC, 0x61, 0xF0, 0x9F, 0x98, 0x80, 0xFF]), min_size=1, max_size=24))
@example([0x82] * 7 + [0xE2, 0x82, 0xAC])
def test_bytes_that_are_no_text(data: list[int]) -> None:
    """Nonsense shows as U+FFFD, and what follows it is not lost."""
    pieces = [bytes([byte]) for byte in data]
    detokenizer = a_detokenizer(pieces)
    told = "".join(detokenizer.push(token) for token in range(len(pieces))) + detokenizer.flush()
    assert told == bytes(data).decode(errors="replace")


@thoroughly
@given(tokenised(), TEXT, st.integers(1, 3))
def test_a_prompt_that_ends_inside_a_character(written: tuple[str, list[bytes]], prompt: str, missing: int) -> None:
    """The new text begins with the character that it completes."""
    known = prompt.encode() + "😀".encode()[:missing]
    pieces = ["😀".encode()[missing:], *written[1]]
    detokenizer = Detokenizer(ByteTokenizer([*pieces, known]), [len(pieces)])
    told = "".join(detokenizer.push(token) for token in range(len(pieces))) + detokenizer.flush()
    assert told == "😀" + written[0]


# ---- stopping, against the obvious way to do it


def obvious(
    pieces: list[bytes], stops: list[str], eos: set[int], limit: int
) -> tuple[str, int, str | None, str | int | None]:
    """After every token decode everything there is, and look for every stop string from the beginning."""
    for count in range(1, len(pieces) + 1):
        token = count - 1
        ends = token in eos or count >= limit
        text = b"".join(pieces[:count]).decode(errors="replace") if ends else settled(pieces[:count])
        found = [(text.index(stop), -len(stop), stop) for stop in stops if stop in text]
        if found:
            at, _, stop = min(found)
            return text[:at], count, "stop", stop
        if token in eos:
            return text, count, "stop", token
        if count >= limit:
            return text, count, "length", None
    return text, count, None, None


@st.composite
def stopped(draw: st.DrawFn) -> tuple[list[bytes], list[str], set[int], int]:
    text, pieces = draw(tokenised())
    stops = []
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text) - 1))
        stops.append(text[start : start + draw(st.integers(1, 5))] + draw(st.sampled_from(["", "", "a", "€"])))
    eos = draw(st.sets(st.integers(0, len(pieces) - 1), max_size=1))
    return pieces, stops, eos, draw(st.integers(1, len(pieces) + 2))


@thoroughly
@given(stopped())
def test_stops_are_those_of_the_obvious_way(asked: tuple[list[bytes], list[str], set[int], int]) -> None:
    pieces, stops, eos, limit = asked
    stopper = Stopper(sorted(eos), stops, limit, a_detokenizer(pieces))
    shown = ""
    for token in range(len(pieces)):
        stop = stopper.push(token)
        shown += stopper.show()
        if stop is not None:
            break
    text, count, reason, cause = obvious(pieces, stops, eos, limit)
    if reason is None:
        stopper.cancel()
        shown += stopper.show()
        assert stopper.stop is not None
        assert stopper.stop.finish_reason == "cancelled"
        text = b"".join(pieces).decode(errors="replace")
        assume(not any(stop in text for stop in stops))
    else:
        assert stopper.stop is not None
        assert (stopper.stop.finish_reason, stopper.stop.cause) == (reason, cause)
    assert (stopper.text, stopper.count) == (text, count)
    assert shown == text, "a stream that does not add up to the text"


@thoroughly
@given(stopped())
def test_a_stream_never_shows_what_is_cut(asked: tuple[list[bytes], list[str], set[int], int]) -> None:
    """At every moment what was shown is a beginning of the final text."""
    pieces, stops, eos, limit = asked
    final = obvious(pieces, stops, eos, limit)
    assume(final[2] is not None)
    stopper = Stopper(sorted(eos), stops, limit, a_detokenizer(pieces))
    shown = ""
    for token in range(final[1]):
        stopper.push(token)
        shown += stopper.show()
        assert final[0].startswith(shown)
