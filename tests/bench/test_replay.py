"""A replay has the rounds of the engine, or gives a reason why they are unknown."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import paceline
from paceline.bench.candidate import RunSpec
from paceline.bench.replay import Replayed, lines, replay, replay_all, rerun
from paceline.bench.trace_files import TraceFile, TraceText, header_of
from paceline.common.errors import UnknownNameError, UnsupportedError
from paceline.core.contracts import DRAFTERS, Budget, RowsView
from paceline.core.costs import Costs
from paceline.core.protocols import Replayable
from paceline.core.trace import Trace
from paceline.core.tree import TokenTree
from paceline.drafters.lookup.base import HostDrafter
from paceline.drafters.resolve import replay_needs
from paceline.models.language_model import LanguageModel
from paceline.rules.match import Match
from tests import toys
from tests.selection import covering

BEGINNINGS = ([3, 1, 4, 1, 5], [7, 8, 7])
TOKENS = 30
SAMPLED = {"temperature": 0.15, "top_k": 12, "seed": 5}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "penalties": {"repetition_penalty": 1.15, "presence_penalty": 0.2},
}
PLAIN = RunSpec("plain", "none")
CHAIN = RunSpec("model", "draft-model", {"model": "small"}, gamma=4)
COSTS = Costs({1: {1: 1.0, 2: 1.1, 9: 1.8}}, overhead=0.1, drafters={"suffix": 0.01, "draft-model": 0.2})


WEIGHTS = {"seed": 1, "initializer_range": 0.2}  # its texts repeat themselves now and then


@cache
def prompts() -> list[list[int]]:
    """Of words that the target uses itself."""
    return [[*start, *toys.naive(toys.llama(**WEIGHTS), start, 14)] for start in BEGINNINGS]


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return paceline.load(toys.llama(**WEIGHTS))


@pytest.fixture(scope="module")
def draft() -> LanguageModel:
    """The target with a little noise on its weights: often right, not always."""
    model = toys.llama(**WEIGHTS)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for weight in model.parameters():
            weight += 0.02 * torch.randn_like(weight)
    return paceline.load(model)


@pytest.fixture(scope="module")
def plain(target: LanguageModel) -> dict[str, TraceFile]:
    """What plain decoding writes: all replays start from it."""
    return {name: record(target, settings=settings) for name, settings in SETTINGS.items()}


def decoder_of(lm: LanguageModel, entry: RunSpec, model: LanguageModel | None = None) -> paceline.SpeculativeDecoder:
    options = {**entry.options, **({} if model is None else {"model": model})}
    return paceline.SpeculativeDecoder(
        lm, entry.draft, options=options, gamma=entry.gamma, nodes=entry.nodes, rule=entry.rule,
        rule_options=entry.rule_options,
    )  # fmt: skip


def record(
    lm: LanguageModel,
    entry: RunSpec = PLAIN,
    settings: dict[str, Any] | None = None,
    model: LanguageModel | None = None,
    fresh: bool = True,
    tokens: int = TOKENS,
) -> TraceFile:
    """Decode the prompts, each with a fresh drafter, or one after the other with one."""
    settings = {"max_new_tokens": tokens, **(settings or {})}
    decoder = decoder_of(lm, entry, model)
    texts = []
    for number, prompt in enumerate(prompts()):
        decoder = decoder_of(lm, entry, model) if fresh else decoder
        out = decoder.generate(prompt, **settings)
        limit = min(tokens, lm.context - len(prompt))
        written = (tuple(prompt), tuple(out.tokens), limit, out.finish_reason, out.seed)
        texts.append(TraceText(str(number), f"c{number % 2}", *written, rounds=tuple(out.trace.rounds)))
    return TraceFile(header_of(lm, entry, settings), tuple(texts))


def shown(rounds: Any) -> list[tuple[Any, ...]]:
    return [(r.drafted, r.parents, r.path, r.own, r.bonus if r.own is not None else None) for r in rounds]


def same_rounds(answer: Replayed, real: TraceFile) -> None:
    assert answer.knows == "exact", answer.reason
    assert answer.notes == ()
    for text, other in zip(answer.texts, real.texts, strict=True):
        assert shown(text.rounds or ()) == shown(other.rounds)


HOST = [
    PLAIN,
    RunSpec("lookup", "prompt-lookup", {"longest": 2}),
    RunSpec("lookup tree", "prompt-lookup", {"branches": 3}, gamma=3, nodes=7),
    RunSpec("ngram", "ngram", {"order": 3}, gamma=1),
    RunSpec("ngram on", "ngram", {"stop_if_unknown": False}, gamma=8),
    RunSpec("ngram tree", "ngram", {"branches": 3}, gamma=4, nodes=9),
    RunSpec("suffix", "suffix", gamma=10),
    RunSpec("suffix tree", "suffix", {"branches": 4, "min_probability": 0.0}, gamma=6),
    RunSpec("lookahead", "lookahead", {"window": 0}, gamma=4),
    RunSpec("prediction", "prediction", {"branches": 2}, gamma=5),
    RunSpec("few nodes", "suffix", gamma=8, nodes=3),
    RunSpec("trigram", "trigram", gamma=4),
    RunSpec("trigram tree", "trigram", {"tree": "best-first"}, gamma=3, nodes=8),
    RunSpec("trigram fitted", "trigram", {"tree": "optimal"}, gamma=3, nodes=8),
    RunSpec("portfolio", "portfolio", {"drafters": ["suffix", ("ngram", {"branches": 2})], "cost": "nodes"}, gamma=4),
    RunSpec("first", "portfolio", {"drafters": ["suffix", "prompt-lookup"], "mode": "first"}, gamma=4),
]


@pytest.mark.parametrize(("entry", "settings"), covering(HOST, SETTINGS), ids=lambda each: getattr(each, "name", each))
def test_a_replay_is_the_real_run_round_for_round(
    entry: RunSpec, settings: str, target: LanguageModel, plain: dict[str, TraceFile]
) -> None:
    same_rounds(replay(plain[settings], entry), record(target, entry, SETTINGS[settings]))


def test_the_texts_are_worth_drafting(plain: dict[str, TraceFile]) -> None:
    """Else the test above would say little."""
    for name, most in (("greedy", 1.3), ("sampled", 1.15), ("penalties", 1.15)):
        taus = {entry.name: replay(plain[name], entry).tally().tau for entry in HOST[1:]}
        assert sorted(taus.values())[len(taus) // 2] > most, (name, taus)


@pytest.mark.parametrize("rule", ["ratio", "block", "multi-round", "traversal", "k-seq", "auto"])
@pytest.mark.parametrize("entry", [HOST[2], HOST[6], HOST[12], HOST[14]], ids=lambda entry: entry.name)
def test_greedily_every_rule_that_keeps_the_law_has_the_same_rounds(
    rule: str, entry: RunSpec, target: LanguageModel, plain: dict[str, TraceFile]
) -> None:
    entry = replace(entry, rule=rule)
    answer = replay(plain["greedy"], entry)
    if answer.knows == "unknown":  # the engine refuses it too, in the same words
        with pytest.raises(UnsupportedError, match=re.escape(answer.reason)):
            record(target, entry)
    else:
        same_rounds(answer, record(target, entry))


def test_a_text_that_was_stopped_is_cut_where_the_engine_cuts_it(
    target: LanguageModel, plain: dict[str, TraceFile]
) -> None:
    settings = {"eos_token_ids": [plain["greedy"].texts[0].tokens[20]]}
    recorded = record(target, settings=settings)
    assert recorded.texts[0].finish == "stop"
    assert len(recorded.texts[0].tokens) < TOKENS
    for entry in (HOST[1], HOST[2], HOST[6], HOST[12]):
        same_rounds(replay(recorded, entry), record(target, entry, settings))


def test_near_the_end_of_the_context_drafts_are_as_short_as_the_engine_makes_them(target: LanguageModel) -> None:
    recorded = record(target, tokens=1000)
    assert recorded.texts[0].limit == toys.CONTEXT - len(prompts()[0])
    for entry in (HOST[6], HOST[2]):
        same_rounds(replay(recorded, entry), record(target, entry, tokens=1000))


@pytest.mark.parametrize(
    "entry",
    [RunSpec("a", "suffix"), RunSpec("b", "ngram", {"persistent": True}), HOST[14]],
    ids=lambda entry: entry.name,
)
def test_a_drafter_may_be_carried_from_text_to_text(
    entry: RunSpec, target: LanguageModel, plain: dict[str, TraceFile]
) -> None:
    carried, real = replay(plain["greedy"], entry, carry=True), record(target, entry, fresh=False)
    same_rounds(carried, real)
    fresh = replay(real, entry)
    if fresh.tally().tau != carried.tally().tau:
        assert "kept earlier texts" in fresh.notes[0]


def test_a_recorded_prediction_is_followed_again(target: LanguageModel, plain: dict[str, TraceFile]) -> None:
    known = plain["greedy"]
    entry, guess = RunSpec("p", "prediction", gamma=6), list(known.texts[0].tokens[5:25])
    out = decoder_of(target, entry).generate(prompts()[0], max_new_tokens=TOKENS, prediction=guess)
    text = replace(known.texts[0], prediction=tuple(guess), predicted=True)
    answer = replay(replace(known, texts=(text,)), entry)
    assert shown(answer.texts[0].rounds or ()) == shown(out.trace.rounds)
    lost = replay(replace(known, texts=(replace(text, prediction=None),)), entry)
    assert lost.reason == "the prediction of text 0 was not recorded"


# ---- what a drafter needs beyond the text


def test_the_recorded_run_itself_is_exact_for_a_model_and_other_lengths_are_unknown(
    target: LanguageModel, draft: LanguageModel
) -> None:
    recorded = record(target, CHAIN, model=draft)
    same_rounds(replay(recorded, CHAIN), recorded)
    other = replay(recorded, replace(CHAIN, gamma=2))
    assert other.knows == "unknown"
    assert other.reason == "drafter 'draft-model' needs a model's logits, and the record has its drafts of gamma=4 only"


def test_what_was_recorded_is_known_of_any_drafter(target: LanguageModel) -> None:
    entry = RunSpec("recycling", "recycling", gamma=4)
    recorded = record(target, entry)
    same_rounds(replay(recorded, entry), recorded)
    other = replay(recorded, replace(entry, gamma=3))
    assert other.knows == "unknown"
    assert other.reason == "drafter 'recycling' needs a model's logits, and the record has its drafts of gamma=4 only"


# ---- what cannot be known


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (RunSpec("a", "ngram", {"filler": 2}), "drafter 'ngram' needs the target's logits (option filler)"),
        (RunSpec("b", "lookahead"), "drafter 'lookahead' needs the target's logits (option window)"),
        (RunSpec("c", "portfolio"), "drafter 'portfolio' needs a model's logits, for a member"),
        (
            RunSpec("d", "portfolio", {"drafters": ["suffix", "ngram"]}),
            "drafter 'portfolio' needs a clock, to choose the members (option cost; cost=nodes needs none)",
        ),
        (RunSpec("e", "smollm2-135m"), "drafter 'draft-model' needs a model's logits"),
        (
            RunSpec("f", "suffix", gamma="auto"),
            "gamma=auto depends on costs measured during the run; give a number",
        ),
        (RunSpec("g", "suffix", rule="typical"), "rule 'typical' is lossy: it would have written another text"),
        (RunSpec("h", "suffix", rule="beam"), "rule 'beam' searches several sequences, and a trace holds one"),
        (
            RunSpec("i", "suffix", rule="ratio"),
            "rule 'ratio' needs the distributions of target and draft, which a trace does not hold",
        ),
    ],
)
def test_what_cannot_be_known_is_said_to_be(entry: RunSpec, reason: str, plain: dict[str, TraceFile]) -> None:
    answer = replay(plain["sampled"], entry, COSTS)
    assert (answer.knows, answer.reason) == ("unknown", reason)
    assert answer.row()["tau"] is None
    assert answer.speed_up() is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rule": "ratio"}, "the record was sampled under rule 'ratio': another run has another text"),
        ({"rule": "typical"}, "the record was written by the lossy rule 'typical': another run has another text"),
        ({"processors": 1}, "the record was written with 1 processors, which a file cannot hold"),
    ],
)
def test_a_text_that_depends_on_its_run_says_nothing_about_others(
    change: dict[str, Any], reason: str, plain: dict[str, TraceFile]
) -> None:
    recorded = plain["sampled"]
    answer = replay(replace(recorded, header=replace(recorded.header, **change)), RunSpec("s", "suffix"))
    assert answer.reason == reason


class _Liar(Replayable, HostDrafter[None]):
    """Says that it lives from text alone, and looks at logits all the same."""

    name = "liar"

    def begin(self, rows: RowsView, row: int) -> None:
        return None

    def propose(self, rows: RowsView, budget: Budget) -> TokenTree:
        return TokenTree.from_chains([[1]] * rows.count, "cpu")

    def keep(self, rows: RowsView, verdict: Any, reading: Any) -> None:
        reading.logits.argmax(-1).tolist()


def test_a_drafter_that_looks_at_logits_after_all_is_found_out(plain: dict[str, TraceFile]) -> None:
    recorded = plain["greedy"]
    with pytest.raises(UnsupportedError, match="text 0 cannot be replayed: Drafter 'liar' failed"):
        rerun(recorded.texts[0], recorded.header, _Liar(), Match(), 3)


def test_unknown_names_are_the_callers_error(plain: dict[str, TraceFile]) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'suffix'"):
        replay(plain["greedy"], RunSpec("x", "sufix"))


def test_texts_that_were_broken_off_are_left_out(plain: dict[str, TraceFile]) -> None:
    recorded = plain["greedy"]
    broken = replace(recorded.texts[1], finish="cancelled")
    answer = replay(replace(recorded, texts=(recorded.texts[0], broken)), RunSpec("s", "suffix"))
    assert len(answer.texts) == 1
    assert answer.notes == ("1 of 2 texts were cancelled and are left out.",)
    assert "no finished text" in replay(replace(recorded, texts=(broken,)), RunSpec("s", "suffix")).reason


def test_every_drafter_that_lives_from_text_is_replayed_here() -> None:
    """A new drafter that says so must be in the list above."""
    free = {name for name in DRAFTERS if not hasattr(DRAFTERS[name].Options, "required") and _lives_from_text(name)}
    assert free <= {entry.draft for entry in HOST}


def _lives_from_text(name: str) -> bool:
    return replay_needs(name) is None


# ---- numbers


def test_seconds_and_speed_up_by_costs(plain: dict[str, TraceFile]) -> None:
    recorded = plain["greedy"]
    entry = RunSpec("s", "suffix", gamma=3)
    answer = replay(recorded, entry, COSTS)
    rounds = [r for text in answer.texts for r in text.rounds or ()]
    wanted = sum(COSTS.seconds(1 + len(r.drafted)) + 0.1 + 0.01 * len(r.drafted) for r in rounds)
    assert answer.seconds() == pytest.approx(wanted)
    assert answer.speed_up() == pytest.approx(len(prompts()) * TOKENS * 1.1 / wanted)
    assert replay(recorded, PLAIN, COSTS).speed_up() == pytest.approx(1.0)
    known = replace(recorded, header=replace(recorded.header, costs=COSTS))
    assert replay(known, entry).seconds() == answer.seconds()
    assert replay(recorded, entry).seconds() is None


def test_a_table_and_lines(target: LanguageModel, draft: LanguageModel, plain: dict[str, TraceFile]) -> None:
    known = [plain["greedy"], record(target, CHAIN, model=draft)]
    entries = [
        RunSpec("suffix:gamma=8", "suffix", gamma=8),
        replace(CHAIN, name="model:gamma=4"),
        RunSpec("r", "recycling"),
    ]
    rows = [answer.row() for answer in replay_all(known, entries, COSTS)]
    assert [row["knows"] for row in rows] == ["exact", "exact", "unknown"]
    real = record(target, entries[0])
    whole = Trace([r for text in real.texts for r in text.rounds or ()])
    stats = whole.stats(0.0)
    assert rows[0]["tau"] == stats.mean_accepted_length
    assert rows[0]["drafted"] == stats.drafted
    assert rows[0]["by_position"] == whole.by_position()
    assert set(rows[0]["tau_by_category"]) == {"c0", "c1"}
    told = lines(replay_all(known, entries, COSTS))
    assert told[0].split() == ["run", "τ", "acceptance", "rounds", "drafted", "speed-up", "known"]
    assert told[1].split()[0] == "suffix:gamma=8"
    assert told[1].split()[-1] == "exact"
    assert any(line.startswith("r: unknown, because drafter 'recycling' needs a model's logits") for line in told)
    assert told[-3].split() == ["τ", "c0", "c1"]
