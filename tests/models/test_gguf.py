"""GGUF files: exact weights, the tokenizer the file describes, and one sentence for every file that is broken."""

from __future__ import annotations

import itertools
import json
import random
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tests.models.tiny_gguf import (
    USER_DEFINED,
    byte_level_vocabulary,
    sentencepiece_vocabulary,
    tensors_of,
    tiny_gguf,
    tiny_llama,
    write_gguf,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

from paceline.common.errors import LoadError
from paceline.models.loading.gguf import PROVENANCE, _Cursor, convert, read_header
from paceline.models.loading.gguf_tokenizer import TokenizerError, build_tokenizer

CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def converted(tmp_path: Path, source: Path, **options: Any) -> Path:
    folder = tmp_path / "converted"
    folder.mkdir()
    convert(read_header(source), folder, **{"need_tokenizer": True, **options})
    return folder


def metadata(vocabulary: dict[str, Any]) -> dict[str, Any]:
    return {"general.architecture": "llama", **{f"tokenizer.ggml.{name}": value for name, value in vocabulary.items()}}


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    assert text.endswith(".")
    assert len(text) < 400
    return text


# ------------------------------------------------------------------------------------------------------------- weights


def test_plain_floats_come_out_exactly(tmp_path: Path) -> None:
    original = tiny_gguf(tmp_path / "m.gguf", chat_template=CHAT)
    folder = converted(tmp_path, tmp_path / "m.gguf")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", use_safetensors=True)
    assert model.dtype == torch.float32
    for name, weight in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    ids = torch.tensor([[1, 7, 30, 100, 4]])
    assert torch.equal(model(ids).logits, original(ids).logits)
    assert (model.config.bos_token_id, model.config.eos_token_id) == (1, 2)
    assert model.generation_config.eos_token_id == 2
    assert not hasattr(model.config, "quantization_config")
    assert json.loads((folder / PROVENANCE).read_text())["source"] == "m.gguf"


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        (gguf.GGMLQuantizationType.F16, torch.float16, 1e-3),
        (gguf.GGMLQuantizationType.Q8_0, torch.bfloat16, 2e-2),
    ],
)
def test_the_stored_type_follows_the_file(tmp_path: Path, kind, dtype: torch.dtype, tolerance: float) -> None:
    original = tiny_gguf(tmp_path / "m.gguf", kind=kind)
    model = AutoModelForCausalLM.from_pretrained(converted(tmp_path, tmp_path / "m.gguf"), dtype="auto")
    assert model.dtype == dtype
    weight, expected = model.lm_head.weight.float(), original.lm_head.weight
    assert (weight - expected).abs().max() < tolerance * expected.abs().max()


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    words = byte_level_vocabulary()
    model = tiny_llama(len(words["tokens"]))
    tensors = {name: tensor for name, tensor in tensors_of(model).items() if name != "output.weight"}
    write_gguf(tmp_path / "m.gguf", model, words, tensors=tensors)
    loaded = AutoModelForCausalLM.from_pretrained(converted(tmp_path, tmp_path / "m.gguf"))
    assert loaded.config.tie_word_embeddings
    assert torch.equal(loaded.lm_head.weight, model.model.embed_tokens.weight)


def test_an_end_of_turn_also_ends_a_text(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "m.gguf", {**byte_level_vocabulary(), "eot_token_id": 0})
    model = AutoModelForCausalLM.from_pretrained(converted(tmp_path, tmp_path / "m.gguf"))
    assert model.generation_config.eos_token_id == [2, 0]


def test_conversion_is_silent_and_puts_everything_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny_gguf(tmp_path / "m.gguf")
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    calls: list[tuple[str, int, int | None]] = []
    converted(tmp_path, tmp_path / "m.gguf", progress=lambda *call: calls.append(call))
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    counts = [(done, total) for label, done, total in calls if label == "converting m.gguf"]
    assert counts[0][0] == 0
    assert counts[-1][0] == counts[-1][1] == 21
    assert {label.split()[0] for label, _, _ in calls} == {"reading", "converting", "saving"}


def test_stretched_positions_are_remarked(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "m.gguf", extra={"llama.rope.scaling.type": "yarn"})
    folder = converted(tmp_path, tmp_path / "m.gguf")
    assert "RoPE" in json.loads((folder / PROVENANCE).read_text())["remarks"][0]


# ------------------------------------------------------------------------------------------------------- broken files


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "m.gguf"
    tiny_gguf(path)
    return path.read_bytes()


def patched(data: bytes, at: int, code: str, value: int) -> bytes:
    size = struct.calcsize("<" + code)
    return data[:at] + struct.pack("<" + code, value) + data[at + size :]


FIRST_KEY = 24  # the length of the first key; its value's type stands after the key
BROKEN = {
    "empty": lambda data: b"",
    "a few bytes": lambda data: data[:10],
    "another kind of file": lambda data: b"PK\x03\x04" + data[4:],
    "a web page": lambda data: b"<!doctype html><html>not found</html>" * 10,
    "version 1": lambda data: patched(data, 4, "I", 1),
    "another byte order": lambda data: patched(data, 4, "I", 3 << 24),
    "2**60 tensors": lambda data: patched(data, 8, "Q", 2**60),
    "2**60 values": lambda data: patched(data, 16, "Q", 2**60),
    "more values than there are": lambda data: patched(data, 16, "Q", 1000),
    "more tensors than there are": lambda data: patched(data, 8, "Q", 1000),
    "no tensors": lambda data: patched(data, 8, "Q", 0),
    "no values": lambda data: patched(data, 16, "Q", 0),
    "a key of 2**62 letters": lambda data: patched(data, FIRST_KEY, "Q", 2**62),
    "cut in the header": lambda data: data[:2000],
    "cut in the weights": lambda data: data[: len(data) // 2],
    "cut by one byte": lambda data: data[: len(data) - 33],
    "a value of an unknown type": lambda data: patched(data, FIRST_KEY + 8 + len("general.architecture"), "I", 77),
    "text that is not UTF-8": lambda data: data[:32] + b"\xff\xfe" + data[34:],
    "zeros": lambda data: data[:24] + bytes(len(data) - 24),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_one_sentence_at_once(
    tmp_path: Path, sound: bytes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: in no more reads than the file has bytes, whatever counts it claims."""
    path, reads, skip = tmp_path / "broken.gguf", itertools.count(1), _Cursor.skip

    def counted(self: _Cursor, length: int) -> int:
        assert next(reads) <= len(sound), "it reads on and on"
        return skip(self, length)

    monkeypatch.setattr(_Cursor, "skip", counted)
    path.write_bytes(BROKEN[name](sound))
    with pytest.raises(LoadError) as caught:
        read_header(path)
    assert "broken.gguf" in one_sentence(caught.value)


def test_any_damage_to_the_header_is_survived(tmp_path: Path, sound: bytes) -> None:
    """Random bytes and cuts: the header is read or refused, and nothing else ever comes out."""
    rng = random.Random(0)
    path = tmp_path / "broken.gguf"
    refused = 0
    for _ in range(300):
        data = bytearray(sound)
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(8000)] = rng.randrange(256)
        path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.3 else data)
        try:
            read_header(path)
        except LoadError as error:
            one_sentence(error)
            refused += 1
    assert refused > 100


def test_a_part_of_a_split_file_says_how_to_join_it(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "m.gguf", extra={"split.count": 3})
    with pytest.raises(LoadError, match="merge them first"):
        read_header(tmp_path / "m.gguf")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    words = byte_level_vocabulary()
    model = tiny_llama(len(words["tokens"]))
    tensors = {name: tensor for name, tensor in tensors_of(model).items() if name != "blk.1.ffn_up.weight"}
    write_gguf(tmp_path / "m.gguf", model, words, tensors=tensors)
    with pytest.raises(LoadError, match=r"lacks 1 weights .*layers\.1\.mlp\.up_proj"):
        converted(tmp_path, tmp_path / "m.gguf")


def test_a_tensor_of_another_shape_is_one_sentence(tmp_path: Path) -> None:
    words = byte_level_vocabulary()
    model = tiny_llama(len(words["tokens"]))
    write_gguf(tmp_path / "m.gguf", model, words, tensors={**tensors_of(model), "output.weight": torch.zeros(5, 32)})
    with pytest.raises(LoadError, match="size mismatch") as caught:
        converted(tmp_path, tmp_path / "m.gguf")
    one_sentence(caught.value)


def test_weights_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    words = byte_level_vocabulary()
    model = tiny_llama(len(words["tokens"]))
    model.lm_head.weight.data[3, 3] = float("nan")
    write_gguf(tmp_path / "m.gguf", model, words)
    with pytest.raises(LoadError, match=r"'lm_head\.weight' holds values that are not finite"):
        converted(tmp_path, tmp_path / "m.gguf")


def test_an_unknown_architecture_is_one_sentence(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "m.gguf", architecture="starship")
    with pytest.raises(LoadError, match="starship is not supported") as caught:
        converted(tmp_path, tmp_path / "m.gguf")
    one_sentence(caught.value)


# ---------------------------------------------------------------------------------------------------------- tokenizers


def test_the_saved_tokenizer_is_the_one_described(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "m.gguf", chat_template=CHAT)
    folder = converted(tmp_path, tmp_path / "m.gguf")
    for tokenizer in (PreTrainedTokenizerFast.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)):
        assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_start|>", "<|im_end|>", 2)
        assert tokenizer.pad_token_id == 2
        ids = tokenizer("hello world 12<|im_end|>").input_ids
        assert tokenizer.convert_ids_to_tokens(ids) == ["hello", "Ġworld", "Ġ", "1", "2", "<|im_end|>"]
        assert tokenizer.decode(ids) == "hello world 12<|im_end|>"
        shown = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
        assert shown == "<|im_start|>user\nhello<|im_end|>\n"
        assert tokenizer.model_max_length == 64


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["x", "ĠĠ", "1", "2", "3", "4"]),  # digits apart, so both spaces stay together
        ("gpt-2", ["x", "Ġ", "Ġ", "1", "2", "3", "4"]),
    ],
)
def test_the_splitter_is_the_one_the_file_names(pre: str, pieces: list[str]) -> None:
    vocabulary = byte_level_vocabulary(pre)
    vocabulary["tokens"] = [*vocabulary["tokens"], "ĠĠ"]
    vocabulary["token_type"] = [*vocabulary["token_type"], 1]
    vocabulary["merges"] = [*vocabulary["merges"], "Ġ Ġ"]
    tokenizer = build_tokenizer(metadata(vocabulary))
    assert tokenizer.tokenize("x  1234") == pieces


def test_bos_follows_the_file(tmp_path: Path) -> None:
    """Taken from the file, or from the family if the file has no value; never from transformers' defaults."""
    silent = {name: value for name, value in byte_level_vocabulary("llama-bpe").items() if name != "add_bos_token"}
    assert build_tokenizer(metadata(silent))("hello").input_ids[0] == 1
    assert build_tokenizer(metadata({**silent, "pre": "smollm"}))("hello").input_ids[0] != 1
    assert build_tokenizer(metadata({**silent, "add_bos_token": False}))("hello").input_ids[0] != 1
    both = build_tokenizer(metadata({**silent, "add_eos_token": True}))("hello").input_ids
    assert (both[0], both[-1]) == (1, 2)
    tiny_gguf(tmp_path / "m.gguf", silent)
    folder = converted(tmp_path, tmp_path / "m.gguf")
    assert PreTrainedTokenizerFast.from_pretrained(folder)("hello").input_ids[0] == 1


def test_sentencepiece_with_a_blank_in_front() -> None:
    tokenizer = build_tokenizer(metadata(sentencepiece_vocabulary()))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    ids = tokenizer("hello world").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "▁hello", "▁world"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello world"
    assert tokenizer.decode(tokenizer("hello é").input_ids, skip_special_tokens=True) == "hello é"  # through bytes
    assert tokenizer.tokenize("</s>hello") == ["</s>", "▁hello"]


def test_sentencepiece_without_a_blank_in_front() -> None:
    """As in Gemma: runs of spaces stand in the file as spaces, and what the user defined is never split."""
    plain = sentencepiece_vocabulary(add_space_prefix=False, add_bos_token=False)
    plain["tokens"] = [*plain["tokens"], "   ", "<table>"]
    plain["token_type"] = [*plain["token_type"], USER_DEFINED, USER_DEFINED]
    plain["scores"] = [*plain["scores"], -1000.0, -1000.0]
    plain["tokens"].append("  ")
    plain["token_type"].append(USER_DEFINED)
    plain["scores"].append(-1000.0)
    tokenizer = build_tokenizer(metadata(plain))
    assert tokenizer.tokenize(" hello   <table> world") == ["▁hello", "▁▁▁", "<table>", "▁world"]
    assert tokenizer.decode(tokenizer(" hello   world").input_ids) == " hello   world"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pre": "martian"}, "text splitter 'martian' is not known"),
        ({"pre": "default"}, "text splitter 'default' is not known"),
        ({"model": "rwkv"}, "kind 'rwkv'"),
        ({"eos_token_id": 10**6}, "eos token is number 1000000 of"),
        ({"tokens": []}, "no list of tokens"),
        ({"token_type": [1, 1]}, "2 token types"),
        ({"merges": ["one two three", "lonely"]}, "not a pair"),
        ({"merges": ["not there"]}, "do not fit its tokens"),
        ({"merges": []}, "only 0 of"),  # everything would be cut into characters
    ],
)
def test_a_tokenizer_that_would_be_wrong_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(TokenizerError, match=reason):
        build_tokenizer(metadata({**byte_level_vocabulary(), **changes}))


def test_a_file_without_a_tokenizer_has_none() -> None:
    assert build_tokenizer({"general.architecture": "llama"}) is None
    assert build_tokenizer({"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab"}) is None


def test_the_refusal_comes_before_the_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_gguf(tmp_path / "m.gguf", byte_level_vocabulary("martian"))
    monkeypatch.setattr("paceline.models.loading.gguf._read_model", lambda *_: pytest.fail("converted first"))
    with pytest.raises(LoadError, match="pass tokenizer=") as caught:
        converted(tmp_path, tmp_path / "m.gguf")
    one_sentence(caught.value)


def test_the_weights_of_such_a_file_are_still_good(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "m.gguf", byte_level_vocabulary("martian"))
    folder = converted(tmp_path, tmp_path / "m.gguf", need_tokenizer=False)
    assert (folder / "model.safetensors").is_file()
    assert not (folder / "tokenizer.json").exists()
    assert "martian" in json.loads((folder / PROVENANCE).read_text())["tokenizer_problem"]
