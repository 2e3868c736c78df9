"""Where training stands, in one file that is whole or not there: weights, the optimiser's memory, and the step.

Only safetensors; nothing is ever unpickled. The file that was there stays until the new one is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.core.errors import InputError, LoadError
from paceline.core.json_text import parse_json
from paceline.models.weight_check import reading

NAME = "checkpoint.safetensors"
_BEST = "best/"


class Checkpoint:
    """The file in a folder of training. `plan` must be the same whenever it is opened."""

    def __init__(self, folder: Path, plan: Mapping[str, Any]) -> None:
        self.path = folder / NAME
        self._plan = json.loads(json.dumps(plan, default=str))

    def save(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], best: Mapping[str, Tensor]
    ) -> None:
        """`state`: step and whatever else is plain values; `best`: the weights that were best so far."""
        tensors = {f"weights/{name}": weight for name, weight in trained(module).items()}
        tensors |= {f"{_BEST}{name}": weight for name, weight in best.items()}
        for index, memory in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{index}/{name}": value for name, value in memory.items()}
        whole = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors.items()}
        about = {"state": json.dumps(dict(state)), "plan": json.dumps(self._plan)}
        beside = self.path.with_suffix(".part")
        try:
            save_file(whole, beside, about)
            with beside.open("rb") as file:
                os.fsync(file.fileno())
            beside.replace(self.path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                beside.unlink()
            before = "the checkpoint before it is intact" if self.path.exists() else "there is none before it"
            raise LoadError(f"The checkpoint '{self.path}' cannot be written: {error}; {before}.") from error

    def load(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Puts weights and the optimiser's memory where they were; gives the state and the best weights, or None."""
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, "pt") as file:
                about = file.metadata()
                tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118
            plan, state = parse_json(about["plan"]), parse_json(about["state"])
            if not isinstance(plan, dict) or not isinstance(state, dict):
                raise ValueError("its plan and its state are no JSON objects")
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise LoadError(
                f"The checkpoint '{self.path}' cannot be read: {error}; remove it to start anew."
            ) from error
        self._check(plan)
        weights = trained(module)
        memory: dict[int, dict[str, Tensor]] = {}
        with reading("The checkpoint", self.path):
            with torch.no_grad():
                for name, weight in weights.items():
                    weight.copy_(tensors[f"weights/{name}"])
            for name, tensor in tensors.items():
                if name.startswith("optimizer/"):
                    _, index, what = name.split("/")
                    memory.setdefault(int(index), {})[what] = tensor.cpu() if what == "step" else tensor
            if memory:
                optimizer.load_state_dict({"state": memory, "param_groups": optimizer.state_dict()["param_groups"]})
        best = {name[len(_BEST) :]: tensor for name, tensor in tensors.items() if name.startswith(_BEST)}
        return state, best

    def _check(self, plan: Mapping[str, Any]) -> None:
        for name, value in self._plan.items():
            if plan.get(name) != value:
                raise InputError(
                    f"'{self.path.parent}' holds training with {name} = {plan.get(name)!r}, not {value!r}; give the "
                    "same to go on with it, or another --out to start anew."
                )

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            self.path.unlink()


def trained(module: nn.Module) -> dict[str, Tensor]:
    """The weights that learn, by name, and the buffers that belong to them."""
    weights: dict[str, Tensor] = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    return {**weights, **dict(module.named_buffers())}
