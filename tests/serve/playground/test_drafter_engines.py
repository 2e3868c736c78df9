"""Other drafters on the same target: the text stays, the engines are few, and they end with the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.serve.playground.drafter_engines import DEEPEST, MOST
from paceline.serve.playground.turns import Turns

from .served import Played, playing
from .test_rounds_of_streams import BODY, COMPLETIONS, emitted, rounds_of


@pytest.fixture(scope="module")
def played() -> Iterator[Played]:
    with playing() as running:
        yield running


def configs(played: Played) -> list[Any]:
    methods = played.get("/playground/facts").json()["methods"]
    assert "worst" in methods
    assert "suffix" in methods
    assert "eagle" not in methods  # none is shipped for this model
    return [
        {"method": method, "num_speculative_tokens": gamma, "tree": tree}
        for method in methods for gamma, tree in ((2, False), (7, True))
    ]  # fmt: skip


def test_no_drafter_changes_the_text(played: Played) -> None:
    def text(config: Any) -> str:
        answer = played.post(COMPLETIONS, {**BODY, "speculative_config": config})
        assert answer.status_code == 200, answer.text
        found: str = answer.json()["choices"][0]["text"]
        return found

    plain = text(False)
    assert len(plain) == BODY["max_tokens"]
    for config in configs(played):
        assert text(config) == plain, config
    assert len(played.service.others._engines) <= MOST  # type: ignore[union-attr]


def test_a_request_drafts_as_many_tokens_as_it_asks_for(played: Played) -> None:
    options = {"include_rounds": True}
    for gamma in (1, 3, DEEPEST):
        config = {"method": "worst", "num_speculative_tokens": gamma}
        rounds = rounds_of(
            played.stream(COMPLETIONS, {**BODY, "speculative_config": config, "stream_options": options})
        )
        left = BODY["max_tokens"]
        for each in rounds:
            assert len(each["drafted"]) == min(gamma, left - 1)
            left -= len(emitted(each))


def test_an_unknown_method_is_named(played: Played) -> None:
    answer = played.post(COMPLETIONS, {**BODY, "speculative_config": {"method": "sufix"}})
    assert answer.status_code == 400
    assert "suffix" in answer.json()["error"]["message"]


def test_engines_with_work_stay_and_a_third_drafter_must_wait(played: Played) -> None:
    streams = []
    for method in ("suffix", "ngram"):  # the engines exist before the turns are held
        asked = {**BODY, "speculative_config": {"method": method}}
        assert played.post(COMPLETIONS, asked).status_code == 200
        streams.append(threading.Thread(target=played.post, args=(COMPLETIONS, asked)))
    with played.turns:  # no engine runs a round
        for stream in streams:
            stream.start()
        others: Any = played.service.others
        end = time.monotonic() + 60
        while sum(e.state().running + e.state().reading + e.state().waiting for e in others._engines.values()) < 2:
            assert time.monotonic() < end
            time.sleep(0.005)
        answer = played.post(COMPLETIONS, {**BODY, "speculative_config": {"method": "worst"}})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
    for stream in streams:
        stream.join(60)
    assert played.post(COMPLETIONS, {**BODY, "speculative_config": {"method": "worst"}}).status_code == 200


def test_a_server_without_a_playground_names_no_drafters() -> None:
    from tests.serve.fakes import serving

    with serving() as running:
        answer = running.post(COMPLETIONS, {"prompt": "a", "speculative_config": {"method": "suffix"}})
        assert answer.status_code == 400
        assert "no playground" in answer.json()["error"]["message"]


def test_the_engines_end_with_the_server() -> None:
    with playing() as played:
        played.post(COMPLETIONS, {**BODY, "speculative_config": {"method": "worst"}})
        before = [thread.name for thread in threading.enumerate()].count("paceline-engine")
    after = [thread.name for thread in threading.enumerate()].count("paceline-engine")
    assert before - after == 2


def test_turns_come_in_the_order_of_asking() -> None:
    turns, order, started = Turns(), list[int](), list[threading.Thread]()

    def take(number: int) -> None:
        with turns:
            order.append(number)

    with turns:
        for number in range(5):
            thread = threading.Thread(target=take, args=(number,))
            thread.start()
            started.append(thread)
            end = time.monotonic() + 60
            while len(turns._waiting) <= number:
                assert time.monotonic() < end
                time.sleep(0.001)
    for thread in started:
        thread.join(60)
    assert order == [0, 1, 2, 3, 4]
