"""The model that the tests on real weights share."""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline import LanguageModel


@pytest.fixture(scope="session")
def lm() -> LanguageModel:
    return paceline.load("smollm2-135m", dtype=torch.float32, device="cpu")
