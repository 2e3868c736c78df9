"""Prophet: a small transformer drafts the next tokens from the target's last hidden state."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.common.errors import InputError
from paceline.core.contracts import DRAFTERS, Budget, RowsView, arange
from paceline.core.tree import TokenTree
from paceline.core.tree_growth import Expand
from paceline.drafters.heads.base import DraftHead, HeadDrafter, HeadOptions
from paceline.models.heads.head_layers import BySlot, DecoderLayer, LayerConfig, Norm, Remember, Scratch, alone
from paceline.models.language_model import LanguageModel
from paceline.models.slot_cache import SlotCache, chain_mask

Shared = Callable[[Tensor], Tensor]  # the target's output layer
_START = 2  # positions before the draft: the target's hidden state, and the last committed token


@dataclass(frozen=True)
class ProphetConfig(LayerConfig):
    """hidden, embedding: the widths of the target. width: the width of the head. layers: the number of its layers.
    own_output: false uses the output layer of the target."""

    hidden: int = 0
    embedding: int = 0
    vocabulary: int = 0
    layers: int = 2
    own_output: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers < 1:
            raise InputError(f"A prophet head needs at least 1 layer, got {self.layers}.")


class ProphetHead(DraftHead):
    """A small causal transformer over the target's last hidden state, the token after it, and the drafted tokens."""

    kind = "prophet"
    Config = ProphetConfig

    def __init__(self, config: ProphetConfig, made_for: dict[str, Any]) -> None:
        super().__init__(config, made_for)
        D = config.width
        self.begin = nn.Linear(config.hidden, D, bias=False)
        self.begin_norm = Norm(config.hidden, eps=1e-6)
        self.embed_norm = Norm(config.embedding, eps=1e-6)
        self.embed = nn.Linear(config.embedding, D, bias=False)
        self.norms = nn.ModuleList(Norm(D, eps=1e-6) for _ in range(config.layers))
        self.layers = nn.ModuleList(DecoderLayer(config, D) for _ in range(config.layers))
        self.norm = Norm(D, eps=1e-6)
        # maps to logits, or to the input of the target's output layer
        self.output = nn.Linear(D, config.vocabulary if config.own_output else config.hidden, bias=False)

    @classmethod
    def sizes(cls, target: LanguageModel) -> ProphetConfig:
        config = target.model.config.get_text_config(decoder=True)
        heads = max(1, config.hidden_size // 128)
        width = 2 * heads * max(1, config.hidden_size // (4 * heads))  # about half the target's
        embedding = target.model.get_input_embeddings().embedding_dim
        return ProphetConfig(width, heads, heads, 3 * width, 10000.0, config.hidden_size, embedding, config.vocab_size)

    def states(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return the last hidden states [R,Q,D] of tokens. hidden [R,1,D]: of the target; embedded [R,Q,E]: tokens."""
        stream = self.start(hidden, embedded)
        position = arange(0, stream.shape[1], stream.device).unsqueeze(0)
        remember = [alone] * len(self.layers)
        return self.run_layers(stream, position, chain_mask(position, stream.shape[1]), remember)[:, 1:]

    def forward(self, hidden: Tensor, embedded: Tensor, shared: Shared | None = None) -> Tensor:
        """Return the logits [R,Q,V] after each token. hidden, embedded: as in `states`. shared: the output layer."""
        return self.logits(self.states(hidden, embedded), shared)

    def start(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return torch.cat([self.begin(self.begin_norm(hidden)), self.read(embedded)], 1)

    def read(self, embedded: Tensor) -> Tensor:
        return self.embed(self.embed_norm(embedded))  # type: ignore[no-any-return]

    def run_layers(self, stream: Tensor, position: Tensor, mask: Tensor, remember: Sequence[Remember]) -> Tensor:
        for norm, layer, store in zip(self.norms, self.layers, remember, strict=True):
            stream = layer(norm(stream), stream, position, mask, store)
        return stream

    def logits(self, stream: Tensor, shared: Shared | None = None) -> Tensor:
        states: Tensor = self.output(self.norm(stream))
        if self.config.own_output:
            return states
        assert shared is not None
        return shared(states)


@DRAFTERS.register("prophet")
class Prophet(HeadDrafter):
    """Draft with a small transformer that starts from the target's last hidden state."""

    @dataclass(frozen=True)
    class Options(HeadOptions):
        Head = ProphetHead

    def open(self, target: LanguageModel, rows: RowsView) -> None:
        super().open(target, rows)
        self._cache = SlotCache()

    @property
    def storage_version(self) -> Hashable:
        return super().storage_version, self._cache.storage_version

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        return self._grower.run(rows, budget, self._expand(rows))

    def _expand(self, rows: RowsView) -> Expand:
        """Return the function that runs the head. Its KV cache holds only the draft: each round starts at slot 0."""
        cache, every_row, head = self._cache, slice(0, rows.count), self.light
        remember = [BySlot(cache, layer) for layer in range(head.config.layers)]
        scratch = Scratch(torch.full_like(rows.length, _START), _START)

        def expand(tokens: Tensor | None, parents: Tensor | None) -> Tensor:
            if tokens is None:
                last = self.embed(rows.text.gather(1, rows.length - 1))
                stream = head.start(self.last_state(rows), last)
                position = arange(0, _START, stream.device).unsqueeze(0)
                cache.reserve(rows.capacity, _START)
                cache.set_next_write(every_row, position.expand(rows.count, -1), _START, 0)
                states = head.run_layers(stream, position, chain_mask(position, _START), remember)[:, -1:]
                return self.usable(head.logits(states, self.shared))
            slots, position, mask, visible = scratch.add(tokens.shape[1], parents)
            cache.reserve(rows.capacity, visible)
            cache.set_next_write(every_row, slots, visible, 0)
            states = head.run_layers(head.read(self.embed(tokens)), position, mask, remember)
            return self.usable(head.logits(states, self.shared))

        return expand
