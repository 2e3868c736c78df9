"""The frozen target as a teacher, and the loss of a student's logits against the teacher's.

Distributions over a whole vocabulary are large: 32,000 positions of 49,152 tokens are 6 GB. So the loss computes them
chunk by chunk from hidden states. It takes the gradient at those states at once and then discards the chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from paceline.common.errors import InputError, UnknownNameError, UnsupportedError
from paceline.models.cuda.cuda_forward import importable
from paceline.models.language_model import LanguageModel
from paceline.training.corpus import TokenBatch

# ---- The teacher


@dataclass(frozen=True)
class Batch:
    """ids [R,T]; learn [R,T]; taps: hidden states [R,T,D] at the depths of the recipe; last [R,T,D]: the input of the
    output head. The state at position t follows token t and gives the logits of token t+1."""

    ids: Tensor
    learn: Tensor
    taps: tuple[Tensor, ...]
    last: Tensor


class Teacher:
    """The frozen target. Texts are padded at their end, where no earlier token attends to them."""

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm
        self._model: Any = lm.model
        for weight in self._model.parameters():
            weight.requires_grad_(False)
        self._output = self._model.get_output_embeddings()
        self._check()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of trained weights: at least float32."""
        return torch.promote_types(self.lm.dtype, torch.float32)

    @property
    def width(self) -> int:
        return int(self._model.config.get_text_config(decoder=True).hidden_size)

    @torch.no_grad()
    def read(self, tokens: TokenBatch, taps: Sequence[float]) -> Batch:
        """Return the hidden states of a batch. taps: depths as shares of the layers."""
        tokens = tokens.to(self.lm.device)
        states = self._states(self._model, tokens.ids)
        depths = [round(share * self.lm.layers) for share in taps]
        return Batch(tokens.ids, tokens.learn, tuple(states[depth] for depth in depths), states[-1])

    @staticmethod
    def _states(model: Any, ids: Tensor) -> tuple[Tensor, ...]:
        """Return hidden states before the first layer and after each layer; the last ones are after the final norm."""
        output = model(input_ids=ids, use_cache=False, output_hidden_states=True, logits_to_keep=1)
        return tuple(output.hidden_states)

    def last_of(self, model: Any, ids: Tensor) -> Tensor:
        """Return [R,T,D]: the last hidden states of another model, with gradients."""
        return self._states(model, ids)[-1]

    def logits(self, last: Tensor) -> Tensor:
        """Return logits [...,V] over the usable vocabulary from states [...,D]."""
        logits: Tensor = self._output(last)
        return logits[..., : self.lm.vocabulary]

    def embed(self, ids: Tensor) -> Tensor:
        return self._model.get_input_embeddings()(ids)

    @torch.no_grad()
    def _check(self) -> None:
        """Refuse an architecture that scales or caps the logits of its output head."""
        ids = torch.arange(8, device=self.lm.device).unsqueeze(0) % self.lm.vocabulary
        output = self._model(input_ids=ids, use_cache=False, output_hidden_states=True)
        logits = output.logits[..., : self.lm.vocabulary].float()
        tolerance = 1e-3 if self.lm.dtype in (torch.float32, torch.float64) else 0.1
        own = self.logits(output.hidden_states[-1]).float()
        if not torch.allclose(own, logits, atol=tolerance * float(logits.std() + 1e-6), rtol=tolerance):
            raise UnsupportedError(
                f"{self.lm.name} ({self.lm.architecture.name}) changes the logits after its output head. Training "
                "supports only targets whose output head gives the logits."
            )


# ---- The loss

StudentLogits = Callable[[Tensor], Tensor]  # states [P,D] -> logits [P,V]
LOSSES = ("kl", "reverse-kl", "tv", "ce")
_CHUNK = 4096  # positions


def parse_loss(loss: str) -> tuple[str, float]:
    """Return the name of a loss and its temperature: "tv", or "tv@0.8" for distributions at temperature 0.8."""
    name, at, text = loss.partition("@")
    if name not in LOSSES:
        raise UnknownNameError("loss", name, LOSSES)
    if not at:
        return name, 1.0
    try:
        temperature = float(text)
    except ValueError:
        temperature = 0.0
    if not 0 < temperature < float("inf"):
        raise InputError(f"A loss compares distributions at a temperature above 0, such as {name}@0.8; got '{loss}'.")
    return name, temperature


def divergence(name: str, logits: Tensor, teacher: Tensor, token: Tensor) -> Tensor:
    """Return the divergence [P] of the distribution of `logits` [P,V] from the distribution `teacher` [P,V], whose mass
    is below 1 if the student has fewer tokens. "ce" uses only the tokens [P] (-1: the student does not have it)."""
    log_q = logits.to(teacher.dtype).log_softmax(-1)
    if name == "ce":
        known = token >= 0
        return -log_q.gather(-1, token.clamp(min=0).unsqueeze(-1)).squeeze(-1).where(known, 0.0)
    p = teacher
    if name == "tv":
        return 0.5 * (p - log_q.exp()).abs().sum(-1)
    if name == "reverse-kl":
        return (log_q.exp() * (log_q - p.clamp(min=1e-12).log())).sum(-1)
    return -(torch.special.entr(p).sum(-1) + (p * log_q).sum(-1))


def at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _kernels(device: torch.device) -> ModuleType | None:
    """Return the CUDA kernels that compute a divergence and its gradient in one launch, if they can run."""
    if device.type != "cuda" or importable() is not None:
        return None
    from paceline.kernels.cuda import divergence

    return divergence


@dataclass(frozen=True)
class TeacherLogits:
    """The teacher's logits [P,N], at P positions, of the student's tokens, and the log-sums [P] over all tokens."""

    logits: Tensor
    sums: Tensor

    def __getitem__(self, part: slice) -> TeacherLogits:
        return TeacherLogits(self.logits[part], self.sums[part])

    def distribution(self) -> Tensor:
        """Return [P,N], which is not renormalized if the student has fewer tokens."""
        return (at_least_float32(self.logits) - self.sums.unsqueeze(-1)).exp()


class _FusedDivergence(torch.autograd.Function):
    """The sum of divergences, by a kernel that also computes the gradient. `backward` starts at this sum, so the outer
    gradient is 1."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: TeacherLogits, kernels: Any, name: str) -> Tensor:
        losses, gradient = kernels.far(name, logits, teacher.logits, teacher.sums)
        ctx.save_for_backward(gradient)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.saved_tensors[0], None, None, None


class _KnownGradients(torch.autograd.Function):
    """A value whose gradients were computed before."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> Any:
        return (None, None, *(gradient * outer[0].to(gradient.dtype) for gradient in ctx.gradients))


def _autocast_without_cache(device: torch.device) -> torch.autocast:
    """Return the current autocast without its cache of rounded weights, because each chunk has its own gradient."""
    kind = device.type
    on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return torch.autocast(kind, dtype, on, cache_enabled=False)


class DistillationLoss:
    """The mean divergence of a student's distributions from the teacher's."""

    def __init__(self, name: str, teach: StudentLogits, ids: Tensor | None = None) -> None:
        """name: see `parse_loss`. teach: the teacher's output head. ids [N]: the tokens that the student has (None:
        all). The teacher's distribution over those is not renormalized: where it has little mass, there is little to
        learn."""
        self.name, self._teach, self._ids = name, teach, ids
        self._kind, self._temperature = parse_loss(name)
        self._index: Tensor | None = None  # the student's id of each of the teacher's tokens, -1 for none

    def __call__(
        self,
        student: StudentLogits,
        states: Tensor,
        last: Tensor,
        tokens: Tensor,
        teacher: TeacherLogits | None = None,
        weights: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return the loss, a scalar. states [P,D]: of the student. last [P,D]: of the teacher. tokens [P]: the next
        ones. teacher: the result of `teacher_logits`, if the same positions are learned several times. weights: the
        trained weights inside `student`."""
        count = states.shape[0]
        if not count:
            return states.sum() * 0.0
        if self._ids is not None and self._kind == "ce":  # only "ce" reads the tokens
            tokens = self._student_ids(int(tokens.max()) + 1)[tokens]
        weights = [weight for weight in weights if weight.requires_grad]
        total = at_least_float32(states.new_zeros(()))
        gradients: list[Tensor] = []  # of the states, chunk by chunk
        sums: list[Tensor] = []  # of the gradients of the weights
        for start in range(0, count, _CHUNK):
            part = slice(start, start + _CHUNK)
            args = (last[part], tokens[part], None if teacher is None else teacher[part])
            if not torch.is_grad_enabled():
                total = total + self._sum(student, states[part], *args)
                continue
            leaf = states[part].detach().requires_grad_()
            with _autocast_without_cache(states.device):
                loss = self._sum(student, leaf, *args)
            gradient, *of_weights = torch.autograd.grad(loss, (leaf, *weights))
            total = total + loss.detach()
            gradients.append(gradient)
            sums = [one + other for one, other in zip(sums, of_weights, strict=True)] if sums else of_weights
        if not gradients:
            return total / count
        known = [torch.cat(gradients), *sums]
        return _KnownGradients.apply(total / count, [each / count for each in known], states, *weights)  # type: ignore[no-any-return]

    @torch.no_grad()
    def teacher_logits(self, last: Tensor) -> TeacherLogits:
        """Return the teacher's logits from its states `last` [P,D]."""
        if not last.shape[0]:
            return TeacherLogits(last.new_zeros(0, 1), last.new_zeros(0))
        chunks = [self._chunk(last[start : start + _CHUNK]) for start in range(0, last.shape[0], _CHUNK)]
        return TeacherLogits(torch.cat([chunk.logits for chunk in chunks]), torch.cat([chunk.sums for chunk in chunks]))

    @torch.no_grad()
    def _chunk(self, last: Tensor) -> TeacherLogits:
        logits, kernels = self._scale(self._teach(last)), _kernels(last.device)
        sums = at_least_float32(logits).logsumexp(-1) if kernels is None else kernels.log_sums(logits)
        return TeacherLogits(logits if self._ids is None else logits.index_select(-1, self._ids), sums)

    def _sum(
        self, student: StudentLogits, states: Tensor, last: Tensor, tokens: Tensor, teacher: TeacherLogits | None
    ) -> Tensor:
        teacher = self._chunk(last) if teacher is None else teacher
        logits = self._scale(student(states))
        kernels = _kernels(states.device)
        if kernels is None or self._kind not in kernels.FAST:
            return divergence(self._kind, logits, teacher.distribution(), tokens).sum()
        return _FusedDivergence.apply(logits, teacher, kernels, self._kind)  # type: ignore[no-any-return]

    def _scale(self, logits: Tensor) -> Tensor:
        return logits if self._temperature == 1 else logits / self._temperature

    def _student_ids(self, known: int) -> Tensor:
        """Return the student's id of each of the teacher's tokens, -1 for none; at least `known` entries."""
        assert self._ids is not None
        if self._index is None or self._index.shape[0] < known:
            size = max(known, int(self._ids.max()) + 1)
            index = torch.full((size,), -1, device=self._ids.device, dtype=torch.int64)
            self._index = index.index_copy(0, self._ids, torch.arange(len(self._ids), device=self._ids.device))
        return self._index
