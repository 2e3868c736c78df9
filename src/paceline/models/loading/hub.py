"""Weights from the Hugging Face hub: only the files that are needed, never a pickle, a fast answer when offline."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, errors, snapshot_download, utils
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers.utils import logging

from paceline.common.errors import LoadError, in_one_line
from paceline.models.loading.disk_cache import Progress
from paceline.models.loading.weight_check import INDEX, link_problem, shards_of

_PATIENCE = 5.0  # seconds for the first answer: a network that drops packets must not look like a hang
_TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_WEIGHT_FILES = ["model.safetensors", "model-*.safetensors", "medusa_lm_head.safetensors"]
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@contextmanager
def quiet() -> Iterator[None]:
    """Let transformers and the hub show no bars, no warnings and no log lines below errors inside the context."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_bars = not utils.are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # switches the hub's bars too
        if hub_bars and not bars:
            utils.enable_progress_bars()
        elif bars and not hub_bars:
            utils.disable_progress_bars()


class HubError(Exception):
    """Why the hub gave no files, as the middle of a sentence."""


def fetch(
    repository: str,
    *,
    revision: str | None = None,
    weights: bool = True,
    code: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Return the folder with the repository's files in the hub's cache (HF_HOME). Missing files are downloaded."""
    patterns = _TEXT_FILES + (_WEIGHT_FILES if weights else []) + (["*.py"] if code else [])
    try:
        if _offline():
            raise HubError("HF_HUB_OFFLINE is set")
        with quiet():
            try:
                HfApi().model_info(repository, revision=revision, timeout=_PATIENCE)
                folder = snapshot_download(
                    repository,
                    revision=revision,
                    allow_patterns=patterns,
                    tqdm_class=_reporting_bar(f"downloading {repository}", progress),
                )
            except Exception as error:  # the hub's client raises the errors of its HTTP library
                raise HubError(_reason(repository, error)) from error
        return Path(folder)
    except HubError:
        earlier = _snapshot(repository, revision, patterns)
        if earlier is None or (weights and weights_problem(earlier) is not None):
            raise
        return earlier


def fetch_or_refuse(repository: str, what: str = "", **how: Any) -> Path:
    """Return the folder of `fetch`, or raise a LoadError that says what to do. what: text before the name in it."""
    try:
        return fetch(repository, **how)
    except HubError as error:
        raise LoadError(
            f"{what}'{repository}' is no folder here and could not be fetched: {error}; check the name and the "
            "connection, or pass a folder (or for a model a .gguf file)."
        ) from error


def cached(repository: str) -> Path | None:
    """Return the repository in the hub's cache, if it is complete. Do not use the network."""
    folder = _snapshot(repository, None, _TEXT_FILES + _WEIGHT_FILES)
    return None if folder is None or weights_problem(folder) is not None else folder


def weights_problem(folder: Path) -> str | None:
    """Return why a folder cannot be loaded as a model, as the end of a sentence, or None."""
    if (folder / "config.json").is_file():
        if (folder / "model.safetensors").is_file():
            return link_problem(folder, "model.safetensors")
        if (folder / INDEX).is_file():
            return _shards_problem(folder)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"holds its weights only as a pickle ({pickles[0]}), which is never read because opening one can run any "
            "code; save the model again as safetensors"
        )
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if ggufs:
        return f"holds GGUF files; pass the path of one of them, such as '{folder / ggufs[0]}'"
    if not (folder / "config.json").is_file():
        return "has no config.json, so it is not a model's folder"
    return "holds no weights (model.safetensors)"


def _shards_problem(folder: Path) -> str | None:
    try:
        shards = shards_of(folder)
    except (OSError, ValueError) as error:
        return f"has an unusable {INDEX}: {error}"
    for problem in (link_problem(folder, shard) for shard in shards):
        if problem is not None:
            return problem
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    return f"lacks {len(absent)} of its {len(shards)} weight files ({absent[0]})" if absent else None


def _offline() -> bool:
    """Return whether the hub is switched off. The hub's client reads the environment only when it is imported."""
    return constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def _snapshot(repository: str, revision: str | None, patterns: list[str]) -> Path | None:
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns, local_files_only=True))
    except (OSError, ValueError):  # absent, incomplete, or a name the hub does not allow: nothing is there
        return None


def _reason(repository: str, error: Exception) -> str:
    if isinstance(error, errors.GatedRepoError):
        return f"'{repository}' is gated: accept its terms on the hub and set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"'{repository}' has no such revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"the hub has no public model '{repository}' (for a private one set HF_TOKEN)"
    return f"the Hugging Face hub does not answer: {in_one_line(error, 120)}"


def _reporting_bar(label: str, progress: Progress | None) -> type:
    """Return a progress bar class that draws nothing and reports the bytes: the hub's client has no other interface."""
    most = 0

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal most
            shown = super().update(n)
            if progress is not None and self.unit == "B":
                most = max(most, int(self.n))  # two bars count the same bytes, one a little ahead of the other
                progress(label, most, max(int(self.total), most) if self.total else None)
            return shown

    return Bar
