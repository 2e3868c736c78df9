"""Mutants of `rules`: what is accepted, and what is drawn after a rejection."""

from __future__ import annotations

from tests.mutants import Mutant

CHAINS = "tests/conformance/test_enumeration.py::test_chains"
TREES = "tests/conformance/test_enumeration.py::test_trees"
UNUSED = "tests/conformance/test_enumeration.py::test_nodes_that_are_not_in_use_are_never_accepted"
LOSSY = "tests/rules/test_lossy.py::test_"
BEAM = "tests/rules/test_beam.py::test_"

MUTANTS = [
    Mutant(
        "match accepts after a mismatch",
        "core/device_ops.py",
        "accepted = agree.cumprod(1).sum(1, keepdim=True)",
        "accepted = agree.sum(1, keepdim=True)",
        CHAINS + "[match-certain-[-1, 0]]",
    ),
    Mutant(
        "match accepts nodes that are not in use",
        "core/device_ops.py",
        "agree = tree.tokens == picks[:, :-1]\n        if tree.count is not None and tree.in_use is not None:",
        "agree = tree.tokens == picks[:, :-1]\n        if False:",
        UNUSED + "[match-certain-[-1]]",
    ),
    Mutant(
        "match walks below twins",
        "core/device_ops.py",
        "return ~same.tril(-1).any(-1)",
        "return ~(same & False).any(-1)",
        "tests/kernels/cuda/test_branches.py::test_follow_tree",
    ),
    Mutant(
        "the ratio test accepts too often",
        "rules/ratio.py",
        "torch.where(q > 0, p / q, torch.zeros_like(p))",
        "torch.where(q > 0, p / q + 0.1, torch.zeros_like(p))",
        CHAINS + "[ratio-iid-[-1]]",
    ),
    Mutant(
        "a token of probability 0 in the draft is accepted",
        "rules/ratio.py",
        "torch.where(q > 0, p / q, torch.zeros_like(p))",
        "torch.where(q > 0, p / q, torch.ones_like(p))",
        "tests/kernels/cuda/test_accepting.py::test_a_token_that_its_draft_cannot_have_said_is_rejected",
    ),
    Mutant(
        "the residual is not normalised",
        "rules/ratio.py",
        "residual / total, left)",
        "left, left)",
        CHAINS + "[ratio-iid-[-1]]",
    ),
    Mutant(
        "the residual of an elder sibling is forgotten",
        "rules/ratio.py",
        "torch.where(tried[:, None], rest, left)",
        "torch.where(tried[:, None], left, left)",
        CHAINS + "[ratio-certain-[-1]]",
    ),
    Mutant(
        "ratio accepts nodes that are not in use",
        "rules/ratio.py",
        "tried = tried & tree.in_use[:, node]",
        "tried = tried & True",
        UNUSED + "[ratio-iid-[-1]]",
    ),
    Mutant(
        "block rejects what ratio would accept",
        "rules/block.py",
        "(shares[-1] * ratio[:, node]).clamp(max=1.0)",
        "(shares[-1] * ratio[:, node].clamp(max=1.0))",
        "tests/conformance/test_enumeration.py::test_who_accepts_more",
    ),
    Mutant(
        "block keeps its residual at share 1",
        "rules/block.py",
        "(share.unsqueeze(-1) * p - q).clamp(min=0)",
        "(p - q).clamp(min=0)",
        CHAINS + "[block-iid-[-1, 0]]",
    ),
    Mutant(
        "block takes the first coin, not the last",
        "rules/block.py",
        "node + 1, accepted)",
        "1, accepted)",
        CHAINS + "[block-iid-[-1, 0]]",
    ),
    Mutant(
        "traversal asks a younger branch first",
        "rules/traversal.py",
        "siblings = (tree.parents.unsqueeze(1) == tree.parents.unsqueeze(2)).tril(-1)",
        "siblings = (tree.parents.unsqueeze(1) == tree.parents.unsqueeze(2)).triu(1)",
        TREES + "[traversal-iid-[-1, -1]]",
    ),
    Mutant(
        "traversal gives a child more than the share of its parent",
        "rules/traversal.py",
        "a * p_token / q_token",
        "p_token / q_token",
        TREES + "[traversal-iid-[-1, -1, 0, 0]]",
    ),
    Mutant(
        "traversal forgets what an elder sibling took from the share",
        "rules/traversal.py",
        "share.scatter_(1, above, less[:, None])",
        "share.scatter_(1, above, a[:, None])",
        TREES + "[traversal-iid-[-1, -1, 0, 0]]",
    ),
    Mutant(
        "traversal takes a share for a node that is not in use",
        "rules/traversal.py",
        "torch.where(used, less, a)",
        "less",
        UNUSED + "[traversal-iid-[-1]]",
    ),
    Mutant(
        "k-seq takes the upper end of rho",
        "rules/k_seq.py",
        "return high",
        "return low * 0.9",
        "tests/rules/test_law_rules.py::test_rho_solves_its_equation",
    ),
    Mutant(
        "k-seq serves a rejected sibling in full",
        "rules/k_seq.py",
        "left = (p - served).clamp(min=0)",
        "left = p.clamp(min=0)",
        TREES + "[k-seq-iid-[-1, -1]]",
    ),
    Mutant(
        "lenience is squared",
        "rules/lenience.py",
        "self.options.lenience * q",
        "self.options.lenience**2 * q",
        LOSSY + "lenience_never_gives_a_token_more_than_its_share_over_l",
    ),
    Mutant(
        "typical takes the other floor",
        "rules/typical.py",
        ".clamp(max=self.options.epsilon)",
        ".clamp(min=self.options.epsilon)",
        LOSSY + "typical_and_threshold_accept_what_is_plausible",
    ),
    Mutant(
        "threshold takes the other floor",
        "rules/threshold.py",
        ".clamp(max=self.options.least)",
        ".clamp(min=self.options.least)",
        LOSSY + "typical_and_threshold_accept_what_is_plausible",
    ),
]
