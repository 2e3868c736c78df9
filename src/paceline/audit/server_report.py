"""The report of the audit of a server: the equal texts, the first differences, and the parts that were not tested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.audit.report_page import Page, Section, Table
from paceline.audit.server_client import Ask, Reply
from paceline.models.reader import common_prefix

_BEFORE, _AFTER = 24, 40  # characters that a report shows before and after the first difference


@dataclass(frozen=True)
class Run:
    """The replies to the requests of an audit under one condition, by the numbers of the requests."""

    name: str
    replies: dict[int, Reply]
    seconds: float

    def total(self, field: str) -> int | None:
        """Return the sum of a field over all replies that have it, or None if no reply has it."""
        known = [value for reply in self.replies.values() if (value := getattr(reply, field)) is not None]
        return sum(known) if known else None


@dataclass(frozen=True)
class ServerDivergence:
    """A text that differs from the expected one. position: the number of characters before the first difference. token:
    the number of tokens before it, if the server reports tokens. gap: the difference of the two best tokens there."""

    run: str
    request: int
    kind: str
    position: int
    expected: str
    found: str
    expected_end: str | None
    found_end: str | None
    token: int | None = None
    gap: float | None = None
    error: str | None = None

    def around(self, text: str, end: str | None) -> str:
        """Return the part of one of the two texts around the first difference, with its finish reason `end`."""
        start, stop = max(0, self.position - _BEFORE), self.position + _AFTER
        last = f" <{end}>" if stop >= len(text) else "…"
        return f"{'…' if start else ''}{text[start:stop]!r}{last}"


@dataclass(frozen=True)
class Comparison:
    """A run compared with the expected texts. scored: the number of equal texts with log-probabilities on both sides.
    scores_differ: the number of those with different log-probabilities. spread: the largest difference."""

    run: Run
    texts: int
    divergences: tuple[ServerDivergence, ...]
    scored: int
    scores_differ: int
    spread: float

    @property
    def identical(self) -> int:
        return self.texts - len(self.divergences)


@dataclass(frozen=True)
class ServerReport:
    """The results of the audit of a server. `warm` and `again`: the same requests, sent alone. `plain`: without
    speculation. `other`: from the other server. None: this part did not run."""

    subject: dict[str, Any]
    asks: Sequence[Ask]
    runs: Sequence[Run]
    warm: Run
    again: Run
    plain: Run | None
    other: Run | None
    other_again: Run | None
    seed_works: bool
    reasons: Sequence[str]
    seconds: float

    # ---- the requests that the verdict uses

    @property
    def reference(self) -> Run:
        """Return the run with the expected texts."""
        return self.other or self.plain or self.warm

    def changed(self, one: Run, two: Run) -> list[Ask]:
        """Return the requests whose texts differ in these two runs."""
        return [ask for ask in self.asks if _differ(one.replies[ask.number], two.replies[ask.number])]

    @property
    def unrepeatable(self) -> list[tuple[str, list[Ask]]]:
        """Return for each server the requests whose text changes when they are sent alone again with the same seed."""
        pairs = [("", self.warm, self.again)]
        if self.other is not None and self.other_again is not None:
            pairs.append((" of the other server", self.other, self.other_again))
        return [(who, asks) for who, one, two in pairs if (asks := self.changed(one, two))]

    @property
    def judged(self) -> list[Ask]:
        """Return the requests with a known expected text, of kinds whose text does not change when it is repeated."""
        wavering = {(ask.endpoint, ask.sampled) for _, asks in self.unrepeatable for ask in asks}
        fine = [ask for ask in self.asks if self.reference.replies[ask.number].error is None]
        return [ask for ask in fine if (ask.endpoint, ask.sampled) not in wavering]

    @property
    def comparisons(self) -> list[Comparison]:
        """Return every run compared with the expected texts, except the repetition of the other server."""
        left_out = (self.reference, self.other_again)
        return [self._compared(run) for run in self.runs if run not in left_out]

    def _compared(self, run: Run) -> Comparison:
        right = self.reference.replies
        pairs = [(ask, right[ask.number], run.replies[ask.number]) for ask in self.judged if ask.number in run.replies]
        divergences = [_divergence(run.name, *pair) for pair in pairs if _differ(pair[1], pair[2])]
        scored = [(one, two) for _, one, two in pairs if one.same_text(two) and one.logprobs and two.logprobs]
        unequal = [(one.logprobs, two.logprobs) for one, two in scored if one.logprobs != two.logprobs]
        spread = max((abs(a - b) for one, two in unequal for a, b in zip(one, two, strict=False)), default=0.0)
        return Comparison(run, len(pairs), tuple(divergences), len(scored), len(unequal), spread)

    @property
    def switched(self) -> bool:
        """Return whether the server reports drafted tokens with speculation, and none without."""
        return self.plain is not None and self.plain.total("drafted") == 0 and bool(self.warm.total("drafted"))

    # ---- the verdict

    @property
    def findings(self) -> list[str]:
        """Return a phrase for each way in which the texts differ."""
        findings = []
        for who, asks in self.unrepeatable:
            for name, is_sampled in (("sampled", True), ("greedy", False)):
                wavering, total = (sum(ask.sampled == is_sampled for ask in some) for some in (asks, self.asks))
                why = ": the server ignores the seed" if is_sampled and 2 * wavering > total else ""
                if wavering:
                    findings.append(
                        f"{wavering} of {total} {name} requests{who} have another text when they are repeated alone "
                        f"with the same seed{why}"
                    )
        for found in self.comparisons:
            if found.divergences:
                first = found.divergences[0]
                where = f"at character {first.position + 1}" if first.error is None else f"({first.error})"
                findings.append(
                    f"{found.run.name}: {len(found.divergences)} of {found.texts} texts differ, first in request "
                    f"{first.request + 1} ({first.kind}) {where}"
                )
        return findings

    @property
    def untested(self) -> list[str]:
        """Return a phrase for each feature that this audit did not test, with the reason."""
        missing = list(self.reasons)
        drafted = self.warm.total("drafted")
        if self.plain is not None and not self.switched:
            off = self.plain.total("drafted")
            if off is None:
                why = "the server accepts the field, but reports no drafted tokens, so it may ignore the field"
            elif off:
                why = f"the server drafts {off} tokens with speculative_config false"
            else:
                why = "nothing was drafted with speculation on"
            missing.append(f"speculation on and off: {why}")
        elif self.plain is None and drafted == 0:
            missing.append("speculation: nothing was drafted")
        cached = self.again.total("cached")
        if not cached:
            why = "does not report cached tokens" if cached is None else "took nothing from a cache"
            missing.append(f"the cache: the server {why}")
        if not self.seed_works and any(ask.sampled for ask in self.asks):
            missing.append("sampling: another seed gives the same texts")
        judged = {ask.number for ask in self.judged}
        left = [ask for ask in self.asks if ask.number not in judged]
        failed = [reply for ask in left if (reply := self.reference.replies[ask.number]).error is not None]
        if failed:
            missing.append(f"{len(failed)} of {len(self.asks)} requests: {failed[0].error}")
        if len(left) > len(failed):
            missing.append(f"{len(left) - len(failed)} of {len(self.asks)} requests: their kind does not repeat alone")
        return missing

    @property
    def lossless(self) -> bool:
        return not self.findings

    @property
    def exit_code(self) -> int:
        return 0 if self.lossless and self.judged else 1

    @property
    def verdict(self) -> str:
        findings, compared = self.findings, self.comparisons
        if findings:
            more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
            return f"NOT {'REPRODUCIBLE' if self.unrepeatable else 'LOSSLESS'}: {findings[0]}{more}"
        texts = sum(each.texts for each in compared)
        if not texts:
            return "NOTHING TESTED: no request has a text to compare with"
        verdict = f"identical: {texts} of {texts} texts"
        scored, unequal = (sum(getattr(each, name) for each in compared) for name in ("scored", "scores_differ"))
        if unequal:
            spread = max(each.spread for each in compared)
            verdict += f"; log-probabilities differ in {unequal} of {scored}, by up to {spread:.2g}"
        elif scored:
            verdict += f", and the log-probabilities of all {scored} that have them"
        if not self.switched and self.other is None:
            verdict += "; speculation was not compared with plain decoding"
        return verdict

    # ---- the report

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return {
            **{name: getattr(self, name) for name in ("verdict", "lossless", "findings", "untested", "subject")},
            "reference": self.reference.name,
            "speculation_switched": self.switched,
            "runs": [
                {
                    "name": each.run.name,
                    "texts": each.texts,
                    "identical": each.identical,
                    "logprobs": {"texts": each.scored, "differ": each.scores_differ, "spread": each.spread},
                    "drafted": each.run.total("drafted"),
                    "cached": each.run.total("cached"),
                    "seconds": each.run.seconds,
                    "divergences": [asdict(item) for item in each.divergences],
                }
                for each in self.comparisons
            ],
            "seconds": self.seconds,
        }

    def page(self) -> Page:
        """Return the report as a page."""
        about = [f"{name}: {value}" for name, value in self.subject.items() if value is not None]
        sections = [Section("What was audited", about), self._texts()]
        divergences = [item for each in self.comparisons for item in each.divergences[:1]]
        if divergences:
            sections.append(
                Section("The first difference of each run", [line for item in divergences for line in _lines(item)])
            )
        if self.findings:
            sections.append(Section("What is not lossless", self.findings))
        if self.untested:
            sections.append(Section("What was not tested", self.untested))
        return Page(self.verdict, self.lossless, sections, long_tables=True)

    def _texts(self) -> Section:
        lines = [f"Every text must equal the text of the run '{self.reference.name}'."]
        drafted, off = self.warm.total("drafted"), None if self.plain is None else self.plain.total("drafted")
        if drafted is not None:
            without = "" if off is None else f", and {off} in those without speculation"
            lines.append(f"The server drafted {drafted} tokens in {len(self.asks)} requests{without}.")
        table: Table = [("run", "texts", "identical", "log-probabilities", "cached tokens", "seconds")]
        for each in [self._compared(self.reference), *self.comparisons]:
            equal = f"{each.scored - each.scores_differ} of {each.scored} equal" if each.scored else "–"
            cached, right = each.run.total("cached"), each.run is self.reference
            table.append((each.run.name, str(each.texts), "these are the right texts" if right else str(each.identical),
                          "–" if right else equal, "–" if cached is None else str(cached),
                          f"{each.run.seconds:.1f}"))  # fmt: skip
        return Section("The texts", lines, table)


def _differ(one: Reply, two: Reply) -> bool:
    """Return whether two replies to a request differ. Two errors do not differ."""
    if one.error is not None or two.error is not None:
        return (one.error is None) != (two.error is None)
    return one.content != two.content


def _divergence(run: str, ask: Ask, right: Reply, found: Reply) -> ServerDivergence:
    position = common_prefix(right.text, found.text)
    token = gap = None
    if right.tokens and found.tokens:
        token = common_prefix(right.tokens, found.tokens)
        gap = right.gaps[token] if token < len(right.gaps) else None
    kind = f"{'sampled' if ask.sampled else 'greedy'} {ask.endpoint}"
    return ServerDivergence(run, ask.number, kind, position, right.text, found.text, right.finish_reason,
                            found.finish_reason, token, gap, found.error)  # fmt: skip


def _lines(item: ServerDivergence) -> list[str]:
    """Return a difference as lines of text."""
    head = f"{item.run}, request {item.request + 1} ({item.kind})"
    if item.error is not None:
        return [f"{head}: {item.error}"]
    at = f"character {item.position + 1}" + ("" if item.token is None else f", token {item.token + 1}")
    gap = "" if item.gap is None else f"; the log-probabilities of the two best tokens differ there by {item.gap:.3g}"
    right, found = item.around(item.expected, item.expected_end), item.around(item.found, item.found_end)
    return [f"{head} differs at {at}{gap}:", f"  expected: {right}", f"  found:    {found}"]
