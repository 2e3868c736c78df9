"""Reads damaged files in a process of its own, whose memory is limited, and writes one JSON line per file.

python -m tests.hostile.worker FOLDER gguf|safetensors|attacks FIRST COUNT
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402
from gguf import GGMLQuantizationType  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from paceline import LanguageModel, SpeculativeDecoder, load, load_drafter  # noqa: E402
from paceline.common.errors import PacelineError  # noqa: E402
from paceline.drafters.heads.eagle import EagleHead  # noqa: E402
from paceline.drafters.heads.medusa import MedusaHead  # noqa: E402
from paceline.drafters.heads.prophet import ProphetHead  # noqa: E402
from paceline.drafters.lookup.ngram import Ngram  # noqa: E402
from paceline.drafters.lookup.recycling import Recycling  # noqa: E402
from paceline.drafters.lookup.trigram import train_trigram  # noqa: E402
from paceline.drafters.models.draft_lm import DraftLayers  # noqa: E402
from paceline.drafters.models.early_exit import ExitHead  # noqa: E402
from paceline.training.corpus import Shards, Text  # noqa: E402
from paceline.training.trainer import Checkpoint  # noqa: E402
from tests.hostile.attacks import ATTACKS  # noqa: E402
from tests.hostile.damage import GGUF, SAFETENSORS, damaged  # noqa: E402
from tests.models.tiny_gguf import byte_level_vocabulary, sentencepiece_vocabulary, tiny_gguf  # noqa: E402
from tests.toys import letters, llama  # noqa: E402

SECONDS = 10  # of CPU time, for one file
SLACK = 48 << 20  # bytes of memory that Python, torch and the allocator may map beside twice the file
PROMPT = [1, 2, 3, 4, 1, 2, 3]
FORBIDDEN = ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect")


class HangError(BaseException):
    """It took too long. No library catches it."""


# ---- what is watched

_seen: list[str] = []  # code that was run, and files outside that were opened
_outside: list[str] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event in FORBIDDEN:
        _seen.append(event)
    elif event == "open" and isinstance(arguments[0], str) and os.path.realpath(arguments[0]) in _outside:
        _seen.append(f"open {arguments[0]}")


def _memory(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def handled(name: str, size: int, use: Callable[[], str]) -> dict[str, Any]:
    """Use a file under the limits, and tell what became of it."""
    _seen.clear()
    _forget_peak()
    before = _memory("VmRSS")
    most = _memory("VmSize") + 2 * size + SLACK
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    began = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        outcome, message = use(), ""
    except PacelineError as error:
        outcome, message = type(error).__name__, str(error)
    except HangError:
        outcome, message = "hang", f"more than {SECONDS} s"
    except BaseException as error:  # a panic of Rust is no Exception
        outcome, message = f"bare {type(error).__name__}", str(error)[:500]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return {
        "case": name, "bytes": size, "outcome": outcome, "message": message, "seconds": time.process_time() - began,
        "grown": _memory("VmHWM") - before, "seen": list(_seen),
    }  # fmt: skip


def _stop(*_: Any) -> None:
    raise HangError


# ---- sound files, and how each is used


class Sound:
    """Sound files in a folder, each with a function that uses it: it gives "used", or an error."""

    def __init__(self, room: Path) -> None:
        self.room = room
        self.lm = LanguageModel(llama(), letters(), "toy")
        self.plain = self._text(None)
        self.ways: dict[str, tuple[Path, Callable[[Path], str]]] = {}

    def _text(self, draft: Any) -> list[int]:
        found: list[int] = SpeculativeDecoder(self.lm, draft).generate(PROMPT, max_new_tokens=5).tokens
        return found

    def _drafts(self, draft: Any) -> str:
        """A drafter never changes the text, whatever its weights are."""
        return "used" if self._text(draft) == self.plain else "another text"

    def target(self) -> None:
        folder = self.room / "target"
        llama().float().save_pretrained(folder)
        self.ways["target"] = (folder / "model.safetensors", lambda path: _written(load(path.parent, runner="eager")))

    def gguf(self) -> None:
        for name, words in (("bytes", byte_level_vocabulary()), ("pieces", sentencepiece_vocabulary())):
            path = self.room / f"{name}.gguf"
            tiny_gguf(path, words)
            self.ways[name] = (path, lambda path: _written(load(path, runner="eager")))
        path = self.room / "quantized.gguf"
        tiny_gguf(path, kind=GGMLQuantizationType.Q8_0)
        self.ways["quantized"] = (path, self.ways["bytes"][1])

    def heads(self) -> None:
        made: dict[str, Any] = {Head.kind: Head.random(self.lm) for Head in (EagleHead, MedusaHead, ProphetHead)}
        made["early-exit"] = ExitHead.fresh(self.lm, 1, 16)
        made["draft-lm"] = DraftLayers(self.lm, (0,))
        for kind, head in made.items():
            head.save(self.room / kind, "int8" if kind == "eagle" else None)
            self.ways[kind] = (self.room / kind / "model.safetensors", self._headed)

    def _headed(self, path: Path) -> str:
        return self._drafts(load_drafter(path.parent, self.lm))

    def stores(self) -> None:
        train_trigram([PROMPT * 3], self.lm.vocabulary).save(self.room / "trigram.safetensors")
        self.ways["trigram"] = (
            self.room / "trigram.safetensors", lambda path: self._drafts(("trigram", {"file": str(path)})),
        )  # fmt: skip
        ngram, recycling = Ngram(Ngram.Options(persistent=True)), Recycling(Recycling.Options(persistent=True))
        for drafter, name in ((ngram, "ngram"), (recycling, "recycling")):
            self._text(drafter)
            drafter.save(self.room / f"{name}.safetensors")

        def recycled(path: Path) -> str:
            fresh = Recycling(Recycling.Options(persistent=True))
            fresh.load(path)
            return self._drafts(fresh)

        def counted(path: Path) -> str:
            return self._drafts(("ngram", {"store": str(path), "persistent": True}))

        self.ways["ngram"] = (self.room / "ngram.safetensors", counted)
        self.ways["recycling"] = (self.room / "recycling.safetensors", recycled)

    def training(self) -> None:
        Shards(self.room / "texts", {"of": "a"}).append([Text([1, 2, 3, 4], 2), Text([5, 6], 0)])

        def texts(path: Path) -> str:
            found = Shards(path.parent, {"of": "a"}).texts()
            return "used" if all(text.prompt <= len(text.tokens) for text in found) else "no"

        self.ways["texts"] = (self.room / "texts" / "shard-00000.safetensors", texts)
        module = torch.nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(module.parameters())
        module(torch.ones(3)).sum().backward()
        optimizer.step()
        (self.room / "course").mkdir()
        Checkpoint(self.room / "course", {"a": 1}).save(module, optimizer, {"step": 3}, {})

        def resumed(path: Path) -> str:
            found = Checkpoint(path.parent, {"a": 1}).load(module, optimizer, torch.device("cpu"))
            return "used" if found is not None else "nothing"

        self.ways["checkpoint"] = (self.room / "course" / "checkpoint.safetensors", resumed)

    def use(self, way: str, name: str, damage: Callable[[bytes], bytes]) -> dict[str, Any]:
        """A copy with other bytes, beside copies of the files that belong to it."""
        path, use = self.ways[way]
        room = self.room / "case"
        shutil.rmtree(room, ignore_errors=True)
        data = damage(path.read_bytes())
        if path.parent == self.room:
            room.mkdir()
        else:
            shutil.copytree(path.parent, room)
        (room / path.name).write_bytes(data)
        return handled(f"{way}: {name}", len(data), lambda: use(room / path.name))

    def attacked(self, way: str, name: str, change: Callable[[Path], None]) -> dict[str, Any]:
        """A copy of a folder, after a change."""
        path, use = self.ways[way]
        case = self.room / "case"
        shutil.rmtree(case, ignore_errors=True)
        shutil.copytree(path.parent, case)
        change(case)
        size = sum(each.stat().st_size for each in case.iterdir() if each.is_file())
        return handled(f"{way}: {name}", size, lambda: use(case / path.name))


def _written(lm: LanguageModel) -> str:
    SpeculativeDecoder(lm, None).generate([1, 2, 3], max_new_tokens=2)
    return "used"


def main(folder: str, wanted: dict[str, int]) -> None:
    room = Path(folder)
    os.environ["PACELINE_CACHE"] = str(room / "cache")
    signal.signal(signal.SIGPROF, _stop)
    sound = Sound(room)
    for make in (sound.gguf, sound.target, sound.heads, sound.stores, sound.training):
        make()
    save_file({"a": torch.ones(3)}, room / "outside.safetensors")
    _outside.extend(("/etc/passwd", str((room / "outside.safetensors").resolve())))
    sys.addaudithook(_watch)
    for way in sound.ways:  # also warms everything up
        for _ in range(2):
            told = sound.use(way, "sound", lambda data: data)
        _tell("sound", told)
    for name, (way, change) in list(ATTACKS.items())[: wanted.get("attacks", 0)]:
        _tell("attacks", sound.attacked(way, name, change))
    ggufs = ["bytes", "pieces", "quantized"]
    others = [way for way in sound.ways if way not in (*ggufs, "target")]
    targets_and_others = [each for way in others for each in ("target", way)]
    for what, kinds, ways in (("gguf", GGUF, ggufs), ("safetensors", SAFETENSORS, targets_and_others)):
        for number in range(wanted.get(what, 0)):
            way = ways[number % len(ways)]
            name, data = damaged(sound.ways[way][0].read_bytes(), kinds, number)
            _tell(what, sound.use(way, f"{number} {name}", lambda _: data))  # noqa: B023


def _tell(kind: str, told: dict[str, Any]) -> None:
    print(json.dumps({"kind": kind, **told}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], {name: int(count) for name, count in (each.split("=") for each in sys.argv[2:])})
