"""Change each constant of `auto` and `portfolio`, and compute the speed-up on recorded texts.

    python tools/policy_experiment.py record TEXTS.json          # SmolLM2 writes greedily on the built-in prompts
    python tools/policy_experiment.py table TEXTS.json           # each constant halved and doubled
    python tools/policy_experiment.py one TEXTS.json fade=0.96   # one variation, as a line of JSON

Nothing is timed. Forward passes cost what the table COSTS says. A clock that only this program moves prices the
drafters: a look-up costs LOOKUP passes, a step of a model costs STEP passes. So every machine gives the same figures.
The members are `suffix` with 4 branches, `prompt-lookup`, and a stand-in for a model. It drafts the recorded token with
a probability that depends on the text, from 0.5 to 0.9, and another token otherwise.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# v(n) of SmolLM2 in float32 on two CPU cores (docs/log.md, 2026-11-15), in passes over one token.
COSTS = {1: {1: 1.0, 2: 1.65, 3: 1.7, 4: 1.85, 8: 2.1, 16: 2.4, 32: 3.6, 64: 6.0}}
LOOKUP, STEP = 0.005, 0.3
TOKENS = 128
RATES = (0.5, 0.6, 0.7, 0.8, 0.9)
NOT_REPLAYED = (  # a replay never reaches these
    "lead_rounds", "lead_change",  # rules that compare distributions
    "graph_branch", "graph_width", "graph_nodes", "graph_tokens", "graph_depth",  # CUDA graphs
    "rest_below", "rest_after", "rest_window", "rest_skipped", "first_rest", "longest_rest",
)  # fmt: skip


class Clock:
    """A clock that moves by the price of a look-up between two readings, and by what is spent."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += LOOKUP / 2
        return self.now


def record(path: Path) -> None:
    """Write the greedy texts of SmolLM2 on the built-in prompts."""
    import paceline
    from paceline.bench.prompt_sets import builtin_objects

    decoder = paceline.SpeculativeDecoder(paceline.load("smollm2-135m"), draft=None, rows=8)
    prompts = builtin_objects()
    chats = [[{"role": "user", "content": prompt["turns"][0]}] for prompt in prompts]
    written = decoder.generate(chats, max_new_tokens=TOKENS)
    texts = [
        {"id": prompt["question_id"], "category": prompt["category"], "prompt": out.prompt_tokens, "tokens": out.tokens}
        for prompt, out in zip(prompts, written, strict=True)
    ]
    path.write_text(json.dumps({"model": "smollm2-135m", "vocabulary": decoder.target.vocabulary, "texts": texts}))


def vary(changes: dict[str, Any]) -> None:
    """Set constants. Modules compute tables from them when they are imported, so this loads the policy before them."""
    name = "paceline.drafters.adaptive.policy"
    spec = importlib.util.spec_from_file_location(name, ROOT / "src" / Path(*name.split(".")).with_suffix(".py"))
    assert spec is not None
    assert spec.loader is not None
    policy = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(policy)
    policy.POLICY = replace(policy.POLICY, **changes)


def speed_ups(path: Path, drafter: str) -> list[float]:
    """The speed-up over plain decoding on each text."""
    import torch

    from paceline.bench.replay import rerun
    from paceline.bench.trace_files import TraceHeader, TraceText
    from paceline.core.contracts import Budget, RowsView
    from paceline.core.costs import Costs
    from paceline.core.protocols import RunsModel
    from paceline.core.tree import TokenTree
    from paceline.drafters.resolve import make_drafter
    from paceline.rules.match import Match

    clock = Clock()
    time.perf_counter = clock
    costs = Costs(COSTS)

    class StandIn(RunsModel):
        """Drafts the recorded text with mistakes."""

        name, prior_acceptance = "stand-in", 0.7

        def __init__(self, tokens: Sequence[int], prompt: int, rate: float) -> None:
            self._tokens, self._prompt, self._rate = tokens, prompt, rate

        def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
            clock.now += STEP * budget.depth
            at = rows.lengths[0] - self._prompt
            chain = [
                (token if (7919 * (at + i) + 104729) % 1000 < 1000 * self._rate else token + 1) % 49152
                for i, token in enumerate([*self._tokens, *[0] * budget.depth][at : at + budget.depth])
            ]
            return TokenTree.from_chains([chain], torch.device("cpu"))

    found = json.loads(path.read_text())
    header = TraceHeader(found["model"], found["vocabulary"], "", "none")
    results = []
    for number, entry in enumerate(found["texts"]):
        tokens = tuple(entry["tokens"])
        text = TraceText(entry["id"], entry["category"], tuple(entry["prompt"]), tokens, len(tokens))
        model = StandIn(tokens, len(text.prompt), RATES[number % len(RATES)])
        options: dict[str, Any] = {"drafters": (("suffix", {"branches": 4}), "prompt-lookup", model)}
        if drafter == "auto":
            options["costs"] = costs
        before = clock.now
        trace = rerun(text, header, make_drafter(drafter, options), Match(), 8, 16)
        passes = sum(costs.seconds(1 + len(entry.drafted)) for entry in trace.rounds)
        results.append(len(tokens) / (passes + clock.now - before))
    return results


def one(path: Path, changes: dict[str, Any]) -> dict[str, Any]:
    vary(changes)
    found: dict[str, Any] = {}
    for drafter in ("auto", "portfolio"):
        each = speed_ups(path, drafter)
        found[drafter] = {"mean": sum(each) / len(each), "least": min(each), "slower": sum(x < 0.985 for x in each)}
    return found


def scaled(value: Any, factor: float, name: str) -> Any:
    """A value of the same kind. A share that fades towards 1 keeps its distance to 1 times the factor."""
    if name.endswith("fade"):
        return 1 - (1 - value) * factor
    if isinstance(value, tuple):
        return tuple(scaled(each, factor, "") for each in value)
    if isinstance(value, int):
        return max(1, round(value * factor))
    return min(value * factor, 0.98) if 0 < value < 1 else value * factor


def table(path: Path) -> None:
    from paceline.drafters.adaptive.policy import Policy

    def run(changes: dict[str, Any]) -> dict[str, Any]:
        command = [sys.executable, __file__, "one", str(path), *(f"{k}={json.dumps(v)}" for k, v in changes.items())]
        return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))

    def shown(found: dict[str, Any]) -> str:
        return f"{found['mean']:.3f} ({found['least']:.2f}, {found['slower']})"

    base = run({})
    print("| constant | value | halved: `auto` | doubled: `auto` | halved: `portfolio` | doubled: `portfolio` |")
    print("|---|---|---|---|---|---|")
    print(f"| as it is | | {shown(base['auto'])} | | {shown(base['portfolio'])} | |", flush=True)
    for constant in fields(Policy):
        if constant.name in NOT_REPLAYED:
            continue
        low, high = (run({constant.name: scaled(constant.default, factor, constant.name)}) for factor in (0.5, 2.0))
        cells = [shown(found[drafter]) for drafter in ("auto", "portfolio") for found in (low, high)]
        print(f"| `{constant.name}` | {constant.default} | {' | '.join(cells)} |", flush=True)


def main(arguments: list[str]) -> None:
    command, path = arguments[0], Path(arguments[1])
    if command == "record":
        record(path)
    elif command == "table":
        table(path)
    else:
        changes = {name: json.loads(value) for name, value in (each.split("=") for each in arguments[2:])}
        print(json.dumps(one(path, {k: tuple(v) if isinstance(v, list) else v for k, v in changes.items()})))


if __name__ == "__main__":
    main(sys.argv[1:])
