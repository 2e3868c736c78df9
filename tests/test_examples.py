"""The examples, the notebook and the page on the Python API run as they stand, on a model of a few kilobytes."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline
from tests.cli.conftest import save_model

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOK = json.loads((ROOT / "examples" / "tour.ipynb").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_runs(
    script: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [str(tmp_path / "trained"), "600"] if script.stem == "train_and_use" else []
    monkeypatch.setattr(sys, "argv", [str(script), model, *more])
    monkeypatch.chdir(tmp_path)
    known = set(paceline.DRAFTERS)
    code = None
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    finally:
        for name in set(paceline.DRAFTERS) - known:
            paceline.DRAFTERS._found.pop(name)
    assert code in (0, None)
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_is_short_and_listed(script: Path) -> None:
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 40
    assert f"({script.name})" in (ROOT / "examples" / "README.md").read_text(encoding="utf-8")


def test_the_notebook_runs(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("PACELINE_TOUR_MODEL", model)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    space: dict[str, Any] = {"__name__": "__main__"}
    for cell in (item for item in NOTEBOOK["cells"] if item["cell_type"] == "code"):
        exec(compile("".join(cell["source"]), f"tour.ipynb, {cell['id']}", "exec"), space)
    assert space["out"].tokens == space["same"].tokens
    assert "forward passes instead of" in capsys.readouterr().out
    space["plt"].close("all")


def test_the_notebook_holds_what_it_showed() -> None:
    shown = [output for cell in NOTEBOOK["cells"] for output in cell.get("outputs", ())]
    kinds = {kind for output in shown for kind in output.get("data", {})}
    assert {"text/html", "image/png"} <= kinds
    assert not [output for output in shown if output["output_type"] == "error"]


def test_the_page_on_the_python_api_runs(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    space: dict[str, Any] = {"__name__": "__main__"}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block.replace('"smollm2-135m"', repr(model)), "python-api.md", "exec"), space)
    assert "Did you mean 'temperature'?" in capsys.readouterr().out


def test_the_page_on_the_python_api_names_every_setting_and_argument() -> None:
    import inspect

    from paceline.engine.request import Settings

    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    arguments = [name for name in inspect.signature(paceline.SpeculativeDecoder).parameters if name != "aliases"]
    missing = [name for name in [*Settings.__annotations__, *arguments] if f"`{name}`" not in page]
    assert not missing
