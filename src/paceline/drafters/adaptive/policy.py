"""The tuned constants of `auto` and `portfolio`, each with the experiment that chose it.

"100 texts" is the experiment of docs/log.md on 2026-11-15: 100 recorded greedy texts of SmolLM2-135M in 13 categories,
decided again offline with the measured v(n) of two CPU cores. "Round number" means: not measured, a plausible value.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """Every constant that decides what is drafted. All members of all groups share `POLICY`."""

    # ---- acceptance rates of a member (`stats.AcceptanceStats`)

    # The rate of a first child depends on how many tokens in a row were right before. Speed-up 1.29 on the 100 texts;
    # the best choice without runs (`suffix`, γ=15) gives 1.11. The limits themselves are round numbers.
    runs: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
    ranks: int = 8  # ranks of siblings with rates of their own; round number
    fade: float = 0.98  # an observation of 35 rounds ago counts half; round number
    # Rates before any observation, below what copied text shows: a first child by its run, then later siblings.
    # Lower than the first version, on the 100 texts: a prior that is too high costs forward passes, one that is too
    # low costs a few tokens.
    first_child: tuple[float, ...] = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
    later_child: tuple[float, ...] = (0.0, 0.12, 0.07, 0.05, 0.04, 0.03, 0.02, 0.02)
    prior_weight: float = 4.0  # observations that a prior counts as; round number
    temper_weight: float = 4.0  # the same, of the correction of a whole row; round number

    # ---- the merged tree (`proposal.MergedTree`)

    # Two members that propose the same node read the same text. Their rates as independent events give a speed-up of
    # 1.18 on the 100 texts, the best of their rates gives 1.28. The exponent only breaks ties.
    agreement: float = 0.01
    # How much rival siblings weaken each other; with it 1.28 on the 100 texts. The half is a round number.
    rivalry: float = 0.5

    # ---- value of a draft against its forward pass (`stats.Throughput`, `Calibration`)

    throughput_fade: float = 0.97  # the time constant of tokens per pass; round number
    throughput_weight: float = 8.0  # passes at 1 token each that it starts with; round number
    # The share of promised tokens that a text accepts. Without it 7 of the 100 texts, cut at 64 tokens, run below
    # 0.985 of plain decoding; with it 1.
    calibration_fade: float = 0.97  # round number
    calibration_weight: float = 4.0  # promised tokens that it starts with; round number
    # v(n) jumps from 1 to 2 tokens and is flat after that on a CPU (docs/log.md, 2026-11-15: 1.6 at 2, 1.7 to 1.9
    # from 3 to 16 tokens). So the price of one more node is that of 4 nodes, where they are cheapest up to 13.
    node_step: int = 4
    node_limit: int = 13

    # ---- cost of a member

    # A proposal counts as at most 3 usual ones, once 3 were timed: other processes cause slow rounds. Round numbers.
    slow_factor: float = 3.0
    slow_after: float = 3.0
    # Price of the step of a model before it is timed, in forward passes. The int8 copy of SmolLM2 takes 0.3
    # (docs/decisions: 6 ms of 18 ms).
    unknown_step: float = 0.3
    # That price counts as 2 timings, and fades until 8 were taken: one slow step must not exclude a model from a short
    # text. Round numbers.
    unknown_step_weight: float = 2.0
    timings_needed: float = 8.0

    # ---- which members `auto` asks

    # Below this share of a pass a member is asked in every round. Host drafters that did not help cost 1.5 ms of a
    # round (2.5 % of a pass) when all of them were asked, 0.5 ms with this limit and the pauses (docs/log.md).
    cheap: float = 0.01
    trial_rounds: int = 16  # consecutive rounds of a trial: a member learns from passes first; round number
    first_pause: int = 64  # rounds before the first trial, so that a short text pays for none; round number
    longest_pause: int = 512  # rounds; round number
    min_chance: float = 0.005  # drafts end where their chance falls below it; round number
    # A second branch must be worth twice the price of its node. Sparing them made rounds of `auto` cheaper
    # (commit c823849); the factor is a round number.
    branch_factor: float = 2.0
    probe_budget: float = 1.0  # forward passes that trials of models may cost at the start; round number

    # ---- which members `portfolio` asks (all of them round numbers)

    portfolio_trial: int = 64  # rounds in which every member is asked
    portfolio_pause: int = 32  # rounds between two trials of the worst member, at most
    lead_rounds: int = 4  # rounds every member drafts alone, where only one may draft
    lead_change: int = 16  # rounds after which another member drafts alone
    pass_in_trees: int = 32  # with cost="nodes": the cost of a forward pass, in full trees

    # ---- `auto` inside CUDA graphs (`graphed_auto`)

    # docs/results/training.md: the tree shape with the most tokens per second for SmolLM2 on an H200.
    graph_branch: int = 4
    graph_width: int = 4
    # A pass of up to 64 tokens costs almost what a pass of one costs there; a graphed round of `eagle` with 24 nodes
    # takes 0.97 ms and emits 3.3 tokens, a plain one 0.63 ms (docs/decisions, what `auto` asks).
    graph_nodes: int = 24
    graph_tokens: int = 64
    graph_depth: int = 5  # the γ of the same measurement
    rest_below: float = 0.97  # of plain decoding's speed: `auto` may not be slower than that; the same decision
    rest_after: int = 16  # rounds measured before a rest; round number
    rest_window: int = 32  # rounds that the median is taken of; round number
    rest_skipped: int = 2  # rounds after a change that do not count: one is in flight, one captures a graph
    first_rest: int = 64  # rounds; doubles up to the longest rest. Round numbers of the same decision
    longest_rest: int = 512


POLICY = Policy()
