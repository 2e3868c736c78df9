"""Weights of heads in fewer bytes on disk. What a drafter says need not be exact: the target decides."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.core.errors import UnknownNameError

NUMBERS = ("float32", "bfloat16", "int8")
_SCALE = ".scale"


def packed(tensors: Mapping[str, Tensor], numbers: str | None) -> dict[str, Tensor]:
    """float32 and bfloat16: as they are called. int8: matrices by rows, each with a scale beside it (`name.scale`), and
    everything else in bfloat16. None: as they are."""
    if numbers is not None and numbers not in NUMBERS:
        raise UnknownNameError("kind of numbers", numbers, NUMBERS)
    whole = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors.items()}
    if numbers is None:
        return whole
    found: dict[str, Tensor] = {}
    for name, tensor in whole.items():
        if not tensor.is_floating_point():
            found[name] = tensor
        elif numbers == "int8" and tensor.ndim > 1:
            largest = tensor.float().abs().amax(-1, keepdim=True)
            scale = largest.clamp(min=torch.finfo(torch.float32).tiny) / 127
            found[name] = (tensor.float() / scale).round().to(torch.int8)
            found[name + _SCALE] = scale
        else:
            found[name] = tensor.to(torch.float32 if numbers == "float32" else torch.bfloat16)
    return found


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices in int8 as float32 again; everything else as it lies there, or as float32 beside such."""
    scaled = {name for name in tensors if name + _SCALE in tensors and tensors[name].dtype == torch.int8}
    if not scaled:
        return dict(tensors)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in scaled:
            scale = tensors[name + _SCALE]
            if scale.shape != (*tensor.shape[:-1], 1):  # a product of two other shapes may be huge
                raise ValueError(f"'{name}{_SCALE}' has the shape {tuple(scale.shape)} beside {tuple(tensor.shape)}")
            found[name] = tensor.float() * tensors[name + _SCALE].float()
        elif not (name.endswith(_SCALE) and name.removesuffix(_SCALE) in scaled):
            found[name] = tensor.float() if tensor.is_floating_point() else tensor
    return found
