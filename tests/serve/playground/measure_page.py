"""Measure the page: its load, its frames while 4,000 tokens come at 200 per second, and the bytes of a stream.

    python -m tests.serve.playground.measure_page [URL of a server with a real model]

An engine without a model writes the tokens, so that the browser has the machine for itself.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import httpx
from playwright.sync_api import sync_playwright

from paceline.serve.jobs import Update
from paceline.serve.server_options import ServerOptions
from paceline.serve.service import Service
from tests.serve.fakes import FakeEngine, listening, tokenizer

TOKENS, PER_ROUND, PAUSE = 4000, 3, 0.015
WORDS = "Speculation drafts some tokens, and the target accepts a part of them. "
WATCH = """() => { window.frames_ = []; window.long_ = 0;
  new PerformanceObserver((list) => { long_ += list.getEntries().length; }).observe({ entryTypes: ['longtask'] });
  let last = performance.now();
  const tick = (now) => { frames_.push(now - last); last = now; requestAnimationFrame(tick); };
  requestAnimationFrame(tick); }"""


def writer(deliver: Callable[[list[Update]], None]) -> FakeEngine:
    """Return an engine that writes a token per character, at 200 tokens per second."""

    def with_lengths(updates: list[Update]) -> None:
        deliver([replace(each, lengths=[1] * len(each.tokens)) for each in updates])

    text = (WORDS * (TOKENS // len(WORDS) + 1))[:TOKENS]
    return FakeEngine(with_lengths, context=8192, script=lambda job: text, pause=PAUSE)


def frames(url: str) -> None:
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        loads = []
        for _ in range(7):
            page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
            page.goto(url)
            page.wait_for_selector("#method option:nth-child(2)", state="attached")
            loads.append(page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd"))
        print(f"load, new browser context: median {median(loads):.0f} ms of {[round(each) for each in loads]}")
        page.evaluate("for (const part of document.querySelectorAll('#ask > details')) part.open = true")
        page.fill("#max_tokens", str(TOKENS + 50))
        page.fill("#prompt", "Hello")
        browser.start_tracing(
            page=page, categories=["devtools.timeline", "disabled-by-default-devtools.timeline.frame"]
        )
        page.evaluate(WATCH)
        page.click("#go")
        for _ in range(6000):
            page.wait_for_timeout(50)
            if page.evaluate("!document.querySelector('#plain-part').hidden"):
                break
        trace = json.loads(browser.stop_tracing())["traceEvents"]
        found = sorted(page.evaluate("frames_")[5:])
        print(page.text_content("#figures"))
        names = [event["name"] for event in trace if event["name"] in ("DrawFrame", "DroppedFrame")]
        print(f"tracing: {names.count('DrawFrame')} frames drawn, {names.count('DroppedFrame')} dropped")
        for name in ("Layout", "UpdateLayoutTree", "Paint", "FunctionCall"):
            spent = sum(event.get("dur", 0) for event in trace if event["name"] == name and event.get("ph") == "X")
            print(f"  {name}: {spent / 1e6:.2f} s")
        p50, p95, p99 = (found[int(share * len(found))] for share in (0.5, 0.95, 0.99))
        print(
            f"frames: {len(found)}, mean {sum(found) / len(found):.2f} ms, p50 {p50:.1f}, p95 {p95:.1f}, p99 {p99:.1f}"
        )
        print(f"  {sum(each > 25 for each in found)} above 25 ms, {page.evaluate('long_')} long tasks")
        browser.close()


def stream_bytes(url: str) -> None:
    """Print the bytes of a stream per token, beside those of the text and of the rounds."""
    for likeliest in (None, 5):
        options: dict[str, Any] = {"include_rounds": True, "include_usage": True}
        options |= {} if likeliest is None else {"include_likeliest": likeliest}
        body = {"messages": [{"role": "user", "content": "Write a short poem about the sea."}], "seed": 7,
                "cache_salt": str(likeliest), "max_tokens": 200, "stream": True, "stream_options": options}  # fmt: skip
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False)
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        chunks = [json.loads(line) for line in lines]
        text = "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"])
        parts = [json.dumps(chunk.get(name)) for chunk in chunks for name in ("rounds", "texts") if chunk.get(name)]
        tokens, size, rounds = chunks[-1]["usage"]["completion_tokens"], len(answer.content), sum(map(len, parts))
        known = len(text.encode()) + rounds
        print(f"likeliest {likeliest}: {size / tokens:.0f} bytes per token, {size / known:.2f} times text and rounds")


def main() -> None:
    options = ServerOptions(port=0, log_requests=False)
    with listening(Service(writer, tokenizer(), options)) as (url, _):
        frames(url)
    for url in sys.argv[1:]:
        stream_bytes(url)


if __name__ == "__main__":
    main()
