"""Drafters with trained heads: medusa, eagle, prophet. The heads are fitted in seconds (fitting.py)."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.selection import covering

from paceline import Generation, InputError, LanguageModel, LoadError, SpeculativeDecoder, UnsupportedError
from paceline.drafters.heads.base import HeadDrafter
from paceline.drafters.heads.eagle import EagleConfig, EagleHead
from paceline.drafters.heads.head_files import load_head, save_head
from paceline.drafters.heads.medusa import MedusaHead
from paceline.drafters.heads.prophet import ProphetHead
from paceline.kernels.cpu import machine
from paceline.models.cpu.cpu_linear import CpuLinear

from ..conformance.chi_square import ALPHA, first_tokens, p_value
from ..toys import gpt2, llama
from . import fitting

TEXTS = 2000  # of a chi-square test
HEADS: dict[str, Any] = {"medusa": MedusaHead, "eagle": EagleHead, "prophet": ProphetHead}
FITTED: dict[str, Callable[[], Any]] = {name: cache(getattr(fitting, name)) for name in HEADS}


def written(name: str, head: Any, gamma: int = fitting.AHEAD, rows: int = 16, **options: Any) -> list[Generation]:
    """The prompts the heads were fitted to, decoded with a head."""
    decoder = SpeculativeDecoder(fitting.target(), name, gamma=gamma, rows=rows, options={"head": head, **options})
    outs: list[Generation] = decoder.generate(fitting.PROMPTS, max_new_tokens=fitting.NEW, ignore_eos=True)
    return outs


def tau(outs: list[Generation]) -> float:
    return sum(out.stats.emitted for out in outs) / sum(out.stats.rounds for out in outs)


def acceptance(outs: list[Generation]) -> float:
    return sum(out.stats.accepted for out in outs) / sum(out.stats.drafted for out in outs)


@pytest.mark.parametrize("name", HEADS)
def test_a_fitted_head_is_believed(name: str) -> None:
    """A head that looks one place too early or late, or at the memory of another row, is right by accident only."""
    fitted, random = written(name, FITTED[name]()), written(name, HEADS[name].random(fitting.target()))
    assert [out.tokens for out in fitted] == [out.tokens for out in random]
    assert acceptance(fitted) > 0.85
    assert tau(fitted) > 4.0
    assert tau(random) < 1.5


@pytest.mark.parametrize("tree", ["levels", "best-first", "static", "optimal"])
@pytest.mark.parametrize("name", HEADS)
def test_a_fitted_head_is_believed_in_every_tree(name: str, tree: str) -> None:
    """A branch that takes over its sibling's memory or features goes astray after the first step."""
    assert tau(written(name, FITTED[name](), tree=tree, shape="2x2x1x1")) > 4.0


@pytest.mark.parametrize("name", HEADS)
def test_rows_that_come_and_go_are_believed(name: str) -> None:
    """Latecomers, ragged ends and rows that change places: what is remembered must move with them."""
    assert tau(written(name, FITTED[name](), rows=2)) > 4.0
    decoder = SpeculativeDecoder(fitting.target(), name, gamma=3, rows=3, options={"head": FITTED[name]()})
    lengths = [9, 30, 17, 24, 30, 5]
    outs = decoder.generate(fitting.PROMPTS, max_new_tokens=lengths, ignore_eos=True)
    assert acceptance(outs) > 0.85


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_the_same_after_a_file(name: str, tmp_path: Path) -> None:
    FITTED[name]().save(tmp_path / "head")
    assert {file.name for file in (tmp_path / "head").iterdir()} == {"config.json", "model.safetensors"}
    again = HEADS[name].load(tmp_path / "head")
    assert again.config == FITTED[name]().config
    kept, loaded = written(name, FITTED[name](), tree="best-first"), written(name, tmp_path / "head", tree="best-first")
    assert [out.trace.rounds for out in kept] == [out.trace.rounds for out in loaded]


@pytest.mark.parametrize("name", HEADS)
def test_weights_stay_trainable_after_drafting(name: str) -> None:
    """They are moved to the target's dtype while a batch opens, where nothing is recorded for gradients."""
    head = HEADS[name].random(fitting.target()).float()
    written(name, head)
    assert all(weight.dtype == torch.float64 and not weight.is_inference() for weight in head.parameters())
    sum(weight.square().sum() for weight in head.parameters()).backward()


# ---- float32 on a CPU: in int8, by kernels


@cache
def narrow() -> LanguageModel:
    return LanguageModel(llama(0).float())


@pytest.mark.skipif(machine.missing() is not None, reason="no kernels here")
@pytest.mark.parametrize(("name", "tree"), covering(HEADS, ["chain", "levels", "best-first", "static"]))
def test_heads_in_int8_are_believed(name: str, tree: str) -> None:
    """The text is plain decoding's, greedy and sampled, and what was learnt is still there after rounding."""
    head = copy.deepcopy(FITTED[name]())
    options = {"head": head, "tree": tree, "shape": "2x2x1x1"}
    for rows in (16, 2):
        plain = SpeculativeDecoder(narrow(), draft=None, rows=rows)
        decoder = SpeculativeDecoder(narrow(), name, gamma=fitting.AHEAD, rows=rows, rule="match", options=options)
        for settings in ({}, {"temperature": 0.9, "seed": 3}):
            settings |= {"max_new_tokens": fitting.NEW, "ignore_eos": True}
            outs = decoder.generate(fitting.PROMPTS, **settings)
            assert [out.tokens for out in outs] == [out.tokens for out in plain.generate(fitting.PROMPTS, **settings)]
            assert tau(outs) > 3.5 or "seed" in settings
    used = decoder.drafter
    assert isinstance(used, HeadDrafter)
    assert used.head is head
    assert any(isinstance(module, CpuLinear) for module in used.light.modules())
    assert not any(isinstance(module, CpuLinear) for module in head.modules())


@pytest.mark.skipif(machine.missing() is not None, reason="no kernels here")
def test_heads_are_rounded_once_for_all_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(CpuLinear, "of", lambda *maps, of=CpuLinear.of: made.append(maps) or of(*maps))
    decoder = SpeculativeDecoder(narrow(), "eagle", options={"head": EagleHead.random(narrow())})
    for _ in range(3):
        decoder.generate(fitting.PROMPTS[0], max_new_tokens=8)
    assert len(made) == 6  # what fuses, what says, and of the layer qkv, o, gate and up, down


@pytest.mark.parametrize("name", HEADS)
def test_other_heads_stay_as_they_are(name: str) -> None:
    decoder = SpeculativeDecoder(fitting.target(), name, options={"head": HEADS[name].random(fitting.target())})
    decoder.generate(fitting.PROMPTS[0], max_new_tokens=4)
    used = decoder.drafter
    assert isinstance(used, HeadDrafter)
    assert used.light is used.head


# ---- refusals


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(
    ("other", "both"),
    [
        (lambda: llama(0, vocab_size=48), ("40 tokens", "48 tokens")),
        (lambda: llama(0, hidden_size=64), ("width of 32", "width of 64")),
        (lambda: llama(0, num_hidden_layers=3), ("2 layers", "3 layers")),
        (lambda: gpt2(0), ("'llama'", "'gpt2'")),
    ],
    ids=["vocabulary", "width", "layers", "architecture"],
)
def test_a_head_for_another_target_is_refused(name: str, other: Callable[[], Any], both: tuple[str, str]) -> None:
    head = HEADS[name].random(fitting.target())
    with pytest.raises(UnsupportedError) as refused:
        SpeculativeDecoder(LanguageModel(other()), name, options={"head": head})
    assert all(value in str(refused.value) for value in both)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("given", [None, 3, "other"])
def test_no_head_no_draft(name: str, given: Any) -> None:
    other = next(HEADS[each].random(fitting.target()) for each in HEADS if each != name)
    with pytest.raises(InputError, match=f"{name} needs a trained head"):
        SpeculativeDecoder(fitting.target(), name, options={"head": other if given == "other" else given})


def test_what_is_no_head_is_not_loaded(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="No medusa head could be read"):
        MedusaHead.load(tmp_path / "nowhere")
    head = MedusaHead.random(fitting.target())
    head.save(tmp_path)
    with pytest.raises(LoadError, match="kind 'medusa', not 'eagle'"):
        EagleHead.load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in [
        ({"format": 2}, "format 2"),
        ({"target": None}, "name the target"),
        ({"heads": 3}, "does not fit its own config"),
        ({"colour": "red"}, "does not fit its own config"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(LoadError, match=message):
            MedusaHead.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(LoadError, match="is not a usable safetensors file"):
        MedusaHead.load(tmp_path)


def test_tensors_that_share_memory_are_written(tmp_path: Path) -> None:
    """safetensors refuses them; a tied weight is a part of each of its names."""
    weight = torch.arange(6.0).view(2, 3)
    save_head(tmp_path, "toy", {"target": {}, "size": 2}, {"one": weight, "two": weight.T})
    config, tensors = load_head(tmp_path, "toy")
    assert config == {"target": {}, "size": 2}
    assert torch.equal(tensors["one"], tensors["two"].T)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 30}, "multiple of twice"),
        ({"kv_heads": 3}, "evenly"),
        ({"taps": ()}, "depths from 0 to 1"),
        ({"taps": (0.5, 1.5)}, "depths from 0 to 1"),
        ({"draft_vocabulary": 41}, "from 1 to the target's 40"),
        ({"inner": 0}, "at least 1"),
    ],
)
def test_impossible_sizes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(EagleConfig(32, 4, 2, 48, hidden=32, embedding=32, vocabulary=40), **change)


# ---- what each has of its own


def test_medusa_takes_a_sparse_tree_given_by_paths() -> None:
    """Levels of different width, and no deeper than there are heads."""
    paths = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0)]
    outs = written("medusa", FITTED["medusa"](), gamma=8, tree="static", shape=paths)
    assert outs[0].trace.rounds[0].parents == (-1, -1, 0, 0, 1, 2, 5)
    assert tau(outs) > 4.0


def test_medusa_may_share_the_output_of_the_target() -> None:
    lm = fitting.target()
    head = MedusaHead.random(lm, 0, replace(MedusaHead.sizes(lm), own_output=False))
    assert set(head.state_dict()) == {"blocks", "biases"}
    hidden = torch.randn(2, 32, dtype=torch.float64)
    # new blocks add silu(0) = 0, so that every head says what the target itself says
    torch.testing.assert_close(head(hidden, lm.model.get_output_embeddings(), 9)[3], lm.model.lm_head(hidden))
    assert written("medusa", head)[0].tokens == written("medusa", FITTED["medusa"]())[0].tokens


def test_eagle_with_a_vocabulary_of_its_own() -> None:
    """It says only tokens of its map, by the target's ids."""
    head = fitting.eagle(steps=60, draft_vocabulary=25)
    outs = written("eagle", head)
    assert head.d2t is not None
    drafted = {token for out in outs for entry in out.trace.rounds for token in entry.drafted}
    assert drafted <= set(head.d2t.tolist())
    assert max(drafted) >= 25  # a number that is no id of the draft's own
    assert tau(outs) > 2.0


@pytest.mark.parametrize("few", [None, 25])
def test_eagle_may_say_tokens_by_rows_of_the_target(few: int | None, tmp_path: Path) -> None:
    """They are not stored, and taken from the target when it is met."""
    lm, head = fitting.target(), fitting.eagle(steps=60, draft_vocabulary=few, own_output=False)
    rows = lm.model.lm_head.weight if head.d2t is None else lm.model.lm_head.weight[head.d2t]
    assert torch.equal(head.output.weight, rows)  # fitting has left them alone
    head.save(tmp_path / "borrows")
    assert not any("output" in name for name in load_file(tmp_path / "borrows" / "model.safetensors"))
    back = EagleHead.load(tmp_path / "borrows")
    assert back.output is None
    before, after = written("eagle", head), written("eagle", back)
    assert [out.trace.rounds for out in after] == [out.trace.rounds for out in before]
    assert tau(after) > 2.0


def test_rows_of_another_width_cannot_be_borrowed() -> None:
    lm = fitting.target()
    head = EagleHead.random(lm, 0, replace(EagleHead.sizes(lm), width=16, heads=2, kv_heads=2, own_output=False))
    with pytest.raises(UnsupportedError, match="not a linear layer of 16 features; train one with own_output=true"):
        SpeculativeDecoder(lm, "eagle", options={"head": head}).generate([1, 2, 3], max_new_tokens=2)


def test_eagle_reads_long_prompts_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same drafts, however the prompt was cut; its memory is that of one pass over the whole text."""
    whole = written("eagle", FITTED["eagle"]())
    monkeypatch.setattr("paceline.drafters.heads.eagle._CHUNK", 2)
    monkeypatch.setattr("paceline.models.reader.CHUNK", 3)
    assert [out.trace.rounds for out in written("eagle", FITTED["eagle"]())] == [out.trace.rounds for out in whole]


# ---- with others


@pytest.mark.parametrize("tree", ["chain", "best-first"])
@pytest.mark.parametrize("name", HEADS)
def test_inside_a_portfolio(name: str, tree: str) -> None:
    """Tokens that another member drafted have states, too; a head that does not see them is lost from there on."""
    members = ((name, {"head": FITTED[name](), "tree": tree}), "prompt-lookup")
    decoder = SpeculativeDecoder(fitting.target(), "portfolio", gamma=fitting.AHEAD, options={"drafters": members})
    assert tau(decoder.generate(fitting.PROMPTS, max_new_tokens=fitting.NEW, ignore_eos=True)) > 4.0


@pytest.mark.parametrize("name", HEADS)
def test_drafting_for_a_draft_model(name: str) -> None:
    """Its texts are rewound and written again; the draft model is the target here, so nothing is rejected above."""
    inner = {"name": name, "head": FITTED[name]()}
    options = {"model": fitting.target(), "inner": inner, "inner_gamma": 2}
    decoder = SpeculativeDecoder(fitting.target(), "staged", gamma=fitting.AHEAD, options=options)
    outs = decoder.generate(fitting.PROMPTS, max_new_tokens=fitting.NEW, ignore_eos=True)
    assert acceptance(outs) == 1.0
    assert [out.tokens for out in outs] == [out.tokens for out in written(name, FITTED[name]())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule_and_tree"),
    covering(HEADS, [("ratio", "chain"), ("traversal", "best-first"), ("multi-round", "static")]),
)
def test_law_rules_keep_the_law(name: str, rule_and_tree: tuple[str, str]) -> None:
    rule, tree = rule_and_tree
    """The laws a head declares are those its tokens were drawn from: all texts of two tokens, by chi-square."""
    lm = LanguageModel(llama(1, vocab_size=5, initializer_range=0.5))
    texts = torch.tensor([[1, 2, *pair] for pair in itertools.product(range(5), repeat=2)])
    with torch.no_grad():
        logs = lm.model(input_ids=texts).logits.log_softmax(-1)
    law = sum(logs[torch.arange(25), at, texts[:, at + 1]] for at in (1, 2)).exp().view(5, 5)
    options = {"head": HEADS[name].random(lm, 3), "tree": tree}
    decoder = SpeculativeDecoder(lm, name, gamma=3, nodes=8, rule=rule, options=options, rows=TEXTS)
    assert p_value(first_tokens(decoder, [1, 2], 2, range(TEXTS), temperature=1.0), law) > ALPHA
