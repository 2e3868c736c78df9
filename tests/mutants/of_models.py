"""Mutants of `models`: masks, the KV cache, grammars."""

from __future__ import annotations

from tests.mutants import Mutant

GRAMMARS = "tests/models/test_grammars.py::test_"
MASKS = "tests/models/test_masks.py::test_"

MUTANTS = [
    Mutant(
        "a token sees the one after it",
        "models/slot_cache.py",
        "<= position[:, None, :, None]",
        "<= position[:, None, :, None] + 1",
        MASKS + "a_chain_sees_everything_up_to_itself",
    ),
    Mutant(
        "a node sees its siblings",
        "models/slot_cache.py",
        "nodes = (known & (offset < M)[:, None])",
        "nodes = (offset < M)[:, None].expand_as(known)",
        MASKS + "a_node_sees_the_text_and_its_ancestors",
    ),
    Mutant(
        "a window is one position wider",
        "models/slot_cache.py",
        "> position[:, None, :, None] - window",
        ">= position[:, None, :, None] - window",
        MASKS + "a_window_is_what_transformers_has",
    ),
    Mutant(
        "a scratch slot stands at its slot number",
        "models/slot_cache.py",
        "torch.where(inside, length + depth.gather(",
        "torch.where(inside & False, length + depth.gather(",
        MASKS + "a_slot_stands_for_the_position_of_its_token",
    ),
    Mutant(
        "an accepted branch is not moved",
        "core/device_ops.py",
        "source, target = length + source, length + target",
        "source, target = length + target, length + target",
        "tests/models/test_kernel_branches.py::test_move",
    ),
    Mutant(
        "a row that moves leaves its last slot behind",
        "models/slot_cache.py",
        "layer[target, :, :length] = layer[source, :, :length]",
        "layer[target, :, :1] = layer[source, :, :1]",
        "tests/conformance/test_lifecycle.py::test_mixed_requests_give_the_texts_of_each_alone",
    ),
    # ---- grammars/token_grammar.py
    Mutant(
        "an error allows the end of the text",
        "models/grammars/token_grammar.py",
        "return _Mask(self._nothing, problem=problem)",
        "return mask",
        GRAMMARS + "an_error_on_one_path_leaves_the_others",
    ),
    Mutant(
        "sequences share a matcher",
        "models/grammars/token_grammar.py",
        "self._matcher = fresh.deep_copy()",
        "self._matcher = fresh",
        GRAMMARS + "sequences_do_not_share_a_matcher",
    ),
    Mutant(
        "a mask is kept for another text",
        "models/grammars/token_grammar.py",
        "self._masks = {path[1:]: mask for path, mask in self._masks.items() if path[:1] == (token,)}",
        "self._masks = {path[1:]: mask for path, mask in self._masks.items() if path}",
        GRAMMARS + "masks_of_other_paths_are_dropped",
    ),
    Mutant(
        "a token that is no end ends the text",
        "models/grammars/token_grammar.py",
        "elif token not in self._ends or not",
        "elif False and not",
        GRAMMARS + "a_token_that_is_not_of_the_grammar_forbids_all_that_follow",
    ),
    Mutant(
        "a complete text needs an end token",
        "models/grammars/token_grammar.py",
        "if complete and not ends:",
        "if complete and ends and False:",
        GRAMMARS + "a_text_is_complete_when_only_an_end_may_follow",
    ),
]
