"""Merging proposals by what they have been worth: who is right gets the nodes, equal nodes are one, ancestors stay."""

from __future__ import annotations

import random

from paceline.drafters.adaptive.stats import Draft, Ledger, Mean, entry_of, merge, pool


def chain(*tokens: int) -> Draft:
    return Draft(list(tokens), list(range(-1, len(tokens) - 1)))


def taught(draft: Draft, text: list[int], times: int = 40) -> Ledger:
    ledger = Ledger()
    for _ in range(times):
        draft.follow(text, 0, [ledger])
    return ledger


def test_equal_nodes_are_one_and_everyone_knows_where_its_nodes_went() -> None:
    a, b = chain(1, 2, 3), chain(1, 2, 4)
    tokens, parents = merge([(a, Ledger()), (b, Ledger())], depth=9, nodes=9)
    assert (tokens, parents) == ([1, 2, 3, 4], [-1, 0, 1, 1])
    assert (a.where, b.where) == ([0, 1, 2], [0, 1, 3])


def test_whoever_was_right_gets_the_nodes() -> None:
    """The other way round the budget would go to noise."""
    right, wrong = taught(chain(1, 2, 3), [1, 2, 3]), taught(chain(7, 8, 9), [1, 2, 3])
    lead, good, bad = chain(5), chain(1, 2, 3), chain(7, 8, 9)
    tokens, _ = merge([(lead, Ledger()), (bad, wrong), (good, right)], depth=9, nodes=4)
    assert tokens == [5, 1, 2, 3]
    assert bad.where == [-1, -1, -1]


def test_two_who_agree_are_believed_more_than_one() -> None:
    both = [(chain(5), Ledger()), (chain(1), Ledger()), (chain(2), Ledger()), (chain(2), Ledger())]
    assert merge(both, depth=1, nodes=2)[0] == [5, 2]


def test_the_leading_chain_of_the_first_is_never_lost() -> None:
    hopeless = taught(chain(1, 2, 3), [9])
    tokens, parents = merge([(chain(1, 2, 3), hopeless), (chain(4, 5, 6), Ledger())], depth=9, nodes=3, least=0.1)
    assert (tokens, parents) == ([1, 2, 3], [-1, 0, 1])


def test_the_hopeless_are_left_out_even_if_there_is_room() -> None:
    hopeless = taught(chain(4, 5), [9], 400)
    tokens, _ = merge([(chain(1, 2), Ledger()), (chain(4, 5), hopeless)], depth=9, nodes=64, least=0.2)
    assert tokens == [1, 2]


def test_trees_stay_trees_whatever_is_left_out() -> None:
    dice = random.Random(1)
    for _ in range(300):
        drafts = []
        for _ in range(dice.randint(1, 4)):
            count = dice.randint(0, 12)
            parents = [dice.randint(-1, node - 1) for node in range(count)]
            draft = Draft([dice.randrange(4) for _ in range(count)], parents)
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
            for node, where in enumerate(draft.where):
                if where >= 0:
                    assert tokens[where] == draft.tokens[node]
                    above = draft.parents[node]
                    assert parents[where] == (draft.where[above] if above >= 0 else -1)


def test_what_came_true_counts_by_rank_and_by_the_run_before() -> None:
    tree = Draft([1, 2, 3, 4], [-1, -1, 1, 1])
    ledger = Ledger()
    before = list(ledger.chance)
    assert tree.follow([2, 4, 9], 3, [ledger]) == [1, 3]
    storage_version = [i for i, (old, new) in enumerate(zip(before, ledger.chance, strict=True)) if old != new]
    # the first two after a run of three; then a second child was right, which no first one had led to
    wanted = [entry_of(0, 3), entry_of(1, 3), entry_of(0, 0), entry_of(1, 0)]
    assert storage_version == sorted(wanted)
    assert ledger.chance[wanted[0]] < before[wanted[0]]
    assert ledger.chance[wanted[1]] > before[wanted[1]]


def test_a_run_goes_on_while_the_first_children_are_right() -> None:
    draft = Draft([1, 2, 3, 4], [-1, 0, 1, 1])
    assert draft.run_after(draft.follow([1, 2, 3], 2), [1, 2, 3], 2) == 5
    assert draft.run_after(draft.follow([1, 2, 4], 2), [1, 2, 4], 2) == 0  # the second child
    assert draft.run_after(draft.follow([1, 9], 2), [1, 9], 2) == 0
    assert draft.run_after(draft.follow([1, 2, 3, 7], 2), [1, 2, 3, 7], 2) == 5  # it said nothing about the last


def test_who_was_right_in_a_row_is_expected_to_go_on() -> None:
    fresh, sure = Ledger(), Ledger()
    sure.run = 12
    assert sure.expected(4)[-1] > 3 * fresh.expected(4)[-1]


def test_rivals_are_not_all_believed() -> None:
    """Else a disagreement of three drafters would promise more than one token."""
    drafts = [(chain(token), Ledger()) for token in (1, 2, 3)]
    assert sum(pool(drafts, 1).chances) < 0.6
    assert pool(drafts[:1], 1).chances[0] > pool(drafts, 1).chances[0]


def test_the_past_fades() -> None:
    mean = Mean()
    for value in [1.0] * 100 + [0.0] * 100:
        mean.see(value)
    assert mean.value < 0.15


def test_a_row_begins_with_what_all_rows_have_shown() -> None:
    everyone = taught(chain(1, 2), [1, 2])
    everyone.gain.see(3.0)
    row = Ledger(everyone)
    assert row.chance == everyone.chance
    chain(1).follow([9], 0, [row])
    assert row.chance != everyone.chance
    assert row.gain.value == 3.0
