"""The public Python API: what a decoder drafts with by default, how objects print, and what its types say."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from tests.toys import letters, llama, naive

import paceline
from paceline.common.errors import InputError, UnsupportedError
from paceline.core.sampling import Sampling
from paceline.engine import decoder as decoders
from paceline.engine.request import ALIASES, Generation, Request

ROOT = Path(__file__).parents[2]
SAMPLE = Path(__file__).with_name("typed_sample.py")


def lm(text: bool = False) -> paceline.LanguageModel:
    return paceline.LanguageModel(llama(), letters() if text else None, name="toy")


# ---- the default drafter


def test_a_decoder_drafts_with_auto_and_none_is_plain() -> None:
    model = lm()
    decoder = paceline.SpeculativeDecoder(model)
    assert decoder.drafter.name == "auto"
    assert not paceline.SpeculativeDecoder(model, None).speculates
    assert not paceline.SpeculativeDecoder(model, draft=None).speculates
    assert decoder.generate([1, 2, 1, 2, 1], max_new_tokens=12).tokens == naive(model.model, [1, 2, 1, 2, 1], 12)


def test_a_config_without_a_draft_means_auto_too() -> None:
    assert paceline.SpeculativeDecoder.from_config({}, lm()).drafter.name == "auto"


@pytest.mark.parametrize("given", [{}, {"draft": "auto"}, {"draft": None}])
def test_a_prediction_is_the_draft_where_none_was_chosen(given: dict[str, Any]) -> None:
    model = lm()
    wanted = naive(model.model, [7, 8], 20)
    out = paceline.SpeculativeDecoder(model, **given).generate([7, 8], max_new_tokens=20, prediction=wanted)
    assert out.tokens == wanted
    assert out.stats.accepted_prediction_tokens == out.stats.accepted > 12


def test_names_of_transformers_replace_the_default() -> None:
    model = lm()
    assert paceline.SpeculativeDecoder(model, prompt_lookup_num_tokens=3).drafter.name == "prompt-lookup"
    assert paceline.SpeculativeDecoder(model, assistant_model=llama(1)).drafter.name == "draft-model"
    assert paceline.SpeculativeDecoder(model, assistant_model=None).drafter.name == "auto"


def test_a_shared_target_names_plain_decoding_as_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "is_sharded", lambda lm: True)
    with pytest.raises(UnsupportedError, match=r"or draft=None"):
        paceline.SpeculativeDecoder(lm())


# ---- the public names

NAMES = """DRAFTERS RULES Budget CustomGenerate Drafter DrafterError Generation InputError LanguageModel LoadError
    ModelOutputError PacelineError PacelineWarning Piece Rule Sampling SpeculativeDecoder TokenTree UnknownNameError
    UnsupportedError Verdict contrast guided load load_drafter show speculative_sampling speculative_step"""


def test_the_public_names() -> None:
    assert sorted(paceline.__all__) == sorted(NAMES.split())
    for name in paceline.__all__:
        assert getattr(paceline, name).__doc__


# ---- how objects print


def test_a_decoder_prints_what_speculates_with_what() -> None:
    decoder = paceline.SpeculativeDecoder(lm(), "prompt-lookup", gamma=4)
    assert repr(decoder) == f"SpeculativeDecoder({decoder.describe()})"
    assert repr(decoder).startswith("SpeculativeDecoder(toy (float64, cpu; ")
    assert "prompt-lookup, γ=4, rule match" in repr(decoder)


def written(**settings: Any) -> Generation:
    decoder = paceline.SpeculativeDecoder(lm(text=True), "prompt-lookup", gamma=4)
    return decoder.generate("abcabcabc", max_new_tokens=24, ignore_eos=True, **settings)


def test_a_generation_prints_one_line_and_is_its_text() -> None:
    out = written()
    assert str(out) == f"{out}" == out.text
    stats = out.stats
    head = out.text if len(out.text) <= 40 else out.text[:39] + "…"
    assert repr(out) == f"Generation({head!r}, 24 tokens, τ {stats.mean_accepted_length:.2f}, length)"
    long = Generation("a" * 999, [1] * 999, "stop", 1, stats, out.trace, [1], 0)
    assert len(repr(long)) < 100


def test_a_stream_prints_how_far_it_is() -> None:
    stream = paceline.SpeculativeDecoder(lm(), "prompt-lookup").stream([[1, 2], [3]], max_new_tokens=3)
    next(stream)
    assert repr(stream).startswith("Stream(2 prompts, ")
    stream.close()


def test_a_generation_is_still_plain_data() -> None:
    out = written()
    again = pickle.loads(pickle.dumps(out))
    assert again == out
    assert set(asdict(out)) == {field.name for field in fields(Generation)}
    assert again._repr_html_()


# ---- types


def test_the_typed_settings_are_the_settings() -> None:
    from paceline.engine.request import Settings

    declared = {field.name for field in fields(Request)} | {field.name for field in fields(Sampling)}
    assert set(Settings.__annotations__) == (declared - {"sampling"}) | set(ALIASES) | {"do_sample"}


def test_sampling_is_no_setting() -> None:
    with pytest.raises(InputError, match="Unknown setting 'sampling'"):
        paceline.SpeculativeDecoder(lm(), None).generate([1], sampling=Sampling(), max_new_tokens=1)  # type: ignore[call-overload]


@pytest.mark.slow
def test_a_type_checker_knows_what_comes_back() -> None:
    """mypy over a sample of calls: `# error: CODE` marks lines that it must refuse, `# is: TYPE` what it reveals."""
    run = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary"]
    here = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    done = subprocess.run([*run, str(SAMPLE)], cwd=ROOT, env=here, capture_output=True, text=True)
    found = dict[int, str]()
    for line in done.stdout.splitlines():
        place, _, told = line.partition(": ")
        if Path(place.rpartition(":")[0]).name == SAMPLE.name:
            found.setdefault(int(place.rpartition(":")[2]), told)
    assert done.returncode in (0, 1), done.stderr
    for number, line in enumerate(SAMPLE.read_text().splitlines(), 1):
        if "# is: " in line:
            kind = line.rpartition("# is: ")[2]
            assert found.pop(number, "").endswith(f'Revealed type is "{kind}"'), (number, line, done.stdout)
        elif "# error: " in line:
            assert f"[{line.rpartition('# error: ')[2]}]" in found.pop(number, ""), (number, line, done.stdout)
    assert not found, f"not expected: {found}"
