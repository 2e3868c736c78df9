"""Run a pass as it is: exact shapes, no compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from paceline.models.runners.device import without_planned_attention


class EagerRunner:
    """The plain runner: works everywhere, and is what the others are tested against."""

    def __call__(self, run: Callable[[Any, dict[str, Any]], Any], model: Any, inputs: dict[str, Any]) -> Any:
        if any(isinstance(given, Tensor) and given.is_cuda for given in inputs.values()):
            with without_planned_attention():
                return run(model, inputs)
        return run(model, inputs)
