"""Linear layers with quantized weights.

`forward` unpacks the weights. Our kernels (`kernels.cpu.product`) read them packed, in passes over a few tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor, nn

from paceline.common.errors import UnsupportedError
from paceline.models.cpu.threads import one_thread

BLOCK = 32  # weights that share a scale and a least value in `Int4Linear`
_HEAD = 4  # bytes of the scale and the least value
_SIZE = _HEAD + BLOCK // 2
_AT_ONCE = 1 << 20  # weights that are unpacked at a time: few, to save memory

_PACKED_AT_ONCE = 1 << 15  # weights that are packed at a time: few, so that the heap does not fragment

_KERNEL_STEP = 32  # torch's kernel reads past the end of rows of another length (bfloat16, torch 2.13: it crashes)
# Numbers of rows to test the kernel with: kernels use tiles, and one that is right for few rows can be wrong for more.
# For more rows than the last number, unpacking once is cheaper.
_TRIED = (1, 2, 5, 16, 17, 33, 63)
# On a CPU the float32 kernel takes 17 ms, and unpacking and multiplying takes 6 (40 layers of 1536×576, one row; eight
# rows: 141 and 17). The bfloat16 kernel takes 3 ms, and unpacking 8 (eight rows: 9 and 9).
_WORTH_IT = {torch.bfloat16: 8}
_CLOSE = 0.02  # of the largest number: rounding in bfloat16 stays below it, a wrong number does not


class PackedLinear(nn.Module):
    """A linear layer with weights [out, in] in a format of the kernels, and the bias of the original layer."""

    format: ClassVar[str]

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias

    packed: Tensor  # the packed weights, one row per output
    scales: Tensor | None  # one per output; None: the format has them in the packed weights

    @property
    def bytes(self) -> int:
        """The bytes of its buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    def unpacked(self, outputs: slice, dtype: torch.dtype) -> Tensor:
        """Return the weights [outputs, in] of some outputs."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        step = max(1, _AT_ONCE // self.in_features)
        some = [
            nn.functional.linear(x, self.unpacked(slice(start, start + step), x.dtype))
            for start in range(0, self.out_features, step)
        ]
        y = some[0] if len(some) == 1 else torch.cat(some, -1)
        return y if self.bias is None else y + self.bias


class Int8Linear(PackedLinear):
    """Weights in int8, rounded to the nearest, and one scale per output.

    If torch's kernel (`_weight_int8pack_mm`) is correct on this device, in this dtype and for this number of rows, it
    reads them as int8 without unpacking.
    """

    format = "int8"
    scales: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        quantized = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scales = torch.empty(self.out_features, dtype=weight.dtype, device=weight.device)
        step = max(1, _PACKED_AT_ONCE // self.in_features)
        with one_thread():  # the pieces are too small for several threads
            for start in range(0, self.out_features, step):
                exact = weight.detach()[start : start + step].to(torch.promote_types(weight.dtype, torch.float32))
                largest = torch.maximum(exact.amax(1, keepdim=True), -exact.amin(1, keepdim=True))
                scale = largest.clamp(min=torch.finfo(torch.float32).tiny) / 127
                quantized[start : start + step] = (exact / scale).round_()
                scales[start : start + step] = scale.squeeze(1)
        self.register_buffer("packed", quantized, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.kernel_rows = kernel_rows(weight.device, weight.dtype, self.in_features, self.out_features % _KERNEL_STEP)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        if flat.shape[0] <= self.kernel_rows:  # the kernel ignores strides
            y = torch._weight_int8pack_mm(flat.contiguous(), self.packed, self.scales)
        else:
            y = nn.functional.linear(flat, self.packed.to(x.dtype)) * self.scales
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


class Int4Linear(PackedLinear):
    """Blocks of 32 weights in 20 bytes, as Q4_1 of GGUF: a scale d and a least value m in float16, and 32 numbers q
    from 0 to 15 in the lower and then the upper halves of 16 bytes. A weight is d · q + m."""

    format, scales = "q4_1", None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        if self.in_features % BLOCK:
            raise UnsupportedError(f"int4 takes weights by {BLOCK}, and a row has {self.in_features}; use int8.")
        step = max(1, _AT_ONCE // self.in_features)
        rows = [_in_blocks(weight.detach()[start : start + step]) for start in range(0, self.out_features, step)]
        self.register_buffer("packed", torch.cat(rows), persistent=False)

    def unpacked(self, outputs: slice, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        blocks = self.packed[outputs].unflatten(1, (-1, _SIZE))
        d, m = blocks[..., :_HEAD].contiguous().view(torch.float16).to(wide).split(1, -1)
        both = blocks[..., _HEAD:]
        q = torch.cat([both & 15, both >> 4], -1).to(wide)
        return q.mul_(d).add_(m).flatten(1).to(dtype)


def _in_blocks(weight: Tensor) -> Tensor:
    """Return rows of weights as bytes: 15 equal steps from the least to the largest weight of a block."""
    exact = weight.to(torch.promote_types(weight.dtype, torch.float32)).unflatten(1, (-1, BLOCK))
    least, most = exact.amin(-1, keepdim=True), exact.amax(-1, keepdim=True)  # aminmax is many times slower
    m = least.to(torch.float16)
    d = ((most - m) / 15).clamp(min=0).to(torch.float16)
    if not bool((d.isfinite() & m.isfinite()).all()):
        raise UnsupportedError("int4 keeps the range of its weights in float16, and some are beyond it; use int8.")
    step = torch.where(d == 0, 1, d).to(exact.dtype)
    q = ((exact - m) / step).round().clamp(0, 15).to(torch.uint8)
    half = BLOCK // 2
    head = torch.cat([d, m], -1).contiguous().view(torch.uint8)
    return torch.cat([head, q[..., :half] | q[..., half:] << 4], -1).flatten(1)


class BFloat16Linear(PackedLinear):
    """Weights in bfloat16: half the bytes of float32, and equal if the checkpoint was in bfloat16."""

    format, scales = "bfloat16", None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.register_buffer("packed", weight.detach().to(torch.bfloat16).contiguous(), persistent=False)

    def unpacked(self, outputs: slice, dtype: torch.dtype) -> Tensor:
        return self.packed[outputs].to(dtype)


@lru_cache(256)  # a property of the machine, so it is measured once
def kernel_rows(device: torch.device, dtype: torch.dtype, width: int, odd: int = 0) -> int:
    """Return the largest number of rows for which torch's int8 kernel is correct here and faster than unpacking; 0:
    none. Measured against the unpacked product.

    width: of the input; odd: the number of outputs modulo 32.
    """
    most = _WORTH_IT.get(dtype, 0) if device.type == "cpu" else _TRIED[-1]
    if width % _KERNEL_STEP or not most:
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
        right = min(rows, most)
    return right
