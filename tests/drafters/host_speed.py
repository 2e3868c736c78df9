"""How long the drafters on the host take: `python -m tests.drafters.host_speed` prints a table (on a quiet machine)."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from tests.drafters.texts import HandRows

from paceline import Budget, Drafter
from paceline.drafters.lookup.ngram import Ngram
from paceline.drafters.lookup.prompt_lookup import PromptLookup
from paceline.drafters.lookup.suffix import Suffix

GAMMA = 10
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "prompt-lookup": PromptLookup,
    "ngram": Ngram,
    "suffix": Suffix,
    "suffix, 3 branches": lambda: Suffix(Suffix.Options(branches=3)),
    "ngram, 3 branches": lambda: Ngram(Ngram.Options(branches=3)),
}


@dataclass(frozen=True)
class Speed:
    """Microseconds: of a proposal (median), and of learning one token (mean)."""

    propose: float
    learn: float
    drafted: float  # tokens per proposal


def words(count: int, seed: int = 0) -> list[int]:
    """Something like a text: frequent and rare words, phrases that come back."""
    dice = random.Random(seed)
    text: list[int] = []
    while len(text) < count:
        if text and dice.random() < 0.4:
            start = dice.randrange(len(text))
            text += text[start : start + dice.randint(2, 12)]
        else:
            text += [int(dice.paretovariate(0.8)) % 49152 for _ in range(dice.randint(1, 6))]
    return text[:count]


def measure(make: Callable[[], Drafter], context: int, rounds: int = 300) -> Speed:
    """One row of `context` tokens; between proposals it grows by a token, learnt before the clock runs."""
    text = words(context + rounds)
    drafter = make()
    rows = HandRows([text[:context]])
    drafter.open(None, rows)
    drafter.admit(rows, 0)
    budget, nothing = Budget(GAMMA, 64, (GAMMA,)), Budget(GAMMA, 64, (0,))
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        drafter.propose(rows, nothing)  # learns the whole text, drafts nothing
        learn = (time.perf_counter() - start) / context
        times, drafted = [], 0
        for token in text[context:]:
            rows.histories[0].append(token)
            drafter.propose(rows, nothing)
            start = time.perf_counter()
            tree = drafter.propose(rows, budget)
            times.append(time.perf_counter() - start)
            drafted += tree.nodes
    finally:
        gc.enable()
    return Speed(1e6 * median(times), 1e6 * learn, drafted / rounds)


def main() -> None:
    print(f"{'drafter':<20} {'context':>8} {'propose µs':>11} {'learn µs/token':>15} {'drafted':>8}")
    for name, make in DRAFTERS.items():
        for context in (1_000, 4_000, 16_000):
            speed = measure(make, context)
            print(f"{name:<20} {context:>8} {speed.propose:>11.1f} {speed.learn:>15.2f} {speed.drafted:>8.1f}")


if __name__ == "__main__":
    main()
