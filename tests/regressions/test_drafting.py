"""What a drafter reads, how far it may go, and how much of it is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from paceline import RULES, Budget, Drafter, LanguageModel, PacelineWarning, SpeculativeDecoder, TokenTree
from paceline.models.reader import TransformersExecutor
from tests.toys import gpt2, letters, llama, naive, opt, scripted

GAMMA = 4


@cache
def lm(seed: int = 0) -> LanguageModel:
    return LanguageModel(llama(seed))


@cache
def peaked() -> LanguageModel:
    """Sure of every token, so that the surest path of a tree is the greedy one."""
    model = llama(3)
    with torch.no_grad():
        model.lm_head.weight *= 30
    return LanguageModel(model)


@contextmanager
def feeds() -> Iterator[list[tuple[PreTrainedModel, int]]]:
    """Every pass: which model, and how many tokens it was fed."""
    seen: list[tuple[PreTrainedModel, int]] = []
    run = TransformersExecutor.run

    def count(self: TransformersExecutor, model: Any, inputs: dict[str, Any]) -> Any:
        seen.append((model, inputs["input_ids"].shape[1]))
        return run(self, model, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersExecutor, "run", count)
        yield seen


class Fixed(Drafter):
    """Proposes what it is given, and records its budgets."""

    name = "fixed"

    @dataclass(frozen=True)
    class Options:
        pass

    def __init__(self, right: int, truth: list[int]) -> None:
        self.right, self.truth = right, truth
        self.budgets: list[Budget] = []

    def propose(self, rows: Any, budget: Budget) -> TokenTree:
        self.budgets.append(budget)
        ahead = self.truth[rows.lengths[0] :][: budget.depth]
        return TokenTree.from_chains(
            [[token if i < self.right else (token + 1) % 40 for i, token in enumerate(ahead)]], "cpu"
        )


# ---- the memory of the draft model


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_acceptance_does_not_decay_when_the_target_drafts_for_itself(temperature: float) -> None:
    """Trap 10, V#14649, V#41838: the last accepted token was missing from the draft's cache after full acceptance."""
    out = SpeculativeDecoder(lm(), lm(), gamma=GAMMA).generate(
        [1, 2, 3], temperature=temperature, seed=4, max_new_tokens=80
    )
    assert out.stats.acceptance_rate == 1.0
    assert out.stats.rounds == 80 // (GAMMA + 1)


@pytest.mark.parametrize("tree", ["levels", "best-first"])
def test_acceptance_of_a_tree_does_not_decay_either(tree: str) -> None:
    """Trap 10: an accepted leaf was never read by the draft model; it is read in the next round."""
    out = SpeculativeDecoder(peaked(), peaked(), gamma=GAMMA, options={"tree": tree}).generate(
        [1, 2, 3], max_new_tokens=80
    )
    assert out.tokens == naive(peaked().model, [1, 2, 3], 80)
    assert [len(entry.path) for entry in out.trace.rounds] == [GAMMA] * (80 // (GAMMA + 1))


@pytest.mark.parametrize(("seed", "catching_up"), [(0, 2), (5, 1)])
def test_the_draft_reads_two_tokens_after_full_acceptance_and_one_after_a_rejection(
    seed: int, catching_up: int
) -> None:
    """Trap 10: what the draft must catch up is exactly what it has not read."""
    draft = LanguageModel(llama(seed))  # with seed 0 it has the weights of the target, but is another object
    with feeds() as seen:
        out = SpeculativeDecoder(lm(), draft, gamma=GAMMA).generate([1, 2, 3], max_new_tokens=15)
    widths = [width for model, width in seen if model is draft.model]
    prompt, widths = widths[0], widths[1:]  # its last token is read in the first round
    assert (prompt, widths[:GAMMA]) == (2, [1, 1, 1, 1])
    assert (len(out.trace.rounds[0].path) == GAMMA) == (catching_up == 2)
    assert widths[GAMMA : 2 * GAMMA] == [catching_up, 1, 1, 1]


def test_the_prompt_is_read_once() -> None:
    """Seeds 1 and 2: the whole prompt was fed again, together with the cache, in every step."""
    prompt = list(range(30))
    for draft in (None, lm(5), "prompt-lookup"):
        with feeds() as seen:
            SpeculativeDecoder(lm(), draft, gamma=GAMMA).generate(prompt, max_new_tokens=10)
        widths = [width for model, width in seen if model is lm().model]
        assert widths[0] == 29  # its last token is read in the first round
        assert max(widths[1:]) <= GAMMA + 1


def test_a_prompt_is_tokenised_once() -> None:
    """Seed 2: the prompt was re-tokenised in every loop."""
    calls: list[Any] = []
    tokenizer = letters()
    tokenizer.encode = lambda *args, **kwargs: calls.append(args) or [1, 2, 3]  # type: ignore[method-assign]
    SpeculativeDecoder(LanguageModel(llama(), tokenizer), "prompt-lookup").generate("bcd", max_new_tokens=12)
    assert len(calls) == 1


# ---- how much is kept


@pytest.mark.parametrize("right", range(GAMMA + 1))
@pytest.mark.parametrize("rule", [name for name in RULES if RULES[name].exact in ("text", "law")])
def test_the_first_mismatch_is_where_the_draft_ends(right: int, rule: str) -> None:
    """T#28508, T#28166: a wrong index of the number of matches kept everything."""
    truth = [1, 2, 3, *naive(lm().model, [1, 2, 3], 20)]
    drafter = Fixed(right, truth)
    out = SpeculativeDecoder(lm(), drafter, gamma=GAMMA, rule=rule).generate([1, 2, 3], max_new_tokens=20)
    assert out.tokens == truth[3:]
    for entry in out.trace.rounds:
        assert len(entry.path) == min(right, len(entry.drafted))
        assert entry.bonus == (right >= len(entry.drafted))


# ---- the end of the budget and of the context


@pytest.mark.parametrize("count", [1, 2, 4, 5, 6, 9])
def test_nothing_is_drafted_past_the_last_token(count: int) -> None:
    """Trap 9, V#40756, L#26478: γ is at most what remains, less the target's own token."""
    drafter = Fixed(GAMMA, list(range(26)))
    out = SpeculativeDecoder(LanguageModel(scripted(range(26))), drafter, gamma=GAMMA).generate(
        [0], max_new_tokens=count
    )
    assert out.tokens == list(range(1, count + 1))
    left = count
    for budget in drafter.budgets:
        assert budget.depth == min(GAMMA, left - 1) > 0
        assert budget.limits == (left - 1,)
        left -= budget.depth + 1
    assert left in (0, 1), "a last single token is the target's own, with nothing drafted"


@pytest.mark.parametrize(("build", "positions"), [(gpt2, "n_positions"), (opt, "max_position_embeddings")])
@pytest.mark.parametrize("draft", ["own", "other", "tree", "lookup"])
def test_a_text_may_fill_the_context_to_its_last_position(build: Any, positions: str, draft: str) -> None:
    """Trap 9: learned positions end there; drafts reach past it in the last rounds, for some rows of a batch."""
    model, other = build(0, **{positions: 24}), build(1, **{positions: 24})
    arguments: dict[str, Any] = {
        "own": {"draft": model},
        "other": {"draft": other},
        "tree": {"draft": other, "options": {"tree": "best-first"}},
        "lookup": {"draft": "prompt-lookup"},
    }[draft]
    prompts = [[1, 2, 3, 1, 2, 3, 1], [5, 6], list(range(23))]
    outs = SpeculativeDecoder(model, gamma=7, **arguments).generate(prompts, max_new_tokens=50)
    for prompt, out in zip(prompts, outs, strict=True):
        assert out.tokens == naive(model, prompt, 24 - len(prompt))
        assert (out.finish_reason, out.stop_reason) == ("length", None)


@pytest.mark.parametrize("prompt", [[1, 2, 3], list(range(14))], ids=["grows", "too long from the start"])
def test_a_draft_model_with_a_shorter_context_falls_silent_once_it_is_full(prompt: list[int]) -> None:
    """Traps 9 and 24: the text goes on as it would have, and there is one warning."""
    target, draft = gpt2(n_positions=40), LanguageModel(gpt2(1, n_positions=12), name="small-draft")
    decoder = SpeculativeDecoder(target, draft, gamma=3)
    with pytest.warns(PacelineWarning, match=r"longer than the context of small-draft \(12 tokens\)") as told:
        out = decoder.generate(prompt, max_new_tokens=20)
    assert len(told) == 1
    assert out.tokens == naive(target, prompt, 20)
    assert decoder.generate(prompt, max_new_tokens=20).tokens == out.tokens  # a second warning would be an error here


def test_what_speculates_is_said() -> None:
    """Trap 24, L#25345, M#1297: a drafter was given and speculation silently did not happen."""
    named = LanguageModel(llama(1), name="little")
    assert SpeculativeDecoder(lm(), draft=None).describe().endswith("plain decoding")
    assert "draft-model little, γ=3, rule ratio" in SpeculativeDecoder(lm(), named, gamma=3, rule="ratio").describe()
    assert SpeculativeDecoder(lm(), named).generate([1], max_new_tokens=9).stats.drafted > 0
