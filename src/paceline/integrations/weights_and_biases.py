"""Weights & Biases, where it is installed; without a key, or where it is told so, on disk (offline)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from paceline.common.errors import UnsupportedError


def check_wandb() -> None:
    """Refuse now what would be refused after an hour of work."""
    if find_spec("wandb") is None:
        raise UnsupportedError("--wandb needs the package 'wandb': pip install 'paceline[bench]'.")


def mode() -> Any:
    """What the environment says; else offline without a key, for nobody is there to be asked for one."""
    said = os.environ.get("WANDB_MODE")
    if said:
        return said
    import wandb

    return "online" if wandb.api.api_key else "offline"


def start(kind: str, config: Mapping[str, Any], folder: Any = None, project: str = "paceline") -> Any:
    """A run; whoever starts one finishes it."""
    check_wandb()
    import wandb

    settings = wandb.Settings(silent=True, console="off")
    where = None if folder is None else str(folder)
    return wandb.init(project=project, job_type=kind, config=dict(config), mode=mode(), dir=where, settings=settings)
