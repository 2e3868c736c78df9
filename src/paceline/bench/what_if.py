"""Replay one text of a server with another drafter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.bench.candidate import RunSpec
from paceline.bench.replay import replay
from paceline.bench.trace_files import TraceFile, TraceHeader, TraceText
from paceline.core.contracts import DRAFTERS


def what_if(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what another drafter would have given on a text: its rounds, if they are known exactly, else the reason.

    given: `prompt`, `tokens`, `seed`, `temperature`, `limit`, `finish` and `constrained` of the text; `draft`,
    `options`, `gamma` and `nodes` of the other drafter; `model`, `vocabulary` and `eos` of the target.
    """
    entry = RunSpec(given["draft"], given["draft"], given["options"], given["gamma"], given["nodes"])
    if given["draft"] not in DRAFTERS:
        return {"knows": "unknown", "reason": f"drafter '{given['draft']}' is of the playground only", "rounds": None}
    header = TraceHeader(
        given["model"], given["vocabulary"], "", "none", processors=int(given["constrained"]),
        sampling={} if given["temperature"] == 0 else {"temperature": given["temperature"]}, eos=tuple(given["eos"]),
    )  # fmt: skip
    tokens = tuple(given["tokens"])
    text = TraceText("text", "", tuple(given["prompt"]), tokens, given["limit"], given["finish"], given["seed"])
    answer = replay(TraceFile(header, (text,)), entry)
    if not answer.texts:
        return {"knows": answer.knows, "reason": answer.reason, "rounds": None}
    tally = answer.tally()
    return {
        "knows": answer.knows,
        "reason": "",
        "tau": tally.tau,
        "acceptance_rate": tally.acceptance_rate,
        "drafted": tally.drafted,
        "rounds": [
            {"drafted": list(each.drafted), "accepted": list(each.path),
             "parents": None if each.parents is None else list(each.parents), "own": each.own, "bonus": each.bonus}
            for each in answer.texts[0].rounds or ()
        ],
    }  # fmt: skip
