"""Damaged files, by seed: the same number gives the same bytes."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable

Damage = Callable[[bytes, random.Random], bytes]
HUGE = (2**63, 2**63 - 1, 2**64 - 1, 2**62, 2**40, 2**32, 10**12, 10**7, 0)


# ---- any file


def some_bytes(data: bytes, rng: random.Random, start: int, stop: int) -> bytes:
    found = bytearray(data)
    for _ in range(rng.choice((1, 2, 8, 64))):
        found[rng.randrange(start, stop)] = rng.randrange(256)
    return bytes(found)


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.choice((rng.randrange(64), rng.randrange(len(data)), len(data) - rng.randrange(1, 64)))]


def shifted(data: bytes, rng: random.Random) -> bytes:
    """Bytes left out, put in, or set to zero."""
    at, size = rng.randrange(len(data)), rng.choice((1, 7, 64, 1000))
    kind = rng.randrange(3)
    if kind == 0:
        return data[:at] + data[at + size :]
    if kind == 1:
        return data[:at] + rng.randbytes(size) + data[at:]
    return data[:at] + bytes(min(size, len(data) - at)) + data[at + size :]


# ---- GGUF


def patched(data: bytes, at: int, code: str, value: int) -> bytes:
    size = struct.calcsize("<" + code)
    return data[:at] + struct.pack("<" + code, value & (256**size - 1)) + data[at + size :]


def _tensor_place(data: bytes, rng: random.Random) -> tuple[int, int]:
    """Where a tensor of the table says its dimensions, and how many there are."""
    names = [
        b"token_embd.weight",
        b"output.weight",
        b"blk.0.attn_q.weight",
        b"blk.1.ffn_up.weight",
        b"output_norm.weight",
    ]
    name = rng.choice(names)
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    return at, struct.unpack_from("<I", data, at)[0]


def gguf_counts(data: bytes, rng: random.Random) -> bytes:
    return patched(data, rng.choice((8, 16)), "Q", rng.choice(HUGE))


def gguf_key(data: bytes, rng: random.Random) -> bytes:
    """A size in the metadata is false."""
    keys = ("block_count", "embedding_length", "feed_forward_length", "context_length", "vocab_size",
            "attention.head_count", "attention.head_count_kv")  # fmt: skip
    key = f"llama.{rng.choice(keys)}".encode()
    at = data.index(struct.pack("<Q", len(key)) + key) + 8 + len(key)
    if rng.randrange(4) == 0:
        return patched(data, at, "I", rng.randrange(14))  # of another type
    return patched(data, at + 4, "I", rng.choice((10**7, 2**32 - 1, 2**31, 0, 1, 3, 300, 10**5)))


def gguf_array(data: bytes, rng: random.Random) -> bytes:
    keys = (b"tokenizer.ggml.tokens", b"tokenizer.ggml.merges", b"tokenizer.ggml.token_type", b"tokenizer.ggml.scores")
    key = rng.choice([key for key in keys if key in data])
    at = data.index(key) + len(key)
    if rng.randrange(3) == 0:
        return patched(data, at + 4, "I", rng.randrange(14))
    return patched(data, at + 8, "Q", rng.choice((*HUGE, 1, 100)))


def gguf_token_id(data: bytes, rng: random.Random) -> bytes:
    key = f"tokenizer.ggml.{rng.choice(('bos', 'eos', 'unknown'))}_token_id".encode()
    at = data.index(key) + len(key)
    return patched(data, at + rng.choice((0, 4)), "I", rng.choice((2**32 - 1, 10**6, 8, 7)))


def gguf_tensor(data: bytes, rng: random.Random) -> bytes:
    at, dims = _tensor_place(data, rng)
    kind = rng.randrange(4)
    if kind == 0:
        return patched(data, at, "I", rng.choice((0, 3, 5, 2**32 - 1, 1)))  # number of dimensions
    if kind == 1:
        return patched(data, at + 4 + 8 * rng.randrange(dims), "Q", rng.choice((*HUGE, 31, 33)))  # one of them
    if kind == 2:
        return patched(data, at + 4 + 8 * dims, "I", rng.choice((2**32 - 1, *range(42))))  # how it is stored
    return patched(data, at + 8 + 8 * dims, "Q", rng.choice((*HUGE, 1, 32)))  # where it begins


def gguf_twins(data: bytes, rng: random.Random) -> bytes:
    """A name twice: of a tensor, or of a key."""
    if rng.randrange(2):
        return data.replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight", 1)
    return data.replace(b"llama.context_length", b"llama.vocab_size\0\0\0\0", 1).replace(
        b"tokenizer.ggml.eos_token_id", b"tokenizer.ggml.bos_token_id", 1
    )


def gguf_text(data: bytes, rng: random.Random) -> bytes:
    """The length of a text is false, or its letters are no UTF-8."""
    at = data.index(rng.choice((b"general.architecture", b"tokenizer.ggml.model", b"llama.block_count"))) - 8
    return patched(data, at, "Q", rng.choice(HUGE)) if rng.randrange(2) else data[: at + 10] + b"\xff" + data[at + 11 :]


def gguf_header(data: bytes, rng: random.Random) -> bytes:
    return some_bytes(data, rng, 0, data.index(b"token_embd.weight") + 2000)


def gguf_body(data: bytes, rng: random.Random) -> bytes:
    return some_bytes(data, rng, len(data) // 2, len(data))


GGUF: tuple[Damage, ...] = (
    gguf_header, gguf_body, cut, gguf_counts, gguf_key, gguf_array, gguf_token_id, gguf_tensor, gguf_twins, gguf_text,
    shifted, gguf_header, gguf_key, gguf_tensor,
)  # fmt: skip


# ---- safetensors


def _parted(data: bytes) -> tuple[bytes, bytes]:
    size = int.from_bytes(data[:8], "little")
    return data[8 : 8 + size], data[8 + size :]


def _joined(header: bytes, body: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + body


def st_header(data: bytes, rng: random.Random) -> bytes:
    return some_bytes(data, rng, 0, 8 + len(_parted(data)[0]))


def st_body(data: bytes, rng: random.Random) -> bytes:
    return some_bytes(data, rng, 8 + len(_parted(data)[0]), len(data))


def st_length(data: bytes, rng: random.Random) -> bytes:
    return struct.pack("<Q", rng.choice((*HUGE, 1, 7, len(data), 10**8))) + data[8:]


def st_tensor(data: bytes, rng: random.Random) -> bytes:
    """One entry of the header is false."""
    text, body = _parted(data)
    header = json.loads(text)
    name = rng.choice(sorted(name for name in header if name != "__metadata__"))
    about = header[name]
    start, stop = about["data_offsets"]
    kind = rng.randrange(6)
    if kind == 0:
        about["dtype"] = rng.choice(("F64", "BF16", "F16", "I64", "U8", "BOOL", "F8_E4M3", "C64", "", "F33", None, 5))
    elif kind == 1:
        about["shape"] = rng.choice(
            ([10**12], [0], [], [-1], [1.5], "big", None, [2**63, 2], [2**32, 2**32], [len(body)], [10**18, 0])
        )
    elif kind == 2:
        about["data_offsets"] = rng.choice(
            ([0, stop - start], [stop, start], [start, 2**63], [-8, 8], [start], None, [start, stop + 1], [2**62] * 2)
        )
    elif kind == 3:
        del about[rng.choice(sorted(about))]
    elif kind == 4:
        header[rng.choice((name + "x", "", "x" * 5000, "../../x"))] = header.pop(name)
    else:
        header[name] = rng.choice((5, [], None, "x", {"shape": [1]}, header["__metadata__"]))
    return _joined(json.dumps(header).encode(), body)


def st_overlap(data: bytes, rng: random.Random) -> bytes:
    """Every tensor of a shape lies on the same bytes; or hundreds more do."""
    text, body = _parted(data)
    header = json.loads(text)
    first = next(name for name in header if name != "__metadata__")
    for number in range(rng.choice((1, 500))):
        header[f"more.{number}"] = header[first]
    return _joined(json.dumps(header).encode(), body)


def st_twins(data: bytes, rng: random.Random) -> bytes:
    """A key twice."""
    text, body = _parted(data)
    header = json.loads(text)
    name = rng.choice(sorted(name for name in header if name != "__metadata__"))
    again = json.dumps({name: {**header[name], "shape": [1]}})[1:]
    return _joined(text.rstrip()[:-1] + b"," + again.encode(), body)


def st_deep(data: bytes, rng: random.Random) -> bytes:
    _, body = _parted(data)
    text = rng.choice(
        (b"[" * 10**5, b'{"a":' * 10**5, b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}", b"null", b"", b"[]")
    )
    return _joined(text, body)


def st_about(data: bytes, rng: random.Random) -> bytes:
    """What a file says of itself."""
    text, body = _parted(data)
    header = json.loads(text)
    found = header.get("__metadata__") or {"format": "pt"}
    key = rng.choice(sorted(found))
    found[key] = rng.choice(
        ("", "{}", "[]", "-1", str(10**18), '{"vocabulary": 1000000000000}', "[" * 10**5, "NaN", "[5]")
    )
    header["__metadata__"] = found if rng.randrange(4) else rng.choice(({}, [], 5, {"a": 1}))
    return _joined(json.dumps(header).encode(), body)


SAFETENSORS: tuple[Damage, ...] = (
    st_header, st_body, cut, st_length, st_tensor, st_overlap, st_twins, st_deep, shifted, st_about, st_tensor,
)  # fmt: skip


def damaged(data: bytes, kinds: tuple[Damage, ...], number: int) -> tuple[str, bytes]:
    """The name of a damage, and the file that has it."""
    chosen = kinds[number % len(kinds)]
    return chosen.__name__, chosen(data, random.Random(f"{chosen.__name__} {number}"))
