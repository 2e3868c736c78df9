"""A model that is read in two parts has the same logits, and no layer reads a token twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.conformance.models import CASES, VOCABULARY, build, target
from tests.conformance.test_cache import Journey
from tests.conformance.trees import random_parents
from torch import Tensor

from paceline import InputError, LanguageModel, UnsupportedError
from paceline.core.tree import TokenTree
from paceline.models.module_views import layers_of, shell, without_layers
from paceline.models.readers import drafting_ahead as early_exit
from paceline.models.readers.drafting_ahead import SplitReader, check_split


class SplitJourney(Journey):
    """Rounds as early exit makes them: the lower part reads some of the draft in its own order, then all is read."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(name, seed)
        self.parted = self.reader = SplitReader(self.lm, 1)

    def round(self) -> None:
        kind = self.dice.choice(["plain", "chain", "tree", "pruned tree", "another tree"])
        nodes = 0 if kind == "plain" else self.dice.randint(1, 7)
        branches = "tree" in kind
        drafted = torch.tensor([self.tokens(nodes) for _ in range(self.rows.count)], dtype=torch.int64)
        parents = [random_parents(nodes, self.dice) if branches else list(range(-1, nodes - 1))] * self.rows.count
        above = torch.tensor(parents, dtype=torch.int64).view(-1, nodes) if branches else None
        tree = TokenTree(drafted, above)
        self.parted.lower(self.rows, None, None)
        if kind != "plain":
            slots = self._read_some(tree, parents[0], extra=kind == "pruned tree")
            self.parted.hand_over(tree, slots, pruned=kind == "pruned tree")
        tokens = drafted.clone() if kind == "another tree" else drafted
        logits = self.reader.extend(self.rows, self.width, tokens if nodes else None, above).logits
        self.width = 1
        self._compare(logits, drafted.tolist(), parents, kind)
        self._keep(drafted.tolist(), parents, branches)

    def _read_some(self, tree: TokenTree, parents: list[int], extra: bool) -> Tensor | None:
        """Some nodes one by one, in any order that has parents first and leaves the unread without children."""
        inside = [node for node in range(tree.nodes) if node in parents]
        if tree.parents is None:
            for node in inside:
                self.parted.lower(self.rows, tree.tokens[:, node : node + 1], None)
            return None
        numbers = [-1] * tree.nodes
        if extra:  # a node that will not be in the tree
            self.parted.lower(self.rows, tree.tokens[:, :1], torch.full((self.rows.count, 1), -1))
        fed = int(extra)
        waiting = list(inside)
        while waiting:
            node = self.dice.choice([n for n in waiting if parents[n] < 0 or numbers[parents[n]] >= 0])
            waiting.remove(node)
            number = numbers[parents[node]] if parents[node] >= 0 else -1
            self.parted.lower(self.rows, tree.tokens[:, node : node + 1], torch.full((self.rows.count, 1), number))
            numbers[node], fed = fed, fed + 1
        return torch.tensor([numbers] * self.rows.count)


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_two_parts_say_what_the_model_says(name: str) -> None:
    """Chains, trees read in another order than their nodes have, trees that were pruned, drafts that were thrown away,
    rows that come and go. A wrong slot, mask or position in either part shows in the logits."""
    journey = SplitJourney(name, 0)
    journey.admit([4, 1, 9])
    for step in range(8):
        journey.round()
        if step == 3:
            journey.release()
        if step == 5:
            journey.admit([2, 6])
    journey.settle()


@torch.inference_mode()
def test_a_prompt_is_read_once_too() -> None:
    """All layers read it but for its last token, which the first round reads in two parts."""
    journey = SplitJourney("llama", 1)
    with counted(journey.lm) as calls:
        journey.admit([7, 7])
        assert (journey.width, set(calls.values())) == (1, {2 * 6})
        journey.round()
    journey.settle()


class counted:  # noqa: N801  used as a function
    """Counts the tokens that every layer of a model reads."""

    def __init__(self, lm: LanguageModel) -> None:
        self._layers = layers_of(lm)
        self.calls: Counter[int] = Counter()

    def __enter__(self) -> Counter[int]:
        def count(index: int) -> Any:
            return lambda module, args: self.calls.update({index: args[0].shape[0] * args[0].shape[1]})

        self._hooks = [layer.register_forward_pre_hook(count(i)) for i, layer in enumerate(self._layers)]
        return self.calls

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


@pytest.mark.parametrize("branching", [False, True])
@torch.inference_mode()
def test_no_layer_reads_a_token_twice(branching: bool) -> None:
    """The point of early exit: otherwise the first layers would run once to draft and once more to verify."""
    lm = LanguageModel(build(CASES["llama"], num_hidden_layers=5))
    journey = Journey("llama", 2)
    reader = SplitReader(lm, 2)
    first = journey.rows.admit([[3, 1, 4], [1, 5, 9, 2]])
    reader.begin(journey.rows, first, 16)
    drafted = torch.randint(0, VOCABULARY, (2, 4))
    parents = torch.tensor([[-1, -1, 0, 0]] * 2) if branching else None
    with counted(lm) as calls:
        reader.lower(journey.rows, None, None)
        reader.lower(journey.rows, drafted[:, :1], None if parents is None else parents[:, :1])
        assert calls == {0: 4, 1: 4}
        slots = torch.tensor([[0, -1, -1, -1]] * 2) if branching else None
        reader.hand_over(TokenTree(drafted, parents), slots, pruned=False)
        reader.extend(journey.rows, 1, drafted, parents)
    rows_times_tokens = 2 * (1 + 4)
    assert calls == dict.fromkeys(range(5), rows_times_tokens)


def test_the_model_and_its_config_stay_as_they_are() -> None:
    """Trap 17: no temporary num_hidden_layers, no exchanged layers."""
    lm = target("gemma3")
    before = (lm.model.config.to_dict(), list(lm.model.named_modules()), [id(p) for p in lm.model.parameters()])
    check_split(lm, 2)
    reader = SplitReader(lm, 2)
    without_layers(lm, (1,))
    assert reader._split.lower.config.num_hidden_layers == 2
    assert reader._split.upper.config.layer_types == lm.model.config.layer_types[2:]
    assert (lm.model.config.to_dict(), list(lm.model.named_modules()), [id(p) for p in lm.model.parameters()]) == before


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_without_layers_is_the_model_without_them(name: str) -> None:
    """With a cache, and by itself: a layer that kept its old number would write to another layer's slots."""
    lm = target(name)
    part = LanguageModel(without_layers(lm, (0,)))
    assert part.layers == lm.layers - 1
    text = torch.tensor([[1, 7, 9, 4, 7, 9]])
    alone = part.model(input_ids=text, use_cache=False).logits[0, -1]
    assert not torch.allclose(alone, lm.model(input_ids=text, use_cache=False).logits[0, -1])
    journey = Journey(name, 5)
    journey.lm, journey.reader = part, part.reader()
    journey.rows.admit(text.tolist())
    journey.width = journey.reader.begin(journey.rows, 0, 16)
    assert torch.allclose(journey.reader.extend(journey.rows, journey.width).logits[0, -1], alone, atol=1e-4)


def test_a_model_that_reads_differently_in_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An architecture that counts its layers, or carries something else from layer to layer, must not be split."""
    lm = LanguageModel(build(CASES["llama"]), name="odd")
    real = early_exit.with_layers

    def shaken(given: LanguageModel, layers: Any, kinds: Any, head: Any) -> Any:
        made = real(given, layers, kinds, head)
        if len(layers) == 1 and hasattr(layers[0], "handover") and type(layers[0]).__name__ == "_Entry":
            inner = made._modules["model"] = shell(made.model)
            inner._modules["norm"] = torch.nn.Identity()
        return made

    monkeypatch.setattr(early_exit, "with_layers", shaken)
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM \(llama\) reads a draft differently"):
        check_split(lm, 1)


def test_a_model_whose_forward_was_replaced_is_refused() -> None:
    """accelerate hangs a forward of its own on the object: a copy of the object would run the whole model."""
    model = build(CASES["llama"])
    model.model.forward = model.model.forward
    with pytest.raises(UnsupportedError, match="replaced by hand"):
        check_split(LanguageModel(model), 1)


@pytest.mark.parametrize("depth", [0, 2])
def test_an_exit_must_be_between_two_layers(depth: int) -> None:
    with pytest.raises(InputError, match=f"cannot be left after {depth}; use 1 to 1"):
        check_split(target("llama"), depth)
