"""Recorded texts and their rounds, in a file: JSON lines, first how they were written, then one line per text.

A line is written the moment its text has ended, so a file is good wherever it breaks off; `read_trace` says so. The
texts of several runs (contestants of a benchmark) may stand in one file: each has a header with its name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.bench.contest import Entry
from paceline.core.contracts import DRAFTERS
from paceline.core.costs import Costs
from paceline.core.errors import InputError, UnknownNameError
from paceline.core.sampling import Sampling
from paceline.core.trace import Trace
from paceline.engine.request import Generation, build_requests
from paceline.models.running import usual_nodes

from .trace_lines import TraceHeader, TraceText, is_json, made, parsed, plain


@dataclass(frozen=True)
class TraceFile:
    """The texts of one run; notes: sentences about what is not as it should be."""

    header: TraceHeader
    texts: tuple[TraceText, ...]
    notes: tuple[str, ...] = ()


def _nodes(lm: Any, entry: Entry) -> int | None:
    """As said; where the drafter takes as many as there are, what that is here."""
    if entry.nodes is None and isinstance(entry.gamma, int) and entry.draft in DRAFTERS and DRAFTERS[entry.draft].fills:
        return usual_nodes(lm, True, entry.gamma)
    return entry.nodes


def header_of(
    lm: Any,
    entry: Entry,
    settings: Mapping[str, Any],
    *,
    reach: int | None = None,
    costs: Costs | None = None,
    provenance: Mapping[str, Any] | None = None,
    run: str = "",
) -> TraceHeader:
    """Of what a target is about to write. `entry`: how the decoder was asked for; `settings`: what `generate` is given;
    `reach`: that of the drafter; `run`: a name, if the file is to hold several runs."""
    request = build_requests(1, settings)[0]
    standard = Sampling()
    said = {each.name: getattr(request.sampling, each.name) for each in fields(Sampling)}
    other = {name: value for name, value in said.items() if value != getattr(standard, name)}
    return TraceHeader(
        lm.name,
        lm.vocabulary,
        fingerprint(lm),
        entry.draft,
        plain(entry.options),
        entry.gamma,
        _nodes(lm, entry),
        entry.rule,
        plain(entry.rule_options),
        plain({name: value for name, value in other.items() if name not in ("seed", "processors")}),
        len(request.sampling.processors),
        tuple(lm.eos if request.eos_token_ids is None else request.eos_token_ids),
        request.sampling.seed,
        reach,
        costs,
        plain(provenance or {}),
        run,
    )


def fingerprint(lm: Any) -> str:
    """Equal for models with the same tokens and as many numbers; of the weights it says nothing."""
    known = {} if lm.tokenizer is None else lm.tokenizer.get_vocab()
    size = sum(weight.numel() for weight in lm.model.parameters())
    told = json.dumps([lm.vocabulary, size, sorted(known.items(), key=lambda item: item[1])])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


# ---- writing


class TraceWriter:
    """Writes a file, a line at a time. `append`: onto the file that is there, if it was written in the same way."""

    def __init__(self, path: str | os.PathLike[str], header: TraceHeader, append: bool = False) -> None:
        self.path = Path(path)
        self.count = 0  # texts in the file
        self._headers = {header.run: header}
        try:
            there = append and self.path.exists() and self.path.stat().st_size > 0
            if there:
                self._join(header)
            self._file = self.path.open("a" if there else "w", encoding="utf-8")
            if not there:
                self._write(header.as_dict())
        except OSError as error:
            raise InputError(f"The trace {self.path} cannot be written: {error.strerror or error}.") from None

    def _join(self, header: TraceHeader) -> None:
        """Take up a file; half a line at its end is cut off."""
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
        """One more run, whose texts stand in the same file."""
        self._headers[header.run] = header
        self._write(header.as_dict())

    def add(
        self,
        id: str,
        category: str,
        prompt: Sequence[int],
        tokens: Sequence[int],
        trace: Trace | None,
        *,
        limit: int | None = None,
        finish: str = "length",
        seed: int | None = None,
        run: str = "",
    ) -> None:
        """One text. limit: the most new tokens it could have had; None: as many as it has."""
        rounds = None if trace is None else tuple(trace.rounds)
        most = len(tokens) if limit is None else limit
        own = self._headers[run].seed if seed is None else seed
        self.put(TraceText(id, category, tuple(prompt), tuple(tokens), most, finish, own, rounds=rounds, run=run))

    def add_generation(
        self, id: str, category: str, result: Generation, limit: int, prediction: Sequence[int] | None = None
    ) -> None:
        """What `generate` gave. limit: max_new_tokens, or what was left of the context; prediction: as token ids."""
        if result.beams is not None:
            raise InputError("A trace is of one text, and a beam search writes several; leave one of the two out.")
        self.put(
            TraceText(
                id,
                category,
                tuple(result.prompt_tokens),
                tuple(result.tokens),
                limit,
                result.finish_reason,
                result.seed,
                None if prediction is None else tuple(prediction),
                result.stats.predicted,
                tuple(result.trace.rounds),
            )
        )

    def put(self, text: TraceText) -> None:
        assert text.run in self._headers, f"no header of the run '{text.run}' was written"
        self._write(text.as_dict())
        self.count += 1

    def _write(self, found: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(found, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


# ---- reading


def read_trace(path: str | os.PathLike[str], run: str | None = None) -> TraceFile:
    """One run of a file: the first, or the one of that name."""
    found = read_traces(path)
    names = [each.header.run for each in found]
    if run is not None and run not in names:
        raise UnknownNameError(f"run of {path}", run, names)
    return found[0 if run is None else names.index(run)]


def read_traces(path: str | os.PathLike[str]) -> list[TraceFile]:
    """Every run of a file. Half a last line, as a run that was killed leaves it, is left out; `notes` say so."""
    try:
        whole = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"The trace {path} cannot be read: {error.strerror or error}.") from None
    *lines, last = whole.split("\n")
    notes: tuple[str, ...] = ()
    if is_json(last):
        lines.append(last)
    elif last.strip():
        notes = (f"{path}, line {len(lines) + 1}: half a line, as a run that was killed leaves it; it is left out.",)
    headers: dict[str, TraceHeader] = {}
    texts: dict[str, list[TraceText]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        found = parsed(path, number, line)
        if not headers or found.get("kind") == "trace":
            header = made(path, number, TraceHeader.from_dict, found)
            headers[header.run] = header
            texts.setdefault(header.run, [])
            continue
        text = made(path, number, TraceText.from_dict, found)
        if text.run not in headers:
            raise InputError(f"{path}, line {number}: no header names the run '{text.run}'.")
        texts[text.run].append(text)
    if not headers:
        raise InputError(f"The trace {path} is empty; record one with `paceline generate --trace FILE`.")
    return [TraceFile(header, tuple(texts[run]), notes) for run, header in headers.items()]
