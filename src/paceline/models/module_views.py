"""Views of a model: shallow copies of its modules with some children replaced. Nothing is edited.

A shell is a new module object that shares parameters, buffers and children with the original. So a model can run with
fewer layers, or with other linear layers, while the user's model and its config do not change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from paceline.common.errors import UnsupportedError

if TYPE_CHECKING:
    from paceline.models.language_model import LanguageModel


def shell(module: nn.Module) -> Any:
    """Return a copy of the module object alone. Replacing its children does not change the original."""
    fresh = copy.copy(module)
    fresh.__dict__["_modules"] = dict(module._modules)
    return fresh


def detach_hooks(fresh: Any) -> Any:
    """Give a shell its own hooks and generation settings, because other code can add hooks to it and change its
    settings."""
    hooks = {name: copy.copy(value) for name, value in fresh.__dict__.items() if "_hooks" in name}
    fresh.__dict__.update(hooks)
    if getattr(fresh, "generation_config", None) is not None:
        fresh.__dict__["generation_config"] = copy.deepcopy(fresh.generation_config)
    return fresh


def map_modules(module: nn.Module, exchange: Callable[[nn.Module], nn.Module | None]) -> Any:
    """A view of a module tree in which `exchange` replaces modules; None keeps one. Unchanged subtrees are shared."""
    other = exchange(module)
    if other is not None:
        return other
    children = {name: child and map_modules(child, exchange) for name, child in module._modules.items()}
    if all(children[name] is child for name, child in module._modules.items()):
        return module
    fresh = shell(module)
    fresh._modules.update(children)
    return fresh


def layers_of(lm: LanguageModel) -> list[nn.Module]:
    """Return the layers of a model, in order."""
    return list(lm.model.get_submodule(".".join(_path(lm))))


def with_layers(lm: LanguageModel, layers: Sequence[nn.Module], kinds: Sequence[str], head: nn.Module | None) -> Any:
    """Return the model with these layers, of these attention kinds, and with `head` as its output layer if one is
    given. The parts before and after the layers are the model's own."""
    short = _shorter(lm.model.config.get_text_config(decoder=True), len(layers), kinds)
    fresh = _replace_layers(lm, lm.model, _path(lm), nn.ModuleList(layers), short)
    if head is not None:
        own = lm.model.get_output_embeddings()
        names = [name for name, child in fresh._modules.items() if child is own and own is not None]
        if not names:
            raise UnsupportedError(f"{lm.title} has no output layer of its own that can be replaced.")
        fresh._modules[names[0]] = head
    return fresh


def without_layers(lm: LanguageModel, skip: Sequence[int]) -> Any:
    """Return the model without the layers `skip`. The others are renumbered, so that the KV cache has no gaps."""
    kept = [layer for layer in range(lm.layers) if layer not in skip]
    every = layers_of(lm)
    layers = [renumbered(every[layer], index) for index, layer in enumerate(kept)]
    return with_layers(lm, layers, [lm.architecture.kinds[layer] for layer in kept], None)


def _path(lm: LanguageModel) -> list[str]:
    """Return the names on the path to the list of layers, which is the outermost list with one module per layer."""
    found = [
        name.split(".")
        for name, module in lm.model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == lm.layers
    ]
    if not found:
        raise UnsupportedError(f"{lm.title} keeps its {lm.layers} layers in no list, so it cannot be cut into parts.")
    return min(found, key=len)


def _replace_layers(lm: LanguageModel, module: nn.Module, path: list[str], layers: nn.ModuleList, config: Any) -> Any:
    if "forward" in module.__dict__:
        raise UnsupportedError(
            f"The forward of {lm.title} was replaced by hand (accelerate's device_map does that), so the model "
            "cannot be cut into parts; load it on one device."
        )
    fresh = shell(module)
    if "config" in module.__dict__:
        fresh.__dict__["config"] = _in_place(module.config, lm.model.config.get_text_config(decoder=True), config)
    below = layers if len(path) == 1 else _replace_layers(lm, module._modules[path[0]], path[1:], layers, config)  # type: ignore[arg-type]
    fresh._modules[path[0]] = below
    return fresh


def _in_place(whole: Any, part: Any, other: Any) -> Any:
    """Return the config `whole` with `part` replaced by `other`, whether it is `part` or contains it."""
    if whole is part:
        return other
    fresh = copy.copy(whole)
    fresh.__dict__.update({name: other for name, value in whole.__dict__.items() if value is part})
    return fresh


def _shorter(config: Any, layers: int, kinds: Sequence[str]) -> Any:
    fresh = copy.copy(config)
    fresh.num_hidden_layers = layers
    if getattr(config, "layer_types", None) is not None:
        fresh.layer_types = list(kinds)
    return fresh


def renumbered(module: nn.Module, index: int) -> Any:
    """Return the layer with another number, which is its index in the KV cache."""
    fresh = shell(module)
    if "layer_idx" in fresh.__dict__:
        fresh.__dict__["layer_idx"] = index
    fresh._modules.update({name: child and renumbered(child, index) for name, child in module._modules.items()})
    return fresh
