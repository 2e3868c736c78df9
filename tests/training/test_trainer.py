"""Training that is interrupted in every way goes on as if nothing had been; what cannot go on says where and why."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import paceline
from paceline.common.errors import InputError, LoadError, PacelineError, PacelineWarning, UnsupportedError
from paceline.common.progress import Reporter
from paceline.drafters.lookup.trigram import TrigramTable
from paceline.training import train_run as run
from paceline.training import trainer
from paceline.training.corpus import Corpus, Shards, Text
from paceline.training.evaluation import Evaluation
from paceline.training.train_options import TrainOptions
from paceline.training.train_run import train
from paceline.training.trainer import LOG_NAME as LOG
from paceline.training.trainer import NAME, STOP_FILE, TrainingError, learning_rate
from tests.toys import llama
from tests.training.toys import SMALL, Stop, options, weights


def test_interrupted_anywhere_it_ends_the_same(place: Path, tmp_path: Path) -> None:
    whole = train(options(place, tmp_path / "whole"))
    wanted, lines = weights(whole), (whole / LOG).read_text().splitlines()
    parted = options(place, tmp_path / "parted")
    for after in (3, 6, 9):
        with pytest.raises(KeyboardInterrupt):
            train(parted, cancel=Stop(after))
        assert (tmp_path / "parted" / NAME).exists()
    train(parted)
    found = weights(tmp_path / "parted")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    held = [json.loads(line)["held_out"] for line in lines if "held_out" in line]
    again = [json.loads(line) for line in (tmp_path / "parted" / LOG).read_text().splitlines()]
    assert [line["held_out"] for line in again if "held_out" in line] == held, "nothing is logged twice"
    assert not (whole / NAME).exists(), "nothing is left to go on with"


KILLED = """
import sys, time
from paceline.cli.main import main
from paceline.training import trainer
step = trainer.Trainer._step
def slow(self, number):
    step(self, number)
    print("step", number, flush=True)
    time.sleep(0.05)
trainer.Trainer._step = slow
sys.exit(main())
"""


def test_killed_without_a_word_it_ends_the_same(place: Path, tmp_path: Path) -> None:
    whole = train(options(place, tmp_path / "whole"))
    args = ["--target", str(place / "target"), "--data", str(place / "data.jsonl"), "--out", str(tmp_path / "killed"),
            "--device", "cpu", "--no-predict"]  # fmt: skip
    for name, value in SMALL.items():
        for each in value if isinstance(value, tuple) else [value]:
            if name != "predict":
                flag = "option" if name == "options" else name.replace("_", "-")
                args += [f"--{flag}", str(each)]
    with subprocess.Popen([sys.executable, "-c", KILLED, "train", *args], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 13"):
                process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert (tmp_path / "killed" / NAME).exists()
    train(options(place, tmp_path / "killed"))
    found, wanted = weights(tmp_path / "killed"), weights(whole)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_what_it_leaves(place: Path, tmp_path: Path) -> None:
    folder = train(options(place, tmp_path / "it"))
    assert {"config.json", "model.safetensors", "README.md", "provenance.json", LOG} <= {
        p.name for p in folder.iterdir()
    }
    about = json.loads((folder / "provenance.json").read_text())
    assert about["arguments"]["kind"] == "eagle"
    assert about["measured"]["same"] is True
    assert f"τ = {about['measured']['tau']:.2f}" in (folder / "README.md").read_text()
    lm = paceline.load(str(place / "target"), dtype="float32")
    drafter = paceline.load_drafter(folder, lm)
    plain = paceline.SpeculativeDecoder(lm, draft=None).generate([1, 2, 3], max_new_tokens=30)
    found = paceline.SpeculativeDecoder(lm, drafter).generate([1, 2, 3], max_new_tokens=30)
    assert found.tokens == plain.tokens
    assert found.stats.accepted > 0


def test_another_plan_is_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(options(place, tmp_path / "it"), cancel=Stop(5))
    with pytest.raises(InputError, match=r"holds training with learning_rate = 0.005, not 0.1"):
        train(options(place, tmp_path / "it", learning_rate=0.1))


def test_a_loss_that_is_no_number_says_where(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = trainer.Trainer._step

    def broken(self: Any, step: int) -> None:
        real(self, step)
        if step == 13:
            self._losses[-1] = self._losses[-1] * float("nan")

    monkeypatch.setattr(trainer.Trainer, "_step", broken)
    with pytest.raises(TrainingError, match=r"The loss is nan at step 14; lower --learning-rate .*checkpoint"):
        train(options(place, tmp_path / "it"))
    kept = load_file(tmp_path / "it" / NAME)
    assert all(bool(tensor.isfinite().all()) for tensor in kept.values())
    monkeypatch.setattr(trainer.Trainer, "_step", real)
    train(options(place, tmp_path / "it"))


def test_a_full_disk_leaves_the_checkpoint(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(options(place, tmp_path / "it"), cancel=Stop(9))
    before = (tmp_path / "it" / NAME).read_bytes()

    def full(tensors: Any, path: Path, about: Any) -> None:
        save_file({"half": torch.zeros(3)}, path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer, "save_file", full)
    with pytest.raises(LoadError, match="No space left on device; the checkpoint before it is intact"):
        train(options(place, tmp_path / "it"))
    assert (tmp_path / "it" / NAME).read_bytes() == before
    assert not list((tmp_path / "it").glob("*.part"))


def test_bad_data(place: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"text": "abc"}\n{"txt": 1}\n')
    for data, message in (
        (tmp_path / "empty.txt", "are empty"),
        (tmp_path / "bad.jsonl", r"Line 2 of '.*' has neither 'text'"),
        (tmp_path / "none.txt", "cannot be read: No such file"),
    ):
        with pytest.raises(InputError, match=message):
            train(options(place, tmp_path / "it", data=str(data)))
    (tmp_path / "short.txt").write_text("abcdefghij")
    with pytest.raises(InputError, match="There are 1 texts of 8 or more tokens, and training needs 2"):
        train(options(place, tmp_path / "other", data=str(tmp_path / "short.txt")))


def test_a_target_without_a_template_writes_no_conversations(place: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no chat template, so it cannot write conversations"):
        train(options(place, tmp_path / "it", data=None, style="chat"))


def test_a_drafter_of_another_target_is_told_or_refused(place: Path, tmp_path: Path) -> None:
    folder = train(options(place, tmp_path / "it", steps=2))
    trained_on = r"The eagle drafter was trained on other weights \(target, float32 from a folder\)"
    with pytest.warns(PacelineWarning, match=trained_on):
        paceline.SpeculativeDecoder(llama(5, num_hidden_layers=3).float(), paceline.load_drafter(folder))
    with pytest.raises(UnsupportedError, match="This eagle head was made for a target"):
        paceline.SpeculativeDecoder(llama(0, num_hidden_layers=2).float(), paceline.load_drafter(folder))


def test_it_stops_where_nothing_gets_better(place: Path, tmp_path: Path) -> None:
    train(options(place, tmp_path / "it", patience=1, steps=400, evaluate=2, learning_rate=1e-9))
    steps = [json.loads(line)["step"] for line in (tmp_path / "it" / LOG).read_text().splitlines()]
    assert max(steps) < 20


def test_a_file_says_that_it_is_enough(place: Path, tmp_path: Path) -> None:
    class Impatient(Reporter):
        def note(self, sentence: str) -> None:
            if sentence.startswith("step 3: held out"):
                (tmp_path / "it" / STOP_FILE).touch()

    train(options(place, tmp_path / "it", steps=400, evaluate=3), Impatient())
    lines = [json.loads(line) for line in (tmp_path / "it" / LOG).read_text().splitlines()]
    assert max(line["step"] for line in lines) == 3
    assert (tmp_path / "it" / "model.safetensors").exists()
    assert not (tmp_path / "it" / STOP_FILE).exists(), "the next training is not over at once"


def test_what_it_was_worth_in_the_end_is_what_is_told(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what it was worth when it was looked at before."""
    asked, worth = iter(range(100)), iter((1.5, 1.6, 1.7))

    def after_seven() -> bool:
        if next(asked) == 7:  # once before the first step
            (tmp_path / "it" / STOP_FILE).touch()
        return False

    monkeypatch.setattr(trainer, "evaluate", lambda *_: Evaluation(1.0, (0.5,), next(worth)))
    train(options(place, tmp_path / "it", steps=400, evaluate=3), cancel=after_seven)
    assert json.loads((tmp_path / "it" / LOG).read_text().splitlines()[-1])["step"] == 7
    assert json.loads((tmp_path / "it" / "provenance.json").read_text())["held_out"]["tau"] == 1.7


class Clock:
    """Stands still but for steps: a second each, and three from the thirtieth on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        real = trainer.Trainer._step

        def timed(it: Any, step: int) -> None:
            real(it, step)
            self.now += 1.0 if step < 30 else 3.0

        monkeypatch.setattr(trainer.Trainer, "_step", timed)
        monkeypatch.setattr(trainer, "time", self)
        monkeypatch.setattr(run, "time", self)

    def monotonic(self) -> float:
        return self.now


def test_by_the_clock(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast it is, and whatever comes between: the rate has fallen to a tenth when the time is over."""
    clock = Clock(monkeypatch)
    args = options(place, tmp_path / "it", steps=None, evaluate=None, minutes=2.0, warm_up=0.1, learning_rate=1e-3)
    with pytest.raises(KeyboardInterrupt):
        train(args, cancel=Stop(20))
    clock.now += 5000.0  # time between two runs does not count
    train(args)
    lines = [json.loads(line) for line in (tmp_path / "it" / LOG).read_text().splitlines()]
    assert max(line["step"] for line in lines) == 60, "30 of a second and 30 of three"
    rates = {line["step"]: line["learning_rate"] for line in lines if "learning_rate" in line}
    assert rates[10] < rates[20] < 1e-3 * 20 / 50 + 1e-9, "it rises by steps too: the first ones may compile"
    assert rates[50] > rates[60] == pytest.approx(1e-4, rel=0.02)
    assert 12 <= sum("held_out" in line for line in lines) <= 20
    clock.now -= 100.0
    monkeypatch.setattr(
        clock, "monotonic", lambda: clock.now + 100.0 * bool(list((tmp_path / "other").glob("texts/s*")))
    )
    eye, notes = Reporter(), []
    monkeypatch.setattr(eye, "note", notes.append)
    train(options(place, tmp_path / "other", steps=None, evaluate=None, minutes=2.0), eye)
    last = (tmp_path / "other" / LOG).read_text().splitlines()[-1]
    assert json.loads(last)["step"] == 20, "texts took 100 s of the two minutes"
    assert any("20 s of 2 minutes are left for training; fewer --tokens" in note for note in notes)


def test_looks_that_take_long_are_few(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    real = trainer.Trainer._evaluate

    def slow(it: Any) -> Any:
        clock.now += 10.0
        return real(it)

    monkeypatch.setattr(trainer.Trainer, "_evaluate", slow)
    train(options(place, tmp_path / "it", steps=None, evaluate=None, minutes=2.0))
    lines = [json.loads(line) for line in (tmp_path / "it" / LOG).read_text().splitlines()]
    assert sum("held_out" in line for line in lines) <= 4, "a look of 10 s at most every 50"


def test_the_rate_rises_and_falls() -> None:
    args = TrainOptions(out="x", learning_rate=1.0, warm_up=0.1)
    rates = [learning_rate(step, 100, args) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[10] == 1.0
    assert rates[-1] == pytest.approx(0.1, abs=0.01)
    assert all(one >= other for one, other in pairwise(rates[10:]))


def test_by_the_clock_the_learning_rate_is_never_higher_than_said() -> None:
    args = TrainOptions(out="x", minutes=1, learning_rate=1.0)
    rates = [learning_rate(second / 10, 60.0, args) for second in range(601)]
    assert max(rates) == 1.0
    assert rates[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": ""}, "--out FOLDER"),
        ({"kind": "eagl"}, "Did you mean 'eagle'"),
        ({"loss": "kll"}, "Did you mean 'kl'"),
        ({"learning_rate": 0.0}, "learning_rate must be more than 0"),
        ({"numbers": "int3"}, "numbers must be bfloat16, float32 or int8"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"minutes": 0.0}, "minutes must be more than 0"),
        ({"minutes": 1.0, "steps": 5}, "minutes .* go neither with steps"),
        ({"warm_up": 1.0}, "warm_up is a share"),
    ],
)
def test_bad_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PacelineError, match=message):
        TrainOptions(**{"out": "x", **changes})


def test_options_of_a_kind() -> None:
    assert TrainOptions(out="x", kind="medusa", options=("heads=2", "own-output=yes")).kind_options().own_output is True
    for wrong, message in (("head=2", "Did you mean 'heads'"), ("heads", "name=value"), ("heads=9", "1 to 5 heads")):
        with pytest.raises(InputError, match=message):
            TrainOptions(out="x", kind="medusa", options=(wrong,)).kind_options()


def test_shards_never_mix(tmp_path: Path) -> None:
    shards = Shards(tmp_path / "s", {"target": "a"})
    shards.append([Text([1, 2, 3], 1), Text([4], 0)])
    shards.append([])
    shards.append([Text([5, 6], 2)])
    again = Shards(tmp_path / "s", {"target": "a"})
    assert list(again.texts()) == [Text([1, 2, 3], 1), Text([4], 0), Text([5, 6], 2)]
    assert len(again) == 3
    with pytest.raises(InputError, match="were made with target = 'a', not 'b'"):
        Shards(tmp_path / "s", {"target": "b"})


def test_batches_are_the_same_again_and_hold_out() -> None:
    texts = [Text(list(range(i, i + 9 + i % 7)), i % 3) for i in range(200)]
    one, other = Corpus(texts, 12, 48, 3), Corpus(texts, 12, 48, 3)
    for number in (0, 5, one.batches + 2, 0):
        assert torch.equal(one.batch(number).ids, other.batch(number).ids)
    seen = {tuple(piece.tokens) for piece in one.pieces}
    held = {tuple(piece.tokens) for piece in one.held_out}
    assert held
    assert not seen & held
    every = [one.batch(number) for number in range(one.batches)]
    assert all(batch.ids.numel() <= 48 for batch in every)
    rows = sorted(tuple(row[: int(length)].tolist()) for batch in every
                  for row, length in zip(batch.ids, _lengths(batch), strict=True))  # fmt: skip
    assert rows == sorted(tuple(piece.tokens) for piece in one.pieces), "every piece once in an epoch"
    assert not torch.equal(one.batch(0).ids, one.batch(one.batches).ids), "another order in the next one"


def _lengths(batch: Any) -> list[int]:
    return [int(row.nonzero().max()) + 1 for row in batch.learn]


@pytest.mark.parametrize("kind", ["draft-lm", "eagle", "early-exit", "medusa", "prophet", "trigram"])
def test_every_kind_from_a_file_to_a_drafter(kind: str, place: Path, tmp_path: Path) -> None:
    args = {"early-exit": ("layers=1",), "draft-lm": ("layers=1",), "eagle": ("vocabulary=36",)}.get(kind, ())
    folder = train(options(place, tmp_path / kind, kind=kind, options=args, steps=6, evaluate=3, numbers="int8"))
    lm = paceline.load(str(place / "target"), dtype="float32")
    plain = paceline.SpeculativeDecoder(lm, draft=None).generate([1, 2, 3], max_new_tokens=20)
    for drafter in (paceline.load_drafter(folder), paceline.load_drafter(folder, lm), str(folder)):
        found = paceline.SpeculativeDecoder(lm, drafter).generate([1, 2, 3], max_new_tokens=20)
        assert found.tokens == plain.tokens
        assert found.stats.drafted > 0


def test_a_smaller_trigram(place: Path, tmp_path: Path) -> None:
    every, often = (
        TrigramTable.load(train(options(place, tmp_path / str(least), kind="trigram", options=(f"least={least}",)))
                          / "model.safetensors")
        for least in (1, 3)
    )  # fmt: skip
    assert 0 < len(often.triples.tokens) < len(every.triples.tokens)
    with pytest.raises(InputError, match="least must be at least 1, got 0"):
        train(options(place, tmp_path / "none", kind="trigram", options=("least=0",)))


@pytest.mark.nightly
def test_a_pair_from_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("the cat sat on the mat. the dog sat on the log. a frog is in the bog.\n" * 80)
    args = TrainOptions(
        kind="pair", out=str(tmp_path / "it"), data=str(tmp_path / "data.txt"), steps=120, evaluate=60, measure=2,
        options=("vocabulary=300", "width=48", "layers=2", "draft_width=32", "draft_layers=1", "context=128"),
        length=48, batch=384, learning_rate=5e-3, held_out=4,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        train(args, cancel=Stop(30))
    folder = train(args)
    main, draft = paceline.load(str(folder / "main")), paceline.load(str(folder / "draft"))
    plain = paceline.SpeculativeDecoder(main, draft=None).generate("the cat", max_new_tokens=24)
    found = paceline.SpeculativeDecoder(main, draft).generate("the cat", max_new_tokens=24)
    assert found.tokens == plain.tokens
    assert found.stats.mean_accepted_length > 2, "both have learnt three sentences"
    assert not list(folder.rglob(NAME))
    with pytest.raises(InputError, match="give --data FILE"):
        train(TrainOptions(kind="pair", out=str(tmp_path / "none")))


def test_costs_of_this_machine_say_what_it_would_be_worth(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    folder = train(options(place, tmp_path / "it", predict=True, steps=8))
    held = json.loads((folder / "provenance.json").read_text())["held_out"]
    assert held["gamma"] >= 0
    assert held["speedup"] >= 1.0
    if held["gamma"]:
        assert f"{held['speedup']:.2f}× at γ={held['gamma']}" in (folder / "README.md").read_text()
