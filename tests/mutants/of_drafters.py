"""Mutants of `drafters`: what is learned, when, and what it costs."""

from __future__ import annotations

from tests.mutants import Mutant

LOOKUP = "tests/drafters/test_prompt_lookup.py::test_"
SUFFIX = "tests/drafters/test_suffix.py::test_"
PREDICTION = "tests/drafters/test_prediction.py::test_"

MUTANTS = [
    Mutant(
        "prompt-lookup finds itself",
        "drafters/lookup/prompt_lookup.py",
        "range(self._known, settled)",
        "range(self._known, settled + 1)",
        LOOKUP + "against_a_search_from_scratch_while_the_text_grows",
    ),
    Mutant(
        "prompt-lookup copies the earliest match",
        "drafters/lookup/prompt_lookup.py",
        "places.appendleft(end)",
        "places.append(end)",
        LOOKUP + "a_tree_of_different_continuations",
    ),
    Mutant(
        "prompt-lookup prefers the shortest match",
        "drafters/lookup/prompt_lookup.py",
        "range(min(self.options.longest, len(text)), self.options.shortest - 1, -1)",
        "range(self.options.shortest, min(self.options.longest, len(text)) + 1)",
        LOOKUP + "what_followed_the_longest_match",
    ),
    Mutant(
        "suffix skips the first token that is not settled",
        "drafters/lookup/suffix.py",
        "tail = text[settled:]",
        "tail = text[settled + 1 :]",
        SUFFIX + "every_token_that_may_be_taken_back_is_part_of_the_match",
    ),
    Mutant(
        "a suffix automaton counts a split state from zero",
        "drafters/lookup/suffix.py",
        "self._length[at] + 1, self._count[there])",
        "self._length[at] + 1, 0)",
        SUFFIX + "the_automaton_against_counting_by_hand",
    ),
    Mutant(
        "one namespace sees another",
        "drafters/lookup/suffix.py",
        "return self._spaces.get(namespace, [])",
        "return [part for parts in self._spaces.values() for part in parts]",
        SUFFIX + "one_namespace_is_not_felt_in_another",
    ),
    Mutant(
        "suffix stores less of the prompt before an answer",
        "drafters/lookup/suffix.py",
        "_LEAD_IN = 8",
        "_LEAD_IN = 6",
        SUFFIX + "the_last_eight_tokens_of_a_prompt_are_stored_with_its_answer",
    ),
    Mutant(
        "frozen memory learns",
        "drafters/lookup/suffix.py",
        "if self.options.remember and not self.options.frozen:",
        "if self.options.remember:",
        SUFFIX + "frozen_memory_is_used_and_not_changed",
    ),
    Mutant(
        "a prediction takes the farthest of equal matches",
        "drafters/lookup/prediction.py",
        "(-self._match(text, at, place), abs(place - expected), place)",
        "(-self._match(text, at, place), -abs(place - expected), place)",
        PREDICTION + "the_longest_match_wins_and_of_equals_the_nearest",
    ),
    Mutant(
        "a prediction looks everywhere",
        "drafters/lookup/prediction.py",
        "if abs(place - expected) <= window",
        "if window",
        PREDICTION + "far_away_is_nowhere",
    ),
    Mutant(
        "a host drafter mixes rows that move",
        "drafters/lookup/base.py",
        "self._states.release(row, last)",
        "self._states.release(last, last)",
        LOOKUP + "rows_that_come_and_go_keep_their_own_words",
    ),
    Mutant(
        "an old follower beats a recent one",
        "drafters/lookup/base.py",
        "while place and counts[ranked[place - 1]] <= count:",
        "while place and counts[ranked[place - 1]] < count:",
        "tests/drafters/test_ngram.py::test_against_counting_from_scratch_while_the_text_grows",
    ),
    Mutant(
        "auto's prices without overhead",
        "drafters/adaptive/auto.py",
        "overhead, plain = self._costs.overhead,",
        "overhead, plain = 0.0,",
        "tests/drafters/test_auto.py::test_the_overhead_of_a_round_is_part_of_its_price",
    ),
]
