"""What sharing the target's noise is worth to each drafter with logits, on the suite's tiny Llama at temperature 0.8.

python -m tests.conformance.coupling
"""

from __future__ import annotations

from typing import Any

from paceline import SpeculativeDecoder
from paceline.rules.match import Match

from .models import draft, target

PROMPTS = [[token] for token in range(3, 27)]


class Argmax(Match):
    """`match`, with drafts that take their likeliest token instead of the target's noise."""

    draw = "certain"


def acceptance(name: str, options: dict[str, Any], rule: Any) -> float:
    decoder = SpeculativeDecoder(target("llama"), name, options=options, gamma=4, rule=rule)
    seeds = list(range(len(PROMPTS)))
    outs = decoder.generate(PROMPTS, max_new_tokens=24, temperature=0.8, seed=seeds, ignore_eos=True)
    return sum(out.stats.accepted for out in outs) / sum(out.stats.drafted for out in outs)


def main() -> None:
    close = draft("llama", "close")
    runs: dict[str, dict[str, Any]] = {
        "draft-model": {"model": close},
        "staged": {"model": close, "inner": "prompt-lookup"},
        "cross-vocabulary": {"model": close, "mode": "intersection"},
        "early-exit": {},
        "self-quantized": {},
    }
    for name, options in runs.items():
        coupled, argmax, ratio = (acceptance(name, options, rule) for rule in (Match(), Argmax(), "ratio"))
        print(f"{name:18} coupled {coupled:.3f}  argmax {argmax:.3f}  ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
