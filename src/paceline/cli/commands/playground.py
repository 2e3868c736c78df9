"""`paceline playground`: a server on this machine, and its page in a browser."""

from __future__ import annotations

import socket
import threading
import webbrowser
from dataclasses import replace

import typer

from paceline.cli.command_options import PlaygroundOptions, resolve_drafter
from paceline.cli.commands.serve import check, run_server
from paceline.cli.settings import command_from
from paceline.cli.terminal import info
from paceline.common.errors import InputError
from paceline.serve.listening import PortInUseError, bind_sockets

EPILOG = """
[bold]Examples[/bold]

paceline playground

paceline playground --target ./big --draft ./small --no-browser
"""


@command_from(PlaygroundOptions, resolve_drafter)
def playground(ctx: typer.Context, options: PlaygroundOptions) -> None:
    """Show in a browser how a drafter and a target write a text, on this machine."""
    if not options.playground:
        raise InputError("The playground needs its page; leave --no-playground out.")
    check(options)
    run_server(options, _bound(options), _open if options.browser else lambda url: info(f"open {url} in a browser"))


def _bound(options: PlaygroundOptions) -> list[socket.socket]:
    """Return sockets at the port, or at a free one if another program uses it."""
    try:
        return bind_sockets(options)
    except PortInUseError:
        found = bind_sockets(replace(options, port=0))
        info(f"port {options.port} is in use; the playground takes a free one")
        return found


def _open(url: str) -> None:
    """Open the page. Some browsers hold the caller until they end, so that another thread calls."""
    threading.Thread(target=_try_to_open, args=(url,), daemon=True).start()


def _try_to_open(url: str) -> None:
    if not webbrowser.open(url):
        info(f"no browser was found; open {url}")
