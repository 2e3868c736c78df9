"""Settings: one for all prompts or one per prompt, under the names people know; unknown ones are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.toys import llama, naive
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from paceline import InputError, SpeculativeDecoder, UnknownNameError
from paceline.engine.request import build_requests


def one(**settings: Any) -> Any:
    return build_requests(1, settings)[0]


def test_the_defaults() -> None:
    request = one()
    assert request.max_new_tokens == 128
    assert request.sampling.greedy
    assert request.eos_token_ids is None
    assert (request.stop, request.ignore_eos, request.criteria, request.logprobs) == ((), False, (), None)


def test_none_is_as_if_it_had_not_been_given() -> None:
    assert one(temperature=None, stop=None, max_new_tokens=None, seed=1) == one(seed=1)


def test_a_list_holds_one_value_per_prompt() -> None:
    requests = build_requests(
        3, {"temperature": [0.0, 0.5, 1.0], "max_new_tokens": (4, 5, 6), "seed": 7, "logit_bias": [{}, {3: 1}, {}]}
    )
    assert [request.sampling.temperature for request in requests] == [0.0, 0.5, 1.0]
    assert [request.max_new_tokens for request in requests] == [4, 5, 6]
    assert [request.sampling.seed for request in requests] == [7, 7, 7]
    assert [request.sampling.logit_bias for request in requests] == [{}, {3: 1.0}, {}]


def test_settings_that_are_lists_by_nature_are_shared_unless_nested() -> None:
    shared = build_requests(2, {"stop": ["a", "b"], "eos_token_ids": [1, 2], "banned_tokens": (3,)})
    assert [request.stop for request in shared] == [("a", "b")] * 2
    assert [request.eos_token_ids for request in shared] == [(1, 2)] * 2
    assert [request.sampling.banned_tokens for request in shared] == [(3,)] * 2
    own = build_requests(2, {"stop": [["a"], None], "eos_token_ids": [[1], [2, 3]], "banned_tokens": [[], [4]]})
    assert [request.stop for request in own] == [("a",), ()]
    assert [request.eos_token_ids for request in own] == [(1,), (2, 3)]
    assert [request.sampling.banned_tokens for request in own] == [(), (4,)]


def test_a_single_value_stands_for_a_list_of_one() -> None:
    request = one(stop="ab", eos_token_ids=5, banned_tokens=6)
    assert (request.stop, request.eos_token_ids, request.sampling.banned_tokens) == (("ab",), (5,), (6,))
    assert one(stop=[]).stop == ()


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        ("max_tokens", 9, lambda request: request.max_new_tokens),
        ("min_tokens", 9, lambda request: request.sampling.min_new_tokens),
        ("eos_token_id", [9], lambda request: list(request.eos_token_ids)),
        ("stop_strings", ["x"], lambda request: list(request.stop)),
        ("bad_token_ids", [9], lambda request: list(request.sampling.banned_tokens)),
    ],
)
def test_names_from_transformers_and_vllm(name: str, value: Any, where: Any) -> None:
    assert where(one(**{name: value})) == value


def test_do_sample_and_the_samplers_mean_what_people_expect() -> None:
    assert one(do_sample=True).sampling.temperature == 1.0
    assert one(do_sample=True, temperature=0.3).sampling.temperature == 0.3
    assert one(do_sample=False, temperature=0.3, top_k=5).sampling.greedy
    assert one(do_sample=False, temperature=0.3, dynamic_temperature=0.2).sampling.greedy
    for name, value in {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.5}.items():
        assert one(**{name: value}).sampling.temperature == 1.0, "a sampler that was asked for is not ignored"
    assert one(top_k=5, temperature=0.0).sampling.greedy
    assert one(repetition_penalty=1.2).sampling.greedy


def test_requests_without_a_seed_have_different_ones() -> None:
    assert len({request.sampling.seed for request in build_requests(20, {})}) == 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"temperature": [0.1, 0.2, 0.3]},
            "temperature has 3 values for 2 prompts; give one per prompt, or a single one.",
        ),
        ({"stop": [["a"]]}, "stop has 1 values for 2 prompts; give one per prompt, or a single one."),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, got 0."),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number of at least 1, got 2.5."),
        ({"stop": ["a", ""]}, "stop must be strings that are not empty, got ['a', '']."),
        ({"stop": 5}, "stop must be strings that are not empty, got [5]."),
        ({"logprobs": -1}, "logprobs must be a whole number of at least 0, got -1."),
        ({"min_new_tokens": 9, "max_new_tokens": 5}, "min_new_tokens=9 is more than max_new_tokens=5."),
        ({"logit_bias": 5}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {"abc": 1}}, "logit_bias must map token ids to numbers"),
        ({"processors": [5]}, "processors must be callables"),
        ({"top_p": 1.5}, "top_p must be in (0, 1], got 1.5"),
    ],
    ids=str,
)
def test_wrong_settings_are_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        build_requests(2, settings)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_an_unknown_setting_gets_a_hint() -> None:
    with pytest.raises(UnknownNameError) as error:
        one(temprature=1.0)
    assert str(error.value).startswith("Unknown setting 'temprature'. Did you mean 'temperature'? Available: ")


@pytest.mark.parametrize("ids", ["</s>", [40], [-1], [1.5]], ids=str)
def test_an_end_that_cannot_occur_is_refused(ids: Any) -> None:
    """It would silently never match."""
    with pytest.raises(InputError, match="eos_token_ids"):
        SpeculativeDecoder(llama(), draft=None).generate([1], eos_token_ids=ids)


def test_string_keys_of_a_bias_are_read_as_ids() -> None:
    assert one(logit_bias={"7": 2}).sampling.logit_bias == {7: 2.0}, "as JSON has them"


def test_processors_of_transformers_work_alone_in_lists_and_in_their_own_list() -> None:
    model = llama()
    penalty = RepetitionPenaltyLogitsProcessor(1.7)

    def by_hand(text: list[int], logits: torch.Tensor) -> torch.Tensor:
        return penalty(torch.tensor([text]), logits[None])[0]

    wanted = naive(model, [1, 7, 9, 7], 12, by_hand)
    assert wanted != naive(model, [1, 7, 9, 7], 12)
    decoder = SpeculativeDecoder(model, "prompt-lookup")
    for given in (penalty, [penalty], LogitsProcessorList([penalty]), (penalty,)):
        for name in ("processors", "logits_processor"):
            assert decoder.generate([1, 7, 9, 7], max_new_tokens=12, **{name: given}).tokens == wanted
    assert decoder.generate([[1, 7, 9, 7], [1]], max_new_tokens=12, processors=[[penalty], []])[0].tokens == wanted


def test_a_criterion_of_the_caller_ends_the_text_at_any_token() -> None:
    model = llama()
    wanted = naive(model, [1, 2, 3], 20)
    for count in (1, 2, 4, 7):
        seen: list[int] = []

        def enough(tokens: list[int], count: int = count, seen: list[int] = seen) -> bool:
            assert tokens[:3] == [1, 2, 3]
            seen.append(len(tokens))
            return len(tokens) >= 3 + count

        out = SpeculativeDecoder(model, model, gamma=5).generate([1, 2, 3], max_new_tokens=20, criteria=enough)
        assert out.tokens == wanted[:count]
        assert (out.finish_reason, out.stop_reason) == ("stop", None)
        assert seen == list(range(4, 4 + count)), "asked once per token, in order"
