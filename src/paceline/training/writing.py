"""Texts that the target writes itself, so that training needs no data set.

A chat model starts where the user speaks, with the first words of a question or with none. It writes a question and
then the answer (Magpie, arXiv 2406.08464). A base model continues from its first token or from first words. Text i of
a shard follows from the seed, the shard and i, so an interrupted run continues with the same texts.
"""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.resources import files
from typing import Any, NamedTuple

import torch

from paceline.common.errors import InputError, in_one_line
from paceline.common.progress import Reporter
from paceline.engine.decoder import SpeculativeDecoder
from paceline.models import load
from paceline.models.language_model import LanguageModel
from paceline.training.corpus import STOP_FILE, Shards, Text
from paceline.training.train_options import WritingPlan

# ---- The chat template as token ids

_TURNS = ("qzxuone", "qzxatwo", "qzxuthree")  # stand for turns; no template contains these words


class ChatFrame(NamedTuple):
    """opening: up to the user's words. answer: from the end of the user's words to the start of the answer. again: from
    the end of the answer to the user's next words; [] if the template has no second turn."""

    opening: list[int]
    answer: list[int]
    again: list[int]


def chat_frame(lm: LanguageModel) -> ChatFrame:
    """Return the parts of the model's chat template, found by rendering three turns."""
    tokenizer = lm.tokenizer
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"{lm.name} has no chat template, so it cannot write conversations; use --style text, or give --data."
        )
    first, second, third = _TURNS
    turns = [{"role": role, "content": word} for role, word in zip(("user", "assistant", "user"), _TURNS, strict=True)]
    render = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    try:
        opening, _, answer = str(render(turns[:1])).partition(first)
    except Exception as error:  # templates are programs and fail in their own ways
        raise InputError(f"The chat template of {lm.name} cannot write a conversation: {error}.") from error
    if not answer:
        raise InputError(
            f"The chat template of {lm.name} does not say where an answer begins; use --style text, or give --data."
        )
    again = ""
    with suppress(Exception):  # a template may refuse a second turn
        thrice = str(render(turns))
        if thrice.startswith(opening + first + answer) and third in thrice:
            again = thrice.partition(second)[2].partition(third)[0]
    return ChatFrame(*(list(tokenizer.encode(text, add_special_tokens=False)) for text in (opening, answer, again)))


# ---- One process writes

# Takes the number of a shard, and an estimate of how many shards are still needed (None: unknown). Returns the texts of
# the shard with duplicates, or None to stop.
WriteShard = Callable[[int, "int | None"], "list[Text] | None"]
_KEY = 48  # tokens of a question that identify it
_MIN_QUESTION = 3  # tokens
_TRIES = 3  # shards in a row without a new text, after which the target has nothing new to write
_BASE_START = 16  # tokens of a base model's text that are sampled, so that greedy texts differ


def first_words() -> list[str]:
    """Return beginnings of questions of many kinds."""
    return list(json.loads((files("paceline.training") / "openings.json").read_text("utf-8")))


class Writer:
    """Writes shards of texts until there are enough tokens."""

    def __init__(self, lm: LanguageModel, plan: WritingPlan, beginnings: Sequence[str] | None = None) -> None:
        self.plan = plan.resolve_style(lm)
        self._frame: ChatFrame | None = chat_frame(lm) if self.plan.style == "chat" else None
        without_tokenizer = copy.copy(lm)
        without_tokenizer.tokenizer = None  # only tokens are needed, so nothing is detokenized
        self._decoder = SpeculativeDecoder(without_tokenizer, draft=None, rows=self.plan.rows)
        self._lm = lm
        self._beginnings: list[list[int]] = []
        if lm.tokenizer is not None:
            texts = first_words() if beginnings is None else beginnings
            self._beginnings = [list(lm.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        self._known: set[int] = set()

    def fill(
        self,
        shards: Shards,
        progress: Reporter | None = None,
        cancel: Callable[[], bool] | None = None,
        write_shard: WriteShard | None = None,
    ) -> int:
        """Append shards until there are enough tokens, and return the number of tokens. `write_shard` replaces the
        writing in this process."""
        done, number = 0, len(shards)
        for text in shards.texts():
            done += len(text.tokens)
            self._is_new(text)
        idle, stop_file = 0, shards.folder / STOP_FILE
        while done < self.plan.tokens and idle < _TRIES and not (done and stop_file.exists()):
            if write_shard is not None:
                raw = write_shard(number, math.ceil((self.plan.tokens - done) * number / done) if done else None)
            else:
                raw = None if cancel is not None and cancel() else self.write(number)
            if raw is None:
                break
            texts = [text for text in raw if self._is_new(text)]
            idle = 0 if texts else idle + 1
            shards.append(texts)
            number += 1
            done += sum(len(text.tokens) for text in texts)
            if progress is not None:
                progress("the target writes", min(done, self.plan.tokens), self.plan.tokens, unit="tokens")
        if idle == _TRIES:
            raise InputError(
                f"{self._lm.name} wrote nothing new in {_TRIES * self.plan.shard} texts; raise the temperatures, or "
                "give --data."
            )
        return done

    def _is_new(self, text: Text) -> bool:
        """Remember the question of a text, or the start of a base model's text. Return False if it was known."""
        skip = 0 if self._frame is None else len(self._frame.opening)
        stop = text.prompt if self._frame is not None else len(text.tokens)
        key = hash(tuple(text.tokens[skip : min(stop, skip + _KEY)]))
        if key in self._known:
            return False
        self._known.add(key)
        return True

    def write(self, number: int) -> list[Text]:
        """Return the texts of shard `number`, with duplicates. They follow from the plan and the number."""
        rngs = [random.Random(f"{self.plan.seed}/{number}/{i}") for i in range(self.plan.shard)]
        led, words = self.plan.led, self._beginnings
        beginnings = [rng.choice(words) if words and rng.random() < led else [] for rng in rngs]
        temperatures = [rng.choice(self.plan.temperatures) for rng in rngs]
        if self._frame is None:
            return self._continue_texts(beginnings, temperatures, rngs)
        frame = self._frame
        texts = [frame.opening + beginning for beginning in beginnings]
        texts = self._ask(texts, rngs)
        asked = [i for i, text in enumerate(texts) if len(text) >= len(frame.opening) + _MIN_QUESTION]
        rngs, temperatures = [rngs[i] for i in asked], [temperatures[i] for i in asked]
        texts = [texts[i] + frame.answer for i in asked]
        prompts = [len(text) for text in texts]
        texts = self._answer(texts, rngs, temperatures)
        again = [i for i, rng in enumerate(rngs) if rng.random() < self.plan.twice and frame.again]
        longer = [(texts[i][:-1] if texts[i][-1] in self._lm.eos else texts[i]) + frame.again for i in again]
        rngs, temperatures = [rngs[i] for i in again], [temperatures[i] for i in again]
        longer = [text + frame.answer for text in self._ask(longer, rngs)]
        for i, text in zip(again, self._answer(longer, rngs, temperatures), strict=True):
            texts[i] = text
        return [Text(text, prompt) for text, prompt in zip(texts, prompts, strict=True)]

    def _ask(self, texts: list[list[int]], rngs: list[random.Random]) -> list[list[int]]:
        assert self._frame is not None
        user_end = self._frame.answer[0]
        return self._turn(texts, rngs, self.plan.question, [self.plan.asking] * len(texts), (user_end,))

    def _answer(self, texts: list[list[int]], rngs: list[random.Random], temperatures: list[float]) -> list[list[int]]:
        return self._turn(texts, rngs, self.plan.answer, temperatures, self._lm.eos, keep_end=True)

    def _continue_texts(
        self, beginnings: list[list[int]], temperatures: list[float], rngs: list[random.Random]
    ) -> list[Text]:
        """Return texts of a base model. Their first tokens are sampled, because greedy texts of one start are equal."""
        known = [getattr(source, "bos_token_id", None) for source in (self._lm.tokenizer, self._lm.model.config)]
        start = next(int(token) for token in (*known, *self._lm.eos, 0) if token is not None)
        texts = [beginning or [start] for beginning in beginnings]
        prompts = [len(text) for text in texts]
        texts = self._turn(texts, rngs, _BASE_START, [self.plan.asking] * len(texts), ())
        texts = self._answer(texts, rngs, temperatures)
        return [Text(text, prompt) for text, prompt in zip(texts, prompts, strict=True)]

    def _turn(
        self, texts: list[list[int]], rngs: list[random.Random], most: int, temperatures: list[float],
        ends: tuple[int, ...], keep_end: bool = False,
    ) -> list[list[int]]:  # fmt: skip
        """The texts, continued by at most `most` tokens or up to one of `ends`. A text that fills the context stays."""
        seeds = [rng.getrandbits(32) for rng in rngs]
        open_texts = [i for i, text in enumerate(texts) if len(text) < self._lm.context - 1]
        if not open_texts:
            return texts
        end: dict[str, Any] = {"eos_token_ids": ends} if ends else {"ignore_eos": True}
        prompts, hot = [texts[i] for i in open_texts], [temperatures[i] for i in open_texts]
        seed = [seeds[i] for i in open_texts]
        results = self._decoder.generate(prompts, max_new_tokens=most, temperature=hot, seed=seed, **end)
        longer = list(texts)
        for i, result in zip(open_texts, results, strict=True):
            tokens = result.tokens
            cut = tokens and tokens[-1] in ends and not keep_end
            longer[i] = texts[i] + (tokens[:-1] if cut else tokens)
        return longer


# ---- Several processes write: on a GPU one host process is the limit, so several are faster

_AHEAD = 4  # shards per process that may be finished before an earlier one
_QUEUED = 2  # shards that a worker has: one that it writes, and one to start next
_POLL = 0.1  # seconds between two checks of `cancel`
_LAUNCHERS = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "ACCELERATE_")


@dataclass(frozen=True)
class WriterJob:
    """The values that a worker needs to load the target as this process does, and the plan."""

    target: str
    dtype: str | None
    device: str
    threads: int
    plan: WritingPlan

    @classmethod
    def of(cls, target: Any, dtype: str | None, lm: LanguageModel, plan: WritingPlan) -> WriterJob:
        if not isinstance(target, (str, os.PathLike)):
            raise InputError(
                "Several writers load the target by its name each, and this one is in memory; give a name or a folder, "
                "or writers=1."
            )
        return cls(os.fspath(target), dtype, str(lm.device), torch.get_num_threads(), plan)


class _Worker:
    """One process, in an executor of its own: if it dies, the other workers are not affected."""

    def __init__(self) -> None:
        before = set(multiprocessing.active_children())
        spawn = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(1, mp_context=spawn, initializer=_prepare_worker)
        self.numbers: dict[Future[list[Text]], int] = {}  # the shards that it has
        with _clean_start():
            self._executor.submit(int)  # starts the process
        (self.process,) = set(multiprocessing.active_children()) - before

    def submit(self, job: WriterJob, number: int) -> None:
        self.numbers[self._executor.submit(_write_shard, job, number)] = number

    def why_ended(self, error: BaseException) -> str:
        if not isinstance(error, BrokenProcessPool):
            return in_one_line(error, 200)  # type: ignore[arg-type]
        self._executor.shutdown()  # waits for the process
        code = self.process.exitcode or 0
        return f"it was killed by signal {-code}" if code < 0 else f"it ended with code {code}"

    def kill(self) -> None:
        self.process.kill()
        self._executor.shutdown(cancel_futures=True)


class WriterPool:
    """This process and `count` workers write shards. A shard follows from its number, so the shards do not depend on
    the workers. They start with the first shard and end with the context. If one fails, `note` gets a sentence and the
    others write its shards."""

    def __init__(
        self,
        write: Callable[[int], list[Text]],
        job: WriterJob,
        count: int,
        note: Callable[[str], None] = lambda sentence: None,
        cancel: Callable[[], bool] | None = None,
    ) -> None:
        """write: writes a shard in this process. job: the values with which workers write shards."""
        self._write, self._job, self._count, self._note = write, job, count, note
        self._cancel = cancel or (lambda: False)
        self.workers: list[_Worker] = []
        self._texts: dict[int, list[Text]] = {}  # finished before an earlier shard
        self._open: list[int] | None = None  # numbers to write again, and the next number at the end

    def __enter__(self) -> WriterPool:
        return self

    def __exit__(self, *error: object) -> None:
        """Shards that are in work are not needed any more."""
        for worker in self.workers:
            worker.kill()

    def shard(self, number: int, needed: int | None = None) -> list[Text] | None:
        """Return the texts of shard `number`. Call it in order. Return None if `cancel` returns True."""
        if self._open is None:
            self._open = [number]
            for _ in range(self._count):
                try:
                    self.workers.append(_Worker())
                except OSError as error:
                    self._note(f"one writer cannot be started ({error.strerror or error}); the others continue")
        most = _AHEAD * (len(self.workers) + 1)
        limit = number + max(1, min(most, most if needed is None else needed))
        while True:
            self._collect()
            if number in self._texts:
                return self._texts.pop(number)
            if self._cancel():
                return None
            for _ in range(_QUEUED):
                for worker in self.workers:
                    if len(worker.numbers) < _QUEUED and (other := self._take(limit)) is not None:
                        worker.submit(self._job, other)
            if (own := self._take(limit)) is not None:
                self._texts[own] = self._write(own)
            else:
                wait([future for worker in self.workers for future in worker.numbers], _POLL, FIRST_COMPLETED)

    def _take(self, limit: int) -> int | None:
        """Return the lowest number that is not taken; None from `limit` on."""
        assert self._open is not None
        if self._open[0] >= limit:
            return None
        number = self._open.pop(0)
        self._open = self._open or [number + 1]
        return number

    def _collect(self) -> None:
        """Take the shards that workers have finished. Remove the workers that failed."""
        assert self._open is not None
        for worker in list(self.workers):
            for future in [future for future in worker.numbers if future.done()]:
                if (error := future.exception()) is None:
                    self._texts[worker.numbers.pop(future)] = future.result()
                    continue
                self._note(f"one writer ended: {worker.why_ended(error)}; the others continue")
                worker.kill()
                self.workers.remove(worker)
                self._open = sorted({*self._open, *worker.numbers.values()})
                break


@contextmanager
def _clean_start() -> Iterator[None]:
    """Let a process that starts inside ignore Ctrl-C, which this process handles, and not import the user's script."""
    main: Any = sys.modules["__main__"]
    file, spec = main.__dict__.pop("__file__", None), main.__spec__
    main.__spec__ = None
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if hasattr(signal, "pthread_sigmask") else None
    try:
        yield
    finally:
        if blocked is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        main.__spec__ = spec
        if file is not None:
            main.__file__ = file


def _prepare_worker() -> None:
    """Run first in a worker. It prints nothing, belongs to no launcher, and ends with the process that started it."""
    for name in [name for name in os.environ if name.startswith(_LAUNCHERS)]:
        del os.environ[name]
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)

    def end_with_parent() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()


@lru_cache(1)
def _writer(job: WriterJob) -> Writer:
    """Return the writer of a worker; it is loaded once."""
    torch.set_num_threads(job.threads)  # another number of threads would give other bits
    return Writer(load(job.target, dtype=job.dtype, device=job.device), job.plan)


def _write_shard(job: WriterJob, number: int) -> list[Text]:
    return _writer(job).write(number)
