"""Hidden states tapped by a reader are those of the model itself: what drafters with `needs_taps` will stand on."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import paceline
from paceline.engine.rows import Rows

TEXT = [3, 5, 7, 9, 11]


def test_taps_are_the_hidden_states_of_the_last_places() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2
    )
    lm = paceline.LanguageModel(LlamaForCausalLM(config).double().eval())
    decoder = paceline.SpeculativeDecoder(lm, draft=None)
    rows = Rows(lm.vocabulary, lm.device)
    rows.admit(decoder._rows([TEXT], paceline.engine.request.build_requests(1, {})), 4)
    drafted = [2, 4]
    with torch.inference_mode():
        reader = lm.reader(taps=(0.5, 1.0))
        width = reader.begin(rows, 0, 32)
        reading = reader.extend(rows, width, torch.tensor([drafted]))
        wanted = lm.model(torch.tensor([TEXT + drafted]), output_hidden_states=True).hidden_states
    assert len(reading.taps) == 2
    for tap, layer in zip(reading.taps, (2, 4), strict=True):
        torch.testing.assert_close(tap, wanted[layer][:, -3:])
