"""Run a pass as it is: exact shapes, no compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class EagerRunner:
    """The plain runner: works everywhere, and is what the others are tested against."""

    def __call__(self, run: Callable[[Any, dict[str, Any]], Any], model: Any, inputs: dict[str, Any]) -> Any:
        return run(model, inputs)
