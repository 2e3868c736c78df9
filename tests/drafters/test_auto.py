"""The controller: what it chooses from costs and acceptance, that it lets go and comes back, and that it says why."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.toys import VOCABULARY, TableModel, llama, scripted

from paceline import InputError, LanguageModel, SpeculativeDecoder, guided
from paceline.core.costs import Costs
from paceline.drafters.adaptive.auto import Auto

CPU = Costs({1: {1: 1.0, 2: 1.65, 4: 1.85, 8: 2.1, 16: 2.4, 64: 6.5}})  # seconds so long that asking costs nothing
FREE = Costs({1: {1: 1.0, 64: 1.01}})
COPYING = ("suffix", "prompt-lookup")


def decoder(target: Any, costs: Costs, *drafters: Any, gamma: Any = None, **more: Any) -> SpeculativeDecoder:
    options = {"costs": costs, "drafters": drafters or COPYING}
    return SpeculativeDecoder(target, "auto", options=options, gamma=gamma, **more)


def price(trace: Any, costs: Costs) -> float:
    """What the rounds of a trace cost, in plain passes."""
    return sum(costs.v(1 + len(entry.drafted)) for entry in trace.rounds)


def repeating(period: int) -> TableModel:
    """Writes 0 1 2 ... again and again."""
    table = torch.zeros(VOCABULARY, VOCABULARY)
    for here in range(VOCABULARY):
        table[here, (here + 1) % period if here < period else 0] = 9.0
    return TableModel(table)


def wandering(seed: int = 3) -> Any:
    """A random model: what it writes has hardly been there before."""
    return llama(seed, max_position_embeddings=512)


def test_never_much_slower_where_nothing_can_be_copied() -> None:
    dice = random.Random(5)
    prompt = [dice.randrange(VOCABULARY) for _ in range(64)]
    auto = decoder(wandering(), CPU)
    settings = {"max_new_tokens": 128, "ignore_eos": True, "temperature": 1.5, "seed": 1}
    out = auto.generate(prompt, **settings)
    fixed = SpeculativeDecoder(wandering(), "prompt-lookup", gamma=5).generate(prompt, **settings)
    assert out.tokens == fixed.tokens
    assert price(out.trace, CPU) <= 128 * 1.02
    assert price(fixed.trace, CPU) > 128 * 1.2  # so the text is one on which a fixed choice loses


def test_on_text_that_repeats_itself_it_drafts_deep() -> None:
    out = decoder(repeating(7), CPU).generate([0], max_new_tokens=128, ignore_eos=True)
    assert 128 / price(out.trace, CPU) > 2.5
    assert max(len(entry.drafted) for entry in out.trace.rounds) == 16


def test_it_comes_back_when_the_text_begins_to_repeat() -> None:
    """A target that wanders for a long time and then copies: what was unlearned must not be lost for ever."""
    head = list(range(10, 40))
    table = torch.zeros(VOCABULARY, VOCABULARY)
    script = [*head, 0, 1, 2, 3, 4]
    for here, there in zip(script, [*script[1:], 0], strict=True):
        table[here, there] = 9.0
    out = decoder(TableModel(table), CPU).generate([10], max_new_tokens=300, ignore_eos=True)
    early, late = out.trace.rounds[: len(head)], out.trace.rounds[-6:-2]
    assert sum(len(entry.drafted) for entry in early) == 0
    assert all(len(entry.drafted) > 8 for entry in late)


def test_free_reading_is_used_and_dear_reading_is_not() -> None:
    dice = random.Random(5)
    prompt = [dice.randrange(9) for _ in range(64)]
    drafted = [
        decoder(wandering(), costs).generate(prompt, max_new_tokens=32, ignore_eos=True).stats.drafted
        for costs in (FREE, Costs({1: {1: 1.0, 2: 9.0, 64: 99.0}}))
    ]
    assert drafted[0] > 32
    assert drafted[1] == 0


def test_the_overhead_of_a_round_is_part_of_its_price() -> None:
    """Reading one drafted token more costs 2.5 passes, and 1.15 where every round costs nine besides."""
    passes = {1: {1: 1.0, 2: 2.5, 64: 95.5}}
    drafted = [
        decoder(repeating(7), Costs(passes, overhead=overhead), gamma=1)
        .generate([0], max_new_tokens=64, ignore_eos=True)
        .stats.drafted
        for overhead in (0.0, 0.3, 9.0)
    ]
    assert drafted[:2] == [0, 0]
    assert drafted[2] > 16


def test_a_model_is_asked_while_its_steps_pay() -> None:
    """The draft is the target itself. Where a pass takes an hour its steps are free; where it takes nothing they cost
    more than any token is worth, and all it gets is the probe budget."""
    target = LanguageModel(llama(1, dtype=torch.float64))
    outs = []
    for seconds in (3600.0, 1e-9):
        costs = Costs({1: {1: seconds, 64: 1.01 * seconds}})
        auto = decoder(target, costs, ("draft-model", {"model": target}), gamma=6)
        outs.append(auto.generate([1, 2, 3], max_new_tokens=40, ignore_eos=True))
    assert outs[0].tokens == outs[1].tokens
    assert outs[0].stats.mean_accepted_length > 4
    assert outs[1].stats.drafted <= 8


def test_any_drafter_with_gamma_auto() -> None:
    auto = SpeculativeDecoder(scripted(range(1, 40)), "prompt-lookup", gamma="auto")
    assert isinstance(auto.drafter, Auto)
    assert "prompt-lookup" in auto.describe()
    assert auto.generate([1], max_new_tokens=12).tokens == list(range(2, 14))
    assert SpeculativeDecoder(scripted(range(1, 40)), None, gamma="auto").drafter.name == "none"
    with pytest.raises(InputError, match="gamma must be a whole number of at least 1, or 'auto', got 'fast'"):
        SpeculativeDecoder(scripted(range(1, 40)), "ngram", gamma="fast")


def test_gamma_is_a_limit() -> None:
    out = decoder(repeating(7), FREE, gamma=3).generate([0], max_new_tokens=64, ignore_eos=True)
    assert max(len(entry.path) for entry in out.trace.rounds) == 3


def test_every_round_says_why() -> None:
    out = decoder(repeating(7), CPU).generate([0], max_new_tokens=64, ignore_eos=True)
    rounds = out.trace.rounds[:-1]  # the last may have no room for a draft
    for entry in rounds:
        assert ("plain" in entry.why) == (not entry.drafted), entry
        assert "passes" in entry.why or "no member has a draft" in entry.why
    assert any("suffix" in entry.why for entry in rounds)


def test_a_search_says_why() -> None:
    """Rows of a beam search change places; the reason in the trace belongs to the draft that stands beside it."""
    out = decoder(repeating(7), FREE).generate([0], max_new_tokens=24, num_beams=3)
    for entry in out.trace.rounds[:-1]:
        assert entry.why
        assert ("plain" in entry.why) == (not entry.drafted) or "no member" in entry.why
        assert not entry.drafted or f"{len(entry.drafted)} nodes" in entry.why


def test_a_guided_target_is_measured_as_what_it_is() -> None:
    target = guided(llama(1))
    out = SpeculativeDecoder(target, "prompt-lookup", gamma="auto").generate([1, 2, 1, 2, 1], max_new_tokens=16)
    assert out.tokens == SpeculativeDecoder(target, draft=None).generate([1, 2, 1, 2, 1], max_new_tokens=16).tokens


def test_rows_of_a_batch_have_reasons_of_their_own() -> None:
    dice = random.Random(5)
    prompts = [[0, 1, 2, 3, 4, 5, 6] * 4, [dice.randrange(20, VOCABULARY) for _ in range(30)]]
    auto = decoder(repeating(7), Costs({1: {1: 1.0, 64: 1.2}, 2: {1: 1.0, 64: 1.2}}), gamma=2)
    copied, other = auto.generate(prompts, max_new_tokens=12, ignore_eos=True)
    assert "suffix" in copied.trace.rounds[1].why
    assert copied.trace.rounds[1].why != other.trace.rounds[1].why


def test_a_wide_batch_pays_more_for_a_draft() -> None:
    """One row would read a draft on this machine; of eight the same draft costs as much as four passes."""
    costs = Costs({1: {1: 1.0, 64: 4.2}, 8: {1: 1.0, 2: 4.0, 64: 190.0}})
    one = decoder(repeating(7), costs).generate([0], max_new_tokens=64, ignore_eos=True)
    eight = decoder(repeating(7), costs).generate([[0]] * 8, max_new_tokens=64, ignore_eos=True)
    assert one.stats.drafted > 32
    assert sum(out.stats.drafted for out in eight) == 0


def test_a_rule_for_chains_gets_chains() -> None:
    target = scripted(range(1, 40))
    auto = decoder(target, FREE, ("suffix", {"branches": 4}), ("ngram", {"branches": 3}), rule="block")
    prompt = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1]
    out = auto.generate(prompt, max_new_tokens=20, temperature=0.1, seed=1, ignore_eos=True)
    assert out.stats.drafted > 0
    assert all(entry.parents is None for entry in out.trace.rounds)


def test_what_was_learned_is_kept_reset_and_frozen() -> None:
    auto = decoder(repeating(7), CPU)
    settings: dict[str, Any] = {"max_new_tokens": 64, "ignore_eos": True}
    first = auto.generate([0], **settings).stats.rounds
    again = auto.generate([0], **settings).stats.rounds
    assert again < first
    auto.drafter.reset()  # type: ignore[attr-defined]
    for member in auto.drafter._members:  # type: ignore[attr-defined]
        if hasattr(member.drafter, "reset"):
            member.drafter.reset()
    assert auto.generate([0], **settings).stats.rounds == first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafters": ()}, "at least one drafter"),
        ({"costs": {1: 2}}, "costs must be"),
        ({"costs": Costs({1: {}})}, "costs has no passes"),
        ({"probing": 2.0}, "probing must be a share from 0 to 1, got 2.0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SpeculativeDecoder(scripted(range(1, 40)), "auto", options=options)
