"""The tables of a report as values, for a terminal, a page, or a log. The words are those of docs/exactness.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.bench.metrics import ALL, Ratio, Summary
from paceline.bench.report import Report

from .cells import Cell, Table, Tone, overall_lines, ratio, same, speed_up, spread_of, tone_of, who
from .comparing import Change
from .details import by_position, costs, evaluation, latencies, layers, memory_lines, quality, rounds, skipped
from .wording import NOTHING, number, seconds, share, size, times

_WORST = 10  # prompts shown of those where somebody is slower than plain decoding


def tables_of(report: Report, summary: Summary) -> Iterator[Table]:
    """Every table there is something in."""
    made = (
        overall(report, summary),
        by_category(report, summary),
        slower(report, summary),
        rounds(report, summary),
        latencies(report, summary),
        by_position(report, summary),
        costs(report),
        quality(report),
        evaluation(report),
        layers(report),
        memory_lines(report),
        skipped(report),
    )
    return (table for table in made if table.rows)


def short(report: Report, summary: Summary) -> Iterator[Table]:
    """Those for a terminal."""
    made = (
        overall(report, summary),
        by_category(report, summary),
        slower(report, summary),
        quality(report),
        evaluation(report),
        layers(report),
        memory_lines(report),
        skipped(report),
    )
    return (table for table in made if table.rows)


def overall(report: Report, summary: Summary) -> Table:
    """Everybody, over everything."""
    peers = [peer for peer in report.peers if summary.of(peer) is not None]
    memory = any(line.peak is not None for line in summary.lines)
    header = (
        "contestant", "tokens/s", "speed-up", "spread", "τ", "acceptance", *(f"× {peer}" for peer in peers),
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
        "Speed-up: over our own plain decoding, in the same run. Spread: what measuring all of it again could give. "
        "× NAME: times as fast as that peer."
    )
    return Table("All prompts", header, tuple(rows), " ".join([note, *_reservations(report, summary)]))


def _reservations(report: Report, summary: Summary) -> Iterator[str]:
    """What a reader must know before believing the numbers."""
    if report.mark is not None:
        yield report.mark
    disturbed = sum(line.disturbed for line in summary.lines if line.category == ALL)
    if disturbed:
        yield f"{disturbed} runs were disturbed: others used the machine meanwhile."
    lines = overall_lines(report, summary)
    most = max((line.tasks for line in lines), default=0)
    few = [f"{line.contestant} {line.tasks}" for line in lines if line.tasks < most]
    if few:
        yield f"Not everybody did all of {most} tasks, and numbers are of those they did: {', '.join(few)}."


def by_category(report: Report, summary: Summary) -> Table:
    """Speed-ups only: categories × contestants, with plain decoding's tokens/s to see what they are of."""
    categories = report.categories
    if len(categories) < 2:
        return Table("Speed-up by category", (), ())
    header = ("contestant", *categories, ALL)
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
    """Where speculation lost: the prompts on which somebody of ours is slower than plain decoding, worst first."""
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
        f"{len(found)} of {of} pairs of contestant and prompt are slower than plain decoding, {beyond} of them beyond "
        f"the spread{f'; the {_WORST} slowest' if len(found) > _WORST else ''}."
    )
    return Table(
        "Slower than plain decoding", ("contestant", "prompt", "speed-up", "spread", "τ", "acceptance"), rows, note
    )


def changed(changes: Sequence[Change], different: Sequence[str]) -> Table:
    """Then and now, what changed beyond the spread first; the note says what else is different."""
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
    said = f"{slow} of {len(changes)} are slower beyond both spreads."
    if not any(each.ratio is not None for each in changes):
        said = "The two have nothing in common, so nothing was compared."
    other = f" Also different: {'; '.join(different)}." if different else ""
    header = ("contestant", "category", "measure", "then", "now", "now/then", "verdict")
    return Table("Compared with before", header, rows, said + other)


def _value(found: Ratio | None) -> str:
    return NOTHING if found is None else f"{found.value:.2f} ({spread_of(found)})"
