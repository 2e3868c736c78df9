"""`paceline serve`: an OpenAI-compatible server."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.command_options import ServeOptions, resolve_drafter
from paceline.cli.decoder_session import open_decoder
from paceline.cli.expected_speed import expected_briefly
from paceline.cli.settings import command_from
from paceline.cli.terminal import info
from paceline.common.errors import InputError
from paceline.serve.listening import bind_sockets, check_tls
from paceline.serve.server_options import check_packages

if TYPE_CHECKING:
    from paceline.engine.decoder import SpeculativeDecoder
    from paceline.serve.jobs import EngineFacts

_USUAL_LENGTH = 4096  # of a slot, if the model has a longer context
_OPENAIS = 1.0  # the default temperature of OpenAI's API
_LOCAL = ("127.0.0.1", "localhost", "::1")

EPILOG = """
[bold]Examples[/bold]

paceline serve

paceline serve --target ./big --draft ./small --max-num-seqs 16 --max-model-len 8192

PACELINE_API_KEY=secret paceline serve --host 0.0.0.0 --port 8080

curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once upon a time"}'
"""


@command_from(ServeOptions, resolve_drafter)
def serve(ctx: typer.Context, options: ServeOptions) -> None:
    """Serve a target model to clients of OpenAI's API. The texts do not depend on the load."""
    check(options)
    run_server(options, bind_sockets(options))


def check(options: ServeOptions) -> None:
    """Refuse options that cannot work, before a model is loaded."""
    check_packages()
    if options.tp_plan is not None:
        raise InputError("A server is one process, and --tp-plan splits a target over several; leave it out.")
    options.keys()
    check_tls(options)


def run_server(
    options: ServeOptions, sockets: list[socket.socket], started: Callable[[str], None] = lambda url: None
) -> None:
    """Load the models and serve until a signal comes. started: called with the URL."""
    decoder = open_decoder(options, {}, options.max_num_seqs)
    if decoder.target.tokenizer is None:
        raise InputError(f"{decoder.target.name} has no tokenizer, and the server needs one.")
    from paceline.bench.what_if import what_if
    from paceline.serve.engine_thread import EngineThread
    from paceline.serve.http_server import serve as run
    from paceline.serve.playground.drafter_engines import DrafterEngines
    from paceline.serve.playground.turns import Turns
    from paceline.serve.service import Service

    length, own = model_length(options, decoder), decoder.target.usual_temperature

    def engine(deliver: Any, decoder: SpeculativeDecoder, slots: int) -> EngineThread:
        return EngineThread(decoder, slots=slots, max_model_len=length, max_queued=options.max_queued, deliver=deliver,
                            default_temperature=_OPENAIS if own is None else own, turns=turns)  # fmt: skip

    def others(deliver: Any) -> DrafterEngines:
        return DrafterEngines(decoder, partial(engine, deliver))

    shown, turns = options.playground, Turns() if options.playground else None
    service = Service(lambda deliver: engine(deliver, decoder, options.max_num_seqs), decoder.target.tokenizer, options,
                      others if shown else None, what_if if shown else None)  # fmt: skip
    for line in beginning(service.engine.facts, decoder):
        info(line)
    if not options.keys() and options.host not in _LOCAL:
        info(f"{options.host} is not only this machine, and there is no --api-key: everyone who reaches it is served")

    def listens(url: str) -> None:
        if shown:
            info(f"the playground: {url}/")
        info(f"{', '.join(service.names)} at {url}")
        started(url)

    run(service, listens, sockets)


def model_length(options: ServeOptions, decoder: SpeculativeDecoder) -> int:
    """Return the number of tokens of a slot."""
    context, asked = decoder.target.context, options.max_model_len
    if asked is None:
        return min(context, _USUAL_LENGTH)
    if asked > context:
        raise InputError(f"--max-model-len {asked:,} is more than the context of {decoder.target.name}, {context:,}.")
    return asked


def beginning(facts: EngineFacts, decoder: SpeculativeDecoder) -> Iterator[str]:
    """Yield the first lines: drafter and target, the slots and their memory, the default temperature, what the bits
    depend on, and the speed-up to expect."""
    yield facts.description
    yield _slots(facts)
    states = decoder.target.usual_temperature is not None
    source = "the model's generation config" if states else "OpenAI's default, because the model states none"
    yield f"temperature {facts.default_temperature:g} where a request gives none: {source}"
    yield _bits(decoder)
    if decoder.speculates:
        yield expected_briefly(decoder)


def _slots(facts: EngineFacts) -> str:
    slots = f"{facts.slots} slots of {facts.max_model_len:,} tokens"
    if facts.reserves:
        return f"{slots}, {facts.kv_bytes / 2**20:,.0f} MiB of KV cache, which is reserved and keeps prefixes"
    return f"{slots}; for a target with two branches the KV cache grows, keeps no prefixes, and prompts are read whole"


def _bits(decoder: SpeculativeDecoder) -> str:
    """Return a line that says whether a text can depend on the load."""
    from paceline.models.runtime import running

    how = running(decoder.target)
    if not how.bits:
        return "the bits of a text are the same alone and in any batch, with a cold and a warm cache"
    dtype = str(decoder.target.dtype).removeprefix("torch.")
    remedy = "" if how.strict else "; --strict prevents that"
    return f"only where two tokens tie in {dtype}, a text can depend on {how.bits}{remedy}"
