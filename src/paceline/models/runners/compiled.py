"""One layer is compiled, and used for all: the others are the same code with other weights.

Compiling a whole model of 32 layers takes minutes for every shape; its layers differ in nothing but their weights,
which a compiled function takes as arguments, and in the number by which they call their memory. So every layer is given
the same number, and its own memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.common.errors import PacelineWarning
from paceline.models.module_views import layers_of, renumbered, with_layers
from paceline.models.runners.eager import EagerRunner
from paceline.models.slot_cache import SlotCache

if TYPE_CHECKING:
    from paceline.models.language_model import LanguageModel


_SHAPES = 64  # that a layer is compiled for: passes of a draft see one place more each; torch would stop at 8


class OneLayer:
    """The memory of one layer, as its attention sees it."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor, visible: int) -> None:
        self.keys, self.values, self.slots, self.visible = keys, values, slots, visible

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        where = self.slots[:, None, :, None]
        self.keys.scatter_(2, where.expand_as(key_states), key_states)
        self.values.scatter_(2, where.expand_as(value_states), value_states)
        return self.keys[:, :, : self.visible], self.values[:, :, : self.visible]


class _Shared(nn.Module):
    """Stands where a layer stands, and runs it by the function that all layers have in common."""

    def __init__(self, layer: nn.Module, index: int, run: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self._index, self._run = renumbered(layer, 0), index, run

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # a model may ask a layer what kind it is
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *given: Any, **named: Any) -> Any:
        cache = next(each for each in (*given, *named.values()) if isinstance(each, SlotCache))
        own = OneLayer(*cache.of_layer(self._index))
        return self._run(
            self.layer,
            tuple(own if each is cache else each for each in given),
            {name: own if each is cache else each for name, each in named.items()},
        )


def _call(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return layer(*given, **named)


class CompiledRunner:
    """Passes of fixed shapes, as captured programs have them, run by compiled layers; others as they are. Where a layer
    cannot be compiled, a line says so and passes run as they are."""

    def __init__(self, lm: LanguageModel, backend: Any = "inductor") -> None:
        self._lm, self._backend = lm, backend
        self._plain = EagerRunner()
        self._model: Any = None
        self._broken = False

    def __call__(self, run: Callable[[Any, dict[str, Any]], Any], model: Any, inputs: dict[str, Any]) -> Any:
        cache = inputs["past_key_values"]
        fixed = cache.graphable and len(cache.keys) == self._lm.layers and model is self._lm.model
        if self._broken or not fixed or inputs.get("output_hidden_states"):
            return self._plain(run, model, inputs)
        from torch._dynamo import config  # it takes a second to import, and most never compile

        try:
            with config.patch(recompile_limit=_SHAPES):
                return self._plain(run, self._compiled(), inputs)
        except Exception as error:  # compilers fail in any way
            self._broken = True
            reason = " ".join(str(error).split())[:200]
            warnings.warn(
                f"Passes run uncompiled, more slowly: a layer of {self._lm.name} could not be compiled ({reason}).",
                PacelineWarning,
                stacklevel=2,
            )
            return self._plain(run, model, inputs)

    def _compiled(self) -> Any:
        if self._model is None:
            shared = torch.compile(_call, dynamic=False, backend=self._backend)
            layers = [_Shared(layer, index, shared) for index, layer in enumerate(layers_of(self._lm))]
            self._model = with_layers(self._lm, layers, self._lm.architecture.kinds, None)
        return self._model
