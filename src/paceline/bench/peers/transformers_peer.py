"""Hugging Face `generate` as a candidate: plain, assisted, prompt lookup and early exit, over the same weights.

The user's model does not change: `generate` runs on a shell of it (another module object that shares all modules
below), which has its own generation config, hooks and, for early exit, its own model config. A config as an argument of
`generate` is not enough: `generate` replaces None in it by values of the model's config, such as the end of text.

A streamer records the arrivals: `generate` reads every new token to the host anyway, so that it costs one small copy a
step. A hook counts passes of the target, and keeps the cache, whose bytes are measured after the clock has stopped.
"""

from __future__ import annotations

import copy
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from paceline.bench.candidate import Cancel, Plan, Run, Task, too_long
from paceline.bench.machine_use import cache_bytes
from paceline.common.errors import UnsupportedError, in_one_line
from paceline.models.device import finish
from paceline.models.language_model import LanguageModel
from paceline.models.loading.hub import quiet
from paceline.models.module_views import layers_of, shell

_SAMPLERS = ("temperature", "top_k", "top_p", "min_p", "typical_p")
_ALONE = "assisted generation of transformers decodes one text at a time"


class HuggingFace:
    """`generate` on the target. `settings` go into its generation config; an assistant is a shell as well.

    Ends of text are switched off and the length is fixed, so that no processor has to hold anything back. `gamma` has
    its meaning in Paceline: a constant number of drafted tokens, without a threshold of confidence.
    """

    library = "transformers"

    def __init__(
        self,
        name: str,
        lm: LanguageModel,
        *,
        gamma: int = 0,
        settings: dict[str, Any] | None = None,
        draft: LanguageModel | None = None,
        sampled: bool = False,
    ) -> None:
        if not lm.model.can_generate():
            raise UnsupportedError(f"{lm.name} has no `generate`, so '{name}' cannot take part.")
        self.name, self.lm, self.gamma = name, lm, gamma
        self.speculates = gamma > 0
        self.drafter = ""  # the cost of its draft is unknown
        self.exact = not sampled
        self._settings = {"use_cache": True, "eos_token_id": None, "pad_token_id": _padding(lm), **(settings or {})}
        if gamma:
            self._settings |= _constant(gamma)
        self._model = _apart(lm.model)
        self._assistant: Any = None
        if draft is not None:
            self._assistant = _apart(draft.model)
            self._assistant.generation_config = _config(draft, {**_constant(gamma), "pad_token_id": _padding(draft)})
        self._contexts = [lm.context] + ([] if draft is None else [draft.context])
        self._watch = _Watch(self._model, lm.layers)

    def refuses(self, task: Task, plan: Plan) -> str | None:
        if self.speculates and len(task.prompts) > 1:
            return _ALONE
        for name in plan.sampling:
            if name not in _SAMPLERS:
                return f"generate of transformers has no {name}"
        return too_long(task, plan, min(self._contexts))

    def run(self, task: Task, plan: Plan, repeat: int, cancel: Cancel) -> Run:
        config = _config(self.lm, {**self._settings, **_sampling(plan), "max_new_tokens": plan.tokens})
        self._model.generation_config = config
        width = max(len(prompt) for prompt in task.prompts)
        padding = self._settings["pad_token_id"]
        ids = torch.tensor([[padding] * (width - len(prompt)) + list(prompt) for prompt in task.prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in task.prompts])
        inputs: dict[str, Any] = {"input_ids": ids.to(self.lm.device), "attention_mask": mask.to(self.lm.device)}
        if self._assistant is not None:
            inputs["assistant_model"] = self._assistant
        cards = [self.lm.device] if self.lm.device.type == "cuda" else []
        with quiet(), torch.random.fork_rng(devices=cards), self._watch:
            torch.manual_seed(plan.seed)
            try:
                written, seconds, arrivals = self._timed(config, inputs, cancel)
            except _StoppedError:
                return Run.cancelled(self.name, task, repeat)
            passes, cache = self._watch.passes, cache_bytes(self._watch.cache)
        tokens = written[:, width:].tolist()
        return Run.finished(self.name, task, plan, repeat, tokens, seconds, arrivals, passes=passes, cache=cache)

    def _timed(self, config: Any, inputs: dict[str, Any], cancel: Cancel) -> tuple[Any, float, list[float]]:
        device = self.lm.device
        finish(device)
        streamer = _Arrivals(cancel)
        try:
            written = self._model.generate(**inputs, generation_config=config, streamer=streamer)
        except _StoppedError:
            raise
        except Exception as error:  # transformers raises every kind
            raise UnsupportedError(f"'{self.name}' cannot run {self.lm.name}: {in_one_line(error)}.") from error
        finish(device)
        return written, time.perf_counter() - streamer.started, streamer.arrivals

    def close(self) -> None:
        """Drop the shells. The model that they were made of does not change."""
        self._model = self._assistant = None


def early_exit(name: str, lm: LanguageModel, layers: int, gamma: int, sampled: bool = False) -> HuggingFace:
    """Return self-speculation after `layers` layers. Transformers sets `num_hidden_layers` while it drafts, so only
    architectures whose forward reads it can do it. This is tested here."""
    peer = HuggingFace(name, lm, gamma=gamma, settings={"assistant_early_exit": layers}, sampled=sampled)
    _give_own_config(peer._model)
    if not 0 < layers < lm.layers:
        raise UnsupportedError(
            f"'{name}' exits after one of the first {lm.layers - 1} layers of {lm.name}, not {layers}."
        )
    if not _exits(peer._model, lm, layers):
        raise UnsupportedError(f"{lm.name} ({lm.architecture.name}) cannot exit early in transformers.")
    return peer


def _give_own_config(model: Any) -> None:
    """Give the shell and the body inside it one config, which only they share."""
    prefix = model.base_model_prefix
    body = model._modules.get(prefix)
    config = copy.copy(model.config)
    model.__dict__["config"] = config
    if body is not None:
        inside = shell(body)
        inside.__dict__["config"] = config
        model._modules[prefix] = inside


def _exits(model: Any, lm: LanguageModel, layers: int) -> bool:
    """Return whether the last layer is left out if the config says that there are fewer."""
    config, reached = model.config, []
    hook = layers_of(lm)[-1].register_forward_pre_hook(lambda *_: reached.append(True))
    config.num_hidden_layers = layers
    try:
        with quiet(), torch.inference_mode():
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=lm.device), use_cache=False)
    finally:
        config.num_hidden_layers = lm.layers
        hook.remove()
    return not reached


def _apart(model: Any) -> Any:
    """Return a new module object with its own hooks. Weights and all modules below are the model's."""
    fresh = shell(model)
    for kind in ("hooks", "pre_hooks", "hooks_with_kwargs", "pre_hooks_with_kwargs"):
        fresh.__dict__[f"_forward_{kind}"] = OrderedDict(model.__dict__[f"_forward_{kind}"])
    return fresh


def _config(lm: LanguageModel, settings: dict[str, Any]) -> Any:
    """Return a generation config with these settings and nothing of the model's own, which Paceline ignores too."""
    made = type(lm.model.generation_config)()
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def _constant(gamma: int) -> dict[str, Any]:
    """Return a fixed number of drafted tokens in each round."""
    return {"num_assistant_tokens": gamma, "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0}  # fmt: skip


def _padding(lm: LanguageModel) -> int:
    found = getattr(lm.model.generation_config, "pad_token_id", None)
    if found is None:
        found = getattr(lm.model.config, "pad_token_id", None)
    return int(found) if isinstance(found, int) and found >= 0 else (*lm.eos, 0)[0]


def _sampling(plan: Plan) -> dict[str, Any]:
    """Return the controls for transformers. A control that is not given is off, not 50 for top_k."""
    if plan.sampling.get("temperature") == 0 or not plan.sampling:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, **plan.sampling}


class _StoppedError(Exception):
    """Stops `generate` in the middle. There is no other way."""


class _Arrivals:
    """A streamer that reads the clock. The first `put` is the prompt, after the clock has been started."""

    def __init__(self, cancel: Cancel) -> None:
        self._cancel = cancel
        self._prompt = True
        self.arrivals: list[float] = []
        self.started = time.perf_counter()

    def put(self, value: Any) -> None:
        if self._prompt:
            self._prompt = False
            return
        new = value.shape[1] if value.ndim == 2 else 1  # [1,Q] when assisted, else one token of every row
        self.arrivals += [time.perf_counter() - self.started] * new
        if self._cancel():
            raise _StoppedError

    def end(self) -> None:
        """Do nothing: no token is held back."""


@dataclass
class _Watch:
    """Counts inside its context how often the whole model ran, and keeps the cache that it last wrote to."""

    model: Any
    layers: int
    passes: int = 0
    cache: Any = None

    def __enter__(self) -> _Watch:
        self.passes, self.cache = 0, None
        self._hook = self.model.register_forward_pre_hook(self._see, with_kwargs=True)
        return self

    def _see(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        config = module.config.get_text_config(decoder=True)
        if config.num_hidden_layers == self.layers:  # not while it drafts with its first layers
            self.passes += 1
            self.cache = kwargs.get("past_key_values")

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        self.cache = None
