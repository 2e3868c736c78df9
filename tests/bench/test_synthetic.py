"""From options to models, tasks and entries that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import InputError, LanguageModel, SpeculativeDecoder
from paceline.bench import synthetic_pairs as synthetic
from paceline.bench.bench_options import BenchOptions, is_synthetic
from paceline.bench.candidate import RunSpec
from paceline.bench.synthetic_pairs import SyntheticPair, synthetic_pair, synthetic_tasks
from paceline.models.synthetic import random_model
from tests.toys import letters, llama


def options(**changes: Any) -> BenchOptions:
    return BenchOptions(**{"shape": "tiny:vocab=2048", "device": "cpu", "prompt_tokens": 12, "limit": 2, **changes})


def decode(made: SyntheticPair, tokens: int = 60) -> Any:
    """The first task by the first entry, and by plain decoding."""
    entry = made.specs[0]
    decoder = SpeculativeDecoder(made.target, entry.draft, options=entry.options, gamma=entry.gamma)
    prompts = [list(prompt) for prompt in made.tasks[0].prompts]
    found = decoder.generate(prompts, max_new_tokens=tokens)
    plain = SpeculativeDecoder(made.target, draft=None).generate(prompts, max_new_tokens=tokens)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    return found


def test_what_counts_as_synthetic() -> None:
    assert not is_synthetic(BenchOptions())
    assert is_synthetic(BenchOptions(shape="tiny"))
    assert is_synthetic(BenchOptions(synthetic_acceptance=(0.8,)))
    assert is_synthetic(BenchOptions(shape="tiny", construction=0.0))


def test_a_script_makes_a_pair_of_a_shape() -> None:
    made = synthetic_pair(options(synthetic_acceptance=(1.0,), batch=2))
    assert made.draft is not None
    assert (made.target.layers, made.draft.layers, made.draft.vocabulary) == (2, 1, 2048)
    assert [entry.name for entry in made.specs] == ["draft-model"]
    assert all(one.stats.rounds == 10 for one in decode(made))
    assert made.remark == "synthetic acceptance: every drafted token is right with probability 1."


def test_rates_by_position_reach_the_draft() -> None:
    made = synthetic_pair(options(synthetic_acceptance=(1.0, 1.0, 0.0), gamma=4))
    rounds = [entry for one in decode(made) for entry in one.trace.rounds]
    assert {len(entry.path) for entry in rounds if len(entry.drafted) == 4} == {2}
    assert "probability 1, 1, 0 by position (other libraries: 0.7" in made.remark


def test_a_shape_of_another_vocabulary_drafts_in_the_targets() -> None:
    made = synthetic_pair(options(draft_shape="tiny:layers=1,vocab=99", synthetic_acceptance=(0.9,)))
    assert made.draft is not None
    assert made.draft.vocabulary == 2048
    decode(made)


def test_by_construction() -> None:
    made = synthetic_pair(options(shape="tiny:layers=4", draft_shape="tiny:layers=2", construction=0.0))
    assert made.draft is not None
    assert (made.target.layers, made.draft.layers) == (4, 2)
    assert all(one.stats.rounds == 10 for one in decode(made))
    usual = synthetic_pair(options(shape="tiny:layers=4", construction=0.1))
    assert usual.draft is not None
    assert usual.draft.layers == 1


def test_a_random_model_alone_has_no_draft() -> None:
    made = synthetic_pair(options())
    assert (made.draft, made.specs) == (None, ())
    assert made.fitted([RunSpec("suffix", "suffix")]) == (RunSpec("suffix", "suffix"),)
    with pytest.raises(InputError, match="'draft-model' needs a draft model: give a draft_shape"):
        made.fitted([RunSpec("draft-model", "draft-model")])
    assert synthetic_pair(options(draft_shape="tiny:layers=1")).draft is not None


def test_a_target_with_weights_of_its_own_can_follow_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = LanguageModel(llama(eos_token_id=3), letters())
    monkeypatch.setattr(synthetic, "load", lambda source, **_: lm)
    made = synthetic_pair(options(shape=None, synthetic_acceptance=(0.7,), max_new_tokens=32))
    assert made.draft is not None
    assert made.draft.name.startswith("first 1 layers of")
    found = decode(made)
    assert all(3 not in one.tokens for one in found)
    decode(
        synthetic_pair(options(shape=None, draft_shape="tiny:layers=1", synthetic_acceptance=(0.7,), max_new_tokens=32))
    )


def test_entries_that_need_a_model_get_the_draft() -> None:
    made = synthetic_pair(options(synthetic_acceptance=(0.8,)))
    own = RunSpec("own", "draft-model", {"model": "somewhere"})
    given = [
        RunSpec("tree", "draft-model", {"tree": "best-first"}),
        RunSpec("staged", "staged"),
        RunSpec("n", "ngram"),
        own,
    ]
    tree, staged, ngram, other = made.fitted(given)
    assert tree.options == {"tree": "best-first", "model": made.draft}
    assert staged.options["model"] is made.draft
    assert (ngram, other) == (given[2], own)


def test_tasks_are_random_texts_that_end_differently() -> None:
    lm = random_model("tiny")
    tasks = synthetic_tasks(lm, 3, 10, batch=2, seed=4)
    assert [task.id for task in tasks] == ["0+1", "2+3", "4+5"]
    assert {task.category for task in tasks} == {"synthetic"}
    rows = [row for task in tasks for row in task.prompts]
    assert [len(row) for row in rows] == [10] * 6
    assert len({row[-1] for row in rows}) == 6
    assert all(0 <= token < lm.vocabulary for row in rows for token in row)
    assert synthetic_tasks(lm, 3, 10, batch=2, seed=4) == tasks != synthetic_tasks(lm, 3, 10, batch=2, seed=5)
    with pytest.raises(InputError, match="Prompts of 1024 tokens leave no room"):
        synthetic_tasks(lm, 1, 1024)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"construction": 0.1, "synthetic_acceptance": (0.8,)}, "not both"),
        ({"construction": 0.1, "shape": None}, "needs a random target"),
        ({"construction": 0.1, "draft_shape": "gpt2"}, "first layers of the target: use 'tiny:layers=...', not 'gpt2'"),
        ({"shape": "tinny"}, "Did you mean 'tiny'"),
        ({"prompt_tokens": 0}, "prompt_tokens must be at least 1"),
    ],
)
def test_what_cannot_be_made_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        synthetic_pair(options(**changes))
