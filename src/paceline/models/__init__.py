"""The models: the only room that imports transformers."""

from __future__ import annotations

import os
from typing import Any

from paceline.common.errors import InputError
from paceline.common.process import is_slim
from paceline.common.progress import reporting

if is_slim():  # before anything else imports transformers
    from paceline.models.loading.slim_start import slim_transformers

    slim_transformers()

from paceline.models.language_model import LanguageModel


def load(
    source: Any,
    tokenizer: Any = None,
    *,
    dtype: Any = None,
    device: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    runner: str | None = None,
    quantize: str | None = None,
    tp_plan: str | None = None,
    progress: Any = None,
) -> LanguageModel:
    """Load a model to decode with: a catalogue name, a hub id, a folder, a .gguf file, or a transformers model object.

    runner: how its passes run, "auto", "eager" or "kernels" (see `runtime.RUNNERS`). quantize: the format of its linear
    layers, "int8", "int4" or "bfloat16". Neither changes a model object that is given: the result is another view of
    it. tp_plan: "auto" shares it over the processes of torchrun. progress: called with (label, done, total); without
    it, steps of more than a second are shown on stderr.
    """
    from paceline.models.runtime import check_quantization, check_runner, quantize_as, with_runner
    from paceline.models.tensor_parallel import check_plan

    check_runner(runner)
    check_quantization(quantize)
    check_plan(tp_plan)
    how = {"tokenizer": tokenizer, "dtype": dtype, "device": device, "revision": revision, "tp_plan": tp_plan}
    if isinstance(source, LanguageModel):
        for name, value in how.items():
            if value is not None:
                raise InputError(f"The model is loaded already; leave {name}={value!r} out, or load it again.")
        return quantize_as(with_runner(source, runner), quantize)
    from paceline.models.loading.checkpoint import load_checkpoint

    with reporting(progress, "loading a model") as told:
        found = load_checkpoint(source, trust_remote_code=trust_remote_code, progress=told, **how)
    lm = LanguageModel(found.model, found.tokenizer, found.name)
    lm.weights = found.weights
    return quantize_as(with_runner(lm, runner), quantize)


def catalogue_names() -> list[str]:
    from paceline.models.loading.catalogue import names

    return names()


def is_model(text: str) -> bool:
    """Return True if this string can name a model and not a drafter: a catalogue name, a hub id, a folder or a file."""
    from paceline.models.loading.catalogue import find_entry

    return find_entry(text) is not None or "/" in text or text.endswith(".gguf") or os.path.exists(text)


def generate_output(sequences: Any) -> Any:
    """Return the object that transformers' `generate` returns with `return_dict_in_generate`."""
    from transformers.generation import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences)


__all__ = ["LanguageModel", "catalogue_names", "generate_output", "is_model", "load"]
