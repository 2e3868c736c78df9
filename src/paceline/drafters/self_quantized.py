"""The target drafts for itself, in int8."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.contracts import DRAFTERS, Reader
from paceline.core.growth import TreeOptions
from paceline.models.ahead_reader import TwinReader
from paceline.models.language_model import LanguageModel
from paceline.models.quantized import extra_bytes, quantized

from .self_draft import Ahead, SelfDraft


@DRAFTERS.register("self-quantized")
class SelfQuantized(SelfDraft):
    """Let the target itself draft with its weights in int8."""

    shares_reader = True

    @dataclass(frozen=True)
    class Options(TreeOptions):
        head: bool = True  # the output head in int8 too; false: as the target has it

    def describe(self) -> str:
        more = "" if self._made is None else f" (+{extra_bytes(self._made[1]) / 1e6:.0f} MB)"
        return f"self-quantized int8{more}{self.shape}"

    def check(self, target: LanguageModel) -> None:
        self.draft_of(target)

    def reader(self, target: LanguageModel) -> Reader | None:
        """Both write to one memory, so that the draft reads no prompt."""
        reader = TwinReader(target, self.draft_of(target))
        self._inner = Ahead(reader, self.options)
        return reader

    def made_from(self, target: LanguageModel) -> LanguageModel:
        return quantized(target, "int8", self.options.head)
