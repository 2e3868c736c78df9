"""Every flag of every command: it is parsed, it is in a test, and its value arrives."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from safetensors import safe_open

from paceline.bench import machine_use as machine
from paceline.bench.bench_options import PRESETS
from paceline.bench.peers.peer_names import _PEERS
from paceline.bench.tasks import SAMPLERS
from paceline.cli.command_options import AuditOptions, ChatOptions, GenerateOptions, PlaygroundOptions, ServeOptions
from paceline.cli.commands.bench import BenchCommandOptions
from paceline.cli.commands.tune import TuneCommandOptions
from paceline.cli.main import app
from paceline.common.options import declared
from paceline.training.train_options import TrainOptions
from tests.bench.made_reports import COSTS
from tests.cli.conftest import refusal, run

ROOT = Path(__file__).parents[2]
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
SETTINGS: dict[str, type] = {"generate": GenerateOptions, "chat": ChatOptions, "audit": AuditOptions,
                             "bench": BenchCommandOptions, "tune": TuneCommandOptions,
                             "train": TrainOptions, "serve": ServeOptions,
                             "playground": PlaygroundOptions}  # fmt: skip
EXAMPLES = {int: ("3", "3"), float: ("0.25", "0.25")}  # a type: in a call, in the output
WORDS = {"gamma": ("7", "7"), "draft": ("suffix", '"suffix"'), "rule": ("match", '"match"')}  # what is not any text
# --speculative-config is shown as what it means, and keys are not shown
KEYS = {"api_key", "against_api_key", "operator_key"}
NOT_SETTINGS = {"config", "print_config", "debug", "help", "speculative_config", *KEYS}
APART = ("compare", "trace")  # of `generate`: one goes without the other


def parameters(command: str) -> list[Any]:
    made = COMMANDS[command]
    context = made.make_context(command, [], resilient_parsing=True)
    return [each for each in made.get_params(context) if each.param_type_name == "option"]


def flags(command: str) -> list[str]:
    return [flag for each in parameters(command) for flag in (*each.opts, *each.secondary_opts)]


def example(command: str, name: str) -> tuple[str, str]:
    """A value for a setting, as a call gives it and as `--print-config` shows it."""
    field = next(field for field in declared(SETTINGS[command]) if field.name == name)
    if field.about.names == "rule":
        return WORDS["rule"]
    if field.choices:
        return field.choices[0], f'"{field.choices[0]}"'
    kinds = get_args(field.hint) if field.is_list else field.kinds
    return next((EXAMPLES[kind] for kind in kinds if kind in EXAMPLES), ("w", '"w"'))


def test_every_command_with_settings_is_here() -> None:
    assert {name for name in COMMANDS if any(each.name == "print_config" for each in parameters(name))} == {*SETTINGS}


@pytest.mark.parametrize("command", SETTINGS)
def test_flags_become_settings(command: str) -> None:
    """`--print-config` shows the value of every flag, and that it comes from a flag; by each of its names."""
    for ways in (0, 1):
        given, wanted = list[str](), list[str]()
        for option in parameters(command):
            spoken = [(flag, True) for flag in option.opts] + [(flag, False) for flag in option.secondary_opts]
            if option.name in NOT_SETTINGS or option.name == APART[ways] or ".NAME" in option.opts[0]:
                continue
            flag, yes = spoken[ways % len(spoken)]
            if option.is_flag:
                given, shown = [*given, flag], str(yes).lower()
            else:
                word, shown = example(command, option.name)
                given, shown = [*given, flag, word], f"[{shown}]" if option.multiple else shown
            wanted.append(f"{option.name.replace('_', '-')} = {shown}  # flag")
        result = run(command, *given, "--print-config")
        assert result.exit_code == 0, result.output
        assert set(wanted) <= set(result.stdout.splitlines()), set(wanted) - set(result.stdout.splitlines())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_in_a_test(command: str) -> None:
    """A new flag needs a test that uses it: the one above only parses it."""
    texts = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py"))
    texts += " ".join(f"--{name}" for name in re.findall(r'"([\w-]+)": ', _LEARNING))
    missing = [flag for flag in flags(command) if not re.search(rf"{_sought(flag)}(?![\w-])", texts)]
    assert not missing, f"flags of `paceline {command}` that no test uses: {', '.join(missing)}"


def _sought(flag: str) -> str:
    """`--rule.NAME` stands for all options of a rule."""
    return rf"{re.escape(flag.removesuffix('NAME'))}\w+" if flag.endswith(".NAME") else re.escape(flag)


def test_a_flag_that_no_test_uses_is_found() -> None:
    assert re.search(rf"{_sought('--rule.NAME')}(?![\w-])", "--rule.lenience 0.5")
    assert not re.search(rf"{_sought('--held')}(?![\w-])", "--held-out 3")


# ---- the page and the help of `bench`


def test_the_page_of_bench_lists_every_flag_and_no_other() -> None:
    page = (ROOT / "docs" / "bench.md").read_text("utf-8")
    section = page.partition("## All flags")[2].partition("\n## ")[0]
    propose_lists = re.findall(r"`(--[\w-]+)`", section.partition("|---|---|")[2])
    assert sorted(set(propose_lists)) == sorted(flags("bench"))
    assert set(re.findall(r"--[a-z][\w-]+", page)) <= {*flags("bench")}


def test_the_help_of_bench_names_what_there_is() -> None:
    told = {each.name: each.help for each in parameters("bench")}
    for option, names in (("peer", _PEERS), ("preset", PRESETS), ("sampler", [*SAMPLERS, "all"])):
        found = set(re.split(r"[ ,;:]+", told[option]))
        assert set(names) <= found, f"--{option}"
    assert not [text for text in told.values() if "llama.cpp" in text]


# ---- flags that no other test uses, on tiny models

_LEARNING = """{"kind": "medusa", "option": "heads=1", "tokens": 600, "question": 8, "answer": 16, "rows": 4,
    "shard": 4, "style": "text", "length": 64, "batch": 128, "accumulate": 2, "epochs": 1.5, "weight-decay": 0.25,
    "clip": 0.5, "loss": "tv@0.8", "evaluate": 1, "held-out": 2, "patience": 1, "measure": 1, "numbers": "float32",
    "device": "cpu"}"""


def test_what_train_is_told_arrives(target: str, tmp_path: Path) -> None:
    values = {**json.loads(_LEARNING), "target": target, "out": str(tmp_path / "out")}
    given = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    result = run("train", *given, "--join", "--no-predict", "--texts", str(tmp_path / "texts"))
    assert result.exit_code == 0, result.output
    about = json.loads((tmp_path / "out" / "provenance.json").read_text())
    for name, value in values.items():
        key = {"option": "options"}.get(name, name.replace("-", "_"))
        assert about["arguments"][key] == ([value] if name == "option" else value)
    assert about["arguments"]["join"] is True
    assert about["arguments"]["predict"] is False
    assert (tmp_path / "texts" / "manifest.json").is_file()
    assert "no better τ since step 1" in result.output  # --evaluate 1 --patience 1
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert {str(file.get_tensor(name).dtype) for name in file.keys()} <= {"torch.float32", "torch.int64"}  # noqa: SIM118


def test_what_train_is_told_of_time_and_processes_arrives(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr("paceline.training.train_run.train", lambda options, *_, **__: told.append(options) or "folder")
    for given in (["--minutes", "0.5"], ["--accelerate", "--predict"]):
        result = run("train", "--target", target, "--out", "x", *given)
        assert result.exit_code == 0, result.output
    assert [(each.minutes, each.accelerate, each.predict) for each in told] == [(0.5, False, True), (None, True, True)]


def test_a_plan_for_several_processes_needs_them(target: str) -> None:
    assert "torchrun" in refusal("generate", "abc", "--target", target, "--tp-plan", "auto", code=2)


@pytest.mark.parametrize("flag", ["--strict", "--first-target"])
def test_a_flag_that_keeps_the_text(target: str, flag: str) -> None:
    base = ("generate", "abc abc", "--target", target, "--max-new-tokens", "6", "--runner", "eager", "--json")
    given = (("none",), ("none", flag), ("prompt-lookup", flag))
    results = [run(*base, "--draft", *each) for each in given]
    assert [each.exit_code for each in results] == [0, 0, 0]
    assert len({json.loads(each.stdout)["text"] for each in results}) == 1


def test_beams_take_another_length_penalty_and_fewer_children(target: str) -> None:
    base = ("generate", "abc", "--target", target, "--runner", "eager", "--draft", "none", "--beams", "2", "--n-best",
            "2", "--max-new-tokens", "6", "--json")  # fmt: skip
    usual, other, narrow = (
        [each["score"] for each in json.loads(run(*base, *more).stdout)["beams"]]
        for more in ((), ("--length-offset", "5"), ("--beam-top-k", "1"))
    )
    assert other == pytest.approx([score * 6 / ((5 + 6) / (5 + 1)) for score in usual])
    assert len(narrow) == 1  # one child of each beam: there is one text


def test_the_false_alarm_of_an_audit_has_limits() -> None:
    assert "false_alarm must be at most 0.1" in refusal("audit", "--only-rule", "--false-alarm", "3", code=2)


@pytest.fixture
def quick_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("paceline.bench.bench_session.costs_of", lambda *_: (COSTS, []))
    monkeypatch.setattr("paceline.bench.bench_session.how_busy", lambda *_: machine.Busy(0.0))
    return ["bench", "--max-new-tokens", "4", "--repeats", "1", "--warm-up", "0"]


def test_a_made_up_pair_of_two_shapes(quick_bench: list[str]) -> None:
    shapes = ("--shape", "llama-68m", "--draft-shape", "tiny")
    told = refusal(*quick_bench, *shapes, "--construction", "0.1", code=2)
    assert "tiny" in told


def test_two_turns_plots_and_a_project(
    quick_bench: list[str], target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, logged = tmp_path / "two.jsonl", list[str]()
    prompts.write_text(json.dumps({"question_id": 1, "category": "chat", "turns": ["abc abc", "def"]}) + "\n")
    monkeypatch.setattr(
        "paceline.bench.results.outputs.log", lambda report, summary, project: logged.append(project) or "there"
    )
    monkeypatch.setattr("paceline.bench.results.outputs.check_wandb", lambda: None)
    given = ("--target", target, "--prompts", str(prompts), "--run", "suffix", "--turns", "2", "--no-chat", "--json")
    result = run(*quick_bench, *given, "--png", str(tmp_path / "plots"), "--wandb", "--wandb-project", "mine")
    assert result.exit_code == 0, result.output
    tasks = {json.loads(line).get("task") for line in result.stdout.splitlines()}
    assert {"1", "1/2"} <= tasks
    assert (tmp_path / "plots" / "speed-up.png").is_file()
    assert logged == ["mine"]


def test_so_many_finalists_are_measured(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.bench import tuning as tune

    told: list[Any] = []

    def measure(lm: Any, prompts: Any, options: Any, **_: Any) -> Any:
        told.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "tune", measure)
    run("tune", "--target", target, "--finalists", "2")
    assert told[0].finalists == 2
