"""A draft-lm as a model of its own: with the target's embedding, norm and output head written beside its layers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from paceline.models import load
from paceline.models.chatter import quiet

from ..draft_lm import SavedLayers

WHOLE = "hf"


def export_layers(head: str | os.PathLike[str], target: Any, folder: str | os.PathLike[str]) -> None:
    """Into a folder as transformers writes it: for assisted generation, vLLM, llama.cpp's converter."""
    saved = SavedLayers.load(head)
    lm = load(target, dtype="auto", device="cpu") if isinstance(target, (str, os.PathLike)) else load(target)
    model = saved.fitted(lm).to(lm.dtype).model(lm)
    place = Path(folder)
    with quiet():
        model.save_pretrained(place)
        if lm.tokenizer is not None:
            lm.tokenizer.save_pretrained(place)
