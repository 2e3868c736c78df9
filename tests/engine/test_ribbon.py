"""The ribbon: the colours of a text are its trace, and what a model writes stays text."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from math import log
from typing import Any

import pytest
from tests.toys import letters, llama, raw_bytes, scripted

import paceline
from paceline import Generation
from paceline.core.trace import Round, Trace
from paceline.engine.request import TokenLogprob
from paceline.engine.views.result_page import page_of
from paceline.engine.views.ribbon import MOST_ROUNDS, ribbon
from paceline.engine.views.token_spans import branches_of

KINDS = {"u": "accepted", "b": "own"}
FRAGMENT = {"div", "style", "p", "span", "u", "b", "s", "i", "ruby", "rt", "br"}
PAGE = FRAGMENT | {"html", "head", "meta", "title", "body", "main", "h1", "h2", "details", "summary", "pre", "ul", "li",
                   "svg", "path", "text", "table", "tr", "th", "td"}  # fmt: skip
MARKUP = "<>/&\"' =scriptlnoeadhk0123456789.:"


@dataclass
class Node:
    """An element of a page."""

    tag: str
    attributes: dict[str, str | None] = field(default_factory=dict)
    children: list[Node | str] = field(default_factory=list)

    def all(self, tag: str, kind: str | None = None) -> list[Node]:
        found = [each for each in self.nodes() if each.tag == tag]
        return [each for each in found if kind is None or each.attributes.get("class") == kind]

    def nodes(self) -> Iterator[Node]:
        for child in self.children:
            if isinstance(child, Node):
                yield child
                yield from child.nodes()

    def text(self, *without: str) -> str:
        """The text inside, without that of some elements; details are never a part of it."""
        parts = (
            child
            if isinstance(child, str)
            else ""
            if child.tag in without or "hidden" in child.attributes
            else child.text(*without)
            for child in self.children
        )
        return "".join(parts)


class Parser(HTMLParser):
    """Makes nodes. Every tag that is opened is closed, in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open = [Node("")]
        self.feed(page)
        self.close()
        assert len(self.open) == 1

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, dict(attrs))
        self.open[-1].children.append(node)
        if tag not in ("br", "meta"):
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Node(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parsed(page: str) -> Node:
    return Parser(page).open[0]


def shown(result: Generation) -> Node:
    """The element with the text of a ribbon."""
    (found,) = parsed(ribbon(result)).all("div", "t")
    return found


def rounds(result: Generation) -> list[Node]:
    return [each for each in shown(result).children if isinstance(each, Node) and each.attributes.get("class") == "r"]


def tokens(shown_round: Node) -> list[Node]:
    return [each for each in shown_round.children if isinstance(each, Node) and each.tag in KINDS]


def details(shown_round: Node) -> str:
    (found,) = shown_round.all("span", "d")
    return found.text()


def ghosts(node: Node) -> list[str]:
    return [each.text() for above in node.all("rt") for each in above.all("s")]


def written(draft: str | None = "prompt-lookup", **settings: Any) -> Generation:
    model = paceline.LanguageModel(llama(), letters(), name="toy")
    settings = {"max_new_tokens": 24, "ignore_eos": True, **settings}
    return paceline.SpeculativeDecoder(model, draft, gamma=4).generate("abcabcabc", **settings)


def made(entries: list[Round], tokenizer: Any = None, text: str | None = None, **more: Any) -> Generation:
    """A result with these rounds, whose tokens are letters."""
    trace = Trace(list(entries), [0.01 * (number + 1) for number in range(len(entries))])
    emitted = [token for entry in entries for token in entry.emitted]
    tokenizer = letters() if tokenizer is None else tokenizer
    text = tokenizer.decode(emitted) if text is None else text
    stats = trace.stats(1.0, "match")
    result = Generation(text, emitted, "length", None, stats, trace, [0, 1], 7, **more)
    return result.shown_by(tokenizer, "toy-drafter")


# ---- the colours are the trace


def test_every_token_has_the_tag_of_its_kind_and_rejected_drafts_are_above_their_place() -> None:
    out = written()
    assert out.stats.accepted
    assert out.stats.drafted > out.stats.accepted
    tokenizer = out.tokenizer
    found = rounds(out)
    assert len(found) == len(out.trace.rounds)
    assert "".join(each.text("rt") for each in found) == out.text
    for entry, shown_round in zip(out.trace.rounds, found, strict=True):
        kinds = [KINDS[token.tag] for token in tokens(shown_round)]
        assert kinds == ["accepted"] * len(entry.path) + ["own"] * (entry.own is not None)
        above = [ghosts(token) for token in tokens(shown_round)]
        rejected = [tokenizer.decode(entry.rejected).strip(" ")] if entry.rejected else []
        if entry.own is not None:
            assert above == [*([[]] * len(entry.path)), rejected]
        assert ghosts(shown_round) == rejected


def test_details_name_the_drafter_the_time_and_what_was_rejected() -> None:
    a_round = Round((2, 3, 4), None, (0,), 5, False, "3 nodes pay", 0.002)
    full = Round((6, 7), None, (0, 1), 8, True)
    plain = Round((), None, (), 9, True)
    out = made([a_round, full, plain])
    out.trace.parts += [(0.002, 0.0071), None, (0.0, 0.03)]
    first, second, third = map(details, rounds(out))
    time = "10.0 ms (draft 2.0, forward pass 7.1)"
    assert first.startswith(f"Round 1 of 3 · 1 of 3 drafted tokens accepted · {time} · ")
    assert "toy-drafter: 3 nodes pay" in first
    assert "Rejected: de; the target wrote f." in first
    assert "20.0 ms · toy-drafter" in second
    assert "The whole draft was accepted, then the target wrote i." in second
    assert third == "Round 3 of 3 · nothing was drafted · 30.0 ms · toy-drafter"


def test_the_drafter_has_its_name() -> None:
    assert "· prompt-lookup" in details(rounds(written())[0])
    assert re.fullmatch(r"Round 1 of 24 · nothing was drafted · [\d.]+ ms", details(rounds(written(None))[0]))
    model = paceline.LanguageModel(llama(), letters(), name="toy")
    guessed = paceline.SpeculativeDecoder(model).generate("abc", prediction="abc abc", max_new_tokens=4)
    assert guessed.drafter == "prediction"


def test_a_draft_after_the_end_is_not_called_rejected() -> None:
    (found,) = rounds(made([Round((2, 3, 4), None, (0,), None, False)]))
    assert "Not used, because the text ended: de." in details(found)
    assert [ghosts(token) for token in tokens(found)] == [[]]
    assert ghosts(found) == ["de"]


# 0 ── 1 ── 2        accepted: 0, 1; then the target's own token
# │    └─── 3 ── 4
# └─ 5               6 is a second root
TREE = Round((2, 3, 4, 5, 6, 7, 8), (-1, 0, 1, 1, 3, 0, -1), (0, 1), 9, False)


def test_the_branches_of_a_tree_are_where_they_failed() -> None:
    assert [branches_of(TREE, depth) for depth in range(3)] == [[[6]], [[5]], [[2], [3, 4]]]
    (found,) = rounds(made([TREE]))
    assert [KINDS[token.tag] for token in tokens(found)] == ["accepted", "accepted", "own"]
    assert [ghosts(token) for token in tokens(found)] == [["i"], ["h"], ["e", "fg"]]
    lines = [each.text() for each in found.all("span", "d")[0].nodes() if each.tag in ("u", "s")]
    assert lines == ["c", "d", "e", "f", "g", "h", "i"]
    assert "Rejected: 5 nodes; the target wrote j." in details(found)


def test_every_node_of_a_drafted_tree_is_accepted_or_on_a_branch() -> None:
    out = written("recycling")
    assert any(entry.parents is not None for entry in out.trace.rounds)
    for entry in out.trace.rounds:
        nodes = {node for depth in range(len(entry.path) + 1) for each in branches_of(entry, depth) for node in each}
        assert nodes | set(entry.path) == set(range(len(entry.drafted)))
        assert not nodes & set(entry.path)
    assert "".join(each.text("rt", "i") for each in rounds(out)) == out.text


def test_many_branches_are_counted() -> None:
    entry = Round(tuple(range(2, 32)), (-1,) * 30, (), 1, False)
    (found,) = rounds(made([entry]))
    assert ghosts(found) == ["c", "d"]
    assert found.all("i")[0].text() == "+28"
    assert details(found).endswith("and 6 more nodes")


def test_the_likeliest_tokens_of_the_target_are_shown() -> None:
    top = tuple((token, log(share)) for token, share in enumerate((0.5, 0.2, 0.1, 0.08, 0.06, 0.04), 2))
    entries = [TokenLogprob(2, -9.0, log(0.5), (), top), TokenLogprob(5, -9.0, float("-inf"))]
    (found,) = rounds(made([Round((2,), None, (0,), 5, True)], logprobs=entries))
    lines = [each.text() for each in found.all("span", "w")]
    assert lines == ["c · likeliest 50.0% c · 20.0% d · 10.0% e · 8.0% f · 6.0% g", "f · likeliest 0.0% f"]


def test_the_first_space_of_a_token_is_visible_in_details() -> None:
    assert "the target wrote ␣." in details(rounds(made([Round((2,), None, (), 36, False)]))[0])


# ---- texts that are hard to cut


def test_what_a_model_writes_cannot_command_a_page() -> None:
    """The text, the draft, the reason, the prompt and the settings have markup."""
    tokenizer = letters(MARKUP)
    evil = [MARKUP.index(letter) for letter in "<script>alert(1)</script>" if letter in MARKUP]
    rejected = Round(tuple(evil), None, (), evil[0], False, "<script>why</script>")
    tree = replace(rejected, parents=tuple(range(-1, len(evil) - 1)))
    entry = TokenLogprob(evil[0], -1.0, -1.0, (), ((evil[0], -1.0), (evil[-1], -2.0)))
    accepted = Round(tuple(evil), None, tuple(range(len(evil))), None, False)
    count = len(evil) + 2
    out = made([accepted, rejected, tree], tokenizer, logprobs=[entry] * count)
    out = replace(out, prompt_tokens=evil).shown_by(tokenizer, "<script>drafter</script>")
    assert "".join(each.text("rt", "i") for each in rounds(out)) == out.text
    assert {each.tag for each in parsed(ribbon(out)).nodes()} <= FRAGMENT
    page = page_of(out, "<script>about</script>", {"<script>": "<script>", "nested": {"<b>": ["</table>"]}}, out)
    assert {each.tag for each in parsed(page).nodes()} <= PAGE
    for text in ("drafter", "why", "about"):
        assert f"&lt;script&gt;{text}&lt;/script&gt;" in page


def test_nothing_is_loaded_from_elsewhere() -> None:
    out = written(logprobs=2)
    page = page_of(out, "about", {"seed": 1}, written(None))
    assert not re.search(r"\b(src|href|on\w+)\s*=|url\(|@import|https?://", page)
    assert "default-src 'none'" in page
    assert len(ribbon(out)) < len(page)


def test_parts_of_characters_are_marked_and_the_text_is_whole() -> None:
    tokenizer = raw_bytes()
    ids = tokenizer("aé😀")["input_ids"]
    out = made([Round(tuple(ids[:3]), None, (0, 1, 2), ids[3], True), *(Round((), None, (), t, True) for t in ids[4:])],
               tokenizer, "aé😀")  # fmt: skip
    found = [token for each in rounds(out) for token in tokens(each)]
    assert [token.text("rt") for token in found] == ["a", "", "é", "", "", "", "😀"]
    assert [token.attributes.get("class") for token in found] == [None, "e", None, "e", "e", "e", None]


def test_a_line_break_is_outside_of_a_ruby() -> None:
    tokenizer = letters("ab\n")
    out = made([Round((0,), None, (), 2, False), Round((1,), None, (0,), 0, True)], tokenizer, "\nba")
    assert "".join(each.text("rt") for each in rounds(out)) == "\nba"
    (token,) = tokens(rounds(out)[0])
    assert token.attributes["class"] == "n"
    assert "\n" not in token.all("ruby")[0].text()
    assert ghosts(token) == ["a"]


def test_text_that_a_stop_string_cut_is_not_shown() -> None:
    whole = written().text
    out = written(stop=[whole[10:13]])
    assert out.text == whole[:10]
    assert "".join(each.text("rt") for each in rounds(out)) == out.text


def test_a_long_text_stays_small_and_says_so() -> None:
    entries = [Round((2, 3, 4, 5), None, (0, 1), 6, False)] * 1000
    out = made(entries)
    page = ribbon(out)
    assert len(rounds(out)) == MOST_ROUNDS
    assert shown(out).text("rt") == out.text
    counts = "2400 tokens, 1600 of 3200 drafted tokens accepted"
    assert f"Rounds {MOST_ROUNDS + 1} to 1000 are shown without details: {counts}." in page
    later = [each for each in shown(out).children if isinstance(each, Node) and each.tag in KINDS]
    assert [KINDS[each.tag] for each in later] == ["accepted", "own"] * 800
    assert len(page.encode()) < 110_000
    short = made(entries[:100])
    fixed = len(ribbon(made(entries[:0])))
    assert (len(ribbon(short).encode()) - fixed) / len(short.tokens) < 120  # bytes per token


# ---- results without all of this


def test_without_a_tokenizer_tokens_are_their_ids() -> None:
    model = paceline.LanguageModel(scripted([5, 0, 6, 1, 2, 3, 4, 7]), name="toy")
    out = paceline.SpeculativeDecoder(model, None).generate([5], max_new_tokens=4)
    assert shown(out).text("rt") == "0 6 1 2 "


def test_the_rounds_of_a_beam_search_are_those_of_several_texts() -> None:
    search = written(None, num_beams=3)
    assert shown(search).text() == search.text
    assert "The text has no colours: its rounds belong to several texts." in ribbon(search)
    assert "Tokens by time" not in page_of(search)


def test_a_stored_result_still_shows_its_text() -> None:
    again = pickle.loads(pickle.dumps(written()))
    assert again.drafter == "prompt-lookup"
    assert shown(again).text() == again.text
    assert "The text has no colours: its rounds or its tokenizer are not known." in ribbon(again)


def test_a_text_without_tokens_has_a_ribbon() -> None:
    assert rounds(made([])) == []


def test_a_lossy_rule_is_named() -> None:
    out = made([Round((), None, (), 2, True)])
    assert "LOSSY" not in ribbon(out)
    lossy = replace(out, stats=out.trace.stats(1.0, "typical", lossy=True)).shown_by(letters(), "")
    assert "LOSSY (rule typical)" in ribbon(lossy)


@pytest.mark.parametrize("tag", ["ribbon.css", "result_page.css"])
def test_the_styles_have_no_other_files(tag: str) -> None:
    from importlib.resources import files

    style = files("paceline.engine.views").joinpath(tag).read_text("utf-8")
    assert not re.search(r"url\(|@import|</", style)
