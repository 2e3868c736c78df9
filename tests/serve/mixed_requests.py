"""Do the texts of a server depend on load, batch-mates, the prefix cache or speculation? Mixed requests find out.

    python -m tests.serve.mixed_requests --url http://127.0.0.1:8000 [--count 200] [--at-once 8] [--key KEY]

Each request is sent alone and without speculation first, then with the others, the prefix cache cold and warm. Texts,
token ids, log-probabilities and ends must be equal to the last bit. The exit code is 1 if something differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

_STORY = (
    "The lighthouse keeper wrote a line every evening: the wind, the height of the water, the ships that passed. On "
    "the fourth of March no ship passed. She climbed the stairs, cleaned the lamp and counted the steps, as she always "
    "did. There were one hundred and twelve. When she came down there was a letter on the table, and the letter read: "
    "dear keeper, we have measured the rock, and the rock is two centimetres lower than it was a year ago. Please "
    "measure the water every hour. Please write down the wind, the height of the water, and the ships that pass. "
)
_QUESTIONS = ("Name three rivers.", "Write the numbers from one to ten.", "Why is the sky blue?", "Repeat: a b a b a b")
_LONGEST = 600  # characters of a prompt, at most


@dataclass(frozen=True)
class Ask:
    """One request of a client."""

    path: str
    body: dict[str, Any]

    @property
    def controls(self) -> set[str]:
        return set(self.body) - {"prompt", "messages", "return_token_ids"} | {self.path}


@dataclass
class Written:
    """One choice of an answer, whether it came as a stream or not."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: Any = None


@dataclass
class Answered:
    """All choices, and how many tokens of the prompt were in the prefix cache."""

    choices: list[Written]
    cached: int = 0
    problem: str | None = None


# ---- the requests


def mixed(count: int, seed: int = 0, context: int = 2048) -> list[Ask]:
    """Return requests in which every control occurs. context: of the server."""
    dice = random.Random(seed)
    return [_ask(dice, number, min(context // 4, _LONGEST)) for number in range(count)]


def _ask(dice: random.Random, number: int, longest: int) -> Ask:
    body: dict[str, Any] = {"max_tokens": dice.choice([1, 5, 12, 24, 40]), "seed": number, "return_token_ids": True}
    if dice.random() < 0.7:
        body["temperature"] = dice.choice([0.5, 0.8, 1.0, 1.3])
    else:
        body["temperature"] = 0
    for name, values in _CONTROLS.items():
        if dice.random() < 0.15:
            body[name] = dice.choice(values)
    if dice.random() < 0.35:
        body.pop("min_tokens", None)  # it may forbid the one token that a grammar allows
        body |= dice.choice(_GRAMMARS)
    body["max_tokens"] = max(body["max_tokens"], body.get("min_tokens", 0))
    if body.get("stream") and dice.random() < 0.5:
        names = ("include_usage", "continuous_usage_stats", "include_rounds", "include_obfuscation")
        body["stream_options"] = {name: dice.random() < 0.5 for name in names}
    if dice.random() < 0.3:
        return _chat(dice, body)
    return _completion(dice, body, longest)


# each of these controls has one of these values in a part of the requests
_CONTROLS: dict[str, Sequence[Any]] = {
    "top_p": (0.5, 0.9),
    "top_k": (1, 5, 40),
    "min_p": (0.02, 0.2),
    "typical_p": (0.3, 0.9),
    "presence_penalty": (-0.5, 0.7),
    "frequency_penalty": (-0.3, 0.6),
    "repetition_penalty": (1.1, 1.4),
    "logit_bias": ({"11": 2.5, "40": -100}, {"65": 1.0}),
    "stop": ("e", [" the", "\n", "a"], ["zq", ". "]),
    "stop_token_ids": ([12, 40, 100], [13]),
    "include_stop_str_in_output": (True,),
    "min_tokens": (2, 9),
    "ignore_eos": (True,),
    "n": (2, 3),
    "speculative_config": (False, 0, 1, 2, {"num_speculative_tokens": 4}),
    "prediction": ({"type": "content", "content": _STORY[100:260]},),
    "prompt_logprobs": (0, 2),
    "priority": (-1, 3),
    "stream": (True, True, True),
}


_RECORD = {
    "type": "object",
    "properties": {
        "ship": {"enum": ["barque", "brig", "sloop"]},
        "height": {"type": "integer"},
        "seen": {"type": "boolean"},
    },
    "required": ["ship", "height"],
    "additionalProperties": False,
}
_GRAMMARS: Sequence[dict[str, Any]] = (
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "record", "schema": _RECORD, "strict": True}}},
    {"structured_outputs": {"regex": "(yes|no)(, (yes|no)){0,9}"}},
    {"regex": "[a-z]{3,9}( [a-z]{2,9})*[.]"},
    {"grammar": 'root ::= line+\nline ::= "- " [a-z ]+ "\\n"'},
    {"choice": ["the lamp", "the lamp and the letter", "the letter", "the water"]},
)


def _completion(dice: random.Random, body: dict[str, Any], longest: int) -> Ask:
    if dice.random() < 0.3:
        body["logprobs"] = dice.choice([0, 1, 5])
    if dice.random() < 0.15:
        body["echo"] = True
        if dice.random() < 0.3 and "n" not in body:
            body["max_tokens"] = 0
            body.pop("min_tokens", None)
    start = dice.choice([0, 0, 0, 57, 131])  # many prompts have a common beginning
    text = (2 * _STORY)[start : start + dice.choice([1, 20, 90, longest // 2, longest])]
    ids = [3 + (7 * start + 13 * n * n) % 200 for n in range(dice.choice([1, 30, longest // 3]))]
    body["prompt"] = dice.choice([text, text, text, ids, [text, text[: len(text) // 2 + 1]], [ids, ids[:5]]])
    return Ask("/v1/completions", body)


def _chat(dice: random.Random, body: dict[str, Any]) -> Ask:
    if dice.random() < 0.4:
        body["logprobs"] = True
        body["top_logprobs"] = dice.choice([0, 3])
    messages = [{"role": "user", "content": dice.choice(_QUESTIONS)}]
    if dice.random() < 0.4:
        parts = [{"type": "text", "text": dice.choice(_QUESTIONS)}]
        messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": parts}]  # type: ignore[dict-item]
    body["messages"] = messages
    return Ask("/v1/chat/completions", body)


# ---- the answers


class Client:
    """Sends requests to one server."""

    def __init__(self, url: str, key: str | None = None) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=600, trust_env=False)

    def context(self) -> int:
        (card, *_) = self._http.get("/v1/models").json()["data"]
        return int(card["max_model_len"])

    def send(self, ask: Ask) -> Answered:
        if ask.body.get("stream"):
            return self._stream(ask)
        response = self._http.post(ask.path, json=ask.body)
        if response.status_code != 200:
            return Answered([], problem=f"status {response.status_code}: {response.text[:300]}")
        found = response.json()
        answered = Answered([], found["usage"]["prompt_tokens_details"]["cached_tokens"], _wrong_sums(found))
        for part in found["choices"]:
            answered.choices.append(_add(Written(), part, part.get("message", part)))
        return answered

    def _stream(self, ask: Ask) -> Answered:
        answered, parts = Answered([]), dict[int, Written]()
        with self._http.stream("POST", ask.path, json=ask.body) as response:
            if response.status_code != 200:
                return Answered([], problem=f"status {response.status_code}: {response.read().decode()[:300]}")
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    return Answered([], problem=str(chunk["error"]))
                answered.problem = answered.problem or _wrong_sums(chunk)
                for part in chunk["choices"]:
                    _add(parts.setdefault(part["index"], Written()), part, part.get("delta", part))
        answered.choices = [parts[index] for index in sorted(parts)]
        return answered

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def send_all(self, asks: Sequence[Ask], at_once: int) -> list[Answered]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(self.send, asks))

    def close(self) -> None:
        self._http.close()


def _add(written: Written, part: dict[str, Any], content: dict[str, Any]) -> Written:
    written.text += content.get("text") or content.get("content") or ""
    written.tokens += part.get("token_ids") or []
    logprobs = part.get("logprobs")
    if logprobs is not None and "content" in logprobs:
        written.logprobs += logprobs["content"]
    elif logprobs is not None:
        names = ("text_offset", "tokens", "token_logprobs", "top_logprobs")
        written.logprobs += zip(*(logprobs[name] for name in names), strict=True)
    written.prompt_logprobs = part.get("prompt_logprobs") or written.prompt_logprobs
    written.finish_reason = part.get("finish_reason") or written.finish_reason
    written.stop_reason = part.get("stop_reason") or written.stop_reason
    return written


def _wrong_sums(found: dict[str, Any]) -> str | None:
    """Say what is wrong with the statistics of speculation."""
    stats = (found.get("metrics") or {}).get("speculative_decoding")
    if stats is None:
        return None
    histogram = stats["acceptance_histogram"]
    steps, accepted = sum(histogram), sum(count * many for count, many in enumerate(histogram))
    if (steps, accepted) != (stats["num_spec_steps"], stats["num_accepted_draft_tokens"]):
        return f"the statistics do not add up: {stats}"
    return None


# ---- the comparison


def plain(ask: Ask) -> Ask:
    """The same request without speculation."""
    return Ask(ask.path, {**ask.body, "speculative_config": False})


def salted(asks: Sequence[Ask], salt: str | None) -> list[Ask]:
    """The same requests with the prefix cache of this name; None: each has one of its own, which is cold."""
    return [
        Ask(ask.path, {**ask.body, "cache_salt": f"{salt or 'cold'} {'' if salt else number} {id(asks)}"})
        for number, ask in enumerate(asks)
    ]


def alone(client: Client, asks: Sequence[Ask], predictions: bool = True) -> list[Answered]:
    """Return the answers to the requests one by one, without speculation and with a cold prefix cache."""
    return [client.send(ask) for ask in salted([plain(ask) for ask in without_predictions(asks, predictions)], None)]


def without_predictions(asks: Sequence[Ask], predictions: bool) -> list[Ask]:
    """Return the same requests; if `predictions` is false, for a drafter that takes none."""
    unknown = () if predictions else ("prediction",)
    return [Ask(ask.path, {name: value for name, value in ask.body.items() if name not in unknown}) for ask in asks]


def differences(
    client: Client,
    asks: Sequence[Ask],
    at_once: int,
    expected: Sequence[Answered] | None = None,
    predictions: bool = True,
) -> list[str]:
    """Return one line for each answer that is not the expected one. expected: by default, the answer of the same server
    to the same request alone, without speculation. predictions: whether the drafter takes predictions."""
    alike = alone(client, asks, predictions) if expected is None else expected
    asks = without_predictions(asks, predictions)
    found, cached = list[str](), dict[str, int]()
    warm = salted(asks, "warm")
    for name, sent in (("cold", salted(asks, None)), ("filling", warm), ("warm", warm)):
        answers = client.send_all(sent, at_once)
        cached[name] = sum(answer.cached for answer in answers)
        for number, (ask, right, answer) in enumerate(zip(asks, alike, answers, strict=True)):
            problem = right.problem or answer.problem
            if problem is None and answer.choices != right.choices:
                problem = _difference(right.choices, answer.choices)
            if problem is not None:
                found.append(f"request {number}, cache {name}: {problem}; {json.dumps(ask.body)[:400]}")
    if cached["warm"] <= 0:
        found.append("the warm prefix cache was not used")
    return found


def _difference(expected: Sequence[Written], answered: Sequence[Written]) -> str:
    for index, (one, other) in enumerate(zip(expected, answered, strict=False)):
        for name, value in vars(one).items():
            if getattr(other, name) != value:
                return f"choice {index}: {name} {str(getattr(other, name))[:120]!r} instead of {str(value)[:120]!r}"
    return f"{len(answered)} choices instead of {len(expected)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--reference", help="a server whose answers are right, such as one without a drafter")
    parser.add_argument("--key")
    parser.add_argument("--no-predictions", action="store_true", help="the drafter takes none")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    client = Client(options.url, options.key)
    reference = None if options.reference is None else Client(options.reference, options.key)
    asks = mixed(options.count, options.seed, client.context())
    used = Counter(name for ask in asks for name in ask.controls)
    print("requests with each control:", ", ".join(f"{name} {count}" for name, count in sorted(used.items())))
    takes = not options.no_predictions
    found = differences(client, asks, options.at_once, reference and alone(reference, asks, False), takes)
    for line in found:
        print(line)
    wrong = len({line.partition(",")[0] for line in found})
    print(f"{len(asks) - wrong} of {len(asks)} requests have the same answer alone without speculation and at "
          f"{options.at_once} at once with it, the prefix cache cold and warm")  # fmt: skip
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
