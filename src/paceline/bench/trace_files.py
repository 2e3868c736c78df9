"""Traces on disk, for `--replay`: JSON lines with a header and one line per sequence with its rounds."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from paceline.bench.candidate import PacelineRun, Plan, Run, RunSpec, Task
from paceline.common.errors import InputError, UnknownNameError
from paceline.common.text_formats import json_lines, read_text, writing
from paceline.core.contracts import DRAFTERS
from paceline.core.costs import Costs
from paceline.core.sampling import Sampling
from paceline.core.trace import Round
from paceline.engine.request import Generation, build_requests
from paceline.models.runtime import usual_nodes

VERSION = 1
T = TypeVar("T")
_OWN = ("costs", "provenance", "seed")  # texts that differ in these may be of one run


def plain(value: Any) -> Any:
    """Return the value in JSON types. An object becomes its name."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return str(getattr(value, "name", value))


_WORDS: dict[str, tuple[Any, str]] = {
    "str": (str, "a text"), "int": (int, "a whole number"), "tuple[int, ...]": (list, "a list"),
    "Mapping[str, Any]": (dict, "an object"),
}  # fmt: skip


def _value(found: Mapping[str, Any], name: str, kind: str, least: int | None = 0) -> Any:
    """Return the value of a field of this type, or refuse it in a phrase. least: the least value of numbers."""
    if name not in found:
        raise InputError(f"{name} is missing")
    value: Any = found[name]
    wanted, words = _WORDS[kind]
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise InputError(f"{name} must be {words}, got {value!r}")
    if kind == "int" and least is not None and value < least:
        raise InputError(f"{name} must be at least {least}, got {value}")
    if wanted is not list:
        return value
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or token < (least or 0):
            raise InputError(f"{name} must hold whole numbers of at least {least}, got {token!r}")
    return tuple(value)


def _made(cls: type[T], found: Mapping[str, Any], least: Mapping[str, int | None], **known: Any) -> T:
    """Return an object of a dataclass from its line. known: fields that are read in another way."""
    for each in fields(cls):  # type: ignore[arg-type]
        kind = str(each.type).removesuffix(" | None")
        if each.name not in known:
            absent = kind != each.type and found.get(each.name) is None
            known[each.name] = None if absent else _value(found, each.name, kind, least.get(each.name, 0))
    return cls(**known)


def round_of(found: Any) -> Round:
    if not isinstance(found, dict):
        raise InputError(f"a round must be an object, got {found!r}")
    asked = found.get("asked", 0.0)
    if isinstance(asked, bool) or not isinstance(asked, (int, float)):
        raise InputError(f"asked must be seconds, got {asked!r}")
    more = {"bonus": found.get("bonus") is True, "why": found.get("why", ""), "asked": float(asked)}
    entry = _made(Round, found, {"parents": -1}, **more)
    drafted, path = entry.drafted, entry.path
    above = tuple(range(-1, len(drafted) - 1)) if entry.parents is None else entry.parents
    if len(above) != len(drafted) or any(parent >= node for node, parent in enumerate(above)):
        raise InputError(f"parents {list(above)} do not fit {len(drafted)} drafted tokens")
    at = -1
    for node in path:
        if node >= len(drafted) or above[node] != at:
            raise InputError(f"path {list(path)} is not a path of the draft")
        at = node
    return entry


def _seconds(found: Mapping[str, Any], rounds: Sequence[Round]) -> tuple[float, ...]:
    """Return the seconds of the rounds. Files of older versions have none."""
    seconds = found.get("seconds", [])
    numbers = isinstance(seconds, list) and all(type(each) in (int, float) and each >= 0 for each in seconds)
    if not numbers or len(seconds) not in (0, len(rounds)):
        raise InputError(f"seconds must hold a number for each of the {len(rounds)} rounds, got {seconds!r}")
    return tuple(map(float, seconds))


def sampling_of(found: Mapping[str, Any], seed: int = 0) -> Sampling:
    """Return the controls that a header names."""
    given = dict(found)
    known = {each.name for each in fields(Sampling)} - {"seed", "processors", "constraint"}
    for name in given.keys() - known:
        raise InputError(f"sampling has {name!r}, which is no control")
    try:
        bias = {int(token): float(value) for token, value in given.pop("logit_bias", {}).items()}
        banned = tuple(given.pop("banned_tokens", ()))
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"sampling is not readable: {error}") from None
    return Sampling(**given, logit_bias=bias, banned_tokens=banned, seed=seed)


@dataclass(frozen=True)
class TraceHeader:
    """The settings with which the texts of a file were written."""

    model: str
    vocabulary: int  # tokens
    fingerprint: str  # of the vocabulary and the size of the model
    draft: str
    options: Mapping[str, Any] = field(default_factory=dict)
    gamma: int | str = 5
    nodes: int | None = None
    rule: str = "match"
    rule_options: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of `Sampling` that are not their defaults
    processors: int = 0  # callables and grammars of the caller: a file cannot hold them
    eos: tuple[int, ...] = ()
    seed: int = 0  # of texts without a seed
    costs: Costs | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    run: str = ""  # a name, where a file holds the texts of several

    def as_dict(self) -> dict[str, Any]:
        costs = None if self.costs is None else self.costs.as_dict()
        return {"kind": "trace", "version": VERSION, **plain({**vars(self), "costs": costs})}

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> TraceHeader:
        if found.get("kind") != "trace":
            raise InputError("this is no trace: the first line has no kind 'trace'")
        if found.get("version") != VERSION:
            raise InputError(f"it has version {found.get('version')!r}, and this Paceline reads version {VERSION}")
        gamma = "auto" if found.get("gamma") == "auto" else _value(found, "gamma", "int", 1)
        try:
            costs = None if found.get("costs") is None else Costs.from_dict(found["costs"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"costs are not as `Costs.as_dict` writes them: {error!r}") from None
        header = _made(TraceHeader, found, {"vocabulary": 1, "nodes": 1, "seed": None}, gamma=gamma, costs=costs)
        sampling_of(header.sampling)  # refused here, with its line
        return header

    def differs(self, other: TraceHeader) -> str | None:
        """Return the first field that differs from the header of the other texts."""
        ours, theirs = self.as_dict(), other.as_dict()
        return next((name for name in ours if name not in _OWN and ours[name] != theirs[name]), None)


@dataclass(frozen=True)
class TraceText:
    """One text. limit: the most new tokens it could have had; rounds: None where only the text was recorded."""

    id: str
    category: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    limit: int
    finish: str = "length"  # or "stop", "cancelled"
    seed: int = 0
    prediction: tuple[int, ...] | None = None  # what the caller expected
    predicted: bool = False  # whether it expected a text, recorded or not
    rounds: tuple[Round, ...] | None = None
    seconds: tuple[float, ...] = ()  # of each round; empty where they are not known
    run: str = ""  # that of its header

    def as_dict(self) -> dict[str, Any]:
        rounds = None
        if self.rounds is not None:
            rounds = [{k: v for k, v in vars(r).items() if v or k not in ("why", "asked")} for r in self.rounds]
        return {"kind": "text", **plain({**vars(self), "rounds": rounds})}

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> TraceText:
        if found.get("kind") != "text":
            raise InputError(f"kind must be 'text', got {found.get('kind')!r}")
        tokens, rounds = _value(found, "tokens", "tuple[int, ...]"), found.get("rounds")
        if rounds is not None:
            if not isinstance(rounds, list):
                raise InputError(f"rounds must be a list, got {rounds!r}")
            rounds = tuple(round_of(each) for each in rounds)
            if tuple(token for each in rounds for token in each.emitted) != tokens:
                raise InputError("the rounds do not add up to the tokens")
        least = {"limit": len(tokens), "seed": None}
        more = {"predicted": bool(found.get("predicted")), "seconds": _seconds(found, rounds or ())}
        return _made(TraceText, found, least, rounds=rounds, **more)


@dataclass(frozen=True)
class TraceFile:
    """The texts of one run. notes: sentences about defects of the file."""

    header: TraceHeader
    texts: tuple[TraceText, ...]
    notes: tuple[str, ...] = ()


def _nodes(lm: Any, entry: RunSpec) -> int | None:
    """Return the given nodes. For a drafter that uses all nodes of the budget, their number here."""
    uses_all = entry.draft in DRAFTERS and getattr(DRAFTERS[entry.draft], "uses_all_nodes", False)
    if entry.nodes is None and isinstance(entry.gamma, int) and uses_all:
        return usual_nodes(lm, True, entry.gamma)
    return entry.nodes


def header_of(
    lm: Any, entry: RunSpec, settings: Mapping[str, Any], *, costs: Costs | None = None,
    provenance: Mapping[str, Any] | None = None, run: str = "",
) -> TraceHeader:  # fmt: skip
    """Return the header for texts that a target will write. entry: the settings of the decoder. settings: the arguments
    of `generate`. run: a name, if the file will have several runs."""
    request, standard = build_requests(1, settings)[0], Sampling()
    own = len(request.sampling.processors) + (request.grammar_setting() is not None)
    sampling = {name: value for name, value in vars(request.sampling).items()
                if value != getattr(standard, name) and name not in ("seed", "processors", "constraint")}  # fmt: skip
    eos = tuple(lm.eos if request.eos_token_ids is None else request.eos_token_ids)
    return TraceHeader(
        lm.name, lm.vocabulary, fingerprint(lm), entry.draft, plain(entry.options), entry.gamma, _nodes(lm, entry),
        entry.rule, plain(entry.rule_options), plain(sampling), own, eos,
        request.sampling.seed, costs, plain(provenance or {}), run,
    )  # fmt: skip


def fingerprint(lm: Any) -> str:
    """Return a hash of the tokens and of the number of weights. It does not depend on the values of weights."""
    known = {} if lm.tokenizer is None else lm.tokenizer.get_vocab()
    size = sum(weight.numel() for weight in lm.model.parameters())
    told = json.dumps([lm.vocabulary, size, sorted(known.items(), key=lambda item: item[1])])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


class TraceWriter:
    """Writes a file line by line. append: continue an existing file, if it was written with the same settings."""

    def __init__(self, path: str | os.PathLike[str], header: TraceHeader, append: bool = False) -> None:
        self.path = Path(path)
        self.count = 0  # texts in the file
        self._runs = {header.run}
        with writing("The trace", self.path):
            there = append and self.path.exists() and self.path.stat().st_size > 0
            if there:
                self._join(header)
            self._file = self.path.open("a" if there else "w", encoding="utf-8")
            if not there:
                self._write(header.as_dict())

    def _join(self, header: TraceHeader) -> None:
        """Continue a file. An incomplete line at its end is removed."""
        there = read_trace(self.path, header.run)
        other = header.differs(there.header)
        if other is not None:
            was, now = (each.as_dict()[other] for each in (there.header, header))
            raise InputError(f"{self.path} was recorded with {other} {was!r}, not {now!r}; give another file.")
        self.count = len(there.texts)
        whole = self.path.read_bytes()
        if not whole.endswith(b"\n"):
            self.path.write_bytes(whole[: whole.rfind(b"\n") + 1] if there.notes else whole + b"\n")

    def declare(self, header: TraceHeader) -> None:
        """Add another run, whose texts are in the same file."""
        self._runs.add(header.run)
        self._write(header.as_dict())

    def add_generation(
        self, id: str, category: str, result: Generation, limit: int, prediction: Sequence[int] | None = None
    ) -> None:
        """Add a result of `generate`. limit: max_new_tokens, or the rest of the context. prediction: as token ids."""
        if result.beams is not None:
            raise InputError("A trace is of one text, and a beam search writes several; leave one of the two out.")
        expected = None if prediction is None else tuple(prediction)
        self.put(
            TraceText(
                id, category, tuple(result.prompt_tokens), tuple(result.tokens), limit, result.finish_reason,
                result.seed, expected, result.stats.predicted, tuple(result.trace.rounds),
                tuple(result.trace.seconds),
            )
        )  # fmt: skip

    def put(self, text: TraceText) -> None:
        assert text.run in self._runs, f"no header of the run '{text.run}' was written"
        self._write(text.as_dict())
        self.count += 1

    def _write(self, found: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(found, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_trace(path: str | os.PathLike[str], run: str | None = None) -> TraceFile:
    """Return one run of a file: the first, or the one of that name."""
    found = read_traces(path)
    names = [each.header.run for each in found]
    if run is not None and run not in names:
        raise UnknownNameError(f"run of {path}", run, names)
    return found[0 if run is None else names.index(run)]


def read_traces(path: str | os.PathLike[str]) -> list[TraceFile]:
    """Return every run of a file. An incomplete last line, which a killed run leaves, is skipped; `notes` say so."""
    whole = read_text(Path(path), "The trace", errors="replace")
    notes: list[str] = []
    texts: dict[str, list[TraceText]] = {}
    headers: dict[str, TraceHeader] = {}
    for number, found in json_lines(whole, path, notes.append):
        where = f"{path}, line {number}"
        if not isinstance(found, dict):
            raise InputError(f"{where}: this is no JSON object; is it a trace?")
        try:
            if not headers or found.get("kind") == "trace":
                header = TraceHeader.from_dict(found)
                headers[header.run] = header
                continue
            text = TraceText.from_dict(found)
        except InputError as error:
            raise InputError(f"{where}: {str(error).removesuffix('.')}.") from None
        if text.run not in headers:
            raise InputError(f"{where}: no header names the run '{text.run}'.")
        texts.setdefault(text.run, []).append(text)
    if not headers:
        raise InputError(f"The trace {path} is empty; record one with `paceline generate --trace FILE`.")
    return [TraceFile(header, tuple(texts.get(run, ())), tuple(notes)) for run, header in headers.items()]


class Tracing:
    """One file with every Paceline run. The first repeat of each task is written; the others have the same rounds,
    because every repeat starts in the same state."""

    def __init__(
        self, path: Path, runs: Sequence[PacelineRun], plan: Plan, costs: Costs | None, provenance: Mapping[str, Any]
    ) -> None:
        self._plan, self._names = plan, {each.name for each in runs}
        settings = {**plan.sampling, "max_new_tokens": plan.tokens, "ignore_eos": True, "seed": plan.seed}
        first, *others = (
            header_of(each.lm, each.entry, settings, costs=costs, provenance=provenance, run=each.name) for each in runs
        )
        self._writer = TraceWriter(path, first)
        for header in others:
            self._writer.declare(header)

    def add(self, run: Run, task: Task) -> None:
        if run.contestant not in self._names or run.repeat:
            return
        names = task.id.split("+") if len(task.prompts) > 1 else [task.id]
        for row, (name, prompt) in enumerate(zip(names, task.prompts, strict=True)):
            limit, seed, trace = self._plan.tokens, self._plan.seed + row, run.traces[row]
            self._writer.put(
                TraceText(name, task.category, prompt, run.tokens[row], limit, seed=seed, rounds=tuple(trace.rounds),
                          seconds=tuple(trace.seconds), run=run.contestant)
            )  # fmt: skip

    def close(self) -> None:
        self._writer.close()
