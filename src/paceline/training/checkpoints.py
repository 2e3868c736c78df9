"""The log and the checkpoint of a training.

A checkpoint is one safetensors file with the weights, the state of the optimizer and the step. Nothing is unpickled.
The old file stays until the new one is complete.
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
from paceline.common.text_formats import parse_json
from paceline.integrations.weights_and_biases import start
from paceline.models.loading.weight_check import reading
from paceline.training.train_options import TrainOptions

# ---- The log: lines of JSON, and Weights & Biases on request

LOG_NAME = "training.jsonl"


class Log:
    """Appends to training.jsonl in the folder of the training. quiet: another process writes it."""

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
        """Remove the lines after `step`: those steps run again."""
        if self._quiet or not self._path.exists():
            return
        lines = self._path.read_text("utf-8").splitlines()
        kept = [line for line in lines if _step(line) <= step]
        self._path.write_text("".join(f"{line}\n" for line in kept), "utf-8")

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def _step(line: str) -> int:
    """The step of a line. An incomplete line, which a killed process leaves, belongs to no step."""
    try:
        return int(parse_json(line).get("step", 0))
    except (AttributeError, TypeError, ValueError):
        return 1 << 62


def _flat(line: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested values under names with slashes."""
    values: list[tuple[str, Any]] = []
    for name, value in line.items():
        if isinstance(value, Mapping):
            values += _flat(value, f"{prefix}{name}/")
        elif isinstance(value, (list, tuple)):
            values += [(f"{prefix}{name}/{index}", item) for index, item in enumerate(value)]
        elif value is not None:
            values.append((f"{prefix}{name}", value))
    return values


# ---- The checkpoint

NAME = "checkpoint.safetensors"
_BEST = "best/"


class Checkpoint:
    """The file in the folder of a training. `plan` must be equal whenever it is opened."""

    def __init__(self, folder: Path, plan: Mapping[str, Any]) -> None:
        self.path = folder / NAME
        self._plan = json.loads(json.dumps(plan, default=str))

    def save(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], best: Mapping[str, Tensor]
    ) -> None:
        """state: the step and other plain values. best: the best weights so far."""
        tensors = {f"weights/{name}": weight for name, weight in trained_tensors(module).items()}
        tensors |= {f"{_BEST}{name}": weight for name, weight in best.items()}
        for index, values in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{index}/{name}": value for name, value in values.items()}
        on_cpu = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors.items()}
        about = {"state": json.dumps(dict(state)), "plan": json.dumps(self._plan)}
        part = self.path.with_suffix(".part")
        try:
            save_file(on_cpu, part, about)
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(self.path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                part.unlink()
            before = "the checkpoint before it is intact" if self.path.exists() else "there is none before it"
            raise LoadError(f"The checkpoint '{self.path}' cannot be written: {error}; {before}.") from error

    def load(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Load the weights and the optimizer; returns the state and the best weights. None if there is no file."""
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
                f"The checkpoint '{self.path}' cannot be read: {error}; remove it to start from the beginning."
            ) from error
        self._check(plan)
        optimizer_state: dict[int, dict[str, Tensor]] = {}
        with reading("The checkpoint", self.path):
            with torch.no_grad():
                for name, weight in trained_tensors(module).items():
                    weight.copy_(tensors[f"weights/{name}"])
            for name, tensor in tensors.items():
                if name.startswith("optimizer/"):
                    _, index, key = name.split("/")
                    optimizer_state.setdefault(int(index), {})[key] = tensor.cpu() if key == "step" else tensor
            if optimizer_state:
                groups = optimizer.state_dict()["param_groups"]
                optimizer.load_state_dict({"state": optimizer_state, "param_groups": groups})
        best = {name[len(_BEST) :]: tensor for name, tensor in tensors.items() if name.startswith(_BEST)}
        return state, best

    def _check(self, plan: Mapping[str, Any]) -> None:
        for name, value in self._plan.items():
            if plan.get(name) != value:
                raise InputError(
                    f"'{self.path.parent}' holds training with {name} = {plan.get(name)!r}, not {value!r}; give the "
                    "same to go on with it, or another --out to start from the beginning."
                )

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            self.path.unlink()


def trained_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The weights with gradients and the buffers, by name."""
    weights: dict[str, Tensor] = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    return {**weights, **dict(module.named_buffers())}
