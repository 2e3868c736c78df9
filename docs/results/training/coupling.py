"""How far a draft-lm's laws are from the target's along sampled texts, and what rules of acceptance make of that:

    .venv/bin/python docs/results/training/coupling.py PROMPTS.jsonl [PROMPTS A CATEGORY] [FOLDER ...]

The target writes 128 tokens at temperature 0.8 after each prompt; both say their laws along them. From these follow how
likely a drafted token is the one that was written, by `match` (the same noise for both, so that texts stay the same)
and by the best rule that looks at one token after the other and may write other texts; and from that the tokens per
pass to expect of chains of 5, as the mean over categories. FOLDER: a draft-lm; without one, the one that comes along.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from tau import prompts_of  # beside this file
from torch import Tensor

import paceline
from paceline.drafters.models.draft_lm import SavedLayers
from paceline.drafters.shipped import ROOT

HEAT, GAMMA = 0.8, 5
Rule = Callable[[Tensor, Tensor, Tensor], Tensor]  # log-laws [P,V] of target and draft, tokens [P,1] -> [P]


def by_match(target: Tensor, draft: Tensor, token: Tensor) -> Tensor:
    """The draft chooses what the target has chosen, by the same noise: it is the likelier the less any other token's
    odds rise from the one law to the other."""
    odds = draft + (target - draft).gather(1, token)
    return 1 / torch.maximum(target, odds).exp().sum(-1)


def at_best(target: Tensor, draft: Tensor, token: Tensor) -> Tensor:
    """By a coupling that keeps as much as the two laws share."""
    return (draft - target).gather(1, token).exp().clamp(max=1).squeeze(1)


RULES: dict[str, Rule] = {"match": by_match, "the best rule": at_best}


def rounds(chances: list[float]) -> float:
    """That a text takes to be expected, where the token at each place is accepted by these chances."""
    left = [0.0] * (len(chances) + GAMMA + 2)  # from each place on
    for start in range(len(chances) - 1, -1, -1):
        here, found = 1.0, 1.0
        for place in range(start, min(start + GAMMA, len(chances))):
            found += here * (1 - chances[place]) * left[place + 1]
            here *= chances[place]
        left[start] = found + here * left[start + GAMMA + 1]
    return left[0]


def laws(model: Any, ids: Tensor, given: int, vocabulary: int) -> Tensor:
    logits = model(input_ids=ids).logits[0, given - 1 : -1, :vocabulary]
    return (logits / HEAT).log_softmax(-1)  # type: ignore[no-any-return]


@torch.inference_mode()
def main(path: str, many: int, folders: list[str]) -> None:
    lm = paceline.load("smollm2-135m", dtype="float32")
    decoder = paceline.SpeculativeDecoder(lm, "eagle")
    folders = folders or [str(ROOT / "smollm2-135m" / "draft-lm")]
    models = [SavedLayers.load(each).fitted(lm).model(lm) for each in folders]
    far: dict[str, list[Tensor]] = {each: [] for each in folders}
    kept: dict[tuple[str, str], list[Tensor]] = {(each, rule): [] for each in folders for rule in RULES}
    taus: dict[tuple[str, str], list[float]] = {(each, rule): [] for each in folders for rule in RULES}
    for chats in prompts_of(path, many).values():
        tokens, passes = 0, dict.fromkeys(taus, 0.0)
        for chat in chats:
            out = decoder.generate(chat, max_new_tokens=128, temperature=HEAT, seed=1)
            given = lm.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
            ids, token = torch.tensor([[*given, *out.tokens]]), torch.tensor(out.tokens).unsqueeze(1)
            target = laws(lm.model, ids, len(given), lm.vocabulary)
            tokens += len(out.tokens)
            for folder, model in zip(folders, models, strict=True):
                draft = laws(model, ids, len(given), lm.vocabulary)
                far[folder].append((target.exp() - draft.exp()).abs().sum(-1) / 2)
                for rule, chance in RULES.items():
                    chances = chance(target, draft, token)
                    kept[folder, rule].append(chances)
                    passes[folder, rule] += rounds(chances.tolist())
        for key in taus:
            taus[key].append(tokens / passes[key])
    for folder in folders:
        print(f"{folder}: {len(torch.cat(far[folder]))} places, total variation {torch.cat(far[folder]).mean():.3f}")
        for rule in RULES:
            share, tau = torch.cat(kept[folder, rule]).mean(), sum(taus[folder, rule]) / len(taus[folder, rule])
            print(f"  by {rule}: {share:.3f} of all places accepted, τ {tau:.2f} to be expected", flush=True)


if __name__ == "__main__":
    said = sys.argv[2:]
    main(sys.argv[1], int(said.pop(0)) if said and said[0].isdigit() else 2, said)
