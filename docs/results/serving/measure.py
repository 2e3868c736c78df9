"""Measure the server. Each command writes one record; `report` writes the tables of docs/results/serving.md.

    PYTHONPATH=src:. .venv/bin/python docs/results/serving/measure.py COMMAND [--out FOLDER] [--target MODEL]

Commands: mixed, gap, flood, soak, throughput, chat, peers, all of them (all), report. One repeat of gap took 3.4
minutes, two of throughput 3.2, chat and flood less than one. The records are in FOLDER (/tmp/paceline-serving).
`peers` needs --llama-server, the path of llama.cpp's server, and --transformers, a Python with transformers[serving].
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import harness
from harness import Server, percentile, run, save, slope
from tests.serve.raw_client import Answer, Exchange, metrics, open_exchange, request, send, send_all

import paceline
from paceline.bench.prompt_sets import read_all

Figures = dict[str, Any]
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"


def texts() -> list[str]:
    return [each.turns[0] for each in read_all(["builtin"])]


def token_ids(lm: Any, count: int) -> list[int]:
    """The first tokens of a long text."""
    ids = list(lm.tokenizer.encode("\n\n".join(texts())))
    while len(ids) < count:
        ids += ids
    return ids[:count]


def prompts_of(lm: Any, count: int) -> list[list[int]]:
    """Chats of one message, as tokens."""
    found = []
    every = texts()
    for text in every[:: max(1, len(every) // count)][:count]:
        message = [{"role": "user", "content": text}]
        found.append(list(lm.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)))
    return found


# ---- mixed: does a text depend on load, cache or speculation?


def mixed(options: argparse.Namespace) -> Figures:
    """200 mixed requests at 8 at once, against each alone on a server without a drafter; and 8 prompts in a batch."""
    from tests.serve.mixed_requests import Client, alone, differences
    from tests.serve.mixed_requests import mixed as requests

    found: Figures = {"requests": options.count, "drafters": {}}
    with Server.paceline(options.target, "none") as server, Client(f"http://127.0.0.1:{server.port}") as client:
        asks = requests(options.count, 0, client.context())
        expected = alone(client, asks, predictions=False)
    for draft in (options.draft, options.model_draft):
        with Server.paceline(options.target, draft) as server, Client(f"http://127.0.0.1:{server.port}") as client:
            wrong = differences(client, asks, 8, expected, predictions=draft == "auto")
            seen = run(metrics(server.port))
        numbers = {line.partition(",")[0] for line in wrong}
        found["drafters"][draft] = {
            "equal": options.count - len(numbers),
            "differences": wrong[:20],
            "accepted_draft_tokens": seen["spec_decode_num_accepted_tokens_total"],
            "cached_tokens": seen["prefix_cache_hits_total"],
        }
    found["batch_of_8"] = {draft: _batch_of_8(options.target, draft) for draft in ("none", options.draft)}
    return found


def _batch_of_8(target: str, draft: str) -> Figures:
    """How many of 8 prompts have the same tokens and log-probabilities in a batch as alone."""
    decoder = paceline.SpeculativeDecoder(target, None if draft == "none" else draft)
    settings: dict[str, Any] = {"max_new_tokens": 32, "logprobs": 5, "temperature": 0.8, "seed": 1}
    prompts = prompts_of(decoder.target, 8)
    together = decoder.generate(prompts, **settings)
    single = [decoder.generate(prompt, **settings) for prompt in prompts]
    pairs = list(zip(together, single, strict=True))
    return {
        "equal_texts": sum(one.tokens == other.tokens for one, other in pairs),
        "equal_logprobs": sum(one.logprobs == other.logprobs for one, other in pairs),
    }


# ---- gap: what a long prompt, a cancelled request and a client that goes do to the others


def gap(options: argparse.Namespace) -> Figures:
    lm = paceline.load(options.target)
    found: Figures = {}
    for draft in ("none", options.draft, options.model_draft):
        with Server.paceline(options.target, draft, "--max-model-len", str(options.prompt + 96)) as server:
            runs = [run(_long_prompt(server.port, lm, options.prompt, repeat)) for repeat in range(2)]
            found[draft] = {
                "median_round_ms": statistics.median(each["median_round_ms"] for each in runs),
                "p99_rounds": max(each["p99_rounds"] for each in runs),
                "longest_rounds": max(each["longest_rounds"] for each in runs),
                "prompt_seconds": statistics.median(each["prompt_seconds"] for each in runs),
                "gaps": sum(each["gaps"] for each in runs),
                "freed_rounds": run(_freed(server.port, 8, 20)),
            }
    return found


async def _long_prompt(port: int, lm: Any, length: int, repeat: int) -> Figures:
    """The gaps between the chunks of 7 streams while a long prompt is read, in rounds."""
    bodies = [
        {"prompt": prompt[:90], "max_tokens": length, "ignore_eos": True, "temperature": 0.8, "seed": at,
         "stream": True, "return_token_ids": True, "cache_salt": f"{repeat}"}
        for at, prompt in enumerate(prompts_of(lm, 7))
    ]  # fmt: skip
    streams = [await open_exchange(port, request(_COMPLETIONS, body)) for body in bodies]
    while min(len(each.parts) for each in streams) < 60:
        ended = [each.answer() for each in streams if each.closed.done()]
        _check(ended)
        await asyncio.sleep(0.05)
    body = {"prompt": token_ids(lm, length), "max_tokens": 8, "temperature": 0, "cache_salt": f"{repeat}"}
    began = time.perf_counter()
    answer = await send(port, _COMPLETIONS, body)
    if answer.status != 200:
        raise RuntimeError(answer.body.decode())
    for each in streams:
        each.transport.abort()
    usual = _gaps([when for when in each.times if when < began] for each in streams)
    during = _gaps([when for when in each.times if began <= when <= answer.ended] for each in streams)
    median = statistics.median(usual)
    return {
        "median_round_ms": 1e3 * median,
        "p99_rounds": percentile(during, 0.99) / median,
        "longest_rounds": max(during) / median,
        "prompt_seconds": answer.ended - began,
        "gaps": len(during),
    }


def _gaps(times: Iterator[list[float]]) -> list[float]:
    """The seconds between the chunks of each stream, without its first ones."""
    return [later - earlier for each in times for earlier, later in pairwise(each[10:])]


async def _freed(port: int, slots: int, times: int) -> list[int]:
    """The rounds from the moment a client goes until its slot is free, for clients with and without a stream."""
    rounds, dice = [], random.Random(1)

    async def open_one(stream: bool) -> Exchange:
        body = {"prompt": [dice.randrange(1000) for _ in range(8)], "max_tokens": 2000, "ignore_eos": True,
                "stream": stream}  # fmt: skip
        return await open_exchange(port, request(_COMPLETIONS, body))

    async def until(running: int) -> dict[str, float]:
        end = time.perf_counter() + 60
        while time.perf_counter() < end:
            seen = await metrics(port)
            if seen["num_requests_running"] == running:
                return seen
        raise RuntimeError(f"{seen['num_requests_running']:.0f} sequences run, and not {running}.")

    clients = [await open_one(at % 2 == 0) for at in range(slots)]
    for _ in range(times):
        before = await until(slots)
        clients.pop(0).transport.abort()
        after = await until(slots - 1)
        rounds.append(int(after["rounds_total"] - before["rounds_total"]))
        clients.append(await open_one(len(rounds) % 2 == 0))
    for each in clients:
        each.transport.abort()
    await until(0)
    return rounds


# ---- flood: ten times what the server can do


def flood(options: argparse.Namespace) -> Figures:
    with Server.paceline(options.target, options.draft, "--max-queued", "8", "--max-model-len", "1024") as server:
        return run(_flood(server, options.flood_seconds))


async def _flood(server: Server, seconds: float) -> Figures:
    body = {"prompt": "The lighthouse keeper wrote", "max_tokens": 24, "ignore_eos": True, "temperature": 1}
    data, dice = request(_COMPLETIONS, body), random.Random(1)
    await send_all(server.port, _COMPLETIONS, [body] * 16, 8)
    began = time.perf_counter()
    await send_all(server.port, _COMPLETIONS, [body] * 48, 8)
    capacity = 48 / (time.perf_counter() - began)
    answers, health, memory = list[Answer](), list[float](), list[tuple[float, float]]()
    tasks, late = set[asyncio.Task[None]](), list[float]()

    async def one() -> None:
        exchange = await open_exchange(server.port, data)
        await exchange.closed
        answers.append(exchange.answer())

    async def watch() -> None:
        while True:
            answer = await send(server.port, "/health")
            health.append(answer.ended - answer.began if answer.status == 200 else float("inf"))
            memory.append((time.perf_counter() - began, server.memory / 2**20))
            await asyncio.sleep(0.05)

    watcher, began = asyncio.create_task(watch()), time.perf_counter()
    due = began
    while due < began + seconds:
        due += dice.expovariate(10 * capacity)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        late.append(time.perf_counter() - due)
        tasks.add(task := asyncio.create_task(one()))
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    watcher.cancel()
    refused = [answer.ended - answer.began for answer in answers if answer.status == 429]
    return {
        "capacity_per_second": capacity,
        "offered_per_second": len(answers) / seconds,
        "answers": {str(code): sum(a.status == code for a in answers) for code in sorted({a.status for a in answers})},
        "server_errors": sum(answer.status >= 500 or answer.status == 0 for answer in answers),
        "refused_p50_ms": 1e3 * statistics.median(refused),
        "refused_p99_ms": 1e3 * percentile(refused, 0.99),
        "health_longest_ms": 1e3 * max(health),
        "client_late_p99_ms": 1e3 * percentile(late, 0.99),
        "memory_mib_first": memory[0][1],
        "memory_mib_last": memory[-1][1],
        "memory_slope_kib_per_second": 1024 * slope(memory[len(memory) // 2 :]),
    }


# ---- soak: what is left after many requests of all kinds


def soak(options: argparse.Namespace) -> Figures:
    """The store of `suffix` is small here, so that it is full long before the end."""
    from tests.serve.soak import soak_of

    with tiny_model() as folder:
        flags = ("--drafter.capacity", "4000", "--max-num-seqs", "8", "--max-queued", "64")
        with Server.paceline(folder, "suffix", *flags) as server:
            return run(soak_of(server.port, options.requests, server))


@contextmanager
def tiny_model() -> Iterator[str]:
    """A folder with a random model of a few kilobytes that reads bytes."""
    from tests.serve.fakes import tokenizer
    from tests.toys import llama

    words = tokenizer()
    model = llama(3, vocab_size=len(words), max_position_embeddings=1024, eos_token_id=len(words) - 1).float()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        words.save_pretrained(folder)
        yield folder


# ---- throughput: more at once, speculation, and what HTTP costs


def throughput(options: argparse.Namespace) -> Figures:
    """Plain decoding and the drafter in turns, each through HTTP and in this process, at 1, 2, 4 and 8 at once."""
    lm = paceline.load(options.target)
    prompts = prompts_of(lm, 8)
    decoders = {"none": paceline.SpeculativeDecoder(lm, None), "auto": paceline.SpeculativeDecoder(lm, options.draft)}
    rates: dict[str, dict[int, list[float]]] = {}
    flags = ("--max-model-len", "1024")
    with (
        Server.paceline(options.target, "none", *flags) as plain,
        Server.paceline(options.target, options.draft, *flags) as auto,
    ):
        servers = {"none": plain, "auto": auto}
        ways: list[tuple[str, Callable[[int, str], float]]] = [
            *((f"server {name}", lambda c, salt, s=server: _served(s, prompts, options.tokens, c, salt))
              for name, server in servers.items()),
            *((f"library {name}", lambda c, salt, d=decoder: _in_library(d, prompts, options.tokens, c))
              for name, decoder in decoders.items()),
        ]  # fmt: skip
        for repeat in range(options.repeats + 1):
            for at_once in (8, 4, 2, 1) if repeat else (8, 2):
                for name, measured in ways if repeat % 2 else reversed(ways):
                    rate = measured(at_once, f"{repeat} {at_once}")
                    if repeat:
                        rates.setdefault(name, {}).setdefault(at_once, []).append(rate)
    return {"tokens": options.tokens * len(prompts), "rates": rates}


def _body(prompt: list[int], tokens: int, salt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "cache_salt": salt}  # fmt: skip


def _served(server: Server, prompts: Sequence[list[int]], tokens: int, at_once: int, salt: str) -> float:
    """Tokens per second of a server."""
    bodies = [_body(prompt, tokens, salt) for prompt in prompts]
    answers = run(send_all(server.port, _COMPLETIONS, bodies, at_once))
    _check(answers)
    written = sum(answer.usage()["completion_tokens"] for answer in answers)
    return written / (max(a.ended for a in answers) - min(a.began for a in answers))


def _check(answers: Sequence[Answer]) -> None:
    wrong = next((answer for answer in answers if answer.status != 200), None)
    if wrong is not None:
        raise RuntimeError(f"status {wrong.status}: {wrong.problem or wrong.body[:300]!r}")


def _in_library(decoder: Any, prompts: Sequence[list[int]], tokens: int, at_once: int) -> float:
    """Tokens per second of the library, without a prefix cache between two prompts."""
    decoder.forget()  # it learned these texts in an earlier turn; in the server a new salt has nothing of them
    decoder.keeps_prefix, decoder.rows = False, at_once
    batches = [list(prompts)] if at_once > 1 else [[prompt] for prompt in prompts]
    began = time.perf_counter()
    made = [each for batch in batches for each in decoder.generate(batch, max_new_tokens=tokens, ignore_eos=True)]
    return sum(len(each.tokens) for each in made) / (time.perf_counter() - began)


# ---- chat: the second turn does not read the first again


def chat(options: argparse.Namespace) -> Figures:
    decoder = paceline.SpeculativeDecoder(options.target, options.draft)
    history = decoder.target.tokenizer.decode(token_ids(decoder.target, 1500))
    found: Figures = {"server": [], "library": []}
    with Server.paceline(options.target, options.draft) as server:
        for repeat in range(options.repeats):
            found["server"].append(run(_turns_of_server(server.port, history, f"{repeat}")))
            found["library"].append(_turns_of_library(decoder, history, repeat))
    for kind in ("server", "library"):
        found[f"{kind}_ratio"] = statistics.median(each["second"] / each["first"] for each in found[kind])
    return found


_SECOND = "Which part of it is the most important one?"


async def _turns_of_server(port: int, history: str, salt: str) -> Figures:
    messages = [{"role": "user", "content": history}]
    body = {"max_tokens": 32, "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
            "return_token_ids": True, "cache_salt": salt}  # fmt: skip
    first = await send(port, _CHAT, {**body, "messages": messages})
    said = "".join(
        choice["delta"].get("content") or "" for _, event in first.events() for choice in event.get("choices", ())
    )
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": _SECOND}]
    second = await send(port, _CHAT, {**body, "messages": messages})
    known, prompt = list(chain(*_tokens_of(first)))[:-1], _tokens_of(second)[0]
    same = next((at for at, (one, other) in enumerate(zip(known, prompt, strict=False)) if one != other), len(known))
    return {
        "first": first.texts()[0] - first.began,
        "second": second.texts()[0] - second.began,
        "prompt_tokens": [len(_tokens_of(first)[0]), len(prompt)],
        "cached_tokens": second.usage()["prompt_tokens_details"]["cached_tokens"],
        "cached_tokens_expected": same,
    }


def _tokens_of(answer: Answer) -> list[list[int]]:
    """The prompt, and what was written."""
    events = [event for _, event in answer.events()]
    prompt = next(ids for event in events if (ids := event.get("prompt_token_ids")))
    written = [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or ()]
    return [prompt, written]


def _turns_of_library(decoder: Any, history: str, repeat: int) -> Figures:
    messages = [{"role": "user", "content": f"({repeat}) {history}"}]
    found: Figures = {}
    for name in ("first", "second"):
        began = time.perf_counter()
        stream = decoder.stream(messages, max_new_tokens=32, temperature=0)
        next(stream)
        found[name] = time.perf_counter() - began
        for _ in stream:
            pass
        (result,) = stream.results
        found[f"{name}_cached"] = result.cached_tokens
        messages += [{"role": "assistant", "content": result.text}, {"role": "user", "content": _SECOND}]
    return found


# ---- peers: llama.cpp's server and transformers serve


def peers(options: argparse.Namespace) -> Figures:
    """All servers run at once and are asked in turns. llama.cpp gets the same weights as a GGUF file."""
    from paceline.bench.peers.gguf_export import written

    lm = paceline.load(options.target)
    prompts = prompts_of(lm, 8)
    length = ("--max-model-len", "1024")
    makers: dict[str, Callable[[], Server]] = {
        "paceline": lambda: Server.paceline(options.target, "none", *length),
        "paceline auto": lambda: Server.paceline(options.target, options.draft, *length),
        "paceline int8": lambda: Server.paceline(options.target, "none", "--quantize", "int8", *length),
    }
    bodies = {name: [_body(prompt, options.tokens, "") for prompt in prompts] for name in makers}
    if options.llama_server:
        for at, kind in enumerate(("f32", "q8_0")):
            makers[f"llama.cpp {kind}"] = lambda k=kind, p=18080 + at: _llama(options.llama_server, written(lm, k), p)
            bodies[f"llama.cpp {kind}"] = [
                {"prompt": prompt, "n_predict": options.tokens, "ignore_eos": True, "temperature": 0, "stream": True,
                 "cache_prompt": False, "return_tokens": True}
                for prompt in prompts
            ]  # fmt: skip
    if options.transformers:
        makers["transformers"] = lambda: _transformers(options.transformers, lm, 18090)
        bodies["transformers"] = _for_transformers(lm, prompts, options.tokens)
    servers = {name: make() for name, make in makers.items()}
    found: dict[str, dict[int, list[Figures]]] = {name: {} for name in servers}
    try:
        for repeat in range(options.repeats + 1):
            for at_once in (8, 4, 1) if repeat else (8,):
                for name, server in servers.items():
                    few = 2 if name == "transformers" and at_once == 1 else len(prompts)
                    measured = _asked(server, name, _salted(name, bodies[name][:few], f"{repeat} {at_once}"), at_once)
                    if repeat:
                        found[name].setdefault(at_once, []).append(measured)
    finally:
        for server in servers.values():
            server.stop()
    commands = {name: server.command for name, server in servers.items()}
    return {"tokens_per_request": options.tokens, "servers": found, "commands": commands}


def _salted(name: str, bodies: Sequence[dict[str, Any]], salt: str) -> list[dict[str, Any]]:
    """Requests that find nothing in the prefix cache of our server."""
    return [{**body, "cache_salt": salt} if name.startswith("paceline") else body for body in bodies]


def _llama(program: str, weights: Path, port: int) -> Server:
    flags = shlex.split("--host 127.0.0.1 -t 2 -tb 2 -np 8 -c 8192 --no-warmup -ctk f32 -ctv f32")
    command = [program, "-m", str(weights), "--port", str(port), *flags]
    return Server(command, port, "/health")


def _transformers(python: str, lm: Any, port: int) -> Server:
    folder = str(lm.model.config._name_or_path)
    # without a number of blocks, its KV cache takes most of the memory of the machine
    flags = shlex.split(
        "--host 127.0.0.1 --device cpu --dtype float32 --continuous-batching "
        "--cb-block-size 32 --cb-num-blocks 256 --cb-max-batch-tokens 256"
    )
    command = [str(Path(python).with_name("transformers")), "serve", folder, "--port", str(port), *flags]
    return Server(command, port, "/health")


def _for_transformers(lm: Any, prompts: Sequence[list[int]], tokens: int) -> list[dict[str, Any]]:
    """The same prompts as text. A generation config without an end token writes all tokens."""
    config = json.dumps({"max_new_tokens": tokens, "do_sample": False})
    model = str(lm.model.config._name_or_path)
    return [
        {"model": model, "prompt": lm.tokenizer.decode(prompt), "stream": True, "generation_config": config}
        for prompt in prompts
    ]


def _asked(server: Server, name: str, bodies: Sequence[Any], at_once: int) -> Figures:
    """Tokens per second, and the median time to the first token."""
    path = "/completion" if "llama" in name else _COMPLETIONS
    answers = run(send_all(server.port, path, bodies, at_once))
    _check(answers)
    seconds = max(answer.ended for answer in answers) - min(answer.began for answer in answers)
    written = sum(_written(name, answer) for answer in answers)
    firsts = [_first(name, answer) - answer.began for answer in answers]
    return {"tokens_per_second": written / seconds, "first_token_seconds": statistics.median(firsts)}


def _written(name: str, answer: Answer) -> int:
    if "llama" in name:
        return int(answer.events()[-1][1]["tokens_predicted"])
    return int(answer.usage()["completion_tokens"])


def _first(name: str, answer: Answer) -> float:
    if "llama" in name:
        return next(when for when, event in answer.events() if event.get("content"))
    return answer.texts()[0]


# ---- the command line

MEASURED: dict[str, Callable[[argparse.Namespace], Figures]] = {
    each.__name__: each for each in (mixed, gap, flood, soak, throughput, chat, peers)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=[*MEASURED, "all", "report"])
    parser.add_argument("--out", type=Path, default=Path("/tmp/paceline-serving"))
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--model-draft", default="eagle", help="a drafter that is a model")
    parser.add_argument("--count", type=int, default=200, help="mixed: requests")
    parser.add_argument("--prompt", type=int, default=4000, help="gap: tokens of the long prompt")
    parser.add_argument("--requests", type=int, default=10_000, help="soak: requests")
    parser.add_argument("--flood-seconds", type=float, default=20)
    parser.add_argument("--tokens", type=int, default=64, help="throughput, peers: tokens of a text")
    parser.add_argument("--repeats", type=int, default=3, help="throughput, chat, peers: turns that count")
    parser.add_argument("--llama-server", help="peers: llama.cpp's server")
    parser.add_argument("--transformers", help="peers: a Python with transformers[serving]")
    options = parser.parse_args()
    if options.command == "report":
        from report import write

        write(options.out)
        return
    failed = []
    for name in MEASURED if options.command == "all" else [options.command]:
        began, about = time.perf_counter(), harness.conditions(options)
        try:
            figures = MEASURED[name](options)
        except Exception as error:  # the other measurements go on; the exit code says that one failed
            print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr)
            failed.append(name)
            continue
        save(options.out, name, about, began, figures)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
