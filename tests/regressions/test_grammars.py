"""How others broke constrained text under speculation, on a tiny model that reads characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline import Budget, Drafter, LanguageModel, ModelOutputError, SpeculativeDecoder, TokenTree
from paceline.core.device_ops import TORCH
from tests.conformance.constraints import Winding
from tests.engine.graph_devices import imitated
from tests.toys import TableModel, letters, llama

ALPHABET = '{}[]":,.-0123456789 ~!abcdefghijnorstuyl'
END = ALPHABET.index("~")
PROMPT = [22, 23, 24]


class Told(Drafter):
    """Proposes these tokens, from where the new text is."""

    def __init__(self, tokens: Sequence[int], start: int = len(PROMPT)) -> None:
        self._tokens, self._start = list(tokens), start

    def propose(self, rows: Any, budget: Budget) -> TokenTree:
        chains = [self._tokens[len(text) - self._start :][: budget.depth] for text in rows.histories]
        return TokenTree.from_chains(chains, "cpu")


def ids(text: str) -> list[int]:
    return [ALPHABET.index(letter) for letter in text]


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    tokenizer = letters(ALPHABET)
    tokenizer.add_special_tokens({"eos_token": "~"})
    return LanguageModel(llama(4), tokenizer, "toy")


def both(lm: LanguageModel, draft: str, **settings: Any) -> tuple[Any, Any]:
    """The texts without a draft and with this one."""
    return tuple(
        SpeculativeDecoder(lm, drafter, gamma=8).generate(PROMPT, **settings) for drafter in (None, Told(ids(draft)))
    )  # type: ignore[return-value]


def test_an_end_inside_a_draft(lm: LanguageModel) -> None:
    """openvino.genai #4081: one more mask was asked for after the end. SGLang #21723: the end was missed."""
    settings = {"choice": ["ab", "abc"], "logit_bias": {END: 50.0}, "eos_token_ids": [END]}
    plain, out = both(lm, "ab~cab~", **settings)
    assert (out.text, out.tokens, out.stop_reason) == (plain.text, plain.tokens, END)
    assert out.text == "ab"
    assert out.stats.accepted == 3


@pytest.mark.parametrize("ends", [{"ignore_eos": True}, {"eos_token_ids": [END]}], ids=["no end token", "an end token"])
def test_a_complete_text_inside_a_draft(lm: LanguageModel, ends: dict[str, Any]) -> None:
    """The text ends at its last token, whatever the draft says after it, and no token needs to follow."""
    for draft in ("abc", "abcabc", "ab!", "abc~"):
        plain, out = both(lm, draft, choice=["abc"], **ends)
        assert (out.text, out.tokens, out.finish_reason) == ("abc", plain.tokens, "stop")
        assert out.stop_reason is plain.stop_reason is None
    assert out.stats.accepted == 3


def test_the_bonus_token_is_of_the_grammar(lm: LanguageModel) -> None:
    """vLLM #44297: the place after the last drafted token had no mask."""
    likely = dict.fromkeys(ids("1357!"), 30.0)
    for draft in ("1", "13", "135"):
        plain, out = both(lm, draft, regex="[12][34][56][78]", temperature=1.0, seed=5, logit_bias=likely)
        assert out.text == plain.text == "1357"
        assert out.stats.accepted == len(draft)


def test_choices_of_one_request_do_not_share_their_place(lm: LanguageModel) -> None:
    """vLLM #11312. A row that leaves the batch early takes nothing with it."""
    grammar = {"json_schema": {"type": "array", "items": {"enum": [1, 20, 300]}, "minItems": 1, "maxItems": 6}}
    settings = {"temperature": 5.0, "seed": [1, 2, 3, 4], "max_new_tokens": [3, 30, 9, 30], **grammar}
    outs = SpeculativeDecoder(lm, "grammar").generate([PROMPT] * 4, **settings)
    for row, out in enumerate(outs):
        alone = {name: value[row] if isinstance(value, list) else value for name, value in settings.items()}
        assert out.tokens == SpeculativeDecoder(lm, None).generate(PROMPT, **alone).tokens
    assert len({out.text for out in outs}) > 2


def test_a_text_that_has_ended_does_not_fail_by_what_follows() -> None:
    """The target also reads the draft after an end of the text. No token can follow there, and none is needed."""
    table = torch.full((6, 6), -5.0)
    for here, there in ((1, 2), (2, 3), (3, 4)):
        table[here, there] = 9.0
    lm = LanguageModel(TableModel(table))
    lm.model.table[3] = float("nan")  # 3 ends the text
    for drafted in ([2, 3], [2, 3, 4, 5]):
        told = Told(drafted, 1)
        out = SpeculativeDecoder(lm, told).generate([1], max_new_tokens=5, eos_token_ids=[3])
        assert (out.tokens, out.stop_reason) == ([2, 3], 3)
        with pytest.raises(ModelOutputError, match="at position 3 of prompt 0"):
            SpeculativeDecoder(lm, told).generate([1], max_new_tokens=5, ignore_eos=True)


def test_rows_with_a_constraint_leave_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are made on the host. The text is the same, also for the rows of the batch without one."""
    prompts, settings = [PROMPT, PROMPT[:2]], {"max_new_tokens": 16, "ignore_eos": True}
    plain = SpeculativeDecoder(LanguageModel(llama(4)), None).generate(
        prompts, constraint=[Winding(), None], **settings
    )
    monkeypatch.setattr(LanguageModel, "ops", TORCH)  # such a device has no kernels of a CPU
    graphs = imitated(monkeypatch)
    decoder = SpeculativeDecoder(LanguageModel(llama(4)), "recycling")
    outs = decoder.generate(prompts, constraint=[Winding(), None], **settings)
    assert [out.tokens for out in outs] == [out.tokens for out in plain]
    assert sum(graph.reused for graph in graphs) == 0
    free = decoder.generate(prompts, **settings)
    assert sum(graph.reused for graph in graphs) > 0
    assert free[1].tokens == plain[1].tokens
    assert free[0].tokens != plain[0].tokens


def test_a_constraint_that_leaves_no_token_is_an_error(lm: LanguageModel) -> None:
    banned = ids("abc")
    for draft in (None, "grammar", Told(ids("abc"))):
        with pytest.raises(ModelOutputError, match="all tokens are forbidden"):
            SpeculativeDecoder(lm, draft).generate(PROMPT, choice=["abc"], banned_tokens=banned)
