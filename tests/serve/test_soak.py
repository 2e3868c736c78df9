"""After 300 requests of all kinds, with clients that leave and broken bodies, nothing of them is left."""

from __future__ import annotations

import asyncio
import threading

import paceline
from paceline.models.language_model import LanguageModel
from paceline.serve.engine_thread import EngineThread
from paceline.serve.server_options import ServerOptions
from paceline.serve.service import Service
from tests.serve.fakes import listening, tokenizer
from tests.serve.soak import soak_of
from tests.toys import llama


class Inside:
    """The server in this process."""

    def __init__(self, connections: set[object]) -> None:
        self._connections, self.memory = connections, 0

    @property
    def threads(self) -> int:
        return threading.active_count()

    @property
    def sockets(self) -> int:
        return len(self._connections)


def test_many_requests_of_all_kinds_leave_nothing_behind() -> None:
    words = tokenizer()
    model = llama(3, vocab_size=len(words), max_position_embeddings=1024, eos_token_id=len(words) - 1).float()
    decoder = paceline.SpeculativeDecoder(LanguageModel(model, words), "suffix")
    service = Service(
        lambda deliver: EngineThread(decoder, slots=4, max_model_len=None, max_queued=64, deliver=deliver),
        words,
        ServerOptions(port=0, log_requests=False, drain_seconds=2),
    )
    with listening(service) as (url, server):
        inside = Inside(server.server_state.connections)
        found = asyncio.run(soak_of(int(url.rpartition(":")[2]), 300, inside))
        assert found["statuses"].keys() <= {"0", "200", "400"}, found
        assert found["statuses"]["200"] > 100, found
        assert found["statuses"]["400"] > 10, found
        assert set(found["left"].values()) == {0.0}, found
        assert found["threads"][0] == found["threads"][1], found
        assert found["sockets"][0] == found["sockets"][1], found
        assert service.mailbox.waiting == 0
        assert service.metrics.live == 0
