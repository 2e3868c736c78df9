"""`beam` is Hugging Face's beam search: the same texts and scores, whatever was drafted, in fewer passes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from paceline import CustomGenerate, Generation, LanguageModel, PacelineError, SpeculativeDecoder
from paceline.core.beam_search import BeamSettings, BeamState
from paceline.core.contracts import RULES
from paceline.core.tree import TokenTree
from paceline.engine.beam_rows import BeamGroup
from paceline.engine.loop import Loop
from paceline.models.reader import SlotReader
from paceline.rules.beam import children, walk
from tests.conformance.drafters import PLAIN, Variant, variants
from tests.conformance.models import CASES, EOS, VOCABULARY, build, draft, perturbed, target
from tests.conformance.tokenizer import ByteTokenizer
from tests.selection import covering

PROMPTS = [[1, 7, 9, 4, 7, 9, 4, 7, 9, 11, 2], [3, 3, 8, 3, 3, 8, 3], [6, 21], [13]]
NEW = 14
PAD = 0
MANY_ENDS = [EOS, 11, 17, 23, 30, 38]  # enough ids end a text that beams end
PENALTIES = (1.0, 0.0, 0.6, 2.0, -1.0)
EARLY = (False, True, "never")
WIDTHS = (2, 3, 4)
GRID = list(itertools.product(WIDTHS, PENALTIES, EARLY))


def transformers_beams(lm: LanguageModel, prompt: list[int], **settings: Any) -> list[tuple[list[int], float]]:
    """(new tokens, score) of the returned sequences; a text is as long as its last end of text or its limit."""
    ids = torch.tensor([prompt])
    out = lm.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_scores=True,
        **{"max_new_tokens": NEW, **settings},
    )
    scores = out.sequences_scores.tolist() if out.sequences_scores is not None else [0.0]
    lengths = [int((row >= 0).sum()) for row in out.beam_indices]
    texts = [row[:length] for row, length in zip(out.sequences[:, len(prompt) :].tolist(), lengths, strict=True)]
    return list(zip(texts, scores, strict=True))


def agree(ours: Generation, theirs: list[tuple[list[int], float]]) -> None:
    assert ours.beams is not None
    assert [beam.tokens for beam in ours.beams] == [tokens for tokens, _ in theirs]
    assert [beam.score for beam in ours.beams] == pytest.approx([score for _, score in theirs], abs=1e-4)
    assert ours.tokens == ours.beams[0].tokens
    told = [token for entry in ours.trace.rounds for token in entry.emitted]
    assert told == ours.tokens


def drafted_by(case: str, number: int, width: int, lm: LanguageModel | None = None) -> SpeculativeDecoder:
    """One of the ways to draft, in turn."""
    close = draft(case, "close") if lm is None else LanguageModel(perturbed(lm.model))
    ways: list[tuple[str, dict[str, Any]]] = [
        ("none", {}),
        ("prompt-lookup", {"branches": 3}),
        ("draft-model", {"model": close}),
        ("draft-model", {"model": close, "tree": "levels", "branch": width, "width": width}),
        ("draft-model", {"model": lm or draft(case, "same"), "tree": "best-first", "branch": width, "width": width}),
    ]
    name, options = ways[number % len(ways)]
    return SpeculativeDecoder(lm or target(case), name, options=options, gamma=4)


@pytest.mark.parametrize("case", CASES)
def test_every_architecture_searches_as_transformers_does(case: str) -> None:
    """Five of the 45 settings and all five ways of drafting for each of the 24 models; all settings occur."""
    first = list(CASES).index(case)
    for number in range(5):
        width, penalty, early = GRID[(first * 5 + number) % len(GRID)]
        asked = {"num_beams": width, "num_return_sequences": width, "length_penalty": penalty, "early_stopping": early}
        ends = MANY_ENDS if number % 2 else [EOS]
        prompt = PROMPTS[number % 3]
        theirs = transformers_beams(target(case), prompt, eos_token_id=ends, **asked)
        out = drafted_by(case, first + number, width).generate(prompt, max_new_tokens=NEW, eos_token_ids=ends, **asked)
        agree(out, theirs)


def test_one_beam_is_greedy() -> None:
    for seed in (1, 2):
        lm = LanguageModel(build(CASES["llama"], seed))
        theirs = lm.model.generate(
            torch.tensor([PROMPTS[0]]), max_new_tokens=NEW, eos_token_id=MANY_ENDS, pad_token_id=PAD
        )[0, len(PROMPTS[0]) :].tolist()
        decoder = SpeculativeDecoder(lm, "prompt-lookup", rule="beam", rule_options={"num_beams": 1})
        assert decoder.generate(PROMPTS[0], max_new_tokens=NEW, eos_token_ids=MANY_ENDS).tokens == theirs


@pytest.mark.parametrize(("penalty", "early"), covering(PENALTIES, EARLY))
def test_ends_of_text_decide_alike(penalty: float, early: bool | str) -> None:
    """Where texts end early, the three ways to stop give different results: each must be transformers' own."""
    ended = set()
    for seed in (1, 2):
        lm = LanguageModel(build(CASES["llama"], seed))
        for width in WIDTHS:
            asked: dict[str, Any] = {"num_beams": width, "num_return_sequences": width}
            asked.update(length_penalty=penalty, early_stopping=early)
            expected = transformers_beams(lm, PROMPTS[0], eos_token_id=MANY_ENDS, **asked)
            decoder = drafted_by("llama", seed + 2, width, lm)
            out = decoder.generate(PROMPTS[0], max_new_tokens=NEW, eos_token_ids=MANY_ENDS, **asked)
            agree(out, expected)
            ended |= {beam.finish_reason for beam in out.beams or ()}
    assert "stop" in ended


@pytest.mark.parametrize("rows", [16, 5, 1])
def test_a_ragged_batch_is_each_prompt_alone(rows: int) -> None:
    """Groups of different widths side by side, admitted as room allows, do not feel each other."""
    lm = target("llama")
    options = {"model": draft("llama", "close"), "tree": "levels", "branch": 3, "width": 3}
    decoder = SpeculativeDecoder(lm, "draft-model", options=options, gamma=3, rows=rows)
    widths = [4, 2, 1, 3]
    together = decoder.generate(
        PROMPTS,
        num_beams=widths,
        num_return_sequences=widths,
        max_new_tokens=[NEW, 5, NEW, 9],
        eos_token_ids=MANY_ENDS,
        length_penalty=0.5,
    )
    for out, prompt, width, new in zip(together, PROMPTS, widths, [NEW, 5, NEW, 9], strict=True):
        if width == 1:
            alone = PLAIN.decoder("llama").generate(prompt, max_new_tokens=new, eos_token_ids=MANY_ENDS)
            assert out.tokens == alone.tokens
            assert out.beams is None
            continue
        asked = {"num_beams": width, "num_return_sequences": width, "length_penalty": 0.5, "max_new_tokens": new}
        agree(out, transformers_beams(lm, prompt, eos_token_id=MANY_ENDS, **asked))


ONE_OF_EACH = {variant.drafter: variant for variant in variants(("close",))} | {
    f"{variant.drafter}-tree": variant for variant in variants(("close",)) if not variant.chain
}


@pytest.mark.parametrize("variant", ONE_OF_EACH.values(), ids=str)
def test_every_drafter_may_draft_for_beams(variant: Variant) -> None:
    """Rows that change places are the hardest test of a drafter's memory: it must not fail, nor change the result."""
    lm = target("llama")
    asked: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": NEW}
    for prompt, out in zip(
        PROMPTS, variant.decoder("llama", gamma=3).generate(PROMPTS, eos_token_ids=[EOS], **asked), strict=True
    ):
        agree(out, transformers_beams(lm, prompt, eos_token_id=EOS, **asked))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"banned_tokens": [4, 9, 11]}, {"bad_words_ids": [[4], [9], [11]]}),
        ({"min_new_tokens": 6}, {"min_new_tokens": 6}),
        ({"logit_bias": {7: 1.5, 8: -2.0}}, {"sequence_bias": {(7,): 1.5, (8,): -2.0}}),
    ],
    ids=str,
)
def test_controls_see_the_beam_they_judge(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """A control that saw another beam's text, or worked on logits instead of log-probabilities, would part ways."""
    asked = {"num_beams": 3, "num_return_sequences": 3}
    expected = transformers_beams(target("llama"), PROMPTS[0], eos_token_id=MANY_ENDS, **asked, **theirs)
    for number in range(5):
        out = drafted_by("llama", number, 3).generate(
            PROMPTS[0], max_new_tokens=NEW, eos_token_ids=MANY_ENDS, **asked, **ours
        )
        agree(out, expected)


def test_a_criterion_of_the_caller_ends_a_beam() -> None:
    def nine_is_in(ids: list[int]) -> bool:
        return 9 in ids[len(PROMPTS[2]) :]

    def theirs(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.tensor([nine_is_in(row) for row in ids.tolist()])

    asked: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3}
    expected = transformers_beams(target("llama"), PROMPTS[2], eos_token_id=EOS, stopping_criteria=[theirs], **asked)
    out = drafted_by("llama", 3, 3).generate(
        PROMPTS[2], max_new_tokens=NEW, eos_token_ids=[EOS], criteria=[nine_is_in], **asked
    )
    agree(out, expected)


def test_stop_strings_end_beams_as_a_criterion_does() -> None:
    """A stop string inside, across and at the end of tokens; the criterion is compared with transformers above."""
    lm = LanguageModel(target("llama").model, ByteTokenizer(), "llama")
    close = LanguageModel(draft("llama", "close").model, ByteTokenizer(), "draft")
    found = set()
    for stop in (["b"], ["xy"], ["c", "ya"], ["é"], ["d", "e", "f", "g"]):

        def has_stop(ids: list[int], stop: list[str] = stop) -> bool:
            text = ByteTokenizer().decode(ids[len(PROMPTS[0]) :])
            return any(string in text for string in stop)

        asked: dict[str, Any] = {
            "num_beams": 3,
            "num_return_sequences": 3,
            "max_new_tokens": NEW,
            "eos_token_ids": [EOS],
        }
        expected = SpeculativeDecoder(lm, None).generate(PROMPTS[0], criteria=[has_stop], **asked)
        options = {"model": close, "tree": "levels", "branch": 3, "width": 3}
        decoder = SpeculativeDecoder(lm, "draft-model", options=options, gamma=4)
        out = decoder.generate(PROMPTS[0], stop=stop, **asked)
        assert [(b.tokens, b.score) for b in out.beams] == [(b.tokens, b.score) for b in expected.beams]
        for beam in out.beams:
            text = ByteTokenizer().decode(beam.tokens)
            ends = [text.index(string) for string in stop if string in text]
            assert beam.text == (text[: min(ends)] if ends else text)
            found.add(bool(ends))
        assert out.text == out.beams[0].text
    assert found == {True, False}


def test_log_probabilities_of_beams_are_those_of_the_bare_model() -> None:
    """Raw ones by a forward pass without a cache; the processed ones add up to the score."""
    lm, asked = target("llama"), {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": NEW, "logprobs": 2}
    controls: dict[str, Any] = {"logit_bias": {7: 1.5, 8: -2.0}, "length_penalty": 0.7, "eos_token_ids": MANY_ENDS}
    plain = PLAIN.decoder("llama").generate(PROMPTS[0], **asked, **controls)
    for number in range(5):
        out = drafted_by("llama", number, 3).generate(PROMPTS[0], **asked, **controls)
        assert [beam.tokens for beam in out.beams] == [beam.tokens for beam in plain.beams]
        assert out.logprobs == out.beams[0].logprobs
        for beam in out.beams:
            assert [entry.token for entry in beam.logprobs] == beam.tokens
            total = sum(entry.processed for entry in beam.logprobs)
            assert total / len(beam.tokens) ** 0.7 == pytest.approx(beam.score, abs=1e-5)
            logits = lm.model(input_ids=torch.tensor([PROMPTS[0] + beam.tokens])).logits[0, len(PROMPTS[0]) - 1 : -1]
            bare = logits.detach().log_softmax(-1)
            for place, entry in enumerate(beam.logprobs):
                assert entry.raw == pytest.approx(float(bare[place, entry.token]), abs=1e-5)
                assert [token for token, _ in entry.top_raw] == bare[place].topk(2).indices.tolist()
                assert len(entry.top_processed) == 2
                bias = {7: 1.5, 8: -2.0}.get(entry.token, 0.0)
                assert entry.processed == pytest.approx(entry.raw + bias, abs=1e-5)
    without = drafted_by("llama", 3, 3).generate(PROMPTS[0], num_beams=3, max_new_tokens=NEW)
    assert without.logprobs is None
    assert without.beams[0].logprobs is None


def test_the_other_length_penalty_compares_lengths_by_its_formula() -> None:
    """((m + L) / (m + 1)) ** α: 1 for a text of one token, and L ** α for m = 0."""
    scores = torch.tensor([-3.0])
    for length, alpha, offset in itertools.product((1, 2, 9), (0.0, 0.6, 2.0, -1.0), (0.0, 1.0, 5.0)):
        settings = BeamSettings(2, 10, alpha, length_offset=offset)
        expected = -3.0 / ((offset + length) / (offset + 1)) ** alpha
        assert float(settings.penalised(scores, length)) == pytest.approx(expected)
    asked: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": NEW, "logprobs": 0}
    out = drafted_by("llama", 3, 3).generate(
        PROMPTS[0], eos_token_ids=MANY_ENDS, length_penalty=1.5, length_offset=5, **asked
    )
    for beam in out.beams:
        total = sum(entry.processed for entry in beam.logprobs)
        assert beam.score == pytest.approx(total / ((5 + len(beam.tokens)) / 6) ** 1.5, abs=1e-5)


def test_a_top_k_per_beam_limits_what_each_beam_proposes() -> None:
    """By enumeration by hand: at each depth only the two likeliest children of a beam compete."""
    lm, width, depth = target("llama"), 3, 5

    def by_hand(top_k: int) -> list[list[int]]:
        beams = [([], 0.0)]
        for _ in range(depth):
            grown = []
            for tokens, score in beams:
                law = (
                    lm.model(input_ids=torch.tensor([PROMPTS[0] + tokens]))
                    .logits[0, -1]
                    .detach()
                    .log_softmax(-1)
                    .topk(top_k)
                )
                pairs = zip(law.indices.tolist(), law.values.tolist(), strict=True)
                grown += [([*tokens, token], score + value) for token, value in pairs]
            beams = sorted(grown, key=lambda beam: -beam[1])[:width]
        return [tokens for tokens, _ in beams]

    results = []
    for top_k in (1, 2, 3, VOCABULARY):
        asked: dict[str, Any] = {"num_beams": width, "num_return_sequences": width, "max_new_tokens": depth}
        for number in (0, 3):
            out = drafted_by("llama", number, width).generate(PROMPTS[0], beam_top_k=top_k, ignore_eos=True, **asked)
            assert [beam.tokens for beam in out.beams] == by_hand(top_k)
        results.append(out.beams[-1].tokens)
    assert len({tuple(tokens) for tokens in results}) > 1  # the limit matters here


# ---- fewer passes


@pytest.mark.parametrize("width", WIDTHS)
def test_a_perfect_tree_needs_one_pass_for_all_its_depths(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's best `width` texts of each row hold all beams: then every pass is gamma + 1 steps of the search."""
    lm, twin = target("llama"), LanguageModel(build(CASES["llama"]))
    passes = []
    extend = SlotReader.extend

    def counted(self: SlotReader, *args: Any) -> Any:
        passes.append(1) if self.lm is lm else None
        return extend(self, *args)

    monkeypatch.setattr(SlotReader, "extend", counted)
    options = {"model": twin, "tree": "levels", "branch": width, "width": width}
    decoder = SpeculativeDecoder(lm, "draft-model", options=options, gamma=4, nodes=128)
    out = decoder.generate(PROMPTS[0], num_beams=width, max_new_tokens=NEW, ignore_eos=True)
    assert len(out.tokens) == NEW
    assert len(passes) == out.stats.rounds == math.ceil(NEW / 5)
    assert out.stats.emitted == NEW


def test_a_close_draft_saves_passes_and_none_saves_none() -> None:
    asked: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 24, "ignore_eos": True}
    options = {"model": draft("llama", "close"), "tree": "levels", "branch": 4, "width": 4}
    drafted = SpeculativeDecoder(target("llama"), "draft-model", options=options, nodes=128).generate(
        PROMPTS[0], **asked
    )
    plain = PLAIN.decoder("llama").generate(PROMPTS[0], **asked)
    assert plain.stats.rounds == len(plain.tokens) == 24
    assert drafted.stats.rounds < 18
    assert drafted.tokens == plain.tokens


# ---- memory


@pytest.mark.parametrize("case", ["llama", "mistral", "gpt2", "bloom"])
@pytest.mark.parametrize("tree", ["chain", "levels"])
def test_memory_follows_the_rows(case: str, tree: str) -> None:
    """After rows changed places, both models must go on as if they had read every beam afresh."""
    lm, drafting = target(case), draft(case, "close")
    options = {"model": drafting, "tree": tree, "branch": 3, "width": 3}
    decoder = SpeculativeDecoder(lm, "draft-model", options=options, gamma=3)
    rows = decoder._rows(PROMPTS[:2], decoder._requests(2, {"num_beams": 3, "max_new_tokens": 20, "ignore_eos": True}))
    loop = Loop(lm, decoder.drafter, RULES["beam"](), 3, 64)
    loop.admit([live for row in rows if row.group for live in row.group.rows])
    storage_version = 0
    for _ in range(5):
        before = [list(text) for text in loop.rows.histories]
        loop.step()
        storage_version += any(new[: len(old)] != old for new, old in zip(loop.rows.histories, before, strict=True))
        with torch.inference_mode():
            message = loop.reader.extend(loop.rows, 1).logits[:, -1]
            loop.reader.keep(loop.rows, None)
            for row, text in enumerate(loop.rows.histories):
                assert loop.rows.text[row, : loop.rows.lengths[row]].tolist() == text
                fresh = lm.model(input_ids=torch.tensor([text])).logits[0, -1]
                assert torch.allclose(message[row], fresh, atol=CASES[case].tolerance)
    assert storage_version > 0
    assert decoder.drafter is loop.drafter  # it did not fail
    budget = loop.limits.budget(loop.rows)
    with torch.inference_mode():
        loop.rows.begin_round(budget.depth)
        tokens = loop.drafter.propose(loop.rows, budget).tokens[:, 0].tolist()
        for token, text in zip(tokens, loop.rows.histories, strict=True):
            assert token == int(drafting.model(input_ids=torch.tensor([text])).logits[0, -1].argmax())


# ---- the mathematics


def test_a_search_that_drops_nothing_finds_the_best_text() -> None:
    """With a beam for every text of a toy language, the result is the best of them all by enumeration."""
    vocabulary, limit, end = 3, 4, 2
    generator = torch.Generator().manual_seed(5)
    laws = {
        text: torch.randn(vocabulary, generator=generator).log_softmax(-1)
        for size in range(limit)
        for text in itertools.product(range(vocabulary), repeat=size)
    }
    for penalty in (0.0, 1.0):
        state = BeamState.start(BeamSettings(27, limit, penalty, "never", (end,)))
        while not state.done:
            values = torch.stack([laws[beam.tokens] for beam in state.beams])
            state = state.begin_round().step(values, torch.arange(vocabulary).expand_as(values))
        finished = {}
        for size in range(1, limit + 1):
            for text in itertools.product(range(vocabulary), repeat=size):
                if end not in text[:-1] and (text[-1] == end or size == limit):
                    score = sum(float(laws[text[:i]][token]) for i, token in enumerate(text))
                    finished[text] = score / size**penalty
        assert state.results[0].tokens == max(finished, key=lambda text: finished[text])
        assert state.results[0].score == pytest.approx(max(finished.values()), abs=1e-5)


def test_the_walk_stops_where_one_beam_was_not_drafted() -> None:
    """Two beams, tokens 0 and 1; only token 0 goes on in the tree, so the second depth is not walked."""
    log = torch.tensor([0.6, 0.3, 0.1]).log()
    values = log.sort(descending=True)
    both = TokenTree(torch.tensor([[0, 1], [0, 1]]), torch.tensor([[-1, -1], [-1, -1]]))
    one = TokenTree(torch.tensor([[0, 2], [0, 1]]), torch.tensor([[-1, -1], [-1, -1]]))
    start = BeamState.start(BeamSettings(2, 10)).begin_round()
    for tree, steps in ((both, 2), (one, 1)):
        state = walk(start, [0, 1], values.values.expand(2, 3, 3), values.indices.expand(2, 3, 3), children(tree))
        assert [len(beam.tokens) for beam in state.beams] == [steps, steps]
        assert all(beam.row == 0 for beam in state.beams)  # the second row is the same prompt: it does not count


# ---- the interface


def test_one_decoder_does_both_and_streams_both() -> None:
    decoder = drafted_by("llama", 3, 3)
    asked: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_ids": [EOS]}
    plain = PLAIN.decoder("llama")
    beams = decoder.generate(PROMPTS[0], num_beams=3, **asked)
    for settings in ({}, {"temperature": 0.9, "seed": 3}):
        assert decoder.generate(PROMPTS[0], **asked, **settings).tokens == (
            plain.generate(PROMPTS[0], **asked, **settings).tokens
        )
    pieces = list(decoder.stream(PROMPTS[0], num_beams=3, **asked))
    assert [piece.token for piece in pieces] == beams.tokens
    assert [piece.from_draft for piece in pieces] == beams.trace.from_draft
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == beams.finish_reason
    assert (beams.stats.rule, beams.stats.lossy) == ("beam", False)


def test_the_rule_by_name_searches_with_four_beams() -> None:
    by_name = SpeculativeDecoder(target("llama"), draft=None, rule="beam").generate(PROMPTS[0], max_new_tokens=NEW)
    by_number = SpeculativeDecoder(target("llama"), draft=None).generate(PROMPTS[0], max_new_tokens=NEW, num_beams=4)
    assert by_name.beams == by_number.beams
    assert by_name.beams is not None


def test_a_cancelled_search_gives_its_best_so_far() -> None:
    rounds = iter(range(100))
    out = PLAIN.decoder("llama").generate(
        PROMPTS[0], num_beams=3, max_new_tokens=NEW, ignore_eos=True, cancel=lambda: next(rounds) >= 4
    )
    assert out.finish_reason == "cancelled"
    assert len(out.tokens) == out.stats.rounds == 4


def test_the_end_of_the_context_ends_the_search() -> None:
    lm = target("llama")
    prompt = (PROMPTS[0] * 9)[: lm.context - 3]
    out = drafted_by("llama", 3, 2).generate(prompt, num_beams=2, max_new_tokens=NEW, ignore_eos=True)
    assert (len(out.tokens), out.finish_reason) == (3, "length")
    agree(out, transformers_beams(lm, prompt, num_beams=2, max_new_tokens=3, eos_token_id=None)[:1])


def test_a_broken_model_is_noticed() -> None:
    model = build(CASES["llama"])
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(PacelineError, match="No token can be chosen at position 2 of prompt 0"):
        SpeculativeDecoder(LanguageModel(model), draft=None).generate([6, 21], num_beams=2, max_new_tokens=4)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num_beams": 0}, "num_beams must be a whole number of at least 1, got 0"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences=3 is more than num_beams=2"),
        ({"num_beams": 2, "temperature": 0.7}, "num_beams=2 searches and temperature=0.7 samples"),
        ({"num_beams": 2, "top_k": 5}, "num_beams=2 searches"),
        ({"num_beams": 2, "beam_top_k": 0}, "beam_top_k must be a whole number of at least 1, got 0"),
        ({"num_beams": 2, "length_offset": -1}, "length_offset must be a finite number of at least 0, got -1"),
        ({"beam_top_k": 2}, "beam_top_k belongs to beam search"),
        ({"length_offset": 5}, "length_offset belongs to beam search"),
        ({"num_beams": 2, "early_stopping": "always"}, "early_stopping must be True, False or 'never'"),
        ({"num_beams": 2, "length_penalty": math.inf}, "length_penalty must be a finite number"),
        ({"length_penalty": 2.0}, "length_penalty belongs to beam search"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(PacelineError, match=message):
        PLAIN.decoder("llama").generate(PROMPTS[0], **asked)


def test_a_group_knows_what_will_stay() -> None:
    """Stores learn only what is settled: a beam's text may still be given up, but not what all beams share."""
    decoder = PLAIN.decoder("llama")
    row = decoder._rows([PROMPTS[0]], decoder._requests(1, {"num_beams": 2, "ignore_eos": True}))[0]
    group = row.group
    assert isinstance(group, BeamGroup)
    assert group.settled == 0
    loop = Loop(decoder.target, decoder.drafter, RULES["beam"](), 1, 1)
    loop.admit(group.rows)
    for _ in range(8):
        loop.step()
        first, second = (beam.tokens for beam in group.state.beams)
        assert first[: group.settled] == second[: group.settled]
        assert loop.rows.settled == [len(PROMPTS[0]) + group.settled] * 2


# ---- behind transformers' own generate, and on the command line


@pytest.mark.parametrize("early", EARLY)
def test_the_drop_in_searches_too(early: bool | str) -> None:
    """Padded prompts, two sequences back, all of transformers' processors: what model.generate gives without it."""
    model = target("llama").model
    ids = torch.tensor([[PAD] * (len(PROMPTS[0]) - len(prompt)) + prompt for prompt in PROMPTS[:3]])
    asked: dict[str, Any] = {
        "attention_mask": (ids != PAD).long(),
        "max_new_tokens": NEW,
        "do_sample": False,
        "num_beams": 3,
        "num_return_sequences": 2,
        "length_penalty": 0.7,
        "early_stopping": early,
        "eos_token_id": MANY_ENDS,
        "pad_token_id": PAD,
        "repetition_penalty": 1.2,
        "min_new_tokens": 2,
    }
    ours = model.generate(ids, custom_generate=CustomGenerate("prompt-lookup"), **asked)
    assert ours.tolist() == model.generate(ids, **asked).tolist()
    with pytest.raises(PacelineError, match="num_beams=3 with do_sample=True"):
        model.generate(ids, custom_generate=CustomGenerate(), **{**asked, "do_sample": True})


def test_the_command_line_has_the_words() -> None:
    from paceline.cli.command_options import GenerateOptions
    from paceline.cli.decoder_session import read_settings

    told = read_settings(GenerateOptions(prompt="a", beams=3, length_penalty=0.5, early_stopping=True))
    assert told == {"max_new_tokens": 128, "num_beams": 3, "length_penalty": 0.5, "early_stopping": True}
    with pytest.raises(PacelineError, match="early_stopping must be never or true or false or None, got 'soon'"):
        GenerateOptions(prompt="a", beams=3, early_stopping="soon")
