"""Load a model into memory, from a catalogue name, a hub id, a folder, a GGUF file or a model object."""

from __future__ import annotations

import json
import os
import re
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.initialization import no_init_weights

from paceline.common.errors import InputError, LoadError, PacelineWarning, UnknownNameError, in_one_line
from paceline.common.names import HUB_ID
from paceline.models.cpu.threads import one_thread
from paceline.models.device import give_back
from paceline.models.loading import hub
from paceline.models.loading.catalogue import (
    HUB,
    UNKNOWN,
    Found,
    Weights,
    cache_key,
    fetch_entry,
    find_entry,
    in_folder,
    in_gguf,
    names,
)
from paceline.models.loading.disk_cache import Progress, WeightCache
from paceline.models.loading.gguf import PROVENANCE, convert, read_header, tokenizer_refused
from paceline.models.loading.gguf_tokenizer import TokenizerError, build_tokenizer
from paceline.models.loading.hub import quiet
from paceline.models.loading.weight_check import bounded, check_folder, place_of
from paceline.models.tensor_parallel import leave_in_order

# ---- plain checkpoints of common architectures, read without the general code of transformers

# Their files hold exactly the tensors of the model; `tests/models/test_direct.py` compares them.
PLAIN = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")
_MORE = ("quantization_config", "auto_map", "transformers_weights")  # keys of a config that need more than reading
_FILE, _GENERATION = "model.safetensors", "generation_config.json"
_SMALL = 1 << 30  # below this number of bytes, one thread converts faster than several
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def read_directly(folder: Path, dtype: torch.dtype | str) -> PreTrainedModel | None:
    """Return the model in `folder`, equal to that of `from_pretrained`; None if that does more than reading files."""
    found = _config(folder)
    if found is None:
        return None
    try:
        with safe_open(folder / _FILE, "pt") as file:
            names = list(file.keys())
            if not _of_this_size(found, names, file):
                return None
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            if dtype == "auto" and config.dtype is None:  # then the file decides
                return None
            kind = config.dtype if dtype == "auto" else dtype
            with no_init_weights(), torch.device("cpu"):
                model: Any = AutoModelForCausalLM.from_config(config, dtype=kind)
            own = model.state_dict()
            tensors = {name: file.get_tensor(name) for name in names}
            if not _fit(tensors, own, model):
                return None
            with one_thread() if (folder / _FILE).stat().st_size < _SMALL else nullcontext():
                state = {name: tensor.to(own[name].dtype) for name, tensor in tensors.items()}
            model.load_state_dict(state, strict=False, assign=True)
        model.tie_weights()
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception:  # `from_pretrained` meets the same error and reports it
        return None
    model.config.name_or_path = str(folder)
    return model.eval()  # type: ignore[no-any-return]


def _config(folder: Path) -> dict[str, Any] | None:
    """Return the config of a model that may be plain."""
    if not (folder / _FILE).is_file() or (folder / "adapter_config.json").exists():
        return None
    if not (folder / _GENERATION).is_file():  # some of it may be in the config
        return None
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict) or config.get("model_type") not in PLAIN or any(name in config for name in _MORE):
        return None
    return config


def _of_this_size(config: dict[str, Any], names: list[str], file: Any) -> bool:
    """Return True if the config describes the tensors of the file. Checked before a model of that size is made."""
    layers = {int(found[1]) for found in map(_LAYER.match, names) if found is not None}
    if config.get("num_hidden_layers") != len(layers) or "model.embed_tokens.weight" not in names:
        return False
    shape = file.get_slice("model.embed_tokens.weight").get_shape()
    return shape == [config.get("vocab_size"), config.get("hidden_size")]


def _fit(tensors: dict[str, torch.Tensor], own: dict[str, torch.Tensor], model: Any) -> bool:
    """Return True if weights and tensors match by name and shape. Tied weights must be absent from the file: if it has
    other values for them, transformers does not tie them."""
    tied = set(model.all_tied_weights_keys)
    if tied & tensors.keys():
        return False
    for name, tensor in tensors.items():
        if name not in own or own[name].shape != tensor.shape or not tensor.is_floating_point():
            return False
    return own.keys() - tensors.keys() <= tied


# ---- from a name to a model in memory

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json",
                    "vocab.txt")  # fmt: skip
_PICKLE_ENDINGS = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}


@dataclass(frozen=True)
class Checkpoint:
    """A model that is ready to run, its tokenizer if it has one, its name and its origin."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    origin: str
    weights: Weights = UNKNOWN


def load_checkpoint(
    source: str | os.PathLike[str] | PreTrainedModel,
    *,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    tp_plan: str | None = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """Find, check and load a model; only safetensors and GGUF are read.

    Without `dtype` it is float32 on a CPU and the checkpoint's own type elsewhere; without `device` it is CUDA where
    there is one. A model object is returned as it is.
    """
    if isinstance(source, PreTrainedModel):
        _refuse_changes(source, dtype, device)
        if revision is not None:
            raise InputError(f"The model is loaded already; leave revision={revision!r} out.")
        if tp_plan is not None:
            raise InputError(f"The model is loaded already; leave tp_plan={tp_plan!r} out.")
        name = source.config.name_or_path or type(source).__name__
        own = None if tokenizer is None else _load_tokenizer(tokenizer, trust_remote_code, progress)
        return Checkpoint(source, own, name, "memory")
    if not isinstance(source, (str, os.PathLike)):
        raise InputError(
            f"A model is a name, a hub id, a folder, a .gguf file or a transformers model, not {type(source).__name__}."
        )
    where = _device(device)
    kind = _dtype(dtype, where)
    given = None if tokenizer is None else _load_tokenizer(tokenizer, trust_remote_code, progress)
    located = _locate(os.fspath(source), revision, given is None, trust_remote_code, progress)
    own = given if given is not None else _tokenizer_of(located, trust_remote_code)
    model = _load_model(located, kind, where, trust_remote_code, tp_plan)
    give_back()
    weights = located.weights or in_folder(located.folder, located.source)
    return Checkpoint(model, own, located.name, located.origin, weights)


def _refuse_changes(model: PreTrainedModel, dtype: torch.dtype | str | None, device: object) -> None:
    """Refuse to move or cast a model object, because it belongs to the caller."""
    if dtype is not None and _dtype(dtype, model.device) not in ("auto", model.dtype):
        raise InputError(
            f"The model is loaded already, in {model.dtype}; cast it yourself or leave dtype={dtype!r} out."
        )
    if device is not None and _device(device).type != model.device.type:
        raise InputError(
            f"The model is loaded already, on {model.device}; move it yourself or leave device={device!r} out."
        )


def _device(device: object) -> torch.device:
    if device is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found if found is not None and found.type == "cuda" else torch.device("cpu")
    try:
        chosen = torch.device(device)  # type: ignore[call-overload]
        torch.empty(0, device=chosen)  # a test that works for every kind of device
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise InputError(f"The device {device!r} cannot be used here: {in_one_line(error, 120)}.") from error
    return chosen


def _dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype | str:
    if dtype is None:
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype == "auto":
        return "auto"
    chosen = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        raise InputError(f"Unknown dtype {dtype!r}: use float32, bfloat16, float16, float64 or auto.")
    return chosen


def _locate(
    source: str, revision: str | None, need_tokenizer: bool, trust_remote_code: bool, progress: Progress | None
) -> Found:
    """Find the files of a model. A catalogue name comes before a folder of the same name (write './name' for that)."""
    entry = find_entry(source)
    if entry is not None:
        return fetch_entry(entry, revision=revision, progress=progress)
    path = place_of(source)
    if path.exists() or path.suffix.lower() == ".gguf":
        if revision is not None:
            raise InputError(f"A revision ('{revision}') exists only on the hub, and '{source}' is on this machine.")
        return _locate_gguf(path, need_tokenizer, progress) if not path.is_dir() else _locate_folder(path)
    if HUB_ID.fullmatch(source) is not None:
        return _locate_on_hub(source, revision, trust_remote_code, progress)
    if os.sep in source or "/" in source:
        raise LoadError(f"There is no file or folder '{source}'.")
    raise UnknownNameError("model", source, names())


def _locate_folder(folder: Path) -> Found:
    problem = hub.weights_problem(folder)
    if problem is not None:
        raise LoadError(f"The folder '{folder}' {problem}.")
    return Found(folder, folder.resolve().name, f"folder {folder}")


def _locate_on_hub(repository: str, revision: str | None, trust_remote_code: bool, progress: Progress | None) -> Found:
    folder = hub.fetch_or_refuse(repository, revision=revision, code=trust_remote_code, progress=progress)
    problem = hub.weights_problem(folder)
    if problem is not None:
        raise LoadError(f"'{repository}' on the hub {problem}.")
    origin = f"hub {repository}" + (f" at {revision}" if revision else "")
    return Found(folder, repository, origin, source=HUB)


def _locate_gguf(path: Path, need_tokenizer: bool, progress: Progress | None) -> Found:
    if not path.is_file():
        raise LoadError(f"There is no file '{path}'.")
    if path.suffix.lower() in _PICKLE_ENDINGS:
        raise LoadError(f"'{path}' is a pickle, which is never read because opening one can run any code.")
    if path.suffix.lower() == ".safetensors":
        raise LoadError(f"'{path}' holds weights without their config; pass the folder '{path.parent}' instead.")
    header = read_header(path)
    cache = WeightCache()
    key = cache_key(re.sub(r"[^\w.-]", "_", path.stem)[:60], cache.source_sha256(path, progress=progress))

    def make(folder: Path) -> None:
        convert(header, folder, need_tokenizer=need_tokenizer, progress=progress)

    folder = cache.obtain(key, make, progress=progress)
    located = Found(folder, path.stem, f"file {path}, converted", converted=True, weights=in_gguf(header))
    for remark in _provenance(located).get("remarks", ()):
        warnings.warn(f"'{path}': {remark}.", PacelineWarning, stacklevel=4)
    return located


def _provenance(located: Found) -> dict:
    return dict(json.loads((located.folder / PROVENANCE).read_text("utf-8")))


def _load_model(
    located: Found,
    dtype: torch.dtype | str,
    device: torch.device,
    trust_remote_code: bool,
    tp_plan: str | None = None,
) -> PreTrainedModel:
    sharing = {} if tp_plan is None else {"tp_plan": tp_plan}
    if sharing:
        leave_in_order()
    table = check_folder(located.folder, located.name)
    if not sharing and not trust_remote_code:
        with quiet(), bounded(table, located.name):
            plain = read_directly(located.folder, dtype)
        if plain is not None:
            return plain.to(device)  # type: ignore[arg-type]
    try:
        with quiet(), bounded(table, located.name):
            model, report = AutoModelForCausalLM.from_pretrained(
                located.folder,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                **sharing,
            )
    except LoadError:
        raise
    except Exception as error:  # transformers has no error class of its own
        raise LoadError(f"'{located.name}' cannot be loaded: {_explained(error)}.") from error
    absent = sorted(report["missing_keys"])
    if absent:  # transformers fills these with random numbers
        raise LoadError(f"'{located.name}' lacks {len(absent)} weights of its model, the first of them '{absent[0]}'.")
    return model.eval() if sharing else model.to(device).eval()  # a shard is on its device already


def _explained(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "it brings code of its own, which runs only with trust_remote_code=True"
    if "Unrecognized configuration class" in str(error):
        return "it is not a causal language model"
    if "ignore_mismatched_sizes" in str(error):
        return "its config.json has other sizes than its weights; get both again"
    return in_one_line(error)


def _tokenizer_of(located: Found, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer beside the weights; None if there is none (models whose tokens are not text)."""
    if located.converted:
        problem = _provenance(located)["tokenizer_problem"]
        if problem is not None:
            raise LoadError(tokenizer_refused(located.name, problem))
    if not any((located.folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    return _read_tokenizer(located.folder, located.name, trust_remote_code, own=located.converted)


def _load_tokenizer(tokenizer: object, trust_remote_code: bool, progress: Progress | None) -> PreTrainedTokenizerBase:
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    if not isinstance(tokenizer, (str, os.PathLike)):
        raise InputError(
            f"A tokenizer is a transformers tokenizer, a folder or a hub id, not {type(tokenizer).__name__}."
        )
    name = os.fspath(tokenizer)
    entry = find_entry(name)
    if entry is not None:
        found = fetch_entry(entry, progress=progress)
        return _read_tokenizer(found.folder, name, trust_remote_code, own=found.converted)
    path = place_of(name)
    if path.suffix.lower() == ".gguf":
        return _tokenizer_in_gguf(path)
    if path.is_dir():
        return _read_tokenizer(path, name, trust_remote_code, own=False)
    if path.exists() or HUB_ID.fullmatch(name) is None:
        raise LoadError(f"No tokenizer '{name}': pass a folder that holds one, or a hub id.")
    folder = hub.fetch_or_refuse(name, "The tokenizer ", weights=False, code=trust_remote_code, progress=progress)
    return _read_tokenizer(folder, name, trust_remote_code, own=False)


def _tokenizer_in_gguf(path: Path) -> PreTrainedTokenizerBase:
    try:
        built = build_tokenizer(read_header(path).metadata)
    except TokenizerError as problem:
        raise LoadError(tokenizer_refused(path, str(problem))) from None
    if built is None:
        raise LoadError(f"'{path}' holds no tokenizer.")
    return built


def _read_tokenizer(folder: Path, name: str, trust_remote_code: bool, *, own: bool) -> PreTrainedTokenizerBase:
    """Read a tokenizer. AutoTokenizer may choose another class by the model type, so it does not read our own."""
    try:
        with quiet():
            if own:
                return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # transformers raises every kind of error
        raise LoadError(f"The tokenizer of '{name}' cannot be loaded: {_explained(error)}.") from error
