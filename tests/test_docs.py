"""The code in the documents is run: the README's example, the drafter of add-a-drafter.md, the links."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import paceline
from tests.toys import llama, raw_bytes

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.real
def test_the_example_of_the_readme_prints_what_it_says() -> None:
    code, printed = blocks(README, "python")[0], blocks(README, "text")[0]
    assert len(code.strip().splitlines()) <= 12
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == printed.strip()


def test_the_first_pages_stay_short() -> None:
    assert len(README.splitlines()) <= 90
    assert len((ROOT / "docs" / "glossary.md").read_text().splitlines()) <= 60
    figures = README.split("## Figures")[1].split("##")[0]
    assert sum(line.startswith("|") for line in figures.splitlines()) - 2 <= 8


def test_the_commands_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|^)make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert re.search(r"make test\b", (ROOT / ".ci" / "run").read_text())


def test_every_path_the_documents_name_exists() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_import_in_the_documents_works() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs" / "results").rglob("*.sh")]
    lines = {
        (page.name, line.strip())
        for page in pages
        for line in re.findall(r"from paceline[\w.]* import [\w, ]+|import paceline[\w.]*", page.read_text())
    }
    assert len(lines) > 10
    failed = []
    for page, line in sorted(lines):
        try:
            exec(line, {})
        except ImportError as error:
            failed.append(f"{page}: {line}: {error}")
    assert not failed, "\n".join(failed)


PRIVATE = re.compile(r"was asked for|were asked for|seeds\.md|house\.md|findings\.md|/tmp/|shared/design")


def test_public_pages_speak_of_nothing_that_a_reader_cannot_open() -> None:
    """No notes of the authors, and no folders of their machines."""
    pages = [ROOT / "README.md", ROOT / "pyproject.toml", *(ROOT / "docs").rglob("*.md")]
    pages += [page for page in (ROOT / "examples").iterdir() if page.suffix in (".py", ".md", ".ipynb")]
    found = [
        f"{page.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for page in pages
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if PRIVATE.search(line)
    ]
    assert not found, "\n".join(found)


def test_every_drafter_has_a_page_and_every_page_a_drafter() -> None:
    pages = {page.stem for page in (ROOT / "docs" / "methods").glob("*.md")} - {"README"}
    assert set(paceline.DRAFTERS) == pages
    index = (ROOT / "docs" / "methods" / "README.md").read_text()
    assert all(f"({name}.md)" in index for name in pages)


def test_the_code_of_the_page_on_grammars_works() -> None:
    tokenizer = raw_bytes()
    target = paceline.LanguageModel(llama(vocab_size=len(tokenizer), max_position_embeddings=256), tokenizer)
    namespace: dict[str, Any] = {"target": target}
    for code in blocks((ROOT / "docs" / "grammars.md").read_text(), "python"):
        exec(code, namespace)
    assert json.loads(namespace["out"].text)["colour"] in ("red", "green", "blue")
    assert namespace["answer"].text in ("yes", "no")
    assert re.fullmatch(r"20\d\d-[01]\d-[0-3]\d", namespace["date"].text)
    assert re.match(r"\d", namespace["both"][0].text)
    assert re.match(r"[a-z]", namespace["both"][1].text)


def tiny_model() -> paceline.LanguageModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return paceline.LanguageModel(LlamaForCausalLM(config).double().eval())


@pytest.fixture
def guide() -> Iterator[ModuleType]:
    """A module for the code of a page: dataclasses look their module up."""
    module = sys.modules["guide"] = ModuleType("guide")
    yield module
    del sys.modules["guide"]


def test_the_rule_of_the_guide_keeps_the_text(guide: ModuleType) -> None:
    code = blocks((ROOT / "docs" / "add-a-rule.md").read_text(), "python")[0]
    try:
        exec(compile(code, "add-a-rule.md", "exec"), guide.__dict__)
        lm, prompts = tiny_model(), [[5, 6, 7, 5, 6], [1, 2]]
        for settings in ({}, {"temperature": 1.0, "seed": 3}):
            settings = {**settings, "max_new_tokens": 24, "ignore_eos": True}
            plain = paceline.SpeculativeDecoder(lm, draft=None).generate(prompts, **settings)
            out = paceline.SpeculativeDecoder(lm, "prompt-lookup", rule="agreeing").generate(prompts, **settings)
            assert [each.tokens for each in out] == [each.tokens for each in plain]
            assert sum(each.stats.accepted for each in out) > 0
    finally:
        paceline.RULES._found.pop("agreeing", None)


def test_the_drafter_of_the_guide_works_as_it_stands(guide: ModuleType) -> None:
    code = blocks((ROOT / "docs" / "add-a-drafter.md").read_text(), "python")[0]
    try:
        exec(compile(code, "add-a-drafter.md", "exec"), guide.__dict__)
        lm = tiny_model()
        plain = paceline.SpeculativeDecoder(lm, draft=None).generate([5, 6, 7], max_new_tokens=24, ignore_eos=True)
        out = paceline.SpeculativeDecoder(lm, "echo", options={"size": 3}).generate(
            [5, 6, 7], max_new_tokens=24, ignore_eos=True
        )
        assert out.tokens == plain.tokens
        assert out.stats.drafted > 0
    finally:
        paceline.DRAFTERS._found.pop("echo", None)
