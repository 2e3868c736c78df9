"""`/metrics`: vLLM's names, and sums that agree with the answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .fakes import serving

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"

BODY = {"prompt": "Hello", "max_tokens": 30, "seed": 7}


def values(text: str) -> dict[str, float]:
    """Name with labels other than the model's -> value."""
    found = {}
    for line in text.splitlines():
        match = re.fullmatch(r"([\w:]+)\{(.*)\} ([\d.e+-]+|\+Inf)", line)
        if match is not None:
            labels = ",".join(sorted(part for part in match[2].split(",") if not part.startswith("model_name=")))
            found[f"{match[1]}{{{labels}}}" if labels else match[1]] = float(match[3])
    return found


def test_the_counters_are_the_sums_of_the_answers() -> None:
    with serving() as running:
        answers = [running.post("/v1/completions", {**BODY, "n": n}).json() for n in (1, 2)]
        running.post("/v1/completions", {**BODY, "stream": True})
        found = values(running.get("/metrics").text)
    assert found["paceline:prompt_tokens_total"] == 5 * 4  # of each sequence
    one, two = (answer["usage"]["completion_tokens"] for answer in answers)
    assert found["paceline:generation_tokens_total"] == 2 * one + two
    stats = [answer["metrics"]["speculative_decoding"] for answer in answers]
    for name, key in (
        ("num_drafts", "num_spec_steps"),
        ("num_draft_tokens", "num_draft_tokens"),
        ("num_accepted_tokens", "num_accepted_draft_tokens"),
    ):
        assert found[f"paceline:spec_decode_{name}_total"] == 2 * stats[0][key] + stats[1][key]
    by_position = [value for name, value in found.items() if "per_pos_total" in name]
    assert sum(by_position) == found["paceline:spec_decode_num_accepted_tokens_total"]
    ended = [value for name, value in found.items() if "request_success_total" in name]
    assert sum(ended) == 4
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert found[f"paceline:{name}_count"] == 4
    gaps = found["paceline:inter_token_latency_seconds_count"]
    assert 0 < gaps < found["paceline:generation_tokens_total"]


def test_positions_are_counted_while_a_text_is_written() -> None:
    with serving(pause=0.01, script=lambda job: "x" * 400) as running, running.client() as client:
        with client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 400, "stream": True}) as response:
            next(response.iter_lines())
            found = values(client.get("/metrics").text)
        ended = [value for name, value in found.items() if "request_success_total" in name]
        by_position = [value for name, value in found.items() if "per_pos_total" in name]
    assert sum(ended) == 0
    assert sum(by_position) == found["paceline:spec_decode_num_accepted_tokens_total"] > 0


def test_the_engines_state_and_the_prefix() -> None:
    with serving({"metrics_prefix": "vllm", "served_model_name": ("alias", "second")}) as running:
        text = running.get("/metrics").text
        assert [card["id"] for card in running.get("/v1/models").json()["data"]] == ["alias", "second"]
        assert running.post("/v1/completions", {**BODY, "model": "second"}).json()["model"] == "second"
    found = values(text)
    assert found["vllm:kv_cache_usage_perc"] == 0.5
    assert (found["vllm:prefix_cache_queries_total"], found["vllm:prefix_cache_hits_total"]) == (100, 40)
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert 'model_name="alias"' in text
    assert "paceline:" not in text


# ---- the dashboard for Grafana


def dashboard() -> Any:
    """The file, read as strict JSON: a repeated key or NaN is an error."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs), pairs
        return dict(pairs)

    def refuse(word: str) -> None:
        raise ValueError(word)

    return json.loads(DASHBOARD.read_text(encoding="utf-8"), object_pairs_hook=unique, parse_constant=refuse)


@pytest.mark.parametrize("prefix", ["paceline", "vllm"])
def test_every_metric_and_label_of_the_dashboard_exists(prefix: str) -> None:
    with serving({"metrics_prefix": prefix}) as running:
        running.post("/v1/completions", BODY)
        text = running.get("/metrics").text
    labels: dict[str, set[str]] = {}
    for name, found in re.findall(r"^([\w:]+)\{(.*)\} ", text, re.MULTILINE):
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', found))
    content = dashboard()
    variables = {each["name"]: each for each in content["templating"]["list"]}
    assert prefix in variables["prefix"]["query"].split(",")
    expressions = [target["expr"] for panel in content["panels"] for target in panel.get("targets", ())]
    assert len(expressions) > 20
    for expression in [*expressions, variables["model"]["query"]["query"].replace(", model_name", "{model_name}")]:
        filled = expression.replace("${prefix}", prefix)
        used = re.findall(rf"({prefix}:\w+)\{{(\w+)", filled)
        assert len(used) == filled.count(f"{prefix}:") > 0, filled
        for name, label in used:
            assert label in labels[name]
        for name, label in zip((name for name, _ in used), re.findall(r"by \((\w+)\)", filled), strict=False):
            assert label in labels[name], filled
        assert set(re.findall(r"\$(\w+)", filled)) <= {*variables, "__rate_interval"}


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    taken = set[tuple[int, int]]()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
