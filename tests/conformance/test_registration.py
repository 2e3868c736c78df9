"""A drafter that registers itself is in the suite with no further line of test code. Here is how it is found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from paceline import Budget, Drafter, LanguageModel, TokenTree
from paceline.core.contracts import DRAFTERS

from .drafters import Variant, variants
from .models import target
from .test_identity import check_identity


class Echo(Drafter):
    """Say the last token again: as little as a drafter can do."""

    @dataclass(frozen=True)
    class Options:
        how: Literal["once", "twice"] = "once"
        branches: int = 1
        heads: Any = None

        @classmethod
        def conformance_variants(cls) -> list[Mapping[str, Any]]:
            return [{"heads": lambda lm: [lm.vocabulary] * 2}]

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()

    def propose(self, rows: Any, budget: Budget) -> TokenTree:
        times = min(budget.depth, 1 if self.options.how == "once" else 2)
        return TokenTree.from_chains([[history[-1]] * times for history in rows.histories], "cpu")


class Shadow(Echo):
    """One that runs a model."""

    @dataclass(frozen=True)
    class Options:
        model: LanguageModel | None = None


@pytest.fixture
def newcomers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS._found, "echo", Echo)  # type: ignore[attr-defined]
    monkeypatch.setitem(DRAFTERS._found, "shadow", Shadow)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("newcomers")
def test_topologies_come_from_the_options() -> None:
    found = [variant for variant in variants() if variant.drafter == "echo"]
    assert [str(variant) for variant in found] == [
        "echo-how=once",
        "echo-how=once-branches=3",
        "echo-how=twice",
        "echo-how=twice-branches=3",
        "echo-heads=made",
    ]
    assert found[-1].made_for(target("llama"), "llama") == {"heads": [40, 40]}
    assert [variant.draft for variant in variants() if variant.drafter == "shadow"] == ["blind", "close", "same"]


@pytest.mark.usefixtures("newcomers")
def test_a_newcomer_runs() -> None:
    check_identity("gemma3", Variant("echo", {"how": "twice"}))


def test_everything_that_is_registered_is_tried() -> None:
    """`none` is the reference that the others are compared with."""
    assert {variant.drafter for variant in variants()} == set(DRAFTERS) - {"none"}
