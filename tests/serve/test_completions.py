"""`/v1/completions`: every parameter, in streams and without."""

from __future__ import annotations

from typing import Any

import pytest

from .fakes import Running, events_of

PATH = "/v1/completions"


def ask(server: Running, prompt: Any = "Hello", **more: Any) -> Any:
    response = server.post(PATH, {"prompt": prompt, "seed": 7, "max_tokens": 100, **more})
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: Running, prompt: Any = "Hello", **more: Any) -> list[Any]:
    response = server.post(PATH, {"prompt": prompt, "seed": 7, "max_tokens": 100, "stream": True, **more})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response)


def text_of(chunks: list[Any], index: int = 0) -> str:
    return "".join(part["text"] for chunk in chunks for part in chunk["choices"] if part["index"] == index)


def test_a_text_has_openais_shape(server: Running) -> None:
    answer = ask(server)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "fake"
    (choice,) = answer["choices"]
    assert choice["text"] == "Text 7 of 5 tokens: café."
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "stop", None)
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"] is None
    usage = answer["usage"]
    assert usage["prompt_tokens"] == 5
    assert usage["completion_tokens"] == len("Text 7 of 5 tokens: café.".encode()) + 1  # and the end
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_a_stream_has_the_same_text(server: Running) -> None:
    chunks = stream(server)
    assert text_of(chunks) == ask(server)["choices"][0]["text"]
    assert len(chunks) > 3
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("prompt", ["ab", [1, 2, 3], ["ab", "cde"], [[1, 2], [3, 4, 5]]])
def test_every_kind_of_prompt(server: Running, prompt: Any) -> None:
    answer = ask(server, prompt)
    lengths = (
        [len(one) for one in prompt] if isinstance(prompt[0], (str, list)) and len(prompt[0]) > 1 else [len(prompt)]
    )
    assert [choice["text"].split(" of ")[1][0] for choice in answer["choices"]] == [str(n) for n in lengths]
    assert answer["usage"]["prompt_tokens"] == sum(lengths)


def test_choices_have_seeds_of_their_own(server: Running) -> None:
    answer = ask(server, ["ab", "cd"], n=2)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert texts[0] == texts[2] == ask(server, "ab")["choices"][0]["text"]
    assert texts[1] == texts[3] != texts[0]
    chunks = stream(server, ["ab", "cd"], n=2)
    assert [text_of(chunks, index) for index in range(4)] == texts
    assert answer["usage"]["prompt_tokens"] == 4


def test_the_end_of_a_text(server: Running) -> None:
    cut = ask(server, max_tokens=4)["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == ("Text", "length")
    stopped = ask(server, stop=["zzz", " of"])["choices"][0]
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == ("Text 7", "stop", " of")
    kept = ask(server, stop=" of", include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == "Text 7 of"
    token = server.engine.tokenizer.encode("7")[0]
    by_token = ask(server, stop_token_ids=[token])["choices"][0]
    assert by_token["stop_reason"] == token
    assert by_token["text"].startswith("Text 7")
    assert ask(server)["choices"][0]["stop_reason"] is None
    endless = ask(server, ignore_eos=True, max_tokens=60)
    assert endless["usage"]["completion_tokens"] == 60


def test_the_settings_reach_the_engine(server: Running) -> None:
    ask(server, temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, typical_p=0.8, presence_penalty=0.1,
        frequency_penalty=0.2, repetition_penalty=1.1, logit_bias={"3": -5}, min_tokens=2, priority=3,
        prompt_cache_key="me", speculative_config=False, user="someone", metadata={"a": 1})  # fmt: skip
    job = server.engine.submitted[-1]
    sampling = job.request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.typical_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.8, 0.1, 0.2)
    assert (sampling.repetition_penalty, sampling.logit_bias, sampling.min_new_tokens) == (1.1, {3: -5.0}, 2)
    assert (job.priority, job.owner, job.request.max_draft, sampling.seed) == (3, '["", "me", ""]', 0, 7)


@pytest.mark.parametrize(("given", "expected"), [(True, None), (False, 0), (2, 2), ({"num_speculative_tokens": 4}, 4)])
def test_speculation_is_a_setting_of_a_request(server: Running, given: Any, expected: int | None) -> None:
    answer = ask(server, speculative_config=given)
    assert server.engine.submitted[-1].request.max_draft == expected
    assert (answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0) == (given is not False)


def test_the_default_temperature_is_the_engines(server: Running) -> None:
    ask(server)
    assert server.engine.submitted[-1].request.sampling.temperature == 1.0


def test_logprobs_have_openais_lists(server: Running) -> None:
    answer = ask(server, logprobs=2, max_tokens=6)
    found = answer["choices"][0]["logprobs"]
    assert "".join(found["tokens"]) == answer["choices"][0]["text"] == "Text 7"
    assert found["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert found["token_logprobs"] == [-0.25] * 6
    assert all(2 <= len(top) <= 3 for top in found["top_logprobs"])
    assert all(top[token] == -0.25 for top, token in zip(found["top_logprobs"], found["tokens"], strict=True))
    bare = ask(server, logprobs=0, max_tokens=6)["choices"][0]["logprobs"]
    assert [len(top) for top in bare["top_logprobs"]] == [1] * 6
    chunks = stream(server, logprobs=2, max_tokens=6)
    joined = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
    offsets = [at for chunk in chunks for at in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert (joined, offsets) == (found["tokens"], found["text_offset"])


def test_echo_repeats_the_prompt_with_its_logprobs(server: Running) -> None:
    answer = ask(server, "abc", echo=True, logprobs=1, max_tokens=4)
    choice = answer["choices"][0]
    assert choice["text"] == "abcText"
    assert choice["logprobs"]["tokens"] == list("abcText")
    assert choice["logprobs"]["token_logprobs"] == [None, *[-0.25] * 6]
    assert choice["logprobs"]["top_logprobs"][0] is None
    chunks = stream(server, "abc", echo=True, logprobs=1, max_tokens=4)
    assert text_of(chunks) == "abcText"
    assert [t for c in chunks for t in c["choices"][0]["logprobs"]["tokens"]] == list("abcText")
    both = ask(server, "abc", echo=True, logprobs=1, max_tokens=4, n=2)["choices"]
    assert [choice["logprobs"]["tokens"] for choice in both] == [list("abcText")] * 2
    ids = server.engine.tokenizer.encode("abc")
    assert ask(server, [ids, ids], echo=True, max_tokens=1)["choices"][1]["text"] == "abcT"


def test_a_prompt_can_be_scored_alone(server: Running) -> None:
    answer = ask(server, "abc", echo=True, logprobs=1, max_tokens=0)
    choice = answer["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == list("abc")
    assert answer["usage"]["completion_tokens"] == 0
    assert server.engine.submitted[-1].score_only


def test_prompt_logprobs_have_vllms_shape(server: Running) -> None:
    choice = ask(server, "abc", prompt_logprobs=2, max_tokens=1)["choices"][0]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    ids = server.engine.tokenizer.encode("abc")
    assert second[str(ids[1])] == {"logprob": -0.25, "rank": 1, "decoded_token": "b"}
    assert len(third) == 2


def test_token_ids_are_given_if_asked_for(server: Running) -> None:
    ids = server.engine.tokenizer.encode("Text")
    choice = ask(server, "ab", return_token_ids=True, max_tokens=4)["choices"][0]
    assert choice["token_ids"] == ids
    assert choice["prompt_token_ids"] == server.engine.tokenizer.encode("ab")
    chunks = stream(server, "ab", return_token_ids=True, max_tokens=4)
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == ids
    assert ["prompt_token_ids" in chunk["choices"][0] for chunk in chunks] == [True, *[False] * (len(chunks) - 1)]
    named = ask(server, "ab", return_tokens_as_token_ids=True, logprobs=0, max_tokens=4)["choices"][0]["logprobs"]
    assert named["tokens"] == [f"token_id:{token}" for token in ids]


def test_a_prediction_is_counted(server: Running) -> None:
    usage = ask(server, prediction={"type": "content", "content": "Text 7"})["usage"]["completion_tokens_details"]
    assert usage["accepted_prediction_tokens"] == 4  # of 6: two were the last ones of a round, which the target adds
    assert server.engine.submitted[-1].request.prediction == tuple(server.engine.tokenizer.encode("Text 7"))
    other = ask(server, prediction={"type": "content", "content": "zzz"})["usage"]["completion_tokens_details"]
    assert other == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    without = ask(server)["usage"]["completion_tokens_details"]
    assert without == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


def test_usage_in_streams(server: Running) -> None:
    whole = ask(server)["usage"]
    *chunks, last = stream(server, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"] == whole
    assert all(chunk["usage"] is None for chunk in chunks)
    assert all("metrics" not in chunk for chunk in chunks)
    *chunks, last = stream(server, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == whole["completion_tokens"]
    assert all("usage" not in chunk for chunk in stream(server, stream_options={"continuous_usage_stats": True}))


def test_rounds_in_streams(server: Running) -> None:
    chunks = stream(server, stream_options={"include_rounds": True})
    rounds = [entry for chunk in chunks for entry in chunk["rounds"]]
    assert all(entry["seconds"] == 0.01 and entry["why"] == "fake" for entry in rounds)
    tokens = [
        token for entry in rounds for token in [*(entry["drafted"][node] for node in entry["accepted"]), entry["own"]]
    ]
    assert tokens == [*server.engine.tokenizer.encode("Text 7 of 5 tokens: café."), server.engine.eos]
    assert "rounds" not in stream(server)[0]


def test_obfuscated_chunks_have_one_size(server: Running) -> None:
    body = {"prompt": "Hello", "stream": True, "max_tokens": 40, "stream_options": {"include_obfuscation": True}}
    lines = [line for line in server.post(PATH, body).text.splitlines() if line.startswith("data: {")]
    assert {len(line.removeprefix("data: ").encode()) % 256 for line in lines} == {0}
    assert all('"obfuscation":"' in line for line in lines)


def check_sums(found: dict[str, Any]) -> None:
    """What aiperf checks: the histogram is the steps, seen another way."""
    histogram = found["acceptance_histogram"]
    assert sum(histogram) == found["num_spec_steps"]
    assert sum(j * count for j, count in enumerate(histogram)) == found["num_accepted_draft_tokens"]
    assert 0 < found["num_accepted_draft_tokens"] <= found["num_draft_tokens"]
    assert found["draft_acceptance_rate"] == found["num_accepted_draft_tokens"] / found["num_draft_tokens"]
    assert found["mean_acceptance_length"] == 1 + found["num_accepted_draft_tokens"] / found["num_spec_steps"]
    assert len(histogram) == found["num_spec_tokens"] + 1


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"prompt": ["a", "bc"]}])
def test_statistics_of_speculation_have_vllms_shape(server: Running, more: dict[str, Any]) -> None:
    found = ask(server, **more)["metrics"]["speculative_decoding"]
    check_sums(found)
    with_stats = [chunk for chunk in stream(server, **more) if "metrics" in chunk]
    assert [chunk["metrics"]["speculative_decoding"] for chunk in with_stats] == [found]
    (last,) = [c for c in stream(server, stream_options={"include_usage": True}, **more) if "metrics" in c]
    assert last["metrics"]["speculative_decoding"] == found


def test_a_failure_ends_its_choice_only(server: Running) -> None:
    from paceline.serve.openai.job_requests import seed_of_choice

    usual, bad = server.engine.script, seed_of_choice(7, 1)
    server.engine.script = lambda job: "FAIL" if job.request.sampling.seed == bad else usual(job)
    try:
        answer = ask(server, n=2)
        chunks = stream(server, n=2)
        alone = server.post(PATH, {"prompt": "a", "seed": bad})
        broken = events_of(server.post(PATH, {"prompt": "a", "seed": bad, "stream": True}))
    finally:
        server.engine.script = usual
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "error"]
    assert answer["choices"][1]["error"] == "The logits are not finite."
    assert answer["choices"][0]["text"] == text_of(chunks, 0) == ask(server)["choices"][0]["text"]
    assert alone.status_code == 500
    assert alone.json()["error"]["message"] == "The logits are not finite."
    assert broken[-1]["error"]["type"] == "server_error"
