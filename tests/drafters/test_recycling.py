"""Token recycling: what is learned, what is followed, and that nothing unknown is ever drafted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.toys import llama, naive, scripted

from paceline import Budget, InputError, SpeculativeDecoder, TokenTree
from paceline.core.contracts import Reading
from paceline.core.verdict import Verdict
from paceline.drafters.lookup.recycling import READ, UNREAD, WRITTEN, Recycling

V = 20


def rows_of(*texts: list[int]) -> Any:
    length = torch.tensor([[len(text)] for text in texts])
    padded = [list(text) + [0] * (9 - len(text)) for text in texts]
    lengths = [len(text) for text in texts]
    return SimpleNamespace(
        text=torch.tensor(padded),
        length=length,
        lengths=lengths,
        settled=lengths,
        histories=list(texts),
        owners=[""] * len(texts),
        count=len(texts),
    )


def opened(rows: Any, **options: Any) -> Recycling:
    drafter = Recycling(Recycling.Options(**options))
    drafter.open(SimpleNamespace(vocabulary=V), rows)
    drafter.admit(rows, 0)
    return drafter


def logits(*favourites: list[int]) -> torch.Tensor:
    """[1,Q,V]: the favourites of each place, the first the likeliest."""
    table = torch.zeros(1, len(favourites), V)
    for place, tokens in enumerate(favourites):
        for rank, token in enumerate(tokens):
            table[0, place, token] = 9.0 - rank
    return table


def paths(tree: TokenTree, row: int = 0) -> set[tuple[int, ...]]:
    """Every path of a row as tokens."""
    used = tree.nodes if tree.count is None else int(tree.count[row])
    tokens = tree.tokens[row].tolist()
    parents = list(range(-1, tree.nodes - 1)) if tree.parents is None else tree.parents[row].tolist()
    found: list[tuple[int, ...]] = []
    for node in range(used):
        found.append((*(found[parents[node]] if parents[node] >= 0 else ()), tokens[node]))
    return set(found)


def budget(rows: Any, depth: int = 3, nodes: int = 64, limits: tuple[int, ...] | None = None) -> Budget:
    return Budget(depth, nodes, limits or (99,) * rows.count)


def test_it_follows_what_the_target_said_and_stops_where_nothing_is_known() -> None:
    """A row that was never filled would draft token 0, or garbage."""
    rows = rows_of([7])
    drafter = opened(rows, k=2, shape="2x2x1", prompt=False)
    assert drafter.propose(rows, budget(rows)).nodes == 0
    drafter.observe_forward(torch.tensor([[7, 3]]), logits([3, 4], [5, 6]), torch.tensor([[WRITTEN, READ]]))
    tree = drafter.propose(rows, budget(rows))
    tree.validate(V, 64, 3, 1)
    assert paths(tree) == {(3,), (4,), (3, 5), (3, 6)}
    assert tree.nodes == 2 + 4 + 4  # the rest is padding, of one shape every round


def test_rejected_nodes_teach_and_written_ones_win() -> None:
    """Of several places with one token, the order of writing must not decide."""
    rows = rows_of([7])
    drafter = opened(rows, k=1, shape="1", prompt=False)
    for standing, wanted in (
        ([READ, WRITTEN, READ], 2),
        ([READ, READ, READ], 1),
        ([UNREAD, READ, READ], 2),
        ([UNREAD, UNREAD, UNREAD], 2),
    ):
        drafter.observe_forward(torch.tensor([[7, 7, 7]]), logits([1], [2], [3]), torch.tensor([standing]))
        assert paths(drafter.propose(rows, budget(rows))) == {(wanted,)}
    nothing = torch.full((1, 1, V), float("nan"))  # a place that was not read
    drafter.observe_forward(torch.tensor([[7]]), nothing, torch.tensor([[WRITTEN]]))
    assert paths(drafter.propose(rows, budget(rows))) == {(2,)}


def test_keep_learns_every_node_of_its_own_draft() -> None:
    rows = rows_of([7])
    drafter = opened(rows, k=2, shape="2x1", prompt=False)
    drafter.observe_forward(torch.tensor([[7, 3, 4]]), logits([3, 4], [8, 9], [8, 9]), torch.full((1, 3), READ))
    tree = drafter.propose(rows, budget(rows))
    assert paths(tree) == {(3,), (4,), (3, 8), (4, 8)}
    verdict = Verdict(torch.tensor([[4, 1, -1]]), torch.tensor([[1]]), torch.tensor([[1, 0]]))
    read = logits([4, 3], [10, 11], [12, 13], [14, 15], [16, 17])
    drafter.keep(rows, verdict, Reading(read))
    table = drafter._memory.successors
    assert table[7].tolist() == [4, 3]
    assert table[3].tolist() == [10, 11]
    assert table[4].tolist() == [12, 13]
    assert table[8].tolist() == [14, 15]  # both nodes are drafts: the first counts


def test_rows_keep_to_their_own_limits_and_to_the_nodes() -> None:
    rows = rows_of([7], [7], [7])
    drafter = opened(rows, prompt=False)
    drafter.observe_forward(
        torch.arange(V).view(1, -1), logits(*[[1, 2, 3, 4, 5, 6, 7, 8]] * V), torch.full((1, V), READ)
    )
    for nodes in (1, 2, 5, 40):
        tree = drafter.propose(rows, budget(rows, 3, nodes, (1, 0, 9)))
        tree.validate(V, nodes, 3, 3)
        assert tree.count is not None
        assert max(map(len, paths(tree, 0))) == 1
        assert not paths(tree, 1)
        assert tree.count[2] == nodes


def test_the_prompt_is_known_as_pairs_until_the_target_speaks() -> None:
    rows = rows_of([7, 3, 7, 4, 7])
    drafter = opened(rows, k=3, shape="2x1")
    assert paths(drafter.propose(rows, budget(rows))) == {(4,), (3,), (4, 7), (3, 7)}
    drafter.observe_forward(torch.tensor([[7]]), logits([9]), torch.tensor([[WRITTEN]]))
    drafter.admit(rows, 0)  # a later prompt does not overrule the target
    assert (9,) in paths(drafter.propose(rows, budget(rows)))


def test_memory_is_kept_on_request_only_by_namespace_and_frozen(tmp_path: Path) -> None:
    rows, target = rows_of([7]), SimpleNamespace(vocabulary=V)
    seen = (torch.tensor([[7]]), logits([3]), torch.tensor([[WRITTEN]]))
    drafter = opened(rows)
    drafter.observe_forward(*seen)
    drafter.open(target, rows)
    assert drafter.propose(rows, budget(rows)).nodes == 0
    drafter = opened(rows, persistent=True, prompt=False)
    drafter.observe_forward(*seen)
    drafter.save(tmp_path / "memory.safetensors")
    drafter.namespace = "another"
    drafter.open(target, rows)
    assert drafter.propose(rows, budget(rows)).nodes == 0
    drafter.namespace = ""
    drafter.open(target, rows)
    assert (3,) in paths(drafter.propose(rows, budget(rows)))
    drafter.reset()
    drafter.open(target, rows)
    assert drafter.propose(rows, budget(rows)).nodes == 0

    frozen = Recycling(Recycling.Options(frozen=True))
    frozen.load(tmp_path / "memory.safetensors")
    frozen.open(target, rows)
    frozen.observe_forward(seen[0], logits([5]), seen[2])
    assert (3,) in paths(frozen.propose(rows, budget(rows)))
    with pytest.raises(InputError, match="has 8 candidates"):
        Recycling(Recycling.Options(frozen=True, k=4)).load(tmp_path / "memory.safetensors")
    with pytest.raises(InputError, match="persistent=True"):
        Recycling().load(tmp_path / "memory.safetensors")
    with pytest.raises(InputError, match="the target has 9"):
        frozen.open(SimpleNamespace(vocabulary=9), rows)


def test_what_was_said_once_is_accepted_the_next_time() -> None:
    """A model whose next token depends on the last alone is known after one reading: the second text is all drafted."""
    model = scripted([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    decoder = SpeculativeDecoder(model, "recycling", gamma=4, options={"persistent": True})
    first, second = (decoder.generate([1], max_new_tokens=9) for _ in range(2))
    assert first.tokens == second.tokens == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert (first.stats.accepted, second.stats.rounds) == (0, 2)


@pytest.mark.parametrize("options", [{}, {"shape": "1x1x1"}, {"k": 60}], ids=str)
def test_the_text_is_the_targets(options: dict[str, Any]) -> None:
    model = llama()
    prompts = [[7], [1, 7, 9, 4, 7, 9, 4, 7], [3, 3]]
    outs = SpeculativeDecoder(model, "recycling", gamma=4, options=options).generate(prompts, max_new_tokens=25)
    assert [out.tokens for out in outs] == [naive(model, prompt, 25) for prompt in prompts]
    assert sum(out.stats.accepted for out in outs) > 0


@pytest.mark.parametrize("options", [{"k": 0}, {"nodes": 0}, {"shape": "2x0"}], ids=str)
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Recycling.Options(**options)
