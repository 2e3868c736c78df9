"""Where training stands, in one file that is whole or not there: weights, the optimiser's memory, and the step.

Only safetensors; nothing is ever unpickled. The file that was there stays until the new one is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.common.errors import InputError, LoadError
from paceline.common.json_text import parse_json
from paceline.integrations.weights_and_biases import start
from paceline.models.loading.weight_check import reading
from paceline.training.train_options import TrainOptions

# ---- The log of training: a line of JSON at a time, and Weights & Biases where somebody asks for it

LOG_NAME = "training.jsonl"


class Log:
    """Appends to training.jsonl in the folder of training; `quiet`: another process writes it."""

    def __init__(self, folder: Path, options: TrainOptions, quiet: bool = False) -> None:
        self._path, self._quiet = folder / LOG_NAME, quiet
        self._run: Any = None
        if options.wandb and not quiet:
            self._run = start("train", asdict(options), folder)

    def write(self, line: Mapping[str, Any]) -> None:
        if self._quiet:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self._run is not None:
            self._run.log(dict(_flat(line)), step=int(line.get("step", 0)))

    def cut(self, step: int) -> None:
        """Forget what was logged after `step`: it is done again."""
        if self._quiet or not self._path.exists():
            return
        lines = self._path.read_text("utf-8").splitlines()
        kept = [line for line in lines if _step(line) <= step]
        self._path.write_text("".join(f"{line}\n" for line in kept), "utf-8")

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def _step(line: str) -> int:
    """A line that was being written when the process was killed belongs to nothing."""
    try:
        return int(parse_json(line).get("step", 0))
    except (AttributeError, TypeError, ValueError):
        return 1 << 62


def _flat(line: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in line.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{before}{name}/")
        elif isinstance(value, (list, tuple)):
            found += [(f"{before}{name}/{index}", each) for index, each in enumerate(value)]
        elif value is not None:
            found.append((f"{before}{name}", value))
    return found


# ---- Where training stands, in one file that is whole or not there: weights, the optimiser's memory, and the step

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
