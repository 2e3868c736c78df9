"""Beam search over the draft: one forward pass covers every depth at which all beams were drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.common.limits import BEAMS_LIMIT, Limited, limited
from paceline.core.beam_search import BeamSettings, BeamState, Grouped
from paceline.core.choice import Choice
from paceline.core.contracts import RULES, Rule
from paceline.core.tree import TokenTree
from paceline.core.verdict import BROKEN, NOTHING, BeamLogprobs, Verdict

_ENDLESS = 1 << 60


@RULES.register("beam")
class Beam(Rule):
    """Keep the result of transformers' beam search, with several tokens per forward pass.

    At each depth, the children with the best score + log p of all beams continue, in the tree of their row. The round
    ends at the first depth at which the draft does not contain a beam. A row without a search is a search with one
    beam. Unlike other rules, this rule makes a host read: the best candidates of every node, once per round.
    """

    exact = "beam"
    draw = "certain"
    on_device = False

    @dataclass(frozen=True)
    class Options(Limited):
        num_beams: int = limited(4, 1, BEAMS_LIMIT)  # for requests without a number

    def __init__(self, options: Options | None = None) -> None:
        self.options: Beam.Options = options or self.Options()
        self.num_beams = self.options.num_beams
        self._rows: Grouped | None = None

    def open(self, rows: Grouped) -> None:
        self._rows = rows

    def verify(self, tree: TokenTree, logits: Tensor, choice: Choice) -> Verdict:
        known = self._rows.beams if self._rows is not None else ()
        searches = known or [(BeamState.start(BeamSettings(1, _ENDLESS)), [row]) for row in range(tree.rows)]
        most = max(max(state.settings.candidates, state.settings.logprobs or 0) for state, _ in searches)
        best = log_probabilities(logits, choice).topk(min(most, logits.shape[-1]), dim=-1)  # [R,1+N,K]
        values, ids = best.values.cpu(), best.indices.cpu()
        drafted = children(tree)
        states = [walk(state.begin_round(), members, values, ids, drafted) for state, members in searches]
        verdict = _pack(tree, states, [members for _, members in searches])
        if not known:
            return verdict
        reported = any(state.settings.logprobs is not None for state in states)
        return replace(verdict, beams=tuple(states), logprobs=_logprobs(logits, values, ids) if reported else None)


def log_probabilities(logits: Tensor, choice: Choice) -> Tensor:
    """Return the log-probabilities [R,1+N,V] in float32 after the controls. As in transformers, they are not normalised
    again."""
    return choice.edited(logits.to(torch.float32).log_softmax(-1)).to(torch.float32)


def _logprobs(logits: Tensor, processed: Tensor, tokens: Tensor) -> BeamLogprobs:
    """Return the candidates [R,1+N,K] with their raw log-probabilities, and the K tokens with the largest ones."""
    raw = logits.to(torch.float32).log_softmax(-1)
    top = raw.topk(tokens.shape[-1], dim=-1)
    return BeamLogprobs(
        tokens, processed, raw.gather(-1, tokens.to(raw.device)).cpu(), top.indices.cpu(), top.values.cpu()
    )


def children(tree: TokenTree) -> dict[tuple[int, int, int], int]:
    """Return (row, parent, token) -> node for all nodes in use; parent -1 is the text. Of equal siblings, the first."""
    tokens = tree.tokens.tolist()
    parents = [list(range(-1, tree.nodes - 1))] * tree.rows if tree.parents is None else tree.parents.tolist()
    counts = [tree.nodes] * tree.rows if tree.count is None else tree.count.tolist()
    found: dict[tuple[int, int, int], int] = {}
    for row, used in enumerate(counts):
        for node in range(used):
            found.setdefault((row, parents[row][node], tokens[row][node]), node)
    return found


def walk(
    state: BeamState, members: Sequence[int], values: Tensor, ids: Tensor, drafted: dict[tuple[int, int, int], int]
) -> BeamState:
    """Return one search after all steps until it ends or the draft does not contain a beam. values and ids [R,1+N,K]:
    the best candidates after the text (0) and after every node (1+node) of every row."""
    while True:
        rows = [members[beam.row] for beam in state.beams]
        places = [beam.node + 1 for beam in state.beams]
        state = state.step(values[rows, places], ids[rows, places])
        if state.done:
            return state
        known = [drafted.get((members[beam.row], beam.node, beam.tokens[-1]), -1) for beam in state.beams]
        if -1 in known:
            return state
        state = state.follow(known)


def _pack(tree: TokenTree, states: Sequence[BeamState], groups: Sequence[Sequence[int]]) -> Verdict:
    """Return the verdict of the new rows: the row that each continues, its path of nodes, and its new tokens."""
    device = tree.tokens.device
    source = list(range(tree.rows))
    emitted: list[list[int]] = [[] for _ in source]
    path: list[list[int]] = [[] for _ in source]
    for state, members in zip(states, groups, strict=True):
        for row, beam in zip(members, state.beams, strict=True):
            source[row], path[row] = members[beam.row], list(beam.path)
            steps = len(path[row]) + (not state.broken)
            emitted[row] = list(beam.tokens[len(beam.tokens) - steps :]) + [BROKEN] * state.broken
    deepest = max(map(len, path))
    padded = [tokens + [NOTHING] * (deepest + 1 - len(tokens)) for tokens in emitted]
    accepted = torch.tensor([[len(nodes)] for nodes in path], device=device)
    nodes = [each + [0] * (deepest - len(each)) for each in path]
    return Verdict(
        torch.tensor(padded, device=device),
        accepted,
        None if tree.is_chain else torch.tensor(nodes, dtype=torch.int64, device=device).view(tree.rows, deepest),
        None if source == list(range(tree.rows)) else tuple(source),
    )
