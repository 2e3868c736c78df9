"""A smaller model writes ahead: a chain, or a tree grown where the draft itself is most sure."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.core.contracts import DRAFTERS, Budget, Drafter, RowsView, arange
from paceline.core.errors import InputError, PacelineWarning
from paceline.core.law import Law
from paceline.core.noise import Purpose
from paceline.core.tree import Drawn, TokenTree
from paceline.core.verdict import Verdict
from paceline.models.language_model import LanguageModel
from paceline.models.vocabulary import check_same_vocabulary

_TREE = -1


@DRAFTERS.register("draft-model")
class DraftModel(Drafter):
    """Let a smaller model with the same vocabulary write ahead, as a chain or as a tree."""

    @dataclass(frozen=True)
    class Options:
        model: Any = None  # a LanguageModel, or anything `paceline.load` takes
        tree: Literal["chain", "levels", "best-first"] = "chain"
        branch: int = 2  # children of a node that is expanded
        width: int = 2  # nodes expanded per pass of the draft model

        def __post_init__(self) -> None:
            if self.tree not in ("chain", "levels", "best-first"):
                raise InputError(f"tree must be chain, levels or best-first, got '{self.tree}'.")
            if self.branch < 1 or self.width < 1:
                raise InputError(f"branch and width must be at least 1, got {self.branch} and {self.width}.")

    on_device = True

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        if not isinstance(self.options.model, LanguageModel):
            raise InputError(
                "draft-model needs a model: SpeculativeDecoder(target, draft='name or folder of a smaller model')."
            )
        self.lm: LanguageModel = self.options.model
        self._warned = False
        self._read: list[int] = []  # per row, how many committed tokens the draft's memory holds
        self._drafted_at: list[int] = []  # per row, its length when the last draft was made
        self._slots: Tensor | None = None  # [R,N]: which scratch token of the draft a node of the tree was

    def describe(self) -> str:
        shape = "" if self.options.tree == "chain" else f", tree {self.options.tree}"
        return f"draft-model {self.lm.name}{shape}"

    # ---- rows come and go

    def check(self, target: LanguageModel) -> None:
        check_same_vocabulary(target, self.lm)

    def open(self, target: LanguageModel, rows: RowsView) -> None:
        self.vocabulary = target.vocabulary
        self._reader = self.lm.reader()
        if self.lm.vocabulary < target.vocabulary:
            self._reader.largest = self.lm.vocabulary - 1
        self._read, self._drafted_at = [], []
        self._fed: int | None = None

    def admit(self, rows: RowsView, first: int) -> None:
        self._settle(rows.lengths[:first])
        rest = self._reader.begin(rows, first, max(rows.lengths))
        self._read[first:] = [length - rest for length in rows.lengths[first:]]

    def release(self, row: int, last: int, length: int) -> None:
        self._reader.release(row, last, length)
        for state in (self._read, self._drafted_at):
            if last < len(state):
                state[row] = state[last]
                del state[last]

    def _settle(self, lengths: list[int]) -> None:
        """Once the last round is known on the host: what was accepted is in memory, as far as the draft model read it.

        `_fed` is the number of drafted tokens it read of a chain; of a tree it read all of a path but perhaps its leaf.
        """
        for row, length in enumerate(lengths if self._fed is not None else []):
            start = self._drafted_at[row]
            in_place = length - 2 if self._fed == _TREE else start + self._fed  # type: ignore[operator]
            self._read[row] = max(start, min(length - 1, in_place))
        self._fed = None

    def keep(self, rows: RowsView, verdict: Verdict, taps: tuple[Tensor, ...]) -> None:
        path = verdict.path
        if path is not None and self._slots is not None and path.shape[1]:
            # an accepted leaf was never read: what is copied for it is read anew in the next round
            path = self._slots.gather(1, path).clamp(min=0)
        self._reader.keep(rows, path)

    # ---- drafting

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        self._settle(rows.lengths)
        if min(rows.lengths) + budget.depth > self.lm.context:
            self._say_context_is_used_up()
            return TokenTree.empty(rows.count, rows.text.device)
        width = max(length - read for length, read in zip(rows.lengths, self._read, strict=True))
        if width > min(rows.lengths):  # a newcomer is shorter than what the others have to catch up
            self._reader.prefill(rows, 0, [length - 1 for length in rows.lengths])
            width = 1
        self._drafted_at = list(rows.lengths)
        return (self._chain if self.options.tree == "chain" else self._tree)(rows, budget, width)

    def _say_context_is_used_up(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"The text has outgrown the context of {self.lm.name} ({self.lm.context} tokens); "
                "plain decoding goes on.",
                PacelineWarning,
                stacklevel=2,
            )

    def _chain(self, rows: RowsView, budget: Budget, width: int) -> TokenTree:
        purpose = Purpose.TARGET if budget.draw == "coupled" else Purpose.DRAFT
        logits = self._logits(self._reader.extend(rows, width).logits)
        tokens: list[Tensor] = []
        laws: list[Law | None] = []
        for step in range(budget.depth):
            if step:
                logits = self._logits(self._reader.extend(rows, 0, tokens[-1]).logits)
            path = _chain_path(tokens) if rows.needs_path and step else None
            token, law = rows.choice(slice(step, step + 1), path).guess(logits, purpose)
            tokens.append(token)
            laws.append(law)
        self._fed, self._slots = budget.depth - 1, None
        drafted = torch.cat(tokens, 1)
        if laws[0] is None:
            return TokenTree(drafted)
        if budget.draw == "coupled":
            return TokenTree(drafted, drawn="coupled")
        return TokenTree(drafted, drawn="iid", laws=torch.cat([self._dense(law) for law in laws], 1))

    def _tree(self, rows: RowsView, budget: Budget, width: int) -> TokenTree:
        purpose = Purpose.TARGET if budget.draw == "coupled" else Purpose.DRAFT
        growth = _Growth(rows, min(self.options.branch, budget.nodes), budget.draw == "independent")
        logits = self._logits(self._reader.extend(rows, width).logits)
        growth.add(torch.full((rows.count, 1), -1, device=logits.device), logits, purpose)  # below the text
        fed = 0
        for _ in range(budget.depth - 1):
            spread = min(self.options.width, growth.newest, (budget.nodes - growth.nodes) // growth.branch)
            if spread < 1:
                break
            chosen = growth.frontier(spread, everywhere=self.options.tree == "best-first")
            tokens, parents = growth.feed(chosen, fed)
            fed += spread
            logits = self._logits(self._reader.extend(rows, 0, tokens, parents).logits)
            growth.add(chosen, logits, purpose)
        self._fed, self._slots = _TREE, growth.slots
        return growth.tree(budget.draw == "coupled")

    def _logits(self, logits: Tensor) -> Tensor:
        """Over the target's vocabulary: padded ids are impossible on both sides."""
        extra = logits.shape[-1] - self.vocabulary
        if extra > 0:
            return logits[..., : self.vocabulary]
        return logits if extra == 0 else torch.nn.functional.pad(logits, (0, -extra), value=float("-inf"))

    def _dense(self, law: Law | None) -> Tensor:
        assert law is not None
        return law.dense(self.vocabulary)


def _chain_path(tokens: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The drafted tokens before the next place of a chain, for controls that look at the prefix."""
    drafted = torch.cat(tokens, 1)
    return drafted, torch.ones_like(drafted, dtype=torch.bool).unsqueeze(1)


class _Growth:
    """A tree being grown on the device: every expanded node gets all its children, so nothing drawn is ever dropped."""

    def __init__(self, rows: RowsView, branch: int, wants_laws: bool) -> None:
        self.rows, self.branch, self.wants_laws = rows, branch, wants_laws
        self.R, self.device = rows.count, rows.text.device
        self.tokens = torch.empty(self.R, 0, dtype=torch.int64, device=self.device)
        self.parents, self.depth, self.slots = self.tokens, self.tokens, self.tokens
        self.ancestors = torch.empty(self.R, 0, 0, dtype=torch.bool, device=self.device)
        self.score = torch.empty(self.R, 0, dtype=torch.float64, device=self.device)  # log of the joint sureness
        self.laws: list[Tensor] = []
        self.newest = 0  # nodes added by the last step
        self.certain = False
        self.levels = 0  # no path is longer

    @property
    def nodes(self) -> int:
        return self.tokens.shape[1]

    def frontier(self, count: int, everywhere: bool) -> Tensor:
        """[R,count]: the surest nodes not yet expanded; of the whole tree, or of the last level."""
        open_nodes = self.slots < 0
        if not everywhere:
            open_nodes = open_nodes & (arange(0, self.nodes, self.device) >= self.nodes - self.newest)
        score = self.score.clamp(min=-1e300)  # an impossible open node still comes before one that is expanded already
        return score.masked_fill(~open_nodes, float("-inf")).topk(count, dim=1).indices.sort(1).values

    def feed(self, chosen: Tensor, fed: int) -> tuple[Tensor, Tensor]:
        """Tokens of the chosen nodes, and their parents among the scratch tokens of the draft model."""
        above = torch.cat([torch.full_like(self.slots[:, :1], -1), self.slots], 1)
        parents = above.gather(1, self.parents.gather(1, chosen) + 1)
        numbers = arange(fed, fed + chosen.shape[1], self.device).expand_as(chosen)
        self.slots = self.slots.scatter(1, chosen, numbers)
        return self.tokens.gather(1, chosen), parents

    def add(self, chosen: Tensor, logits: Tensor, purpose: Purpose) -> None:
        """Children for the nodes `chosen` [R,W] (-1: the text), whose logits are [R,W,V]."""
        R, W, k = self.R, chosen.shape[1], self.branch
        known = chosen.clamp(min=0)
        deep = self.depth.gather(1, known) + 1 if self.nodes else torch.zeros_like(chosen)
        path = None
        if self.rows.needs_path and self.nodes:
            path = (self.tokens, self.ancestors.gather(1, known.unsqueeze(-1).expand(R, W, self.nodes)))
        branch = chosen + 1 if self.wants_laws else None
        tokens, weights, law = self.rows.choice(deep, path).siblings(logits, k, purpose, branch)
        self.certain = law is None
        if self.wants_laws and law is not None:
            self.laws.append(_sibling_laws(law, tokens).flatten(1, 2))
        base = self.score.gather(1, known) if self.nodes else torch.zeros(R, W, dtype=torch.float64, device=self.device)
        score = base.unsqueeze(-1) + weights.to(torch.float64).log()
        parents = chosen.unsqueeze(-1).expand(R, W, k)
        self._grow_ancestors(parents.flatten(1))
        self.tokens = torch.cat([self.tokens, tokens.flatten(1)], 1)
        self.parents = torch.cat([self.parents, parents.flatten(1)], 1)
        self.depth = torch.cat([self.depth, deep.unsqueeze(-1).expand(R, W, k).flatten(1)], 1)
        self.score = torch.cat([self.score, score.flatten(1)], 1)
        self.slots = torch.cat([self.slots, torch.full((R, W * k), -1, device=self.device)], 1)
        self.newest = W * k
        self.levels += 1

    def _grow_ancestors(self, parents: Tensor) -> None:
        if not self.rows.needs_path:
            return
        old, (R, new) = self.ancestors, parents.shape
        padded = torch.nn.functional.pad(old, (0, new, 1, 0))
        rows = padded.gather(1, (parents + 1).unsqueeze(-1).expand(R, new, padded.shape[2]))
        own = torch.eye(new, dtype=torch.bool, device=self.device).expand(R, new, new)
        rows = rows | torch.nn.functional.pad(own, (padded.shape[2] - new, 0))
        self.ancestors = torch.cat([padded[:, 1:], rows], 1)

    def tree(self, coupled: bool) -> TokenTree:
        drawn: Drawn = "certain" if self.certain else "coupled" if coupled else "without_replacement"
        laws = torch.cat(self.laws, 1) if self.laws else None
        return TokenTree(self.tokens, self.parents, drawn=drawn, laws=laws, deepest=self.levels)


def _sibling_laws(law: Tensor, tokens: Tensor) -> Tensor:
    """[R,W,k,V]: the law of each sibling given its elders, whose tokens it can no longer be. Where nothing is left,
    the next token was not drawn but fixed: a point mass."""
    laws = []
    for i in range(tokens.shape[2]):
        total = law.sum(-1, keepdim=True)
        fixed = torch.zeros_like(law).scatter_(-1, tokens[..., i : i + 1], 1.0)
        laws.append(torch.where(total > 0, law / total, fixed))
        law = law.scatter(-1, tokens[..., i : i + 1], 0.0)
    return torch.stack(laws, 2)
