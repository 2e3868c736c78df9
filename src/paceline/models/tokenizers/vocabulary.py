"""Do two models speak the same language? Token strings are compared, not sizes."""

from __future__ import annotations

from typing import Any

from paceline.common.errors import UnsupportedError

_ADVICE = "use a model with the same tokenizer, or, to draft with this one, the drafter 'cross-vocabulary'"


def check_same_vocabulary(target: Any, draft: Any) -> None:
    """Refuse a draft model whose ids mean other tokens, naming the first that differ."""
    if target.tokenizer is None or draft.tokenizer is None:
        if target.vocabulary != draft.vocabulary:
            raise UnsupportedError(
                f"{draft.name} has {draft.vocabulary} tokens and {target.name} {target.vocabulary}; "
                "a draft model needs the target's vocabulary (give both a tokenizer to compare the tokens themselves)."
            )
        return
    if target.tokenizer is draft.tokenizer:
        return
    ours = {token: name for name, token in target.tokenizer.get_vocab().items()}
    theirs = {token: name for name, token in draft.tokenizer.get_vocab().items()}
    differ = [i for i in sorted(ours.keys() & theirs.keys()) if ours[i] != theirs[i]]
    if differ:
        shown = ", ".join(f"{i} is {ours[i]!r} / {theirs[i]!r}" for i in differ[:3])
        raise UnsupportedError(
            f"{draft.name} does not share the vocabulary of {target.name}: {len(differ)} ids differ ({shown}); "
            f"{_ADVICE}."
        )
    shared = len(ours.keys() & theirs.keys())
    if shared < 0.9 * max(len(ours), len(theirs)):
        raise UnsupportedError(
            f"{draft.name} knows {len(theirs)} tokens and {target.name} {len(ours)}, of which {shared} are the same; "
            f"{_ADVICE}."
        )
