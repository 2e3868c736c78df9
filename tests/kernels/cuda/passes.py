"""A model's passes by kernels for CUDA devices, which are interpreted on a CPU here."""

from __future__ import annotations

from typing import Any

from paceline.models.cuda.cuda_forward import CudaForward, CudaPlan, cuda_plan
from paceline.models.language_model import LanguageModel


def cuda_pass(lm: LanguageModel, model: Any = None) -> CudaForward:
    """Of the model that a reader runs; in the place of `reader.kernel_pass`."""
    plan = cuda_plan(model or lm.model, lm.architecture.kinds, lm.architecture.window, lm.logits)
    assert isinstance(plan, CudaPlan), plan
    return CudaForward(plan)
