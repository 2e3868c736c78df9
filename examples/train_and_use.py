"""Train a small drafter on texts that the model writes itself, then use it.

python examples/train_and_use.py [MODEL] [FOLDER] [TOKENS]
"""

import sys

import paceline
from paceline.training.train_options import TrainOptions
from paceline.training.train_run import train

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
folder = sys.argv[2] if len(sys.argv) > 2 else "my-trigram"
tokens = int(sys.argv[3]) if len(sys.argv) > 3 else 20_000

# kind="eagle" or "medusa" trains a neural head in the same way; it takes longer and drafts better
trained = train(TrainOptions(target=model, kind="trigram", out=folder, tokens=tokens, question=16, answer=48, rows=8))

drafter = paceline.load_drafter(trained)
decoder = paceline.SpeculativeDecoder(model, drafter, gamma=3)
print(decoder)
print(repr(decoder.generate("Once upon a time", max_new_tokens=32)))
