"""The drop-in for `model.generate`: the same tensor as transformers gives, whatever is asked of it."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.selection import covering
from tests.toys import letters, llama
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
    WatermarkingConfig,
)

from paceline import CustomGenerate

PROMPT = torch.tensor([[1, 7, 9, 4, 7, 9, 4]])
BATCH = torch.tensor([[0, 0, 0, 1, 7, 9, 4], [0, 3, 4, 5, 3, 4, 5], [6, 7, 8, 9, 6, 7, 8]])
MASK = (torch.arange(7) >= torch.tensor([[3], [1], [0]])).long()
DRAFTS = ["none", "lookup", "own", "other", "tree"]


@cache
def model(seed: int = 0) -> LlamaForCausalLM:
    return llama(seed)


def speculating(draft: str, **settings: Any) -> CustomGenerate:
    options = {"options": {"tree": "best-first"}} if draft == "tree" else {}
    drafts: dict[str, Any] = {
        "none": None,
        "lookup": "prompt-lookup",
        "own": model(0),
        "other": model(1),
        "tree": model(1),
    }
    return CustomGenerate(drafts[draft], gamma=4, **options, **settings)


class NoPairTwice(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, ids in enumerate(input_ids.tolist()):
            for first, second in pairwise(ids):
                if first == ids[-1]:
                    scores[row, second] = -float("inf")
        return scores


class Sum(StoppingCriteria):
    """Stops at a token sum; asked per token, it must never miss one."""

    def __init__(self, above: int, answer: type = Tensor) -> None:
        self.above, self.answer = above, answer
        self.lengths: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        self.lengths.append(input_ids.shape[1])
        full = input_ids.sum(1) > self.above
        return full if self.answer is Tensor else bool(full.all())


REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition and n-grams": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "own processor": {"logits_processor": LogitsProcessorList([NoPairTwice()])},
    "bad words": {"bad_words_ids": [[36], [9, 4], [25, 6]]},
    "sequence bias": {"sequence_bias": {(3,): 4.0, (9, 4): 5.0, (36,): -9.0}},
    "suppressed": {"suppress_tokens": [1, 2, 36], "begin_suppress_tokens": [25]},
    "one end": {"eos_token_id": 30},
    "several ends": {"eos_token_id": [30, 9, 31], "min_new_tokens": 3},
    "forced end": {"eos_token_id": 5, "forced_eos_token_id": 5},
    "decaying length": {"eos_token_id": 5, "exponential_decay_length_penalty": (3, 1.6)},
    "watermark": {"watermarking_config": WatermarkingConfig()},
    "max_length": {"max_length": 15, "max_new_tokens": None},
    "no cache": {"use_cache": False},
    "renormalised": {"renormalize_logits": True, "repetition_penalty": 1.2},
}


def request(name: str) -> dict[str, Any]:
    return {"do_sample": False, "max_new_tokens": 14, "pad_token_id": 0, **REQUESTS[name]}


@pytest.mark.parametrize(("name", "draft"), covering(REQUESTS, DRAFTS))
def test_greedy_is_what_generate_gives(name: str, draft: str) -> None:
    wanted = model().generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **request(name))
    got = model().generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), custom_generate=speculating(draft), **request(name)
    )
    assert got.dtype == wanted.dtype
    assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("name", "draft"), covering([name for name in REQUESTS if name != "watermark"], reversed(DRAFTS))
)
def test_left_padded_batches_are_what_generate_gives(name: str, draft: str) -> None:
    """Every row ends by itself and is padded to the longest, and processors see the padding as they do there."""
    wanted = model().generate(BATCH, attention_mask=MASK, **request(name))
    got = model().generate(BATCH, attention_mask=MASK, custom_generate=speculating(draft), **request(name))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("answer", [Tensor, bool])
@pytest.mark.parametrize("draft", DRAFTS)
def test_criteria_are_asked_about_every_token(draft: str, answer: type) -> None:
    ours, theirs = Sum(150, answer), Sum(150, answer)
    wanted = model().generate(PROMPT, stopping_criteria=StoppingCriteriaList([theirs]), **request("plain"))
    got = model().generate(
        PROMPT, stopping_criteria=StoppingCriteriaList([ours]), custom_generate=speculating(draft), **request("plain")
    )
    assert torch.equal(got, wanted)
    assert 8 < got.shape[1] < 21
    assert ours.lengths == list(range(8, got.shape[1] + 1))


@pytest.mark.parametrize("sampler", [{}, {"temperature": 1.4, "top_k": 9, "top_p": 0.9, "min_p": 0.02}], ids=str)
def test_sampling_follows_manual_seed_and_not_the_draft(sampler: dict[str, Any]) -> None:
    def sample(draft: str, seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        return (
            model()
            .generate(
                BATCH,
                attention_mask=MASK,
                do_sample=True,
                max_new_tokens=12,
                custom_generate=speculating(draft),
                **sampler,
            )
            .tolist()
        )

    first = sample("none", 5)
    assert first != sample("none", 6)
    for draft in DRAFTS:
        assert sample(draft, 5) == first


def test_sampling_takes_its_law_from_the_warpers() -> None:
    got = model().generate(
        PROMPT, do_sample=True, top_k=1, temperature=3.0, max_new_tokens=9, custom_generate=CustomGenerate()
    )
    assert torch.equal(got, model().generate(PROMPT, do_sample=False, max_new_tokens=9))


def test_a_seed_gives_every_row_its_own() -> None:
    """Rows with the same prompt are samples, not copies; each is the text of its seed alone."""
    custom = speculating("lookup", seed=3)
    asked: dict[str, Any] = {"do_sample": True, "max_new_tokens": 9}
    rows = model().generate(PROMPT.repeat(3, 1), custom_generate=custom, **asked)
    assert [out.seed for out in custom.generations] == [3, 4, 5]
    for row in range(3):
        alone = model().generate(PROMPT, custom_generate=speculating("none", seed=3 + row), **asked)
        assert rows[row].tolist() == alone[0].tolist()
    assert len({tuple(row) for row in rows.tolist()}) == 3


def test_a_seed_of_its_own_leaves_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    texts = [
        model().generate(PROMPT, do_sample=True, max_new_tokens=9, custom_generate=speculating("lookup", seed=3))
        for _ in range(2)
    ]
    assert torch.equal(*texts)
    assert torch.equal(torch.get_rng_state(), before)


def test_several_sequences_of_one_prompt_differ() -> None:
    got = model().generate(
        PROMPT,
        do_sample=True,
        temperature=2.0,
        num_return_sequences=4,
        max_new_tokens=9,
        custom_generate=speculating("own"),
    )
    assert got.shape == (4, 16)
    assert len({tuple(row) for row in got.tolist()}) == 4


def test_a_dictionary_is_returned_when_asked_for() -> None:
    asked: dict[str, Any] = {**request("plain"), "return_dict_in_generate": True}
    wanted = model().generate(PROMPT, **asked)
    got = model().generate(PROMPT, custom_generate=speculating("lookup"), **asked)
    assert type(got) is type(wanted)
    assert torch.equal(got.sequences, wanted.sequences)


def test_a_generation_config_is_honoured() -> None:
    config = GenerationConfig(max_new_tokens=6, do_sample=False, repetition_penalty=1.5, pad_token_id=0)
    wanted = model().generate(PROMPT, generation_config=config)
    assert torch.equal(model().generate(PROMPT, generation_config=config, custom_generate=speculating("own")), wanted)


def test_one_object_serves_many_calls_and_models() -> None:
    custom = speculating("lookup")
    for seed in (0, 1, 0):
        got = model(seed).generate(PROMPT, custom_generate=custom, **request("plain"))
        assert torch.equal(got, model(seed).generate(PROMPT, **request("plain")))
    assert custom.generations[0].stats.emitted == 14
    assert custom.generations[0].trace.rounds


def test_it_speculates() -> None:
    custom = speculating("own")
    model().generate(PROMPT, custom_generate=custom, **request("plain"))
    assert custom.generations[0].stats.acceptance_rate == 1.0
    assert custom.generations[0].stats.rounds == 3


class Listener:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


def test_a_streamer_hears_what_it_hears_from_generate() -> None:
    ours, theirs = Listener(), Listener()
    model().generate(PROMPT, streamer=theirs, **request("plain"))
    model().generate(PROMPT, custom_generate=speculating("own", streamer=ours), **request("plain"))
    assert ours.heard == theirs.heard


def test_a_text_streamer_skips_the_prompt_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for name in ("theirs", "ours"):
        streamer = TextStreamer(letters(), skip_prompt=True)
        how = {"streamer": streamer} if name == "theirs" else {"custom_generate": speculating("own", streamer=streamer)}
        model().generate(PROMPT, **request("plain"), **how)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert len(printed[0].rstrip("\n")) == 14


def test_stop_strings_are_given_here() -> None:
    tokenizer = letters()
    text = tokenizer.decode(model().generate(PROMPT, **request("plain"))[0, 7:])
    custom = speculating("own", tokenizer=tokenizer, stop_strings=[text[4:6]])
    got = model().generate(PROMPT, custom_generate=custom, **request("plain"))
    assert tokenizer.decode(got[0, 7:]) == text[:6]
    assert custom.generations[0].text == text[:4]


def test_a_tree_has_its_nodes_and_a_prediction_is_drafted() -> None:
    wanted = model().generate(PROMPT, **request("plain"))
    told = wanted[0, PROMPT.shape[1] :].tolist()
    custom = CustomGenerate("prediction", prediction=told, nodes=3)
    assert torch.equal(model().generate(PROMPT, custom_generate=custom, **request("plain")), wanted)
    assert custom.generations[0].stats.accepted_prediction_tokens > 0
    assert max(len(entry.drafted) for entry in custom.generations[0].trace.rounds) <= 3
