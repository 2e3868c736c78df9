"""The files of the page: what a browser may do with them, and who may read them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.serve.playground.page_files import PageFiles
from tests.serve.fakes import Running, serving
from tests.serve.test_http import error_of

PAGE = Path(__file__).parents[3] / "src" / "paceline" / "serve" / "page"
MOST = 200_000  # bytes


def paths(running: Running) -> list[str]:
    return re.findall(r'(?:href|src)="(/page/[^"]+)"', running.get("/").text)


def test_the_page_is_served_with_its_policy(server: Running) -> None:
    answer = server.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'self'")
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    found = paths(server)
    assert {path.rpartition("/")[2] for path in found} == {file.name for file in PAGE.iterdir()} - {
        "index.html",
        "types.js",
    }
    kinds = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    for path in found:
        file = server.get(path)
        assert file.headers["content-type"].startswith(kinds[path.rpartition(".")[2]])
        assert file.headers["x-content-type-options"] == "nosniff"
        assert "immutable" in file.headers["cache-control"]


@pytest.mark.parametrize("path", ["/", None])
def test_a_file_that_is_known_is_not_sent_again(server: Running, path: str | None) -> None:
    path = path or paths(server)[-1]
    tag = server.get(path).headers["etag"]
    for given in (tag, f'W/{tag}, "other"'):
        answer = server.get(path, headers={"If-None-Match": given})
        assert (answer.status_code, answer.content) == (304, b"")
    assert server.get(path, headers={"If-None-Match": '"other"'}).status_code == 200


def test_a_file_of_another_version_is_missing(server: Running) -> None:
    digest = PageFiles().digest
    assert server.get(f"/page/{digest}/app.js").status_code == 200
    for path in (f"/page/{'0' * 16}/app.js", f"/page/{digest}/other.js", f"/page/{digest}/..%2Fapp.py"):
        error_of(server.get(path), 404)


def test_the_page_is_small_and_has_no_script_or_style_inside() -> None:
    files = {file.name: file.read_text("utf-8") for file in PAGE.iterdir()}
    assert PageFiles().size <= MOST
    assert "{{digest}}" in files["index.html"]
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*src=)", files["index.html"])
    for name, text in files.items():
        assert not re.search(r"https?://(?!www\.w3\.org/)", text), name  # nothing comes from another host
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )


def test_every_field_of_the_form_has_a_label() -> None:
    text = (PAGE / "index.html").read_text("utf-8")
    fields = set(re.findall(r'<(?:input|select|textarea) id="([\w-]+)"', text)) - {"copy-text"}
    labels = set(re.findall(r'<label for="([\w-]+)"', text))
    wrapped = set(re.findall(r'<label><input id="([\w-]+)"', text))
    assert fields - labels - wrapped == set()


def test_the_page_needs_no_key_and_everything_else_does() -> None:
    with serving({"api_key": ("secret",)}) as running:
        assert running.get("/").status_code == 200
        assert running.get(paths(running)[-1]).status_code == 200
        for path in ("/playground/facts", "/playground/events", "/metrics", "/page", "/page/../metrics"):
            error_of(running.get(path), 401)
        assert running.get("/playground/facts", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_the_operators_view_has_a_key_of_its_own() -> None:
    with serving({"api_key": ("secret",), "operator_key": "boss"}) as running:
        error = error_of(running.get("/playground/events", headers={"Authorization": "Bearer secret"}), 403)
        assert error["code"] == "operator_only"
        boss = {"Authorization": "Bearer boss"}
        assert running.get("/metrics", headers=boss).status_code == 200
        with running.client() as client, client.stream("GET", "/playground/events", headers=boss) as stream:
            assert stream.status_code == 200
            assert next(stream.iter_lines()) == 'data: {"slots":4}'


def test_an_operators_key_closes_the_view_of_an_open_server() -> None:
    with serving({"operator_key": "boss"}) as running:
        assert running.get("/playground/facts").json()["operator"] is False
        assert running.get("/playground/facts", headers={"Authorization": "Bearer boss"}).json()["operator"] is True
        error_of(running.get("/playground/events"), 403)
        error_of(running.get("/playground/events", headers={"Authorization": "boss"}), 403)


def test_a_server_without_a_playground_has_no_page() -> None:
    with serving({"playground": False}) as running:
        error_of(running.get("/"), 404)
        error_of(running.get("/playground/facts"), 404)
