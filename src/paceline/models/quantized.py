"""A second view of a model with its linear maps in int8: one byte per weight, one scale per output.

Where torch has a kernel for it (`_weight_int8pack_mm`: float32, bfloat16 and float16, if this device has it), weights
are read as int8 and never unpacked. Elsewhere, in float64 above all, they are unpacked for every pass: as exact, but
not faster. Embeddings, norms, biases and fused experts are shared with the model, which is not edited.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from paceline.core.errors import UnsupportedError

from .language_model import LanguageModel
from .shells import rebuilt

_KERNEL_STEP = 32  # the kernel reads past the end of rows of another length (bfloat16, torch 2.13: it crashes)
_MANY = 64  # tokens from which on unpacking once is cheaper than the kernel, which is made for few


class Int8Linear(nn.Module):
    """A linear map with weights [out, in] in int8, rounded to the nearest, and one scale per output."""

    quantized: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        exact = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
        scale = exact.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
        self.register_buffer("quantized", (exact / scale).round().to(torch.int8).contiguous(), persistent=False)
        self.register_buffer("scale", scale.squeeze(1).to(weight.dtype), persistent=False)
        self.bias = bias
        self.packed = self.in_features % _KERNEL_STEP == 0 and has_kernel(weight.device, weight.dtype)

    @property
    def bytes(self) -> int:
        """What it holds besides the model's own weights."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        if self.packed and flat.shape[0] < _MANY:
            y = torch._weight_int8pack_mm(flat, self.quantized, self.scale)
        else:
            y = nn.functional.linear(flat, self.quantized.to(x.dtype)) * self.scale
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


def quantized(lm: LanguageModel, head: bool = True) -> LanguageModel:
    """The model with every linear map in int8; the output head stays as it is if `head` is false."""
    kept = None if head else lm.model.get_output_embeddings()
    known: dict[int, Int8Linear] = {}

    def exchange(module: nn.Module) -> nn.Module | None:
        if module is kept or not _is_linear(module):
            return None
        if id(module) not in known:
            weight = module.weight.T if isinstance(module, Conv1D) else module.weight
            known[id(module)] = Int8Linear(weight, module.bias)  # type: ignore[arg-type]
        return known[id(module)]

    with torch.no_grad():
        model = rebuilt(lm.model, exchange)
    if not known:
        raise UnsupportedError(f"{type(lm.model).__name__} ({lm.architecture.name}) has no linear map to quantize.")
    return LanguageModel(model, lm.tokenizer, f"{lm.name} in int8")


def extra_bytes(lm: LanguageModel) -> int:
    """What the int8 weights of a model take besides those it shares."""
    return sum(module.bytes for module in lm.model.modules() if isinstance(module, Int8Linear))


def _is_linear(module: nn.Module) -> bool:
    """Somebody else's subclass may compute something else, for instance from weights that are quantized already."""
    known = type(module).__module__.startswith(("torch.nn.modules.", "transformers.models."))
    return isinstance(module, Conv1D) or (isinstance(module, nn.Linear) and known)


@cache
def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Does torch multiply int8 weights of this dtype on this device, and rightly? Tried out."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, _KERNEL_STEP, generator=generator).to(device, dtype)
    weight = torch.randint(-127, 128, (_KERNEL_STEP, _KERNEL_STEP), generator=generator, dtype=torch.int8).to(device)
    scale = torch.full((_KERNEL_STEP,), 0.5, dtype=dtype, device=device)
    try:
        got = torch._weight_int8pack_mm(x, weight, scale).double()
    except (RuntimeError, NotImplementedError):
        return False
    wanted = x.double() @ weight.double().T * 0.5
    return bool(torch.allclose(got, wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max())))
