"""Mutants of `engine` and `integrations`: rows, stops, log-probabilities, seeds."""

from __future__ import annotations

from tests.mutants import Mutant

STOPPING = "tests/engine/test_stopping.py::test_"
STOPS = "tests/conformance/test_stops.py::test_"
LIFE = "tests/conformance/test_lifecycle.py::test_"

MUTANTS = [
    # ---- stopping.py
    Mutant(
        "EOS beats a stop string",
        "engine/stopping.py",
        "if found is not None:",
        "if found is not None and token not in self._eos:",
        STOPPING + "a_string_beats_eos_beats_a_criterion_beats_the_limit",
    ),
    Mutant(
        "the limit is one token more",
        "engine/stopping.py",
        "elif complete or self.count >= self._limit:",
        "elif complete or self.count > self._limit:",
        "tests/conformance/test_metamorphic.py::test_streaming_does_not_matter",
    ),
    Mutant(
        "a stop string across two pieces is not found",
        "engine/stopping.py",
        "len(self.text) - fresh - self._longest + 1",
        "len(self.text) - fresh",
        STOPPING + "a_stop_string_is_cut_off_and_never_shown",
    ),
    Mutant(
        "a stream shows the beginning of a stop string",
        "engine/stopping.py",
        "safe -= size",
        "safe -= 0",
        STOPPING + "a_stop_string_is_cut_off_and_never_shown",
    ),
    Mutant(
        "half a character is shown",
        "engine/stopping.py",
        'if not text.endswith("\\ufffd"):',
        "if True:",
        STOPPING + "pieces_are_whole_characters_and_add_up",
    ),
    # ---- rows.py
    Mutant(
        "a moved row keeps the prompt length of the row that left",
        "engine/rows.py",
        "        for table in (self.store, self.all_lengths, self.all_prompts, self.all_ends):\n"
        "            table[index] = table[last]",
        "        for table in (self.store, self.all_lengths, self.all_ends):\n            table[index] = table[last]",
        LIFE + "mixed_requests_give_the_texts_of_each_alone",
    ),
    Mutant(
        "the tail after a stop is kept",
        "engine/rows.py",
        "            if stop is not None:\n                row.seconds",
        "            if stop is not None and i == len(emitted) - 1:\n                row.seconds",
        STOPS + "every_stop_at_every_position",
    ),
    Mutant(
        "every token counts as drafted",
        "engine/rows.py",
        "i < drafted",
        "i <= drafted",
        "tests/conformance/test_metamorphic.py::test_streaming_does_not_matter",
    ),
    Mutant(
        "a bonus of a shorter row counts as recovered",
        "engine/rows.py",
        "list(range(accepted)), accepted >= len(drafted)",
        "list(range(accepted)), accepted >= tree.nodes",
        "tests/conformance/test_rules_and_drafters.py::test_every_rule_with_every_drafter",
    ),
    # ---- rows.py: log-probabilities
    Mutant(
        "greedy rows show a point mass",
        "engine/rows.py",
        "dtype) == 0, soft, laws)",
        "dtype) < 0, soft, laws)",
        "tests/core/test_edges.py::test_processed_logprobs_of_greedy_rows_are_those_of_the_edited_logits",
    ),
    Mutant(
        "log-probabilities are of the unedited logits",
        "engine/rows.py",
        "soft = choice.edited(logits)",
        "soft = logits",
        "tests/core/test_edges.py::test_processed_logprobs_of_greedy_rows_are_those_of_the_edited_logits",
    ),
    # ---- custom_generate.py
    Mutant(
        "a seed gives all rows one seed",
        "integrations/custom_generate.py",
        "[self.seed + row for row in range(count)]",
        "[self.seed for row in range(count)]",
        "tests/engine/test_custom_generate.py::test_a_seed_gives_every_row_its_own",
    ),
    # ---- grammars
    Mutant(
        "the nodes of a draft have the mask of the text",
        "engine/static_rows.py",
        "tuple(compress(drafted[row], before))",
        "tuple(compress(drafted[row], before))[:0]",
        "tests/regressions/test_grammars.py::test_the_bonus_token_is_of_the_grammar",
    ),
    Mutant(
        "a grammar runs in a graph",
        "engine/round_graphs.py",
        'isdisjoint({"processors", "constraint"})',
        'isdisjoint({"processors"})',
        "tests/regressions/test_grammars.py::test_rows_with_a_constraint_leave_the_graphs",
    ),
    Mutant(
        "what follows an ended text fails it",
        "engine/rows.py",
        "if broken and row.stopper.stop is None:",
        "if broken:",
        "tests/regressions/test_grammars.py::test_a_text_that_has_ended_does_not_fail_by_what_follows",
    ),
    # ---- the server
    Mutant(
        "an error of the engine ends the queue",
        "serve/engine_thread.py",
        "kept = {id(party) for party in waiting}",
        "kept = set[int]()",
        "tests/serve/test_engine_thread.py::test_an_error_ends_only_the_jobs_that_were_decoded",
    ),
    Mutant(
        "an engine that fails at once begins again for ever",
        "serve/engine_thread.py",
        "old, self._proven = self._scheduler, False",
        "old = self._scheduler",
        "tests/serve/test_engine_thread.py::test_a_second_error_in_a_row_ends_the_engine",
    ),
]
