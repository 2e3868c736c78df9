"""Log runs to Weights & Biases. Without a key, runs stay on disk (offline)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from paceline.common.errors import UnsupportedError


def check_wandb() -> None:
    """Raise `UnsupportedError` if the package is missing. Call it before the work begins."""
    if find_spec("wandb") is None:
        raise UnsupportedError("--wandb needs the package 'wandb': pip install 'paceline[bench]'.")


def mode() -> Any:
    """Return the mode: WANDB_MODE if it is set, else online with a key, else offline."""
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
