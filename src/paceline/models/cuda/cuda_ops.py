"""`DeviceOps` by Triton kernels (`kernels.cuda`): whole rounds of a CUDA graph without torch operations.

torch runs the operations for settings other than a temperature, and for float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.choice import Choice, Draw
from paceline.core.contracts import RowsView
from paceline.core.device_ops import DeviceOps, KernelTree, Texts, TreeBuilder
from paceline.core.law import Law, LazyLaws
from paceline.core.noise import Purpose
from paceline.core.tree import TokenTree
from paceline.core.verdict import BROKEN, Verdict


class CudaOps(DeviceOps):
    """The kernels are attributes, so that tests can count what is launched."""

    def __init__(self) -> None:
        from paceline.kernels.cuda import accepting, choosing, cuda_rounds, cuda_tree_growing, cuda_tree_paths

        self.race_kernel, self.ratio_kernel = choosing.race, accepting.judge
        self.tree_kernel, self.depths_kernel = cuda_tree_growing.TreeBuilder, cuda_tree_paths.depths
        self.match_kernel, self.match_tree_kernel = cuda_rounds.follow, cuda_tree_paths.follow_tree
        self.move_kernel, self.slots_kernel = cuda_tree_paths.move, cuda_rounds.lay
        self.begin_kernel, self.commit_kernel, self.say_kernel = cuda_rounds.begin, cuda_rounds.write, cuda_rounds.say

    # ---- tokens

    def pick(self, choice: Choice, logits: Tensor) -> Tensor:
        if not choice.can_fuse(logits):
            return super().pick(choice, logits)
        return self._race(choice, logits, Purpose.TARGET, BROKEN, None)

    def guess(
        self, choice: Choice, logits: Tensor, draw: Draw, into: Tensor | None = None
    ) -> tuple[Tensor, Law | None]:
        if draw == "certain" or not choice.can_fuse(logits):
            return super().guess(choice, logits, draw, into)
        tokens = self._race(choice, logits, Purpose.TARGET if draw == "coupled" else Purpose.DRAFT, 0, into)
        if choice.batch.deterministic:
            return tokens, None
        return tokens, Law(logits if draw == "coupled" else LazyLaws(logits, choice.batch))

    def _race(self, choice: Choice, logits: Tensor, purpose: Purpose, broken: int, into: Tensor | None) -> Tensor:
        batch, zeros = choice.batch, choice.batch.zeros(logits.shape[0] * logits.shape[1])
        if batch.deterministic:
            return self.race_kernel(logits, None, None, None, broken, into, zeros)
        position = choice.position if purpose == Purpose.TARGET else choice.at_depth(choice.table.own)
        temperature = batch.column("temperature", torch.float32)
        return self.race_kernel(logits, temperature, batch.key(purpose), position, broken, into, zeros)

    def chain_buffer(self, depth: int, rows: int, device: torch.device) -> Tensor | None:
        return torch.empty(depth, rows, 1, dtype=torch.int64, device=device)

    # ---- verdicts

    def match_chain(self, tree: TokenTree, picks: Tensor) -> Verdict:
        return Verdict(*self.match_kernel(tree.tokens, tree.count, picks))

    def ratio(self, choice: Choice, tree: TokenTree, logits: Tensor) -> Verdict | None:
        """Verify a chain without laws in memory, or a certain chain. Return None for other drafts and settings."""
        batch, laws, drafts = choice.batch, tree.laws, None
        if tree.parents is not None or not batch.only_temperature or not choice.can_fuse(logits):
            return None
        if tree.drawn != "certain" and laws is not None:
            if not isinstance(laws, LazyLaws) or laws.batch is not batch or laws.shape[-1] != logits.shape[-1]:
                return None
            drafts = laws.logits
        keys = (batch.key(Purpose.ACCEPT), batch.key(Purpose.FINAL))
        temperature = batch.column("temperature", torch.float32)
        emitted, accepted = self.ratio_kernel(
            logits, tree.tokens, drafts, tree.count, temperature, keys, choice.table.length
        )
        return Verdict(emitted[:, : tree.reach + 1], accepted)

    # ---- trees

    def tree_builder(
        self, rows: RowsView, draw: Draw, logits: Tensor, size: int, widest: int, anywhere: bool
    ) -> TreeBuilder:
        choice = None if rows.needs_path else rows.choice(slice(0, 1))
        if choice is None or draw not in ("coupled", "certain") or not choice.can_fuse(logits, draw):
            return super().tree_builder(rows, draw, logits, size, widest, anywhere)
        batch = choice.batch
        greedy = choice.greedy(draw)
        noise = None if greedy else (batch.column("temperature", torch.float32), batch.key(Purpose.TARGET))
        nodes = self.tree_kernel(rows.length, size, anywhere)
        return KernelTree(nodes, noise, batch.zeros(rows.count * widest))

    # ---- slots of a KV cache

    def slot_mapping(
        self, text: Tensor, length: Tensor, tokens: Tensor | None, width: int, more: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.slots_kernel(text, length, tokens, width, more)

    # ---- the rows of a CUDA graph

    def begin_round(self, length: Tensor, end: Tensor, depth: int) -> tuple[Tensor | None, Tensor | None]:
        return self.begin_kernel(length, end, depth)

    def commit(self, rows: Texts, verdict: Verdict, tree: TokenTree) -> Tensor:
        path, parents = verdict.path, tree.parents
        if (path is None) != (parents is None) or rows.counts is not None:
            return super().commit(rows, verdict, tree)
        branch = None if path is None or parents is None else (path, parents)
        texts = (rows.text, rows.length, rows.end)
        return self.commit_kernel(texts, verdict.emitted, verdict.accepted, tree.tokens, tree.count, branch)

    # ---- a model that follows a script

    def say(
        self, logits: Tensor, script: Tensor, ids: Tensor, position: Tensor, length: Tensor, loudness: float
    ) -> None:
        self.say_kernel(logits, script, ids, position, length, loudness)
