"""The staircase: tokens by time, one step per round."""

from __future__ import annotations

import re

import pytest
from tests.toys import letters, llama

import paceline
from paceline.common import drawing
from paceline.common.errors import InputError, UnsupportedError
from paceline.core.trace import Round, Trace
from paceline.engine.request import Generation
from paceline.engine.views.result_page import page_of
from paceline.engine.views.staircase import _ticks, stairs_of, svg_of

ROUNDS = [Round((2, 3), None, (0, 1), 4, True), Round((), None, (), 5, True), Round((6, 7), None, (0,), 8, False)]


def made(rounds: list[Round], seconds: list[float], drafter: str = "toy-drafter") -> Generation:
    trace = Trace(list(rounds), seconds)
    tokens = [token for entry in rounds for token in entry.emitted]
    result = Generation(letters().decode(tokens), tokens, "length", None, trace.stats(1.0), trace, [0], 7)
    return result.shown_by(letters(), drafter)


SPECULATIVE = made(ROUNDS, [0.1, 0.05, 0.25])
PLAIN = made([Round((), None, (), token, True) for token in range(2, 8)], [0.1] * 6, "none")


def test_a_step_is_a_round() -> None:
    stair, plain = stairs_of(SPECULATIVE, PLAIN)
    assert stair.times == pytest.approx([100, 150, 400])
    assert stair.tokens == [3, 4, 6]
    assert stair.label == "toy-drafter: 6 tokens in 400 ms, 3 rounds"
    assert plain.label == "plain decoding: 6 tokens in 600 ms, 6 rounds"
    assert stairs_of(made(ROUNDS, [1, 2, 3], ""))[0].name == "speculative decoding"


def test_the_svg_has_both_stairs_on_one_axis() -> None:
    picture = svg_of(stairs_of(SPECULATIVE, PLAIN))
    first, second = (re.search(rf'class="s{at}" d="M46 220(.*?)"', picture) for at in (0, 1))
    assert first is not None
    assert second is not None
    wide, high = 580, 208
    steps = [(46 + wide * time / 600, 220 - high * tokens / 6) for time, tokens in ((100, 3), (150, 4), (400, 6))]
    assert [tuple(map(float, step)) for step in re.findall(r"H([\d.]+)V([\d.]+)", first[1])] == [
        pytest.approx(step, abs=0.06) for step in steps
    ]
    assert len(re.findall("H", second[1])) == 6
    assert second[1].endswith("H626.0V12.0")
    assert 'aria-label="tokens by time (ms). toy-drafter: 6 tokens in 400 ms, 3 rounds; plain' in picture
    assert picture in page_of(SPECULATIVE, plain=PLAIN)


def test_the_name_of_a_drafter_stays_text() -> None:
    picture = svg_of(stairs_of(made(ROUNDS, [1, 2, 3], '"><script>')))
    assert "<script>" not in picture
    assert "&quot;&gt;&lt;script&gt;" in picture


@pytest.mark.parametrize(
    ("top", "ticks"),
    [(6, [0, 2, 4, 6]), (400, [0, 100, 200, 300, 400]), (0.3, [0, 0.1, 0.2, 0.3]), (1, [0, 0.2, 0.4, 0.6, 0.8, 1])],
)
def test_an_axis_has_a_few_round_values(top: float, ticks: list[float]) -> None:
    assert _ticks(top) == ticks


def test_a_decoder_measures_the_rounds_of_its_texts() -> None:
    model = paceline.LanguageModel(llama(), letters(), name="toy")
    out = paceline.SpeculativeDecoder(model, "prompt-lookup").generate("abcabc", max_new_tokens=12, ignore_eos=True)
    (stair,) = stairs_of(out)
    assert (stair.name, stair.tokens[-1], len(stair.times)) == ("prompt-lookup", 12, out.stats.rounds)
    assert 0 < stair.times[0] <= stair.times[-1] <= out.stats.seconds * 1000


def test_plot_returns_a_figure() -> None:
    pytest.importorskip("matplotlib")
    figure = SPECULATIVE.plot(PLAIN)
    (axes,) = figure.axes
    first, second = axes.lines
    assert first.get_drawstyle() == "steps-post"
    assert list(first.get_xdata()) == pytest.approx([0, 100, 150, 400])
    assert list(first.get_ydata()) == [0, 3, 4, 6]
    assert len(second.get_xdata()) == 7
    assert first.get_linestyle() != second.get_linestyle()
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("time (ms)", "tokens")
    told = [text.get_text() for text in axes.get_legend().get_texts()]
    assert told == [stair.label for stair in stairs_of(SPECULATIVE, PLAIN)]
    assert figure._repr_png_().startswith(b"\x89PNG")  # what a notebook shows
    assert len(SPECULATIVE.plot().axes[0].lines) == 1


def test_a_missing_matplotlib_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "can_draw", lambda: False)
    with pytest.raises(UnsupportedError, match=r"^Charts need matplotlib: pip install 'paceline\[bench\]'\.$"):
        SPECULATIVE.plot()
    assert "<svg" in page_of(SPECULATIVE)  # the page needs none


def test_a_result_without_times_has_no_stair() -> None:
    for result in (made(ROUNDS, []), made([], [])):
        with pytest.raises(InputError, match="has no time for each round"):
            stairs_of(result)
        assert "<svg" not in page_of(result)
    with pytest.raises(InputError):
        SPECULATIVE.plot(made(ROUNDS, []))
