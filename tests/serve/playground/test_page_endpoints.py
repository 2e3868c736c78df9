"""Replays, and the operator's events."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from paceline.serve.playground.drafter_engines import draft_of, nodes_of

from .served import Played, playing, wait_for
from .test_rounds_of_streams import BODY, COMPLETIONS, emitted, rounds_of


@pytest.fixture(scope="module")
def played() -> Iterator[Played]:
    with playing() as running:
        yield running


def asked(played: Played, **changes: Any) -> dict[str, Any]:
    """The body of a replay of a text that the server writes now."""
    rounds = rounds_of(played.stream(COMPLETIONS, {**BODY, "stream_options": {"include_rounds": True}}))
    prompt = played.post("/tokenize", {"prompt": BODY["prompt"]}).json()["tokens"]
    tokens = [token for each in rounds for token in emitted(each)]
    text = {"prompt": prompt, "tokens": tokens, "seed": BODY["seed"], "temperature": BODY["temperature"]}
    return {**text, "limit": BODY["max_tokens"], "method": "suffix", "gamma": 3, "tree": False, **changes}


@pytest.mark.parametrize(("method", "gamma", "tree"), [("prompt-lookup", 2, False), ("suffix", 9, False),
                                                       ("ngram", 6, True), ("prompt-lookup", 5, True)])  # fmt: skip
def test_a_replay_has_the_rounds_of_a_real_run(played: Played, method: str, gamma: int, tree: bool) -> None:
    answer = played.post("/playground/what-if", asked(played, method=method, gamma=gamma, tree=tree)).json()
    assert answer["knows"] == "exact"
    config = {"method": method, "num_speculative_tokens": gamma, "tree": tree}
    body = {**BODY, "speculative_config": config, "stream_options": {"include_rounds": True}}
    real = rounds_of(played.stream(COMPLETIONS, body))
    assert sum(len(each["accepted"]) for each in real)
    names = ("drafted", "accepted", "parents", "own", "bonus")
    assert answer["rounds"] == [{name: each[name] for name in names} for each in real]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"method": "recycling"}, "logits"), ({"method": "worst"}, "playground"), ({"constrained": True}, "processors")],
)
def test_a_replay_says_why_it_does_not_know(played: Played, changes: dict[str, Any], reason: str) -> None:
    answer = played.post("/playground/what-if", asked(played, **changes)).json()
    assert (answer["knows"], answer["rounds"]) == ("unknown", None)
    assert reason in answer["reason"]


@pytest.mark.parametrize("changes", [{"method": "other"}, {"gamma": 0}, {"tokens": []}, {"tokens": [40]}, {"limit": 3},
                                     {"prompt": [1] * 600}, {"more": 1}])  # fmt: skip
def test_a_wrong_replay_is_refused(played: Played, changes: dict[str, Any]) -> None:
    answer = played.post("/playground/what-if", asked(played, **changes))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith((".", "?"))


def test_noise_is_for_tokens_of_the_vocabulary(played: Played) -> None:
    assert played.post("/playground/noise", {"seed": 1, "position": 3, "tokens": [40]}).status_code == 400
    assert len(played.post("/playground/noise", {"seed": -1, "position": 3, "tokens": [1, 1, 2]}).json()["noise"]) == 3


def test_every_method_has_a_drafter_and_nodes() -> None:
    for method in ("prompt-lookup", "suffix", "ngram", "prediction", "recycling", "eagle"):
        for tree in (False, True):
            name, options = draft_of(method, tree)
            options["changed"] = True
            assert (name, "changed" in draft_of(method, tree)[1]) == (method, False)
    assert nodes_of(True) > nodes_of(False)


def test_the_operator_sees_pieces_and_rounds(played: Played) -> None:
    seen: list[Any] = []
    opened, ended = threading.Event(), threading.Event()

    def watch() -> None:
        with played.client() as client, client.stream("GET", "/playground/events") as stream:
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    seen.append(json.loads(line[6:]))
                    opened.set()
                    if seen[-1].get("ended"):
                        ended.set()
                        return

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert opened.wait(60)
    rounds = rounds_of(played.stream(COMPLETIONS, {**BODY, "stream_options": {"include_rounds": True}}))
    assert ended.wait(60)
    watcher.join(60)
    head, *events = seen
    assert head == {"slots": 3}
    assert {event["lane"] for event in events} == {0}
    assert {event["drafter"] for event in events} == {"prompt-lookup"}
    told = [each for event in events for each in event["rounds"]]
    assert [each[:3] for each in told] == [[len(r["drafted"]), len(r["accepted"]), len(emitted(r))] for r in rounds]
    assert events[-1]["ended"] == "length"
    assert all(earlier["at"] <= later["at"] for earlier, later in pairwise(events))


def test_a_reader_that_leaves_is_forgotten(played: Played) -> None:
    with played.client() as client, client.stream("GET", "/playground/events") as stream:
        next(stream.iter_lines())
        assert played.service.events._readers
    wait_for(lambda: not played.service.events._readers)
