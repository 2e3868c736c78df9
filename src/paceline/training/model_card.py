"""What is left when training is over: the weights, where they come from, and a page that says what they are worth."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.contracts import Drafter
from paceline.engine.decoder import SpeculativeDecoder
from paceline.models.language_model import LanguageModel
from paceline.models.loading.catalogue import find_entry
from paceline.models.loading.weight_check import place_of
from paceline.training.data.corpus import Text, write_whole
from paceline.training.offline_eval import Outlook

_WRITTEN = 64  # tokens for each prompt


@dataclass(frozen=True)
class Measured:
    """Of real decoding, greedy, on held-out prompts."""

    tau: float
    acceptance: float
    prompts: int
    tokens: int
    same: bool  # the text of plain decoding

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def measure(lm: LanguageModel, drafter: Drafter, pieces: Sequence[Text], most: int) -> Measured | None:
    """Decode after held-out prompts, with the drafter and without. None where no text has a prompt."""
    prompts = [piece.tokens[: piece.prompt] for piece in pieces if piece.prompt][:most]
    prompts = prompts or [piece.tokens[: len(piece.tokens) // 2] for piece in pieces][:most]
    if not prompts:
        return None
    plain = SpeculativeDecoder(lm, draft=None).generate(prompts, max_new_tokens=_WRITTEN)
    found = SpeculativeDecoder(lm, drafter).generate(prompts, max_new_tokens=_WRITTEN)
    stats = [each.stats for each in found]
    rounds = sum(each.rounds for each in stats)
    drafted = sum(each.drafted for each in stats)
    emitted = sum(len(each.tokens) for each in found)
    same = [each.tokens for each in plain] == [each.tokens for each in found]
    accepted = sum(each.accepted for each in stats)
    return Measured(emitted / max(1, rounds), accepted / max(1, drafted), len(prompts), emitted, same)


def used_as(kind: str, target: str, folder: str) -> tuple[str, str]:
    """The target and the draft to decode with, as users name them. A pair has a target of its own."""
    return (f"{folder}/main", f"{folder}/draft") if kind == "pair" else (target, folder)


def try_it(kind: str, target: str, folder: Path) -> str:
    """A command that uses what was trained."""
    lm, draft = used_as(kind, target, str(folder))
    return shlex.join(["paceline", "generate", "Once upon a time", "--target", lm, "--draft", draft])


def write_card(
    folder: Path, kind: str, provenance: dict[str, Any], outlook: Outlook | None, measured: Measured | None, more: str
) -> None:
    """README.md and provenance.json beside the weights."""
    found = {"kind": kind, **provenance}
    if outlook is not None:
        found["held_out"] = outlook.as_dict()
    if measured is not None:
        found["measured"] = measured.as_dict()
    write_whole(folder / "provenance.json", (json.dumps(found, indent=2, sort_keys=True) + "\n").encode())
    write_whole(folder / "README.md", _card(folder, kind, found, outlook, measured, more).encode())


def _elsewhere(target: str) -> str:
    """The target as a reader on another machine can name it: of a path only the last part."""
    path = place_of(target)
    return f"./{path.name}" if path.exists() and find_entry(target) is None else target


def _note(target: str, own: str) -> str:
    apart = target.startswith("./") and not target.startswith(own)
    return f" `{target}` is the target; give the path that it has on your machine." if apart else ""


def _card(
    folder: Path, kind: str, found: dict[str, Any], outlook: Outlook | None, measured: Measured | None, more: str
) -> str:
    target, own = _elsewhere(found["arguments"]["target"]), f"./{folder.name}"
    drafter = f'paceline.load_drafter("{own}")'
    if kind == "pair":
        target, drafter = f"{own}/main", f'"{own}/draft"'
    title, weights = target.removeprefix("./"), f" ({found['weights']})" if found.get("weights") else ""
    lines = [
        "---", "library_name: paceline", "tags: [speculative-decoding]", "---", "",
        f"# {folder.name}: a drafter ({kind}) for {title}", "",
        f"It was trained on the weights of {title}{weights}. It works with other weights of the same architecture, "
        "sizes and vocabulary too, and then fewer of its tokens are accepted. A drafter never changes the text.", "",
        "```python", "import paceline", "",
        f'decoder = paceline.SpeculativeDecoder("{target}", {drafter})', "```", "",
        f"`{own}` is the folder of this page." + _note(target, own), "",
    ]  # fmt: skip
    if measured is not None:
        same = "the texts of plain decoding" if measured.same else "NOT the texts of plain decoding"
        lines += [
            f"Measured by greedy decoding after {measured.prompts} held-out prompts ({measured.tokens} tokens, "
            f"{same}): τ = {measured.tau:.2f} tokens per round, {measured.acceptance:.0%} of the draft accepted.", "",
        ]  # fmt: skip
    if outlook is not None:
        rates = ", ".join(f"{rate:.0%}" for rate in outlook.positions)
        gain = (
            ""
            if outlook.speedup is None
            else f" Predicted on that machine: {outlook.speedup:.2f}× at γ={outlook.gamma}."
        )
        lines += [
            f"Along held-out texts, gone through in rounds as in decoding, a chain is accepted at positions 1 … "
            f"{len(outlook.positions)} with {rates} (each where all before were): τ = {outlook.tau:.2f}.{gain}", "",
        ]  # fmt: skip
    if more:
        lines += [more, ""]
    where = found.get("gpu") or found.get("cpu")
    lines += [f"Trained on {found['date']} by paceline {found['versions']['paceline']} (commit {found.get('commit')}), "
              f"{where}. provenance.json has all arguments.", ""]  # fmt: skip
    return "\n".join(lines)
