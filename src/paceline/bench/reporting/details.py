"""The tables behind the first ones: rounds, latency, costs, quality, layers, and where the numbers come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.bench.memory_lines import NOTES
from paceline.bench.metrics import Summary
from paceline.bench.report import Report

from .cells import Cell, Table, above_bound, overall_lines
from .wording import NOTHING, number, seconds, share, size, times


def rounds(report: Report, summary: Summary) -> Table:
    """What happened in the rounds, and how much of the bound it is."""
    header = (
        "contestant", "rounds", "drafted", "accepted", "τ", "α", "efficiency", "bound S", "reached", "predicted",
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
    header = ("contestant", "first token", "decode tokens/s", "p50", "p90", "p99")
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
    return Table("Acceptance by position", ("contestant", *map(str, range(1, longest + 1))), rows, note)


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
    return Table("Quality", ("contestant", *(name.replace("_", " ") for name in measures)), rows)


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
    return Table("Memory by line", ("line", "contestant", "bytes", "blocks", "source"), rows, note)


def skipped(report: Report) -> Table:
    rows = tuple(
        (Cell(each.contestant or "everybody"), Cell(each.why), Cell(_tasks(each.tasks))) for each in report.skipped
    )
    return Table("Left out", ("who", "why", "prompts"), rows)


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
