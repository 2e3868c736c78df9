"""Decide how passes of a model run: by transformers or by our kernels, on how many threads, with which weights."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from paceline.common.errors import UnknownNameError, UnsupportedError
from paceline.core.contracts import NODES
from paceline.models.cpu.cpu_forward import kernels_missing, tell_why, threads_here
from paceline.models.cpu.cpu_plan import altered, no_family, plan_of
from paceline.models.cuda.cuda_forward import cuda_plan
from paceline.models.device import give_back
from paceline.models.language_model import LanguageModel
from paceline.models.loading.disk_cache import Progress
from paceline.models.module_views import map_modules
from paceline.models.packed_linear import BLOCK, BFloat16Linear, Int4Linear, Int8Linear, PackedLinear
from paceline.models.tensor_parallel import refuse_pieces

RUNNERS = {
    "auto": "our kernels where they can run, else transformers; on CUDA, rounds are captured",
    "eager": "transformers' own forward, nothing captured",
    "cuda_graph": "transformers' own forward; on CUDA, rounds are captured",
    "kernels": "our kernels, or an error; on CUDA, rounds are captured",
}
KINDS: dict[str, type[PackedLinear]] = {"int8": Int8Linear, "int4": Int4Linear, "bfloat16": BFloat16Linear}
_PLAIN = ("eager", "cuda_graph")  # runners without our kernels
_BRANCHES = ("first", "second")  # the models of a target that combines two (see `guided`)

# ---- the settings of the caller


def check_runner(name: object) -> None:
    if name is not None and not (isinstance(name, str) and name in RUNNERS):
        raise UnknownNameError("runner", name, RUNNERS)


def check_quantization(name: object) -> None:
    if name is not None and not (isinstance(name, str) and name in KINDS):
        raise UnknownNameError("kind of quantization", name, KINDS)


def with_runner(lm: LanguageModel, runner: str | None) -> LanguageModel:
    """Return the model with another runner, without changing the given model. None: the model as it is."""
    check_runner(runner)
    return lm if runner is None else _with(lm, "runner", runner)


def with_strict(lm: LanguageModel) -> LanguageModel:
    """Return the model in strict form: a token has the same bits in every pass."""
    return _with(lm, "strict", True)


def _with(lm: LanguageModel, name: str, value: object) -> LanguageModel:
    """A copy of the target with another value of an attribute, also in its branches; itself, if it has that value."""

    def change(one: LanguageModel) -> LanguageModel:
        if getattr(one, name) == value:
            return one
        other = copy.copy(one)
        setattr(other, name, value)
        return other

    return change(_each(lm, change))


def quantize_as(lm: LanguageModel, kind: str | None) -> LanguageModel:
    """The model with quantized linear layers and the same runner; made once per model. None: the model as it is."""
    check_quantization(kind)
    if kind is None:
        return lm
    if _branches(lm):
        return _each(lm, lambda one: quantize_as(one, kind))
    known = lm.record.quantized
    if kind not in known:
        known[kind] = quantized(lm, kind)
    return with_runner(known[kind], lm.runner)


def quantization_of(lm: LanguageModel) -> str | None:
    """Return the format of most of its linear layers, if it was quantized; else None."""
    model = getattr(parts(lm)[0], "model", None)
    packed = {cls: name for name, cls in KINDS.items()}
    found = Counter(packed[type(m)] for m in (model.modules() if model is not None else ()) if type(m) in packed)
    return found.most_common(1)[0][0] if found else None


def parts(lm: LanguageModel) -> list[LanguageModel]:
    """Return the models that a pass runs: two for a target with two branches, else one."""
    return [each for name in _branches(lm) for each in parts(getattr(lm, name))] or [lm]


def _branches(lm: LanguageModel) -> list[str]:
    return [name for name in _BRANCHES if isinstance(getattr(lm, name, None), LanguageModel)]


def _each(lm: LanguageModel, change: Callable[[LanguageModel], LanguageModel]) -> LanguageModel:
    """Return the target with every branch changed. A target without branches does not change."""
    if not _branches(lm):
        return lm
    other = copy.copy(lm)
    for name in _branches(lm):
        setattr(other, name, change(getattr(lm, name)))
    first: Any = getattr(other, _BRANCHES[0])
    other.model, other.architecture = first.model, first.architecture
    return other


# ---- a model with quantized linear layers: a view that shares embeddings, norms, biases and fused experts


def quantized(lm: LanguageModel, kind: str = "int8", head: bool = True) -> LanguageModel:
    """Return the model with all linear layers quantized, and the format in its name ("SmolLM2 in int8").

    kind: "int8" (a byte per weight, one scale per output), "int4" (5 bits per weight: blocks of 32, each with a scale
    and a least value; a layer whose rows are no multiple of 32 is in int8), or "bfloat16" (the same weights if the
    checkpoint was in bfloat16, at half the bytes of float32). head: quantize the output layer too.

    The result is a model of its own: its text may differ from that of the given model. Its activations keep their
    dtype. Our CPU kernels for float32 read the small weights; everywhere else they are unpacked in every pass, which
    is not faster. An embedding that is tied to the output layer does not change; the output layer becomes a copy.
    """
    if kind not in KINDS:
        raise UnknownNameError("kind of quantization", kind, KINDS)
    refuse_pieces(lm, "it cannot be quantized")
    already = next((m for m in lm.model.modules() if isinstance(m, PackedLinear)), None)
    if already is not None:
        raise UnsupportedError(f"{lm.name} is quantized already; quantize the model it was made of.")
    kept = None if head else lm.model.get_output_embeddings()
    known: dict[int, PackedLinear] = {}

    def exchange(module: nn.Module) -> nn.Module | None:
        if module is kept or not _is_linear(module):
            return None
        if id(module) not in known:
            weight = module.weight.T if isinstance(module, Conv1D) else module.weight
            fits = kind != "int4" or weight.shape[1] % BLOCK == 0  # type: ignore[index, union-attr]
            known[id(module)] = KINDS[kind if fits else "int8"](weight, module.bias)  # type: ignore[arg-type]
        return known[id(module)]

    with torch.no_grad():
        model = map_modules(lm.model, exchange)
    give_back()
    if not known:
        raise UnsupportedError(f"{lm.title} has no linear layer to quantize.")
    small = LanguageModel(model, lm.tokenizer, f"{lm.name} in {kind}")
    small.weights = lm.weights
    return small


def extra_bytes(lm: LanguageModel) -> int:
    """Return the bytes of the quantized weights."""
    return sum(module.bytes for module in lm.model.modules() if isinstance(module, PackedLinear))


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is a plain linear layer. A subclass of another library can compute something else."""
    known = type(module).__module__.startswith(("torch.nn.modules.", "transformers.models."))
    return isinstance(module, Conv1D) or (isinstance(module, nn.Linear) and known)


# ---- what happens


@dataclass(frozen=True)
class Running:
    """What runs the passes (`by`: "kernels" or "eager"), and why the kernels do not run them."""

    by: str
    why: str = ""
    threads: int = 1  # on a CPU
    kind: str | None = None
    captured: bool = False  # rounds are CUDA graphs
    strict: bool = False
    bits: str = ""  # what the bits of a token depend on besides the tokens before it (docs/exactness.md)

    def describe(self) -> str:
        """Return a phrase for the status line."""
        captured = ", captured" if self.captured else ""
        strict = ", strict" if self.strict else ""
        bits = f"; ties can depend on {self.bits}" if self.bits else ""
        if self.by == "kernels":
            threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
            return f"{self.kind + ' ' if self.kind else ''}kernels{captured or ', ' + threads}{strict}{bits}"
        reason = f" ({self.why})" if self.why else ""
        return f"transformers{' in ' + self.kind if self.kind else ''}{captured}{strict}{reason}{bits}"


def running(lm: LanguageModel) -> Running:
    """Return how passes of this model run here. Kernels that run them are compiled now."""
    first = parts(lm)[0]
    kind, device = quantization_of(first), first.device.type
    captured = device == "cuda" and first.runner != "eager"
    why = None if first.runner in _PLAIN else _unfit(first)
    if device == "cpu" and first.runner not in _PLAIN:
        why = why or kernels_missing()
    if first.runner in _PLAIN or why is not None:
        reason = why if why is not None and device == "cpu" else ""
        if "No module named" in reason and ("numba" in reason or "llvmlite" in reason):
            reason = "no numba"
        return Running("eager", reason, kind=kind, captured=captured, strict=first.strict, bits=_bits(first, captured))
    if device == "cpu":
        return Running("kernels", threads=threads_here(first), kind=kind, strict=first.strict)
    bits = "" if first.strict else "batches and drafts of over 64 tokens in a pass"
    return Running("kernels", threads=0, kind=kind, captured=captured, strict=first.strict, bits=bits)


def _bits(lm: LanguageModel, captured: bool) -> str:
    """Return what the bits of a token depend on in passes of transformers, besides the tokens before it."""
    if not lm.strict:
        return "the batch and the draft"
    if any("experts" in name for name, _ in lm.model.named_modules()):
        return "the draft"  # the size of an expert's product depends on the tokens of the pass
    return "the size of the KV cache" if captured else ""


def by_kernels(lm: LanguageModel) -> bool:
    """Return True if our kernels run the passes."""
    return running(lm).by == "kernels"


# nodes of a tree on a CPU: up to here, a pass costs about as much as with one node
_COMFORTABLE = {"kernels": 7, "eager": 15}


def usual_nodes(lm: LanguageModel, uses_all_nodes: bool, gamma: int) -> int:
    """Return the default number of nodes of a tree. uses_all_nodes: the drafter can use any number. On a GPU more nodes
    are nearly free, because reading the weights takes the time; on a CPU they soon cost more time than they save."""
    most = NODES if not uses_all_nodes or lm.device.type != "cpu" else _COMFORTABLE[running(lm).by]
    return max(gamma, most)


def prepare(lm: LanguageModel, progress: Progress | None = None) -> None:
    """Compile the kernels that run this model. Refuse a runner that cannot run it."""
    for one in parts(lm):
        if one.runner in _PLAIN:
            continue
        why = _unfit(one)
        if why is None and one.device.type == "cpu":
            _compile(progress)
            why = kernels_missing()
        if why is not None and one.runner == "kernels":
            raise UnsupportedError(
                f"The runner 'kernels' was asked for, and {one.name} cannot run by it: {why}; use runner 'auto'."
            )
        if why is not None and _is_altered(one, why):
            tell_why(why)


def _compile(progress: Progress | None) -> None:
    from paceline.kernels.cpu import machine
    from paceline.models.cpu.compile import kernels_ready

    if machine.missing() is None:
        with suppress(Exception):  # `kernels_missing` tries again, and reports the error
            kernels_ready(progress)


def cores_here() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _unfit(lm: LanguageModel) -> str | None:
    """Return why our kernels cannot run this model on its device; None if they can."""
    if not hasattr(lm, "model"):
        return "it is no transformers model"
    if lm.device.type not in ("cpu", "cuda"):
        return "there are kernels for CPUs and CUDA devices"
    about = (lm.core, lm.architecture.kinds, lm.architecture.window, lm.logits)
    plan = cuda_plan(*about) if lm.device.type == "cuda" else plan_of(*about)
    return plan if isinstance(plan, str) else None


def _is_altered(lm: LanguageModel, why: str) -> bool:
    """Return True if the reason is an altered part of a model that otherwise has kernels."""
    if not hasattr(lm, "model") or no_family(lm.core) is not None:
        return False
    return why == altered(lm.core, lm.architecture.kinds)
