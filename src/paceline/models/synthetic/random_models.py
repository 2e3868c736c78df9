"""Random models of well-known shapes, for timing: there only the sizes of the weights matter."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.initialization import no_init_weights

from paceline.common.errors import InputError, UnknownNameError, shown
from paceline.models.language_model import LanguageModel
from paceline.models.loading.catalogue import RANDOM
from paceline.models.loading.checkpoint import _device, _dtype
from paceline.models.module_views import detach_hooks, layers_of, without_layers
from paceline.models.readers.drafting_ahead import check_depth

# ---- a new tokenizer and untrained Llama models

END = "<|end|>"


def new_tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `size` tokens, trained on texts. It can encode every text."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if size <= len(alphabet) + 1:
        raise InputError(f"A tokenizer of bytes has at least {len(alphabet) + 2} tokens, got {size}.")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, bos_token=END)


def new_llama(
    tokenizer: PreTrainedTokenizerFast,
    width: int,
    layers: int,
    context: int,
    seed: int,
    device: torch.device,
    name: str,
) -> LanguageModel:
    """Random weights in float32; heads of 64 numbers, or of 16 where the width is small."""
    head = 64 if width % 64 == 0 else 16
    if width < head or width % head:
        raise InputError(f"The width of a model must be a multiple of 16, got {width}.")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=width // head, num_key_value_heads=width // head, max_position_embeddings=context,
        tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(device).eval()
    return LanguageModel(model, tokenizer, name)


# ---- random models of well-known shapes

_SPREAD = 0.02  # standard deviation of the weights, as usual at initialization
_CHANGES = ("layers", "vocab")
_MOST_LAYERS, _MOST = 1024, 2**24


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. kv: heads of keys and values. draft: the shape that usually drafts for it, in its vocabulary;
    where there is none, the same model with fewer layers."""

    family: str
    layers: int
    width: int
    heads: int
    kv: int
    ffn: int
    vocab: int
    context: int
    tied: bool = False
    draft: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)  # what else the config says


SHAPES: dict[str, Shape] = {
    "tiny": Shape("llama", 2, 64, 4, 2, 128, 512, 1024),
    # SmolLM2-135M
    "llama-135m": Shape("llama", 30, 576, 9, 3, 1536, 49152, 8192, tied=True, more={"rope_theta": 100000.0}),
    # TinyLlama, Llama 2 and Llama 3
    "llama-1b": Shape("llama", 22, 2048, 32, 4, 5632, 32000, 2048, draft="llama-70m"),
    "llama-7b": Shape("llama", 32, 4096, 32, 32, 11008, 32000, 4096, draft="llama-70m"),
    "llama-8b": Shape("llama", 32, 4096, 32, 8, 14336, 128256, 8192, draft="llama-70m", more={"rope_theta": 500000.0}),
    # the small Llamas that draft for those (SpecInfer's), with a context as long as theirs
    "llama-70m": Shape("llama", 2, 768, 12, 12, 3072, 32000, 8192),
    "llama-160m": Shape("llama", 12, 768, 12, 12, 3072, 32000, 8192),
    "gpt2": Shape("gpt2", 12, 768, 12, 12, 3072, 50257, 1024, tied=True),
    "gpt2-medium": Shape("gpt2", 24, 1024, 16, 16, 4096, 50257, 1024, tied=True),
}


def shape_of(text: str) -> Shape:
    """ "llama-7b", or with changes "llama-7b:layers=4,vocab=1000"."""
    name, _, changes = text.partition(":")
    if name not in SHAPES:
        raise UnknownNameError("shape", name, SHAPES)
    given: dict[str, Any] = {}
    for change in filter(None, changes.split(",")):
        what, _, value = change.partition("=")
        if what.strip() not in _CHANGES:
            raise UnknownNameError(f"setting of shape '{name}'", what.strip(), _CHANGES)
        if re.fullmatch(r"[1-9]\d*", value.strip()) is None:
            raise InputError(f"{what.strip()} of shape '{name}' must be a whole number of at least 1, got '{value}'.")
        most = _MOST_LAYERS if what.strip() == "layers" else _MOST
        if len(value.strip()) > len(str(most)) or int(value) > most:
            raise InputError(f"{what.strip()} of shape '{name}' must be at most {most:,}, got {shown(value.strip())}.")
        given[what.strip()] = int(value)
    return replace(SHAPES[name], **given)


def usual_draft(text: str) -> str:
    """The shape that drafts for this one unless another is named; it has the same vocabulary."""
    shape, name = shape_of(text), text.partition(":")[0]
    if shape.draft:
        draft, layers = shape.draft, None
    else:  # a tenth of its layers, as few as one
        draft, layers = name, max(1, shape.layers // 10)
    changes = [] if layers is None else [f"layers={layers}"]
    if SHAPES[draft].vocab != shape.vocab:
        changes.append(f"vocab={shape.vocab}")
    return ":".join([draft, *([",".join(changes)] if changes else [])])


def random_model(
    shape: str,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    vocab: int | None = None,
    layers: int | None = None,
) -> LanguageModel:
    """A model of a named shape with random weights and no tokenizer; the same for the same seed on the same device.

    The weights are drawn where they will be used and in their own type: a 7B model never takes more than its 14 GB.
    Without `dtype` it is float32 on a CPU and bfloat16 elsewhere.
    """
    given: dict[str, Any] = {name: value for name, value in (("vocab", vocab), ("layers", layers)) if value is not None}
    sizes = replace(shape_of(shape), **given)
    where = _device(device)
    kind = _dtype(dtype, where)
    with torch.device(where), no_init_weights():
        model = AutoModelForCausalLM.from_config(
            _config(sizes), dtype=kind if isinstance(kind, torch.dtype) else torch.bfloat16
        )
    model.tie_weights()
    _draw(model, torch.Generator(where).manual_seed(seed))
    name = ":".join([shape, *(f"{what}={value}" for what, value in given.items())])
    lm = LanguageModel(model.eval(), name=f"random {name}")
    lm.weights = RANDOM
    return lm


@torch.no_grad()
def _draw(model: torch.nn.Module, generator: torch.Generator) -> None:
    for name, weight in model.named_parameters():
        weight.requires_grad_(False)
        if weight.dim() > 1:
            weight.normal_(0.0, _SPREAD, generator=generator)
        else:  # norms start without effect
            weight.fill_(0.0 if name.endswith("bias") else 1.0)


def _config(shape: Shape) -> PretrainedConfig:
    """No token ends a sequence, so every run writes the planned number of tokens."""
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if shape.family == "gpt2":
        return GPT2Config(
            vocab_size=shape.vocab,
            n_positions=shape.context,
            n_embd=shape.width,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_inner=shape.ffn,
            tie_word_embeddings=shape.tied,
            **ends,
        )
    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv,
        max_position_embeddings=shape.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=shape.tied,
        **ends,
        **shape.more,
    )


# ---- agreement by construction: a random target, and its first layers as the draft model

_OUTPUTS = ("o_proj", "down_proj", "c_proj")  # the linear layers that write to the residual stream


def agreeing_pair(
    shape: str,
    keep: int,
    eps: float,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> tuple[LanguageModel, LanguageModel]:
    """A random target whose layers after the first `keep` add only `eps` times their output, and those first layers as
    a draft model with shared weights. With eps 0 the two agree always; with 1 they are random models."""
    if not 0 <= eps <= 1:
        raise InputError(f"eps must be from 0 (the draft is always right) to 1 (a random model), got {eps}.")
    target = random_model(shape, dtype=dtype, device=device, seed=seed)
    check_depth(target, keep)
    with torch.no_grad():
        for layer in layers_of(target)[keep:]:
            outputs = [module for name, module in layer.named_modules() if name.rpartition(".")[2] in _OUTPUTS]
            assert len(outputs) == 2, "attention and feed-forward have one output each"
            for module in outputs:
                for weight in module.parameters(recurse=False):
                    weight.mul_(eps)
    part = detach_hooks(without_layers(target, range(keep, target.layers)))
    return target, LanguageModel(part, name=f"first {keep} layers of {target.name}")


@torch.inference_mode()
def measured_agreement(
    target: LanguageModel, draft: LanguageModel, *, prompts: int = 8, length: int = 16, tokens: int = 32, seed: int = 0
) -> float:
    """How often the draft model picks the target's token, along greedy texts of the target after random prompts."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, target.vocabulary, (prompts, length), generator=generator).to(target.device)
    settings = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens}
    text = target.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    picks = draft.model(input_ids=text[:, :-1], use_cache=False).logits[:, length - 1 :].argmax(-1)
    return float((picks == text[:, length:]).double().mean())


@dataclass(frozen=True)
class Agreement:
    """An eps, and how often the pair that is made with it agrees."""

    eps: float
    agreement: float


def eps_for(
    acceptance: float,
    shape: str,
    keep: int,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    steps: int = 8,
    close: float = 0.01,
) -> Agreement:
    """The eps at which a pair agrees about as often as `acceptance`, by bisection: agreement falls as eps grows. Every
    step makes a new pair."""
    if not 0 <= acceptance <= 1:
        raise InputError(f"An acceptance is from 0 to 1, got {acceptance}.")
    low, high = 0.0, 1.0
    best = Agreement(0.0, 1.0)  # without the later layers the draft model is the target
    for _ in range(steps):
        if abs(best.agreement - acceptance) <= close:
            break
        eps = (low + high) / 2
        reached = measured_agreement(*agreeing_pair(shape, keep, eps, dtype=dtype, device=device, seed=seed))
        if abs(reached - acceptance) < abs(best.agreement - acceptance):
            best = Agreement(eps, reached)
        low, high = (eps, high) if reached > acceptance else (low, eps)
    return best
