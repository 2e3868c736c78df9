"""Merged trees: members with higher acceptance get the nodes, equal nodes are one, ancestors stay."""

from __future__ import annotations

import random

from paceline.drafters.adaptive.proposal import Contribution, MergedTree, RowDraft
from paceline.drafters.adaptive.stats import AcceptanceStats, Mean, entry_of
from paceline.drafters.lookup.base import ListDraft


def merge(drafts: list[Contribution], depth: int, nodes: int, least: float = 0.0) -> ListDraft:
    return MergedTree(drafts, depth, least=least, lead=True).select(nodes)


def chain(*tokens: int) -> RowDraft:
    return RowDraft(list(tokens), list(range(-1, len(tokens) - 1)))


def taught(draft: RowDraft, text: list[int], times: int = 40) -> AcceptanceStats:
    stats = AcceptanceStats()
    for _ in range(times):
        draft.follow(text, 0, [stats])
    return stats


def test_equal_nodes_are_one_and_everyone_knows_where_its_nodes_went() -> None:
    a, b = chain(1, 2, 3), chain(1, 2, 4)
    tokens, parents = merge([(a, AcceptanceStats()), (b, AcceptanceStats())], depth=9, nodes=9)
    assert (tokens, parents) == ([1, 2, 3, 4], [-1, 0, 1, 1])
    assert (a.merged, b.merged) == ([0, 1, 2], [0, 1, 3])


def test_the_member_that_was_right_gets_the_nodes() -> None:
    """The other way round the budget would go to noise."""
    right, wrong = taught(chain(1, 2, 3), [1, 2, 3]), taught(chain(7, 8, 9), [1, 2, 3])
    lead, good, bad = chain(5), chain(1, 2, 3), chain(7, 8, 9)
    tokens, _ = merge([(lead, AcceptanceStats()), (bad, wrong), (good, right)], depth=9, nodes=4)
    assert tokens == [5, 1, 2, 3]
    assert bad.merged == [-1, -1, -1]


def test_two_who_agree_are_believed_more_than_one() -> None:
    both = [
        (chain(5), AcceptanceStats()),
        (chain(1), AcceptanceStats()),
        (chain(2), AcceptanceStats()),
        (chain(2), AcceptanceStats()),
    ]
    assert merge(both, depth=1, nodes=2)[0] == [5, 2]


def test_the_leading_chain_of_the_first_is_never_lost() -> None:
    hopeless = taught(chain(1, 2, 3), [9])
    tokens, parents = merge(
        [(chain(1, 2, 3), hopeless), (chain(4, 5, 6), AcceptanceStats())], depth=9, nodes=3, least=0.1
    )
    assert (tokens, parents) == ([1, 2, 3], [-1, 0, 1])


def test_the_hopeless_are_left_out_even_if_there_is_room() -> None:
    hopeless = taught(chain(4, 5), [9], 400)
    tokens, _ = merge([(chain(1, 2), AcceptanceStats()), (chain(4, 5), hopeless)], depth=9, nodes=64, least=0.2)
    assert tokens == [1, 2]


def test_trees_stay_trees_whatever_is_left_out() -> None:
    dice = random.Random(1)
    for _ in range(300):
        drafts = []
        for _ in range(dice.randint(1, 4)):
            count = dice.randint(0, 12)
            parents = [dice.randint(-1, node - 1) for node in range(count)]
            draft = RowDraft([dice.randrange(4) for _ in range(count)], parents)
            drafts.append((draft, taught(draft, [dice.randrange(4) for _ in range(5)], dice.randint(0, 9))))
        depth, nodes = dice.randint(0, 4), dice.randint(1, 10)
        tokens, parents = merge(drafts, depth, nodes, dice.choice([0.0, 0.05, 0.3]))
        assert len(tokens) <= nodes
        assert len(set(zip(parents, tokens, strict=True))) == len(tokens)
        depths: list[int] = []
        for node, parent in enumerate(parents):
            assert parent < node
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        assert max(depths, default=0) <= depth
        for draft, _ in drafts:
            for node, merged in enumerate(draft.merged):
                if merged >= 0:
                    assert tokens[merged] == draft.tokens[node]
                    above = draft.parents[node]
                    assert parents[merged] == (draft.merged[above] if above >= 0 else -1)


def test_what_came_true_counts_by_rank_and_by_the_run_before() -> None:
    tree = RowDraft([1, 2, 3, 4], [-1, -1, 1, 1])
    stats = AcceptanceStats()
    before = list(stats.rates)
    assert tree.follow([2, 4, 9], 3, [stats]) == [1, 3]
    changed = [i for i, (old, new) in enumerate(zip(before, stats.rates, strict=True)) if old != new]
    # the first two after a run of three; then a second child was right, which no first one had led to
    wanted = [entry_of(0, 3), entry_of(1, 3), entry_of(0, 0), entry_of(1, 0)]
    assert changed == sorted(wanted)
    assert stats.rates[wanted[0]] < before[wanted[0]]
    assert stats.rates[wanted[1]] > before[wanted[1]]


def test_a_run_goes_on_while_the_first_children_are_right() -> None:
    draft = RowDraft([1, 2, 3, 4], [-1, 0, 1, 1])
    assert draft.run_after(draft.follow([1, 2, 3], 2), [1, 2, 3], 2) == 5
    assert draft.run_after(draft.follow([1, 2, 4], 2), [1, 2, 4], 2) == 0  # the second child
    assert draft.run_after(draft.follow([1, 9], 2), [1, 9], 2) == 0
    assert draft.run_after(draft.follow([1, 2, 3, 7], 2), [1, 2, 3, 7], 2) == 5  # it drafted nothing for the last


def test_who_was_right_in_a_row_is_expected_to_go_on() -> None:
    fresh, sure = AcceptanceStats(), AcceptanceStats()
    sure.run = 12
    assert sure.expected(4)[-1] > 3 * fresh.expected(4)[-1]


def test_rivals_are_not_all_believed() -> None:
    """Else a disagreement of three drafters would promise more than one token."""
    drafts = [(chain(token), AcceptanceStats()) for token in (1, 2, 3)]
    assert sum(MergedTree(drafts, 1).chances) < 0.6
    assert MergedTree(drafts[:1], 1).chances[0] > MergedTree(drafts, 1).chances[0]


def test_the_past_fades() -> None:
    mean = Mean()
    for value in [1.0] * 100 + [0.0] * 100:
        mean.add(value)
    assert mean.value < 0.15


def test_a_row_begins_with_what_all_rows_have_shown() -> None:
    everyone = taught(chain(1, 2), [1, 2])
    everyone.gain.add(3.0)
    row = AcceptanceStats(everyone)
    assert row.rates == everyone.rates
    chain(1).follow([9], 0, [row])
    assert row.rates != everyone.rates
    assert row.gain.value == 3.0
