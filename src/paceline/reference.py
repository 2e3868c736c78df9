"""Speculative sampling in two functions, for any two callables: no KV cache, no rows, no trees.

The rest of the library does the same faster. These functions are for reading, for models outside Hugging Face, and an
independent reference for tests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.common.errors import InputError

# token ids [n] -> the distribution of the token after each of them, [n,V]
NextLaws = Callable[[Tensor], Tensor]


def speculative_sampling(
    p: Tensor, q: Tensor, token: Tensor | int | None = None, generator: torch.Generator | None = None
) -> tuple[int, bool]:
    """Return one token of the distribution `p` [V], drafted from `q` [V], and whether the draft was accepted.

    `token` is a sample of q (drawn here if not given). It is kept with probability min(1, p/q); otherwise the token
    comes from the residual norm(max(0, p - q)).
    """
    p, q = torch.as_tensor(p), torch.as_tensor(q)
    for name, law in (("p", p), ("q", q)):
        if law.dim() != 1 or bool((law < 0).any()) or not torch.isclose(law.sum(), law.new_ones(()), atol=1e-4):
            raise InputError(
                f"{name} must be probabilities [V] that sum to 1, got {list(law.shape)}, sum {law.sum():g}."
            )
    if p.shape != q.shape:
        raise InputError(f"p has {p.shape[0]} tokens and q {q.shape[0]}; they must share a vocabulary.")
    drafted = int(_draw(q, generator) if token is None else token)
    if not 0 <= drafted < len(q):
        raise InputError(f"token {drafted} is outside the vocabulary of {len(q)}.")
    if float(torch.rand((), dtype=torch.float64, generator=generator)) * float(q[drafted]) < float(p[drafted]):
        return drafted, True
    left = (p - q).clamp(min=0)
    return int(_draw(left if left.sum() > 0 else p, generator)), False


def speculative_step(
    target: NextLaws, draft: NextLaws, tokens: Tensor, gamma: int = 5, generator: torch.Generator | None = None
) -> list[int]:
    """Return 1 to gamma+1 new tokens after `tokens` [n], with the distribution of the target.

    `target` and `draft` map token ids [n] to the distributions [n,V] of the token after each of them. The target is
    called once.
    """
    if gamma < 1:
        raise InputError(f"gamma must be at least 1, got {gamma}.")
    text = torch.as_tensor(tokens)
    if text.dim() != 1 or not len(text):
        raise InputError(f"tokens must be a list of at least one id, got shape {list(text.shape)}.")
    drafted, laws = [], []
    for _ in range(gamma):
        q = draft(text)[-1]
        x = _draw(q, generator)
        drafted.append(int(x))
        laws.append(q)
        text = torch.cat([text, x.view(1)])
    wanted = target(text)[-gamma - 1 :]
    written: list[int] = []
    for token, q, p in zip(drafted, laws, wanted, strict=False):
        kept, accepted = speculative_sampling(p, q, token, generator)
        written.append(kept)
        if not accepted:
            return written
    return [*written, int(_draw(wanted[-1], generator))]


def _draw(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.multinomial(weights, 1, generator=generator)[0]
