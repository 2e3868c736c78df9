"""Write the files of this folder into the current folder, with the version of Paceline on PYTHONPATH (see README.md).

The script uses public names and the command line only, so that every version can run it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import paceline

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,!"
DATA = "the cat sat on the mat. the dog sat on the log.\n" * 60
PROMPTS = ["the cat sat on the mat. the dog", "on the log. the cat"]
DTYPES = {"eagle": "bfloat16", "medusa": "int8", "prophet": "float32", "early-exit": "bfloat16", "draft-lm": "int8"}
OPTIONS = {
    "eagle": ["vocabulary=20", "steps=2"], "medusa": ["heads=2"], "prophet": ["layers=1"], "early-exit": ["layers=1"],
    "draft-lm": ["layers=1"], "trigram": [],
}  # fmt: skip
CONFIG = """\
[decoder]
target = "target"
draft = "prompt-lookup"
gamma = 4
rule = "match"
dtype = "float64"
runner = "eager"

[decoder.drafter]
longest = 3

[generate]
max-new-tokens = 12
temperature = 0.5
seed = 3

[chat]
temperature = 0.7

[bench]
run = ["suffix", "ngram:gamma=8"]
repeats = 2

[tune]
gammas = "3,5"

[train]
kind = "medusa"
learning-rate = 0.001

[audit]
samples = 64
"""


def paceline_command(*args: str) -> str:
    """Run the command line and return its standard output."""
    command = [sys.executable, "-m", "paceline", *args]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def rounds_of(draft: Any, **more: Any) -> list[list[Any]]:
    """What the drafter proposed and what was accepted, for every round of every prompt."""
    lm = paceline.load("target", dtype="float64", runner="eager")
    decoder = paceline.SpeculativeDecoder(lm, draft=draft, gamma=3, **more)
    results = decoder.generate(PROMPTS, max_new_tokens=16)
    return [[list(entry.drafted), list(entry.path)] for result in results for entry in result.trace.rounds]


def write_target() -> None:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=96, initializer_range=0.4, eos_token_id=None, bos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(shape).bfloat16().save_pretrained("target")
    tokens = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token=LETTERS[-1]))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokens.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokens).save_pretrained("target")


def train_args(kind: str, out: str, **more: Any) -> list[str]:
    flags = {"target": "target", "kind": kind, "out": out, "dtype": "float32", "device": "cpu", "length": 48,
             "batch": 256, "held-out": 4, "measure": 0, **more}  # fmt: skip
    options = [word for option in OPTIONS[kind] for word in ("--option", option)]
    return [
        "train",
        "--no-predict",
        *options,
        *(word for name, value in flags.items() for word in (f"--{name}", str(value))),
    ]


def write_heads(expected: dict[str, Any]) -> None:
    Path("data.txt").write_text(DATA)
    for kind in OPTIONS:
        out = f"heads/{kind}"
        dtype = DTYPES.get(kind, "float32")
        paceline_command(*train_args(kind, out, data="data.txt", texts="texts", steps=30, numbers=dtype,
                                     **{"learning-rate": 0.02}))  # fmt: skip
        for name in ("training.jsonl", "README.md"):
            (Path(out) / name).unlink(missing_ok=True)
        expected["heads"][kind] = rounds_of(out)
    shutil.rmtree("texts")
    Path("data.txt").unlink()


def write_checkpoint(expected: dict[str, Any]) -> None:
    """A training that is interrupted as soon as it has a checkpoint. `train_args` must be the same when it goes on."""
    args = train_args("medusa", "checkpoint", tokens=1000, answer=24, question=8, shard=32,
                      rows=16, steps=100_000, evaluate=20)  # fmt: skip
    process = subprocess.Popen([sys.executable, "-m", "paceline", *args])
    while not Path("checkpoint/checkpoint.safetensors").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.wait()
    expected["checkpoint"] = args


def write_stores(expected: dict[str, Any]) -> None:
    lm = paceline.load("target", dtype="float64", runner="eager")
    for name, options in (("ngram", {"order": 4}), ("recycling", {"k": 4})):
        decoder = paceline.SpeculativeDecoder(lm, draft=name, options={"persistent": True, **options})
        decoder.generate(PROMPTS, max_new_tokens=24)
        decoder.drafter.save(f"{name}.safetensors")
    expected["ngram"] = rounds_of("ngram", options={"store": "ngram.safetensors", "order": 4})
    again = paceline.SpeculativeDecoder(lm, draft="recycling", gamma=3, options={"persistent": True, "k": 4})
    again.drafter.load("recycling.safetensors")
    results = again.generate(PROMPTS, max_new_tokens=16)
    expected["recycling"] = [
        [list(entry.drafted), list(entry.path)] for result in results for entry in result.trace.rounds
    ]


def write_bench(expected: dict[str, Any]) -> None:
    Path("prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    shared = ["--target", "target", "--runner", "eager", "--device", "cpu", "--prompts", "prompts.txt"]
    paceline_command("bench", *shared, "--run", "suffix", "--run", "heads/medusa:gamma=2", "--max-new-tokens", "20",
                     "--repeats", "2", "--memory", "--layers", "--force", "--out", "bench",
                     "--trace", "trace.jsonl")  # fmt: skip
    paceline_command("generate", PROMPTS[0], "--target", "target", "--draft", "suffix", "--runner", "eager",
                     "--max-new-tokens", "20", "--seed", "5", "--temperature", "0.8",
                     "--trace", "generated.jsonl")  # fmt: skip
    shutil.move("bench/bench.jsonl", "bench.jsonl")
    shutil.rmtree("bench")
    paceline_command("bench", "--report", "bench.jsonl", "--csv", "bench.csv")  # the figures that follow from the file
    for trace in ("trace.jsonl", "generated.jsonl"):
        text = paceline_command(
            "bench", "--replay", trace, "--run", "suffix:gamma=8", "--run", "prompt-lookup", "--json"
        )
        expected["replay"][trace] = [json.loads(line) for line in text.splitlines()]
    paceline_command("tune", *shared, "--only", "--candidate", "suffix:gamma=3,branches=2", "--tokens", "16",
                     "--repeats", "1", "--out", "tuned.toml")  # fmt: skip
    Path("prompts.txt").unlink()


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    expected: dict[str, Any] = {"heads": {}, "replay": {}}
    write_target()
    write_heads(expected)
    write_checkpoint(expected)
    write_stores(expected)
    write_bench(expected)
    Path("config.toml").write_text(CONFIG)
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
