"""The tuned constants of `auto` and `portfolio`, each with the experiment that chose it.

"100 texts" is the experiment of docs/log.md on 2026-11-15: 100 recorded greedy texts of SmolLM2-135M in 13 categories,
replayed offline with the measured v(n) of two CPU cores. "Round number" means: a plausible value, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """The constants that decide what is drafted. All members of all groups use `POLICY`."""

    # ---- acceptance rates of a member (`stats.AcceptanceStats`)

    # The rate of a first child depends on the run: the number of correct tokens in a row before it. With runs the
    # speed-up on the 100 texts is 1.29, without (`suffix`, γ=15) at most 1.11. The limits are round numbers.
    runs: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
    ranks: int = 8  # ranks of siblings with separate rates; round number
    fade: float = 0.98  # an observation of 35 rounds ago counts half; round number
    # Rates before any observation: of a first child by its run, then of later siblings. They are below the rates of
    # copied text, because on the 100 texts a prior that is too high costs forward passes, and one that is too low
    # costs only a few tokens.
    first_child: tuple[float, ...] = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
    later_child: tuple[float, ...] = (0.0, 0.12, 0.07, 0.05, 0.04, 0.03, 0.02, 0.02)
    prior_weight: float = 4.0  # a prior counts as this number of observations; round number
    temper_weight: float = 4.0  # the first correction of a row counts as this number of observations; round number

    # ---- the merged tree (`proposal.MergedTree`)

    # Two members that propose the same node copy from the same text, so they are not independent. Independent rates
    # give a speed-up of 1.18 on the 100 texts, the larger of the two rates gives 1.28. The exponent only breaks ties.
    agreement: float = 0.01
    # How much siblings reduce the rates of each other. It gives 1.28 on the 100 texts; 0.5 is a round number.
    rivalry: float = 0.5

    # ---- value of a draft against its forward pass (`stats.Throughput`, `Calibration`)

    throughput_fade: float = 0.97  # the time constant of tokens per pass; round number
    throughput_weight: float = 8.0  # it starts with this number of passes of 1 token each; round number
    # The calibration is accepted / expected tokens of a text. Without it, 7 of the 100 texts, cut at 64 tokens, run at
    # less than 0.985 of the speed of plain decoding; with it, 1 text.
    calibration_fade: float = 0.97  # round number
    calibration_weight: float = 4.0  # it starts with this number of expected tokens; round number
    # On a CPU v(n) rises steeply from 1 to 2 tokens and is flat after that (docs/log.md, 2026-11-15: 1.6 at 2, 1.7 to
    # 1.9 from 3 to 16 tokens). So the price of one more node is a quarter of the cheapest step of 4 nodes, up to 13.
    node_step: int = 4
    node_limit: int = 13

    # ---- cost of a member

    # After 3 timings, a proposal counts as at most 3 times the mean: other processes cause slow rounds. Round numbers.
    slow_factor: float = 3.0
    slow_after: float = 3.0
    # The assumed price of a draft step of a model before it is timed, in forward passes. The int8 copy of SmolLM2 takes
    # 0.3 (docs/decisions: 6 ms of 18 ms).
    unknown_step: float = 0.3
    # The assumed price counts as 2 timings, and fades to 0 after 8 timings: one slow step must not exclude a model from
    # a short text. Round numbers.
    unknown_step_weight: float = 2.0
    timings_needed: float = 8.0

    # ---- which members of `auto` draft

    # A member that costs less than this share of a pass drafts in every round. Host drafters without a benefit cost
    # 1.5 ms of a round (2.5 % of a pass) if all of them draft, and 0.5 ms with this limit and the pauses (docs/log.md).
    cheap: float = 0.01
    trial_rounds: int = 16  # consecutive rounds of a trial: a member must learn from passes first; round number
    first_pause: int = 64  # rounds before the first trial, so that short texts have no trial; round number
    longest_pause: int = 512  # rounds; round number
    min_chance: float = 0.005  # a draft ends before the first token with a smaller chance; round number
    # The value of a second branch must be at least twice the price of its node. Fewer branches made rounds of `auto`
    # cheaper (commit c823849). The factor is a round number.
    branch_factor: float = 2.0
    probe_budget: float = 1.0  # trials of models may cost this number of forward passes at the start; round number

    # ---- which members of `portfolio` draft (all of them round numbers)

    portfolio_trial: int = 64  # every member drafts in its first 64 rounds
    portfolio_pause: int = 32  # the largest number of rounds between two trials of a member
    lead_rounds: int = 4  # rounds in which each member drafts first, if only one draft with laws can be read
    lead_change: int = 16  # after each 16 rounds another member drafts first
    pass_in_trees: int = 32  # with cost="nodes": the cost of a forward pass, in full trees

    # ---- `auto` inside CUDA graphs (`graphed_auto`)

    # The tree shape with the most tokens per second for SmolLM2 on an H200 (docs/results/training.md).
    graph_branch: int = 4
    graph_width: int = 4
    # On that GPU a pass over 64 tokens takes almost the time of a pass over one token. A graphed round of `eagle` with
    # 24 nodes takes 0.97 ms and emits 3.3 tokens; a plain round takes 0.63 ms (docs/decisions, what `auto` asks).
    graph_nodes: int = 24
    graph_tokens: int = 64
    graph_depth: int = 5  # the γ of the same measurement
    rest_below: float = 0.97  # `auto` rests below this share of plain decoding's speed; from the same decision
    rest_after: int = 16  # rounds measured before a rest; round number
    rest_window: int = 32  # rounds in the median; round number
    rest_skipped: int = 2  # rounds after a change that do not count: one is in flight, one captures a graph
    first_rest: int = 64  # rounds of the first rest; each later rest is twice as long. Round numbers
    longest_rest: int = 512


POLICY = Policy()
