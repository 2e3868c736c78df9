"""The training loop: read a batch, take a step, evaluate at intervals. Its log, and its checkpoint.

A checkpoint is one safetensors file with the weights, the state of the optimizer and the step. Nothing is unpickled.
The old file stays until the new one is complete.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.common.errors import InputError, PacelineError, UnsupportedError
from paceline.common.progress import Reporter
from paceline.common.text_formats import parse_json
from paceline.core.costs import Costs
from paceline.integrations.provenance import start
from paceline.models.device import without_planned_attention
from paceline.models.loading.disk_cache import replacing
from paceline.models.loading.weight_check import reading
from paceline.models.tensor_parallel import leave_in_order
from paceline.training.corpus import STOP_FILE, Corpus
from paceline.training.evaluation import Evaluation, evaluate
from paceline.training.recipes.base import Recipe
from paceline.training.train_options import TrainOptions


class TrainingError(PacelineError):
    """Training that cannot continue."""

    exit_code = 6


class Processes:
    """This process, or those of `accelerate launch` and torchrun. Each reads other batches; all take the same step."""

    def __init__(self, several: bool = False) -> None:
        self.rank, self.world = 0, 1
        self._inner: Any = None
        if not several:
            return
        if find_spec("accelerate") is None:
            raise UnsupportedError("--accelerate needs the package 'accelerate': pip install 'paceline[shared]'.")
        from accelerate import Accelerator

        leave_in_order()
        self._inner = Accelerator()
        self.rank, self.world = int(self._inner.process_index), int(self._inner.num_processes)

    def prepare(self, module: nn.Module) -> nn.Module:
        return module if self._inner is None else self._inner.prepare(module)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor) -> None:
        (torch.Tensor if self._inner is None else self._inner).backward(loss)

    def no_sync_until(self, last: bool, module: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which the processes sum their gradients only with the last batch of a step."""
        return nullcontext() if last or self._inner is None else self._inner.no_sync(module)  # type: ignore[no-any-return]

    def mean(self, value: Tensor) -> Tensor:
        return value if self._inner is None else self._inner.reduce(value, "mean")  # type: ignore[no-any-return]

    def wait(self) -> None:
        """Wait for all processes."""
        if self._inner is not None:
            self._inner.wait_for_everyone()


# ---- When training ends, when it evaluates, and with which learning rate

_EVALUATIONS = 20  # in all, without `evaluate`
_FINAL_RATE = 0.1  # of the learning rate, at the end
_SHORT = 0.5  # of `minutes`: if less is left for training, there are too many texts
_SPACING = 4.0  # time between two evaluations by the clock, at least, as a multiple of the time of one
_RISE = 50  # steps in which the learning rate rises by the clock, at least: the first steps compile


def learning_rate(done: float, total: float, options: TrainOptions) -> float:
    """Return the rate after `done` of `total` steps, or seconds. It rises linearly, then falls as half a cosine."""
    rise = max(1, round(options.warm_up * total))
    if done < rise:
        return options.learning_rate * min(1.0, (done + 1) / rise)
    share = (done - rise) / max(1, total - rise)
    return options.learning_rate * (_FINAL_RATE + (1 - _FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * share)))


class Schedule:
    """The schedule of a number of steps, or of `minutes`; then `steps` is an estimate."""

    def __init__(self, options: TrainOptions, steps: int) -> None:
        self.options, self.steps = options, steps
        self._interval = options.evaluate or max(1, math.ceil(steps / _EVALUATIONS))
        self._budget = self._spent = self._evaluated_at = 0.0  # seconds; these stay 0 without `minutes`
        self._evaluation_time = 0.0
        self._clock = time.monotonic()

    def start(self, began: float | None) -> str:
        """Begin to count the time, and return a note for the user."""
        if not (minutes := self.options.minutes):
            return ""
        self._clock = time.monotonic()
        self._budget = max(1.0, 60 * minutes - (self._clock - (self._clock if began is None else began)))
        left = f"{self._budget:.0f} s of {minutes:g} minutes are left for training"
        return left + ("; fewer --tokens of text would leave more" if self._budget < _SHORT * 60 * minutes else "")

    def resume(self, state: Mapping[str, Any]) -> None:
        self._clock = time.monotonic()
        self._budget, self._spent, self._evaluated_at = (state[name] for name in ("whole", "spent", "looked"))

    def state(self) -> dict[str, float]:
        """Return the values that a checkpoint keeps."""
        return {"whole": self._budget, "spent": self._spent, "looked": self._evaluated_at}

    def tick(self, step: int) -> None:
        """Note the time, after `step` steps."""
        if not self.options.minutes:
            return
        now = time.monotonic()
        self._spent += now - self._clock
        self._clock = now
        if step:
            self.steps = max(step, round(step * self._budget / max(1e-9, self._spent)))

    def is_over(self, step: int) -> bool:
        return step > 0 and self._spent >= self._budget if self.options.minutes else step >= self.steps

    def is_evaluation_due(self, step: int) -> bool:
        if not self.options.minutes:
            return step % self._interval == 0 or step == self.steps
        if self.options.evaluate is not None:
            return step % self.options.evaluate == 0
        wait = max(self._budget / _EVALUATIONS, _SPACING * self._evaluation_time)
        return self._spent - self._evaluated_at >= wait

    def evaluated(self, seconds: float) -> None:
        """Note that an evaluation took `seconds`."""
        self._evaluation_time, self._evaluated_at = seconds, self._spent

    def rate(self, step: int) -> float:
        if not self.options.minutes:
            return learning_rate(step, self.steps, self.options)
        return learning_rate(self._spent, self._budget, self.options) * min(1.0, (step + 1) / _RISE)


# ---- The log, lines of JSON, and the checkpoint

LOG_NAME = "training.jsonl"


class Log:
    """Appends to training.jsonl in the folder of the training. quiet: another process writes it."""

    def __init__(self, folder: Path, options: TrainOptions, quiet: bool = False) -> None:
        self._path, self._quiet = folder / LOG_NAME, quiet
        self._run: Any = None
        if options.wandb and not quiet:
            self._run = start("train", asdict(options), folder)

    def write(self, line: Mapping[str, Any]) -> None:
        if self._quiet:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self._run is not None:
            self._run.log(dict(_flat(line)), step=int(line.get("step", 0)))

    def cut(self, step: int) -> None:
        """Remove the lines after `step`: those steps run again."""
        if self._quiet or not self._path.exists():
            return
        lines = self._path.read_text("utf-8").splitlines(keepends=True)
        self._path.write_text("".join(line for line in lines if _step(line) <= step), "utf-8")

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def _step(line: str) -> int:
    """Return the step of a line. An incomplete line, which a killed process leaves, belongs to no step."""
    try:
        return int(parse_json(line).get("step", 0))
    except (AttributeError, TypeError, ValueError):
        return 1 << 62


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values under names with slashes."""
    if isinstance(value, (list, tuple)):
        value = {str(index): item for index, item in enumerate(value)}
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}/{key}" if name else key)
    elif value is not None:
        yield name, value


NAME = "checkpoint.safetensors"
_BEST = "best/"


class Checkpoint:
    """The file in the folder of a training. `plan` must be equal whenever it is opened."""

    def __init__(self, folder: Path, plan: Mapping[str, Any]) -> None:
        self.path = folder / NAME
        self._plan = json.loads(json.dumps(plan, default=str))

    def save(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], best: Mapping[str, Tensor]
    ) -> None:
        """state: the step and other plain values. best: the best weights so far."""
        tensors = {f"weights/{name}": weight for name, weight in trained_tensors(module).items()}
        tensors |= {f"{_BEST}{name}": weight for name, weight in best.items()}
        for index, values in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{index}/{name}": value for name, value in values.items()}
        on_cpu = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors.items()}
        about = {"state": json.dumps(dict(state)), "plan": json.dumps(self._plan)}
        before = "the checkpoint before it is intact" if self.path.exists() else "there is none before it"
        with replacing(self.path, "The checkpoint ", before) as part:
            save_file(on_cpu, part, about)

    def load(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Load the weights and the optimizer. Return the state and the best weights, or None if there is no file."""
        if not self.path.exists():
            return None
        optimizer_state: dict[int, dict[str, Tensor]] = {}
        with reading("The checkpoint", self.path, "; remove it to start from the beginning"):
            with safe_open(self.path, "pt") as file:
                about = file.metadata()
                tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118
            plan, state = parse_json(about["plan"]), parse_json(about["state"])
            if not isinstance(plan, dict) or not isinstance(state, dict):
                raise ValueError("its plan and its state are no JSON objects")
            for name, value in self._plan.items():
                if plan.get(name) != value:
                    raise InputError(
                        f"'{self.path.parent}' holds training with {name} = {plan.get(name)!r}, not {value!r}; give "
                        "the same to go on with it, or another --out to start from the beginning."
                    )
            with torch.no_grad():
                for name, weight in trained_tensors(module).items():
                    weight.copy_(tensors[f"weights/{name}"])
            for name, tensor in tensors.items():
                if name.startswith("optimizer/"):
                    _, index, key = name.split("/")
                    optimizer_state.setdefault(int(index), {})[key] = tensor.cpu() if key == "step" else tensor
            if optimizer_state:
                groups = optimizer.state_dict()["param_groups"]
                optimizer.load_state_dict({"state": optimizer_state, "param_groups": groups})
        best = {name[len(_BEST) :]: tensor for name, tensor in tensors.items() if name.startswith(_BEST)}
        return state, best


def trained_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights with gradients and the buffers, by name."""
    weights: dict[str, Tensor] = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    return {**weights, **dict(module.named_buffers())}


# ---- The loop

_LOG_INTERVAL = 10  # steps between two lines of the log; the losses are read from the device then


@dataclass
class Progress:
    """The counters of a training. A checkpoint keeps them under these names."""

    step: int = 0
    best: float = 0.0  # the best score: τ, or the negative loss
    best_step: int = 0
    bad: int = 0  # evaluations since the best one
    tokens: int = 0


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
        processes: Processes | None = None,
        reporter: Reporter | None = None,
        cancel: Callable[[], bool] | None = None,
        began: float | None = None,
    ) -> None:
        """plan: what must be equal when a checkpoint is loaded. began: the monotonic time from which `minutes` count;
        None counts from the start of `run`."""
        self.recipe, self.corpus, self.options, self.teacher = recipe, corpus, options, recipe.teacher
        self.processes, self.reporter = processes or Processes(), reporter or Reporter()
        self._costs, self._cancel, self._began = costs, cancel or (lambda: False), began
        batches = math.ceil(options.epochs * corpus.batches / (options.accumulate * self.processes.world))
        steps = options.steps or max(1, batches)
        self.schedule = Schedule(options, steps)
        self._weights = [weight for weight in recipe.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._weights, options.learning_rate, (0.9, 0.95), weight_decay=options.weight_decay,
            fused=self.teacher.lm.device.type == "cuda",
        )  # fmt: skip
        self._module = self.processes.prepare(recipe)
        self._checkpoint = Checkpoint(options.folder, {**plan, "steps": None if options.minutes else steps})
        self.log = Log(options.folder, options, quiet=self.processes.rank > 0)
        self._held_out = corpus.held_out_batches(options.held_out)
        self.progress = Progress()
        self._losses: list[Tensor] = []  # since the last line of the log, with the tokens and the time
        self._tokens, self._since = 0, time.monotonic()
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
            with torch.no_grad():
                for name, tensor in trained_tensors(self.recipe).items():
                    if name in self._best_weights:
                        tensor.copy_(self._best_weights[name])
            return self._evaluate()

    def _start(self) -> None:
        """Load the checkpoint, if there is one. Evaluate first if the weights come from another drafter: they may be
        the best ones."""
        loaded = self._checkpoint.load(self.recipe, self._optimizer, self.teacher.lm.device)
        self._since = time.monotonic()
        if loaded is not None:
            state, self._best_weights = loaded
            self.progress = Progress(**{name: state[name] for name in asdict(self.progress)})
            self.schedule.resume(state)
            self.log.cut(self.progress.step)
            self.schedule.tick(self.progress.step)
            self.reporter.note(f"continuing from step {self.progress.step} of {self.schedule.steps}")
            return
        if note := self.schedule.start(self._began):
            self.reporter.note(note)
        if self.options.start is not None:
            self._evaluate_and_save()

    def _is_over(self) -> bool:
        at, options = self.progress, self.options
        self.schedule.tick(at.step)
        if self.schedule.is_over(at.step):
            if not options.minutes:
                return True
            reason = "the time is over"
        elif at.step and self.processes.world == 1 and (options.folder / STOP_FILE).exists():
            reason = f"'{STOP_FILE}' was found in '{options.folder}'"
        elif options.patience is not None and at.bad >= options.patience:
            self.reporter.note(f"no better τ since step {at.best_step}: it stops here")
            return True
        else:
            return False
        self.reporter.note(f"{reason}: it ends with step {at.step}")
        if self._last is None or self._last[0] != at.step:
            self._evaluate_and_save()
        return True

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
            self._tokens += batch.ids.numel() * processes.world
        nn.utils.clip_grad_norm_(self._weights, self.options.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._losses.append(total)

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return a context: matrix products in the target's 16-bit dtype, if it has one; sums, weights in float32."""
        lm = self.teacher.lm
        return torch.autocast(lm.device.type, lm.dtype, enabled=lm.dtype in (torch.bfloat16, torch.float16))

    def _read_losses(self) -> None:
        """Read the losses of several steps at once. A loss that is not finite ends the training before a checkpoint is
        written."""
        if not self._losses:
            return
        at = self.progress
        losses = self.processes.mean(torch.stack(self._losses)).tolist()
        for step, loss in enumerate(losses, at.step - len(losses) + 1):
            if not math.isfinite(loss):
                raise TrainingError(
                    f"The loss is {loss} at step {step}; lower --learning-rate (now {self.options.learning_rate:g}) "
                    "and start again" + (f", or go on from the checkpoint in '{self.options.folder}'."
                                         if self._checkpoint.path.exists() else ".")
                )  # fmt: skip
        mean, speed = sum(losses) / len(losses), self._tokens / max(1e-9, time.monotonic() - self._since)
        at.tokens += self._tokens
        self.log.write({
            "step": at.step, "loss": mean, "learning_rate": self.schedule.rate(at.step - 1), "tokens": at.tokens,
            "tokens_per_second": round(speed),
        })  # fmt: skip
        self.reporter("training", at.step, self.schedule.steps, f"loss {mean:.4f}, {speed:,.0f} tokens/s", "steps")
        self._losses, self._tokens, self._since = [], 0, time.monotonic()

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
        self.reporter.note(f"step {at.step}: {evaluation}")
        self.schedule.tick(at.step)
        self.schedule.evaluated(seconds)
        self._last = (at.step, evaluation)
        self._save()
        self._since = time.monotonic()

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

    def finish(self) -> None:
        """Remove the checkpoint: the weights are saved elsewhere."""
        self._checkpoint.path.unlink(missing_ok=True)
        (self.options.folder / STOP_FILE).unlink(missing_ok=True)
        self.log.close()
