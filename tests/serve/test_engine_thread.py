"""The engine thread writes the text that each request has alone, whatever else runs."""

from __future__ import annotations

import random
import threading
from itertools import count
from typing import Any

import pytest
import torch

import paceline
from paceline.common.errors import InputError, PacelineWarning
from paceline.drafters.heads.eagle import EagleHead
from paceline.engine.request import Generation
from paceline.engine.rows import Event
from paceline.models.language_model import LanguageModel
from paceline.serve.jobs import EngineFailedError, Job, QueueFullError
from paceline.serve.openai.api_errors import from_paceline
from tests.serve.collected import Collected, engine, job, small_model
from tests.toys import llama


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return small_model()


def settings(number: int) -> dict[str, Any]:
    """Settings of the request `number`: all controls occur."""
    controls: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9},
        {"temperature": 1.1, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.2},
        {"presence_penalty": 0.5, "frequency_penalty": 0.4},
        {"temperature": 1.0, "typical_p": 0.7, "logit_bias": {3: 1.5}},
        {"temperature": 0.8, "banned_tokens": [4, 5], "min_new_tokens": 5, "eos_token_ids": [7]},
        {"stop": ["ab", "9"], "temperature": 1.0},
    ]
    return {"max_new_tokens": 12 + 7 * (number % 4), "seed": number, "logprobs": 3, **controls[number % len(controls)]}


def prompts(count: int) -> list[list[int]]:
    dice = random.Random(5)
    shared = [dice.randrange(40) for _ in range(150)]
    texts = []
    for number in range(count):
        own = [dice.randrange(40) for _ in range(dice.choice([1, 2, 9, 30, 170]))]
        texts.append(shared[: dice.choice([20, 150])] + own if number % 2 else own)
    return texts


def same(told: Any, alone: Generation) -> None:
    assert list(told.tokens) == list(alone.tokens)
    assert told.text == alone.text
    assert told.ending.finish_reason == alone.finish_reason
    assert told.ending.stop_reason == alone.stop_reason
    assert told.logprobs == (alone.logprobs or [])
    assert told.ending.stats.emitted == len(alone.tokens)
    assert len(told.from_draft) == len(alone.tokens)
    assert told.ending.stats.accepted == sum(told.from_draft)


def check_all(collected: Collected, plain: Any, texts: list[list[int]], repeats: int, **more: Any) -> None:
    """Each request, in batches that change, has the text and the log-probabilities that it has alone."""
    alone = [plain.generate(text, **{**settings(number), **more}) for number, text in enumerate(texts)]
    for again in range(repeats):
        dice = random.Random(again)
        order = dice.sample(range(len(texts)), len(texts))
        jobs = [
            job(f"{again}.{n}", texts[n], **{**settings(n), **({"max_draft": n % 3} if n % 2 else {}), **more})
            for n in order
        ]
        told = collected.run(jobs)
        for number, each in zip(order, told, strict=True):
            same(each, alone[number])


@pytest.mark.parametrize("draft", [None, "suffix", "auto", "self-quantized"])
def test_texts_and_logprobs_do_not_depend_on_load(model: LanguageModel, draft: str | None) -> None:
    plain = paceline.SpeculativeDecoder(model, None)
    with engine(model, draft) as collected:
        check_all(collected, plain, prompts(14), 2)
        assert collected.engine.state().prefix_hits > 0, "the prefix cache was not used"


def test_without_kernels_a_prefix_is_reused_on_the_grid() -> None:
    model = small_model(kernels=False)
    texts = [[n % 40 for n in range(140)], [n % 40 for n in range(139)] + [3, 3, 3], [n % 40 for n in range(70)]]
    plain = paceline.SpeculativeDecoder(model, None, strict=True)
    with engine(model, "suffix", decoder={"strict": True}) as collected:
        check_all(collected, plain, texts, 2)
        told = collected.run([job("last", texts[0], max_new_tokens=3)])
    assert told[0].ending is not None
    assert told[0].ending.cached_tokens == 128, "two pieces of 64 tokens"


def test_a_drafter_that_reads_hidden_states(model: LanguageModel) -> None:
    """Its states of a prefix are kept with the KV cache."""
    plain = paceline.SpeculativeDecoder(model, None)
    with engine(model, "eagle", decoder={"options": {"head": EagleHead.random(model)}}) as collected:
        check_all(collected, plain, prompts(8), 2)
        prompt = [n % 40 for n in range(100)]
        first = collected.run([job("first", prompt, max_new_tokens=30)])[0]
        follow = [*prompt, *first.tokens, 1, 2]
        warm, cold = (
            collected.run([job(owner or "same owner", follow, owner, max_new_tokens=30)])[0]
            for owner in ("", "another owner")
        )
    assert warm.ending is not None
    assert cold.ending is not None
    assert (warm.ending.cached_tokens, cold.ending.cached_tokens) == (129, 0)
    assert [entry.drafted for entry in warm.rounds] == [entry.drafted for entry in cold.rounds]
    assert any(entry.drafted for entry in warm.rounds)


def test_a_draft_model(model: LanguageModel) -> None:
    plain = paceline.SpeculativeDecoder(model, None)
    with engine(model, LanguageModel(llama(4, max_position_embeddings=512).float())) as collected:
        check_all(collected, plain, prompts(8), 2)


def test_a_conversation_reads_only_what_is_new(model: LanguageModel) -> None:
    with engine(model) as collected:
        history = [n % 40 for n in range(100)]
        first = collected.run([job("first", history, max_new_tokens=20)])[0]
        history = [*history, *first.tokens, 1, 2, 3]
        second = collected.run([job("second", history, max_new_tokens=20)])[0]
        other = collected.run([job("other", history, "another owner", max_new_tokens=20)])[0]
    assert second.ending is not None
    assert other.ending is not None
    assert second.ending.cached_tokens == 119, "all but the last token of the first answer, which no pass has read"
    assert other.ending.cached_tokens == 0, "the KV cache of another owner was used"
    assert second.tokens == other.tokens


@pytest.mark.parametrize("draft", ["suffix", "recycling", ("ngram", {"persistent": True})])
def test_a_draft_has_nothing_of_another_owner(model: LanguageModel, draft: Any) -> None:
    """Trap 16: `include_rounds` shows drafts to a client. Owner b gets the drafts that it gets without the others."""
    prompt, names = [(7 * n * n) % 40 for n in range(60)], count()

    def drafts(*owners: str) -> list[Any]:
        jobs = [job(f"{next(names)}", prompt, owner, max_new_tokens=40) for owner in owners]
        told = collected.run(jobs)[-1]
        return [entry.drafted for entry in told.rounds]

    with engine(model, draft) as collected:
        expected = drafts("b")
        assert drafts("b") != expected, "the drafter learns nothing, so there is nothing to separate"
    with engine(model, draft) as collected:
        assert drafts("a", "c", "b") == expected
    with engine(model, draft) as collected:
        drafts("a")
        assert drafts("c", "b") == expected


def test_several_choices_read_the_prompt_once(model: LanguageModel) -> None:
    prompt = [n % 40 for n in range(120)]
    with engine(model) as collected:
        jobs = [job(f"choice {n}", prompt, max_new_tokens=8, temperature=1.0, seed=n) for n in range(4)]
        told = collected.run(jobs)
    cached = sorted(each.ending.cached_tokens for each in told if each.ending is not None)
    assert cached == [0, 119, 119, 119]
    assert len({tuple(each.tokens) for each in told}) > 1


def test_log_probabilities_of_a_prompt(model: LanguageModel) -> None:
    prompt = [3 * n % 40 for n in range(150)]
    with torch.inference_mode():
        expected = model.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    with engine(model) as collected:
        score, write = collected.run([
            job("score", prompt, prompt_logprobs=2, score_only=True),
            job("write", prompt, prompt_logprobs=0, max_new_tokens=4),
        ])  # fmt: skip
    assert score.prompt_logprobs is not None
    assert write.prompt_logprobs is not None
    assert score.prompt_logprobs[0] is None
    assert len(score.prompt_logprobs) == len(prompt) == len(write.prompt_logprobs)
    assert (len(score.tokens), len(write.tokens)) == (0, 4)
    for place, (one, other) in enumerate(zip(score.prompt_logprobs[1:], write.prompt_logprobs[1:], strict=True)):
        assert one is not None
        assert other is not None
        assert one.token == other.token == prompt[place + 1]
        assert one.raw == other.raw == pytest.approx(expected[place, one.token].item(), abs=1e-4)
        assert [token for token, _ in one.top_raw] == expected[place].topk(2).indices.tolist()
        assert other.top_raw == ()


def test_a_prompt_without_a_text_writes_nothing_for_a_target_with_two_branches() -> None:
    with engine(paceline.guided(small_model(), 1.5), None) as collected:
        alone = collected.run([job("alone", [1, 2, 3], max_new_tokens=1, score_only=True)])[0]
        both = collected.run([
            job("text", [1, 2, 3], max_new_tokens=4, ignore_eos=True),
            job("prompt", [1, 2, 3], max_new_tokens=1, score_only=True),
        ])  # fmt: skip
    assert [list(each.tokens) for each in (alone, both[1])] == [[], []]
    assert len(both[0].tokens) == 4
    assert {each.ending.finish_reason for each in (alone, *both) if each.ending} == {"length"}


def test_a_cancelled_sequence_leaves_and_the_others_go_on(model: LanguageModel) -> None:
    plain = paceline.SpeculativeDecoder(model, None)
    alone = plain.generate([1, 2, 3], max_new_tokens=300)
    with engine(model, None, slots=2) as collected:
        collected.engine.submit([job("mate", [1, 2, 3], max_new_tokens=300), job("gone", [4, 5], max_new_tokens=400)])
        collected.engine.submit([job("waiting", [4, 5], max_new_tokens=400), job("next", [7], max_new_tokens=2)])
        collected.wait_for_update("gone")
        rounds = collected.engine.state().rounds
        collected.engine.cancel(["gone", "waiting", "unknown"])
        gone, waiting, _ = collected.wait(["gone", "waiting", "next"])
        mate = collected.wait(["mate"])[0]
        assert gone.ending is not None
        assert waiting.ending is not None
        assert gone.ending.finish_reason == waiting.ending.finish_reason == "cancelled"
        assert waiting.tokens == []
        assert collected.engine.state().rounds >= rounds
        assert mate.tokens == list(alone.tokens)
        assert (collected.engine.state().running, collected.engine.state().waiting) == (0, 0)


@pytest.mark.parametrize("draft", ["suffix", "auto"])
def test_a_sequence_without_a_choice_ends_alone(model: LanguageModel, draft: str) -> None:
    plain = paceline.SpeculativeDecoder(model, None)
    nothing = {token: -float("inf") for token in range(model.vocabulary)}
    with engine(model, draft) as collected:
        bad, good = collected.run([
            job("bad", [1, 2, 3], logit_bias=nothing),
            job("good", [1, 2, 3], max_new_tokens=30),
        ])  # fmt: skip
        again = collected.run([job("again", [1, 2, 3], max_new_tokens=30)])[0]
    assert bad.ending is not None
    assert bad.ending.finish_reason == "error"
    assert "No token can be chosen at position 3" in str(bad.ending.error)
    assert good.tokens == again.tokens == list(plain.generate([1, 2, 3], max_new_tokens=30).tokens)


def test_what_is_wrong_is_refused_at_once(model: LanguageModel) -> None:
    with engine(model) as collected:
        for wrong, about in (
            (Job("a", [], job("", [1]).request), "empty"),
            (job("a", [99]), "outside the vocabulary"),
            (job("a", [1] * 512), "the context"),
            (job("a", [1], num_beams=2), "beam search"),
            (job("a", [1], prediction="abc"), "takes no prediction"),
        ):
            with pytest.raises(InputError, match=about):
                collected.engine.submit([wrong])
        assert collected.jobs == {}


def test_the_queue_is_bounded(model: LanguageModel) -> None:
    with engine(model, None, slots=1, max_queued=2) as collected:
        with pytest.raises(QueueFullError) as caught:
            collected.engine.submit([job(f"{n}", [n], max_new_tokens=200) for n in range(4)])
        assert caught.value.retry_after >= 1
        names = [f"{n}" for n in range(3)]
        collected.engine.submit([job(name, [1], max_new_tokens=200) for name in names])
        collected.engine.drain()
        with pytest.raises(QueueFullError):
            collected.engine.submit([job("late", [1])])
        collected.engine.cancel(names)
        collected.wait(names)


def test_jobs_that_were_taken_from_the_inbox_count_as_waiting(model: LanguageModel) -> None:
    with engine(model, None, slots=1, max_queued=0) as collected:
        entered, released = threading.Event(), threading.Event()
        step = collected.engine._scheduler.step

        def slow() -> list[Event]:
            entered.set()
            assert released.wait(60)
            return step()

        collected.engine._scheduler.step = slow  # type: ignore[method-assign]
        try:
            collected.engine.submit([job("a", [1], max_new_tokens=3)])
            assert entered.wait(60)
            with pytest.raises(QueueFullError):
                collected.engine.submit([job("b", [1], max_new_tokens=3)])
        finally:
            released.set()
        collected.wait(["a"])


def test_priorities_and_owners(model: LanguageModel) -> None:
    """A lower priority number comes first; then the owner with fewer live sequences."""
    with engine(model, None, slots=1) as collected:
        order: list[str] = []
        deliver = collected.engine._deliver

        def watch(updates: Any) -> None:
            order.extend(update.job for update in updates if update.ending is not None)
            deliver(updates)

        collected.engine._deliver = watch
        first = job("first", [1], "a", max_new_tokens=40)
        collected.engine.submit([first, *(job(f"low {n}", [n], "a", max_new_tokens=2, priority=3) for n in range(2))])
        collected.engine.submit([job("high", [2], "b", max_new_tokens=2, priority=1)])
        collected.wait(["first", "low 0", "low 1", "high"])
    assert order == ["first", "high", "low 0", "low 1"]


def test_a_long_prompt_does_not_stall_a_stream(model: LanguageModel) -> None:
    """While a long prompt is read, rounds of the others go on."""
    with engine(model, None, slots=2) as collected:
        collected.engine.submit([job("stream", [1, 2], max_new_tokens=400)])
        collected.wait_for_update("stream")
        told = collected.jobs["stream"]
        scheduler = collected.engine._scheduler
        scheduler._token_seconds, scheduler._round_seconds = 1.0, 1e-9  # a piece takes long: the smallest pieces
        before = told.updates
        collected.engine.submit([job("long", [n % 40 for n in range(400)], max_new_tokens=1)])
        collected.wait(["long"])
        assert told.ending is not None or told.updates - before >= 3


def test_sequences_that_arrive_together_share_every_round(model: LanguageModel, monkeypatch: Any) -> None:
    """No stream has begun, so the first one waits for the prompts of the others."""
    monkeypatch.setattr("paceline.engine.scheduler._HELD", 1e12)
    with engine(model, None, slots=4) as collected:
        collected.engine._scheduler._round_seconds = 1e-9  # every piece of a prompt takes longer than a round
        before = collected.engine.state().rounds
        told = collected.run([job(f"{n}", [(n + at) % 40 for at in range(200)], max_new_tokens=20) for n in range(4)])
        assert [len(each.rounds) for each in told] == [20] * 4
        assert collected.engine.state().rounds - before == 20


def test_close_ends_every_job_and_the_thread(model: LanguageModel) -> None:
    with engine(model, None, slots=1) as collected:
        collected.engine.submit([job("a", [1], max_new_tokens=400), job("b", [2], max_new_tokens=400)])
        collected.engine.close()
        told = collected.wait(["a", "b"])
    assert {each.ending.finish_reason for each in told if each.ending} == {"cancelled"}
    assert not [thread for thread in threading.enumerate() if thread.name == "paceline-engine"]


class Panic(BaseException):
    """As the panic of a Rust library: it is no `Exception`."""


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
@pytest.mark.parametrize("place", ["_begin_job", "_turn"])
def test_an_engine_that_breaks_says_why(model: LanguageModel, place: str, kind: type[BaseException]) -> None:
    with engine(model, None) as collected:

        def fail(*_: Any) -> None:
            raise kind("the device is gone")

        setattr(collected.engine, place, fail)
        collected.engine.submit([job("a", [1]), job("b", [1])])
        told = collected.wait(["a", "b"])
        with pytest.raises(EngineFailedError, match="the device is gone") as caught:
            collected.engine.submit([job("c", [1])])
    for each in told:
        assert each.ending is not None
        assert each.ending.finish_reason == "error"
        assert "the device is gone" in str(each.ending.error)
    assert "the device is gone" in str(collected.engine.state().failed)
    answer = from_paceline(caught.value)
    assert (answer.status_code, answer.code) == (503, "engine_failed")


def test_an_error_ends_only_the_jobs_that_were_decoded(model: LanguageModel) -> None:
    with engine(model, "ngram", slots=1) as collected:
        alone = collected.run([job("first", [1, 2, 3], max_new_tokens=20)])[0].tokens
        loop = collected.engine._scheduler.loop
        step = loop.step

        def fail() -> Any:
            loop.step = step
            raise IndexError("no such token")

        collected.engine.submit([job("a", [1, 2], max_new_tokens=400)])
        loop.step = fail  # type: ignore[method-assign]
        collected.engine.submit([job("b", [1, 2, 3], max_new_tokens=20)])
        with pytest.warns(PacelineWarning, match=r"no such token\). 1 jobs ended with it"):
            broken, whole = collected.wait(["a", "b"])
        state = collected.engine.state()
    assert broken.ending is not None
    assert (broken.ending.finish_reason, whole.tokens) == ("error", alone)
    assert "send the request again" in str(broken.ending.error)
    assert (state.restarts, state.failed) == (1, None)


def test_a_second_error_in_a_row_ends_the_engine(model: LanguageModel) -> None:
    with engine(model, None) as collected:
        collected.run([job("first", [1, 2, 3], max_new_tokens=2)])

        def fail() -> Any:
            raise IndexError("no such token")

        begins = collected.engine._begin

        def begin() -> None:
            begins()
            collected.engine._scheduler.loop.step = fail  # type: ignore[method-assign]

        collected.engine._begin = begin  # type: ignore[method-assign]
        collected.engine._scheduler.loop.step = fail  # type: ignore[method-assign]
        with pytest.warns(PacelineWarning, match="began again|1 jobs ended"):
            told = [*collected.run([job("a", [1])]), *collected.run([job("b", [1])])]
        assert [each.ending.finish_reason for each in told if each.ending] == ["error", "error"]
        assert "no such token" in str(collected.engine.state().failed)
        with pytest.raises(EngineFailedError):
            collected.engine.check_room(1)


def test_a_thread_that_ended_without_a_word_has_failed(model: LanguageModel) -> None:
    with engine(model, None) as collected:
        collected.engine._wait_for_work = lambda: False  # type: ignore[method-assign]
        collected.engine.cancel(["none"])  # wakes the thread
        collected.engine._thread.join(60)
        assert "its thread has ended" in str(collected.engine.state().failed)
        with pytest.raises(EngineFailedError):
            collected.engine.check_room(1)
