"""An evidence row that names prompts uses those, or fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.real.evidence_prompts import OWN, evidence_prompts


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "question.jsonl"
    lines = [{"category": f"c{i // 10}", "turns": [f"prompt {i}", "more"]} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


@pytest.mark.parametrize("asked", [{"PACELINE_PROMPTS": "20"}, {"PACELINE_PROMPTS_FILE": "/no/such/file.jsonl"}])
def test_a_missing_file_is_a_failure_that_says_how_to_give_one(asked: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"are not there.*PACELINE_PROMPTS_FILE.*'category' and 'turns'"):
        evidence_prompts(20, asked, usual=tmp_path / "none.jsonl")


def test_without_being_asked_there_are_four_of_our_own(tmp_path: Path) -> None:
    assert evidence_prompts(4, {}, usual=tmp_path / "none.jsonl") == (OWN, "four prompts of our own")


def test_prompts_are_spread_over_the_file(file: Path, tmp_path: Path) -> None:
    for asked, usual in (({"PACELINE_PROMPTS": "20"}, file), ({"PACELINE_PROMPTS_FILE": str(file)}, tmp_path / "no")):
        found, where = evidence_prompts(20, asked, usual)
        assert found == [f"prompt {2 * i}" for i in range(20)]
        assert where == str(file)


def test_too_few_or_other_lines_are_a_failure(file: Path) -> None:
    with pytest.raises(ValueError, match="are 40, and 41 are needed"):
        evidence_prompts(41, {}, file)
    file.write_text(file.read_text() + json.dumps({"prompt": "x"}) + "\n")
    with pytest.raises(ValueError, match=r"Line 41 of .* has no 'category'"):
        evidence_prompts(4, {}, file)
