"""Every drafter on a model that runs by kernels: greedy and sampled, alone and in a ragged batch, the text is plain's.

Two such models are among the architectures of the conformance suite; here one of them meets every variant there is.
"""

from __future__ import annotations

import pytest
from tests.conformance.drafters import Variant, board, variants
from tests.conformance.models import CASES, draft, target
from tests.conformance.test_identity import NEW, check_identity

from paceline import SpeculativeDecoder

CASE = "llama-float32"


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("float32")])
def test_it_runs_by_kernels(name: str) -> None:
    for lm in (target(name), draft(name, "close"), draft(name, "blind")):
        assert lm.reader()._kernels is not None


@pytest.mark.parametrize(("case", "variant"), board([CASE], variants(("close", "same")), lambda variant: 1))
def test_the_text_is_that_of_plain_decoding(case: str, variant: Variant) -> None:
    check_identity(case, variant, NEW)


@pytest.mark.parametrize("drafter", ["prompt-lookup", "recycling", "early-exit"])
def test_logprobs_are_those_of_plain_decoding_bit_for_bit(drafter: str) -> None:
    """What a token was worth does not depend on who else was in the pass."""
    told = []
    for name in (None, drafter):
        decoder = SpeculativeDecoder(target(CASE), name)
        out = decoder.generate([3, 3, 8, 3, 3, 8, 3], max_new_tokens=30, ignore_eos=True, logprobs=3)
        told.append((out.tokens, out.logprobs))
    assert told[0] == told[1]
    assert told[0][1]
