"""The chat page over HTTP: who gets it, and what it may do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.schema import HttpConfig
from router.page import routes

Run = Callable[..., None]
FOLDER = Path(routes.__file__).parent


def test_it_is_served_without_a_key_and_the_api_is_not(run_cluster: Run, tmp_path: Path) -> None:
    keys_file = tmp_path / "keys.json"
    keys_file.write_text('{"keys": {}}')

    async def test(cluster: Any) -> None:
        for path, name in routes.PAGE_FILES.items():
            response = await cluster.http.get(path)
            assert response.status_code == 200, path
            assert response.content == (FOLDER / name).read_bytes()
            assert response.headers["x-content-type-options"] == "nosniff"
            policy = response.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; ")
            assert "unsafe" not in policy
            assert not re.search(r"https?:|\*|data:", policy)
        assert (await cluster.http.get("/")).headers["content-type"] == "text/html; charset=utf-8"
        assert (await cluster.http.get("/page/page.js")).headers["content-type"] == "text/javascript; charset=utf-8"
        assert (await cluster.http.get("/page/routes.py")).status_code == 401, "only what is listed is open"
        assert (await cluster.http.get("/v1/models")).status_code == 401
        assert (await cluster.http.post("/")).json()["error"]["code"] == "method_not_allowed"

    run_cluster(test, http=HttpConfig(keys_file=str(keys_file)).model_dump())


def test_the_openapi_document_has_the_api_alone(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        paths = (await cluster.http.get("/openapi.json")).json()["paths"]
        assert {"/v1/models", "/health", "/admin/status"} <= set(paths)
        assert set(paths).isdisjoint({*routes.PAGE_FILES, "/openapi.json"})

    run_cluster(test)


def test_every_file_is_served_and_names_only_files_that_are() -> None:
    served = set(routes.PAGE_FILES.values())
    assert served == {path.name for path in FOLDER.iterdir() if path.suffix not in (".py", "") and path.is_file()}
    html = (FOLDER / "page.html").read_text()
    named = set(re.findall(r'(?:src|href)="([^"]*)"', html))
    assert named == {"page/icon.svg", "page/page.css", "page/page.js"}, "relative, so that a proxy may add a prefix"
    imported = {name for file in FOLDER.glob("*.js") for name in re.findall(r'from "\./([^"]*)"', file.read_text())}
    assert imported <= served


def test_nothing_is_inline() -> None:
    html = (FOLDER / "page.html").read_text()
    assert not re.search(r"<style|<script(?![^>]*\ssrc=)|\s(?:on\w+|style)=", html)
