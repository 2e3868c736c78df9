"""Drafters inside drafters, and drafters in beam search: what they get, learn and read."""

from __future__ import annotations

import warnings
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from paceline import DRAFTERS, LanguageModel, SpeculativeDecoder
from paceline.core.law import Prefix, edited
from paceline.core.sampling import Sampling, SamplingBatch
from paceline.core.tree_growth import Grower
from paceline.drafters import resolve as making
from paceline.drafters.lookup.ngram import NgramStore
from paceline.drafters.lookup.suffix import SuffixStore
from tests.conformance.models import perturbed
from tests.selection import covering
from tests.toys import LETTERS, letters, llama

pytestmark = pytest.mark.filterwarnings("error::paceline.PacelineWarning")
TARGET = LanguageModel(llama(0))
PROMPT = [1, 2, 3, 1, 2, 3]


@cache
def close() -> LanguageModel:
    return LanguageModel(perturbed(TARGET.model, 0.1))


# ---- a draft model that knows fewer tokens, or more


@cache
def speaker(tokens: int, seed: int = 0) -> LanguageModel:
    names = LETTERS + "ABCDEFGH"
    return LanguageModel(llama(seed, vocab_size=tokens), letters(names[:tokens]), name=f"{tokens} tokens")


def random_head(name: str) -> Any:
    options: Any = DRAFTERS[name].Options
    return options.Head.random


INNER: dict[str, Any] = {
    "draft-model": lambda small: {"name": "draft-model", "model": small, "tree": "levels"},
    "portfolio": lambda small: {"name": "portfolio", "drafters": (("draft-model", {"model": small}), "recycling")},
    "staged": lambda small: {"name": "staged", "model": small},
    "recycling": lambda small: "recycling",
    "trigram": lambda small: "trigram",
    "early-exit": lambda small: "early-exit",
    "self-quantized": lambda small: "self-quantized",
    "eagle": lambda small: lambda lm: {"name": "eagle", "head": random_head("eagle")(lm)},
    "prophet": lambda small: lambda lm: {"name": "prophet", "head": random_head("prophet")(lm)},
}


@pytest.mark.parametrize(("tokens", "inner"), covering([38, 42], INNER))
def test_a_staged_draft_of_another_vocabulary(tokens: int, inner: str) -> None:
    """The texts, the controls and the noise are of the target's vocabulary, at every stage. Once an inner
    draft with a bias of its own width broke the target's verification, and the whole of `generate`."""
    lm, draft, small = speaker(40), speaker(tokens, 1), speaker(tokens, 2)
    prompts = [[1, 2, 39, 4, 1, 2, 39], [5, 6], [38]]
    for settings in ({}, {"logit_bias": {39: 4.0, 3: 1.0}}, {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5}):
        wanted = SpeculativeDecoder(lm, draft=None).generate(prompts, max_new_tokens=20, **settings)
        drafts = []
        for name, options in (("draft-model", {}), ("staged", {"inner": INNER[inner](small)})):
            decoder = SpeculativeDecoder(lm, name, options={"model": draft, **options}, gamma=6)
            outs = decoder.generate(prompts, max_new_tokens=20, **settings)
            assert [out.tokens for out in outs] == [out.tokens for out in wanted]
            drafts.append([[entry.drafted for entry in out.trace.rounds] for out in outs])
        assert drafts[0] == drafts[1]  # and it still drafts what the draft model alone would


def test_a_bias_is_of_the_width_that_asks() -> None:
    batch = SamplingBatch([Sampling(logit_bias={3: 1.0})], [[]], "cpu")
    prefix = Prefix(None, None, torch.zeros(1, 1, dtype=torch.int64), lambda row, place: torch.empty(0))
    for width in (38, 40, 38):
        assert edited(batch, torch.zeros(1, 1, width), prefix).shape == (1, 1, width)


# ---- beam search


@pytest.mark.parametrize("new", range(3, 9))
@pytest.mark.parametrize("name", ["recycling", "lookahead"])
def test_the_last_round_of_a_search_drafts_nothing(name: str, new: int) -> None:
    """After rows have changed places, a draft of the round before was joined to the logits of one place."""
    SpeculativeDecoder(TARGET, name, gamma=2).generate(PROMPT, max_new_tokens=new, num_beams=3)


def test_ranks_change_places_with_their_rows() -> None:
    """early-exit left them behind, so that its shape was fitted to what other rows had drafted."""
    drafter = DRAFTERS["early-exit"](DRAFTERS["early-exit"].Options(tree="optimal"))  # type: ignore[call-arg]
    decoder = SpeculativeDecoder(TARGET, drafter, gamma=3)
    seen: list[list[int]] = []
    reorder = Grower.reorder

    def noted(self: Grower, source: Any) -> None:
        seen.append(list(source))
        reorder(self, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Grower, "reorder", noted)
        decoder.generate(PROMPT, max_new_tokens=12, num_beams=3)
    assert any(source != [0, 1, 2] for source in seen)


def test_a_grower_forgets_the_rows_of_a_draft_that_is_decided() -> None:
    """Else a member of a portfolio that was not asked since looks for rows that came later among those it drafted for
    when rows change places, and fails."""
    options = {"model": close(), "tree": "levels"}
    decoder = SpeculativeDecoder(TARGET, "draft-model", options=options)
    decoder.generate(PROMPT, max_new_tokens=6, num_beams=2)
    grower: Grower = decoder.drafter._grower  # type: ignore[attr-defined]
    grower.reorder([3, 2, 1, 0])


STORES: dict[str, Any] = {
    "suffix": (SuffixStore, "store", {}),
    "ngram": (lambda capacity: NgramStore(3, capacity), "store", {"persistent": True}),
}


def learned(name: str, around: str, beams: int) -> int:
    """How much a store holds after one search, where its drafter is alone or inside another."""
    make, option, more = STORES[name]
    store = make(100_000)
    inner = {option: store, **more}
    options: dict[str, Any] = {
        "alone": inner,
        "portfolio": {"drafters": ((name, inner), "prompt-lookup", "lookahead")},
        "staged": {"model": close(), "inner": {"name": name, **inner}},
    }[around]
    decoder = SpeculativeDecoder(TARGET, name if around == "alone" else around, options=options)
    decoder.generate(PROMPT, max_new_tokens=40, num_beams=beams)
    if name == "suffix":
        return int(store.size(""))
    found = store[""].get((1,))
    return 0 if found is None else int(found.total)


@pytest.mark.parametrize("around", ["portfolio", "staged"])
@pytest.mark.parametrize("name", STORES)
def test_rows_that_change_places_teach_nothing(name: str, around: str) -> None:
    """Each round of a search was once remembered as the end of a request, by stores inside other drafters."""
    assert learned(name, around, 4) == learned(name, "alone", 4)


@pytest.mark.parametrize("inner", ["lookahead", "recycling", "draft-model", "early-exit", "portfolio", "staged"])
@pytest.mark.parametrize("around", ["portfolio", "staged"])
def test_what_is_inside_follows_a_search(around: str, inner: str) -> None:
    """With drafters that follow and drafters that begin again the texts are the same, and a perfect draft model is
    accepted, so its KV cache is right."""
    own = {"draft-model": {"model": TARGET}, "staged": {"model": TARGET}}.get(inner, {})
    options = {"drafters": ((inner, own), "prompt-lookup")}
    if around == "staged":
        options = {"model": TARGET, "inner": {"name": inner, **own}}
    prompts = [PROMPT, [5], [7, 8, 9]]
    settings: dict[str, Any] = {"max_new_tokens": [14, 9, 17], "num_beams": 3}
    decoder = SpeculativeDecoder(TARGET, around, options=options, gamma=4, rows=6)
    outs = decoder.generate(prompts, **settings)
    assert [out.tokens for out in outs] == [
        out.tokens for out in SpeculativeDecoder(TARGET, draft=None).generate(prompts, **settings)
    ]


def test_a_staged_draft_stays_right_in_a_search() -> None:
    """With the target as its draft model it drafts the likeliest continuation of every beam, as draft-model does."""
    drafts = []
    for name in ("draft-model", "staged"):
        out = SpeculativeDecoder(TARGET, name, options={"model": TARGET}, gamma=4).generate(
            PROMPT, max_new_tokens=20, num_beams=3
        )
        drafts.append([entry.drafted for entry in out.trace.rounds])
    assert drafts[0] == drafts[1]


# ---- what is learned when a row ends


def test_a_staged_store_learns_what_was_written() -> None:
    """A row was once released while the notebook still held the last draft."""
    for first in range(6):
        added: list[list[int]] = []

        class Store(SuffixStore):
            def add(self, namespace: str, text: list[int]) -> None:
                added.append(list(text))  # noqa: B023  called before the next one is made

        inner = {"name": "suffix", "store": Store(1000)}
        decoder = SpeculativeDecoder(TARGET, "staged", options={"model": close(), "inner": inner})
        out = decoder.generate([first, 2, 3], max_new_tokens=12, eos_token_ids=[7, 8, 9, 10, 11])
        assert added == [[first, 2, 3, *out.tokens]]


def test_a_staged_ngram_store_survives_the_end_of_a_row() -> None:
    inner = {"name": "ngram", "persistent": True}
    decoder = SpeculativeDecoder(TARGET, "staged", options={"model": close(), "inner": inner}, rows=1)
    outs = decoder.generate([PROMPT, [5, 6, 7]], max_new_tokens=12)
    assert all(out.stats.drafted for out in outs)


# ---- members of a portfolio


@pytest.mark.parametrize("name", ["medusa", "eagle"])
def test_a_head_follows_the_text_in_rounds_it_is_not_asked(name: str) -> None:
    """Hidden states at tokens of other members were once lost for members that did not draft."""
    head = random_head(name)(TARGET)
    options = {"drafters": ("prompt-lookup", (name, {"head": head})), "mode": "first"}
    decoder = SpeculativeDecoder(TARGET, "portfolio", options=options, gamma=3)
    member: Any = decoder.drafter._members[1].drafter  # type: ignore[attr-defined]
    propose, asked = member.propose, []

    def checked(rows: Any, budget: Any) -> Any:
        ids = torch.tensor(rows.histories)
        states = TARGET.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        taps = tuple(states[round(tap * TARGET.layers)][:, :-1] for tap in member.needs_taps)
        place = torch.arange(ids.shape[1] - 1).unsqueeze(0)
        assert torch.allclose(member.places.at(slice(0, 1), place), member.digest(taps), atol=1e-6)
        asked.append(rows.lengths[0])
        return propose(rows, budget)

    member.propose = checked
    decoder.generate([1, 2, 3, 1, 2, 3, 1, 2], max_new_tokens=60)
    assert len(asked) > 5
    assert any(later - sooner > 4 for sooner, later in pairwise(asked))  # it was passed over


def test_reading_anew_makes_room() -> None:
    """A draft model that has more to catch up than the shortest text is long reads all of it again."""
    rows: Any = type("Rows", (), {})()
    rows.text = torch.randint(0, 40, (2, 60))
    rows.count, rows.lengths, rows.length = 2, [50, 3], torch.tensor([[50], [3]])
    rows.capacity, rows.bound = 2, None
    reader = TARGET.reader()
    rows.lengths = [3, 3]
    reader.begin(rows, 0, 3)
    rows.lengths = [50, 3]
    with torch.inference_mode():
        reader.prefill(rows, 0, [49, 2])
        last = reader.extend(rows, 1).logits[0, -1]
        assert torch.allclose(last, TARGET.model(rows.text[:1, :50]).logits[0, -1], atol=1e-9)


def test_models_inside_go_where_the_target_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name: they went to the default device, and a GPU is one."""
    loaded = []

    def load(model: Any, device: Any = "default", **_: Any) -> LanguageModel:
        if isinstance(model, str):
            loaded.append(device)
            return close()
        return model  # type: ignore[no-any-return]

    monkeypatch.setattr(making, "load", load)
    inside = ("portfolio", {"drafters": (("draft-model", {"model": "some/model"}),)})
    SpeculativeDecoder(TARGET, "portfolio", options={"drafters": (inside, ("draft-model", {"model": "another"}))})
    assert loaded == [TARGET.device] * 2


def test_nobody_is_lost_where_readers_are_shared() -> None:
    """A portfolio with early exit inside, in a search: the loop keeps the reader, the member only its shape."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = {"drafters": (("early-exit", {"tree": "optimal"}), "suffix", "lookahead")}
        out = SpeculativeDecoder(TARGET, "portfolio", options=options, gamma=3).generate(
            PROMPT, max_new_tokens=14, num_beams=3
        )
    assert out.tokens == SpeculativeDecoder(TARGET, draft=None).generate(PROMPT, max_new_tokens=14, num_beams=3).tokens
