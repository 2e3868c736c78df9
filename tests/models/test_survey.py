"""The survey of all classes (`make models`) on the few that were once accepted and wrong, and on those refused."""

from __future__ import annotations

import pytest
import torch
from tests.models.survey import PROMPTS, RIGHT, Subject, build, judge, subjects

from paceline import LanguageModel, UnsupportedError

KNOWN = {(subject.model_type, subject.class_name): subject for subject in subjects()}
REFUSED = {
    ("doge", "DogeForCausalLM"): r"^A small copy of DogeForCausalLM \(doge\) with windows of 4 tokens gives a token",
    ("paligemma", "PaliGemmaForConditionalGeneration"): "gives a token other logits once more text follows it",
    ("blip-2", "Blip2ForConditionalGeneration"): "cannot read a text by itself .*pixel_values",
    ("instructblip", "InstructBlipForConditionalGeneration"): "cannot read a text by itself .*pixel_values",
    ("instructblipvideo", "InstructBlipVideoForConditionalGeneration"): "cannot read a text by itself .*pixel_values",
    ("pi0", "PI0ForConditionalGeneration"): "its config has no vocab_size",
    ("mpt", "MptForCausalLM"): "a draft that branches differently",
    ("bart", "BartForCausalLM"): "a draft that branches differently",
    ("gpt_neo", "GPTNeoForCausalLM"): "layers of kind 'local_attention'",
    ("llama4_text", "Llama4ForCausalLM"): "layers of kind 'chunked_attention'",
    ("openai-gpt", "OpenAIGPTLMHeadModel"): "cannot be read through a slot cache",
}


@pytest.mark.parametrize("name", REFUSED, ids=lambda name: name[0])
def test_a_class_that_cannot_be_read_rightly_is_refused_in_a_sentence(name: tuple[str, str]) -> None:
    model = build(KNOWN[name])
    with pytest.raises(UnsupportedError, match=REFUSED[name]) as refusal:
        LanguageModel(model)
    assert "\n" not in str(refusal.value)


def test_a_model_of_several_parts_writes_what_transformers_writes() -> None:
    """Its `forward` names no position_ids, and takes any keyword."""
    name = "MossTranscribeDiarizeForConditionalGeneration"
    outcome = judge(build(KNOWN["moss_transcribe_diarize", name]), tokens=12)
    assert outcome.verdict == RIGHT, outcome.reason


def test_a_surveyed_window_is_longer_than_what_a_given_model_reads() -> None:
    model = build(Subject("mistral", "MistralForCausalLM", "causal"))
    assert model.config.sliding_window == 48
    assert model.dtype == torch.float64
    assert max(map(len, PROMPTS)) < 48
