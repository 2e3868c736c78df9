"""Write the tables of docs/results/serving.md from the records of `measure.py`, and pack the records."""

from __future__ import annotations

import json
import statistics
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_RESULTS = Path(__file__).resolve().parents[1]
_PAGE, _ARCHIVE = _RESULTS / "serving.md", _RESULTS / "records" / "serving.tar.xz"
_BEGIN, _END = "<!-- tables: begin -->", "<!-- tables: end -->"


def write(folder: Path) -> None:
    """Replace what stands between the two marks of the page."""
    records = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))}
    parts = [_conditions(records)]
    parts += [section(records[name]["figures"]) for name, section in _SECTIONS.items() if name in records]
    missing = [name for name in _SECTIONS if name not in records]
    if missing:
        parts.append(f"Not measured: {', '.join(missing)}.")
    head, _, rest = _PAGE.read_text("utf-8").partition(_BEGIN)
    page = "\n\n".join([head + _BEGIN, *parts, _END + rest.partition(_END)[2]])
    _PAGE.write_text(page, encoding="utf-8")
    with tarfile.open(_ARCHIVE, "w:xz") as archive:
        for path in sorted(folder.glob("*.json")):
            archive.add(path, f"serving/{path.name}")
    print(page)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _conditions(records: dict[str, Any]) -> str:
    if not records:
        return "Nothing was measured."
    about = next(iter(records.values()))["about"]
    versions = ", ".join(f"{name} {value}" for name, value in about["versions"].items() if value)
    commits = sorted(
        {str(each["about"]["commit"])[:7] + "*" * bool(each["about"]["dirty"]) for each in records.values()}
    )
    busy = max(each["about"]["busy"] or 0.0 for each in records.values())
    minutes = sum(each["seconds"] for each in records.values()) / 60
    target = about["arguments"]["target"]
    return (
        f"Commit {', '.join(commits)}, {about['date'][:10]}. {about['cpu']}, {about['cores']} cores, 2 threads. "
        f"{versions}. "
        f"Target {target} in float32. Other processes used at most {busy:.0%} of the machine before a measurement. "
        f"{minutes:.0f} minutes in all."
    )


def _mixed(found: dict[str, Any]) -> str:
    rows = [
        [f"`{draft}`", f"{each['equal']} of {found['requests']}", f"{each['accepted_draft_tokens']:.0f}",
         f"{each['cached_tokens']:.0f}"]
        for draft, each in found["drafters"].items()
    ]  # fmt: skip
    batch = "; ".join(
        f"`{draft}`: {each['equal_texts']} of 8 texts and {each['equal_logprobs']} of 8 lists of log-probabilities"
        for draft, each in found["batch_of_8"].items()
    )
    return "\n\n".join([
        "## Texts under load",
        "A request counts as equal if its texts, token ids, log-probabilities and ends are those of the same "
        "request alone "
        "on a server without a drafter: at 8 at once with a cold prefix cache, while it fills, and warm.",
        _table(["drafter", "equal", "accepted draft tokens", "tokens from the prefix cache"], rows),
        f"8 prompts in one batch, at temperature 0.8, equal to each alone: {batch}.",
    ])  # fmt: skip


def _gap(found: dict[str, Any]) -> str:
    rows = [
        [f"`{draft}`", f"{each['median_round_ms']:.1f}", f"**{each['p99_rounds']:.2f}**",
         f"{each['longest_rounds']:.1f}",
         f"{each['prompt_seconds']:.1f}", each["gaps"], f"{statistics.median(each['freed_rounds']):g}",
         max(each["freed_rounds"])]
        for draft, each in found.items()
    ]  # fmt: skip
    head = ["drafter", "median round, ms", "gap p99, rounds (bar 3)", "longest gap, rounds",
            "prompt read and answered, s",
            "gaps", "slot free after rounds, median", "at most (bar 2)"]  # fmt: skip
    return "\n\n".join([
        "## A long prompt while others write",
        "7 sequences stream while a prompt of 4,000 tokens arrives. A round is the median gap before that. The "
        "last two "
        "columns: clients with and without a stream go, 20 times; rounds from then until /metrics shows a free slot.",
        _table(head, rows),
    ])  # fmt: skip


def _flood(found: dict[str, Any]) -> str:
    answers = ", ".join(f"{count} with {status}" for status, count in found["answers"].items())
    rows = [
        ["429, p50 and p99", f"{found['refused_p50_ms']:.1f} and {found['refused_p99_ms']:.1f} ms", "p99 < 50 ms"],
        ["5xx or no answer", found["server_errors"], "0"],
        ["longest /health", f"{found['health_longest_ms']:.1f} ms", "< 100 ms"],
        ["memory at the start and at the end",
         f"{found['memory_mib_first']:.1f} and {found['memory_mib_last']:.1f} MiB", "flat"],
        ["slope of memory in the second half", f"{found['memory_slope_kib_per_second']:.1f} KiB/s", "0"],
    ]  # fmt: skip
    return "\n\n".join([
        "## A flood",
        f"The server completes {found['capacity_per_second']:.1f} requests per second at 8 at once; "
        f"{found['offered_per_second']:.0f} per second arrive at random times (Poisson), each on a new connection. "
        f"Answers: {answers}. The client was late by {found['client_late_p99_ms']:.1f} ms (p99).",
        _table(["", "measured", "bar"], rows),
    ])  # fmt: skip


def _soak(found: dict[str, Any]) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found["kinds"].items()))
    first, half, last = found["memory_kib"]
    rows = [
        ["5xx", found["server_errors"], "0"],
        ["sequences left (running, waiting)",
         f"{found['left']['num_requests_running']:.0f}, {found['left']['num_requests_waiting']:.0f}", "0, 0"],
        ["threads before and after", " and ".join(map(str, found["threads"])), "equal"],
        ["sockets before and after", " and ".join(map(str, found["sockets"])), "equal"],
        ["memory at the start, at half, at the end", f"{first:,}, {half:,}, {last:,} KiB", ""],
        ["slope of memory", f"{found['memory_slope_bytes_per_request']:.0f} bytes per request", "0"],
    ]  # fmt: skip
    return "\n\n".join([
        "## Many requests",
        f"{found['requests']:,} requests to a random model of a few kilobytes with `suffix`, 16 at once: {kinds}. "
        "The slope "
        "is that of the line with the least squares through the resident memory in the second half of the requests.",
        _table(["", "measured", "bar"], rows),
    ])  # fmt: skip


def _throughput(found: dict[str, Any]) -> str:
    rates, counts = found["rates"], ("1", "2", "4", "8")
    rows = []
    for name, rate in rates.items():
        medians = [statistics.median(rate[count]) for count in counts]
        rows.append([name, *(f"{each:.1f}" for each in medians), f"{medians[-1] / medians[0]:.2f}"])

    def ratios(above: str, below: str) -> list[str]:
        pairs = {count: zip(rates[above][count], rates[below][count], strict=True) for count in counts}
        return [f"{statistics.median(one / other for one, other in pairs[count]):.3f}" for count in counts]

    compared = [
        ["speculation ÷ plain, server (bar 0.98)", *ratios("server auto", "server none")],
        ["speculation ÷ plain, library", *ratios("library auto", "library none")],
        ["server ÷ library, plain (bar 0.95)", *ratios("server none", "library none")],
        ["server ÷ library, `auto` (bar 0.95)", *ratios("server auto", "library auto")],
    ]
    return "\n\n".join([
        "## Throughput",
        f"Tokens per second of the same 8 chats, {found['tokens']} tokens in all, greedy and streamed, prompts "
        "included; "
        f"medians of {len(rates['server none']['1'])} turns. The bar of 8 ÷ 1 is 3. The client runs on the same "
        "two cores.",
        _table(["at once", *counts, "8 ÷ 1"], rows),
        "Medians of the ratios within a turn:",
        _table(["at once", *counts], compared),
    ])  # fmt: skip


def _chat(found: dict[str, Any]) -> str:
    rows = []
    for kind in ("server", "library"):
        first, second = (statistics.median(each[turn] for each in found[kind]) for turn in ("first", "second"))
        rows.append([kind, f"{first:.3f}", f"{second:.3f}", f"**{found[f'{kind}_ratio']:.3f}**"])
    right = sum(each["cached_tokens"] == each["cached_tokens_expected"] for each in found["server"])
    last = found["server"][-1]
    return "\n\n".join([
        "## The second turn of a chat",
        f"A chat with {last['prompt_tokens'][0]} tokens in its first turn and {last['prompt_tokens'][1]} in its "
        "second one. "
        f"`cached_tokens` is {last['cached_tokens']}, the longest common beginning, in {right} of "
        f"{len(found['server'])} chats.",
        _table(["", "first turn, s to the first token", "second turn", "ratio (bar 0.15)"], rows),
    ])  # fmt: skip


def _peers(found: dict[str, Any]) -> str:
    def cells(measured: dict[str, Any], name: str) -> list[str]:
        return [f"{statistics.median(each[name] for each in measured[count]):.{2 if name[0] == 'f' else 1}f}"
                for count in ("1", "4", "8")]  # fmt: skip

    rows = [
        [server, *cells(measured, "tokens_per_second"), *cells(measured, "first_token_seconds")]
        for server, measured in found["servers"].items()
    ]
    head = ["server", "tokens/s at 1", "4", "8", "s to the first token at 1", "4", "8"]
    # without folders of the machine that measured
    commands = "\n".join(
        f"{name}: {' '.join(Path(word).name if word.startswith('/') else word for word in command)}"
        for name, command in found["commands"].items()
    )
    return "\n\n".join([
        "## Other servers",
        f"8 chats, {found['tokens_per_request']} tokens each, greedy and streamed, in turns on one machine; 2 "
        "threads; no "
        "prefix cache. Medians.",
        _table(head, rows),
        f"```text\n{commands}\n```",
    ])  # fmt: skip


_SECTIONS = {"mixed": _mixed, "gap": _gap, "flood": _flood, "soak": _soak, "throughput": _throughput, "chat": _chat,
             "peers": _peers}  # fmt: skip
