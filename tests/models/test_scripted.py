"""Scripted models say the script and nothing else, as often as they should, to us and to transformers alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.selection import covering
from tests.toys import fingerprint

from paceline import InputError, LanguageModel, SpeculativeDecoder, UnsupportedError
from paceline.core.trace import Trace
from paceline.models.module_views import shell
from paceline.models.synthetic import Script, ScriptedModel, even_rate, random_model

VOCABULARY = 4096
GAMMA = 4


def pair(*rates: float, name: str = "tiny", dtype: str = "float32") -> tuple[ScriptedModel, ScriptedModel, Script]:
    script = Script.written(VOCABULARY, avoid=[0, 5])
    target = random_model(name, dtype=dtype, vocab=VOCABULARY)
    draft = random_model(name, dtype=dtype, vocab=VOCABULARY, layers=1, seed=1)
    return ScriptedModel(target, script), ScriptedModel(draft, script, rates, GAMMA), script


@contextmanager
def passes(model: Any) -> Iterator[list[int]]:
    counted = [0]

    def count(*_: Any) -> None:
        counted[0] += 1

    hook = model.register_forward_hook(count)
    yield counted
    hook.remove()


def assisted(target: ScriptedModel, draft: ScriptedModel, prompt: list[int], tokens: int, **more: Any) -> Any:
    """(text, passes of the target) of transformers' assisted generation."""
    settings = draft.model.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = GAMMA, "constant"
    settings.assistant_confidence_threshold = 0.0
    ids = torch.tensor([prompt])
    with passes(target.model) as counted:
        text = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=draft.model, max_new_tokens=tokens, **more
        )
    return text[0, len(prompt) :].tolist(), counted[0]


def reached(trace: Trace, depth: int) -> tuple[int, int]:
    """Of the rounds in which the first `depth` drafted tokens were accepted: (right in the next one too, all)."""
    there = [entry for entry in trace.rounds if len(entry.drafted) == GAMMA and len(entry.path) >= depth]
    return sum(len(entry.path) > depth for entry in there), len(there)


def near(found: tuple[int, int], rate: float) -> bool:
    """Within four standard deviations."""
    right, count = found
    return abs(right - rate * count) <= 4 * math.sqrt(max(rate * (1 - rate) * count, 0.25))


def test_a_script_goes_once_through_the_vocabulary() -> None:
    script = Script.written(50, avoid=[3, 49], seed=1)
    text = script.text(7, 48)
    assert sorted([*text]) == [token for token in range(50) if token not in (3, 49)]
    assert text[-1] == 7
    assert script.text(3, 1)[0] not in (3, 49)  # a prompt may end with one that is never written
    assert not (script.after == script.wrong).any()
    assert not torch.isin(script.wrong, torch.tensor([3, 49])).any()
    assert torch.equal(Script.written(50, [3, 49], 1).after, script.after)
    assert not torch.equal(Script.written(50, [3, 49], 2).after, script.after)


@pytest.mark.parametrize(("name", "dtype"), covering(["tiny", "gpt2:layers=2"], ["float32", "bfloat16"]))
def test_everybody_writes_the_script(name: str, dtype: str) -> None:
    """In a type too coarse for equal texts otherwise: plain, drafted, sampled, in a batch, and by transformers."""
    target, draft, script = pair(0.7, name=name, dtype=dtype)
    prompts = [[9, 8, 7], [1, 2, 3, 4, 11], [6, 20]]
    wanted = [script.text(prompt[-1], 40) for prompt in prompts]
    for given in (None, draft):
        decoder = SpeculativeDecoder(target, given, gamma=GAMMA)
        for settings in ({}, {"temperature": 1.0, "seed": 3}):
            written = decoder.generate(prompts, max_new_tokens=40, **settings)
            assert [one.tokens for one in written] == wanted
    ids = torch.tensor([prompts[0]])
    plain = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
    assert plain[0, 3:].tolist() == wanted[0]
    assert assisted(target, draft, prompts[0], 40)[0] == wanted[0]


@pytest.mark.parametrize(("rate", "rounds"), [(1.0, 12), (0.0, 60)])
def test_always_right_and_never_right(rate: float, rounds: int) -> None:
    target, draft, script = pair(rate)
    found = SpeculativeDecoder(target, draft, gamma=GAMMA).generate([1, 2], max_new_tokens=60)
    assert found.tokens == script.text(2, 60)
    assert found.stats.rounds == rounds
    assert assisted(target, draft, [1, 2], 60) == (found.tokens, rounds)


@pytest.mark.parametrize("rate", [0.6, 0.8])
def test_drafts_are_right_as_often_as_asked_and_transformers_has_the_same_rounds(rate: float) -> None:
    target, draft, script = pair(rate)
    found = SpeculativeDecoder(target, draft, gamma=GAMMA).generate([1, 2], max_new_tokens=500)
    for depth in range(GAMMA):
        assert near(reached(found.trace, depth), rate)
    text, counted = assisted(target, draft, [1, 2], 500)
    assert text == found.tokens == script.text(2, 500)
    assert counted == found.stats.rounds


def test_rates_by_position() -> None:
    rates = (0.9, 0.3, 1.0, 0.5)
    target, draft, script = pair(*rates)
    found = SpeculativeDecoder(target, draft, gamma=GAMMA).generate([1, 2], max_new_tokens=900)
    assert found.tokens == script.text(2, 900)
    for depth, rate in enumerate(rates):
        assert near(reached(found.trace, depth), rate)
    text, counted = assisted(target, draft, [1, 2], 900)
    assert text == found.tokens
    assert counted == pytest.approx(found.stats.rounds, rel=0.1)  # one rate that accepts as much


def test_rates_by_position_know_where_a_draft_begins_in_a_batch_and_inside_a_draft() -> None:
    """Rows that come and go, and texts that a drafter keeps for itself: right at once, then never."""
    target, draft, script = pair(1.0, 0.0)
    prompts = [[3, 9], [7, 7, 7, 2], [5], [8, 1]]
    lengths = [30, 7, 21, 40]
    for given in ("draft-model", "staged"):
        decoder = SpeculativeDecoder(target, given, options={"model": draft}, gamma=GAMMA, rows=3)
        for one, prompt, length in zip(
            decoder.generate(prompts, max_new_tokens=lengths), prompts, lengths, strict=True
        ):
            assert one.tokens == script.text(prompt[-1], length)
            assert {len(entry.path) for entry in one.trace.rounds if len(entry.drafted) > 1} == {1}


def test_rows_do_not_accept_in_step() -> None:
    target, draft, _ = pair(0.7)
    rows = SpeculativeDecoder(target, draft, gamma=GAMMA).generate([[1, 2], [1, 3]], max_new_tokens=60)
    first, second = ([len(entry.path) for entry in row.trace.rounds] for row in rows)
    assert first != second


@pytest.mark.parametrize("rates", [(0.7,), (0.9, 0.5)])
@pytest.mark.parametrize("tree", ["best-first", "levels", "static", "optimal"])
def test_trees(tree: str, rates: tuple[float, ...]) -> None:
    target, draft, script = pair(*rates)
    decoder = SpeculativeDecoder(target, "draft-model", options={"model": draft, "tree": tree}, gamma=GAMMA, nodes=12)
    found = decoder.generate([1, 2], max_new_tokens=60)
    assert found.tokens == script.text(2, 60)
    assert found.stats.accepted > 20


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_rules_of_law_accept_as_many(rule: str) -> None:
    target, draft, script = pair(0.8)
    found = [
        SpeculativeDecoder(target, draft, gamma=GAMMA, rule=each).generate([1, 2], max_new_tokens=80, temperature=0.9)
        for each in ("match", rule)
    ]
    assert found[0].tokens == found[1].tokens == script.text(2, 80)
    assert found[0].stats.accepted == found[1].stats.accepted


def test_the_models_stay_as_they_are_and_share_their_weights() -> None:
    script = Script.written(512)
    lm = random_model("tiny")
    text = torch.tensor([[1, 2, 3]])
    before, output = fingerprint(lm.model), lm.model(input_ids=text).logits
    told = ScriptedModel(lm, script, [0.5, 0.4])
    SpeculativeDecoder(told, told, gamma=3).generate([1, 2], max_new_tokens=9)
    assert fingerprint(lm.model) == before
    assert torch.equal(lm.model(input_ids=text).logits, output)
    assert type(lm.model).__name__ == "LlamaForCausalLM"
    pairs = zip(lm.model.parameters(), told.model.parameters(), strict=True)
    assert all(one is two for one, two in pairs)
    assert told.model.generation_config is not lm.model.generation_config


def test_only_one_logit_differs_from_what_the_model_says() -> None:
    """The passes are the model's own."""
    script = Script.written(512)
    lm = random_model("tiny")
    text = torch.tensor([[1, 2, 3]])
    output, plain = ScriptedModel(lm, script).model(input_ids=text).logits, lm.model(input_ids=text).logits
    differ = (output != plain).nonzero()
    assert differ.tolist() == [[0, place, int(script.after[token])] for place, token in enumerate((1, 2, 3))]


def test_a_part_of_a_scripted_target_does_not_draft() -> None:
    """It would say the script too, and always be right."""
    target, _, _ = pair(0.5)
    with pytest.raises(UnsupportedError, match="A part of a scripted model cannot draft"):
        SpeculativeDecoder(target, "early-exit", options={"layers": 1})
    with pytest.raises(UnsupportedError, match="A part of a scripted model cannot draft"):
        SpeculativeDecoder(target, "self-quantized").generate([1, 2], max_new_tokens=5)


def test_another_view_of_the_whole_of_it_says_the_script_too() -> None:
    """Transformers is measured on a shell with hooks of its own."""
    target, _, script = pair(0.5)
    output = shell(target.model)(input_ids=torch.tensor([[7]])).logits
    assert int(output[0, 0].argmax()) == int(script.after[7])


def test_what_takes_no_script_is_refused() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=20, hidden_size=16, n_layer=1, n_head=2)
    script = Script.written(20)
    with pytest.raises(UnsupportedError, match="takes no script"):
        ScriptedModel(LanguageModel(BloomForCausalLM(config).eval()), script)
    for rates in ([], [1.2]):
        with pytest.raises(InputError, match="Rates of a scripted draft must be from 0 to 1"):
            ScriptedModel(random_model("tiny"), Script.written(512), rates)
    with pytest.raises(InputError, match="at least 3 tokens"):
        Script.written(4, avoid=[0, 1])


def test_one_rate_in_place_of_several() -> None:
    assert even_rate([0.8], 5) == 0.8
    assert even_rate([0.5, 0.5], 3) == 0.5
    one = even_rate([0.9, 0.5], 2)
    assert one + one**2 == pytest.approx(0.9 + 0.9 * 0.5)
    assert even_rate([1.0, 0.0], 4) < even_rate([1.0, 0.1], 4)
