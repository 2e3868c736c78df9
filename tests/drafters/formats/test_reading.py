"""Heads of others: read, wired as they were trained, or refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.drafters import fitting
from tests.drafters.formats import heads_of_others as others
from tests.drafters.formats.heads_of_others import LAYERS, LLAMA, drafts, noise, target, write
from tests.toys import llama
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from paceline import LanguageModel, LoadError, SpeculativeDecoder, UnsupportedError, load_drafter
from paceline.drafters.heads.eagle import Eagle
from paceline.drafters.heads.foreign_heads import FirstEagleHead
from paceline.models.loading import hub

SPECULATORS: dict[str, Any] = {
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 25,
    "norm_before_residual": False,
    "transformer_layer_config": LLAMA,
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/target"}},
}


def by_transformers(
    seen: Tensor, stream: Tensor, tensors: dict[str, Tensor], prefix: str, positions: dict[str, Any]
) -> Tensor:
    """A layer of Llama itself over whole texts [1,T,...], with nothing before its attention."""
    config = LlamaConfig(**{**LLAMA, "attn_implementation": "eager", **positions})
    layer = LlamaDecoderLayer(config, 0)
    for name in "qkv":
        setattr(layer.self_attn, f"{name}_proj", torch.nn.Linear(seen.shape[-1], 32 if name == "q" else 16, bias=False))
    inside = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    layer.load_state_dict(
        {"input_layernorm.weight": torch.ones(32), **{k: t for k, t in inside.items() if k != "hidden_norm.weight"}}
    )
    T = seen.shape[1]
    position = torch.arange(T).unsqueeze(0)
    turns = LlamaRotaryEmbedding(config)(stream, position)
    mask = torch.full((T, T), float("-inf")).triu(1)[None, None]
    stream = stream + layer.self_attn(seen, position_embeddings=turns, attention_mask=mask)[0]
    return stream + layer.mlp(layer.post_attention_layernorm(stream))


def normed(states: Tensor, weight: Tensor) -> Tensor:
    norm = LlamaRMSNorm(32, eps=1e-2)
    norm.load_state_dict({"weight": weight})
    return norm(states)


# ---- wiring, against transformers' own layer


SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 24}


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    "positions",
    [
        {},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        {"rope_theta": 50.0, "rope_scaling": {"rope_type": "llama3", **SCALED}, "max_position_embeddings": 192},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 50.0, **SCALED}, "max_position_embeddings": 192},
    ],
    ids=["usual", "theta", "scaled, as of old", "scaled"],
)
def test_eagle3_in_the_speculators_format(before: bool, positions: dict[str, Any], tmp_path: Path) -> None:
    tensors = others.eagle3("layers.0.")
    layer = {**LLAMA, **positions}
    write(tmp_path, {**SPECULATORS, "norm_before_residual": before, "transformer_layer_config": layer}, tensors)
    drafter = load_drafter(tmp_path, target())
    assert isinstance(drafter, Eagle)
    embedded, taps = noise(1, 7, 32, seed=8), [noise(1, 7, 32, seed=n, scale=1.0) for n in range(3)]
    with torch.no_grad():
        fused = torch.cat(taps, -1) @ tensors["fc.weight"].T
        feature = normed(fused, tensors["layers.0.hidden_norm.weight"])
        seen = torch.cat([normed(embedded, tensors["layers.0.input_layernorm.weight"]), feature], -1)
        out = by_transformers(seen, feature if before else fused, tensors, "layers.0.", positions)
        logits = normed(out, tensors["norm.weight"]) @ tensors["lm_head.weight"].T
        ours = drafter.head(embedded, taps, 1)[0]
    torch.testing.assert_close(ours[..., 3:28], logits, rtol=1e-4, atol=1e-5)
    assert ours[..., [0, 1, 2, 28, 39]].isneginf().all()  # d2t holds distances, not ids


def test_eagle1_as_published(tmp_path: Path) -> None:
    tensors = others.eagle1()
    drafter = load_drafter(write(tmp_path, LLAMA, tensors), target())
    assert isinstance(drafter, Eagle)
    assert drafter.needs_taps == (1.0,)
    embedded, last = noise(1, 7, 32, seed=8), noise(1, 7, 32, seed=9, scale=1.0)
    output = target().model.get_output_embeddings()
    with torch.no_grad():
        joined = torch.cat([embedded, last], -1) @ tensors["fc.weight"].T + tensors["fc.bias"]
        logits = output(by_transformers(joined, joined, tensors, "layers.0.", {}))
        torch.testing.assert_close(drafter.head(embedded, [last], 1, output)[0], logits, rtol=1e-4, atol=1e-5)
    # the first versions of the speculators format had other names for the same
    spoken = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    renamed = {
        new + n.removeprefix(old): t for n, t in tensors.items() for old, new in spoken.items() if n.startswith(old)
    }
    config = {"speculators_model_type": "eagle", "transformer_layer_config": LLAMA, "layernorms": False}
    assert drafts(load_drafter(write(tmp_path / "speculators", config, renamed))) == drafts(str(tmp_path))
    write(tmp_path / "speculators", {**config, "layernorms": True}, renamed)
    with pytest.raises(UnsupportedError, match="the setting 'layernorms'"):
        load_drafter(tmp_path / "speculators")


def test_a_fitted_eagle1_head_is_believed() -> None:
    """It drafts from the features it was trained on, or is right by accident only."""
    school = fitting.lesson()
    head = FirstEagleHead.random(school.target, 1)
    output = school.target.model.get_output_embeddings()

    def loss() -> Tensor:
        every = head(school.embedded[:, 1:], [school.states[-1][:, :-1]], fitting.AHEAD, output)
        return torch.stack([fitting._surprise(each[:, s:], 2 + s, school) for s, each in enumerate(every)]).sum()

    fitting._fit(head, loss, 150, 0.005)
    decoder = SpeculativeDecoder(school.target, "eagle", gamma=fitting.AHEAD, options={"head": head})
    outs = decoder.generate(fitting.PROMPTS, max_new_tokens=fitting.NEW, ignore_eos=True)
    assert sum(out.stats.accepted for out in outs) > 0.85 * sum(out.stats.drafted for out in outs)


def test_medusa_in_both_layouts(tmp_path: Path) -> None:
    tensors = others.medusa()
    served = {
        **{
            f"blocks.{k}.layers.0.{part}": tensors[f"{k}.0.linear.{part}"]
            for k in range(3)
            for part in ("weight", "bias")
        },
        **{f"lm_heads.{k}.weight": tensors[f"{k}.1.weight"] for k in range(3)},
    }
    config = {"model_type": "medusa", "hidden_size": 32, "vocab_size": 40, "num_heads": 3, "num_hidden_layers": 1}
    write(tmp_path / "served", config, served)
    about = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "some/target"}
    write(tmp_path / "published", about, tensors, "medusa_lm_head.safetensors")
    head = load_drafter(tmp_path / "published", target()).head  # type: ignore[attr-defined]
    states = noise(5, 32, seed=3, scale=1.0)
    for k in range(3):
        block = F.linear(states, tensors[f"{k}.0.linear.weight"], tensors[f"{k}.0.linear.bias"])
        expected = (states + F.silu(block)) @ tensors[f"{k}.1.weight"].T
        torch.testing.assert_close(head(states, None, 3)[k], expected, rtol=1e-4, atol=1e-5)
    assert drafts(str(tmp_path / "served")) == drafts(str(tmp_path / "published"))


def test_medusa_that_shares_the_output_of_the_target(tmp_path: Path) -> None:
    """vLLM says so by a setting; the matrix beside it is the target's."""
    tensors = {f"blocks.{k}.layers.0.weight": noise(32, 32, seed=k) for k in range(2)}
    config = {"model_type": "medusa", "vocab_size": 40, "original_lm_head": True}
    write(tmp_path, config, {**tensors, "lm_heads.0.weight": noise(40, 32)})
    assert load_drafter(tmp_path, target()).head.output is None  # type: ignore[attr-defined]


# ---- which hidden states


@pytest.mark.parametrize(
    ("config", "numbers"),
    [
        ({}, [2, LAYERS // 2, LAYERS - 3]),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}, [1, 4, 7]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, [2, 4, 5]),  # whose outputs these are
    ],
    ids=["no key", "hidden states", "layers"],
)
def test_eagle3_looks_at_the_right_hidden_states(config: dict[str, Any], numbers: list[int], tmp_path: Path) -> None:
    write(tmp_path, {**LLAMA, **config}, others.eagle3())
    lm, seen = target(), []

    class Watching(Eagle):
        def observe_prompt(self, rows: Any, taps_piece: Any) -> None:
            seen.append(taps_piece.taps)
            super().observe_prompt(rows, taps_piece)

    made = load_drafter(tmp_path, lm)
    drafts(Watching(made.options))  # type: ignore[attr-defined]
    with torch.no_grad():
        states = lm.model(input_ids=torch.tensor([[1, 7, 9, 4]]), output_hidden_states=True).hidden_states
    for tap, number in zip(seen[0], numbers, strict=True):
        torch.testing.assert_close(tap[:1, :4], states[number], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("numbers", [[2, 4, 8], [2, 2, 4]])
def test_hidden_states_that_are_not_there_are_refused(numbers: list[int], tmp_path: Path) -> None:
    write(tmp_path, {**LLAMA, "eagle_aux_hidden_state_layer_ids": numbers}, others.eagle3())
    with pytest.raises(UnsupportedError, match="must differ and lie between 0 and 7 in a target of 8 layers"):
        load_drafter(tmp_path, target())


def test_among_others_it_learns_its_taps_from_the_target(tmp_path: Path) -> None:
    write(tmp_path, LLAMA, others.eagle3())
    one, other = (
        drafts("portfolio", drafters=(drafter, "prompt-lookup"))
        for drafter in (load_drafter(tmp_path), load_drafter(tmp_path, target()))
    )
    assert one == other


# ---- embeddings


def test_an_embedding_of_its_own_is_used_unless_it_is_the_targets(tmp_path: Path) -> None:
    same = target().model.get_input_embeddings().weight.detach()
    write(tmp_path / "none", LLAMA, others.eagle3())
    write(tmp_path / "same", LLAMA, {**others.eagle3(), "embed_tokens.weight": same})
    write(tmp_path / "own", LLAMA, {**others.eagle3(), "embed_tokens.weight": same.flip(0)})
    found = {name: load_drafter(tmp_path / name, target()) for name in ("none", "same", "own")}
    assert [drafter.head.words is not None for drafter in found.values()] == [False, False, True]  # type: ignore[attr-defined]
    assert drafts(found["none"]) == drafts(found["same"]) == drafts(str(tmp_path / "same")) != drafts(found["own"])


# ---- refusals

Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]


def changed(change: Change, folder: Path) -> None:
    """A sound head with a change."""
    config, tensors = dict(LLAMA), others.eagle3()
    change(config, tensors)
    write(folder, config, tensors)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda c, t: c.update(rope_parameters={"rope_type": "yarn", "factor": 8.0}),
            "rotary positions of the kind 'yarn'",
        ),
        (lambda c, t: c.update(rope_scaling={"type": "linear"}), "rotary positions of the kind 'linear'"),
        (lambda c, t: c.update(norm_before_fc=True), "'norm_before_fc'"),
        (lambda c, t: c.update(norm_output=True), "'norm_output'"),
        (lambda c, t: c.update(hidden_act="gelu"), "'gelu'"),
        (lambda c, t: c.update(num_hidden_layers=2), "more than one layer"),
        (lambda c, t: t.update({"midlayer.self_attn.q_proj.bias": noise(32)}), "a bias in its layer"),
        (lambda c, t: t.update({"midlayer.self_attn.q_norm.weight": noise(8)}), "norms of queries and keys"),
        (lambda c, t: t.update({"colour": noise(3)}), "a tensor 'colour'"),
        (lambda c, t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}), "weights in float8_e4m3fn"),
    ],
)
def test_what_a_head_cannot_have_is_named(change: Change, words: str, tmp_path: Path) -> None:
    changed(change, tmp_path)
    with pytest.raises(UnsupportedError) as refused:
        load_drafter(tmp_path)
    assert words in str(refused.value)
    assert str(refused.value).endswith("use another head.")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c, t: t.pop("norm.weight"), "lacks the tensor 'norm.weight'"),
        (lambda c, t: c.pop("num_attention_heads"), "needs a number 'num_attention_heads'"),
        (lambda c, t: t.update(d2t=torch.full((25,), 39)), "must name 25 different tokens"),
        (lambda c, t: t.update(d2t=-torch.arange(25)), "must name 25 different tokens"),
        (lambda c, t: (t.pop("d2t"), t.pop("t2d")), "for 25 of 40 tokens and no 'd2t'"),
        (lambda c, t: t.update({"norm.weight": noise(31)}), "does not fit its own config"),
        (lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4, 5]), "has 96 inputs for 5 hidden states"),
    ],
)
def test_what_is_damaged_is_not_loaded(change: Change, words: str, tmp_path: Path) -> None:
    changed(change, tmp_path)
    with pytest.raises(LoadError) as refused:
        load_drafter(tmp_path)
    assert words in str(refused.value)


def test_other_speculators_and_truncated_medusa_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "mlp", {"speculators_model_type": "mlp"}, {"x": noise(1)})
    with pytest.raises(UnsupportedError, match="of type 'mlp'; only eagle3 and eagle are supported"):
        load_drafter(tmp_path / "mlp")
    config = {"model_type": "medusa", "vocab_size": 40, "truncated_vocab_size": 20}
    write(tmp_path / "few", config, {"blocks.0.layers.0.weight": noise(32, 32), "lm_heads.0.weight": noise(20, 32)})
    with pytest.raises(UnsupportedError, match="token_map"):
        load_drafter(tmp_path / "few")


def test_pickles_are_not_read(tmp_path: Path) -> None:
    write(tmp_path, {"medusa_num_heads": 3}, {"x": noise(1)})
    (tmp_path / "model.safetensors").rename(tmp_path / "medusa_lm_head.pt")
    with pytest.raises(LoadError, match=r"only as a pickle \(medusa_lm_head.pt\)"):
        load_drafter(tmp_path)


@pytest.mark.parametrize(("sizes", "words"), [({"vocab_size": 48}, "48 tokens"), ({"hidden_size": 64}, "width of 64")])
@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "medusa"])
def test_a_target_of_other_sizes_is_refused(kind: str, sizes: dict[str, int], words: str, tmp_path: Path) -> None:
    config = {"medusa_num_heads": 3} if kind == "medusa" else LLAMA
    write(tmp_path, config, getattr(others, kind)())
    with pytest.raises(UnsupportedError, match=words):
        load_drafter(tmp_path, LanguageModel(llama(0, num_hidden_layers=LAYERS, **sizes)))


# ---- from the hub


def test_a_hub_id_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "snapshot", LLAMA, others.eagle3())
    asked: list[str] = []
    monkeypatch.setattr(hub, "fetch", lambda name, **_: asked.append(name) or folder)
    assert drafts(load_drafter("someone/eagle3", target())) == drafts(str(folder))
    assert drafts("eagle", head="someone/eagle3") == drafts(str(folder))
    assert asked == ["someone/eagle3"] * 2

    def silent(name: str, **_: Any) -> Path:
        raise hub.HubError("the hub does not answer")

    monkeypatch.setattr(hub, "fetch", silent)
    with pytest.raises(LoadError, match="'someone/eagle3' is no folder here and could not be fetched"):
        load_drafter("someone/eagle3")
