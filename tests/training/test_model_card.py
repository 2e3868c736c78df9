"""What the README of a trained drafter prints is right: its code runs, and it names no folder of this machine."""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.drafters.heads.eagle import EagleHead
from paceline.drafters.lookup.trigram import train_trigram
from paceline.integrations.provenance import provenance
from paceline.training.evaluation import write_card
from paceline.training.train_run import save_table
from tests.training.toys import options


def code_of(page: Path) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    return str(code)


@pytest.mark.parametrize("kind", ["eagle", "trigram", "pair"])
def test_the_printed_code_runs(kind: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = paceline.load(place / "target", dtype="float32")
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copytree(place / "target", tmp_path / "target")
    if kind == "eagle":
        EagleHead.random(lm).save(folder)
    elif kind == "trigram":
        save_table(folder, train_trigram([[1, 2, 3, 4] * 5], lm.vocabulary), lm)
    else:
        shutil.copytree(place / "target", folder / "main")
        shutil.copytree(place / "target", folder / "draft")
    about = {**provenance(asdict(options(place, folder, kind=kind))), "weights": lm.numbers}
    write_card(folder, kind, about, None, None, "")
    page = (folder / "README.md").read_text()
    assert str(tmp_path) not in page
    assert str(place) not in page
    assert "float32 from a folder" in page
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(code_of(folder / "README.md"), found)
    out = found["decoder"].generate([1, 2, 3], max_new_tokens=12)
    assert out.stats.drafted > 0
    assert out.tokens == paceline.SpeculativeDecoder(lm, None).generate([1, 2, 3], max_new_tokens=12).tokens


@pytest.mark.parametrize("target", ["smollm2-135m", "org/model"])
def test_a_name_stays_a_name(target: str, place: Path, tmp_path: Path) -> None:
    args = {**asdict(options(place, tmp_path)), "target": target}
    write_card(tmp_path, "eagle", provenance(args), None, None, "")
    assert f'SpeculativeDecoder("{target}", paceline.load_drafter("./{tmp_path.name}"))' in code_of(
        tmp_path / "README.md"
    )
