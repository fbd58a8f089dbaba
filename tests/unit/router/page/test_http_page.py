"""The chat page and the operators' page over HTTP: who gets them, and what they may do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.schema import HttpConfig
from router.page import routes

Run = Callable[..., None]
FOLDER = Path(routes.__file__).parent


HTML = {"page.html": {"icon.svg", "page.css", "page.js"}, "ops/ops.html": {"icon.svg", "ops/ops.css", "ops/ops.js"}}
"""The pages, and the files that each names."""


def test_they_are_served_without_a_key_and_the_api_is_not(run_cluster: Run, tmp_path: Path) -> None:
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
        assert (await cluster.http.get("/page/ops/ops.js")).headers["content-type"] == "text/javascript; charset=utf-8"
        assert (await cluster.http.get("/ops")).headers["content-type"] == "text/html; charset=utf-8"
        slash = await cluster.http.get("/ops/")
        assert (slash.status_code, slash.headers["location"]) == (307, "../ops"), "whatever a proxy has made of scheme and host"
        assert (await cluster.http.get("/page/routes.py")).status_code == 401, "only what is listed is open"
        assert (await cluster.http.get("/v1/models")).status_code == 401
        assert (await cluster.http.get("/admin/status")).status_code == 403, "what the operators' page shows is not open"
        assert (await cluster.http.post("/")).json()["error"]["code"] == "method_not_allowed"

    run_cluster(test, http=HttpConfig(keys_file=str(keys_file)).model_dump())


def test_pages_of_other_origins_get_none_of_it(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        for path in routes.PAGE_FILES:
            for header in ({"origin": "https://elsewhere.example"}, {"host": "elsewhere.example"}):
                refused = await cluster.http.get(path, headers=header)
                assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied"), path

    run_cluster(test, http=HttpConfig().model_dump())


def test_the_openapi_document_has_the_api_alone(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        paths = (await cluster.http.get("/openapi.json")).json()["paths"]
        assert {"/v1/models", "/health", "/admin/status"} <= set(paths)
        assert set(paths).isdisjoint({*routes.PAGE_FILES, "/openapi.json"})

    run_cluster(test)


def test_every_file_is_served_and_names_only_files_that_are() -> None:
    served = set(routes.PAGE_FILES.values())
    files = [path for path in FOLDER.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert served == {str(path.relative_to(FOLDER)) for path in files}
    for name, own in HTML.items():
        named = set(re.findall(r'(?:src|href)="([^"]*)"', (FOLDER / name).read_text()))
        assert named == {f"page/{each}" for each in own}, "relative, so that a proxy may add a prefix"
    for file in files:
        if file.suffix == ".js":
            imported = re.findall(r' from "(\.[^"]*)"', file.read_text())
            assert {str((file.parent / name).resolve().relative_to(FOLDER)) for name in imported} <= served
    for path, name in routes.PAGE_FILES.items():
        assert name in HTML or path == f"/page/{name}", "scripts find each other as they do in this folder"


def test_nothing_is_inline() -> None:
    for name in HTML:
        html = (FOLDER / name).read_text()
        assert not re.search(r"<style|<script(?![^>]*\ssrc=)|\s(?:on\w+|style)=", html)
