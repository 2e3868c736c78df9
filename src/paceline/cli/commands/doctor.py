"""`paceline doctor`: show what is installed, what this machine can do, and the speed-up of a pair of models here."""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.expected_speed import costs_of, expected, keep_measured
from paceline.cli.settings import command_from
from paceline.cli.terminal import preparing
from paceline.common.errors import PacelineError
from paceline.common.options import like, option
from paceline.engine.decoder_config import TargetOptions

if TYPE_CHECKING:
    from paceline.engine.decoder import SpeculativeDecoder
    from paceline.engine.request import Generation
    from paceline.models import LanguageModel

_TARGET = TargetOptions.target
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numba", "gguf")
_FEATURES = ("avx2", "fma", "avx512f", "avx512vnni", "avx512bf16", "amx-int8", "neon", "dotprod", "i8mm")
_EXTRAS = {"serve": ("fastapi", "uvicorn", "uvloop", "prometheus-client"), "grammar": ("llguidance",)}
_SECONDS = 20.0  # that measuring may take
_TABLE = 300  # passes over one token that measuring v(n) takes, about
_TOKENS = 48  # of the text that is measured
_CGROUP, _MEMINFO = Path("/sys/fs/cgroup"), Path("/proc/meminfo")
_PROMPT = "Explain in a few sentences why the sky is blue, and then say it again in other words."


Found = tuple[str, str, dict[str, Any]]
"""ok, note (worth knowing) or FAIL (Paceline does not work); the text; the facts for --json."""


@dataclass(frozen=True)
class DoctorOptions:
    """The options of `paceline doctor`."""

    target: str | None = like(TargetOptions, "target", default=None, group="", names="model",
                              help=f"The target to try; {_TARGET} if its weights are here.")  # fmt: skip
    draft: str = option("auto", "The drafter or draft model to try.", metavar="DRAFT", names="draft")
    dtype: str | None = like(TargetOptions, "dtype", group="", help="As for `paceline generate`.")
    device: str | None = like(TargetOptions, "device", group="", help="As for `paceline generate`.")
    measure: bool = option(True, "Measure forward passes and one text, for at most 20 seconds.")
    json: bool = option(False, "Write one JSON object to stdout.")


@command_from(DoctorOptions, config=False)
def doctor(ctx: typer.Context, options: DoctorOptions) -> None:
    """Show versions, devices, kernels and caches, try a pair of models, and say what speed-up to expect.

    The exit code is 0 if Paceline works here, also with notes, and 1 if a check failed.
    """
    width, found, ok = min(100, shutil.get_terminal_size((100, 24)).columns), [], True
    for name, (status, text, facts) in _Checks(options).run():
        ok = ok and status != "FAIL"
        found.append({"name": name, "status": status, "text": text, **facts})
        if not options.json:
            head = f"{status:5}{name:11}"
            indent = " " * len(head)
            print(textwrap.fill(text, width, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False))
    if options.json:
        print(json.dumps({"ok": ok, "checks": found}, ensure_ascii=False, indent=1))
    if not ok:
        raise typer.Exit(1)


class _Checks:
    """The checks, and the models that they load."""

    def __init__(self, options: DoctorOptions) -> None:
        self.options = options
        self.lm: LanguageModel | None = None
        self.decoder: SpeculativeDecoder | None = None

    def run(self) -> Iterator[tuple[str, Found]]:
        """Yield each check by its name. A check that fails gives the reason, and the next one runs if it can."""
        for look in (_versions, _processor, _memory, _devices, _kernels, _cache, self._target, self._runner, self._pair,
                     self._template, self._rollback, self._speed_up):  # fmt: skip
            try:
                found = look()
            except PacelineError as error:
                found = "FAIL", str(error), {}
            except Exception as error:  # any error is a result of the check
                found = "FAIL", f"{type(error).__name__}: {' '.join(str(error).split())}", {}
            yield look.__name__.lstrip("_").replace("_", "-"), found
            if (look == self._target and self.lm is None) or (look == self._pair and self.decoder is None):
                return

    def _target(self) -> Found:
        from paceline.models import load

        options = self.options
        if options.target is None and not _weights_here(_TARGET):
            return "note", (
                f"no model was tried: the weights of {_TARGET} are not here; name a model with --target, or run "
                "`make demo`"
            ), {}  # fmt: skip
        name = options.target or _TARGET
        with preparing(f"loading {name}") as progress:
            self.lm = lm = load(name, dtype=options.dtype, device=options.device, progress=progress)
        size = sum(weight.numel() for weight in lm.model.parameters())
        text = f"{lm.name}: {lm.architecture.name}, {lm.layers} layers, {size / 1e6:.4g} million weights, "
        text += f"{str(lm.dtype).removeprefix('torch.')} on {lm.device}, {lm.vocabulary} tokens, context {lm.context}"
        return "ok", text, {"target": lm.name, "architecture": lm.architecture.name}

    def _runner(self) -> Found:
        """Report what runs the forward passes, and why."""
        from paceline.models.runtime import running

        assert self.lm is not None
        how = running(self.lm)
        why = "" if how.by == "eager" else ", because they know every module of this model"
        if how.bits:
            why += "; `--strict` makes texts independent of the batch"
        else:
            why += "; the bits of a text are the same in any batch"
        return "ok", how.describe() + why, {"runner": how.by, "why": how.why, "ties_depend_on": how.bits}

    def _pair(self) -> Found:
        from paceline.engine.decoder import SpeculativeDecoder

        assert self.lm is not None
        self.decoder = SpeculativeDecoder(self.lm, None if self.options.draft == "none" else self.options.draft)
        has_model = getattr(self.decoder.drafter, "lm", None) is not None
        match = f"; the vocabularies match ({self.lm.vocabulary} tokens)" if has_model else ""
        return "ok", self.decoder.describe() + match, {"draft": self.decoder.drafter.name}

    def _template(self) -> Found:
        """Compare chat templates, because a draft model that reads conversations in another form drafts worse."""
        assert self.lm is not None
        assert self.decoder is not None
        own = getattr(self.lm.tokenizer, "chat_template", None)
        small = getattr(self.decoder.drafter, "lm", None)
        facts = {"chat_template": own is not None}
        if own is None:
            return "note", "the target has no chat template: it continues texts, and does not answer messages", facts
        text = "the target has a chat template"
        if small is None or small.tokenizer is None:
            return "ok", text, facts
        same = getattr(small.tokenizer, "chat_template", None) == own
        if same:
            return "ok", f"{text}, and the draft model has the same", {**facts, "same_template": True}
        text += (
            f", and {small.name} has another one or none: it was not trained on such prompts, so fewer of its tokens "
        )
        return "note", text + "may be accepted", {**facts, "same_template": False}

    def _rollback(self) -> Found:
        """Test that the KV cache can discard rejected tokens, which speculation needs."""
        from paceline.models.architecture import TESTED
        from paceline.models.probe import probe

        assert self.lm is not None
        probe(self.lm)
        name = self.lm.architecture.name
        known = "in the test suite" if name in TESTED else "not in the test suite, tried now"
        text = "the KV cache can discard tokens: two texts and a tree give the same logits as without a cache "
        return "ok", text + f"({name}, {known})", {"discards": True}

    def _speed_up(self) -> Found:
        from paceline.bench.machine_use import how_busy
        from paceline.models.pass_timing import costs_for, known_costs
        from paceline.models.runtime import running

        decoder = self.decoder
        assert decoder is not None
        if not decoder.speculates:
            return "note", "plain decoding: nothing is drafted", {}
        if not self.options.measure:
            costs = costs_of(decoder, known_costs)
            if costs is None:
                return "note", "not known: no pass was measured here yet; run again without --no-measure", {}
            return "ok", *expected(costs, decoder.drafter.name)
        deadline = time.perf_counter() + _SECONDS
        busy = how_busy(decoder.target.device)
        text, facts = _one_text(decoder, deadline)
        is_quick = facts["seconds_per_token"] * _TABLE < deadline - time.perf_counter()
        costs = costs_of(decoder, costs_for if is_quick else known_costs)
        if costs is not None:
            more, found = expected(costs, decoder.drafter.name)
            text, facts = f"{text}. {more[:1].upper()}{more[1:]}", {**facts, **found}
        if not facts["same_text"]:  # without a promise of bits, a tie can give another token
            return "note" if running(decoder.target).bits else "FAIL", text, facts
        if busy.loaded:
            return "note", f"{text}. Others use {busy.describe()}: these times say little", facts
        if "measured" in facts:
            keep_measured(decoder, facts["measured"])
        return "ok", text, facts


def _one_text(decoder: SpeculativeDecoder, deadline: float) -> tuple[str, dict[str, Any]]:
    """Time one text plainly and one with drafts, after a warm-up of both. This is no benchmark. Each has half of the
    time, so the texts of a slow model are shorter."""
    from paceline.engine.decoder import SpeculativeDecoder

    lm = decoder.target
    asked: Any = [token % lm.vocabulary for token in range(1, 33)]
    if lm.tokenizer is not None:
        chat = getattr(lm.tokenizer, "chat_template", None)
        asked = [{"role": "user", "content": _PROMPT}] if chat else _PROMPT
    plain = SpeculativeDecoder(lm, None)
    for each in (plain, decoder):
        each.keeps_prefix = False  # both read the prompt
        each.generate(asked, max_new_tokens=2, ignore_eos=True)
    decoder.forget()
    slow = _written(plain, asked, (time.perf_counter() + deadline) / 2)
    fast = _written(decoder, asked, deadline)
    if not slow.tokens or not fast.tokens:
        facts = {"seconds_per_token": _SECONDS, "same_text": True}
        return f"this model writes no token in {_SECONDS / 2:.0f} seconds; `paceline bench` measures it", facts
    ratio = fast.stats.tokens_per_second / max(slow.stats.tokens_per_second, 1e-9)
    common = min(len(slow.tokens), len(fast.tokens))
    same = slow.tokens[:common] == fast.tokens[:common]
    told = "the same text" if same else "ANOTHER TEXT: run `paceline audit`"
    text = f"one text of {common} tokens: {slow.stats.tokens_per_second:.1f} tokens/s plainly, {ratio:.2f} times that "
    text += (
        f"with {decoder.drafter.name} (τ {fast.stats.mean_accepted_length:.2f}, {told}); `paceline bench` measures more"
    )
    return text, {
        "measured": round(ratio, 3),
        "tokens_per_second": round(fast.stats.tokens_per_second, 3),
        "seconds_per_token": median(slow.trace.seconds),
        "same_text": same,
    }


def _written(decoder: SpeculativeDecoder, asked: Any, deadline: float) -> Generation:
    return decoder.generate(
        asked, max_new_tokens=_TOKENS, ignore_eos=True, cancel=lambda: time.perf_counter() > deadline
    )


# ---- the machine


def _versions() -> Found:
    from paceline import __version__
    from paceline.models.device import package_version

    found = {"paceline": __version__, "python": platform.python_version()}
    found |= {name: number for name in _PACKAGES if (number := package_version(name)) is not None}
    lacking = [name for name in _PACKAGES if name not in found]
    text = ", ".join(f"{name} {number}" for name, number in found.items())
    for extra, names in _EXTRAS.items():
        here = {name: number for name in names if (number := package_version(name)) is not None}
        found |= here
        told = ", ".join(f"{name} {number}" for name, number in here.items()) or "not installed"
        text += f"; extra {extra}: {told}"
    if lacking:
        return "note", f"{text}; not installed: {', '.join(lacking)}", {"versions": found}
    return "ok", text, {"versions": found}


def _processor() -> Found:
    import torch

    from paceline.models.cpu.threads import usual_threads
    from paceline.models.device import device_name
    from paceline.models.runtime import cores_here

    name, cores, threads = device_name(torch.device("cpu")), cores_here(), usual_threads()
    try:
        from paceline.kernels.cpu.machine import features

        known = features()
        abilities = [each for each in _FEATURES if each in known]
    except ImportError:  # numba knows them
        abilities = []
    told = f" ({', '.join(abilities)})" if abilities else ""
    facts = {"processor": name, "machine": platform.machine(), "cores": cores, "threads": threads,
             "features": abilities}  # fmt: skip
    return "ok", f"{name}, {platform.machine()}, {cores} cores for us, {threads} threads{told}", facts


def _memory() -> Found:
    """Report the memory that this process may use, of the machine or of its container."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return "note", "unknown: this system does not say", {}
    limit = _number_in(_CGROUP / "memory.max")
    used = _number_in(_CGROUP / "memory.current")
    free = next((1024 * int(line.split()[1]) for line in _lines(_MEMINFO) if line.startswith("MemAvailable")), None)
    if limit is not None and limit < total:
        total, left = limit, None if used is None else limit - used
        free = left if free is None or left is None else min(free, left)
    facts = {"memory_bytes": total, "free_bytes": free}
    text = f"{total / 2**30:.1f} GiB"
    return "ok", text if free is None else f"{text}, {free / 2**30:.1f} GiB free", facts


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("ascii").splitlines()
    except (OSError, UnicodeError):
        return []


def _number_in(file: Path) -> int | None:
    return next((int(line) for line in _lines(file) if line.isdigit()), None)


def _devices() -> Found:
    import torch

    cards = [
        f"cuda:{index} {torch.cuda.get_device_name(index)}, "
        f"{torch.cuda.get_device_properties(index).total_memory / 2**30:.0f} GiB"
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    text = "; ".join(cards) if cards else "no CUDA device: models run on the CPU"
    return "ok" if cards else "note", text, {"devices": ["cpu", *cards]}


def _kernels() -> Found:
    from paceline.kernels.cpu import warm_up
    from paceline.kernels.cpu.machine import missing
    from paceline.models.loading.disk_cache import cache_folder

    why = missing()
    if why is not None:
        text = f"none: {why}; passes run through transformers, which is slower on a CPU"
        return "note", text, {"kernels": None, "why": why}
    place = warm_up.place(cache_folder() / "kernels")
    if warm_up.seal(place).is_file():
        return "ok", f"compiled, in {_short(place)}", {"kernels": str(place)}
    text = "not compiled yet; the first model that runs on the CPU compiles them (about half a minute, once)"
    if not _writable(place):
        text += f", and {_short(place)} cannot be written, so every process does it again; set PACELINE_CACHE"
    return "note", text, {"kernels": str(place)}


def _cache() -> Found:
    from paceline.models.loading.disk_cache import cache_folder

    folder = cache_folder()
    facts = {"cache": str(folder), "writable": _writable(folder)}
    if not facts["writable"]:
        text = (
            f"{_short(folder)} cannot be written: weights, kernels and measured costs are not kept; set PACELINE_CACHE"
        )
        return "note", text, facts
    free = shutil.disk_usage(_nearest(folder)).free
    return "ok", f"{_short(folder)}, writable, {free / 1e9:.0f} GB free", {**facts, "free_bytes": free}


def _nearest(folder: Path) -> Path:
    """Return the folder, or the first one above it that exists."""
    return next(each for each in (folder, *folder.absolute().parents) if each.is_dir())


def _writable(folder: Path) -> bool:
    try:
        tempfile.TemporaryFile(dir=_nearest(folder)).close()
    except OSError:
        return False
    return True


def _short(path: Path) -> str:
    home = os.path.expanduser("~")
    return str(path).replace(home, "~", 1) if home != "~" and str(path).startswith(home + os.sep) else str(path)


def _weights_here(name: str) -> bool:
    from paceline.models.loading import hub
    from paceline.models.loading.catalogue import CATALOGUE
    from paceline.models.loading.disk_cache import WeightCache

    entry = next(each for each in CATALOGUE if each.name == name)
    return (WeightCache().entries / entry.key).is_dir() or hub.cached(entry.hub_id) is not None
