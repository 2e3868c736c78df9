"""Which cases of another project's suite do not apply to our server, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import pytest


def skip_what_does_not_apply(items: Iterable[pytest.Item], reasons: Mapping[str, str]) -> None:
    """Skip each case whose name matches a pattern. The first pattern that matches gives the reason; a case with
    an empty reason runs. The brackets of parameters are written as round ones."""
    for item in items:
        name = item.nodeid.replace("[", "(").replace("]", ")")
        reason = next((reason for pattern, reason in reasons.items() if fnmatchcase(name, f"*{pattern}")), None)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
