"""The audit of a server passes an honest one, and finds each way to cheat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.audit.agreement import AuditCancelledError
from paceline.audit.server_audit import ServerPlan, Target, audit_server
from paceline.audit.server_client import Ask, ServerClient
from paceline.audit.server_report import ServerReport
from paceline.common.errors import InputError, UnknownNameError, UnsupportedError

from .cheats import SPECULATES, Call, Cheat, honest, running

PLAN = ServerPlan(requests=8, concurrency=4, tokens=8)
FEW = replace(PLAN, requests=4)


def audited(cheat: Cheat, against: Cheat | None = None, plan: ServerPlan = PLAN, **target: Any) -> ServerReport:
    with running(cheat) as url:
        if against is None:
            return audit_server(Target(url, **target), plan=plan)
        with running(against) as other:
            return audit_server(Target(url, **target), Target(other), plan=plan)


def without(call: Call) -> Any:
    return {}


def test_an_honest_server_is_identical() -> None:
    cheat = Cheat()
    report = audited(cheat, plan=replace(PLAN, requests=16))
    assert report.verdict == "identical: 80 of 80 texts, and the log-probabilities of all 40 that have them"
    assert (report.exit_code, report.lossless, report.untested) == (0, True, [])
    assert report.switched
    assert [each.run.name for each in report.comparisons] == [
        "under load, cold cache", "alone, cold cache", "alone, warm cache", "alone, warm cache, again",
        "under load, warm cache", "under load, half of it without speculation",
    ]  # fmt: skip
    # half of the requests meet a cold cache alone, and the others under load
    assert [each.texts for each in report.comparisons] == [8, 8, 16, 16, 16, 16]
    kinds = {(call.chat, call.sampled, bool(call.body.get("logprobs"))) for call in cheat.calls}
    assert len(kinds) == 8


def test_prompts_are_new_to_the_server_in_each_audit() -> None:
    cheat = Cheat()
    with running(cheat) as url:
        audit_server(Target(url), plan=PLAN)
        seen = {call.prompt for call in cheat.calls}
        cheat.calls.clear()
        audit_server(Target(url), plan=PLAN)
    assert not seen & {call.prompt for call in cheat.calls}


CHEATS: dict[str, tuple[Callable[[Call], bool], str]] = {
    "load": (lambda call: call.running > 1, "under load, cold cache: "),
    "speculation": (lambda call: not call.off, "alone, warm cache: 8 of 8 texts differ"),
    "cache": (lambda call: call.before > 0 and not call.off, "alone, warm cache: 8 of 8 texts differ"),
    "sampled drafts": (lambda call: call.sampled and not call.off, "alone, warm cache: 4 of 8 texts differ"),
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_server_that_cheats_is_found(name: str) -> None:
    cheats, found = CHEATS[name]
    report = audited(Cheat(lambda call: honest(call)[:5] + ("!" if cheats(call) else "?"), waits=name == "load"))
    assert report.exit_code == 1
    assert report.verdict.startswith("NOT LOSSLESS: ")
    assert any(finding.startswith(found) for finding in report.findings), report.findings
    assert all("at character 6" in finding for finding in report.findings)
    fine = {"load": "alone", "speculation": "other", "cache": "cold", "sampled drafts": "other"}[name]
    assert not any(fine in finding for finding in report.findings)


def test_the_first_difference_is_shown_with_both_texts() -> None:
    report = audited(Cheat(lambda call: honest(call)[:5] + ("|!" if not call.off else "|?")))
    (first,) = [each.divergences[0] for each in report.comparisons if each.run is report.warm]
    assert (first.position, first.token, first.gap) == (6, None, None)
    scored = next(item for item in report.comparisons[2].divergences if item.token is not None)
    assert (scored.token, scored.gap) == (6, 0.25)
    page = report.page()
    for text in (page.as_text(), page.as_markdown(), page.as_html()):
        assert "differs at character 7" in text
        assert "|!" in text
        assert "|?" in text
        assert report.verdict in text
    assert report.as_dict()["runs"][2]["divergences"][0]["found"].endswith("|!")


def test_a_server_that_ignores_the_seed_is_found_before_all_else() -> None:
    cheat = Cheat(lambda call: f"text {call.number}" if call.sampled else honest(call))
    report = audited(cheat)
    assert report.exit_code == 1
    assert report.verdict == (
        "NOT REPRODUCIBLE: 4 of 4 sampled requests have another text when they are repeated alone with the same seed: "
        "the server ignores the seed"
    )
    assert "4 of 8 requests: their kind does not repeat alone" in report.untested
    assert all(each.identical == each.texts for each in report.comparisons)  # greedy texts are judged
    assert sum(each.texts for each in report.comparisons) == 2 + 2 + 4 * 4


def test_greedy_text_that_does_not_repeat_is_no_matter_of_the_seed() -> None:
    report = audited(Cheat(lambda call: f"text {call.number // 9}"))
    assert any("greedy requests have another text" in finding for finding in report.findings)
    assert not any("greedy" in finding and "ignores the seed" in finding for finding in report.findings)


def test_one_text_for_all_seeds_is_no_test_of_sampling() -> None:
    report = audited(Cheat(lambda call: call.prompt))
    assert report.lossless
    assert "sampling: another seed gives the same texts" in report.untested


def test_log_probabilities_that_differ_are_reported_and_no_finding() -> None:
    report = audited(Cheat(logprob=lambda call: -0.5 if call.off else -0.50390625))
    assert report.lossless
    assert "log-probabilities differ in 18 of 20, by up to 0.0039" in report.verdict


SWITCHES: dict[str, tuple[dict[str, Any], str]] = {
    "refused": ({"switches": False}, "the server does not switch it per request (HTTP 400: unknown field"),
    "not reported": ({"metrics": without}, "reports no drafted tokens, so it may ignore the field"),
    "ignored": ({"metrics": lambda call: SPECULATES}, "drafts 56 tokens with speculative_config false"),
    "never on": ({"metrics": lambda call: {"speculative_decoding": {"num_draft_tokens": 0}}}, "nothing was drafted"),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_without_proof_is_not_believed(name: str) -> None:
    changes, why = SWITCHES[name]
    report = audited(Cheat(**changes))
    assert report.lossless
    assert not report.switched
    assert any(why in line for line in report.untested), report.untested
    assert report.verdict.endswith("speculation was not compared with plain decoding")


def test_what_a_server_does_not_offer_is_named() -> None:
    report = audited(Cheat(completes=False, scores=False))
    assert report.lossless
    assert "completions: HTTP 404: no such path" in report.untested
    assert "log-probabilities of chat completions: the answer has none" in report.untested
    with pytest.raises(UnsupportedError, match="no such path"):
        audited(Cheat(chats=False, completes=False))


def test_another_server_has_the_right_texts() -> None:
    plain = Cheat(switches=False, metrics=without)
    report = audited(Cheat(switches=False, metrics=without), plain)
    assert report.verdict.startswith("identical: 32 of 32 texts")
    assert "not compared" not in report.verdict
    assert report.reference.name == "other server, alone"
    other = audited(Cheat(lambda call: honest(call)[::-1], switches=False), plain)
    assert other.exit_code == 1
    assert all("texts differ" in finding for finding in other.findings)
    wavering = audited(Cheat(), Cheat(lambda call: f"{call.number}" if call.sampled else honest(call)))
    assert wavering.verdict.startswith("NOT REPRODUCIBLE: 4 of 4 sampled requests of the other server")


def test_requests_that_fail_under_load_are_findings() -> None:
    report = audited(Cheat(refuse=lambda call: 500 if call.running > 1 else None, waits=True), plan=FEW)
    assert report.exit_code == 1
    assert any("(HTTP 500: broken)" in finding and "under load" in finding for finding in report.findings)


def test_requests_that_always_fail_are_not_tested() -> None:
    report = audited(Cheat(refuse=lambda call: 400 if "(3)" in call.prompt else None))
    assert report.lossless
    assert "1 of 8 requests: HTTP 400: broken" in report.untested


def test_a_full_server_is_asked_again() -> None:
    report = audited(Cheat(refuse=lambda call: 429 if call.number % 2 else None), plan=FEW)
    assert report.lossless
    assert report.untested == []


def test_the_load_reaches_the_server_at_once() -> None:
    """All requests are there before the first one is answered."""
    cheat = Cheat()
    with running(cheat) as url:
        client = ServerClient(url, None, 10)
        client.model = "tiny"
        asks = [Ask(number, "chat", "x", 0.0, 0, 4) for number in range(6)]
        met: list[int] = []

        def meet(call: Call) -> None:
            with cheat.changed:
                met.append(cheat.running)
                cheat.changed.notify_all()
                assert cheat.changed.wait_for(lambda: len(met) == len(asks), 10)

        cheat.refuse = meet
        replies = client.ask_all(asks, lambda ask: {}, 6, lambda done: None, lambda: False)
    assert sorted(replies) == list(range(6))
    assert max(met) == 6


def test_mistakes_are_one_sentence() -> None:
    with pytest.raises(InputError, match="must begin with http"):
        audit_server(Target("localhost:8000"))
    with pytest.raises(InputError, match="cannot be reached"):
        audit_server(Target("http://127.0.0.1:9"))
    with pytest.raises(InputError, match=r"refuses the key \(HTTP 401: wrong key\)"):
        audited(Cheat(key="right"), api_key="wrong")
    assert audited(Cheat(key="right"), api_key="right").lossless
    with pytest.raises(UnknownNameError, match="Did you mean 'tiny'"):
        audited(Cheat(), model="tinny")
    several = ({"id": "one"}, {"id": "two"})
    with pytest.raises(InputError, match="serves 2 models"):
        audited(Cheat(cards=several))
    assert audited(Cheat(cards=several), model="two").subject["model"] == "two"
    with pytest.raises(InputError, match="at least 4"):
        ServerPlan(requests=3)


def test_a_cancelled_audit_ends_at_once() -> None:
    cheat, asked = Cheat(), threading_counter()
    with running(cheat) as url, pytest.raises(AuditCancelledError):
        audit_server(Target(url), plan=PLAN, cancel=lambda: asked() > 20)


def threading_counter() -> Callable[[], int]:
    """A function that counts its calls."""
    calls = iter(range(10**9))
    return lambda: next(calls)
