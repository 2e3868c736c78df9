"""A second view of a model with its linear maps in int8: one byte per weight, one scale per output.

Where torch has a kernel for it (`_weight_int8pack_mm`) that is found to multiply rightly on this device, in this dtype
and for so many rows, weights are read as int8 and never unpacked. Elsewhere, in float64 above all, they are unpacked
for every pass: as exact, but not faster. Embeddings, norms, biases and fused experts are shared with the model, which
is not edited.
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
# Rows the kernel is tried out with: kernels go by tiles, and one that is right for few rows may be wrong for more. For
# more than the last, unpacking once is cheaper anyway.
_TRIED = (1, 2, 5, 16, 17, 33, 63)
_CLOSE = 0.02  # of the largest number: rounding in bfloat16 stays below it, a wrong number does not


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
        self.kernel_rows = kernel_rows(weight.device, weight.dtype, self.in_features, self.out_features % _KERNEL_STEP)

    @property
    def bytes(self) -> int:
        """What it holds besides the model's own weights."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        if flat.shape[0] <= self.kernel_rows:  # it reads memory in order, whatever the strides say
            y = torch._weight_int8pack_mm(flat.contiguous(), self.quantized, self.scale)
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
def kernel_rows(device: torch.device, dtype: torch.dtype, width: int, odd: int = 0) -> int:
    """Up to how many rows torch multiplies int8 weights rightly here; 0: never. Measured, against the unpacked product.

    width: of the input; odd: how many outputs are left over when they are taken by 32.
    """
    if width % _KERNEL_STEP:
        return 0
    dice = torch.Generator().manual_seed(0)
    outputs = 4 * _KERNEL_STEP + odd
    x = torch.randn(_TRIED[-1], width, generator=dice).to(dtype)
    weight = torch.randint(-127, 128, (outputs, width), generator=dice, dtype=torch.int8)
    scale = ((0.5 + torch.rand(outputs, generator=dice)) / 127).to(dtype)
    wanted = x.double() @ weight.double().T * scale.double()  # on the CPU: not every device has float64
    x, weight, scale = x.to(device), weight.to(device), scale.to(device)
    right = 0
    for rows in _TRIED:
        try:
            got = torch._weight_int8pack_mm(x[:rows], weight, scale).cpu().double()
        except (RuntimeError, AttributeError):  # not for this device or dtype, or not in this torch
            return right
        if not bool(((got - wanted[:rows]).abs() <= _CLOSE * wanted.abs().max()).all()):
            return right
        right = rows
    return right
