"""An audit passes what is exact and catches what is not: wrong rules, lying drafters, texts that leave the target's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import RULES, InputError, SpeculativeDecoder, UnsupportedError
from paceline.audit import Report, audit, audit_only_rule
from paceline.audit.agreement import (
    AuditCancelledError,
    AuditPlan,
    LawTest,
    _divergence,
    _LawTester,
    _scores,
    agreement,
    law_audit,
    logits_after,
)
from paceline.audit.audit_run import PROMPTS as OWN
from paceline.audit.audit_run import page_of, read_prompts
from paceline.audit.enumeration import BOUND, Case, Measured, RuleAudit, audit_rule
from paceline.core.sampling import Sampling
from tests.conformance.models import draft, target
from tests.conformance.mutants import MUTANTS

from .worlds import PROMPTS, TARGET, Wavering, argmax, decoder, elders_kept, flat, sharper

PLAN = AuditPlan(positions=2, samples=2000, temperature=0.8, false_alarm=1e-4, seed=0)
SMALL: Any = {"tokens": 10, "samples": 1000}
BRANCHES: dict[str, Any] = {"tree": "levels", "branch": 2}


def quiet(label: str, done: int, total: int | None) -> None: ...


def never() -> bool:
    return False


# ---- what is exact passes


@pytest.mark.usefixtures("few_shapes")
@pytest.mark.parametrize("rule", ["match", "ratio", "auto"])
def test_an_exact_decoder_passes(rule: str) -> None:
    report = audit(decoder(rule), PROMPTS, **SMALL)
    assert report.verdict == "exact"
    assert report.exit_code == 0
    assert report.greedy is not None
    assert report.law is not None
    assert report.greedy.drafted > 0
    assert {test.prompt for test in report.law.tests} == {0, 1}
    assert all(test.drafted > 0 and 0 < test.detectable < 0.2 for test in report.law.tests)
    assert (report.seeded is not None) == (rule == "match")


@pytest.mark.usefixtures("few_shapes")
def test_auto_keeps_the_law_of_drafts_that_bring_laws() -> None:
    """And only that: an audit of the text would fail a rule that keeps its promise."""

    class Independent(type(decoder().drafter)):  # type: ignore[misc]
        def propose(self, rows: Any, budget: Any) -> Any:
            return super().propose(rows, replace(budget, draw="independent"))

    made = decoder("auto")
    made.drafter = Independent(made.drafter.options)
    report = audit(made, PROMPTS, **SMALL)
    assert report.verdict == "exact"
    assert report.law is not None
    assert all(test.accepted > 0 for test in report.law.tests)


GUIDED: dict[str, Any] = {
    "without a prompt": lambda lm: paceline.guided(lm, 1.5),
    "negative prompt": lambda lm: paceline.guided(lm, 1.5, [5, 2, 9]),
    "contrast": lambda lm: paceline.contrast(lm, draft("llama", "close")),
}


@pytest.mark.usefixtures("few_shapes")
@pytest.mark.parametrize("make", GUIDED.values(), ids=GUIDED)
def test_a_target_of_two_branches_passes(make: Any) -> None:
    """Its second branch reads another prompt, so what was written must not be given to it as one."""
    made = SpeculativeDecoder(make(target("llama")), "draft-model", options={"model": target("llama")}, rows=300)
    report = audit(made, [[1, 7, 9, 4, 7], [3, 8]], tokens=12, samples=300, positions=2)
    assert report.verdict == "exact"


@pytest.mark.parametrize("make", GUIDED.values(), ids=GUIDED)
def test_logits_after_what_was_written(make: Any) -> None:
    """Those that plain decoding chose from, token by token."""
    plain, prompt = SpeculativeDecoder(make(target("llama")), draft=None), [1, 7, 9, 4, 7]
    text = plain.generate(prompt, max_new_tokens=5, ignore_eos=True, logprobs=2)
    for at, (token, entry) in enumerate(zip(text.tokens, text.logprobs, strict=True)):
        logits = logits_after(plain, prompt, text.tokens[:at])
        assert int(logits.argmax()) == token
        assert float(logits.log_softmax(-1)[token]) == pytest.approx(entry.raw)


@pytest.mark.parametrize("name", ["match", "ratio"])
def test_an_exact_rule_is_exact_on_every_kind_of_draft(name: str) -> None:
    found = audit_rule(RULES[name]())
    assert len(found.judged) == len(found.measured) == 36
    assert found.largest < BOUND
    assert found.worst is None


@pytest.mark.usefixtures("few_shapes")
def test_a_real_model_passes_with_a_tree() -> None:
    options = {"model": draft("llama", "close"), "tree": "best-first"}
    made = SpeculativeDecoder(target("llama"), "draft-model", options=options, rows=200)
    report = audit(made, [[1, 7, 9, 4, 7], [3, 8]], tokens=16, samples=400, positions=1)
    assert report.verdict == "exact"
    assert report.seeded is not None
    assert report.seeded.accepted > 0


@pytest.mark.usefixtures("few_shapes")
def test_nothing_drafted_is_said() -> None:
    report = audit(SpeculativeDecoder(target("llama"), draft=None), [[1, 2]], tokens=4, samples=0)
    assert report.verdict == "exact, but nothing was drafted: the audit tested only plain decoding"
    assert report.law is None


# ---- what is wrong is caught


@pytest.mark.usefixtures("few_shapes")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda rule: rule.name)
def test_every_mutant_is_caught(mutant: Any) -> None:
    report = audit(decoder(mutant()), PROMPTS, tokens=10, samples=0)
    assert report.exit_code == 1
    assert report.verdict.startswith(f"NOT LOSSLESS: rule '{mutant.name}' changes the law")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda rule: rule.name)
def test_every_mutant_is_caught_on_the_pair_alone(mutant: Any) -> None:
    """Also where the toys were silent, say because the fault is in how the rule meets the loop."""
    made = decoder(mutant())
    silent = RuleAudit(mutant.name, mutant.exact, ())
    greedy, written = agreement(made, PROMPTS, {"max_new_tokens": 24, "temperature": 0.0, "seed": 0}, quiet, never)
    law = law_audit(made, PROMPTS, written, PLAN, quiet, never)
    report = Report({"dtype": "float64"}, silent, greedy, None, law)
    assert report.verdict.startswith("NOT LOSSLESS")


@pytest.mark.parametrize(
    ("lie", "options"),
    [(sharper, {}), (argmax, {}), (flat, {}), (elders_kept, BRANCHES)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_lying_drafter_is_caught(lie: Any, options: dict[str, Any]) -> None:
    """The rule is right, so only what is written can show it."""
    report = of_law(lie, options)
    assert report.exit_code != 0
    assert "do not follow the target's law" in report.verdict


@pytest.mark.parametrize("options", [{}, BRANCHES], ids=str)
def test_the_same_drafter_passes_without_a_lie(options: dict[str, Any]) -> None:
    report = of_law(None, options)
    assert report.exit_code == 0, report.verdict


def of_law(lie: Any, options: dict[str, Any]) -> Report:
    """What an audit of the law alone finds."""
    law = law_audit(decoder("ratio", lie, **options), PROMPTS, [[], []], PLAN, quiet, never)
    return Report({"dtype": "float64"}, RuleAudit("ratio", "law", ()), law=law)


@pytest.mark.usefixtures("few_shapes")
def test_a_rule_that_fails_is_a_finding_and_one_that_refuses_is_not() -> None:
    class Odd(RULES["match"]):  # type: ignore[misc]
        name = "odd"

        def verify(self, tree: Any, logits: Any, choice: Any) -> Any:
            if not tree.is_chain:
                raise UnsupportedError("no trees")
            if tree.nodes > 1:
                raise ZeroDivisionError("oh")
            return super().verify(tree, logits, choice)

    found = audit_rule(Odd())
    assert {each.failure for each in found.measured} == {None, "ZeroDivisionError: oh"}
    assert all(each.case.chain and len(each.case.parents) == 1 for each in found.judged)
    assert "fails on a chain of 2" in Report({}, found).verdict


# ---- ties


@pytest.mark.usefixtures("few_shapes")
@pytest.mark.parametrize(("gap", "tie"), [(0.125, True), (4.0, False)])
def test_a_tie_of_the_format_is_told_from_a_bug(gap: float, tie: bool) -> None:
    """At 20, one step of bfloat16 is 0.125: a pass of another shape may turn the order round, and that is no bug."""
    made = SpeculativeDecoder(Wavering(gap), "prompt-lookup", rows=4)
    report = audit(made, [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2]], tokens=12, samples=0)
    assert report.greedy is not None
    (parted,) = report.greedy.divergences
    assert parted.tie == tie
    assert parted.gap == pytest.approx(gap)
    assert report.exit_code == (0 if tie else 1)
    if tie:
        assert report.verdict == "exact up to ties of bfloat16"
    else:
        assert "greedy text differs from plain decoding in 1 of 1 texts" in report.verdict


def test_a_text_that_ends_early_is_no_tie() -> None:
    parted = _divergence(decoder(), 0, [1], ([0, 1, 2], [0, 1]), Sampling())
    assert (parted.position, parted.plain, parted.speculative) == (2, 2, None)
    assert not parted.tie


def test_the_gap_of_a_sampled_text_is_that_of_the_perturbed_scores() -> None:
    """Plain decoding takes the best of them, so nothing can be ahead of what it took."""
    plain = SpeculativeDecoder(TARGET, draft=None)
    for seed in range(20):
        (token,) = plain.generate([1, 2], max_new_tokens=1, temperature=0.7, seed=seed).tokens
        scores = _scores(logits_after(plain, [1, 2]), Sampling(temperature=0.7, seed=seed), 2)
        assert int(scores.argmax()) == token


# ---- lossy rules, other rules, wrong calls


@pytest.mark.usefixtures("few_shapes")
def test_a_lossy_rule_is_measured_and_never_passes() -> None:
    report = audit_only_rule(RULES["typical"]())
    assert report.exit_code == 1
    assert "rule 'typical' is lossy by design; total variation up to" in report.verdict
    assert 0 < report.rule.by_drawn["iid"][0] < 1
    assert report.subject["rule_options"] == {"epsilon": 0.3, "delta": 0.09}


def test_a_rule_that_keeps_something_else_is_refused() -> None:
    class Searching(RULES["match"]):  # type: ignore[misc]
        name, exact = "searching", "beam"

    with pytest.raises(UnsupportedError, match="'searching' keeps the beam"):
        audit_only_rule(Searching())


@pytest.mark.usefixtures("few_shapes")
def test_it_can_be_cancelled() -> None:
    with pytest.raises(AuditCancelledError):
        audit(decoder(), PROMPTS, cancel=lambda: True)


@pytest.mark.parametrize(
    "wrong",
    [{"samples": 20}, {"samples": -1}, {"tokens": 0}, {"temperature": 0.0}, {"false_alarm": 0.0}, {"positions": -1}],
    ids=str,
)
def test_plans_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        audit(decoder(), PROMPTS, **wrong)


# ---- prompts and reports


def test_prompts_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert read_prompts(tmp_path / "a.txt") == ["one", "two"]
    (tmp_path / "b.jsonl").write_text('{"prompt": "one"}\n{"turns": ["two", "three"]}\n')
    assert read_prompts(tmp_path / "b.jsonl") == ["one", "two"]
    for name, content in (("c.txt", "\n"), ("d.jsonl", "{"), ("e.jsonl", '{"text": "x"}'), ("f.jsonl", "3")):
        (tmp_path / name).write_text(content)
        with pytest.raises(InputError, match=name):
            read_prompts(tmp_path / name)
    with pytest.raises(InputError, match="No such file"):
        read_prompts(tmp_path / "none.txt")
    assert len(set(OWN)) == 8


def test_reports_hold_every_number_and_nothing_from_outside() -> None:
    made = SpeculativeDecoder(Wavering(0.125), "prompt-lookup", rows=4)
    settings = {"max_new_tokens": 12, "temperature": 0.0, "seed": 0}
    greedy, _ = agreement(made, [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2]], settings, quiet, never)
    measured = Measured(Case("iid", (-1, 0), True, 1.0), 0.0, 1e-16)
    report = Report({"dtype": "bfloat16", "rule": "<b>"}, RuleAudit("match", "text", (measured,)), greedy)
    made_page = page_of(report, lambda token: f"|{token}|")
    text, markdown, page = made_page.as_text(), made_page.as_markdown(), made_page.as_html()
    for shown in (text, markdown, page):
        assert "exact up to ties of bfloat16" in shown
        assert "0.125" in shown
        assert "chain of 2" in shown
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "http" not in page
    assert r"\|" in markdown
    assert text.endswith("verdict: exact up to ties of bfloat16\n")


# ---- the level


def test_a_position_fails_below_its_share_of_the_false_alarms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four positions at false_alarm 1e-4: each at 2.5e-5. Just below it fails, just above it passes."""
    levels: list[float] = []

    def test(self: _LawTester, place: float, level: float) -> LawTest:
        levels.append(level)
        return LawTest(0, 1, PLAN.samples, 4, place * 2.5e-5, 0.1, 0.2, 1, 1)

    places = [0.9, 1.1, 1000.0, 0.0]
    monkeypatch.setattr(_LawTester, "positions", lambda *_: places)
    monkeypatch.setattr(_LawTester, "test", test)
    found = law_audit(None, [], [], PLAN, quiet, never)  # type: ignore[arg-type]
    assert levels == pytest.approx([2.5e-5] * 4)  # what is detectable is worked out at the same level
    assert found.level == pytest.approx(2.5e-5)
    assert [test.p for test in found.failed] == pytest.approx([0.9 * 2.5e-5, 0.0])
