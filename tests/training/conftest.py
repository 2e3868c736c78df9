"""What several tests of training begin with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import paceline
from tests.toys import letters, llama
from tests.training.toys import own_texts, target


@pytest.fixture(scope="package")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and a text file that it could have written."""
    folder = tmp_path_factory.mktemp("training")
    model = llama(0, num_hidden_layers=3).float()
    model.save_pretrained(folder / "target")
    letters().save_pretrained(folder / "target")
    lm = paceline.load(str(folder / "target"), dtype="float32")
    texts = ["".join(lm.tokenizer.decode([token]) for token in text.tokens) for text in own_texts(target(), 32)]
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder
