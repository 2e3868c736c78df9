"""The tables of a report as values, for a terminal, a page, or a log. The words are those of docs/exactness.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

from paceline.bench.machine_use import NOTES
from paceline.bench.results.metrics import ALL, Change, Line, Ratio, Summary
from paceline.bench.results.records import Report

# ---- Numbers as people read them

NOTHING = "–"  # it cannot be known, or there is none


def seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def size(value: int | None) -> str:
    if value is None:
        return NOTHING
    if value < 1e5:
        return f"{value / 1e3:.1f} kB"
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"


def counted(count: int, noun: str) -> str:
    """1 prompt, 2 prompts."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def number(value: float | None, digits: int = 2) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}"


def times(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}×"


def spread_of(found: Ratio | None) -> str:
    if found is None or found.low is None or found.high is None:
        return NOTHING
    return f"{found.low:.2f} to {found.high:.2f}"


# ---- Tables as values

Tone = Literal["", "good", "bad"]


@dataclass(frozen=True)
class Cell:
    """A text; good: faster than plain decoding beyond the spread, bad: slower beyond it."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Table:
    """The first column has the names of the rows."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


def _table(title: str, header: Iterable[str], rows: Iterable[Iterable[Any]], note: str = "") -> Table:
    """Return a table. A cell that is given as a text has no tone."""
    cells = (tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in row) for row in rows)
    return Table(title, tuple(header), tuple(cells), note)


def speed_up(found: Ratio | None, spread: bool = False) -> Cell:
    if found is None:
        return Cell(NOTHING)
    if found.low is None or found.high is None:
        return Cell(times(found.value))
    around = f" ({found.low:.2f}–{found.high:.2f})" if spread else ""
    return Cell(times(found.value) + around, "good" if found.low > 1 else "bad" if found.high < 1 else "")


def overall_lines(report: Report, summary: Summary) -> list[Line]:
    return [line for member in report.members if (line := summary.of(member.name)) is not None]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([first.ljust(widths[0]), *(cell.rjust(wide) for cell, wide in zip(cells, widths[1:], strict=True))])
        for first, *cells in rows
    ]


def as_text(table: Table) -> str:
    """Return plain columns, without the colours of good and bad numbers."""
    rows = [table.header, *(tuple(cell.text for cell in row) for row in table.rows)]
    lines = [f"  {line}".rstrip() for line in aligned(rows)]
    return "\n".join([table.title, *lines, *([table.note] if table.note else []), ""])


# ---- Which tables there are


def tables_of(report: Report, summary: Summary) -> Iterator[Table]:
    """Return every table that has rows."""
    explained = (rounds(report, summary), latencies(report, summary), by_position(report, summary), costs(report))
    return (table for table in (*_speeds(report, summary), *explained, *_details(report)) if table.rows)


def short(report: Report, summary: Summary) -> Iterator[Table]:
    """The tables for a terminal."""
    return (table for table in (*_speeds(report, summary), *_details(report)) if table.rows)


def _speeds(report: Report, summary: Summary) -> tuple[Table, ...]:
    return overall(report, summary), by_category(report, summary), slower(report, summary)


def _details(report: Report) -> tuple[Table, ...]:
    return quality(report), evaluation(report), layers(report), memory_lines(report), skipped(report)


# ---- How fast


def overall(report: Report, summary: Summary) -> Table:
    """Return the table of all candidates on all prompts."""
    peers = [peer for peer in report.peers if summary.of(peer) is not None]
    memory = any(line.peak is not None for line in summary.lines)
    lossy = {member.name for member in report.members if member.lossy}
    lines = overall_lines(report, summary)
    spreads = any(line.contestant != report.plain and spread_of(line.speed_up) != NOTHING for line in lines)
    header = (
        "candidate", "tokens/s", "speed-up", *(("spread",) if spreads else ()), "τ", "acceptance",
        *(f"× {peer}" for peer in peers), "same text", "first token", *(("peak", "KV") if memory else ()),
    )  # fmt: skip
    rows = (
        (
            f"{line.contestant} (lossy)" if line.contestant in lossy else line.contestant,
            f"{line.tokens_per_second:.1f}", speed_up(line.speed_up),
            *((spread_of(line.speed_up),) if spreads else ()), number(line.tau), share(line.acceptance_rate),
            *(times(_value(line.ratios.get(peer))) for peer in peers),
            # another text need not be a defect (a tie in bfloat16, a rule that keeps the law), so it has no tone
            f"{line.same}/{line.compared}" + ("" if line.parted is None else f", from {line.parted + 1}"),
            seconds(line.first), *((size(line.peak), size(line.cache)) if memory else ()),
        )
        for line in lines
    )  # fmt: skip
    note = (
        "Speed-up: over Paceline's plain decoding, in the same run. Spread: the range of another measurement. "
        "× NAME: times as fast as that peer."
    )
    return _table("All prompts", header, rows, " ".join([note, *_reservations(report, lines)]))


def _reservations(report: Report, lines: Sequence[Line]) -> Iterator[str]:
    """Yield limits of the numbers that a reader must know."""
    if report.mark is not None:
        yield report.mark
    disturbed = sum(line.disturbed for line in lines)
    if disturbed:
        yield f"{disturbed} runs were disturbed: other processes used the machine."
    most = max((line.tasks for line in lines), default=0)
    few = [f"{line.contestant} {line.tasks}" for line in lines if line.tasks < most]
    if few:
        yield f"Not all candidates did all of {most} tasks; their numbers cover the tasks they did: {', '.join(few)}."


def _value(found: Ratio | None) -> float | None:
    return None if found is None else found.value


def by_category(report: Report, summary: Summary) -> Table:
    """Return speed-ups by category, and the tokens/s of plain decoding that they refer to."""
    categories = (*report.categories, ALL)
    rows = []
    for member in report.members if len(categories) > 2 else ():
        lines = [summary.of(member.name, category) for category in categories]
        if member.name == report.plain:
            cells = [Cell(NOTHING if line is None else f"{line.tokens_per_second:.1f} tok/s") for line in lines]
        else:
            cells = [speed_up(None if line is None else line.speed_up, spread=True) for line in lines]
        rows += [(member.name, *cells)] if any(lines) else []
    return _table("Speed-up by category", ("candidate", *categories), rows)


_WORST = 10  # slow prompts shown


def slower(report: Report, summary: Summary) -> Table:
    """Return the prompts on which a Paceline run is slower than plain decoding, worst first."""
    ours = {member.name for member in report.members if member.library == "paceline" and member.name != report.plain}
    lines = [line for line in summary.per_task if line.contestant in ours]
    found = [(value, line) for line in lines if (value := _value(line.speed_up) or 1.0) < 1]
    found.sort(key=itemgetter(0))
    beyond = sum(speed_up(line.speed_up).tone == "bad" for _, line in found)
    note = (
        f"{len(found)} of {len(lines)} pairs of candidate and prompt are slower than plain decoding, {beyond} of them "
        f"beyond the spread{f'; the {_WORST} slowest' if len(found) > _WORST else ''}."
    )
    rows = (
        (line.contestant, line.category, speed_up(line.speed_up), spread_of(line.speed_up), number(line.tau),
         share(line.acceptance_rate))
        for _, line in found[:_WORST]
    )  # fmt: skip
    header = ("candidate", "prompt", "speed-up", "spread", "τ", "acceptance")
    return _table("Slower than plain decoding", header, rows, note)


def changed(changes: Sequence[Change], different: Sequence[str]) -> Table:
    """Return the changes of a comparison, those beyond the spread first. The note names other differences."""
    order = ("slower", "missing", "faster", "added", "same")
    tones: dict[str, Tone] = {"slower": "bad", "missing": "bad", "faster": "good"}
    rows = (
        (each.contestant, each.category, each.measure,
         *(NOTHING if one is None else f"{one.value:.2f} ({spread_of(one)})" for one in (each.old, each.new)),
         times(each.ratio), Cell(each.verdict, tones.get(each.verdict, "")))
        for each in sorted(changes, key=lambda each: order.index(each.verdict))
    )  # fmt: skip
    slow = sum(each.regression for each in changes)
    note = f"{slow} of {len(changes)} are slower beyond both spreads."
    if not any(each.ratio is not None for each in changes):
        note = "The two have nothing in common, so nothing was compared."
    if different:
        note += f" Also different: {'; '.join(different)}."
    header = ("candidate", "category", "measure", "then", "now", "now/then", "verdict")
    return _table("Compared with before", header, rows, note)


# ---- What explains it: rounds, latency, costs


def rounds(report: Report, summary: Summary) -> Table:
    """Return the numbers of rounds, and the share of the bound that they reach."""
    header = (
        "candidate", "rounds", "drafted", "accepted", "τ", "α", "efficiency", "bound S", "reached", "predicted",
        "measured", "error",
    )  # fmt: skip
    lines = overall_lines(report, summary)
    rows = (
        (
            line.contestant, f"{line.rounds:,}", f"{line.drafted:,}", f"{line.accepted:,}", number(line.tau),
            number(line.alpha), number(line.efficiency), times(line.bound), share(line.reached),
            times(line.predicted), times(_value(line.speed_up)), share(line.prediction_error),
        )
        for line in lines if line.drafted
    )  # fmt: skip
    note = (
        "τ: emitted/rounds. α: the chance that the next drafted token is accepted. Efficiency: speed-up/τ. Reached: "
        "the speed-up after the first token, of S. Error: of the prediction, the median over prompts."
    )
    return _table("Rounds", header, rows, note + above_bound(report, lines))


def above_bound(report: Report, lines: Sequence[Line]) -> str:
    """Return a sentence for each reason why a measured speed-up can be above S; "" if none is."""
    above = [line.contestant for line in lines if line.reached is not None and line.reached > 1]
    if not above:
        return ""
    busy = " The machine was busy, so the noise is large." if report.mark is not None else ""
    return (
        f" Above S: {', '.join(above)}. S is an estimate, not a limit. v, c and o were measured apart from the runs "
        "and have noise. S counts γ drafted tokens in every round, and a shorter draft costs less. S uses one α for "
        f"all rounds, and accepted tokens come in runs.{busy}"
    )


def latencies(report: Report, summary: Summary) -> Table:
    rows = (
        (line.contestant, seconds(line.first), number(line.decode_tokens_per_second, 1),
         *map(seconds, line.latency or (None, None, None)))
        for line in overall_lines(report, summary)
    )  # fmt: skip
    note = (
        "Between tokens, as percentiles; tokens of one round arrive together. Decode tokens/s: after the first token."
    )
    return _table("Latency", ("candidate", "first token", "decode tokens/s", "p50", "p90", "p99"), rows, note)


def by_position(report: Report, summary: Summary) -> Table:
    lines = [line for line in overall_lines(report, summary) if line.drafted]
    longest = max((len(line.by_position) for line in lines), default=0)
    rows = []
    for line in lines:
        cells = [f"{a / d:.2f} ({a}/{d})" if d else NOTHING for a, d in line.by_position]
        rows.append((line.contestant, *cells, *[NOTHING] * (longest - len(cells))))
    note = "Accepted/drafted, unconditional, with the counts behind it."
    return _table("Acceptance by position", ("candidate", *map(str, range(1, longest + 1))), rows, note)


def costs(report: Report) -> Table:
    found, rows = report.costs, list[tuple[str, ...]]()
    if found is not None:
        for live, passes in sorted(found.passes.items()):
            many = "" if live == 1 else f", {live} rows"
            rows += [(f"v({fed}){many}", number(found.v(fed, live)), seconds(passes[fed])) for fed in sorted(passes)]
        rows += [(f"c, {name}", number(found.c(name), 3), seconds(spent)) for name, spent in found.drafters.items()]
        rows.append(("o", number(found.o(), 3), seconds(found.overhead)))
    note = "In passes over one token. v(n): a pass over n tokens; c: one draft step; o: a round outside the passes."
    return _table("Costs", ("what", "passes", "time"), rows, note)


# ---- Quality, memory, and where the numbers come from


def _measures(found: Iterable[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for each in found for name in each))


def _qualities(found: Mapping[str, float], measures: Sequence[str]) -> list[str]:
    return [number(found.get(name), 0 if name == "texts" else 3) for name in measures]


def quality(report: Report) -> Table:
    measures = _measures(report.quality.values())
    rows = ((name, *_qualities(found, measures)) for name, found in report.quality.items())
    return _table("Quality", ("candidate", *(name.replace("_", " ") for name in measures)), rows)


def evaluation(report: Report) -> Table:
    """Return samplers x modes: the quality of the texts, how many are plain decoding's, and the speed."""
    measures = _measures(each["quality"] or {} for each in report.evaluation)
    shown = {"tf_idf": "TF-IDF", "token_f1": "token F1"}
    header = (
        "sampler", "mode", "temperature", "noise", *(shown.get(name, name.replace("_", " ")) for name in measures),
        "same text", "acceptance", "tokens/s",
    )  # fmt: skip
    rows = (
        (
            each["sampler"], each["contestant"], f"{each['temperature']:g}", f"{each['settings'].get('noise', 0):g}",
            *_qualities(each["quality"] or {}, measures), f"{each['same']}/{each['compared']}",
            share(each["acceptance_rate"]), number(each["tokens_per_second"], 1),
        )
        for each in report.evaluation
    )  # fmt: skip
    note = (
        "Same text: prompts whose text is plain decoding's with the same sampler and seed. Similarity: character "
        "trigrams; TF-IDF: words, weighed by how rare they are among the answers."
    )
    return _table("Samplers", header, rows, note)


def layers(report: Report) -> Table:
    rows = (
        (str(each["name"]), size(each["parameters"]), f"{each['per_token']} B", str(each["dtype"]),
         seconds(each["seconds"]))
        for each in report.layers
    )  # fmt: skip
    header = ("layer", "weights", "KV per token", "dtype", "time")
    return _table("Layers of the target", header, rows, "Time: of a pass over one token.")


def memory_lines(report: Report) -> Table:
    """Return the lines of source that hold the most memory at the peak of a run."""
    rows = (
        (f"{each['file']}:{each['line']}", each["contestant"], size(each["bytes"]), f"{each['blocks']:,}",
         each["source"])
        for each in report.memory_lines
    )  # fmt: skip
    note = " ".join(NOTES[name] for name in dict.fromkeys(each["profiler"] for each in report.memory_lines))
    return _table("Memory by line", ("line", "candidate", "bytes", "blocks", "source"), rows, note)


def skipped(report: Report) -> Table:
    rows = []
    for each in report.skipped:
        more = f" and {len(each.tasks) - 5} more" if len(each.tasks) > 5 else ""
        rows.append((each.contestant or "all", each.why, f"{', '.join(each.tasks[:5])}{more}" or NOTHING))
    return _table("Left out", ("candidate", "reason", "prompts"), rows)


def provenance(report: Report) -> Table:
    """Return the provenance of the numbers, with nested values flattened."""
    return _table("Provenance", ("what", "value"), flat(report.provenance))


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested values by dotted names: {"a": {"b": 1}} as ("a.b", "1")."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{name}.")
        elif isinstance(value, (list, tuple)):
            yield f"{before}{name}", ", ".join(map(str, value)) or NOTHING
        else:
            yield f"{before}{name}", NOTHING if value is None else str(value)
