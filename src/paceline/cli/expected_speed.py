"""The speed-up that the measured costs of forward passes allow: for `paceline doctor` and the start of a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.core.costs import Costs
    from paceline.engine.decoder import SpeculativeDecoder
    from paceline.models import LanguageModel

_GAMMA = 4  # drafted tokens in the computed speed-up
_RATES = (0.6, 0.8, 0.9)
_WIDTHS = (2, 4, 8, 16)


def costs_of(decoder: SpeculativeDecoder, look: Callable[[LanguageModel], Costs | None]) -> Costs | None:
    """Return the costs of the target, with a pass of the draft model as the draft step. look: `known_costs`, or
    `costs_for`, which measures unknown costs."""
    costs, small = look(decoder.target), getattr(decoder.drafter, "lm", None)
    drafts = None if costs is None or small is None else look(small)
    if costs is None or drafts is None:
        return costs
    # a draft step is a pass of the draft model
    return replace(costs, drafters={**costs.drafters, decoder.drafter.name: drafts.seconds(1)})


def expected(costs: Costs, name: str) -> tuple[str, dict[str, Any]]:
    """Return the speed-up that v(n) allows, as a sentence and as facts: (1-α^(γ+1))/(1-α) over v(γ+1) + γc."""
    widths = {n: round(costs.v(n), 2) for n in _WIDTHS}
    speeds = _speeds(costs, name)
    passes = ", ".join(f"v({n}) {value:.2f}" for n, value in widths.items())
    step = f"a draft step costs c {costs.c(name):.2f}" if name in costs.drafters else "drafts cost nothing"
    text = f"a pass over n tokens costs {passes} passes over one. If {step} and {_shares()} are accepted: "
    text += f"{_times(speeds)} times plain decoding"
    return text, {"v": widths, "expected": {str(rate): value for rate, value in speeds.items()}}


def expected_briefly(decoder: SpeculativeDecoder) -> str:
    """Return a line with the speed-up to expect here: what doctor measured, else what the costs of passes allow."""
    from paceline.models.pass_timing import known_costs

    ratio = measured_before(decoder)
    if ratio is not None:
        return f"expected speed-up {ratio:.2f}: what `paceline doctor` measured for one text"
    costs, name = costs_of(decoder, known_costs), decoder.drafter.name
    if costs is None:
        return "expected speed-up: not measured on this machine yet; `paceline doctor` measures it"
    most = "" if name in costs.drafters else "at most "
    speeds = _times(_speeds(costs, name))
    return f"expected speed-up {most}{speeds} if {_shares()} are accepted; `paceline doctor` measures it"


# ---- what doctor measured, kept for this machine, target and drafter


def _kept(decoder: SpeculativeDecoder) -> Path:
    from paceline.models.pass_timing import costs_key, kept_file

    return kept_file(costs_key(decoder.target), "-speed-up")


def keep_measured(decoder: SpeculativeDecoder, ratio: float) -> None:
    """Keep a measured speed-up."""
    from paceline.models.loading.disk_cache import read_json
    from paceline.models.pass_timing import keep

    path = _kept(decoder)
    keep(path, {**(read_json(path) or {}), decoder.describe(): ratio})


def measured_before(decoder: SpeculativeDecoder) -> float | None:
    """Return the kept speed-up of this decoder."""
    from paceline.models.loading.disk_cache import read_json

    ratio = (read_json(_kept(decoder)) or {}).get(decoder.describe())
    return float(ratio) if isinstance(ratio, (int, float)) else None


def _speeds(costs: Costs, name: str) -> dict[float, float]:
    from paceline.core.costs import bound

    return {rate: round(bound(rate, _GAMMA, costs, name), 2) for rate in _RATES}


def _shares() -> str:
    return f"{' / '.join(f'{rate:.0%}' for rate in _RATES)} of γ={_GAMMA} drafted tokens"


def _times(speeds: dict[float, float]) -> str:
    return " / ".join(f"{value:.1f}" for value in speeds.values())
