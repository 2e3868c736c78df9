"""Early exit as a drafter: where it leaves, what its heads say, and that it also works where no reader is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conformance.models import CASES, build, target
from tests.models.test_early_exit import counted

from paceline import InputError, LanguageModel, SpeculativeDecoder, UnsupportedError
from paceline.drafters.models.early_exit import EarlyExit, ExitHead
from paceline.models.readers.drafting_ahead import SplitReader

PROMPTS = [[1, 7, 9, 4, 7, 9, 4], [3, 3, 8], [6]]
SETTINGS: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}


def written(lm: LanguageModel, draft: Any, options: dict[str, Any] | None = None, **more: Any) -> list[Any]:
    outs: list[Any] = SpeculativeDecoder(lm, draft, options=options or {}, gamma=4, **more).generate(
        PROMPTS, **SETTINGS
    )
    return outs


def deep(layers: int = 6) -> LanguageModel:
    """A model whose upper layers hardly matter, so that leaving early is a good guess."""
    model = build(CASES["llama"], num_hidden_layers=layers)
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                weight *= 0.02
    return LanguageModel(model)


@pytest.mark.parametrize("options", [{}, {"tree": "best-first"}, {"tree": "optimal"}])
def test_a_good_exit_is_believed(options: dict[str, Any]) -> None:
    """Lower layers that know the answer must be accepted: garbage from a mixed-up cache would not be."""
    lm = deep()
    outs = written(lm, "early-exit", {"layers": 2, **options})
    assert [out.tokens for out in outs] == [out.tokens for out in written(lm, None)]
    accepted, rounds = sum(out.stats.accepted for out in outs), sum(out.stats.rounds for out in outs)
    assert accepted > 2 * rounds


def test_a_generation_costs_what_it_should() -> None:
    """Every layer reads the prompt once and every drafted token once."""
    lm = deep()
    decoder = SpeculativeDecoder(lm, "early-exit", options={"layers": 2}, gamma=3)
    with counted(lm) as calls:
        out = decoder.generate(PROMPTS[0], **SETTINGS)
    tokens = len(PROMPTS[0]) - 1 + out.stats.rounds + out.stats.drafted
    assert calls == dict.fromkeys(range(6), tokens)


def test_a_tree_that_is_pruned_is_read_right() -> None:
    """More is expanded than the node budget holds: rows then differ in how many nodes are unread."""
    lm = deep()
    grown = {"layers": 2, "tree": "best-first", "branch": 3, "width": 3}
    outs = written(lm, "early-exit", grown, nodes=5)
    assert [out.tokens for out in outs] == [out.tokens for out in written(lm, None)]
    assert sum(out.stats.accepted for out in outs) > sum(out.stats.rounds for out in outs)


class Alone(EarlyExit):
    """As inside a portfolio that does not take the reader."""

    def reader(self, target: LanguageModel) -> None:
        return None


@pytest.mark.parametrize("options", [{"layers": 2}, {"skip": (2, 3, 5)}, {"layers": 2, "tree": "levels"}])
def test_without_a_shared_reader_it_drafts_the_same(options: dict[str, Any]) -> None:
    """The same layers with a cache of their own say the same, so as much is accepted."""
    lm = deep()
    alone = written(lm, Alone(EarlyExit.Options(**options)))
    shared = written(lm, "early-exit", options)
    assert [out.tokens for out in alone] == [out.tokens for out in shared]
    assert [out.stats.accepted for out in alone] == [out.stats.accepted for out in shared]
    assert sum(out.stats.accepted for out in alone) > 2 * sum(out.stats.rounds for out in alone)


def test_inside_staged_the_reader_is_shared_too() -> None:
    """Texts are cut back and go on elsewhere: the lower part must know what of them it holds."""
    lm = deep()
    inner = {"name": "early-exit", "layers": 2}
    outs = written(lm, "staged", {"model": lm, "inner": inner, "inner_gamma": 3})
    assert [out.tokens for out in outs] == [out.tokens for out in written(lm, None)]
    assert all(out.stats.acceptance_rate == 1.0 for out in outs)


@pytest.mark.parametrize("name", CASES)
def test_skipped_layers_on_every_architecture(name: str) -> None:
    lm = target(name)
    outs = written(lm, "early-exit", {"skip": (1,)})
    assert [out.tokens for out in outs] == [out.tokens for out in written(lm, None)]
    assert sum(out.stats.drafted for out in outs) > 0


def test_a_third_of_the_layers_by_default() -> None:
    decoder = SpeculativeDecoder(deep(), "early-exit")
    assert "early-exit after 2 layers" in decoder.describe()


# ---- trained heads


def test_a_head_is_saved_and_loaded(tmp_path: Path) -> None:
    lm = deep()
    head = ExitHead.fresh(lm, 2, block=12, own_output=True)
    head.save(tmp_path)
    again = ExitHead.load(tmp_path)
    assert again.config == head.config
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True))
    outs = written(lm, "early-exit", {"head": str(tmp_path)})
    assert [out.tokens for out in outs] == [out.tokens for out in written(lm, None)]


def test_a_head_is_what_speaks() -> None:
    """With the target's own norm copied into it, a head says what the exit without one says; fitted, it says more."""
    lm = deep()
    head = ExitHead.fresh(lm, 2, block=8)
    with torch.no_grad():
        head.norm.weight.copy_(lm.model.model.norm.weight)
    plain, headed = written(lm, "early-exit", {"layers": 2}), written(lm, "early-exit", {"head": head})
    assert [out.stats.accepted for out in headed] == [out.stats.accepted for out in plain]
    assert next(head.parameters()).dtype == torch.float32  # the caller's head is left alone
    with torch.no_grad():
        head.norm.weight.neg_()
    assert sum(out.stats.accepted for out in written(lm, "early-exit", {"head": head})) == 0


def test_a_quickly_fitted_head_is_better_than_none() -> None:
    """Gradients reach the head, and what it learned is what it drafts with."""
    lm = LanguageModel(build(CASES["llama"], num_hidden_layers=4))
    outs = written(lm, None)
    texts = [out.prompt_tokens + out.tokens for out in outs]
    width = min(map(len, texts))
    ids = torch.tensor([text[-width:] for text in texts])
    reader = SplitReader(lm, 1)
    with torch.no_grad():
        reader._split.lower(input_ids=ids, use_cache=False)
        hidden = reader._split.handover.take()[:, :-1].clone()
    head = ExitHead.fresh(lm, 1, block=64, own_output=True).double()
    steps = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(150):
        logits = head(hidden, lm.model.get_output_embeddings())
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        steps.zero_grad()
        loss.backward()
        steps.step()
    fitted, untrained = written(lm, "early-exit", {"head": head}), written(lm, "early-exit", {"layers": 1})
    assert [out.tokens for out in fitted] == [out.tokens for out in outs]
    assert sum(out.stats.accepted for out in fitted) > 1.5 * sum(out.stats.accepted for out in untrained)


def test_a_head_of_another_target_is_refused() -> None:
    head = ExitHead.fresh(deep(4), 2)
    with pytest.raises(UnsupportedError, match=r"4 layers, but .* has 6 layers"):
        SpeculativeDecoder(deep(), "early-exit", options={"head": head})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"layers": 6}, "cannot be left after 6; use 1 to 5"),
        ({"layers": -1}, "layers must be at least 1"),
        ({"skip": (6,)}, "some of the layers 0 to 5"),
        ({"skip": (0, 1, 2, 3, 4, 5)}, "some of the layers 0 to 5"),
        ({"skip": (1,), "layers": 2}, "leave one out"),
    ],
)
def test_impossible_exits_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        SpeculativeDecoder(deep(), "early-exit", options=options)
