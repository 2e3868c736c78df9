"""Can this architecture be read in pieces, branched and rolled back? Tried out when it is loaded, not believed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedError

if TYPE_CHECKING:
    from .language_model import LanguageModel

_TEXT = 9  # tokens of the text the probe reads
_BRANCHES = (-1, -1, 0, 1, 2)  # two branches: 0-2-4 and 1-3


class ProbeText:
    """Two rows of one token difference in length, as a reader sees them."""

    def __init__(self, tokens: Tensor, lengths: list[int]) -> None:
        self.text = tokens
        self.lengths = lengths
        self.length = torch.tensor(lengths, device=tokens.device).view(-1, 1)
        self.histories = [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]
        self.count = self.capacity = len(lengths)
        self.bound: int | None = None


@torch.inference_mode()
def probe(lm: LanguageModel) -> None:
    """Read a ragged pair of texts with a tree of two branches behind each, keep the longer branch, read on; every
    logit must be the one that the model gives for that text on its own, without a cache. Refuse the model if not."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, lm.vocabulary, (2, 32), generator=generator).to(lm.device)
    rows = ProbeText(ids, [_TEXT, _TEXT - 1])
    drafted = torch.randint(0, lm.vocabulary, (2, len(_BRANCHES)), generator=generator).to(lm.device)
    parents = torch.tensor([_BRANCHES, _BRANCHES], device=lm.device)
    try:
        reader = lm.reader()
        reader.begin(rows, 0, 64)  # type: ignore[arg-type]
        seen = reader.extend(rows, 1, drafted, parents).logits  # type: ignore[arg-type]
        reader.keep(rows, torch.tensor([[0, 2, 4], [0, 2, 4]], device=lm.device))  # type: ignore[arg-type]
        longer = torch.stack(
            [torch.cat([ids[r, :n], drafted[r, [0, 2, 4]], ids[r, : 16 - n]]) for r, n in enumerate(rows.lengths)]
        )
        later = ProbeText(longer, [n + 4 for n in rows.lengths])
        after = reader.extend(later, 1).logits  # type: ignore[arg-type]
    except Exception as error:
        raise UnsupportedError(
            f"{_title(lm)} cannot be read through a slot cache and a 4-D mask ({type(error).__name__}: {error})."
        ) from error
    for row, length in enumerate(rows.lengths):
        text = ids[row, :length]
        for node, path in enumerate([[], [0], [1], [0, 2], [1, 3], [0, 2, 4]]):
            _compare(lm, seen[row, node], torch.cat([text, drafted[row, path]]), "a draft that branches")
        _compare(lm, after[row, -1], longer[row, : length + 4], "a text after a branch was rolled back")


def _compare(lm: LanguageModel, got: Tensor, text: Tensor, what: str) -> None:
    wanted = lm.model(input_ids=text[None], use_cache=False).logits[0, -1, : lm.vocabulary].float()
    slack = 1e-3 if lm.dtype in (torch.float32, torch.float64) else 0.1
    if not torch.allclose(got.float(), wanted, atol=slack * float(wanted.std() + 1e-6), rtol=slack):
        raise UnsupportedError(
            f"{_title(lm)} reads {what} differently through a slot cache and a 4-D mask than by itself; it is refused "
            "because its text could come out wrong."
        )


def _title(lm: LanguageModel) -> str:
    return f"{type(lm.model).__name__} ({lm.architecture.name})"
