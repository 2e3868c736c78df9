"""The target drafts for itself with int8 weights."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.contracts import DRAFTERS, Reader
from paceline.core.protocols import SharesReader
from paceline.core.tree_growth import TreeOptions
from paceline.drafters.models.wrapper import Ahead, SelfDraft
from paceline.models.device import memory_left
from paceline.models.language_model import LanguageModel
from paceline.models.readers.drafting_ahead import TwinReader
from paceline.models.runtime import extra_bytes, parts, quantization_of, quantized, running, with_runner


@DRAFTERS.register("self-quantized")
class SelfQuantized(SelfDraft, SharesReader):
    """Draft with the target's own weights in int8."""

    prior_acceptance = 0.9  # int8 weights change few tokens

    @dataclass(frozen=True)
    class Options(TreeOptions):
        head: bool = True  # the output layer in int8 too; false: in the dtype of the target

    def describe(self) -> str:
        more = "" if self._made is None else f" (+{extra_bytes(self._made[1]) / 1e6:.0f} MB)"
        return f"self-quantized int8{more}{self.shape}"

    def check(self, target: LanguageModel) -> None:
        self.draft_of(target)

    def reader(self, target: LanguageModel) -> Reader | None:
        """Return a reader with one KV cache for draft and target, so that the draft reads no prompt."""
        reader = TwinReader(target, self.draft_of(target))
        self._inner = Ahead(reader, self.options)
        return reader

    def made_from(self, target: LanguageModel) -> LanguageModel:
        return with_runner(quantized(target, "int8", self.options.head), target.runner)


_SHARE = 0.5  # `auto` uses at most this share of the free memory


def has_fast_twin(target: LanguageModel) -> bool:
    """Return whether `auto` uses this drafter: kernels can read int8 weights, and enough memory is free."""
    if parts(target) != [target] or running(target).by != "kernels" or quantization_of(target) is not None:
        return False
    weights = sum(parameter.numel() for parameter in target.model.parameters())
    left = memory_left()
    return left is None or weights <= _SHARE * left
