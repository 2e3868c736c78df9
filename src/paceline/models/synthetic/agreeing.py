"""Agreement by construction: a random target whose later layers add little, and its first layers as the draft.

Random models agree about nothing. But if the layers past the k-th add only ε of what they would, the first k layers
alone say nearly what all of them say: a pair that agrees by itself, with no script, and whose passes cost what passes
of that size cost. The draft shares the target's weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from paceline.common.errors import InputError
from paceline.models.language_model import LanguageModel
from paceline.models.module_views import apart, layers_of, without_layers
from paceline.models.readers.split import check_depth
from paceline.models.synthetic.random_models import random_model

_OUTPUTS = ("o_proj", "down_proj", "c_proj")  # the maps by which a layer adds to what it was given


def agreeing_pair(
    shape: str,
    keep: int,
    eps: float,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> tuple[LanguageModel, LanguageModel]:
    """A random target, and its first `keep` layers. eps: how much the others add; 0 is full agreement."""
    if not 0 <= eps <= 1:
        raise InputError(f"eps must be from 0 (the draft is always right) to 1 (a random model), got {eps}.")
    target = random_model(shape, dtype=dtype, device=device, seed=seed)
    check_depth(target, keep)
    with torch.no_grad():
        for layer in layers_of(target)[keep:]:
            _soften(layer, eps)
    part = apart(without_layers(target, range(keep, target.layers)))
    return target, LanguageModel(part, name=f"first {keep} layers of {target.name}")


def _soften(layer: nn.Module, eps: float) -> None:
    found = [module for name, module in layer.named_modules() if name.rpartition(".")[2] in _OUTPUTS]
    assert len(found) == 2, "a layer adds what attention and what its feed-forward part say"
    for module in found:
        for weight in module.parameters(recurse=False):
            weight.mul_(eps)


@torch.inference_mode()
def measured_agreement(
    target: LanguageModel, draft: LanguageModel, *, prompts: int = 8, length: int = 16, tokens: int = 32, seed: int = 0
) -> float:
    """How often the draft says the target's token: along greedy texts of the target after random prompts."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, target.vocabulary, (prompts, length), generator=generator).to(target.device)
    settings = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens}
    text = target.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    said = draft.model(input_ids=text[:, :-1], use_cache=False).logits[:, length - 1 :].argmax(-1)
    return float((said == text[:, length:]).double().mean())


@dataclass(frozen=True)
class Agreement:
    """What was found: an eps, and how often the pair made with it agrees."""

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
    """The eps at which a pair agrees about as often as asked, by bisection (agreement falls as eps grows), and how
    often that is: texts differ, so it is near and not equal. Every step makes the pair anew."""
    if not 0 <= acceptance <= 1:
        raise InputError(f"An acceptance is from 0 to 1, got {acceptance}.")
    low, high = 0.0, 1.0
    best = Agreement(0.0, 1.0)  # without the later layers the draft is the target
    for _ in range(steps):
        if abs(best.agreement - acceptance) <= close:
            break
        eps = (low + high) / 2
        reached = measured_agreement(*agreeing_pair(shape, keep, eps, dtype=dtype, device=device, seed=seed))
        if abs(reached - acceptance) < abs(best.agreement - acceptance):
            best = Agreement(eps, reached)
        low, high = (eps, high) if reached > acceptance else (low, eps)
    return best
