"""Draft with a small model made from the target: some trained layers between its embedding and its output layer."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.common.errors import InputError, LoadError, UnsupportedError, shown
from paceline.common.limits import limited
from paceline.core.contracts import DRAFTERS
from paceline.core.tree_growth import TreeOptions
from paceline.drafters.heads.head_files import check_target, fingerprint, fits, load_head, save_head
from paceline.drafters.models.wrapper import SelfDraft
from paceline.drafters.shipped import trained_for
from paceline.models.language_model import LanguageModel
from paceline.models.module_views import layers_of, renumbered, with_layers
from paceline.models.packed_linear import PackedLinear
from paceline.models.runtime import by_kernels, check_quantization

KIND = "draft-lm"


class DraftLayers(nn.Module):
    """The trained layers. Before the training they are copies of layers of the target. The small model uses the
    embedding, the final norm, the output layer and the `kept` first layers of the target."""

    def __init__(self, target: LanguageModel, layers: Sequence[int], kept: int = 0) -> None:
        """layers: the numbers of the target's layers to copy. kept: the number of the target's first layers that run
        unchanged before the copies."""
        super().__init__()
        every = layers_of(target)
        if not 0 <= kept < len(every):
            raise InputError(f"A draft-lm can keep 0 to {len(every) - 1} layers of {target.name}, got {kept}.")
        wrong = [layer for layer in layers if not 0 <= layer < len(every)]
        if wrong or not layers:
            raise InputError(
                f"A draft-lm copies some of the layers 0 to {len(every) - 1} of {target.name}, got {list(layers)}."
            )
        packed = any(isinstance(module, PackedLinear) for module in every[0].modules())
        if packed or any(not weight.is_floating_point() for weight in every[0].state_dict().values()):
            raise UnsupportedError(
                f"The layers of {target.name} are quantized, but a draft-lm needs the original weights; load the "
                "target without quantize."
            )
        self.sources, self.kept = tuple(layers), kept
        self.made_for = fingerprint(target)
        with torch.inference_mode(False):
            copies = [renumbered(copy.deepcopy(every[layer]), kept + index) for index, layer in enumerate(layers)]
        self.layers = nn.ModuleList(copies)
        self._kinds = [target.architecture.kinds[layer] for layer in (*range(kept), *layers)]
        for weight in self.layers.parameters():
            weight.requires_grad_(True)

    def model(self, target: LanguageModel) -> Any:
        """Return the small model: a view of the target with these layers."""
        return with_layers(target, [*layers_of(target)[: self.kept], *self.layers], self._kinds, None)

    def save(self, folder: str | os.PathLike[str], numbers: str | None = None) -> None:
        about = {"sources": list(self.sources), "kept": self.kept, "target": self.made_for}
        save_head(folder, KIND, about, self.state_dict(), numbers)


@dataclass(frozen=True)
class SavedLayers:
    """The content of a folder. `fitted` makes the layers for a target."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    folder: str

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> SavedLayers:
        saved = cls(*load_head(folder, KIND), os.fspath(folder))
        saved._layers()  # refuses a wrong config before the target is known
        return saved

    def _layers(self) -> tuple[int, list[int]]:
        """Return the number of kept layers of the target, and the numbers of the copied layers."""
        kept, sources = self.config.get("kept", 0), self.config.get("sources")
        if type(kept) is not int:
            raise LoadError(
                f"'kept' in the config.json of '{self.folder}' must be a number of layers, got {shown(kept)}."
            )
        if not isinstance(sources, list) or not all(type(layer) is int for layer in sources):
            raise LoadError(f"'sources' in the config.json of '{self.folder}' must be layers, got {shown(sources)}.")
        if len(sources) > len(self.tensors):  # refused before the layers are copied
            raise LoadError(
                f"The draft-lm in '{self.folder}' has {len(sources)} layers, but {len(self.tensors)} tensors."
            )
        return kept, sources

    def check(self, target: LanguageModel) -> None:
        """Raise an error if the layers do not fit the sizes of the target."""
        kept, sources = self._layers()
        compared = layers_of(target)[: len(sources)] if fits(self.config["target"], target) else []
        for index, layer in enumerate(compared):
            for part, weight in layer.named_parameters():
                own = self.tensors.get(f"layers.{index}.{part}", weight)
                if own.shape != weight.shape:
                    raise UnsupportedError(
                        f"This draft-lm has '{part}' of {tuple(own.shape)}, but the layers of {target.name} have "
                        f"{tuple(weight.shape)}; use a head trained for this target."
                    )
        check_target(KIND, self.config["target"], target)
        if not 0 <= kept < target.layers or not all(0 <= layer < target.layers for layer in sources):
            raise UnsupportedError(
                f"The draft-lm in '{self.folder}' keeps {kept} layers and copies {shown(sources)}, but "
                f"{target.name} has {target.layers}; use a draft trained for this target."
            )

    def fitted(self, target: LanguageModel) -> DraftLayers:
        self.check(target)
        kept, sources = self._layers()
        layers = DraftLayers(target, sources, kept)
        layers.made_for = self.config["target"]
        try:
            layers.load_state_dict({name: tensor.to(target.dtype) for name, tensor in self.tensors.items()})
        except RuntimeError as error:
            problem = " ".join(str(error).split())[:300].rstrip(".")
            raise LoadError(f"The draft-lm in '{self.folder}' does not fit its own config.json: {problem}.") from error
        return layers.requires_grad_(False)


@DRAFTERS.register(KIND)
class DraftLm(SelfDraft):
    """Draft with some trained layers between the target's embedding and its output layer."""

    @dataclass(frozen=True)
    class Options(TreeOptions):
        head: Any = None  # the folder of a draft-lm, or a DraftLayers; None: the shipped one for the target
        quantize: str | None = "auto"  # dtype of the draft: int8, int4 or bfloat16; auto: int8 if the kernels run it
        # size of the output vocabulary: the most frequent tokens and the tokens of the texts (None: all)
        vocabulary: int | None = limited(None, most=2**24)

        required = ("head",)

        def __post_init__(self) -> None:
            super().__post_init__()
            check_quantization(None if self.quantize == "auto" else self.quantize)
            if self.head is not None and not isinstance(self.head, (str, Path, DraftLayers, SavedLayers)):
                raise InputError(
                    f"draft-lm needs a trained draft: options={{'head': a folder}}, got {shown(self.head)}."
                )

        @classmethod
        def conformance_variants(cls) -> list[Mapping[str, Any]]:
            return [{"head": lambda target, kept=kept: DraftLayers(target, (0,), kept)} for kept in (0, 1)]

    kept_by_copies = ("_made", "_head")

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        given = self.options.head
        self._head = SavedLayers.load(given) if isinstance(given, (str, Path)) else given

    def describe(self) -> str:
        return f"draft-lm{self.shape}"

    def check(self, target: LanguageModel) -> None:
        if self._head is None:
            self._head = SavedLayers.load(trained_for(target, KIND))
        if isinstance(self._head, SavedLayers):
            self._head.check(target)
        else:
            check_target(KIND, self._head.made_for, target)

    def made_from(self, target: LanguageModel) -> LanguageModel:
        layers = self._head.fitted(target) if isinstance(self._head, SavedLayers) else self._head
        if any(weight.dtype != target.dtype or weight.device != target.device for weight in layers.parameters()):
            layers = copy.deepcopy(layers).to(target.device, target.dtype)  # the caller keeps the original
        model = layers.model(target)
        return LanguageModel(model, target.tokenizer, name=f"draft-lm of {target.name}")

    def inner_options(self) -> dict[str, Any]:
        kind = self.options.quantize
        if kind == "auto":
            draft = self.draft_of(self._opened[0])
            kind = "int8" if draft.device.type == "cpu" and by_kernels(draft) else None
        return {"quantize": kind, "vocabulary": self.options.vocabulary}
