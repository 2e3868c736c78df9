"""What tests measure is told at the end, also by parallel workers: `record_property("measured", "one line")`."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    lines = [line for report in reports for name, line in report.user_properties if name == "measured"]
    if lines:
        terminalreporter.section("measured")
        for line in sorted(lines):
            terminalreporter.write_line(line)
