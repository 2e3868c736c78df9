"""llama.cpp as a peer: the file it is given, what it is asked, and, where it is installed, that it writes our text."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen3Config

from paceline.bench.candidate import Candidate, PacelineRun, Plan, Task
from paceline.bench.peers import gguf_export as gguf_writing
from paceline.bench.peers.gguf_peers import KINDS, LlamaCpp, Speculation
from paceline.bench.peers.peer_names import PeerSetup, open_peers
from paceline.common.errors import InputError, ModelOutputError, UnknownNameError, UnsupportedError
from paceline.models import load
from paceline.models.language_model import LanguageModel
from tests.models.tiny_gguf import tensors_of, tiny_gguf, tiny_llama
from tests.toys import SHAPE, build, gpt2, llama

ONE = Task("1", "story", ((1, 2, 3, 4, 5, 1, 2, 3),))
TWO = Task("1+2", "story", ((1, 2, 3, 4, 5, 1, 2, 3), (4, 5, 6)))
PLAN = Plan(tokens=20)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
NAMES = ("llama-cpp", "llama-cpp-ngram", "llama-cpp-q8")
installed = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")


def never() -> bool:
    return False


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def in_float32(model: Any, name: str = "tiny") -> LanguageModel:
    return LanguageModel(model.float(), name=name)


def opened(name: str, lm: LanguageModel) -> Candidate:
    peers, notes = open_peers([name], PeerSetup(lm))
    assert not notes
    return peers[0]


def tensors_in(file: Path) -> dict[str, np.ndarray]:
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(str(file)).tensors}


# ---- the file


def test_the_file_holds_the_weights_in_llama_cpps_order() -> None:
    model = tiny_llama(60)
    file = gguf_writing.written(LanguageModel(model, name="some/tiny"))
    found, expected = tensors_in(file), tensors_of(model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert np.array_equal(found[name], tensor.numpy()), name
    fields = gguf.GGUFReader(str(file)).fields
    assert fields["llama.attention.key_length"].contents() == 8
    assert fields["tokenizer.ggml.tokens"].contents()[:2] == ["0 ", "1 "]
    assert not [name for name in fields if "eos" in name]


def test_the_same_weights_are_written_once_and_others_anew() -> None:
    model = tiny_llama(60)
    file = gguf_writing.written(LanguageModel(model))
    stamp = file.stat().st_mtime_ns
    assert gguf_writing.written(LanguageModel(tiny_llama(60))) == file
    assert file.stat().st_mtime_ns == stamp
    assert gguf_writing.written(LanguageModel(tiny_llama(60)), "q8_0") != file
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert gguf_writing.written(LanguageModel(model)) != file
    plain, stretched = (gguf_writing.written(in_float32(llama(**more))) for more in ({}, {"rope_parameters": LLAMA3}))
    assert plain != stretched


def test_an_embedding_that_is_the_head_too_is_written_once() -> None:
    found = tensors_in(gguf_writing.written(in_float32(llama(tie_word_embeddings=True))))
    assert "token_embd.weight" in found
    assert "output.weight" not in found


@pytest.mark.parametrize(("kind", "most"), [("f16", 1e-3), ("bf16", 8e-3), ("q8_0", 1e-2)])
def test_rounded_weights_are_near_and_vectors_are_not_rounded(kind: str, most: float) -> None:
    model = tiny_llama(60)
    found = tensors_in(gguf_writing.written(LanguageModel(model), kind))
    for name, tensor in tensors_of(model).items():
        error = np.abs(found[name] - tensor.numpy()).max() / np.abs(tensor.numpy()).max()
        assert error <= most, name
        assert tensor.dim() > 1 or error == 0


def test_a_target_in_bfloat16_is_written_as_it_is() -> None:
    model = tiny_llama(60).to(torch.bfloat16)
    file = gguf_writing.written(LanguageModel(model))
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(str(file)).tensors}
    assert kinds == {"BF16", "F32"}
    assert np.array_equal(tensors_in(file)["output.weight"], model.lm_head.weight.detach().float().numpy())


def test_rows_that_are_no_whole_blocks_stay_in_float32() -> None:
    file = gguf_writing.written(in_float32(llama(intermediate_size=48)), "q8_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(str(file)).tensors}
    assert (kinds["blk.0.ffn_down.weight"], kinds["blk.0.ffn_up.weight"]) == ("F32", "Q8_0")


def test_stretched_positions_are_factors() -> None:
    model = llama(rope_parameters=LLAMA3)
    factors = tensors_in(gguf_writing.written(in_float32(model)))["rope_freqs.weight"]
    assert factors[0] == pytest.approx(1.0)
    assert factors[-1] == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("model", "part"),
    [
        (lambda: gpt2(), "GPT2LMHeadModel is not among"),
        (lambda: llama(hidden_act="gelu"), "'gelu'"),
        (lambda: build(Qwen2Config(**{**SHAPE, "head_dim": 16})), "heads as wide as the embedding (32)"),
        (lambda: llama(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}), "'yarn'"),
        (lambda: build(Qwen2Config(**{**SHAPE, "rope_parameters": LLAMA3})), "stretched positions of a qwen2"),
        (lambda: build(Qwen2Config(**{**SHAPE, "use_sliding_window": True, "sliding_window": 8,
                                      "max_window_layers": 0})), "sliding window"),
    ],
)  # fmt: skip
def test_what_a_file_cannot_say_is_left_out_in_one_line(model: Any, part: str, llama_cpp: SimpleNamespace) -> None:
    peers, notes = open_peers(["llama-cpp"], PeerSetup(in_float32(model())))
    assert not peers
    assert notes[0].startswith("llama-cpp is left out: ")
    assert part in notes[0]
    assert notes[0].count("\n") == 0


def test_float64_is_left_out(llama_cpp: SimpleNamespace) -> None:
    _, notes = open_peers(["llama-cpp"], PeerSetup(LanguageModel(llama())))
    assert "no weights in torch.float64" in notes[0]


def test_a_file_of_others_keeps_its_tensors_and_loses_its_words(tmp_path: Path) -> None:
    source = tmp_path / "theirs.gguf"
    tiny_gguf(source, kind=gguf.GGMLQuantizationType.Q8_0, extra={"general.languages": ["en", "de"]})
    ours = gguf.GGUFReader(str(gguf_writing.numbered(source)))
    theirs = gguf.GGUFReader(str(source))
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert (mine.name, mine.tensor_type) == (other.name, other.tensor_type)
        assert np.array_equal(mine.data, other.data)
    assert ours.fields["general.languages"].contents() == ["en", "de"]
    assert len(ours.fields["tokenizer.ggml.tokens"].contents()) == len(
        theirs.fields["tokenizer.ggml.tokens"].contents()
    )
    assert [name for name in ours.fields if name.startswith("tokenizer.")] == [
        "tokenizer.ggml.model", "tokenizer.ggml.tokens",
    ]  # fmt: skip


# ---- what it is asked, by a module that answers as xllamacpp does


@pytest.fixture
def llama_cpp(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A module `xllamacpp` whose server writes the tokens 0, 1, 2, ..."""
    seen = SimpleNamespace(requests=[], params=[], short=0, error=None, broken=False, presses=False)

    class Server:
        def __init__(self, params: Any) -> None:
            if seen.broken:
                raise RuntimeError("Failed to init server.")
            seen.params.append(params)

        def handle_completions(self, request: str, hear: Any) -> None:
            asked = json.loads(request)
            seen.requests.append(asked)
            if seen.error is not None:
                hear(json.dumps({"error": {"code": 400, "message": seen.error}}))
                return
            for token in range(asked["n_predict"] - seen.short):
                if seen.presses and hear.__self__.throw(KeyboardInterrupt):  # as when Ctrl-C is pressed meanwhile
                    return
                if hear(json.dumps({"choices": [{"text": f"{token} "}]})):
                    return
            hear(json.dumps({"choices": [{"text": ""}], "timings": {}}))

    def params() -> SimpleNamespace:
        lookup = {
            name: SimpleNamespace(size_n=12, size_m=48) for name in ("ngram_simple", "ngram_map_k", "ngram_map_k4v")
        }
        mod = SimpleNamespace(n_match=24, n_max=64, n_min=48)
        return SimpleNamespace(
            model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace(),
            speculative=SimpleNamespace(ngram_mod=mod, **lookup),
        )  # fmt: skip

    module: Any = ModuleType("xllamacpp")
    module.Server, module.CommonParams = Server, params
    types = {f"COMMON_SPECULATIVE_TYPE_{name.replace('-', '_').upper()}": name for name in KINDS}
    module.common_speculative_type = SimpleNamespace(**types)
    monkeypatch.setitem(sys.modules, "xllamacpp", module)
    return seen


def test_it_is_asked_for_the_same_ids_and_as_many(llama_cpp: SimpleNamespace) -> None:
    lm = in_float32(llama())
    peer = opened("llama-cpp", lm)
    run = peer.run(ONE, Plan(5, seed=9), 1, never)
    assert run.tokens == ((0, 1, 2, 3, 4),)
    assert len(run.arrivals) == 5
    assert 0 < run.first == run.arrivals[0] <= run.seconds
    (asked,) = llama_cpp.requests
    assert asked["prompt"] == list(ONE.prompts[0])
    assert {key: asked[key] for key in ("n_predict", "ignore_eos", "temperature", "cache_prompt", "seed")} == {
        "n_predict": 5, "ignore_eos": True, "temperature": 0.0, "cache_prompt": False, "seed": 9,
    }  # fmt: skip
    (params,) = llama_cpp.params
    assert params.model.path == str(gguf_writing.written(lm))
    assert (params.n_ctx, params.cache_ram_mib, params.cpuparams.n_threads) == (256, 0, torch.get_num_threads())
    assert not hasattr(params.speculative, "types")
    assert (peer.library, peer.exact, peer.speculates, peer.gamma) == ("llama.cpp", False, False, 0)
    assert "one text" in str(peer.refuses(TWO, PLAN))
    assert "noise" in str(peer.refuses(ONE, Plan(4, {"noise": 0.1})))
    assert "do not fit" in str(peer.refuses(ONE, Plan(89)))
    peer.close()


def test_sizes_that_are_not_said_are_its_own(llama_cpp: SimpleNamespace) -> None:
    lm = in_float32(llama())
    assert opened("llama-cpp-ngram", lm).gamma == 48
    peer = opened("llama-cpp-ngram:type=ngram-map-k,gamma=10,match=2", lm)
    assert (peer.speculates, peer.gamma) == (True, 10)
    peer.run(ONE, Plan(3), 0, never)
    drafting = llama_cpp.params[-1].speculative
    assert drafting.types == ["ngram-map-k"]
    assert (drafting.ngram_map_k.size_n, drafting.ngram_map_k.size_m) == (2, 10)


def test_one_that_remembers_texts_begins_anew_with_every_run(llama_cpp: SimpleNamespace) -> None:
    lm = in_float32(llama())
    for name, servers in (("llama-cpp-ngram:type=ngram-mod,gamma=16", 3), ("llama-cpp-ngram", 1)):
        llama_cpp.params.clear()
        peer = opened(name, lm)
        for repeat in range(3):
            peer.run(ONE, Plan(4), repeat, never)
        assert len(llama_cpp.params) == servers
        if servers == 3:
            sizes = llama_cpp.params[0].speculative.ngram_mod
            assert (sizes.n_max, sizes.n_min, sizes.n_match) == (16, 16, 24)


def test_weights_can_be_in_eight_bits(llama_cpp: SimpleNamespace) -> None:
    lm = in_float32(llama())
    for name in ("llama-cpp-q8", "llama-cpp:weights=q8_0", "llama-cpp-ngram:weights=q8_0"):
        opened(name, lm).run(ONE, Plan(2), 0, never)
        assert llama_cpp.params[-1].model.path == str(gguf_writing.written(lm, "q8_0"))


def test_a_quantised_target_is_written_from_what_it_was_made_of(llama_cpp: SimpleNamespace, tmp_path: Path) -> None:
    tiny_llama(60).save_pretrained(tmp_path / "model")
    before = load(str(tmp_path / "model"), dtype=torch.float32)
    opened("llama-cpp-q8", load(str(tmp_path / "model"), dtype=torch.float32, quantize="int8")).run(
        ONE, Plan(2), 0, never
    )
    assert llama_cpp.params[-1].model.path == str(gguf_writing.written(before, "q8_0"))


def test_it_grows_and_samples(llama_cpp: SimpleNamespace, tmp_path: Path) -> None:
    peer = LlamaCpp("llama-cpp", tmp_path / "x.gguf", 2048)
    peer.run(ONE, Plan(4, {"temperature": 0.7, "top_k": 3}), 0, never)
    (asked,) = llama_cpp.requests
    assert asked == asked | {"temperature": 0.7, "top_k": 3, "top_p": 1.0, "min_p": 0.0}
    peer.run(Task("2", "x", (tuple(range(300)),)), Plan(4), 0, never)
    assert [params.n_ctx for params in llama_cpp.params] == [256, 512]


def test_it_stops_when_it_is_told_to(llama_cpp: SimpleNamespace, tmp_path: Path) -> None:
    """xllamacpp loses what a callback raises: Ctrl-C must come through all the same."""
    peer = LlamaCpp("llama-cpp", tmp_path / "x.gguf", 2048)
    looks = iter([False, False, True])
    assert peer.run(ONE, Plan(9), 0, lambda: next(looks)).tokens == ((),)

    def pressed() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        peer.run(ONE, Plan(9), 0, pressed)
    llama_cpp.presses = True
    with pytest.raises(KeyboardInterrupt):
        peer.run(ONE, Plan(9), 0, never)
    llama_cpp.presses = False
    assert peer.run(ONE, Plan(4), 0, never).emitted == 4


def test_what_goes_wrong_is_one_sentence(llama_cpp: SimpleNamespace, tmp_path: Path) -> None:
    peer = LlamaCpp("llama-cpp", tmp_path / "x.gguf", 2048)
    llama_cpp.short = 1
    with pytest.raises(ModelOutputError, match="instead of 4"):
        peer.run(ONE, Plan(4), 0, never)
    llama_cpp.error = "Prompt contains\ninvalid tokens."
    with pytest.raises(UnsupportedError, match=r"refused to run .*: Prompt contains invalid tokens\.$"):
        peer.run(ONE, Plan(4), 0, never)
    peer.close()
    llama_cpp.broken = True
    with pytest.raises(UnsupportedError, match="cannot open"):
        peer.run(ONE, Plan(4), 0, never)


def test_an_older_one_may_lack_a_type(llama_cpp: SimpleNamespace, tmp_path: Path) -> None:
    sys.modules["xllamacpp"].common_speculative_type = SimpleNamespace()  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match="has no 'ngram-mod'; pip install -U xllamacpp"):
        LlamaCpp("llama-cpp-ngram", tmp_path / "x.gguf", 2048, Speculation("ngram-mod"))


@pytest.mark.parametrize("name", NAMES)
def test_without_the_package_nothing_is_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    peers, notes = open_peers([name], PeerSetup(in_float32(llama())))
    assert not peers
    assert notes == [f"{name} is left out: xllamacpp is not installed; pip install xllamacpp."]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama.cpp", UnknownNameError),
        ("llama-cpp:gamma=3", UnknownNameError),
        ("llama-cpp:weights=q9", UnknownNameError),
        ("llama-cpp-ngram:type=ngram", UnknownNameError),
        ("llama-cpp-ngram:gamma=0", InputError),
        ("llama-cpp:file=x.gguf,weights=q8_0", InputError),
    ],
)
def test_mistakes_are_errors(name: str, kind: type[Exception], llama_cpp: SimpleNamespace) -> None:
    with pytest.raises(kind):
        open_peers([name], PeerSetup(in_float32(llama())))


# ---- itself, where it is installed


def small(kind: str) -> Any:
    """Heads of a width that llama.cpp has kernels for, and a vocabulary of hundreds."""
    shape = {**SHAPE, "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    if kind == "llama":
        return llama(**shape)
    if kind == "llama3":
        return llama(**shape, rope_parameters=LLAMA3)
    if kind == "qwen2":
        return build(Qwen2Config(**{**shape, "hidden_size": 128}))
    return build(Qwen3Config(**shape))


@installed
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "llama3", "qwen2", "qwen3"])
def test_llama_cpp_writes_our_text(kind: str) -> None:
    """For as long as no two tokens are nearly as likely: its keys and values are in float16."""
    lm = in_float32(small(kind))
    plain = PacelineRun(lm, plain=True).run(ONE, Plan(30), 0, never)
    for name in ("llama-cpp", "llama-cpp-ngram:gamma=5,match=2", "llama-cpp-ngram:type=ngram-mod,gamma=4,match=3"):
        peer = opened(name, lm)
        run = peer.run(ONE, Plan(30), 0, never)
        peer.close()
        assert run.tokens == plain.tokens, name
        assert list(run.arrivals) == sorted(run.arrivals)
    looks = iter([False, True])
    assert peer.run(ONE, Plan(30), 0, lambda: next(looks)).tokens == ((),)


@installed
@pytest.mark.real
def test_llama_cpp_and_we_write_the_same_on_smollm2(monkeypatch: pytest.MonkeyPatch, record_property: Any) -> None:
    """The same float32 weights: texts may part at a near tie, and do not here."""
    monkeypatch.delenv("PACELINE_CACHE")
    lm = load("smollm2-135m")
    assert lm.tokenizer is not None
    texts = ("The capital of France is", "Repeat: one two three four five six. one two three four", "def fibonacci(n):")
    same = {}
    for name in NAMES:
        peer = opened(name, lm)
        for text in texts:
            task = Task(text, "x", (tuple(lm.tokenizer.encode(text)),))
            same[name, text] = (
                peer.run(task, Plan(32), 0, never).tokens
                == PacelineRun(lm, plain=True).run(task, Plan(32), 0, never).tokens
            )
        peer.close()
    record_property("measured", f"llama.cpp wrote our text: {sum(same.values())} of {len(same)}, q8 among them")
    assert all(same[name, text] for name in NAMES[:2] for text in texts)
