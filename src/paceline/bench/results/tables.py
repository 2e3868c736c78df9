"""The tables of a report as values, for a terminal, a page, or a log. The words are those of docs/exactness.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.bench.machine_use import NOTES
from paceline.bench.results.metrics import ALL, Change, Line, Ratio, Summary
from paceline.bench.results.records import Report

# ---- Numbers as people read them

NOTHING = "–"  # it cannot be known, or there is none


def seconds(value: float) -> str:
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


# ---- Tables as values, and how a speed-up stands in one

Tone = Literal["", "good", "bad"]


@dataclass(frozen=True)
class Cell:
    """A text; good: faster than plain decoding beyond the spread, bad: slower beyond it."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Table:
    """The first column names what the row is about."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


def speed_up(found: Ratio | None, spread: bool = False) -> Cell:
    if found is None:
        return Cell(NOTHING)
    known = spread and found.low is not None and found.high is not None
    around = f" ({found.low:.2f}–{found.high:.2f})" if known else ""
    return Cell(times(found.value) + around, tone_of(found))


def ratio(found: Ratio | None) -> Cell:
    return Cell(times(None if found is None else found.value))


def same(line: Line) -> Cell:
    """Another text need not be a defect (a tie in bfloat16, a rule that keeps the distribution), so it has no tone."""
    where = "" if line.parted is None else f", from {line.parted + 1}"
    return Cell(f"{line.same}/{line.compared}{where}")


def who(report: Report, line: Line) -> Cell:
    """Its name, marked if its rule is lossy."""
    lossy = any(member.lossy for member in report.members if member.name == line.contestant)
    return Cell(f"{line.contestant} (lossy)" if lossy else line.contestant)


def tone_of(found: Ratio | None) -> Tone:
    if found is None or found.low is None or found.high is None:
        return ""
    return "good" if found.low > 1 else "bad" if found.high < 1 else ""


def spread_of(found: Ratio | None) -> str:
    if found is None or found.low is None or found.high is None:
        return NOTHING
    return f"{found.low:.2f} to {found.high:.2f}"


def overall_lines(report: Report, summary: Summary) -> list[Line]:
    return [line for member in report.members if (line := summary.of(member.name)) is not None]


def above_bound(report: Report, lines: Sequence[Line]) -> str:
    """A sentence for each reason why a measured speed-up can be above S; "" if none is."""
    above = [line.contestant for line in lines if line.reached is not None and line.reached > 1]
    if not above:
        return ""
    busy = " The machine was busy, so the noise is large." if report.mark is not None else ""
    return (
        f" Above S: {', '.join(above)}. S is an estimate, not a limit. v, c and o were measured apart from the runs "
        "and have noise. S counts γ drafted tokens in every round, and a shorter draft costs less. S uses one α for "
        f"all rounds, and accepted tokens come in runs.{busy}"
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([first.ljust(widths[0]), *(cell.rjust(wide) for cell, wide in zip(cells, widths[1:], strict=True))])
        for first, *cells in rows
    ]


def as_text(table: Table) -> str:
    """Plain columns; good and bad, which have no colour here, are said by the numbers."""
    rows = [table.header, *(tuple(cell.text for cell in row) for row in table.rows)]
    lines = [f"  {line}".rstrip() for line in aligned(rows)]
    return "\n".join([table.title, *lines, *([table.note] if table.note else []), ""])


# ---- The tables behind the first ones: rounds, latency, costs, quality, layers, and where the numbers come from


def rounds(report: Report, summary: Summary) -> Table:
    """What happened in the rounds, and how much of the bound it is."""
    header = (
        "candidate", "rounds", "drafted", "accepted", "τ", "α", "efficiency", "bound S", "reached", "predicted",
        "measured", "error",
    )  # fmt: skip
    rows = []
    for line in overall_lines(report, summary):
        if not line.drafted:
            continue
        counts = (line.rounds, line.drafted, line.accepted)
        measured = None if line.speed_up is None else line.speed_up.value
        rows.append(
            (
                Cell(line.contestant), *(Cell(f"{each:,}") for each in counts if each is not None),
                Cell(number(line.tau)), Cell(number(line.alpha)), Cell(number(line.efficiency)),
                Cell(times(line.bound)), Cell(share(line.reached)), Cell(times(line.predicted)),
                Cell(times(measured)), Cell(share(line.prediction_error)),
            )
        )  # fmt: skip
    note = (
        "τ: emitted/rounds. α: the chance that the next drafted token is accepted. Efficiency: speed-up/τ. Reached: "
        "the speed-up after the first token, of S. Error: of the prediction, the median over prompts."
    ) + above_bound(report, overall_lines(report, summary))
    return Table("Rounds", header, tuple(rows), note)


def latencies(report: Report, summary: Summary) -> Table:
    header = ("candidate", "first token", "decode tokens/s", "p50", "p90", "p99")
    rows = []
    for line in overall_lines(report, summary):
        between = [NOTHING] * 3 if line.latency is None else [seconds(each) for each in line.latency]
        speed = Cell(number(line.decode_tokens_per_second, 1))
        rows.append((Cell(line.contestant), Cell(seconds(line.first)), speed, *map(Cell, between)))
    note = (
        "Between tokens, as percentiles; tokens of one round arrive together. Decode tokens/s: after the first token."
    )
    return Table("Latency", header, tuple(rows), note)


def by_position(report: Report, summary: Summary) -> Table:
    found = [line for line in overall_lines(report, summary) if line.drafted]
    longest = max((len(line.by_position) for line in found), default=0)
    rows = tuple(
        (
            Cell(line.contestant),
            *(Cell(f"{a / d:.2f} ({a}/{d})" if d else NOTHING) for a, d in line.by_position),
            *(Cell(NOTHING) for _ in range(longest - len(line.by_position))),
        )
        for line in found
    )
    note = "Accepted/drafted, unconditional, with the counts behind it."
    return Table("Acceptance by position", ("candidate", *map(str, range(1, longest + 1))), rows, note)


def costs(report: Report) -> Table:
    found = report.costs
    if found is None:
        return Table("Costs", (), ())
    rows = []
    for live in sorted(found.passes):
        for fed in sorted(found.passes[live]):
            name = f"v({fed})" + ("" if live == 1 else f", {live} rows")
            rows.append((Cell(name), Cell(f"{found.v(fed, live):.2f}"), Cell(seconds(found.passes[live][fed]))))
    rows += [(Cell(f"c, {name}"), Cell(f"{found.c(name):.3f}"), Cell(seconds(s))) for name, s in found.drafters.items()]
    rows.append((Cell("o"), Cell(f"{found.o():.3f}"), Cell(seconds(found.overhead))))
    note = "In passes over one token. v(n): a pass over n tokens; c: one draft step; o: a round outside the passes."
    return Table("Costs", ("what", "passes", "time"), tuple(rows), note)


def quality(report: Report) -> Table:
    measures = list(dict.fromkeys(name for each in report.quality.values() for name in each))
    rows = tuple(
        (Cell(name), *(Cell(number(found.get(measure), 0 if measure == "texts" else 3)) for measure in measures))
        for name, found in report.quality.items()
    )
    return Table("Quality", ("candidate", *(name.replace("_", " ") for name in measures)), rows)


def evaluation(report: Report) -> Table:
    """Samplers x modes: the quality of the texts, how many are plain decoding's, and the speed."""
    measures = list(dict.fromkeys(name for each in report.evaluation for name in each["quality"] or {}))
    shown = {"tf_idf": "TF-IDF", "token_f1": "token F1"}
    header = (
        "sampler", "mode", "temperature", "noise", *(shown.get(name, name.replace("_", " ")) for name in measures),
        "same text", "acceptance", "tokens/s",
    )  # fmt: skip
    rows = []
    for each in report.evaluation:
        found = each["quality"] or {}
        rows.append(
            (
                Cell(each["sampler"]), Cell(each["contestant"]), Cell(f"{each['temperature']:g}"),
                Cell(f"{each['settings'].get('noise', 0):g}"),
                *(Cell(number(found.get(name), 0 if name == "texts" else 3)) for name in measures),
                Cell(f"{each['same']}/{each['compared']}"), Cell(share(each["acceptance_rate"])),
                Cell(number(each["tokens_per_second"], 1)),
            )
        )  # fmt: skip
    note = (
        "Same text: prompts whose text is plain decoding's with the same sampler and seed. Similarity: character "
        "trigrams; TF-IDF: words, weighed by how rare they are among the answers."
    )
    return Table("Samplers", header, tuple(rows), note)


def layers(report: Report) -> Table:
    header = ("layer", "weights", "KV per token", "dtype", "time")
    rows = tuple(
        (
            Cell(str(layer["name"])), Cell(size(layer["parameters"])), Cell(f"{layer['per_token']} B"),
            Cell(str(layer["dtype"])), Cell(NOTHING if layer["seconds"] is None else seconds(layer["seconds"])),
        )
        for layer in report.layers
    )  # fmt: skip
    return Table("Layers of the target", header, rows, "Time: of a pass over one token.")


def memory_lines(report: Report) -> Table:
    """The lines of source that hold the most memory at the peak of a run."""
    rows = tuple(
        (
            Cell(f"{each['file']}:{each['line']}"), Cell(each["contestant"]), Cell(size(each["bytes"])),
            Cell(f"{each['blocks']:,}"), Cell(each["source"]),
        )
        for each in report.memory_lines
    )  # fmt: skip
    note = " ".join(NOTES[name] for name in dict.fromkeys(each["profiler"] for each in report.memory_lines))
    return Table("Memory by line", ("line", "candidate", "bytes", "blocks", "source"), rows, note)


def skipped(report: Report) -> Table:
    rows = tuple((Cell(each.contestant or "all"), Cell(each.why), Cell(_tasks(each.tasks))) for each in report.skipped)
    return Table("Left out", ("candidate", "reason", "prompts"), rows)


def provenance(report: Report) -> Table:
    """Where the numbers come from; what has an inside is flattened."""
    rows = tuple((Cell(name), Cell(value)) for name, value in flat(report.provenance))
    return Table("Provenance", ("what", "value"), rows)


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """{"a": {"b": 1}} as ("a.b", "1")."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{name}.")
        elif isinstance(value, (list, tuple)):
            yield f"{before}{name}", ", ".join(map(str, value)) or NOTHING
        else:
            yield f"{before}{name}", NOTHING if value is None else str(value)


def _tasks(tasks: Sequence[str]) -> str:
    few = ", ".join(tasks[:5])
    return NOTHING if not tasks else few if len(tasks) <= 5 else f"{few} and {len(tasks) - 5} more"


# ---- The tables of a report as values, for a terminal, a page, or a log. The words are those of docs/exactness.md

_WORST = 10  # slow prompts shown


def tables_of(report: Report, summary: Summary) -> Iterator[Table]:
    """Every table that has rows."""
    return _with_rows(
        *(overall(report, summary), by_category(report, summary), slower(report, summary), rounds(report, summary)),
        *(latencies(report, summary), by_position(report, summary), costs(report), *_details(report)),
    )


def short(report: Report, summary: Summary) -> Iterator[Table]:
    """The tables for a terminal."""
    return _with_rows(
        overall(report, summary), by_category(report, summary), slower(report, summary), *_details(report)
    )


def _details(report: Report) -> tuple[Table, ...]:
    return quality(report), evaluation(report), layers(report), memory_lines(report), skipped(report)


def _with_rows(*tables: Table) -> Iterator[Table]:
    return (table for table in tables if table.rows)


def overall(report: Report, summary: Summary) -> Table:
    """All candidates on all prompts."""
    peers = [peer for peer in report.peers if summary.of(peer) is not None]
    memory = any(line.peak is not None for line in summary.lines)
    header = (
        "candidate", "tokens/s", "speed-up", "spread", "τ", "acceptance", *(f"× {peer}" for peer in peers),
        "same text", "first token", *(("peak", "KV") if memory else ()),
    )  # fmt: skip
    rows = []
    for line in overall_lines(report, summary):
        ratios = [ratio(line.ratios.get(peer)) for peer in peers]
        bytes_used = [Cell(size(line.peak)), Cell(size(line.cache))] if memory else []
        rows.append(
            (
                who(report, line), Cell(f"{line.tokens_per_second:.1f}"), speed_up(line.speed_up),
                Cell(spread_of(line.speed_up)), Cell(number(line.tau)), Cell(share(line.acceptance_rate)), *ratios,
                same(line), Cell(seconds(line.first)), *bytes_used,
            )
        )  # fmt: skip
    note = (
        "Speed-up: over Paceline's plain decoding, in the same run. Spread: the range of another measurement. "
        "× NAME: times as fast as that peer."
    )
    return Table("All prompts", header, tuple(rows), " ".join([note, *_reservations(report, summary)]))


def _reservations(report: Report, summary: Summary) -> Iterator[str]:
    """Limits of the numbers that a reader must know."""
    if report.mark is not None:
        yield report.mark
    disturbed = sum(line.disturbed for line in summary.lines if line.category == ALL)
    if disturbed:
        yield f"{disturbed} runs were disturbed: other processes used the machine."
    lines = overall_lines(report, summary)
    most = max((line.tasks for line in lines), default=0)
    few = [f"{line.contestant} {line.tasks}" for line in lines if line.tasks < most]
    if few:
        yield f"Not all candidates did all of {most} tasks; their numbers cover the tasks they did: {', '.join(few)}."


def by_category(report: Report, summary: Summary) -> Table:
    """Speed-ups by category, and the tokens/s of plain decoding that they refer to."""
    categories = report.categories
    if len(categories) < 2:
        return Table("Speed-up by category", (), ())
    header = ("candidate", *categories, ALL)
    rows = []
    for member in report.members:
        found = [summary.of(member.name, category) for category in (*categories, ALL)]
        if member.name == report.plain:
            cells = [Cell(NOTHING if line is None else f"{line.tokens_per_second:.1f} tok/s") for line in found]
        else:
            cells = [Cell(NOTHING) if line is None else speed_up(line.speed_up, spread=True) for line in found]
        if any(line is not None for line in found):
            rows.append((Cell(member.name), *cells))
    return Table("Speed-up by category", header, tuple(rows))


def slower(report: Report, summary: Summary) -> Table:
    """The prompts on which a Paceline run is slower than plain decoding, worst first."""
    ours = {member.name for member in report.members if member.library == "paceline" and member.name != report.plain}
    found = [
        (line.speed_up.value, line)
        for line in summary.per_task
        if line.contestant in ours and line.speed_up is not None and line.speed_up.value < 1
    ]
    found.sort(key=lambda pair: pair[0])
    of = sum(line.contestant in ours for line in summary.per_task)
    rows = tuple(
        (Cell(line.contestant), Cell(line.category), speed_up(line.speed_up), Cell(spread_of(line.speed_up)),
         Cell(number(line.tau)), Cell(share(line.acceptance_rate)))
        for _, line in found[:_WORST]
    )  # fmt: skip
    beyond = sum(tone_of(line.speed_up) == "bad" for _, line in found)
    note = (
        f"{len(found)} of {of} pairs of candidate and prompt are slower than plain decoding, {beyond} of them beyond "
        f"the spread{f'; the {_WORST} slowest' if len(found) > _WORST else ''}."
    )
    return Table(
        "Slower than plain decoding", ("candidate", "prompt", "speed-up", "spread", "τ", "acceptance"), rows, note
    )


def changed(changes: Sequence[Change], different: Sequence[str]) -> Table:
    """Then and now, changes beyond the spread first. The note names other differences."""
    order = {"slower": 0, "missing": 1, "faster": 2, "added": 3, "same": 4}
    tones: dict[str, Tone] = {"slower": "bad", "missing": "bad", "faster": "good"}
    rows = tuple(
        (
            Cell(each.contestant), Cell(each.category), Cell(each.measure), Cell(_value(each.old)),
            Cell(_value(each.new)), Cell(times(each.ratio)), Cell(each.verdict, tones.get(each.verdict, "")),
        )
        for each in sorted(changes, key=lambda each: order[each.verdict])
    )  # fmt: skip
    slow = sum(each.regression for each in changes)
    summary = f"{slow} of {len(changes)} are slower beyond both spreads."
    if not any(each.ratio is not None for each in changes):
        summary = "The two have nothing in common, so nothing was compared."
    other = f" Also different: {'; '.join(different)}." if different else ""
    header = ("candidate", "category", "measure", "then", "now", "now/then", "verdict")
    return Table("Compared with before", header, rows, summary + other)


def _value(found: Ratio | None) -> str:
    return NOTHING if found is None else f"{found.value:.2f} ({spread_of(found)})"
