"""Mutants of `models`: masks and the KV cache."""

from __future__ import annotations

from tests.mutants import Mutant

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
]
