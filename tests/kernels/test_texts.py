"""Models of the conformance suite that the CPU kernels run. Their texts: conformance/test_identity.py."""

from __future__ import annotations

import pytest
from tests.conformance.models import CASES, draft, target

from paceline import SpeculativeDecoder

CASE = "llama-float32"


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("float32")])
def test_it_runs_by_kernels(name: str) -> None:
    for lm in (target(name), draft(name, "close"), draft(name, "blind")):
        assert lm.reader().kernels is not None


@pytest.mark.parametrize("drafter", ["prompt-lookup", "recycling", "early-exit"])
def test_logprobs_are_those_of_plain_decoding_bit_for_bit(drafter: str) -> None:
    """Log-probabilities do not depend on the other tokens of the forward pass."""
    results = []
    for name in (None, drafter):
        decoder = SpeculativeDecoder(target(CASE), name)
        out = decoder.generate([3, 3, 8, 3, 3, 8, 3], max_new_tokens=30, ignore_eos=True, logprobs=3)
        results.append((out.tokens, out.logprobs))
    assert results[0] == results[1]
    assert results[0][1]
