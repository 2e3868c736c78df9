"""Generate with drafts and without: the same text in fewer forward passes of the model.

python examples/quick_start.py [MODEL]
"""

import sys

import paceline

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
prompt = "Repeat after me, twice: She sells sea shells by the sea shore."
settings = {"max_new_tokens": 48, "temperature": 0.8, "top_p": 0.95, "seed": 7}

lm = paceline.load(model)
fast = paceline.SpeculativeDecoder(lm)  # the drafter "auto" chooses the fastest drafts here
plain = paceline.SpeculativeDecoder(lm, draft=None)  # no drafts
print(fast)

out = fast.generate([{"role": "user", "content": prompt}], **settings)
same = plain.generate([{"role": "user", "content": prompt}], **settings)
print(out)
print(f"{out.stats.emitted} tokens in {out.stats.rounds} forward passes; plain decoding needs {same.stats.rounds}")
assert out.tokens == same.tokens
