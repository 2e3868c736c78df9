"""A view of a model with quantized linear layers. It shares embeddings, norms, biases and fused experts with the model.
The model is not edited."""

from __future__ import annotations

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from paceline.common.errors import UnknownNameError, UnsupportedError
from paceline.models.device import give_back
from paceline.models.language_model import LanguageModel
from paceline.models.module_views import map_modules
from paceline.models.quantization.packed_linear import (
    BLOCK,
    BFloat16Linear,
    Int4Linear,
    Int8Linear,
    PackedLinear,
    kernel_rows,
)
from paceline.models.tensor_parallel import refuse_pieces

__all__ = ["KINDS", "Int4Linear", "Int8Linear", "extra_bytes", "kernel_rows", "quantized"]

KINDS: dict[str, type[PackedLinear]] = {"int8": Int8Linear, "int4": Int4Linear, "bfloat16": BFloat16Linear}


def quantized(lm: LanguageModel, kind: str = "int8", head: bool = True) -> LanguageModel:
    """The model with all linear layers quantized, and the format in its name ("SmolLM2 in int8").

    kind: "int8" (a byte per weight, one scale per output), "int4" (5 bits per weight: blocks of 32, each with a scale
    and a least value; a layer whose rows are no multiple of 32 is in int8), or "bfloat16" (the same weights if the
    checkpoint was in bfloat16, at half the bytes of float32). head: quantize the output layer too.

    The result is a model of its own: its text may differ from that of the given model. Its activations keep their
    dtype. Our CPU kernels for float32 read the small weights; everywhere else they are unpacked in every pass, which
    is not faster. An embedding that is tied to the output layer does not change; the output layer becomes a copy.
    """
    if kind not in KINDS:
        raise UnknownNameError("kind of quantization", kind, KINDS)
    refuse_pieces(lm, "it cannot be quantized")
    already = next((m for m in lm.model.modules() if isinstance(m, PackedLinear)), None)
    if already is not None:
        raise UnsupportedError(f"{lm.name} is quantized already; quantize the model it was made of.")
    kept = None if head else lm.model.get_output_embeddings()
    known: dict[int, PackedLinear] = {}

    def exchange(module: nn.Module) -> nn.Module | None:
        if module is kept or not _is_linear(module):
            return None
        if id(module) not in known:
            weight = module.weight.T if isinstance(module, Conv1D) else module.weight
            fits = kind != "int4" or weight.shape[1] % BLOCK == 0  # type: ignore[index, union-attr]
            known[id(module)] = KINDS[kind if fits else "int8"](weight, module.bias)  # type: ignore[arg-type]
        return known[id(module)]

    with torch.no_grad():
        model = map_modules(lm.model, exchange)
    give_back()
    if not known:
        raise UnsupportedError(f"{type(lm.model).__name__} ({lm.architecture.name}) has no linear layer to quantize.")
    small = LanguageModel(model, lm.tokenizer, f"{lm.name} in {kind}")
    small.weights = lm.weights
    return small


def extra_bytes(lm: LanguageModel) -> int:
    """The bytes of the quantized weights."""
    return sum(module.bytes for module in lm.model.modules() if isinstance(module, PackedLinear))


def _is_linear(module: nn.Module) -> bool:
    """A subclass of another library may compute something else, for example from quantized weights."""
    known = type(module).__module__.startswith(("torch.nn.modules.", "transformers.models."))
    return isinstance(module, Conv1D) or (isinstance(module, nn.Linear) and known)
