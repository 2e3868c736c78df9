"""Training that begins with the weights of a drafter trained before: they fit, or one sentence says why not."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.common.errors import InputError, LoadError, PacelineError, PacelineWarning, UnsupportedError
from paceline.drafters.heads.head_files import NUMBERS, unpacked
from paceline.models.language_model import LanguageModel
from paceline.training.corpus import Corpus, Text, collate
from paceline.training.distillation import Teacher
from paceline.training.recipes.base import RECIPES, make_recipe
from paceline.training.train_options import TrainOptions
from paceline.training.train_run import WarmStart, train
from paceline.training.trainer import LOG_NAME as LOG
from paceline.training.trainer import NAME
from tests.cli.conftest import run
from tests.toys import llama
from tests.training.toys import KINDS, Stop, options, own_texts, recipe_of, target, trained, weights

ARGS = {
    "draft-lm": ("layers=1",), "eagle": ("vocabulary=20", "steps=2"), "early-exit": ("layers=1",), "medusa": (),
    "prophet": (),
}  # fmt: skip
OTHER = {
    "draft-lm": (("layers=2",), r"sources = \[0\], .* \[0, 2\]"),
    "eagle": (("vocabulary=30",), "draft_vocabulary = 20, .* 30"),
    "early-exit": (("layers=2",), "layers = 1, .* 2"),
    "medusa": (("heads=2",), "heads = 4, .* 2"),
    "prophet": (("layers=3",), "layers = 2, .* 3"),
}


@pytest.fixture(scope="module")
def before(place: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A drafter of every kind, in all the numbers in which they can lie on disk."""
    folder, found = tmp_path_factory.mktemp("before"), {}
    for index, kind in enumerate(ARGS):
        numbers = NUMBERS[index % len(NUMBERS)]
        args = options(place, folder / kind, kind=kind, options=ARGS[kind], steps=2, measure=0, numbers=numbers)
        found[kind] = train(args)
    return found


def on(place: Path, out: Path, old: Path, kind: str, **changes: Any) -> TrainOptions:
    """To learn on from `old`."""
    args = {"options": ARGS[kind], "steps": 2, "measure": 0, "numbers": "float32", "start": str(old)}
    return options(place, out, kind=kind, **{**args, **changes})


@pytest.fixture(scope="module")
def data(place: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Other texts, with other words."""
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    path.write_text("".join(json.dumps({"text": "xyzzyx" * 4 + "zyx" * i}) + "\n" for i in range(12)))
    return str(path)


@pytest.mark.parametrize("kind", ARGS)
def test_it_begins_with_what_was_saved(
    kind: str, place: Path, before: dict[str, Path], data: str, tmp_path: Path
) -> None:
    """A drafter that learns next to nothing is what it began with, the tokens that it can say included."""
    folder = train(on(place, tmp_path / "it", before[kind], kind, data=data, learning_rate=1e-15))
    saved, found = unpacked(weights(before[kind])), weights(folder)
    assert found.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.allclose(found[name].double(), tensor.double(), atol=1e-9, rtol=0), name
    fresh = train(on(place, tmp_path / "fresh", before[kind], kind, data=data, learning_rate=1e-15, start=None))
    assert any(not torch.equal(weights(fresh)[name], found[name]) for name in found), "and it would not be without"
    about = json.loads((folder / "provenance.json").read_text())
    digest = hashlib.sha256((before[kind] / "model.safetensors").read_bytes()).hexdigest()
    assert about["from"] == {"folder": str(before[kind]), "sha256": digest}
    assert f"began with the weights of '{before[kind].name}' (sha256 {digest})" in (folder / "README.md").read_text()
    looks = [json.loads(line) for line in (folder / LOG).read_text().splitlines() if "held_out" in line]
    assert looks[0]["step"] == 0, "what it began with is looked at first"


def test_an_eagle_keeps_its_words(tmp_path: Path) -> None:
    """Also where the target's rows say them: the same predictions and the same loss, after other texts were counted."""
    lm = target()
    texts = own_texts(lm, 16)
    few = [Text([token % 12 for token in text.tokens], text.prompt) for text in texts]
    one, other = Corpus(texts, 64, 512, seed=1), Corpus(few, 64, 512, seed=1)
    args = RECIPES["eagle"].Options(vocabulary=20, steps=3, own_output=False)
    first = make_recipe("eagle", Teacher(lm), one, "ce", args, 0)
    trained(first, one, 5)
    first.save(tmp_path / "it", "float32")
    second = make_recipe("eagle", Teacher(lm), other, "ce", args, 1)
    words = [recipe.sizes_and_weights()[1]["d2t"].clone() for recipe in (first, second)]
    assert not torch.equal(*words)
    WarmStart.read(str(tmp_path / "it"), "eagle", lm).load_into(second)
    assert torch.equal(second.sizes_and_weights()[1]["d2t"], words[0])
    batch = first.teacher.read(collate([texts[:1], texts[1:2]]), first.taps)
    assert torch.equal(first.predictions(batch), second.predictions(batch))
    assert torch.allclose(first(batch), second(batch), rtol=1e-5)  # in 32 bits on disk


@pytest.mark.parametrize("kind", ARGS)
def test_other_sizes_are_named(kind: str, place: Path, before: dict[str, Path], tmp_path: Path) -> None:
    args, message = OTHER[kind]
    with pytest.raises(InputError, match=f"The {kind} in '.*' has {message}; give the same --option"):
        train(on(place, tmp_path / "it", before[kind], kind, options=args))


def test_what_old_folders_do_not_name_is_known(tmp_path: Path) -> None:
    """Once every draft-lm had its own layers alone."""
    lm = target()
    corpus = Corpus(own_texts(lm, 12), 64, 256, seed=1)
    recipe_of("draft-lm", lm, corpus, sources=(0,)).save(tmp_path / "it", "float32")
    config = json.loads((tmp_path / "it" / "config.json").read_text())
    assert config.pop("kept") == 0
    (tmp_path / "it" / "config.json").write_text(json.dumps(config))
    found = WarmStart.read(str(tmp_path / "it"), "draft-lm", lm)
    found.load_into(recipe_of("draft-lm", lm, corpus, sources=(0,)))
    with pytest.raises(InputError, match="has kept = 0, and the options given here make it 2"):
        found.load_into(recipe_of("draft-lm", lm, corpus, sources=(0,), kept=2))


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    lm = target()
    recipe = recipe_of("medusa", lm, Corpus(own_texts(lm, 12), 64, 256, seed=1))
    recipe.save(tmp_path / "it", "float32")
    found = WarmStart.read(str(tmp_path / "it"), "medusa", lm)
    found.tensors["biases"] = found.tensors["biases"][:, :2]
    with pytest.raises(InputError, match=r"has biases = \(1, 2, 1, \d+\), and .* make it \(1, 3, 1, \d+\)"):
        found.load_into(recipe)
    del found.tensors["biases"]
    with pytest.raises(InputError, match="has biases = None"):
        found.load_into(recipe)


def test_another_kind_another_target_or_nothing_at_all(place: Path, before: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="holds a head of kind 'medusa', not 'eagle'"):
        train(on(place, tmp_path / "it", before["medusa"], "eagle"))
    with pytest.raises(LoadError, match="No eagle head could be read from 'nowhere'"):
        train(on(place, tmp_path / "it", Path("nowhere"), "eagle"))
    for seed, kind in enumerate(KINDS, 1):
        with pytest.warns(PacelineWarning, match=f"The {kind} drafter was trained on other weights"):
            WarmStart.read(str(before[kind]), kind, target(seed))
        with pytest.raises(UnsupportedError, match=f"This {kind} head was made for a target .* 3 layers"):
            WarmStart.read(str(before[kind]), kind, LanguageModel(llama(seed)))
    assert not (tmp_path / "it" / "texts").exists(), "the refusal comes before anything is read or written"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "trigram"}, "A trigram cannot start from 'old'; leave out --from"),
        ({"kind": "pair"}, "A pair cannot start from"),
        ({"start": "./x"}, "--from and --out are both 'x'"),
    ],
)
def test_what_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PacelineError, match=message):
        TrainOptions(**{"out": "x", "start": "old", **changes})


def test_interrupted_it_goes_on_and_not_from_the_beginning(
    place: Path, before: dict[str, Path], tmp_path: Path
) -> None:
    whole = weights(train(on(place, tmp_path / "whole", before["eagle"], "eagle", steps=12)))
    args = on(place, tmp_path / "parted", before["eagle"], "eagle", steps=12)
    for after in (3, 4):
        with pytest.raises(KeyboardInterrupt):
            train(args, cancel=Stop(after))
        assert (tmp_path / "parted" / NAME).exists()
    with pytest.raises(InputError, match=r"holds training with from = 'weights with sha256 [0-9a-f]{16}', not None"):
        train(on(place, tmp_path / "parted", before["eagle"], "eagle", steps=12, start=None))
    train(args)
    found = weights(tmp_path / "parted")
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    saved = unpacked(weights(before["eagle"]))
    assert any(not torch.equal(found[name], saved[name].to(found[name].dtype)) for name in found), "it has learnt"


def test_as_a_flag(place: Path, before: dict[str, Path], tmp_path: Path) -> None:
    args = ["--target", str(place / "target"), "--data", str(place / "data.jsonl"), "--kind", "medusa", "--steps", "1",
            "--length", "48", "--batch", "256", "--no-predict", "--measure", "0", "--device", "cpu",
            "--from", str(before["medusa"])]  # fmt: skip
    result = run("train", *args, "--out", str(tmp_path / "it"))
    assert result.exit_code == 0, result.output
    about = json.loads((tmp_path / "it" / "provenance.json").read_text())
    assert about["from"]["folder"] == about["arguments"]["start"] == str(before["medusa"])
