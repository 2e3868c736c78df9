"""Over HTTP: every text is the one of the same request alone without speculation, to the last bit."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import paceline
from paceline.models.language_model import LanguageModel
from paceline.serve.engine_thread import EngineThread
from paceline.serve.http_server import HttpServer
from paceline.serve.server_options import ServerOptions
from paceline.serve.service import Service
from tests.serve.fakes import tokenizer
from tests.serve.mixed_requests import Client, differences, mixed
from tests.toys import llama

CONTEXT = 1024


@contextmanager
def serving(draft: Any, **decoder: Any) -> Iterator[str]:
    """The address of a server with a tiny model that reads bytes."""
    words = tokenizer()
    model = llama(3, vocab_size=len(words), max_position_embeddings=CONTEXT, eos_token_id=len(words) - 1).float()
    made = paceline.SpeculativeDecoder(LanguageModel(model, words), draft, **decoder)
    service = Service(
        lambda deliver: EngineThread(made, slots=8, max_model_len=None, max_queued=256, deliver=deliver),
        words,
        ServerOptions(port=0, log_requests=False, drain_seconds=2),
    )
    ready, found = threading.Event(), list[str]()

    def started(url: str) -> None:
        found.append(url)
        ready.set()

    server = HttpServer(service, started)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert ready.wait(60), "the server did not start"
        yield found[0]
    finally:
        server.should_exit = True
        thread.join(60)
        service.close()
        assert not thread.is_alive()


def test_the_requests_have_all_controls() -> None:
    used = Counter(name for ask in mixed(200) for name in ask.controls)
    assert min(used.values()) >= 8
    assert {"prediction", "logit_bias", "echo", "n", "stream", "min_p", "speculative_config"} <= set(used)
    assert {"response_format", "structured_outputs", "regex", "grammar", "choice"} <= set(used)


@pytest.mark.parametrize("draft", ["auto", "suffix"])
def test_texts_do_not_depend_on_load_cache_or_speculation(draft: str) -> None:
    with serving(draft) as url, Client(url) as client:
        assert differences(client, mixed(60, 1, CONTEXT), 8, predictions=draft == "auto") == []
