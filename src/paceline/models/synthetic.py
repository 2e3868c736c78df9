"""Models for timing: random weights in well-known shapes, and pairs that agree at a given rate.

Only the sizes of the weights matter for speed, but speculation also needs agreement. There are two ways to make it:
`agreeing_pair` weakens the later layers of a target, and `ScriptedModel` writes a script.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.initialization import no_init_weights

from paceline.common.errors import InputError, UnknownNameError, UnsupportedError, shown
from paceline.core.contracts import Reading, RowsView
from paceline.core.costs import accepted_of
from paceline.models.architecture import refuse_dropout
from paceline.models.language_model import LanguageModel, ModelRecord
from paceline.models.loading.catalogue import RANDOM
from paceline.models.loading.checkpoint import _device, _dtype
from paceline.models.module_views import detach_hooks, layers_of, shell, without_layers
from paceline.models.reader import SlotReader
from paceline.models.readers.drafting_ahead import check_depth

# ---- a new tokenizer and untrained Llama models

END = "<|end|>"


def new_tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of at most `size` tokens, trained on texts. It can encode every text."""
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
    """Return a Llama model with random weights in float32, and heads of 64 numbers if they fit, else of 16."""
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
_CHANGES = {"layers": 1024, "vocab": 2**24}  # what can be changed, and the largest value


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. kv: heads of keys and values. draft: the shape that usually drafts for it, in its vocabulary;
    if it is empty, the same model with fewer layers drafts."""

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
    """Return a shape by its name: "llama-7b", or with changes "llama-7b:layers=4,vocab=1000"."""
    name, _, changes = text.partition(":")
    if name not in SHAPES:
        raise UnknownNameError("shape", name, SHAPES)
    given: dict[str, Any] = {}
    for change in filter(None, changes.split(",")):
        what, _, value = (part.strip() for part in change.partition("="))
        if what not in _CHANGES:
            raise UnknownNameError(f"setting of shape '{name}'", what, _CHANGES)
        if re.fullmatch(r"[1-9]\d*", value) is None:
            raise InputError(f"{what} of shape '{name}' must be a whole number of at least 1, got '{value}'.")
        most = _CHANGES[what]
        if len(value) > len(str(most)) or int(value) > most:
            raise InputError(f"{what} of shape '{name}' must be at most {most:,}, got {shown(value)}.")
        given[what] = int(value)
    return replace(SHAPES[name], **given)


def usual_draft(text: str) -> str:
    """Return the shape that drafts for this one unless another is named; it has the same vocabulary."""
    shape, name = shape_of(text), text.partition(":")[0]
    draft = shape.draft or name
    changes = [] if shape.draft else [f"layers={max(1, shape.layers // 10)}"]
    if SHAPES[draft].vocab != shape.vocab:
        changes.append(f"vocab={shape.vocab}")
    return f"{draft}:{','.join(changes)}" if changes else draft


def random_model(
    shape: str,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    vocab: int | None = None,
    layers: int | None = None,
) -> LanguageModel:
    """Return a model of a named shape without tokenizer. Its random weights follow from the seed and the device.

    The weights are drawn on their device and in their dtype, so that a 7B model never takes more than its 14 GB.
    Without `dtype` it is float32 on a CPU and bfloat16 elsewhere.
    """
    given: dict[str, Any] = {name: value for name, value in (("vocab", vocab), ("layers", layers)) if value is not None}
    where = _device(device)
    kind = _dtype(dtype, where)
    kind = kind if isinstance(kind, torch.dtype) else torch.bfloat16
    with torch.device(where), no_init_weights():
        model = AutoModelForCausalLM.from_config(_config(replace(shape_of(shape), **given)), dtype=kind)
    model.tie_weights()
    generator = torch.Generator(where).manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.requires_grad_(False)
            if weight.dim() > 1:
                weight.normal_(0.0, _SPREAD, generator=generator)
            else:  # norms start without effect
                weight.fill_(0.0 if key.endswith("bias") else 1.0)
    name = ":".join([shape, *(f"{what}={value}" for what, value in given.items())])
    lm = LanguageModel(model.eval(), name=f"random {name}")
    lm.weights = RANDOM
    return lm


def _config(shape: Shape) -> Any:
    """Return the config of a shape. No token ends a sequence, so every run writes the planned number of tokens."""
    common: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": shape.tied,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **shape.more,
    }
    if shape.family == "gpt2":
        return GPT2Config(n_inner=shape.ffn, **common)
    return LlamaConfig(intermediate_size=shape.ffn, num_key_value_heads=shape.kv, rms_norm_eps=1e-5, **common)


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
    """Return a random target whose layers after the first `keep` add only `eps` times their output, and those first
    layers as a draft model with shared weights. With eps 0 the two agree always; with 1 they are random models."""
    if not 0 <= eps <= 1:
        raise InputError(f"eps must be from 0 (the draft is always right) to 1 (a random model), got {eps}.")
    target = random_model(shape, dtype=dtype, device=device, seed=seed)
    check_depth(target, keep)
    with torch.no_grad():
        for layer in layers_of(target)[keep:]:
            for name, module in layer.named_modules():
                if name.rpartition(".")[2] in _OUTPUTS:
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
    """Return the eps at which a pair agrees about as often as `acceptance`, by bisection: agreement falls as eps grows.
    Every step makes a new pair."""
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


# ---- agreement by a script: the passes run in full, and then one logit per position is raised

# A script is a walk through the whole vocabulary: the last token decides the next one. So it does not depend on
# positions, batches or KV caches, and a sequence repeats nothing until it is as long as the vocabulary. Rows of a batch
# that start differently accept different drafts. A position takes one lookup and one write, and no host read.

LOUD = 1e4  # a logit that wins over all others at any temperature, and that every floating-point type can hold


@dataclass(frozen=True)
class Script:
    """Per token of the vocabulary: the next token, the token of a wrong draft, and a random number from 0 to 1."""

    after: Tensor  # [V]
    wrong: Tensor  # [V]
    coin: Tensor  # [V]

    @staticmethod
    def written(vocabulary: int, avoid: Iterable[int] = (), seed: int = 0) -> Script:
        """Return a random walk through all tokens but those to `avoid` (which end a sequence, or have no text)."""
        generator = torch.Generator().manual_seed(seed)
        walk = torch.randperm(vocabulary, generator=generator)
        walk = walk[~torch.isin(walk, torch.tensor(sorted(set(avoid)), dtype=torch.int64))]
        if len(walk) < 3:
            raise InputError(f"A script needs at least 3 tokens, this vocabulary has {len(walk)} that may be written.")
        after, wrong = walk[torch.arange(vocabulary) % len(walk)], walk[(torch.arange(vocabulary) + 1) % len(walk)]
        after[walk], wrong[walk] = walk.roll(-1), walk.roll(-(len(walk) // 2 + 1))
        return Script(after, wrong, torch.rand(vocabulary, generator=generator, dtype=torch.float64))

    def tokens(self, rates: Sequence[float]) -> Tensor:
        """Return [V,D]: the token after each token, right with probability rates[d]."""
        right = self.coin.unsqueeze(1) < torch.tensor(rates, dtype=torch.float64)
        return torch.where(right, self.after.unsqueeze(1), self.wrong.unsqueeze(1))

    def text(self, last: int, count: int) -> list[int]:
        """Return the `count` tokens that the target writes after the token `last`."""
        tokens = [last]
        for _ in range(count):
            tokens.append(int(self.after[tokens[-1]]))
        return tokens[1:]


def even_rate(rates: Sequence[float], gamma: int) -> float:
    """Return the constant rate that accepts as many of γ drafted tokens, on average, as these rates do (the last rate
    holds for all later tokens)."""
    each = [rates[min(step, len(rates) - 1)] for step in range(gamma)]
    if min(each) == max(each):
        return each[0]
    wanted = accepted_of(each)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted_of([middle] * gamma) < wanted else (low, middle)
    return low


class ScriptedModel(LanguageModel):
    """A model that writes a script: always, or, as a draft model, at given rates.

    `rates[i]` is the rate of the i-th token of a draft, if the tokens before it are right; the last rate holds for all
    later tokens. `model` is a transformers model, so other libraries can run the script. They do not pass the start of
    a draft, so every token has one rate there: `even_rate` of the rates. The model `lm` is not edited.
    """

    def __init__(self, lm: LanguageModel, script: Script, rates: Sequence[float] = (1.0,), gamma: int = 5) -> None:
        if lm.architecture.alibi:
            raise UnsupportedError(f"{lm.name} ({lm.architecture.name}) is not run as a whole, so it takes no script.")
        if not rates or not all(0 <= rate <= 1 for rate in rates):
            raise InputError(f"Rates of a scripted draft must be from 0 to 1, at least one of them, got {list(rates)}.")
        self.__dict__.update(lm.__dict__)
        self.rates, self.record = tuple(rates), ModelRecord()
        self._plain = lm.model
        self.script = script.tokens(rates).to(lm.device)  # [V,D]
        self.model: Any = detach_hooks(shell(lm.model))
        self.model.__class__ = _class(lm.model.__class__)
        one = script.tokens([even_rate(rates, gamma)])[:, 0].to(lm.device)
        self.model.__dict__.update(script=one, whole=dict(lm.model._modules))

    @property
    def core(self) -> Any:
        return self._plain

    def reader(self, taps: Sequence[float] = ()) -> SlotReader:
        refuse_dropout(self.model)
        return _ScriptReader(self, taps, self.core)


class _ScriptReader(SlotReader):
    """Runs the model and then raises the logit of the script's token, which depends on the depth in the draft."""

    lm: ScriptedModel

    def extend(
        self, rows: RowsView, width: int, tokens: Tensor | None = None, parents: Tensor | None = None
    ) -> Reading:
        settled = rows.settled  # a draft may be written inside another (`staged`)
        # [R,1]: the number of tokens of each sequence that are not drafted
        base = rows.length if settled == rows.lengths else torch.tensor(settled, device=self.lm.device).view(-1, 1)
        plan = self._plan(rows, width, tokens, parents)
        reading, _ = self._executor(self.cache, plan)
        self.ops.say(reading.logits, self.lm.script, plan.ids, plan.positions, base, LOUD)
        return reading


@functools.lru_cache(256)
def _class(cls: Any) -> Any:
    """Return a subclass whose forward also applies the script. It has the module and the signature of its parent."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **named: Any) -> Any:
        if self._modules != self.whole:  # a draft made out of the target would always be right
            raise UnsupportedError(
                "A part of a scripted model cannot draft, since it would say the script too; use agreement by "
                "construction for drafters that are made out of the target."
            )
        output = cls.forward(self, *args, **named)
        ids = args[0] if args else named["input_ids"]
        output.logits.scatter_(-1, self.script[ids[:, -output.logits.shape[1] :]].unsqueeze(-1), LOUD)
        return output

    return type(f"Scripted{cls.__name__}", (cls,), {"forward": forward, "__module__": cls.__module__})
