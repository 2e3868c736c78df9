"""How far a draft-lm's laws are from the target's along sampled texts, and what a coupling makes of that:

    .venv/bin/python docs/results/training/coupling.py PROMPTS.jsonl [PROMPTS A CATEGORY] [FOLDER ...]

The target writes 128 tokens at temperature 0.8 after each prompt; both say their laws along them. No coupling accepts
more than 1 less the total variation; `match` (the same noise for both, so that texts stay the same) is tried with four
draws of the noise. FOLDER: a draft-lm; without one, the one that comes along.
"""

from __future__ import annotations

import sys

import torch
from tau import prompts_of  # beside this file
from torch import Tensor

import paceline
from paceline.drafters.draft_lm import SavedLayers
from paceline.drafters.shipped import ROOT

HEAT = 0.8


def laws(lm: paceline.LanguageModel, models: list[object], path: str, many: int) -> list[Tensor]:
    """[P,V] logarithms of the target's law at each place of its texts, and of each model's."""
    decoder, found = paceline.SpeculativeDecoder(lm, "eagle"), [[] for _ in range(1 + len(models))]
    for chats in prompts_of(path, many).values():
        for chat in chats:
            out = decoder.generate(chat, max_new_tokens=128, temperature=HEAT, seed=1)
            given = lm.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
            ids = torch.tensor([[*given, *out.tokens]])
            for pile, model in zip(found, [lm.model, *models], strict=True):
                logits = model(input_ids=ids).logits[0, len(given) - 1 : -1, : lm.vocabulary]
                pile.append((logits / HEAT).log_softmax(-1))
    return [torch.cat(pile) for pile in found]


def alike(target: Tensor, draft: Tensor, draws: int = 4) -> float:
    """How often both choose the same token by the same noise."""
    chance, hits = torch.Generator().manual_seed(0), 0.0
    for _ in range(draws):
        noise = -torch.empty_like(target).exponential_(generator=chance).log()
        hits += float(((target + noise).argmax(-1) == (draft + noise).argmax(-1)).float().mean())
    return hits / draws


@torch.inference_mode()
def main(path: str, many: int, folders: list[str]) -> None:
    lm = paceline.load("smollm2-135m", dtype="float32")
    folders = folders or [str(ROOT / "smollm2-135m" / "draft-lm")]
    target, *drafts = laws(lm, [SavedLayers.load(each).fitted(lm).model(lm) for each in folders], path, many)
    for folder, draft in zip(folders, drafts, strict=True):
        far = float((target.exp() - draft.exp()).abs().sum(-1).mean()) / 2
        print(
            f"{folder}: {len(target)} places, total variation {far:.3f}, accepted by `match` {alike(target, draft):.3f}"
        )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2, sys.argv[3:])
