"""The kernels on real weights: a row of logits has the same bits in every company, on any number of threads."""

from __future__ import annotations

import pytest
import torch
from tests.conformance.test_cache import Texts
from tests.kernels.zoo import Alone, reader_of

from paceline import LanguageModel
from paceline.kernels.cpu import machine

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(machine.missing() is not None, reason="no kernels here"),
]
TEXT = "Speculative decoding changes the speed of a model and nothing else: its text is the same, token by token."


@torch.inference_mode()
def test_rows_are_the_same_in_every_pass(lm: LanguageModel) -> None:
    ids = lm.tokenizer(TEXT)["input_ids"][:20]
    alone = Alone(lm)
    for threads in (1, 2, 3):
        for count in (2, 3, 5, 8, 13, 20):
            rows, reader = Texts(), reader_of(lm, threads)
            rows.admit([ids[:1], ids[:1]])
            reader.begin(rows, 0, 32)
            logits = reader.extend(rows, 1, torch.tensor([ids[1:count], ids[1:count][::-1]])).logits
            for end in range(count):
                alone.check(logits[0, end], ids[: end + 1], f"token {end} of {count} on {threads} threads")


@torch.inference_mode()
def test_logits_are_those_of_transformers(lm: LanguageModel) -> None:
    ids = lm.tokenizer(TEXT)["input_ids"]
    rows, reader = Texts(), reader_of(lm, 2)
    rows.admit([ids[:1]])
    reader.begin(rows, 0, 64)
    logits = reader.extend(rows, 1, torch.tensor([ids[1:]])).logits[0]
    wanted = lm.model(torch.tensor([ids])).logits[0, :, : lm.vocabulary]
    assert float((logits - wanted).abs().max()) < 1e-3
    assert torch.equal(logits.argmax(-1), wanted.argmax(-1))
