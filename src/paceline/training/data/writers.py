"""Processes that write texts beside this one, on the same device: where the host is the limit, several are faster.

A shard follows from its number, so whoever is free takes the next number, and the shards are the same however many
write. This process puts them in order. A fellow is `python -m paceline.training.data.writers`: it reads what to load,
then numbers, a line each, and answers each with a line of JSON. It ends when nobody can speak to it any more.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import IO, Any

import torch

from paceline.common.errors import InputError, in_one_line
from paceline.models import load
from paceline.models.language_model import LanguageModel
from paceline.training.data.corpus import Text
from paceline.training.data.writing import Writer, WritingPlan

_AHEAD = 4  # shards for each who writes that may be waiting for an earlier one
_LOOK = 0.1  # seconds between two looks whether to stop
_PATIENCE = 10.0  # seconds for a process to be gone
_LAUNCHERS = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "ACCELERATE_")


def job(target: Any, dtype: str | None, lm: LanguageModel, plan: WritingPlan) -> dict[str, Any]:
    """What a fellow is told: the same target, loaded the same way to the same place, and the same plan."""
    if not isinstance(target, (str, os.PathLike)):
        raise InputError(
            "Several writers load the target by its name each, and this one is in memory; give a name or a folder, or "
            "writers=1."
        )
    return {
        "target": os.fspath(target), "dtype": dtype, "device": str(lm.device), "threads": torch.get_num_threads(),
        "plan": asdict(plan),
    }  # fmt: skip


class WriterPool:
    """This process and `count` others write shards. They start with the first shard that is asked for, and end when the
    context does. One that dies is told of in a sentence; others write what it had begun."""

    def __init__(
        self,
        write: Callable[[int], list[Text]],
        said: Mapping[str, Any],
        count: int,
        noted: Callable[[str], None] | None = None,
        cancel: Callable[[], bool] | None = None,
    ) -> None:
        """write: how this process writes a shard; said: the `job` of the others."""
        self._write, self._said, self._count = write, dict(said), count
        self._noted, self._cancel = noted or (lambda sentence: None), cancel or (lambda: False)
        self._news = threading.Condition()  # of everything below
        self._texts: dict[int, list[Text]] = {}  # written, and waiting for their turn
        self._next: int | None = None  # the first number that nobody has taken
        self._until = 0  # numbers from here on are not to be begun yet
        self._back: list[int] = []  # numbers of those who died over them
        self._sentences: list[str] = []
        self._over = False
        self.processes: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> WriterPool:
        return self

    def __exit__(self, *error: object) -> None:
        """What they are writing now is nobody's any more, so they need not end it."""
        self._tell()
        with self._news:
            self._over = True
            self._news.notify_all()
        for process in self.processes:
            process.kill()
        for thread in self._threads:
            thread.join()
        for process in self.processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]

    def shard(self, number: int, likely: int | None = None) -> list[Text] | None:
        """The texts of shard `number`; they are asked for in order. None where it was asked to stop."""
        if self._next is None:
            self._next = number
            self._start()
        most = _AHEAD * (self._count + 1)
        with self._news:
            self._until = number + max(1, min(most, most if likely is None else likely))
            self._news.notify_all()
        while True:
            self._tell()
            with self._news:
                if number in self._texts:
                    return self._texts.pop(number)
                if self._cancel():
                    return None
                mine = self._take()
                if mine is None:
                    self._news.wait(_LOOK)
                    continue
            found = self._write(mine)
            with self._news:
                self._texts[mine] = found

    def _take(self) -> int | None:
        """A number that nobody has, or None while there is none to begin."""
        if self._back:
            self._back.sort()
            return self._back.pop(0)
        if self._next is None or self._next >= self._until:
            return None
        self._next += 1
        return self._next - 1

    def _tell(self) -> None:
        with self._news:
            sentences, self._sentences = self._sentences, []
        for sentence in sentences:
            self._noted(sentence)

    def _start(self) -> None:
        around = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
        around["PYTHONPATH"] = os.pathsep.join(each for each in sys.path if each)
        for _ in range(self._count):
            words = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", __name__], env=around, text=True, start_new_session=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words,
                )  # fmt: skip
            except OSError as error:
                self._sentences.append(f"one writer less: it cannot be started ({error.strerror or error})")
                continue
            self.processes.append(process)
            self._threads.append(threading.Thread(target=self._serve, args=(process, words), daemon=True))
            self._threads[-1].start()

    def _serve(self, process: subprocess.Popen[str], words: IO[str]) -> None:
        """Hand numbers to a fellow and take its texts, as long as it lives."""
        assert process.stdin is not None
        assert process.stdout is not None
        number, reason = None, ""
        try:
            print(json.dumps(self._said), file=process.stdin, flush=True)
            while (number := self._wait_for_one()) is not None:
                print(number, file=process.stdin, flush=True)
                answer = json.loads(process.stdout.readline())
                if "failed" in answer:
                    reason = answer["failed"]
                    break
                with self._news:
                    self._texts[number] = [Text(tokens, prompt) for tokens, prompt in answer["texts"]]
                    self._news.notify_all()
        except (OSError, ValueError):
            reason = ""  # it is gone, and its last line with it
        with words:
            reason = reason or ("" if self._over else _end_of(process, words))
        with self._news:
            self._back += [] if number is None else [number]
            if not self._over:
                self._sentences.append(f"one writer less: {reason}; the others go on")
            self._news.notify_all()

    def _wait_for_one(self) -> int | None:
        with self._news:
            while not self._over:
                number = self._take()
                if number is not None:
                    return number
                self._news.wait()
        return None


def _end_of(process: subprocess.Popen[str], words: IO[str]) -> str:
    """Why a process is gone: the signal, or its last words."""
    try:
        code = process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        return "it answers no more"
    if code < 0:
        return f"it was killed by signal {-code}"
    words.seek(0)
    lines = [line.strip() for line in words if line.strip()]
    return f"it ended with code {code}" + (f" ({lines[-1][:200]})" if lines else "")


def _listen(lines: queue.SimpleQueue[str]) -> None:
    """What comes from the one who started it; when nothing can come any more, it was the last of this process too."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def main() -> int:
    """A fellow: a job, and then numbers, each of which is answered."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else is printed here is no answer
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    said = json.loads(lines.get())
    try:
        torch.set_num_threads(said["threads"])  # sums in another order are other sums
        plan = WritingPlan(**{**said["plan"], "temperatures": tuple(said["plan"]["temperatures"])})
        writer = Writer(load(said["target"], dtype=said["dtype"], device=said["device"]), plan)
        while True:
            texts = writer.written(int(lines.get()))
            print(json.dumps({"texts": [(text.tokens, text.prompt) for text in texts]}), file=answers, flush=True)
    except Exception as error:  # the other process says what it was
        print(json.dumps({"failed": in_one_line(error, 200)}), file=answers, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
