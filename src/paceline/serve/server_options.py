"""The options of the server. Nothing here needs the packages of the extra `serve`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from paceline.common.errors import InputError, UnsupportedError
from paceline.common.limits import Limited
from paceline.common.options import option

_SERVER, _LIMITS, _SECURITY, _SHOWN = "Server", "Limits", "Keys and TLS", "Logs and metrics"
_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(frozen=True)
class ServerOptions(Limited):
    """How the server listens, what it takes and what it shows."""

    host: str = option("127.0.0.1", "The address to listen on; 0.0.0.0 for all.", _SERVER, metavar="HOST")
    port: int = option(8000, "The port; 0 takes a free one.", _SERVER, metavar="N", least=0, most=65535)
    served_model_name: tuple[str, ...] = option((), "A name that clients use for the model; repeatable.", _SERVER,
                                                metavar="NAME")  # fmt: skip
    drain_seconds: float = option(30.0, "Seconds that running requests have after SIGTERM.", _SERVER, metavar="X",
                                  least=0, most=86_400)  # fmt: skip
    keep_alive_seconds: int = option(75, "Seconds that an idle connection stays open.", _SERVER, metavar="N", least=1,
                                     most=86_400)  # fmt: skip
    cors_origin: tuple[str, ...] = option((), "An origin that browsers may call from; repeatable; none by default.",
                                          _SERVER, metavar="ORIGIN")  # fmt: skip

    max_num_seqs: int = option(8, "Sequences decoded at once: the slots of the KV cache.", _LIMITS, metavar="N",
                               least=1, most=1024)  # fmt: skip
    max_model_len: int | None = option(None, "Tokens of a prompt and its text; else the model's context, at most 4096.",
                                       _LIMITS, metavar="N", least=2)  # fmt: skip
    max_queued: int = option(256, "Sequences that may wait; more get status 429.", _LIMITS, metavar="N", least=0,
                             most=1_000_000)  # fmt: skip
    max_body_bytes: int = option(8 * 2**20, "Bytes of a request; more get status 413.", _LIMITS, metavar="N",
                                 least=1)  # fmt: skip
    body_seconds: float = option(30.0, "Seconds that a client has to send a request.", _LIMITS, metavar="X", above=0,
                               most=86_400)  # fmt: skip
    request_seconds: float = option(3600.0, "Seconds that a request may take.", _LIMITS, metavar="X", above=0,
                                  most=864_000)  # fmt: skip

    api_key: tuple[str, ...] = option((), "A key that clients must send; repeatable.", _SECURITY, metavar="KEY",
                                      secret=True)  # fmt: skip
    api_key_file: Path | None = option(None, "A file with a key on each line.", _SECURITY, metavar="FILE")
    ssl_certfile: Path | None = option(None, "The certificate for HTTPS.", _SECURITY, metavar="FILE")
    ssl_keyfile: Path | None = option(None, "The private key for HTTPS.", _SECURITY, metavar="FILE")

    operator_key: str | None = option(None, "The key of the operator's view; else every client may see it.", _SECURITY,
                                      metavar="KEY", secret=True)  # fmt: skip

    playground: bool = option(True, "Serve the playground at /, with its other drafters.", _SHOWN)
    metrics_prefix: str = option("paceline", "The first word of the names in /metrics, such as vllm.", _SHOWN,
                                 metavar="WORD")  # fmt: skip
    log_requests: bool = option(True, "Write one line of JSON to stderr for each request.", _SHOWN)
    log_prompts: bool = option(False, "Write prompts into these lines.", _SHOWN)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise InputError("--ssl-certfile and --ssl-keyfile belong together; give both.")
        if self.operator_key is not None and not (self.operator_key.strip() and self.operator_key.isascii()):
            raise InputError("--operator-key is empty or has a character that is not ASCII; give letters and digits.")
        if not self.metrics_prefix.isidentifier() or not self.metrics_prefix.isascii():
            raise InputError(
                f"--metrics-prefix must be letters, digits and underscores, such as vllm, got {self.metrics_prefix!r}."
            )

    def keys(self) -> frozenset[str]:
        """Return the API keys of the flag and of the file. Without a key every client is served."""
        found = list(self.api_key)
        if self.api_key_file is not None:
            try:
                found += self.api_key_file.read_text(encoding="utf-8").split("\n")
            except (OSError, UnicodeError) as error:
                raise InputError(f"--api-key-file {self.api_key_file} cannot be read: {error}.") from None
        keys = frozenset(key.strip() for key in found if key.strip())
        if found and not keys:
            raise InputError("The API keys are empty; write one key on each line.")
        if not all(key.isascii() for key in keys):  # a header has no other characters
            raise InputError("An API key has a character that is not ASCII; use letters, digits and signs of ASCII.")
        return keys


def check_packages() -> None:
    """Refuse to serve without the packages of the extra `serve`."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        names = ", ".join(missing).replace("_", "-")
        raise UnsupportedError(f"The server needs {names}; install them with: pip install 'paceline[serve]'.")
