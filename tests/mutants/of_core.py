"""Mutants of `core`: laws, noise, choices, trees, traces, costs."""

from __future__ import annotations

from tests.mutants import Mutant

EDGES = "tests/core/test_edges.py::test_"
LAW = "tests/core/test_law.py::test_"
TRACE = "tests/core/test_trace.py::test_"
NOISE = "tests/conformance/test_noise.py::test_"

MUTANTS = [
    # ---- law.py
    Mutant(
        "top-p keeps one token too many",
        "core/law.py",
        "weights.cumsum(-1) - weights >= top_p",
        "weights.cumsum(-1) - weights > top_p",
        EDGES + "top_p_ends_where_the_mass_is_reached",
    ),
    Mutant(
        "top-p can leave no token",
        "core/law.py",
        "beyond[..., :1] = False  # a share",
        "beyond[..., :0] = False  # a share",
        EDGES + "a_share_that_the_dtype_rounds_to_zero_keeps_one_token",
    ),
    Mutant(
        "top-p of one row can leave no token",
        "core/ranking.py",
        "beyond[0] = False",
        "beyond[:0] = False",
        EDGES + "a_share_that_the_dtype_rounds_to_zero_keeps_one_token",
    ),
    Mutant(
        "min-p drops the token at the floor",
        "core/law.py",
        "scores.amax(-1, keepdim=True) < floor.log()",
        "scores.amax(-1, keepdim=True) <= floor.log()",
        EDGES + "min_p_keeps_what_is_exactly_at_the_floor",
    ),
    Mutant(
        "repetition penalty rewards negative scores",
        "core/law.py",
        "scores / factor, scores * factor",
        "scores / factor, scores / factor",
        LAW + "a_law_is_that_of_transformers_own_chain",
    ),
    Mutant(
        "repetition penalty ignores the prompt",
        "core/law.py",
        "torch.where(prefix.seen > 0, pushed, scores)",
        "torch.where(prefix.counts > 0, pushed, scores)",
        EDGES + "processed_logprobs_of_greedy_rows_are_those_of_the_edited_logits",
    ),
    Mutant(
        "presence penalty counts",
        "core/law.py",
        "* (counts > 0)",
        "* counts",
        LAW + "presence_and_frequency_count_the_new_text_and_repetition_all_of_it",
    ),
    Mutant(
        "a bias is kept by width alone",
        "core/law.py",
        "about = (scores.shape[-1], scores.dtype)",
        "about = (scores.shape[-1], torch.float32)",
        EDGES + "a_bias_is_kept_for_every_dtype",
    ),
    Mutant(
        "a bias beats a ban",
        "core/law.py",
        "bias[r, 0, list(row.banned_tokens)] = _NEVER",
        "bias[r, 0, list(row.banned_tokens)] += -1.0",
        LAW + "bias_adds_and_a_ban_wins",
    ),
    Mutant(
        "min_new_tokens counts one token more",
        "core/law.py",
        'prefix.new.unsqueeze(-1) < batch.column("min_new_tokens"',
        'prefix.new.unsqueeze(-1) <= batch.column("min_new_tokens"',
        LAW + "min_new_tokens_forbids_the_ends_of_text_until_then",
    ),
    Mutant(
        "a user's callable edits the logits in place",
        "core/law.py",
        "process(prefix.tokens(r, q), scores[r, q].clone())",
        "process(prefix.tokens(r, q), scores[r, 0])",
        "tests/conformance/test_controls.py::test_every_variant_with_controls_together",
    ),
    Mutant(
        "typical keeps no token",
        "core/law.py",
        "ranked.cumsum(-1) - ranked >= mass",
        "ranked.cumsum(-1) >= mass",
        LAW + "a_law_is_that_of_transformers_own_chain",
    ),
    Mutant(
        "noise of top-k has half its width",
        "core/law.py",
        "scores + shake.to(scores.dtype), scores)",
        "scores + shake.to(scores.dtype) / 2, scores)",
        LAW + "noise_shakes_the_survivors_by_its_width",
    ),
    Mutant(
        "a dynamic temperature runs backwards",
        "core/law.py",
        "base - reach + 2 * reach",
        "base + reach - 2 * reach",
        LAW + "dynamic_temperature_goes_from_end_to_end",
    ),
    # ---- noise.py
    Mutant(
        "two purposes share a number",
        "core/noise.py",
        "@unique\nclass Purpose(IntEnum):",
        "class Purpose(IntEnum):\n    OTHER = 1",
        EDGES + "purposes_have_a_number_each",
    ),
    Mutant(
        "a uniform can be 0",
        "core/noise.py",
        ".add_(0.5)",
        ".add_(0.0)",
        EDGES + "a_uniform_is_never_0_or_1",
    ),
    Mutant(
        "the purpose does not enter the key",
        "core/noise.py",
        "+ int(purpose) * _GOLDEN",
        "+ _GOLDEN",
        NOISE + "no_number_comes_twice",
    ),
    Mutant(
        "lanes 0 and 1 of neighbours collide",
        "core/noise.py",
        "_scramble(place_words(key, position).unsqueeze(-1) + lanes)",
        "_scramble(place_words(key, position).unsqueeze(-1) * 0 + lanes)",
        NOISE + "no_number_comes_twice",
    ),
    Mutant(
        "a given lane is another one",
        "core/noise.py",
        "_scramble((lanes + 1) * _signed(_GOLDEN))",
        "_scramble((lanes + 2) * _signed(_GOLDEN))",
        NOISE + "the_numbers_do_not_depend_on_the_batch",
    ),
    # ---- choice.py
    Mutant(
        "a draft is drawn with noise that the target uses",
        "core/choice.py",
        "exponential(self.batch.key(purpose), self.at_depth(self.table.own), lanes)",
        "exponential(self.batch.key(Purpose.TARGET), self.at_depth(self.table.position), lanes)",
        NOISE + "the_noise_of_a_draft_is_used_once",
    ),
    Mutant(
        "siblings are not as sure as they are probable",
        "core/choice.py",
        "values.to(torch.float64) - scores.logsumexp(-1, keepdim=True)",
        "values.to(torch.float64)",
        "tests/models/test_kernel_branches.py::test_siblings_are_those_of_torch",
    ),
    # ---- tree.py
    Mutant(
        "twins are allowed",
        "core/tree.py",
        "if (parent, token) in seen and not twins:",
        "if False:",
        "tests/conformance/test_bad_drafters.py::test_nonsense_is_refused_once",
    ),
    Mutant(
        "an id past the vocabulary is allowed",
        "core/tree.py",
        "max(tokens) < vocabulary)",
        "max(tokens) <= vocabulary)",
        "tests/conformance/test_bad_drafters.py::test_nonsense_is_refused_once",
    ),
    Mutant(
        "padding is read",
        "core/tree.py",
        "tokens=self.tokens.where(self.in_use, 0)",
        "tokens=self.tokens",
        "tests/conformance/test_bad_drafters.py::test_padding_may_be_anything",
    ),
    Mutant(
        "a merged tree has a node too many",
        "core/tree.py",
        "if len(tokens) == most:",
        "if len(tokens) > most:",
        "tests/drafters/test_prompt_lookup.py::test_a_tree_keeps_within_its_nodes",
    ),
    Mutant(
        "ancestors end after one doubling",
        "core/tree.py",
        "range(max(N, 1).bit_length())",
        "range(1)",
        "tests/models/test_masks.py::test_closure_of_random_trees",
    ),
    # ---- trace.py, costs.py
    Mutant(
        "a bonus counts as recovered",
        "core/trace.py",
        "recovered=sum(r.own is not None and not r.bonus for r in rounds)",
        "recovered=sum(r.own is not None for r in rounds)",
        "tests/conformance/test_registration.py::test_a_newcomer_runs",
    ),
    Mutant(
        "τ counts a round more",
        "core/trace.py",
        "self.emitted / self.rounds if",
        "self.emitted / (self.rounds + 1) if",
        TRACE + "the_numbers_of_a_generation_by_hand",
    ),
    Mutant(
        "acceptance by position is conditional",
        "core/trace.py",
        "for depth in set(depths):",
        "for depth in set(depths[: len(entry.path) + 1]):",
        TRACE + "acceptance_by_position_is_unconditional",
    ),
    Mutant(
        "a root has depth 1",
        "core/trace.py",
        "depths.append(0 if parent < 0",
        "depths.append(1 if parent < 0",
        TRACE + "acceptance_by_position_is_unconditional",
    ),
    Mutant(
        "the overhead of a round is free",
        "core/costs.py",
        "return self.overhead / self.seconds(1, rows)",
        "return 0.0",
        "tests/drafters/test_draft_value.py::test_the_bound_follows_the_formula",
    ),
    # ---- tree_growth.py
    Mutant(
        "siblings keep what their elders took",
        "core/tree_growth.py",
        "law = law.scatter(-1, tokens[..., i : i + 1], 0.0)",
        "law = law.scatter(-1, tokens[..., i : i + 1] * 0, 0.0)",
        EDGES + "laws_of_siblings_sum_to_one_and_lack_their_elders",
    ),
    Mutant(
        "laws of siblings do not sum to one",
        "core/tree_growth.py",
        "torch.where(total > 0, law / total, fixed)",
        "torch.where(total > 0, law, fixed)",
        EDGES + "laws_of_siblings_sum_to_one_and_lack_their_elders",
    ),
]
