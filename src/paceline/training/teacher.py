"""The frozen target as a teacher: what it thinks at every place of a batch of texts, made on line and never stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.common.errors import UnsupportedError
from paceline.models.language_model import LanguageModel
from paceline.training.data.corpus import Batch


@dataclass(frozen=True)
class Lesson:
    """ids [R,T]; learn [R,T]; taps: hidden states [R,T,D] at the depths that were asked for; last [R,T,D]: what the
    output head sees. The state at place t is that after reading token t: it says token t+1."""

    ids: Tensor
    learn: Tensor
    taps: tuple[Tensor, ...]
    last: Tensor


class Teacher:
    """The target, which learns nothing. Texts are padded at their end, where no earlier token looks."""

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm
        self._model: Any = lm.model
        for weight in self._model.parameters():
            weight.requires_grad_(False)
        self._output = self._model.get_output_embeddings()
        self._check()

    @property
    def numbers(self) -> torch.dtype:
        """What is learnt in: 32 bits at least."""
        return torch.promote_types(self.lm.dtype, torch.float32)

    @property
    def width(self) -> int:
        return int(self._model.config.get_text_config(decoder=True).hidden_size)

    @torch.no_grad()
    def read(self, batch: Batch, taps: Sequence[float]) -> Lesson:
        batch = batch.to(self.lm.device)
        states = self._states(self._model, batch.ids)
        depths = [round(share * self.lm.layers) for share in taps]
        return Lesson(batch.ids, batch.learn, tuple(states[depth] for depth in depths), states[-1])

    @staticmethod
    def _states(model: Any, ids: Tensor) -> tuple[Tensor, ...]:
        """Hidden states before the first layer and after each; the last of them has been through the final norm."""
        said = model(input_ids=ids, use_cache=False, output_hidden_states=True, logits_to_keep=1)
        return tuple(said.hidden_states)

    def last_of(self, model: Any, ids: Tensor) -> Tensor:
        """[R,T,D]: what the output head sees of another model that shares it, to be learnt through."""
        return self._states(model, ids)[-1]

    def logits(self, last: Tensor) -> Tensor:
        """[...,D] -> [...,V] over the usable vocabulary."""
        logits: Tensor = self._output(last)
        return logits[..., : self.lm.vocabulary]

    def embed(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self._model.get_input_embeddings()(ids)
        return embedded

    @torch.no_grad()
    def _check(self) -> None:
        """Tried out, not believed: some architectures scale or cap what their head says."""
        ids = torch.arange(8, device=self.lm.device).unsqueeze(0) % self.lm.vocabulary
        said = self._model(input_ids=ids, use_cache=False, output_hidden_states=True)
        wanted = said.logits[..., : self.lm.vocabulary].float()
        slack = 1e-3 if self.lm.dtype in (torch.float32, torch.float64) else 0.1
        got = self.logits(said.hidden_states[-1]).float()
        if not torch.allclose(got, wanted, atol=slack * float(wanted.std() + 1e-6), rtol=slack):
            raise UnsupportedError(
                f"{self.lm.name} ({self.lm.architecture.name}) does more to its last hidden state than its output "
                "head says, so nothing can be trained to follow it yet."
            )
