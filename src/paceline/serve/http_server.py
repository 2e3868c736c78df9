"""Run uvicorn with our limits: it disconnects slow clients, drains at the first signal and ends at the second one."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.serve.app import make_app
from paceline.serve.listening import address_error
from paceline.serve.middleware import LOGGER
from paceline.serve.openai.api_errors import ApiError, encode_json
from paceline.serve.service import Service

_HEADER_BYTES = 64 * 1024
_HEADER_SECONDS = 20
_UNREAD_SECONDS = 60  # that a client may leave a full buffer unread


class TimedProtocol(H11Protocol):
    """Closes a connection on which a request line and its headers are not complete in time, or whose client does not
    read what it is sent. Answers input that is not HTTP with an error in OpenAI's format."""

    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer = self.loop.call_later(_HEADER_SECONDS, self._late)

    def data_received(self, data: bytes) -> None:
        if self._timer is None and self.conn.their_state is h11.IDLE:  # the next request of the connection
            self._timer = self.loop.call_later(_HEADER_SECONDS, self._late)
        super().data_received(data)
        if self._timer is not None and self.conn.their_state is not h11.IDLE:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_waiting()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(_UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_waiting()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # the client has not read its last answer

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # an answer has begun, so no other answer can be sent
            return
        error = ApiError(400, "The request is no valid HTTP/1.1, or its headers are too large.", None, "invalid_http")
        body = encode_json(error.body)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
        events = (h11.Response(status_code=400, headers=list(headers.items()), reason=b"Bad Request"),
                  h11.Data(data=body), h11.EndOfMessage())  # fmt: skip
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_waiting(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _late(self) -> None:
        self._timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()


class HttpServer(uvicorn.Server):
    """Runs a service until a signal comes. `started_at` is called with the address once it listens."""

    def __init__(self, service: Service, started_at: Callable[[str], None]) -> None:
        options = service.options
        config = uvicorn.Config(
            make_app(service),
            host=options.host,
            port=options.port,
            http=TimedProtocol,
            ws="none",
            loop="uvloop" if find_spec("uvloop") is not None else "asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=options.keep_alive_seconds,
            timeout_graceful_shutdown=options.drain_seconds,  # type: ignore[arg-type]  # it only waits that long
            h11_max_incomplete_event_size=_HEADER_BYTES,
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile=options.ssl_keyfile,
        )
        super().__init__(config)
        self._service, self._started_at = service, started_at
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: Any = None) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await super().startup(sockets)
        except OSError as error:  # another program has listened since the sockets were bound
            raise address_error(self._service.options, error) from None
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            scheme = "https" if self.config.is_ssl else "http"
            self._started_at(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Like uvicorn's, but the signal does not end the process again after the requests have ended."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal: take no new requests, and finish the running ones. End now at the second one."""
        engine = self._service.engine
        ask = engine.close if self.should_exit else self._drain
        if self._loop is not None:  # call it later: this thread may hold a lock of the engine now
            self._loop.call_soon_threadsafe(ask)
        self.force_exit = self.should_exit
        self.should_exit = True

    def _drain(self) -> None:
        self._service.engine.drain()
        state = self._service.engine.state()
        logging.getLogger(LOGGER).info(
            "%d sequences are in work and have %g seconds; a second signal ends them",
            state.running + state.reading + state.waiting,
            self._service.options.drain_seconds,
        )


def serve(service: Service, started_at: Callable[[str], None], sockets: list[socket.socket] | None = None) -> None:
    """Serve until a signal comes, and end the engine. sockets: bound before, by `bind_sockets`."""
    configure_logs()
    try:
        HttpServer(service, started_at).run(sockets)
    finally:
        service.close()


def configure_logs() -> None:
    """Write the lines of requests to stderr without a prefix, and uvicorn's own lines only if they are warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name, level in ((LOGGER, logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
