"""Record the origin of a result: versions, machine, commit, arguments. Log results to Weights & Biases."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.common.errors import UnsupportedError
from paceline.models.device import device_name, package_version


def provenance(arguments: Mapping[str, Any], device: torch.device | None = None) -> dict[str, Any]:
    """Return the versions, the machine, the commit and the arguments of a result, as a dict for JSON."""
    device = device or torch.device("cpu")
    found: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "paceline": __version__,
            "python": platform.python_version(),
            **{name: package_version(name) for name in ("torch", "transformers", "numpy", "numba")},
        },
        "platform": platform.platform(),
        "cpu": device_name(torch.device("cpu")),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "arguments": json.loads(json.dumps(dict(arguments), default=str)),  # JSON has lists, no tuples
    }
    if device.type == "cuda":
        found["gpu"] = device_name(device)
        found["driver"] = of_the_card("driver_version", device)
    return {**found, **_commit()}


def _commit() -> dict[str, Any]:
    """Return the commit of the checkout, and whether its files differ from it."""
    folder = Path(__file__).resolve().parents[1]
    head = _output(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if head is None:
        return {"commit": None}
    changed = _output(["git", "-C", str(folder), "status", "--porcelain", "--", str(folder)])
    return {"commit": head, "dirty": None if changed is None else bool(changed)}


def of_the_card(what: str, device: torch.device) -> str | None:
    """Return one value of `nvidia-smi` for a device, or None without that program, which numbers all GPUs."""
    place, visible = device.index or 0, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    card = visible[place] if visible[0] and place < len(visible) else str(place)
    return _output(["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits", f"--id={card}"])


def _output(command: list[str]) -> str | None:
    """Return the output of a program, or None if it does not exist or fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


# ---- Weights & Biases


def check_wandb() -> None:
    """Raise `UnsupportedError` if the package is missing. Call it before the work begins."""
    if find_spec("wandb") is None:
        raise UnsupportedError("--wandb needs the package 'wandb': pip install 'paceline[bench]'.")


def mode() -> Any:
    """Return the mode of Weights & Biases: WANDB_MODE if it is set, else "online" with a key, else "offline"."""
    chosen = os.environ.get("WANDB_MODE")
    if chosen:
        return chosen
    import wandb

    return "online" if wandb.api.api_key else "offline"


def start(kind: str, config: Mapping[str, Any], folder: Any = None, project: str = "paceline") -> Any:
    """Start and return a run. The caller finishes it."""
    check_wandb()
    import wandb

    settings = wandb.Settings(silent=True, console="off")
    where = None if folder is None else str(folder)
    return wandb.init(project=project, job_type=kind, config=dict(config), mode=mode(), dir=where, settings=settings)
