"""Write a drafter in a few lines. A drafter changes the speed and never the text.

python examples/own_drafter.py [MODEL]
"""

import sys
from dataclasses import dataclass

import paceline


@paceline.DRAFTERS.register("repeat-last")
class RepeatLast(paceline.Drafter):
    """Propose the last tokens of the text again."""

    @dataclass(frozen=True)
    class Options:
        size: int = 4

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()

    def propose(self, rows, budget: paceline.Budget) -> paceline.TokenTree:
        sizes = [min(self.options.size, limit, budget.depth) for limit in budget.limits]
        chains = [text[-size:] if size > 0 else [] for text, size in zip(rows.histories, sizes, strict=True)]
        return paceline.TokenTree.from_chains(chains, "cpu")


model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
lm = paceline.load(model)
decoder = paceline.SpeculativeDecoder(lm, "repeat-last", options={"size": 3})
plain = paceline.SpeculativeDecoder(lm, draft=None)
out = decoder.generate("ha ha ha ha ha ha", max_new_tokens=24)
print(repr(out))
assert out.tokens == plain.generate("ha ha ha ha ha ha", max_new_tokens=24).tokens
