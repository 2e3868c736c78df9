"""The training loop: read a batch, take a step, evaluate at intervals, and keep a checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.common.errors import PacelineError, UnsupportedError
from paceline.core.costs import Costs
from paceline.models.device import without_planned_attention
from paceline.models.tensor_parallel import leave_in_order
from paceline.training.checkpoints import Checkpoint, Log, trained_tensors
from paceline.training.data.corpus import STOP_FILE, Corpus
from paceline.training.evaluation import Evaluation, evaluate
from paceline.training.recipes.base import Recipe
from paceline.training.train_options import TrainOptions


class TrainingError(PacelineError):
    """Training that cannot continue."""

    exit_code = 6


# ---- One process, or several through Hugging Face Accelerate


class SingleProcess:
    """One process."""

    rank, world = 0, 1

    def prepare(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        return module, optimizer

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def no_sync_until(self, last: bool, module: nn.Module) -> AbstractContextManager[Any]:
        """The processes sum their gradients only with the last batch of a step."""
        return nullcontext()

    def mean(self, value: Tensor) -> Tensor:
        return value

    def wait(self) -> None:
        """Wait for all processes."""


class SeveralProcesses(SingleProcess):
    """The processes of `accelerate launch` or torchrun. Each reads other batches; all take the same step."""

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

    def no_sync_until(self, last: bool, module: nn.Module) -> AbstractContextManager[Any]:
        no_sync: AbstractContextManager[Any] = self._inner.no_sync(module)
        return nullcontext() if last else no_sync

    def mean(self, value: Tensor) -> Tensor:
        mean: Tensor = self._inner.reduce(value, "mean")
        return mean

    def wait(self) -> None:
        self._inner.wait_for_everyone()


# ---- When training ends, when it evaluates, and with which learning rate

_EVALUATIONS = 20  # in all, without `evaluate`
_FINAL_RATE = 0.1  # of the learning rate, at the end
_SHORT = 0.5  # of `minutes`: if less is left for training, there are too many texts
_SPACING = 4.0  # time between two evaluations by the clock, at least, as a multiple of the time of one
_RISE = 50  # steps in which the learning rate rises by the clock, at least: the first steps compile


def learning_rate(done: float, total: float, options: TrainOptions) -> float:
    """After `done` of `total` steps, or seconds. It rises linearly, then falls to a tenth as half a cosine."""
    rise = max(1, round(options.warm_up * total))
    if done < rise:
        return options.learning_rate * min(1.0, (done + 1) / rise)
    share = (done - rise) / max(1, total - rise)
    return options.learning_rate * (_FINAL_RATE + (1 - _FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * share)))


class StepSchedule:
    """Training of a known number of steps."""

    def __init__(self, options: TrainOptions, steps: int) -> None:
        self.options, self.steps = options, steps
        self._interval = options.evaluate or max(1, math.ceil(steps / _EVALUATIONS))

    def start(self, began: float | None) -> str:
        """Begin to count the time, if the schedule needs it; returns a note for the user."""
        return ""

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from the state of a checkpoint."""

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"whole": 0.0, "spent": 0.0, "looked": 0.0}

    def tick(self, step: int) -> None:
        """Note the time, after `step` steps."""

    def is_over(self, step: int) -> bool:
        return step >= self.steps

    def is_evaluation_due(self, step: int) -> bool:
        return step % self._interval == 0 or step == self.steps

    def evaluated(self, seconds: float) -> None:
        """An evaluation took `seconds`."""

    def rate(self, step: int) -> float:
        return learning_rate(step, self.steps, self.options)


class TimeSchedule(StepSchedule):
    """Training of `minutes`; `steps` is an estimate."""

    def __init__(self, options: TrainOptions, steps: int) -> None:
        super().__init__(options, steps)
        self._budget = self._spent = self._evaluated_at = 0.0  # seconds
        self._evaluation_time = 0.0
        self._clock = time.monotonic()

    def start(self, began: float | None) -> str:
        minutes = self.options.minutes or 0.0
        self._clock = time.monotonic()
        self._budget = max(1.0, 60 * minutes - (self._clock - (self._clock if began is None else began)))
        left = f"{self._budget:.0f} s of {minutes:g} minutes are left to learn in"
        return left + ("; fewer --tokens of text would leave more" if self._budget < _SHORT * 60 * minutes else "")

    def resume(self, state: dict[str, Any]) -> None:
        self._clock = time.monotonic()
        self._budget, self._spent, self._evaluated_at = (state[name] for name in ("whole", "spent", "looked"))

    def state(self) -> dict[str, float]:
        return {"whole": self._budget, "spent": self._spent, "looked": self._evaluated_at}

    def tick(self, step: int) -> None:
        now = time.monotonic()
        self._spent += now - self._clock
        self._clock = now
        if step:
            self.steps = max(step, round(step * self._budget / max(1e-9, self._spent)))

    def is_over(self, step: int) -> bool:
        return step > 0 and self._spent >= self._budget

    def is_evaluation_due(self, step: int) -> bool:
        if self.options.evaluate is not None:
            return step % self.options.evaluate == 0
        wait = max(self._budget / _EVALUATIONS, _SPACING * self._evaluation_time)
        return self._spent - self._evaluated_at >= wait

    def evaluated(self, seconds: float) -> None:
        self._evaluation_time, self._evaluated_at = seconds, self._spent

    def rate(self, step: int) -> float:
        by_time = learning_rate(self._spent, self._budget, self.options)
        return by_time * min(1.0, (step + 1) / _RISE)


# ---- The loop

_LOG_INTERVAL = 10  # steps between two lines of the log; the losses are read from the device then


class Reporter(Protocol):
    """Shows the progress of a training."""

    def loading(self, label: str, done: int, total: int | None) -> None: ...
    def writing(self, label: str, done: int, total: int | None) -> None: ...
    def step(self, step: int, steps: int, loss: float, tokens_per_second: float) -> None: ...
    def evaluation(self, step: int, evaluation: Evaluation) -> None: ...
    def note(self, sentence: str) -> None: ...


class NullReporter:
    """Shows nothing."""

    def loading(self, label: str, done: int, total: int | None) -> None: ...
    def writing(self, label: str, done: int, total: int | None) -> None: ...
    def step(self, step: int, steps: int, loss: float, tokens_per_second: float) -> None: ...
    def evaluation(self, step: int, evaluation: Evaluation) -> None: ...
    def note(self, sentence: str) -> None: ...


@dataclass
class Progress:
    """The counters of a training. A checkpoint keeps them under these names."""

    step: int = 0
    best: float = 0.0  # the best score: τ, or the negative loss
    best_step: int = 0
    bad: int = 0  # evaluations since the best one
    tokens: int = 0


class _Losses:
    """The losses and the tokens of the steps since the last line of the log."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.tokens = 0
        self.restart()

    def restart(self) -> None:
        """Count the time from now on."""
        self.since = time.monotonic()

    def clear(self) -> None:
        self.losses, self.tokens = [], 0
        self.restart()

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(1e-9, time.monotonic() - self.since)


class Trainer:
    """Trains a recipe to its end, or continues from a checkpoint. After `run` the recipe has its best weights."""

    def __init__(
        self,
        recipe: Recipe,
        corpus: Corpus,
        options: TrainOptions,
        plan: dict[str, Any],
        *,
        costs: Costs | None = None,
        processes: SingleProcess | None = None,
        reporter: Reporter | None = None,
        cancel: Callable[[], bool] | None = None,
        began: float | None = None,
    ) -> None:
        """plan: what must be equal when a checkpoint is loaded. began: the monotonic time from which `minutes` count;
        None counts from the start of `run`."""
        self.recipe, self.corpus, self.options, self.teacher = recipe, corpus, options, recipe.teacher
        self.processes, self.reporter = processes or SingleProcess(), reporter or NullReporter()
        self._costs, self._cancel, self._began = costs, cancel or (lambda: False), began
        batches = math.ceil(options.epochs * corpus.batches / (options.accumulate * self.processes.world))
        steps = options.steps or max(1, batches)
        self.schedule = TimeSchedule(options, steps) if options.minutes else StepSchedule(options, steps)
        self._weights = [weight for weight in recipe.parameters() if weight.requires_grad]
        self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self._weights, options.learning_rate, (0.9, 0.95), weight_decay=options.weight_decay,
            fused=self.teacher.lm.device.type == "cuda",
        )  # fmt: skip
        self._module, self._optimizer = self.processes.prepare(recipe, self._optimizer)
        self._checkpoint = Checkpoint(options.folder, {**plan, "steps": None if options.minutes else steps})
        self.log = Log(options.folder, options, quiet=self.processes.rank > 0)
        self._held_out = corpus.held_out_batches(options.held_out)
        self.progress, self._losses = Progress(), _Losses()
        self._best_weights: dict[str, Tensor] = {}
        self._last: tuple[int, Evaluation] | None = None  # the last evaluation and its step

    def run(self) -> Evaluation:
        """Train to the end. The checkpoint stays until `finish`."""
        with without_planned_attention():  # batches have many lengths
            self._start()
            while not self._is_over():
                self._step(self.progress.step)
                self.progress.step += 1
                step = self.progress.step
                if step % _LOG_INTERVAL == 0 or step == self.schedule.steps:
                    self._read_losses()
                if self.schedule.is_evaluation_due(step):
                    self._evaluate_and_save()
                if self._cancel():
                    self._read_losses()
                    self._save()
                    raise KeyboardInterrupt
            if self._last is not None and self.progress.best_step == self.progress.step:
                return self._last[1]
            self._restore_best()
            return self._evaluate()

    def _start(self) -> None:
        """Load the checkpoint, if there is one. Evaluate first if the weights come from another drafter: they may be
        the best ones."""
        loaded = self._checkpoint.load(self.recipe, self._optimizer, self.teacher.lm.device)
        self._losses.restart()
        if loaded is not None:
            state, self._best_weights = loaded
            self.progress = Progress(**{name: state[name] for name in asdict(self.progress)})
            self.schedule.resume(state)
            self.log.cut(self.progress.step)
            self.schedule.tick(self.progress.step)
            self.reporter.note(f"going on from step {self.progress.step} of {self.schedule.steps}")
            return
        if note := self.schedule.start(self._began):
            self.reporter.note(note)
        if self.options.start is not None:
            self._evaluate_and_save()

    def _is_over(self) -> bool:
        at, options = self.progress, self.options
        self.schedule.tick(at.step)
        if self.schedule.is_over(at.step):
            if options.minutes:
                self.reporter.note(f"the time is over: it ends with step {at.step}")
                self._evaluate_last()
            return True
        if at.step and self.processes.world == 1 and (options.folder / STOP_FILE).exists():
            self.reporter.note(f"'{STOP_FILE}' was found in '{options.folder}': it ends with step {at.step}")
            self._evaluate_last()
            return True
        if options.patience is None or at.bad < options.patience:
            return False
        self.reporter.note(f"no better τ since step {at.best_step}: it stops here")
        return True

    def _evaluate_last(self) -> None:
        """Evaluate the last step, unless this was done."""
        if self._last is None or self._last[0] != self.progress.step:
            self._evaluate_and_save()

    def _step(self, step: int) -> None:
        rate = self.schedule.rate(step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        count, processes = self.options.accumulate, self.processes
        total = torch.zeros((), device=self.teacher.lm.device)
        for micro in range(count):
            number = (step * count + micro) * processes.world + processes.rank
            batch = self.teacher.read(self.corpus.batch(number), self.recipe.taps)
            with processes.no_sync_until(micro == count - 1, self._module):
                with self._autocast():
                    loss = self._module(batch) / count
                processes.backward(loss)
            total += loss.detach()
            self._losses.tokens += batch.ids.numel() * processes.world
        nn.utils.clip_grad_norm_(self._weights, self.options.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._losses.losses.append(total)

    def _autocast(self) -> AbstractContextManager[Any]:
        """Matrix products in the target's 16-bit dtype, if it has one; sums and weights in float32."""
        dtype, device = self.teacher.lm.dtype, self.teacher.lm.device
        if dtype not in (torch.bfloat16, torch.float16):
            return nullcontext()
        return torch.autocast(device.type, dtype)

    def _read_losses(self) -> None:
        """Read the losses of several steps at once. A loss that is not finite ends the training before a checkpoint is
        written."""
        if not self._losses.losses:
            return
        at = self.progress
        losses = self.processes.mean(torch.stack(self._losses.losses)).tolist()
        for step, loss in enumerate(losses, at.step - len(losses) + 1):
            if not math.isfinite(loss):
                raise TrainingError(
                    f"The loss is {loss} at step {step}; lower --learning-rate (now {self.options.learning_rate:g}) "
                    "and start again" + (f", or go on from the checkpoint in '{self.options.folder}'."
                                         if self._checkpoint.path.exists() else ".")
                )  # fmt: skip
        mean, speed = sum(losses) / len(losses), self._losses.tokens_per_second
        at.tokens += self._losses.tokens
        self.log.write({
            "step": at.step, "loss": mean, "learning_rate": self.schedule.rate(at.step - 1), "tokens": at.tokens,
            "tokens_per_second": round(speed),
        })  # fmt: skip
        self.reporter.step(at.step, self.schedule.steps, mean, speed)
        self._losses.clear()

    def _evaluate_and_save(self) -> None:
        """Evaluate, keep the best weights, and write a checkpoint."""
        self._read_losses()
        at, began = self.progress, time.monotonic()
        evaluation = self._evaluate()
        seconds = time.monotonic() - began
        if evaluation.score > at.best or not self._best_weights:
            at.best, at.best_step, at.bad = evaluation.score, at.step, 0
            self._best_weights = {
                name: tensor.detach().clone() for name, tensor in trained_tensors(self.recipe).items()
            }
        else:
            at.bad += 1
        self.log.write({"step": at.step, "held_out": evaluation.as_dict()})
        self.reporter.evaluation(at.step, evaluation)
        self.schedule.tick(at.step)
        self.schedule.evaluated(seconds)
        self._last = (at.step, evaluation)
        self._save()
        self._losses.restart()

    def _evaluate(self) -> Evaluation:
        batches = (self.teacher.read(tokens, self.recipe.taps) for tokens in self._held_out)
        with self._autocast():
            return evaluate(self.recipe, batches, self._costs, self.recipe.name)

    def _save(self) -> None:
        self.schedule.tick(self.progress.step)
        if self.processes.rank == 0:
            state = {**asdict(self.progress), **self.schedule.state()}
            self._checkpoint.save(self.recipe, self._optimizer, state, self._best_weights)
        self.processes.wait()

    def _restore_best(self) -> None:
        with torch.no_grad():
            for name, tensor in trained_tensors(self.recipe).items():
                if name in self._best_weights:
                    tensor.copy_(self._best_weights[name])

    def finish(self) -> None:
        """Remove the checkpoint: the weights are saved elsewhere."""
        self._checkpoint.remove()
        (self.options.folder / STOP_FILE).unlink(missing_ok=True)
        self.log.close()
