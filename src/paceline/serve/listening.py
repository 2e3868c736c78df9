"""The address of a server and its certificate, checked before a model is loaded."""

from __future__ import annotations

import errno
import os
import socket
import ssl

from paceline.common.errors import InputError
from paceline.serve.server_options import ServerOptions


class PortInUseError(InputError):
    """Another program listens at the port."""


def bind_sockets(options: ServerOptions) -> list[socket.socket]:
    """Return sockets for every address of --host, at one port. They do not listen yet, so a client is refused and does
    not wait."""
    host, port = options.host, options.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InputError(f"--host {host} is no address of this machine: {_reason(error)}.") from None
    sockets, failures = list[socket.socket](), list[OSError]()
    for family, kind, protocol, _, address in dict.fromkeys(found):
        port = sockets[0].getsockname()[1] if sockets else port
        try:
            sockets.append(_bound(family, kind, protocol, (address[0], port, *address[2:])))
        except OSError as error:
            failures.append(error)
    fatal = [error for error in failures if error.errno in (errno.EADDRINUSE, errno.EACCES)]
    if fatal or not sockets:
        for each in sockets:
            each.close()
        raise address_error(options, (fatal or failures)[0])
    return sockets


def _bound(family: int, kind: int, protocol: int, address: tuple[object, ...]) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere it would share the port with another program
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made


def address_error(options: ServerOptions, error: OSError) -> InputError:
    """Return the error that says why the server cannot listen, and what to do."""
    host, port = options.host, options.port
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(f"Port {port} of {host} is in use; choose another one with --port, or 0 for a free one.")
    if error.errno == errno.EACCES:
        return InputError(f"Port {port} needs rights that this user does not have; choose one from 1024 with --port.")
    return InputError(f"The server cannot listen on {host}, port {port}: {_reason(error)}.")


def check_tls(options: ServerOptions) -> None:
    """Refuse a certificate or a key that cannot be read, or that do not fit."""
    cert, key = options.ssl_certfile, options.ssl_keyfile
    if cert is None or key is None:
        return
    for flag, file in (("--ssl-certfile", cert), ("--ssl-keyfile", key)):
        try:
            file.read_bytes()
        except OSError as error:
            raise InputError(f"{flag} {file} cannot be read: {_reason(error)}.") from None
    try:
        # without a password here, openssl would ask for it on the terminal
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError):
        raise InputError(
            f"--ssl-certfile {cert} and --ssl-keyfile {key} are no certificate and its unencrypted key; give PEM files "
            "that belong together."
        ) from None


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).rstrip(".")
