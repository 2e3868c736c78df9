"""Kernels run a model only if every module is what they compute. A model that was altered in any way gives the logits
and the text of transformers' own forward, in plain decoding and with a draft, and one line says why."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from tests.conformance.test_cache import Texts
from tests.kernels.zoo import VOCABULARY, build
from torch import nn
from torch.nn.modules import module as torch_module
from transformers.activations import GELUActivation
from transformers.models.llama import modeling_llama as llama_file

from paceline import InputError, LanguageModel, PacelineWarning, SpeculativeDecoder, UnsupportedError
from paceline.drafters.models.draft_lm import DraftLayers
from paceline.drafters.models.early_exit import EarlyExit
from paceline.models.cpu import cpu_forward as kernel_pass
from paceline.models.cpu.cpu_plan import Plan, plan_of
from paceline.models.cuda import cuda_forward as cuda_pass
from paceline.models.cuda.cuda_forward import CudaPlan, cuda_plan
from paceline.models.heads.head_layers import SubsetHead
from paceline.models.runtime import quantized, running

PROMPT = [3, 9, 27, 4, 11, 9, 27]
Alteration = Callable[[Any], None]


# ---- parts of other classes


class _Norm(llama_file.LlamaRMSNorm):
    def forward(self, hidden_states: Any) -> Any:
        return super().forward(hidden_states) * 1.5


class _Attention(llama_file.LlamaAttention):
    def forward(self, *args: Any, **named: Any) -> Any:
        mixed, weights = super().forward(*args, **named)
        return -mixed, weights


class _Layer(llama_file.LlamaDecoderLayer):
    def forward(self, hidden_states: Any, *args: Any, **named: Any) -> Any:
        return super().forward(0.5 * hidden_states, *args, **named)


class _Model(llama_file.LlamaModel):
    def forward(self, *args: Any, **named: Any) -> Any:
        output = super().forward(*args, **named)
        output.last_hidden_state = -output.last_hidden_state
        return output


class _Mlp(llama_file.LlamaMLP):
    def forward(self, x: Any) -> Any:
        return super().forward(x) + 0.5


class _ScaledEmbedding(nn.Embedding):
    def forward(self, input: Any) -> Any:
        return super().forward(input) * 6.0


class _Adapter(nn.Module):
    """A linear map with something added, as adapters for fine-tuning are."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.weight, self.bias = base.weight, base.bias
        self.in_features, self.out_features = base.in_features, base.out_features
        self.added = nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x: Any) -> Any:
        return self.base_layer(x) + self.added(x)


class _Rotary(llama_file.LlamaRotaryEmbedding):
    def forward(self, x: Any, position_ids: Any) -> Any:
        return super().forward(x, position_ids // 2)


class _Doubled(nn.Module):
    def forward(self, weight: Any) -> Any:
        return 2 * weight


def _layer(model: Any, index: int = 1) -> Any:
    return model.model.layers[index]


def _class(of: Callable[[Any], Any], cls: type) -> Alteration:
    def alter(model: Any) -> None:
        of(model).__class__ = cls

    return alter


def _set(of: Callable[[Any], Any], name: str, value: Any) -> Alteration:
    def alter(model: Any) -> None:
        setattr(of(model), name, value() if callable(value) and not isinstance(value, nn.Module) else value)

    return alter


def _replaced_forward(model: Any) -> None:
    norm = _layer(model).input_layernorm
    forward = norm.forward
    norm.forward = lambda x: forward(x) * 1.5


def _replaced_call(model: Any) -> None:
    mlp = _layer(model).mlp
    mlp._call_impl = lambda x: nn.Module._call_impl(mlp, x) * 1.5


def _parametrized(model: Any) -> None:
    torch.nn.utils.parametrize.register_parametrization(_layer(model).self_attn.q_proj, "weight", _Doubled())


def _pruned(model: Any) -> None:
    from torch.nn.utils import prune

    prune.l1_unstructured(_layer(model).mlp.up_proj, "weight", 0.5)


def _adapted(model: Any) -> None:
    _layer(model).self_attn.v_proj = _Adapter(_layer(model).self_attn.v_proj)


def _adapted_head(model: Any) -> None:
    model.lm_head = _Adapter(model.lm_head)


def _sequential_head(model: Any) -> None:
    model.lm_head = nn.Sequential(model.lm_head, nn.Tanh())


def _head_with_bias(model: Any) -> None:
    head = nn.Linear(36, VOCABULARY)
    head.weight = model.lm_head.weight
    model.lm_head = head


def _cut(model: Any) -> None:
    model.model.layers = model.model.layers[:2]


def _cut_in_config(model: Any) -> None:
    model.config.num_hidden_layers = 2


def _swapped(model: Any) -> None:
    first, second, third = model.model.layers
    model.model.layers = nn.ModuleList([second, first, third])


def _more_layers(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(_layer(model)))
    model.model.layers[3].self_attn.layer_idx = 3


def _wrapped_layer(model: Any) -> None:
    class Wrapped(nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Any, **named: Any) -> Any:
            return self.layer(x, **named) * 1.1

    model.model.layers[1] = Wrapped(_layer(model))


def _norms_of_queries(model: Any) -> None:
    """transformers does not call them, and neither may the kernels."""
    _layer(model).self_attn.q_norm = llama_file.LlamaRMSNorm(8)
    _layer(model).self_attn.k_norm = llama_file.LlamaRMSNorm(8)


def _negative_view(model: Any) -> None:
    linear = _layer(model).mlp.up_proj
    del linear.weight
    linear.weight = torch._neg_view(torch.randn(52, 36))


def _grouped(model: Any) -> None:
    """All heads, each with its own keys; the config still says two."""
    for layer in model.model.layers:
        a = layer.self_attn
        a.num_key_value_groups = 1
        for name in ("k_proj", "v_proj"):
            linear = getattr(a, name)
            wide = nn.Linear(36, 32, bias=False)
            wide.weight.data = linear.weight.data.view(2, 8, 36).repeat_interleave(2, 0).reshape(32, 36) * 0.9
            setattr(a, name, wide)


def _other_attention_config(model: Any) -> None:
    other = copy.deepcopy(model.config)
    other._attn_implementation = "mine"
    _layer(model).self_attn.config = other


ALTERED: dict[str, Alteration] = {
    "class of a layer": _class(_layer, _Layer),
    "class of the model below the head": _class(lambda m: m.model, _Model),
    "class of an attention": _class(lambda m: _layer(m).self_attn, _Attention),
    "class of an mlp": _class(lambda m: _layer(m).mlp, _Mlp),
    "class of a norm": _class(lambda m: _layer(m).post_attention_layernorm, _Norm),
    "class of the last norm": _class(lambda m: m.model.norm, _Norm),
    "class of the embedding": _class(lambda m: m.model.embed_tokens, _ScaledEmbedding),
    "class of the rotary embedding": _class(lambda m: m.model.rotary_emb, _Rotary),
    "identity as mlp": _set(_layer, "mlp", nn.Identity),
    "identity as norm": _set(_layer, "input_layernorm", nn.Identity),
    "activation": _set(lambda m: _layer(m).mlp, "act_fn", GELUActivation),
    "scaling of one layer": _set(lambda m: _layer(m).self_attn, "scaling", 1.0),
    "scaling of the first layer": _set(lambda m: _layer(m, 0).self_attn, "scaling", 1.0),
    "scaling is a tensor": _set(lambda m: _layer(m).self_attn, "scaling", torch.tensor(0.9)),
    "eps of one norm": _set(lambda m: _layer(m).input_layernorm, "variance_epsilon", 0.9),
    "eps of the last norm": _set(lambda m: m.model.norm, "variance_epsilon", 0.9),
    "layers are cut": _cut,
    "layers are cut in the config": _cut_in_config,
    "layers are swapped": _swapped,
    "one layer more than the config says": _more_layers,
    "a wrapped layer": _wrapped_layer,
    "forward of one module": _replaced_forward,
    "call of one module": _replaced_call,
    "parametrization": _parametrized,
    "pruned by a hook": _pruned,
    "adapter in a layer": _adapted,
    "adapter on the head": _adapted_head,
    "head of several modules": _sequential_head,
    "head with biases": _head_with_bias,
    "norms that are not called": _norms_of_queries,
    "weights behind a negative view": _negative_view,
    "other groups of heads": _grouped,
    "embedding with a largest norm": _set(lambda m: m.model.embed_tokens, "max_norm", 0.5),
}


def _same_eps(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, llama_file.LlamaRMSNorm):
            module.variance_epsilon = 0.7


def _same_scaling(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.9


def _frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq *= 0.3


def _long_rope(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 1.3


def _head(model: Any) -> None:
    model.lm_head = nn.Linear(36, VOCABULARY, bias=False)


def _fewer_layers(model: Any) -> None:
    del model.model.layers[2]
    model.config.num_hidden_layers = 2


# What kernels compute as transformers does, for they take it from the modules.
FOLLOWED: dict[str, Alteration] = {
    "eps of all norms": _same_eps,
    "scaling of all layers": _same_scaling,
    "frequencies of the rotary embedding": _frequencies,
    "scaling of the rotary embedding": _long_rope,
    "another plain head": _head,
    "fewer layers, and the config says so": _fewer_layers,
}


def _changed(alter: Alteration) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = build("llama")
        alter(model)
    return model.eval()


@torch.inference_mode()
def _by_hand(model: Any, count: int) -> tuple[list[int], torch.Tensor]:
    """The greedy text of transformers' own forward without a cache, and the logits of its last pass."""
    text = list(PROMPT)
    for _ in range(count):
        logits = model(torch.tensor([text]), use_cache=False).logits[0]
        text.append(int(logits[-1].argmax()))
    return text[len(PROMPT) :], logits


def _check(model: Any, kernels: bool) -> None:
    lm = LanguageModel(model)
    wanted, logits = _by_hand(model, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PacelineWarning)
        reader = lm.reader()
        assert (reader.kernels is not None) is kernels
        for draft in (None, "prompt-lookup"):
            decoder = SpeculativeDecoder(lm, draft)
            got = decoder.generate(PROMPT, max_new_tokens=12, ignore_eos=True)
            assert got.tokens == wanted
            assert ("kernels" if kernels else "transformers") in decoder.describe()
    with torch.inference_mode():
        rows = Texts()
        rows.admit([PROMPT])
        width = reader.begin(rows, 0, 64)
        read = reader.extend(rows, width, torch.tensor([wanted[:11]])).logits[0]
    torch.testing.assert_close(read, logits[len(PROMPT) - 1 :], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ALTERED)
def test_an_altered_model_runs_through_transformers(name: str) -> None:
    _check(_changed(ALTERED[name]), kernels=False)


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_kernels_take_from_the_modules_they_compute(name: str) -> None:
    _check(_changed(FOLLOWED[name]), kernels=True)


def test_the_alterations_change_the_logits() -> None:
    """Else the tests above could not fail. A few change nothing here, for transformers ignores them too."""
    plain, quiet = _by_hand(build("llama"), 1)[1], {"norms that are not called", "one layer more than the config says"}
    for name, alter in (ALTERED | FOLLOWED).items():
        if name not in quiet:
            assert not torch.allclose(_by_hand(_changed(alter), 1)[1], plain, atol=1e-3), name


# ---- messages


@pytest.fixture
def fresh_lines() -> Iterator[None]:
    """Each reason is reported once in a process."""
    kernel_pass.tell_why.cache_clear()
    yield
    kernel_pass.tell_why.cache_clear()


def test_one_line_says_why(fresh_lines: None) -> None:
    lm = LanguageModel(_changed(ALTERED["activation"]), name="mine")
    why = "model.layers.1.mlp.act_fn is a GELUActivation, not a plain silu"
    assert running(lm).describe().startswith(f"transformers ({why})")
    with pytest.warns(PacelineWarning, match=f"Passes run through transformers, more slowly: {why}"):
        SpeculativeDecoder(lm)
    SpeculativeDecoder(lm, "prompt-lookup").generate(
        PROMPT, max_new_tokens=4
    )  # not reported twice: a warning is an error
    with pytest.raises(UnsupportedError, match=f"mine cannot run by it: {why}; use runner 'auto'"):
        SpeculativeDecoder(lm, runner="kernels")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("layers are cut", "it has 2 layers, and its config says 3"),
        ("layers are swapped", "model.layers.0.self_attn.layer_idx is 1, and kernels need 0"),
        ("scaling of one layer", "model.layers.1.self_attn.scaling is 1.0, and kernels need 0.35"),
        ("eps of one norm", "variance_epsilon of model.layers.1: input_layernorm is 0.9, and kernels need one value"),
        ("norms that are not called", "model.layers.1.self_attn has another module 'k_norm'"),
        ("identity as mlp", "model.layers.1.mlp is a Identity, not a LlamaMLP"),
        ("forward of one module", "the forward of model.layers.1.input_layernorm was replaced"),
        ("pruned by a hook", "model.layers.1.mlp.up_proj has forward hooks"),
    ],
)
def test_the_reason_names_the_part(name: str, why: str) -> None:
    lm = LanguageModel(_changed(ALTERED[name]))
    about = (lm.model, lm.architecture.kinds, lm.architecture.window, lm.logits)
    assert why in str(plan_of(*about))
    assert why in str(cuda_plan(*about)), "the plan for CUDA has the same check"


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan runs nothing, so that Triton need not be here."""
    monkeypatch.setattr(cuda_pass, "importable", lambda: None)


@pytest.mark.parametrize("name", ALTERED)
def test_the_plan_for_cuda_refuses_the_same(name: str, triton: None) -> None:
    model = build("llama", hidden_size=48, intermediate_size=64, head_dim=16)
    lm = LanguageModel(model)
    about = (model, lm.architecture.kinds, lm.architecture.window, lm.logits)
    assert isinstance(cuda_plan(*about), CudaPlan)
    if name not in {"weights behind a negative view", "head with biases", "other groups of heads"}:  # of other sizes
        ALTERED[name](model)
        assert isinstance(cuda_plan(*about), str)


@pytest.mark.parametrize("change", ["a narrower layer", "a shorter embedding", "one bias of three", "a wider norm"])
def test_the_plan_for_cuda_refuses_other_sizes(change: str, triton: None) -> None:
    model = build("llama", hidden_size=48, intermediate_size=64, head_dim=16)
    lm, layer = LanguageModel(model), model.model.layers[1]
    if change == "a narrower layer":
        layer.self_attn.k_proj = nn.Linear(48, 16, bias=False)
    elif change == "a shorter embedding":
        model.model.embed_tokens = nn.Embedding(VOCABULARY - 3, 48)
    elif change == "one bias of three":
        layer.self_attn.q_proj = nn.Linear(48, 64)
    else:
        layer.input_layernorm.weight = nn.Parameter(torch.ones(1))
    found = cuda_plan(model, lm.architecture.kinds, lm.architecture.window, lm.logits)
    assert isinstance(found, str)


# ---- classes and functions that were replaced for the whole process


def _shifted(function: Any) -> Any:
    @functools.wraps(function)
    def wrapped(*args: Any, **named: Any) -> Any:
        made = function(*args, **named)
        return tuple(each * 0.5 for each in made) if isinstance(made, tuple) else made * 0.5

    return wrapped


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (llama_file.LlamaRMSNorm, "forward"),
        (llama_file.LlamaMLP, "forward"),
        (llama_file.LlamaDecoderLayer, "forward"),
        (llama_file.LlamaRotaryEmbedding, "forward"),
        (llama_file, "apply_rotary_pos_emb"),
        (nn.Linear, "forward"),
        (llama_file.LlamaDecoderLayer, "__call__"),
    ],
    ids=lambda each: getattr(each, "__name__", each).rpartition(".")[2],
)
def test_classes_and_functions_that_were_replaced(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    monkeypatch.setattr(owner, name, _shifted(getattr(owner, name)))
    _check(model, kernels=False)
    lm = LanguageModel(model)
    assert "was replaced" in str(plan_of(lm.model, lm.architecture.kinds, None))


def test_attention_that_was_registered_under_an_old_name() -> None:
    model = build("llama")
    functions = transformers.AttentionInterface()
    functions["sdpa"] = _shifted(functions["sdpa"])
    lm = LanguageModel(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_file, "ALL_ATTENTION_FUNCTIONS", functions)
        assert "the attention 'sdpa' is a function of tests." in str(plan_of(lm.model, lm.architecture.kinds, None))
    assert isinstance(plan_of(lm.model, lm.architecture.kinds, None), Plan)


def test_a_layer_with_a_config_of_its_own() -> None:
    lm = LanguageModel(build("llama"))
    _other_attention_config(lm.model)
    assert "a layer's attention is 'mine'" in str(plan_of(lm.model, lm.architecture.kinds, None))


def test_global_hooks_are_called() -> None:
    lm, heard = LanguageModel(build("llama")), []
    hook = torch_module.register_module_forward_hook(lambda *_: heard.append(1))
    try:
        assert "global forward hooks" in str(plan_of(lm.model, lm.architecture.kinds, None))
        SpeculativeDecoder(lm, None).generate(PROMPT, max_new_tokens=4)
    finally:
        hook.remove()
    assert len(heard) > 30
    assert isinstance(plan_of(lm.model, lm.architecture.kinds, None), Plan)


# ---- what must not fall back


@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
def test_quantized_models_of_our_own_still_have_kernels(kind: str) -> None:
    for name in ("llama", "llama-biases", "qwen2", "qwen3", "mistral-window"):
        lm = quantized(LanguageModel(build(name)), kind)
        made = plan_of(lm.model, lm.architecture.kinds, lm.architecture.window, lm.logits)
        assert isinstance(made, Plan), made


def test_drafts_made_of_the_target_still_have_kernels() -> None:
    for name in ("llama-tied", "qwen2-windows", "qwen3"):
        target = LanguageModel(build(name))
        parts = {
            "first layers": EarlyExit(EarlyExit.Options(layers=1)).draft_of(target),
            "layers are skipped": EarlyExit(EarlyExit.Options(skip=(1,))).draft_of(target),
            "layers of its own": LanguageModel(DraftLayers(target, (0,), 1).model(target)),
            "few tokens": SubsetHead(target, 20).lm,
        }
        for what, lm in parts.items():
            about = (lm.model, lm.architecture.kinds, lm.architecture.window, lm.logits)
            made = plan_of(*about)
            assert isinstance(made, Plan), (name, what, made)


def test_an_altered_model_stays_altered_when_it_is_quantized() -> None:
    for name in ("activation", "class of a norm", "scaling of one layer"):
        lm = quantized(LanguageModel(_changed(ALTERED[name])), "int8")
        assert isinstance(plan_of(lm.model, lm.architecture.kinds, None), str)


@pytest.mark.parametrize("draft", ["early-exit", "self-quantized"])
def test_drafts_made_of_an_altered_target(draft: str) -> None:
    for name in ("activation", "scaling of one layer", "class of an attention"):
        model = _changed(ALTERED[name])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = SpeculativeDecoder(LanguageModel(model), draft).generate(PROMPT, max_new_tokens=12, ignore_eos=True)
        assert got.tokens == _by_hand(model, 12)[0]


def _not_causal(model: Any) -> None:
    _layer(model).self_attn.is_causal = False


def _one_layer_twice(model: Any) -> None:
    model.model.layers[2] = _layer(model)


@pytest.mark.parametrize(
    ("alter", "why"),
    [
        (_not_causal, r"LlamaForCausalLM \(llama\) has attention that is not causal: model\.layers\.1\.self_attn;"),
        (_one_layer_twice, r"has 2 layers with layer_idx 1, which would share one KV cache"),
    ],
)
def test_what_no_cache_can_serve_is_refused(alter: Alteration, why: str) -> None:
    lm = LanguageModel(build("llama"))
    alter(lm.model)
    assert isinstance(plan_of(lm.model, lm.architecture.kinds, None), str)
    with pytest.raises(UnsupportedError, match=why):
        LanguageModel(lm.model)


def test_dropout_of_one_layer_is_refused() -> None:
    lm = LanguageModel(build("llama"))
    attention = _layer(lm.model).self_attn
    attention.attention_dropout = 0.5
    lm.reader()
    attention.train()
    assert "self_attn drops out" in str(plan_of(lm.model, lm.architecture.kinds, None))
    with pytest.raises(InputError, match="its dropout is active"):
        lm.reader()


def test_no_layers_at_all() -> None:
    lm = LanguageModel(build("llama"))
    lm.model.model.layers = nn.ModuleList()
    assert "it has 0 layers" in str(plan_of(lm.model, lm.architecture.kinds, None))
    lm.model.config.num_hidden_layers = 0
    assert "it has 0 layers" in str(plan_of(lm.model, (), None))
