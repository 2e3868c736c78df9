"""Hostile changes of a valid folder, by name. All of them are refused."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Change = Callable[[Path], None]


def _index(shard: Any, **more: Any) -> Change:
    """The weights are named by an index instead."""

    def change(folder: Path) -> None:
        weights = folder / "model.safetensors"
        header = weights.read_bytes()
        size = struct.unpack("<Q", header[:8])[0]
        names = [name for name in json.loads(header[8 : 8 + size]) if name != "__metadata__"]
        weights.rename(folder / "model-00001-of-00001.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, shard), **more}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def _config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def _text(name: str, text: str | bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return change


def _link(name: str, to: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.symlink(to, folder / name)

    return change


def _pickle(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(b"cos\nsystem\n(S'touch /tmp/hostile-was-here'\ntR.")

    return change


def _all(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


def _renamed(old: str, new: str) -> Change:
    def change(folder: Path) -> None:
        (folder / old).rename(folder / new)

    return change


_LLAMA = '{"model_type": "llama", '
_CODE = {"AutoConfig": "x.C", "AutoModelForCausalLM": "x.M"}
_TOKENIZER_CODE = '{"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["x.T", null]}}'
_NEO = [[["global"], 10**9]]
_PASSWD = _link("model-1.safetensors", "/etc/passwd")
_SINGLE = "model-00001-of-00001.safetensors"
_DEEP = "[" * 10**5
ATTACKS: dict[str, tuple[str, Change]] = {
    "index: above the folder": ("target", _index("../outside.safetensors")),
    "index: deep above": ("target", _index("../../../../../../etc/passwd")),
    "index: absolute": ("target", _index("/etc/passwd")),
    "index: absolute weights": ("target", _index("/tmp/x.safetensors")),
    "index: backslash": ("target", _index("..\\outside.safetensors")),
    "index: zero byte": ("target", _index("a\0.safetensors")),
    "index: dots": ("target", _index("..")),
    "index: empty name": ("target", _index("")),
    "index: a number": ("target", _index(5)),
    "index: a list": ("target", _index(["a"])),
    "index: null": ("target", _index(None)),
    "index: a pickle": ("target", _index("pytorch_model.bin")),
    "index: absent": ("target", _index("model-00002-of-00002.safetensors")),
    "index: long name": ("target", _index("x" * 10**5 + ".safetensors")),
    "index: map is a list": ("target", _index(_SINGLE, weight_map=["a"])),
    "index: map is a number": ("target", _index(_SINGLE, weight_map=7)),
    "index: map is empty": ("target", _index(_SINGLE, weight_map={})),
    "index: deep": ("target", _all(_index(_SINGLE), _text("model.safetensors.index.json", _DEEP))),
    "index: no JSON": ("target", _all(_index(_SINGLE), _text("model.safetensors.index.json", b"\xff\xfe"))),
    "index: no object": ("target", _all(_index(_SINGLE), _text("model.safetensors.index.json", "3"))),
    "link: weights to passwd": ("target", _link("model.safetensors", "/etc/passwd")),
    "link: weights to zero": ("target", _link("model.safetensors", "/dev/zero")),
    "link: weights to themselves": ("target", _link("model.safetensors", "model.safetensors")),
    "link: config to passwd": ("target", _link("config.json", "/etc/passwd")),
    "link: shard to passwd": ("target", _all(_index("model-1.safetensors"), _PASSWD)),
    "pickle: bin": ("target", _pickle("pytorch_model.bin")),
    "pickle: pt": ("target", _pickle("model.pt")),
    "pickle: as safetensors": ("target", _all(_pickle("a.bin"), _renamed("a.bin", "model.safetensors"))),
    "code: auto_map": ("target", _config(model_type="mine", auto_map=_CODE)),
    "config: 10^7 layers": ("target", _config(num_hidden_layers=10**7)),
    "config: 10^12 layers": ("target", _config(num_hidden_layers=10**12)),
    "config: layers as a list": ("target", _config(num_hidden_layers=[2])),
    "config: infinite layers": ("target", _config(num_hidden_layers=float("inf"))),
    "config: 500 layers": ("target", _config(num_hidden_layers=500)),
    "config: listed layers": ("target", _config(model_type="gpt_neo", num_layers=2, attention_types=_NEO)),
    "config: Qwen2 of 10^8 layers": ("target", _config(model_type="qwen2", num_hidden_layers=10**8, layer_types=None)),
    "config: 10^12 tokens": ("target", _config(vocab_size=10**12)),
    "config: 10^9 wide": ("target", _config(hidden_size=10**9)),
    "config: 10^6 wide": ("target", _config(hidden_size=10**6)),
    "config: 10^12 inside": ("target", _config(intermediate_size=10**12)),
    "config: 10^12 heads": ("target", _config(num_attention_heads=10**12)),
    "config: no heads": ("target", _config(num_attention_heads=0)),
    "config: 10^9 per head": ("target", _config(head_dim=10**9)),
    "config: negative": ("target", _config(vocab_size=-5)),
    "config: NaN": ("target", _config(vocab_size=float("nan"))),
    "config: a text": ("target", _config(hidden_size="wide")),
    "config: no type": ("target", _config(model_type=None)),
    "config: type is a list": ("target", _config(model_type=["llama"])),
    "config: unknown type": ("target", _config(model_type="x" * 10**5)),
    "config: GPT-J of 10^9 positions": ("target", _config(model_type="gptj", n_positions=10**9, rotary_dim=4)),
    "config: deep": ("target", _text("config.json", _DEEP)),
    "config: deep inside": ("target", _text("config.json", _LLAMA + '"a": ' + "[" * 900 + "]" * 900 + "}")),
    "config: a list": ("target", _text("config.json", "[]")),
    "config: empty": ("target", _text("config.json", "")),
    "config: no UTF-8": ("target", _text("config.json", b"\xff\xfe\x00")),
    "config: long number": ("target", _text("config.json", _LLAMA + '"vocab_size": ' + "9" * 10**5 + "}")),
    "tokenizer: no JSON": ("target", _text("tokenizer.json", "{")),
    "tokenizer: deep": ("target", _text("tokenizer.json", _DEEP)),
    "tokenizer: another thing": ("target", _text("tokenizer.json", '{"version": "1.0", "model": {"type": "BPE"}}')),
    "tokenizer: code": ("target", _text("tokenizer_config.json", _TOKENIZER_CODE)),
    "head: 10^12 wide": ("eagle", _config(width=10**12)),
    "head: 10^12 hidden": ("medusa", _config(hidden=10**12)),
    "head: 10^7 heads": ("medusa", _config(heads=10**7)),
    "head: 10^7 layers": ("prophet", _config(layers=10**7)),
    "head: 10^12 inside": ("prophet", _config(inner=10**12)),
    "head: 10^12 block": ("early-exit", _config(block=10**12)),
    "head: layers are a text": ("early-exit", _config(layers="one")),
    "head: target is huge": ("early-exit", _config(target={"hidden": 10**12, "vocabulary": 10**12})),
    "head: target is a list": ("eagle", _config(target=[])),
    "head: samples are a list": ("eagle", _config(target={"weights": [1]})),
    "head: samples are words": ("eagle", _config(target={"weights": {"a": "b c"}})),
    "head: 10^6 sources": ("draft-lm", _config(sources=[0] * 10**6)),
    "head: sources are words": ("draft-lm", _config(sources=["a"])),
    "head: no sources": ("draft-lm", _config(sources=None)),
    "head: kept 10^12": ("draft-lm", _config(kept=10**12)),
    "head: NaN taps": ("eagle", _config(taps=[float("nan")])),
    "head: unknown key": ("eagle", _config(more=1)),
    "head: unknown kind": ("eagle", _config(kind="x" * 1000)),
    "head: kind is a list": ("eagle", _config(kind=["eagle"])),
    "head: deep": ("eagle", _text("config.json", _DEEP)),
    "head: weights are a pickle": ("eagle", _text("model.safetensors", b"cos\nsystem\n(S'true'\ntR.")),
    "head: weights to passwd": ("eagle", _link("model.safetensors", "/etc/passwd")),
}  # fmt: skip
