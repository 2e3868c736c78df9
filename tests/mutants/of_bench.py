"""Mutants of `bench`, `audit` and the public functions of `reference`."""

from __future__ import annotations

from tests.mutants import Mutant

METRICS = "tests/bench/test_metrics.py::test_"
QUALITY = "tests/bench/test_quality.py::test_"
AUDIT = "tests/audit/test_audit.py::test_"
MINIMAL = "tests/test_reference.py::test_"

MUTANTS = [
    Mutant(
        "τ as 1 + accepted / rounds",
        "bench/results/records.py",
        "return self.emitted / self.rounds if",
        "return 1 + self.accepted / self.rounds if",
        METRICS + "tau_of_a_text_that_ends_inside_an_accepted_draft",
    ),
    Mutant(
        "decoding speed counts the first token",
        "bench/results/metrics.py",
        "tokens += run.emitted - len(run.tokens)",
        "tokens += run.emitted",
        METRICS + "decoding_is_what_comes_after_the_first_token",
    ),
    Mutant(
        "a prediction without overhead",
        "bench/results/metrics.py",
        "alone = costs.seconds(1, rows) + costs.overhead",
        "alone = costs.seconds(1, rows)",
        METRICS + "the_prediction_is_the_trace_at_measured_costs",
    ),
    Mutant(
        "α counts every drafted token",
        "bench/results/records.py",
        "judged=stats.accepted + stopped,",
        "judged=stats.drafted,",
        METRICS + "a_tree_is_judged_by_its_depth",
    ),
    Mutant(
        "token F1 counts a word once",
        "bench/quality.py",
        "(Counter(ours) & Counter(theirs)).total()",
        "len(set(ours) & set(theirs))",
        QUALITY + "token_f1_counts_words_as_often_as_they_occur",
    ),
    Mutant(
        "words are as rare as they are frequent",
        "bench/quality.py",
        "(1 + self._count) / (1 + self._having[word])",
        "(1 + self._having[word]) / (1 + self._count)",
        QUALITY + "tf_idf_weighs_rare_words_more",
    ),
    Mutant(
        "the audit's level is a thousand times wider",
        "audit/agreement.py",
        "return self.plan.false_alarm / max(1, len(self.tests))",
        "return 1000 * self.plan.false_alarm / max(1, len(self.tests))",
        AUDIT + "a_position_fails_below_its_share_of_the_false_alarms",
    ),
    Mutant(
        "the tail of chi-square is another one",
        "audit/agreement.py",
        "[freedom / 2, statistic / 2]",
        "[freedom / 2, statistic]",
        "tests/conformance/test_chi_square.py::test_the_tail_is_that_of_chi_square",
    ),
    Mutant(
        "a text that ends early is a tie",
        "audit/agreement.py",
        "return Divergence(row, at, next_plain, next_drafted, None, None, None)",
        "return Divergence(row, at, next_plain, next_drafted, 0.0, 0.0, 1.0)",
        AUDIT + "a_text_that_ends_early_is_no_tie",
    ),
    Mutant(
        "a step accepts what the draft prefers",
        "reference.py",
        "* float(q[drafted]) < float(p[drafted])",
        "* float(p[drafted]) < float(q[drafted])",
        MINIMAL + "a_step_has_the_joint_law_of_the_target",
    ),
    Mutant(
        "a step draws from p after a rejection",
        "reference.py",
        "left = (p - q).clamp(min=0)",
        "left = p.clone()",
        MINIMAL + "one_token_has_the_law_of_the_target",
    ),
    Mutant(
        "an empty residual is drawn from",
        "reference.py",
        "_draw(left if left.sum() > 0 else p, generator)",
        "_draw(left, generator)",
        MINIMAL + "an_empty_residual_falls_back_to_p",
    ),
]
