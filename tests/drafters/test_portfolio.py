"""A portfolio: credit, precedence, failures, and what each member learns of its own draft."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.toys import VOCABULARY, llama, naive, scripted

from paceline import Budget, Drafter, InputError, LanguageModel, PacelineWarning, SpeculativeDecoder, TokenTree
from paceline.common.errors import UnsupportedError
from paceline.core.contracts import PromptTaps, Reading
from paceline.core.pause import FIRST_PAUSE
from paceline.core.protocols import NeedsHiddenStates, Rewindable
from paceline.drafters.adaptive.portfolio import Portfolio

SCRIPT = list(range(1, 40))  # what the scripted target writes


class Says(Drafter):
    """Proposes what a function of the text says: a chain, or (tokens, parents)."""

    name = "says"

    def __init__(self, says: Callable[[list[int]], Any]) -> None:
        self.says = says
        self.calls: list[Any] = []

    def propose(self, rows: Any, budget: Budget) -> TokenTree:
        self.calls.append("propose")
        drafts = [self.says(text) for text in rows.histories]
        if drafts and isinstance(drafts[0], tuple):
            return TokenTree.from_rows(drafts, "cpu")
        chains = [chain[: min(budget.depth, limit)] for chain, limit in zip(drafts, budget.limits, strict=True)]
        return TokenTree.from_chains(chains, "cpu")


class Notes(Says, Rewindable):
    """And records what it gets."""

    def keep(self, rows: Any, verdict: Any, reading: Reading) -> None:
        best = reading.logits.argmax(-1).where(~reading.logits.isnan().any(-1), -1)
        path = None if verdict.path is None else verdict.path.tolist()
        self.calls.append((verdict.accepted.flatten().tolist(), path, best.tolist()))

    def rewind(self, lengths: list[int]) -> None:
        self.calls.append(("rewind", lengths))


class Breaks(Says):
    def propose(self, rows: Any, budget: Budget) -> TokenTree:
        raise RuntimeError("no idea")


def right(text: list[int]) -> list[int]:
    return list(range(text[-1] + 1, min(text[-1] + 9, 40)))


def wrong(text: list[int]) -> list[int]:
    return [0, 0, 0, 0]


def silent(text: list[int]) -> list[int]:
    return []


def decoder(*members: Any, gamma: int = 4, nodes: int = 64, **options: Any) -> SpeculativeDecoder:
    drafter = Portfolio(Portfolio.Options(drafters=members, **options))
    return SpeculativeDecoder(scripted(SCRIPT), drafter, gamma=gamma, nodes=nodes)


# ---- who gets the nodes


def test_credit_moves_the_nodes_to_the_member_that_is_right() -> None:
    """With room for one chain only, the first named has it at first, and loses it."""
    speculative = decoder(Says(wrong), Says(right), gamma=4, nodes=4, cost="nodes")
    out = speculative.generate([1], max_new_tokens=36)
    assert out.tokens == SCRIPT[1:37]
    credits = speculative.drafter.credits()  # type: ignore[attr-defined]
    assert credits["says 1"]["accepted"] == 0.0
    assert credits["says 2"]["accepted"] > 3.0
    assert credits["says 2"]["alone"] > 3.0
    first, last = out.trace.rounds[0], out.trace.rounds[-2]
    assert first.drafted == (0, 0, 0, 0)
    assert len(last.path) == 4
    assert "says 2 4." in speculative.describe() or "says 2 3." in speculative.describe()


def test_what_was_not_in_the_tree_is_credited_all_the_same() -> None:
    """Otherwise who has lost the nodes could never win them back."""
    speculative = decoder(Says(wrong), Says(right), gamma=4, nodes=1, cost="nodes")
    out = speculative.generate([1], max_new_tokens=12)
    assert out.trace.rounds[0].drafted == (0,)
    assert out.trace.rounds[1].drafted == (3,)


def test_duplicates_take_one_node() -> None:
    out = decoder(Says(right), Says(right), Says(lambda text: [*right(text)[:1], 0])).generate([1], max_new_tokens=6)
    assert out.trace.rounds[0].drafted == (2, 3, 4, 5, 0)
    assert out.trace.rounds[0].parents == (-1, 0, 1, 2, 0)


def test_first_takes_the_first_with_an_idea_and_asks_no_further() -> None:
    quiet, sure, late = Says(silent), Says(wrong), Says(right)
    out = decoder(quiet, sure, late, mode="first").generate([1], max_new_tokens=4)
    assert out.trace.rounds[0].drafted == (0, 0, 0)
    assert late.calls == []
    assert quiet.calls


def test_rows_have_winners_of_their_own() -> None:
    """Half of the rows believe one member, half the other; in mode first each row takes its own first idea."""
    low, high = (
        Says(lambda t: right(t) if t[-1] < 20 else wrong(t)),
        Says(lambda t: right(t) if t[-1] >= 20 else wrong(t)),
    )
    speculative = decoder(low, high, gamma=4, nodes=4, cost="nodes")
    outs = speculative.generate([[1], [21], [2], [22]], max_new_tokens=14)
    for out, start in zip(outs, (1, 21, 2, 22), strict=True):
        assert out.tokens == list(range(start + 1, start + 15))
        assert len(out.trace.rounds[1].path) == 4
    some = Says(lambda t: right(t) if t[-1] < 20 else [])
    outs = decoder(some, Says(wrong), mode="first").generate([[1], [30]], max_new_tokens=5)
    assert outs[0].trace.rounds[0].drafted == (2, 3, 4, 5)
    assert outs[1].trace.rounds[0].drafted == (0, 0, 0, 0)


def test_who_never_pays_is_asked_rarely_but_never_forgotten() -> None:
    """Time does not decide here: cost="nodes" is the same on every machine."""
    good, bad = Says(right), Says(wrong)
    speculative = decoder(good, bad, gamma=1, cost="nodes")
    for _ in range(20):
        speculative.generate([1], max_new_tokens=38)
    asked = speculative.drafter.credits()  # type: ignore[attr-defined]
    assert asked["says 1"]["asked"] > 300
    assert 64 < asked["says 2"]["asked"] < 100
    bad.says, good.says = right, wrong
    for _ in range(20):
        speculative.generate([1], max_new_tokens=38)
    asked_later = speculative.drafter.credits()  # type: ignore[attr-defined]
    assert asked_later["says 2"]["asked"] - asked["says 2"]["asked"] > 200


def test_credit_is_kept_reset_and_frozen() -> None:
    speculative = decoder(Says(wrong), Says(right), gamma=4, nodes=4, cost="nodes")
    portfolio: Any = speculative.drafter
    speculative.generate([1], max_new_tokens=30)
    assert speculative.generate([1], max_new_tokens=9).trace.rounds[0].drafted == (2, 3, 4, 5)
    portfolio.frozen = True
    before = portfolio.credits()["says 2"]["accepted"]
    speculative.generate([1], max_new_tokens=9)
    assert portfolio.credits()["says 2"]["accepted"] == before
    portfolio.reset()
    assert speculative.generate([1], max_new_tokens=9).trace.rounds[0].drafted == (0, 0, 0, 0)
    speculative = decoder(Says(wrong), Says(right), gamma=4, nodes=4, cost="nodes", persistent=False)
    for _ in range(2):
        assert speculative.generate([1], max_new_tokens=20).trace.rounds[0].drafted == (0, 0, 0, 0)


# ---- members that fail


@pytest.mark.parametrize(
    "bad",
    [Breaks(right), Says(lambda text: [VOCABULARY + 5]), Says(lambda text: ([1, 1], [-1, -1]))],
    ids=["raises", "outside the vocabulary", "twins"],
)
def test_a_member_that_fails_is_left_out_and_the_others_go_on(bad: Says) -> None:
    with pytest.warns(PacelineWarning, match="of 'portfolio' failed") as caught:
        out = decoder(bad, Says(right)).generate([1], max_new_tokens=20)
    assert len(caught) == 1
    assert out.tokens == SCRIPT[1:21]
    assert out.stats.rounds == 4


def test_a_member_that_fails_once_drafts_again_after_a_pause() -> None:
    class Once(Says):
        opened, failing = 0, True

        def open(self, target: Any, rows: Any) -> None:
            self.opened += 1

        def propose(self, rows: Any, budget: Budget) -> TokenTree:
            if self.failing:
                self.failing = False
                raise RuntimeError("once")
            return super().propose(rows, budget)

    once = Once(right)
    speculative = decoder(once, Says(silent))
    with pytest.warns(PacelineWarning, match=f"after {FIRST_PAUSE} rounds it gets another attempt") as caught:
        out = speculative.generate([1], max_new_tokens=38)
    assert len(caught) == 1
    assert out.tokens == SCRIPT[1:39]
    drafting = [bool(entry.drafted) for entry in out.trace.rounds]
    assert drafting.index(True) == FIRST_PAUSE
    assert (once.opened, speculative.drafter.failures) == (2, 1)  # type: ignore[attr-defined]


def test_a_member_that_cannot_draft_for_the_target_is_refused() -> None:
    class Refuses(Says):
        def check(self, target: Any) -> None:
            raise UnsupportedError("not for this one")

    with pytest.raises(UnsupportedError, match="not for this one"):
        decoder(Refuses(right))


# ---- what members learn of a round


def test_each_is_told_what_became_of_its_own_draft() -> None:
    """A draft model moves its memory by this: numbers of another tree would move the wrong tokens."""
    straight = Notes(lambda t: [t[-1] + 1, t[-1] + 2, 0, 0])
    branched = Notes(lambda t: ([0, t[-1] + 1, t[-1] + 2, t[-1] + 3], [-1, -1, 1, 2]))
    decoder(straight, branched, Says(right), gamma=4).generate([1], max_new_tokens=10)
    # accepted: 2 3 4 5, then the target's own 6
    assert straight.calls[1][:2] == ([2], None)
    assert straight.calls[1][2][0][:3] == [2, 3, 4]
    assert straight.calls[2] == ("rewind", [1 + 2])
    assert branched.calls[1][:2] == ([3], [[1, 2, 3]])
    assert branched.calls[1][2][0][2:] == [3, 4, 5]
    assert branched.calls[2] == ("rewind", [1 + 3])
    everything = Notes(right)
    decoder(everything, Says(wrong), gamma=4).generate([1], max_new_tokens=12)
    assert everything.calls[1][0] == [4]
    assert everything.calls[2] == ("rewind", [1 + 4 + 1])


def test_what_was_left_out_of_the_tree_has_no_logits() -> None:
    member = Notes(wrong)
    decoder(Says(right), member, gamma=4, nodes=4, cost="nodes").generate([1], max_new_tokens=12)
    told = [call for call in member.calls if isinstance(call, tuple) and call[0] != "rewind"]
    assert told[0][0] == [0]
    assert told[0][2] == [[2, -1, -1, -1, -1]]


class Taps(Says, NeedsHiddenStates):
    def __init__(self, says: Any, taps: tuple[float, ...]) -> None:
        super().__init__(says)
        self.needs_taps = taps

    def observe_prompt(self, rows: Any, taps_piece: PromptTaps) -> None:
        self.calls.append(("observe_prompt", len(taps_piece.taps), taps_piece.taps))

    def observe_accepted(self, rows: Any, taps: tuple[Any, ...]) -> None:
        self.calls.append(("observe_accepted", len(taps), taps))


def test_each_sees_its_own_taps_also_of_tokens_that_others_drafted() -> None:
    """A head needs the hidden states of every accepted token, of any drafter."""
    model = llama()
    text = naive(model, [7, 3, 5], 8)
    known = {tuple([7, 3, 5, *text][: i + 3]): text[i : i + 3] for i in range(6)}
    one = Taps(lambda t: [], (0.0,))
    two = Taps(lambda t: ([0, text[0]], [-1, -1]) if len(t) == 3 else ([1], [-1]), (1.0, 0.0))
    knows = Says(lambda t: known.get(tuple(t), []))
    drafter = Portfolio(Portfolio.Options(drafters=(one, two, knows)))
    out = SpeculativeDecoder(model, drafter, gamma=3).generate([7, 3, 5], max_new_tokens=8)
    assert out.tokens == text
    assert [call[1] for call in one.calls if call[0] == "observe_prompt"] == [1]
    assert [call[1] for call in two.calls if call[0] == "observe_prompt"] == [2]
    table = model.get_input_embeddings().weight
    for member, tap in ((two, 1), (one, 0)):
        _, _, taps = next(call for call in member.calls if call[0] == "observe_accepted")
        assert torch.equal(taps[tap][0], table[torch.tensor([5, *text[:3]])])


# ---- drafts with laws of their own


def model_member(model: Any, **options: Any) -> tuple[str, dict[str, Any]]:
    return ("draft-model", {"model": LanguageModel(model), **options})


def test_laws_of_their_own_are_never_mixed() -> None:
    """Every round is either of tokens without laws, or one member's whole tree."""
    model = llama()
    drafter = Portfolio(Portfolio.Options(drafters=("prompt-lookup", model_member(llama(1)), "recycling")))
    seen: list[tuple[str, bool]] = []
    propose = drafter.propose

    def noted(rows: Any, budget: Budget) -> TokenTree:
        tree = propose(rows, budget)
        seen.append((tree.drawn, tree.laws is not None))
        return tree

    drafter.propose = noted  # type: ignore[method-assign]
    SpeculativeDecoder(model, drafter, rule="ratio", gamma=3).generate(
        [[1, 2, 1, 2, 1]], max_new_tokens=60, temperature=0.9, seed=1
    )
    assert ("iid", True) in seen
    assert ("certain", False) in seen
    assert set(seen) <= {("iid", True), ("certain", False)}


def test_the_best_of_those_with_laws_comes_to_draft_alone() -> None:
    model = llama()
    speculative = SpeculativeDecoder(
        model,
        "portfolio",
        rule="ratio",
        gamma=3,
        options={"drafters": ("prompt-lookup", model_member(model), model_member(llama(5)))},
    )
    out = speculative.generate([[1, 2, 1, 2, 1]], max_new_tokens=80, temperature=0.9, seed=1)[0]
    credits = speculative.drafter.credits()  # type: ignore[attr-defined]
    assert credits["draft-model 2"]["accepted"] > 2.5
    assert out.stats.mean_accepted_length > 2.5


# ---- whole texts


@pytest.mark.parametrize("tree", ["chain", "levels", "best-first"])
@pytest.mark.parametrize("draft", ["same", "other"])
def test_a_draft_model_among_others_reads_what_it_did_not_draft(tree: str, draft: str) -> None:
    """A perfect draft model whose memory goes wrong where others were accepted would be believed less and less."""
    model = llama()
    member = model_member(model if draft == "same" else llama(3), tree=tree)
    prompts = [[7], [1, 7, 9, 4, 7, 9, 4, 7], [3, 3]]
    lookup = ("prompt-lookup", {"branches": 3})
    speculative = SpeculativeDecoder(
        model, "portfolio", gamma=3, nodes=8, options={"drafters": (lookup, "recycling", member), "cost": "nodes"}
    )
    for _ in range(2):
        outs = speculative.generate(prompts, max_new_tokens=40)
        assert [out.tokens for out in outs] == [naive(model, prompt, 40) for prompt in prompts]
    if draft == "same":
        credits = speculative.drafter.credits()  # type: ignore[attr-defined]
        assert credits["draft-model"]["accepted"] > 2.4


def test_early_exit_shares_its_reader() -> None:
    model = llama()
    prompts = [[7], [1, 7, 9, 4, 7, 9, 4, 7]]
    speculative = SpeculativeDecoder(
        model, "portfolio", gamma=3, options={"drafters": ("early-exit", "prompt-lookup", "early-exit")}
    )
    outs = speculative.generate(prompts, max_new_tokens=30)
    assert [out.tokens for out in outs] == [naive(model, prompt, 30) for prompt in prompts]
    assert [member.shares_reader for member in speculative.drafter._members] == [True, False, False]  # type: ignore[attr-defined]


def test_the_default_drafts_at_least_what_its_members_do() -> None:
    """On a text that repeats itself as on one that does not."""
    model = llama()
    prompt = [1, 7, 9, 4, 7, 9, 4, 7]
    best = 0.0
    for name, options in (
        ("suffix", {"branches": 4}),
        ("ngram", {"branches": 4}),
        ("prompt-lookup", {}),
        ("recycling", {}),
    ):
        out = SpeculativeDecoder(model, name, gamma=6, options=options).generate(prompt, max_new_tokens=70)
        best = max(best, out.stats.mean_accepted_length)
    out = SpeculativeDecoder(model, "portfolio", gamma=6).generate(prompt, max_new_tokens=70)
    assert out.stats.mean_accepted_length >= best


@pytest.mark.parametrize(
    "options",
    [
        {"drafters": ()},
        {"mode": "both"},
        {"cost": "money"},
        {"least": 1.0},
        {"drafters": (3,)},
        {"drafters": ("sufix",)},
    ],
    ids=str,
)
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Portfolio(Portfolio.Options(**options))


def test_nothing_is_said_when_nothing_is_wrong() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = SimpleNamespace(histories=[[1]], lengths=[1], settled=[1], count=1)
        portfolio = Portfolio(Portfolio.Options(drafters=(Says(silent),)))
        portfolio.open(SimpleNamespace(vocabulary=9), rows)  # type: ignore[arg-type]
        portfolio.admit(rows, 0)  # type: ignore[arg-type]
        assert portfolio.propose(rows, Budget(3, 9, (9,))).nodes == 0  # type: ignore[arg-type]
