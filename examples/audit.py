"""Test whether a decoder is lossless on this machine. The exit code is for CI: 0 is lossless.

python examples/audit.py [MODEL]
"""

import sys

import paceline
from paceline.audit import audit

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
decoder = paceline.SpeculativeDecoder(model, "prompt-lookup", rows=32)
report = audit(decoder, ["Once upon a time", "one two one two one"], tokens=16, samples=200, positions=1)
print(report.verdict)
sys.exit(report.exit_code)
