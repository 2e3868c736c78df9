"""Stream tokens in colour: accepted drafts are green, the model's own tokens are blue.

python examples/stream.py [MODEL]
"""

import sys

import paceline

GREEN, BLUE, PLAIN = "\033[32m", "\033[34m", "\033[0m"

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
decoder = paceline.SpeculativeDecoder(model, draft="prompt-lookup", gamma=5)

stream = decoder.stream("Tom and Tim, Tom and Tim, Tom and", max_new_tokens=40, seed=3)
for piece in stream:
    print(f"{GREEN if piece.from_draft else BLUE}{piece.text}{PLAIN}", end="", flush=True)
print()
(result,) = stream.results
print(f"{result.stats.acceptance_rate:.0%} of {result.stats.drafted} drafted tokens were accepted")
