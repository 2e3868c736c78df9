"""The loop of training: read, learn, now and then look how far it has come, and never lose more than a little of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.common.errors import PacelineError, UnsupportedError
from paceline.core.costs import Costs
from paceline.models.runners.device import without_planned_attention
from paceline.models.tensor_parallel import leave_in_order
from paceline.training.checkpoints import Checkpoint, Log, trained
from paceline.training.data.corpus import Corpus
from paceline.training.offline_eval import Outlook, look_ahead
from paceline.training.recipes.base import Recipe
from paceline.training.teacher import Teacher
from paceline.training.train_options import TrainOptions

# ---- One process, or several through Hugging Face Accelerate: the few things a loop of training must ask for


class Alone:
    """One process."""

    rank, world = 0, 1

    def prepare(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        return module, optimizer

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def clip(self, weights: Iterable[Tensor], most: float) -> None:
        nn.utils.clip_grad_norm_(list(weights), most)

    def alone_until(self, last: bool, module: nn.Module) -> AbstractContextManager[Any]:
        """Gradients are summed over processes with the last batch of a step only."""
        return nullcontext()

    def mean(self, value: Tensor) -> Tensor:
        return value

    def wait(self) -> None:
        """Until all processes are here."""


class Several(Alone):
    """As many as `accelerate launch` or torchrun started: each reads other batches, all take the same step."""

    def __init__(self) -> None:
        if find_spec("accelerate") is None:
            raise UnsupportedError("--accelerate needs the package 'accelerate': pip install 'paceline[shared]'.")
        from accelerate import Accelerator

        leave_in_order()
        self._inner: Any = Accelerator()
        self.rank, self.world = int(self._inner.process_index), int(self._inner.num_processes)

    def prepare(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        return self._inner.prepare(module), optimizer

    def backward(self, loss: Tensor) -> None:
        self._inner.backward(loss)

    def alone_until(self, last: bool, module: nn.Module) -> AbstractContextManager[Any]:
        quiet: AbstractContextManager[Any] = self._inner.no_sync(module)
        return nullcontext() if last else quiet

    def mean(self, value: Tensor) -> Tensor:
        summed: Tensor = self._inner.reduce(value, "mean")
        return summed

    def wait(self) -> None:
        self._inner.wait_for_everyone()


# ---- The loop of training: read, learn, now and then look how far it has come, and never lose more than a little of it

_LOOKS = 20  # in all, if nothing is said
_LOG = 10  # steps between two lines of the log: what is on the device is read then
_LOWEST = 0.1  # of the learning rate, at the end
_SHORT = 0.5  # of the time: with less of it left to learn in, the texts were too many
_APART = 4.0  # times as long as a look takes, at least, until the next one by the clock
_RISE = 50  # steps in which it rises at least, where the clock says how far it is: the first ones compile
ENOUGH = "enough"  # a file of this name in its folder ends training: the best so far is what is kept


class TrainingError(PacelineError):
    """Training that cannot go on."""

    exit_code = 6


class Watcher(Protocol):
    """Who looks on."""

    def stepped(self, step: int, steps: int, loss: float, rate: float) -> None: ...
    def looked(self, step: int, outlook: Outlook) -> None: ...
    def noted(self, sentence: str) -> None: ...


@dataclass
class Progress:
    """Where it stands: what a checkpoint holds beside weights."""

    step: int = 0
    best: float = 0.0  # τ, or less than 0 where only the loss counts
    best_step: int = 0
    bad: int = 0  # looks since then
    tokens: int = 0
    whole: float = 0.0  # seconds that learning may take; 0 where steps are counted
    spent: float = 0.0  # of them
    looked: float = 0.0  # the same, at the last look

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def learning_rate(step: float, steps: float, options: TrainOptions) -> float:
    """It rises, and falls like half a cosine to a tenth. Of seconds as of steps."""
    rise = max(1, round(options.warm_up * steps))
    if step < rise:
        return options.learning_rate * min(1.0, (step + 1) / rise)
    share = (step - rise) / max(1, steps - rise)
    return options.learning_rate * (_LOWEST + (1 - _LOWEST) * 0.5 * (1 + math.cos(math.pi * share)))


class Trainer:
    """Trains one course to its end, or from where it was interrupted. After `run` the course holds its best weights."""

    def __init__(
        self,
        course: Recipe,
        corpus: Corpus,
        options: TrainOptions,
        plan: dict[str, Any],
        *,
        costs: Costs | None = None,
        hardware: Alone | None = None,
        watcher: Watcher | None = None,
        cancel: Callable[[], bool] | None = None,
        began: float | None = None,
    ) -> None:
        """began: the monotonic time from which `minutes` count, if not from now."""
        self.course, self.corpus, self.options = course, corpus, options
        self.teacher: Teacher = course.teacher
        self.hardware = hardware or Alone()
        self._costs, self._watcher, self._cancel = costs, watcher, cancel or (lambda: False)
        batches = max(1, math.ceil(options.epochs * corpus.batches / (options.accumulate * self.hardware.world)))
        self.steps = options.steps or batches
        self.every = options.evaluate or max(1, math.ceil(self.steps / _LOOKS))
        self._weights = [weight for weight in course.parameters() if weight.requires_grad]
        fused = self.teacher.lm.device.type == "cuda"
        self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self._weights, options.learning_rate, (0.9, 0.95), weight_decay=options.weight_decay, fused=fused
        )
        self._module, self._optimizer = self.hardware.prepare(course, self._optimizer)
        self.progress = Progress()
        self._best: dict[str, Tensor] = {}
        self._last: tuple[int, Outlook] | None = None  # the last look, and its step
        self._checkpoint = Checkpoint(options.folder, {**plan, "steps": None if options.minutes else self.steps})
        self.log = Log(options.folder, options, quiet=self.hardware.rank > 0)
        self._held_out = corpus.held_out_batches(options.held_out)
        self._losses: list[Tensor] = []
        self._since = self._clock = time.monotonic()
        self._began = self._since if began is None else began
        self._seen = 0
        self._looking = 0.0  # seconds that the last look took

    def run(self) -> Outlook:
        """To the end; a checkpoint stays until somebody calls `done`."""
        with without_planned_attention():  # batches are of many lengths
            return self._run()

    def _run(self) -> Outlook:
        found = self._checkpoint.load(self.course, self._optimizer, self.teacher.lm.device)
        self._since = self._clock = time.monotonic()
        if found is not None:
            self.progress, self._best = Progress(**found[0]), found[1]
            self.log.cut(self.progress.step)
            self._tick()
            self._note(f"going on from step {self.progress.step} of {self.steps}")
        elif self.options.minutes:
            self.progress.whole = max(1.0, 60 * self.options.minutes - (self._clock - self._began))
            left = f"{self.progress.whole:.0f} s of {self.options.minutes:g} minutes are left to learn in"
            short = self.progress.whole < _SHORT * 60 * self.options.minutes
            self._note(left + ("; fewer --tokens of text would leave more" if short else ""))
        if found is None and self.options.start is not None:
            self._look()  # what it begins with may be the best there will be
        while not self._over():
            self._step(self.progress.step)
            self.progress.step += 1
            step = self.progress.step
            if step % _LOG == 0 or step == self.steps:
                self._read_losses()
            if self._due():
                self._look()
            if self._cancel():
                self._read_losses()
                self._save()
                raise KeyboardInterrupt
        if self._last is None or self.progress.best_step != self.progress.step:
            self._restore()
            return self._outlook()
        return self._last[1]

    def _tick(self) -> None:
        """Time passes; by the clock, how many steps there will be is a guess."""
        at, now = self.progress, time.monotonic()
        at.spent += now - self._clock
        self._clock = now
        if at.whole and at.step:
            self.steps = max(at.step, round(at.step * at.whole / max(1e-9, at.spent)))

    def _due(self) -> bool:
        """Is it time to look how far it has come?"""
        at = self.progress
        if at.whole and self.options.evaluate is None:
            return at.spent - at.looked >= max(at.whole / _LOOKS, _APART * self._looking)
        return at.step % self.every == 0 or (at.step == self.steps and not at.whole)

    def _over(self) -> bool:
        self._tick()
        at = self.progress
        if at.whole and at.step and at.spent >= at.whole:
            self._note(f"the time is over: it ends with step {at.step}")
            return self._looked_last()
        if not at.whole and at.step >= self.steps:
            return True
        if at.step and self.hardware.world == 1 and (self.options.folder / ENOUGH).exists():
            self._note(f"'{ENOUGH}' was found in '{self.options.folder}': it ends with step {at.step}")
            return self._looked_last()
        patience = self.options.patience
        if patience is None or at.bad < patience:
            return False
        self._note(f"no better τ since step {at.best_step}: it stops here")
        return True

    def _looked_last(self) -> bool:
        """True; the last step was looked at."""
        if self._last is None or self._last[0] != self.progress.step:
            self._look()
        return True

    def _rate(self, step: int) -> float:
        if self.progress.whole:
            by_clock = learning_rate(self.progress.spent, self.progress.whole, self.options)
            return by_clock * min(1.0, (step + 1) / _RISE)
        return learning_rate(step, self.steps, self.options)

    def _step(self, step: int) -> None:
        rate = self._rate(step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        many, hardware = self.options.accumulate, self.hardware
        total = torch.zeros((), device=self.teacher.lm.device)
        for micro in range(many):
            number = (step * many + micro) * hardware.world + hardware.rank
            lesson = self.teacher.read(self.corpus.batch(number), self.course.taps)
            with hardware.alone_until(micro == many - 1, self._module):
                with self._mixed():
                    loss = self._module(lesson) / many
                hardware.backward(loss)
            total += loss.detach()
            self._seen += lesson.ids.numel() * hardware.world
        hardware.clip(self._weights, self.options.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._losses.append(total)

    def _mixed(self) -> AbstractContextManager[Any]:
        """Products in the target's own 16 bits, where it has such; sums and weights in 32."""
        dtype, device = self.teacher.lm.dtype, self.teacher.lm.device
        if dtype not in (torch.bfloat16, torch.float16):
            return nullcontext()
        return torch.autocast(device.type, dtype)

    def _read_losses(self) -> None:
        """One read for many steps. A loss that is no number ends training before anything of it is kept."""
        if not self._losses:
            return
        losses = self.hardware.mean(torch.stack(self._losses)).tolist()
        first, self._losses = self.progress.step - len(losses), []
        for index, loss in enumerate(losses):
            if not math.isfinite(loss):
                kept = self._checkpoint.path.exists()
                raise TrainingError(
                    f"The loss is {loss} at step {first + index + 1}; lower --learning-rate (now "
                    f"{self.options.learning_rate:g}) and start "
                    + (f"again, or go on from the checkpoint in '{self.options.folder}'." if kept else "again.")
                )
        seconds = max(1e-9, time.monotonic() - self._since)
        rate = self._rate(self.progress.step - 1)
        self.progress.tokens += self._seen
        self.log.write({
            "step": self.progress.step, "loss": sum(losses) / len(losses), "learning_rate": rate,
            "tokens": self.progress.tokens, "tokens_per_second": round(self._seen / seconds),
        })  # fmt: skip
        if self._watcher is not None:
            self._watcher.stepped(self.progress.step, self.steps, sum(losses) / len(losses), self._seen / seconds)
        self._seen, self._since = 0, time.monotonic()

    def _look(self) -> None:
        """See how far it has come; keep the best weights, and a checkpoint."""
        self._read_losses()
        began = time.monotonic()
        outlook = self._outlook()
        self._looking = time.monotonic() - began
        if outlook.score > self.progress.best or not self._best:
            self.progress.best, self.progress.best_step, self.progress.bad = outlook.score, self.progress.step, 0
            self._best = {name: weight.detach().clone() for name, weight in trained(self.course).items()}
        else:
            self.progress.bad += 1
        self.log.write({"step": self.progress.step, "held_out": outlook.as_dict()})
        if self._watcher is not None:
            self._watcher.looked(self.progress.step, outlook)
        self._tick()
        self.progress.looked, self._last = self.progress.spent, (self.progress.step, outlook)
        self._save()
        self._since = time.monotonic()

    def _outlook(self) -> Outlook:
        lessons = (self.teacher.read(batch, self.course.taps) for batch in self._held_out)
        with self._mixed():
            return look_ahead(self.course, lessons, self._costs, self.course.name)

    def _save(self) -> None:
        self._tick()
        if self.hardware.rank == 0:
            self._checkpoint.save(self.course, self._optimizer, self.progress.as_dict(), self._best)
        self.hardware.wait()

    def _restore(self) -> None:
        with torch.no_grad():
            for name, weight in trained(self.course).items():
                if name in self._best:
                    weight.copy_(self._best[name])

    def done(self) -> None:
        """What was trained is saved elsewhere: nothing is to be gone on with."""
        self._checkpoint.remove()
        (self.options.folder / ENOUGH).unlink(missing_ok=True)
        self.log.close()

    def _note(self, sentence: str) -> None:
        if self._watcher is not None:
            self._watcher.noted(sentence)
