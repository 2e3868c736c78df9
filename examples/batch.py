"""Decode several prompts in one batch, each with its own settings.

python examples/batch.py [MODEL]
"""

import sys

import paceline

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
decoder = paceline.SpeculativeDecoder(model, draft="suffix", rows=8)  # at most eight prompts in a batch
prompts = ["The capital of France is", "One, two, three, one, two, three,", "def add(a, b):"]

results = decoder.generate(
    prompts,
    max_new_tokens=[8, 24, 32],  # a list holds one value per prompt
    temperature=[0.0, 0.0, 0.7],
    stop=[["."], None, ["\n\n"]],
    seed=1,
)
for prompt, result in zip(prompts, results, strict=True):
    print(f"{prompt!r} -> {result!r}")
