"""What a record says about where it comes from."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from paceline.integrations import provenance as made
from paceline.integrations.provenance import provenance


def test_provenance_says_what_a_reader_would_ask() -> None:
    found = provenance({"target": "x", "runs": ("a",)}, torch.device("cpu"))
    assert found["arguments"] == {"target": "x", "runs": ["a"]}
    assert {"paceline", "torch", "transformers", "numpy", "numba", "python"} == set(found["versions"])
    assert found["threads"] == torch.get_num_threads()
    assert found["cores"] >= 1
    assert found["cpu"]
    json.dumps(found)


def test_without_git_or_a_driver_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "_output", lambda command: None)
    found = provenance({})
    assert found["commit"] is None
    assert "dirty" not in found


def test_a_program_that_is_not_there_answers_nothing() -> None:
    assert made._output(["no-such-program-anywhere"]) is None
    assert made._output([sys.executable, "-c", "import sys; sys.exit(3)"]) is None
    assert made._output([sys.executable, "-c", "print(' 7 ')"]) == "7"
