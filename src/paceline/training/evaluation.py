"""Evaluate a drafter: τ on held-out texts without decoding, real decoding, and the page beside the weights.

`evaluate` walks through a held-out text in rounds, as decoding does. The first round begins at the first position to
learn; each next round begins after the accepted tokens and the target's own token.

A round follows a draft while the drafted token, the target's token and the token of the text are equal. If the text
differs from the target's token, or ends, the rest of the draft is unknown. It then counts neither as accepted nor as
rejected (the estimate of Kaplan and Meier), and the next round begins after that token.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.contracts import Drafter
from paceline.core.costs import Costs, accepted_of
from paceline.engine.decoder import SpeculativeDecoder
from paceline.models.language_model import LanguageModel
from paceline.models.loading.catalogue import find_entry
from paceline.models.loading.disk_cache import replacing
from paceline.models.loading.weight_check import place_of
from paceline.training.corpus import Text, write_json
from paceline.training.distillation import Batch, Teacher
from paceline.training.recipes.base import Recipe, shift_left

_NEW_TOKENS = 64  # decoded after each prompt

# ---- τ on held-out texts


@dataclass(frozen=True)
class Evaluation:
    """`loss`; `positions`: how often the token at each depth is accepted if all before it were; `tau`; the best `gamma`
    and its `speedup`, if the costs are known."""

    loss: float
    positions: tuple[float, ...]
    tau: float
    gamma: int | None = None
    speedup: float | None = None

    @property
    def score(self) -> float:
        """The value that training maximizes: τ, or the negative loss if nothing is drafted."""
        return self.tau if self.positions else -self.loss

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "positions": [round(rate, 4) for rate in self.positions]}

    def __str__(self) -> str:
        rates = " ".join(f"{rate:.2f}" for rate in self.positions)
        gain = "" if self.speedup is None else f", predicted {self.speedup:.2f}× (γ={self.gamma})"
        return f"held out: loss {self.loss:.4f}, τ {self.tau:.2f} (accepted {rates}){gain}"


@torch.no_grad()
def evaluate(recipe: Recipe, batches: Iterable[Batch], costs: Costs | None, drafter: str) -> Evaluation:
    """Evaluate a recipe on held-out batches. costs: of forward passes and of steps of this drafter on this machine."""
    tried = torch.zeros(recipe.depth, recipe.depth, dtype=torch.float64)
    accepted = torch.zeros_like(tried)
    loss, count = 0.0, 0
    for batch in batches:
        loss += float(recipe(batch))
        count += 1
        if not recipe.depth:
            continue
        new_tried, new_accepted = walk(recipe.predictions(batch), batch, recipe.teacher)
        tried += new_tried.cpu()
        accepted += new_accepted.cpu()
    rates = (accepted / tried.clamp(min=1)).tolist()
    taus = [1.0 + accepted_of(row[:length]) for length, row in enumerate(rates, 1)]
    gamma, speedup = best_length(taus, costs, drafter) if costs is not None else (None, None)
    positions, tau = (tuple(rates[-1]), taus[-1]) if rates else ((), 1.0)
    return Evaluation(loss / max(1, count), positions, tau, gamma, speedup)


def walk(predictions: Tensor, batch: Batch, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """Return [S,S] twice: how many rounds with drafts of 1, 2, ... S tokens reached depth s, and how many of them were
    accepted there. predictions: [S,R,T]. Each length is counted apart, because its rounds begin at other positions."""
    target = torch.stack([teacher.logits(row).argmax(-1) for row in batch.last])  # of token t+1
    target, text = shift_left(target, 1), shift_left(batch.ids, 2)  # both of token t+2
    learn = shift_left(batch.learn.long(), 2, 0).bool()
    alive, ahead = learn, learn.long()  # ahead: distance to the next round, 0 where none can begin
    tried, accepted = [], []
    for step, guess in enumerate(predictions):
        valid = shift_left(learn.long(), step, 0).bool() & alive & (guess >= 0)
        hit = valid & (guess == shift_left(target, step))
        tried.append(valid)
        accepted.append(hit)
        alive = hit & (shift_left(text, step) == guess)
        ahead = ahead + alive
    distance = ahead.cpu().numpy()
    starts = [
        torch.from_numpy(round_starts(distance.clip(max=length + 1))) for length in range(1, len(predictions) + 1)
    ]
    weights = torch.stack(starts).to(learn.device).flatten(1).double()  # [S,R*T]
    all_tried, all_accepted = (weights @ torch.stack(flags).flatten(1).double().T for flags in (tried, accepted))
    return all_tried.tril(), all_accepted.tril()  # a draft of n tokens has n depths


def round_starts(ahead: np.ndarray) -> np.ndarray:
    """Return [R,T]: True where a round begins. ahead [R,T]: the distance to the next round, 0 if there is nothing to
    learn. After such a gap, for example between joined texts, a round begins at the first position."""
    starts = np.zeros(ahead.shape, dtype=bool)
    due = np.zeros(len(ahead), dtype=ahead.dtype)  # the position at which each row's next round begins
    for position, distance in enumerate(ahead.T):
        starts[:, position] = (distance > 0) & (due <= position)
        due = np.where(starts[:, position], position + distance, due)
    return starts


def best_length(taus: Sequence[float], costs: Costs, drafter: str) -> tuple[int, float]:
    """Return the γ with the best speed-up τ/(v(γ+1)+γc+o), and that speed-up; (0, 1.0) if no γ is faster. taus: τ with
    drafts of 1, 2, ... tokens."""
    best = (0, 1.0)
    for gamma, tau in enumerate(taus, 1):
        cost = costs.v(gamma + 1) + gamma * costs.c(drafter) + costs.o()
        gain = tau * (1 + costs.o()) / cost
        if gain > best[1]:
            best = (gamma, gain)
    return best


# ---- Real decoding


@dataclass(frozen=True)
class Measured:
    """Figures of greedy decoding after held-out prompts."""

    tau: float
    acceptance: float
    prompts: int
    tokens: int
    same: bool  # whether the texts are those of plain decoding


def measure(lm: LanguageModel, drafter: Drafter, pieces: Sequence[Text], most: int) -> Measured | None:
    """Decode after held-out prompts with the drafter and without it. Return None if there are no pieces."""
    prompts = [piece.tokens[: piece.prompt] for piece in pieces if piece.prompt][:most]
    prompts = prompts or [piece.tokens[: len(piece.tokens) // 2] for piece in pieces][:most]
    if not prompts:
        return None
    plain = SpeculativeDecoder(lm, draft=None).generate(prompts, max_new_tokens=_NEW_TOKENS)
    drafted = SpeculativeDecoder(lm, drafter).generate(prompts, max_new_tokens=_NEW_TOKENS)
    stats = [result.stats for result in drafted]
    emitted = sum(len(result.tokens) for result in drafted)
    same = [result.tokens for result in plain] == [result.tokens for result in drafted]
    acceptance = sum(stat.accepted for stat in stats) / max(1, sum(stat.drafted for stat in stats))
    return Measured(emitted / max(1, sum(stat.rounds for stat in stats)), acceptance, len(prompts), emitted, same)


# ---- README.md and provenance.json beside the weights


def example_command(kind: str, target: str, folder: Path) -> str:
    """Return a command that uses a drafter. A pair has a target of its own."""
    lm, draft = (f"{folder}/main", f"{folder}/draft") if kind == "pair" else (target, str(folder))
    return shlex.join(["paceline", "generate", "Once upon a time", "--target", lm, "--draft", draft])


def write_card(
    folder: Path, kind: str, provenance: dict[str, Any], evaluation: Evaluation | None, measured: Measured | None,
    more: str,
) -> None:  # fmt: skip
    """Write README.md and provenance.json beside the weights."""
    facts = {"kind": kind, **provenance}
    if evaluation is not None:
        facts["held_out"] = evaluation.as_dict()
    if measured is not None:
        facts["measured"] = asdict(measured)
    write_json(folder / "provenance.json", facts)
    with replacing(folder / "README.md") as part:
        part.write_text(_card(folder, kind, facts, evaluation, measured, more), "utf-8")


def _portable_name(target: str) -> str:
    """Return the name of the target on another machine: only the last part of a path."""
    path = place_of(target)
    return f"./{path.name}" if path.exists() and find_entry(target) is None else target


def _card(
    folder: Path, kind: str, facts: dict[str, Any], evaluation: Evaluation | None, measured: Measured | None, more: str
) -> str:
    target, own = _portable_name(facts["arguments"]["target"]), f"./{folder.name}"
    drafter, note = f'paceline.load_drafter("{own}")', ""
    if kind == "pair":
        target, drafter = f"{own}/main", f'"{own}/draft"'
    elif target.startswith("./"):
        note = f" `{target}` is the target; give the path that it has on your machine."
    title, weights = target.removeprefix("./"), f" ({facts['weights']})" if facts.get("weights") else ""
    lines = [
        "---", "library_name: paceline", "tags: [speculative-decoding]", "---", "",
        f"# {folder.name}: a drafter ({kind}) for {title}", "",
        f"It was trained on the weights of {title}{weights}. It works with other weights of the same architecture, "
        "sizes and vocabulary too, and then fewer of its tokens are accepted. A drafter never changes the text.", "",
        "```python", "import paceline", "",
        f'decoder = paceline.SpeculativeDecoder("{target}", {drafter})', "```", "",
        f"`{own}` is the folder of this page.{note}", "",
    ]  # fmt: skip
    if measured is not None:
        same = "the texts of plain decoding" if measured.same else "NOT the texts of plain decoding"
        lines += [
            f"Measured by greedy decoding after {measured.prompts} held-out prompts ({measured.tokens} tokens, "
            f"{same}): τ = {measured.tau:.2f} tokens per round, {measured.acceptance:.0%} of the draft accepted.", "",
        ]  # fmt: skip
    if evaluation is not None:
        rates = ", ".join(f"{rate:.0%}" for rate in evaluation.positions)
        gain = ""
        if evaluation.speedup is not None:
            gain = f" Predicted on that machine: {evaluation.speedup:.2f}× at γ={evaluation.gamma}."
        lines += [
            f"On held-out texts, in rounds as in decoding, a chain is accepted at positions 1 … "
            f"{len(evaluation.positions)} with {rates} (each if all before were): τ = {evaluation.tau:.2f}.{gain}", "",
        ]  # fmt: skip
    if more:
        lines += [more, ""]
    processor = facts.get("gpu") or facts.get("cpu")
    lines += [f"Trained on {facts['date']} by paceline {facts['versions']['paceline']} (commit {facts.get('commit')}), "
              f"{processor}. provenance.json has all arguments.", ""]  # fmt: skip
    return "\n".join(lines)
