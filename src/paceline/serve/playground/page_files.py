"""The files of the page, with headers that keep a browser from running anything else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

_TYPES = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8",
          "svg": "image/svg+xml"}  # fmt: skip
_POLICY = "; ".join([
    "default-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'", "object-src 'none'",
    "require-trusted-types-for 'script'",
])  # fmt: skip
SECURITY = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin"}  # fmt: skip
_FOREVER = "public, max-age=31536000, immutable"  # the path of a file has the digest of all files
_DIGEST = "{{digest}}"


@dataclass(frozen=True)
class _File:
    content: bytes
    kind: str
    tag: str


class PageFiles:
    """The files of `serve/page`, read once."""

    def __init__(self) -> None:
        found = {each.name: each.read_bytes() for each in files("paceline.serve").joinpath("page").iterdir()}
        self.digest = hashlib.sha256(b"".join(found[name] for name in sorted(found))).hexdigest()[:16]
        found["index.html"] = found["index.html"].replace(_DIGEST.encode(), self.digest.encode())
        self._files = {
            name: _File(content, _TYPES[name.rpartition(".")[2]], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
            for name, content in found.items()
        }
        self.size = sum(len(each.content) for each in self._files.values())

    def start(self, request: Request) -> Response:
        """Return the page itself. A browser asks each time whether it has changed."""
        return _response(request, self._files["index.html"], "no-cache")

    def file(self, request: Request, digest: str, name: str) -> Response | None:
        """Return a file of the page; None if there is none, or if the digest is of another version."""
        known = self._files.get(name)
        return None if known is None or digest != self.digest else _response(request, known, _FOREVER)


def _response(request: Request, file: _File, caching: str) -> Response:
    headers = {**SECURITY, "Cache-Control": caching, "ETag": file.tag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.tag in known:
        return Response(None, 304, headers)
    return Response(file.content, 200, headers, media_type=file.kind)
