"""What the drop-in cannot honour is an error that names it, never silently dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.test_custom_generate import BATCH, MASK, PROMPT, Listener, model, request, speculating
from torch import Tensor
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from paceline import CustomGenerate, PacelineError, SpeculativeDecoder, UnsupportedError


def test_processors_with_a_memory_are_refused() -> None:
    """Classifier-free guidance counts on one call per token; asked about drafts it would silently go wrong."""
    for draft in ("lookup", "own"):
        with pytest.raises(UnsupportedError, match=r"ClassifierFreeGuidance.*paceline\.guided"):
            model().generate(PROMPT, custom_generate=speculating(draft), guidance_scale=1.7, **request("plain"))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"output_logits": True, "return_dict_in_generate": True}, "output_logits"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"dola_layers": "high"}, "dola_layers"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}, "num_beam_groups=2"),
        ({"num_beams": 2, "diversity_penalty": 1.0}, "diversity_penalty"),
        ({"num_beams": 2, "force_words_ids": [[1]]}, "force_words_ids"),
        ({"num_beams": 2, "constraints": ["word"]}, "constraints"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(PacelineError, match=message):
        model().generate(PROMPT, max_new_tokens=4, do_sample=False, custom_generate=CustomGenerate(), **asked)


def test_odd_inputs_are_refused() -> None:
    ones = torch.ones_like(PROMPT)
    cache = model()(input_ids=PROMPT, use_cache=True).past_key_values
    embeddings = model().get_input_embeddings()(PROMPT).detach()
    gaps = ones.clone()
    gaps[0, 3] = 0
    right = ones.clone()
    right[0, -1] = 0
    ask: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    for inputs, message in (
        ({"inputs": torch.cat([PROMPT, PROMPT], 1), "past_key_values": cache}, "past_key_values that hold a text"),
        ({"inputs_embeds": embeddings}, "inputs_embeds"),
        ({"inputs": PROMPT, "attention_mask": gaps}, "gaps or padding on the right"),
        ({"inputs": PROMPT, "attention_mask": right}, "gaps or padding on the right"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            model().generate(**inputs, **ask, custom_generate=CustomGenerate())
    with pytest.raises(UnsupportedError, match="A streamer shows one text, but there are 3 prompts"):
        model().generate(BATCH, attention_mask=MASK, **ask, custom_generate=CustomGenerate(streamer=Listener()))


def test_a_prefix_function_is_asked_about_one_text_or_refused() -> None:
    def allowed(row: int, ids: Tensor) -> list[int]:
        return list(range(10 * row, 10 * row + 10))

    asked: dict[str, Any] = {"prefix_allowed_tokens_fn": allowed, **request("plain")}
    wanted = model().generate(PROMPT, **asked)
    assert torch.equal(model().generate(PROMPT, custom_generate=speculating("own"), **asked), wanted)
    with pytest.raises(UnsupportedError, match="prefix_allowed_tokens_fn"):
        model().generate(BATCH, attention_mask=MASK, custom_generate=speculating("own"), **asked)


def test_processors_with_a_memory_are_refused_outside_generate_too() -> None:
    guide = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.7, model())
    with pytest.raises(UnsupportedError, match="ClassifierFreeGuidance"):
        SpeculativeDecoder(model(), "prompt-lookup").generate([1, 2], processors=[guide], max_new_tokens=3)
