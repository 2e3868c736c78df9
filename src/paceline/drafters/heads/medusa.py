"""Medusa: several heads on the last hidden state of the target. Head k drafts the token k+2 positions later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.common.errors import InputError
from paceline.core.contracts import DRAFTERS, Budget, RowsView, arange
from paceline.core.tree import TokenTree
from paceline.core.tree_growth import Expand
from paceline.drafters.heads.base import DraftHead, HeadDrafter, HeadOptions
from paceline.models.cpu.cpu_linear import CpuLinear
from paceline.models.language_model import LanguageModel


@dataclass(frozen=True)
class MedusaConfig:
    """heads: the number of drafted tokens. layers: blocks per head. own_output: false uses the target's layer."""

    hidden: int
    vocabulary: int
    heads: int = 4
    layers: int = 1
    own_output: bool = True

    def __post_init__(self) -> None:
        if self.heads < 1 or self.layers < 0:
            raise InputError(f"Medusa needs at least 1 head of 0 or more layers, got {self.heads} of {self.layers}.")


class MedusaHead(DraftHead):
    """K residual heads (arXiv 2401.10774): head k drafts the token k+2 positions after its hidden state."""

    kind = "medusa"
    Config = MedusaConfig

    def __init__(self, config: MedusaConfig, made_for: dict[str, Any]) -> None:
        super().__init__(config, made_for)
        K, D = config.heads, config.hidden
        # the blocks start at zero, so a new head applies its output layer directly to the hidden state
        self.blocks = nn.Parameter(torch.zeros(config.layers, K, D, D))
        self.biases = nn.Parameter(torch.zeros(config.layers, K, 1, D))
        self.output = nn.Parameter(torch.randn(K, config.vocabulary, D) / D**0.5) if config.own_output else None

    @classmethod
    def sizes(cls, target: LanguageModel) -> MedusaConfig:
        config = target.model.config.get_text_config(decoder=True)
        return MedusaConfig(config.hidden_size, config.vocab_size)

    def states(self, hidden: Tensor, head: int) -> Tensor:
        """Return the input [...,D] of the output layer of one head, from hidden states [...,D]."""
        for block, bias in zip(self.blocks[:, head], self.biases[:, head], strict=True):
            hidden = hidden + F.silu(F.linear(hidden, block, bias.squeeze(0)))
        return hidden

    def forward(self, hidden: Tensor, shared: Callable[[Tensor], Tensor], most: int) -> Tensor:
        """Return logits [K,...,V] of the first `most` heads from hidden [...,D]. shared: the target's output layer."""
        K = min(most, self.config.heads)
        states = hidden.reshape(1, -1, hidden.shape[-1]).expand(K, -1, -1)  # [K,P,D]
        for block, bias in zip(self.blocks, self.biases, strict=True):
            states = states + F.silu(torch.baddbmm(bias[:K], states, block[:K].transpose(1, 2)))
        logits = shared(states) if self.output is None else states @ self.output[:K].transpose(1, 2)
        return logits.view(K, *hidden.shape[:-1], -1)

    def light(self) -> nn.Module:
        """Return these heads with int8 linear layers, see `cpu_linear.drafting`."""
        return _LightHeads(self)


class _LightHeads(nn.Module):
    """The linear layers of all heads in int8."""

    def __init__(self, head: MedusaHead) -> None:
        super().__init__()
        self.config = head.config
        some = range(head.config.heads)
        rows = [zip(head.blocks[:, k], head.biases[:, k].squeeze(1), strict=True) for k in some]
        self.blocks = nn.ModuleList(nn.ModuleList(CpuLinear.of(*each) for each in row) for row in rows)
        self.output = None if head.output is None else nn.ModuleList(CpuLinear.of(head.output[k]) for k in some)

    def forward(self, hidden: Tensor, shared: Callable[[Tensor], Tensor], most: int) -> Tensor:
        K = min(most, self.config.heads)
        states = hidden.reshape(1, -1, hidden.shape[-1]).repeat(K, 1, 1)  # [K,P,D]
        for k in range(K):
            for block in self.blocks[k]:  # type: ignore[attr-defined]
                states[k] += F.silu(block(states[k]))
        if self.output is None:
            logits = shared(states)
        else:
            logits = torch.stack([layer(state) for layer, state in zip(self.output, states, strict=False)])
        return logits.view(K, *hidden.shape[:-1], -1)


@DRAFTERS.register("medusa")
class Medusa(HeadDrafter):
    """Draft with several trained heads on the target's last hidden state, one head for each position."""

    @dataclass(frozen=True)
    class Options(HeadOptions):
        Head = MedusaHead

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        depth = min(budget.depth, self.head.config.heads)
        return self._grower.run(rows, replace(budget, depth=depth), self._expand(rows, depth))

    def _expand(self, rows: RowsView, depth: int) -> Expand:
        """Return the function that looks up logits. All nodes of one depth have the logits of one head."""
        hidden = self.last_state(rows).squeeze(1)
        logits = self.usable(self.light(hidden, self.shared, depth)).transpose(0, 1)  # [R,K,V]
        row = arange(0, rows.count, logits.device).unsqueeze(1)
        depths = rows.length.new_empty(rows.count, 0)  # depth of every expanded node; 1: a child of the text

        def expand(tokens: Tensor | None, parents: Tensor | None) -> Tensor:
            nonlocal depths
            if tokens is None:
                return logits[:, :1]
            if parents is None:  # a chain
                depths = F.pad(depths, (0, 1), value=depths.shape[1] + 1)
                return logits[:, depths.shape[1], None]
            deep = F.pad(depths, (1, 0)).gather(1, parents + 1) + 1
            depths = torch.cat([depths, deep], 1)
            return logits[row, deep]

        return expand
