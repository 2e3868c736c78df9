"""lm-evaluation-harness with its own tasks: scores and samples are the same with speculation and without."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

_WORDS = ("cat", "dog", "house", "river", "bread", "stone", "music", "winter")
_CHOICES = """
task: paceline_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - {{metric: acc}}
  - {{metric: acc_norm}}
"""
_TEXTS = """
task: paceline_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{target}}}}"
generation_kwargs: {{until: ["\\n", "."], max_gen_toks: 24, temperature: {temperature}, do_sample: false}}
metric_list:
  - {{metric: exact_match}}
  - {{metric: bleu}}
"""


@pytest.fixture(scope="module")
def tasks(work: Path) -> Path:
    folder = work / "tasks"
    folder.mkdir(exist_ok=True)
    documents = [
        {
            "question": f"Question {at}: Which of these words names the {word}?\nAnswer:",
            "choices": [f" {other}" for other in _WORDS[at % 5 : at % 5 + 4]],
            "answer": at % 4,
            "target": f" The {word}",
        }
        for at, word in enumerate(_WORDS)
    ]
    data = folder / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, documents)), encoding="utf-8")
    (folder / "choices.yaml").write_text(_CHOICES.format(file=data), encoding="utf-8")
    (folder / "texts.yaml").write_text(_TEXTS.format(file=data, temperature=0), encoding="utf-8")
    return folder


def evaluated(url: str, model: str, tasks: Path, batch: int, concurrent: int) -> dict[str, Any]:
    """What one run has found: the scores, and the answers behind them."""
    arguments = {"model": model, "base_url": f"{url}/v1/completions", "tokenizer_backend": "remote", "max_length": 1024,
                 "num_concurrent": concurrent, "batch_size": batch}  # fmt: skip
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=["paceline_choices", "paceline_texts"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    answers = {
        name: [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for name, samples in found["samples"].items()
    }
    return {"results": found["results"], "answers": answers}


@pytest.mark.parametrize(("batch", "concurrent"), [(1, 1), (4, 1), (1, 4)])
def test_scores_are_the_same_with_speculation_and_without(
    url: str, model: str, tasks: Path, remark: Callable[[str], None], batch: int, concurrent: int
) -> None:
    on = evaluated(url, model, tasks, batch, concurrent)
    off = evaluated(os.environ["PACELINE_URL_PLAIN"], model, tasks, batch, concurrent)
    assert on["answers"] == off["answers"]
    assert on["results"] == off["results"]
    scores = on["results"]
    assert set(scores) == {"paceline_choices", "paceline_texts"}
    if (batch, concurrent) == (1, 1):
        acc, bleu = scores["paceline_choices"]["acc,none"], scores["paceline_texts"]["bleu,none"]
        remark(f"acc {acc:g} and bleu {bleu:.3g}, on = off")
