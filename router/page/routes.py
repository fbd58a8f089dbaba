"""Serves the chat page and the operators' page: HTML files, their styles and scripts and an icon, read once and kept in memory.

The chat page is a client of /v1 like any other, the operators' page one of /admin and /metrics. They hold nothing secret, so
they are served to everybody, with keys or without. What they may do is little: they load nothing from other hosts, talk to
none, have no inline code, and no text becomes HTML.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

PAGE_FILES = {
    "/": "page.html",
    "/page/page.css": "page.css",
    "/page/page.js": "page.js",
    "/page/api.js": "api.js",
    "/page/text.js": "text.js",
    "/page/icon.svg": "icon.svg",
    "/ops": "ops/ops.html",
    "/page/ops/ops.css": "ops/ops.css",
    "/page/ops/ops.js": "ops/ops.js",
    "/page/ops/actions.js": "ops/actions.js",
    "/page/ops/changes.js": "ops/changes.js",
    "/page/ops/charts.js": "ops/charts.js",
    "/page/ops/elements.js": "ops/elements.js",
    "/page/ops/events.js": "ops/events.js",
    "/page/ops/figures.js": "ops/figures.js",
    "/page/ops/panels.js": "ops/panels.js",
    "/page/ops/topology.js": "ops/topology.js",
}
"""Paths to files in this folder. The HTML names the others relative to itself, so a proxy may put all of it under a prefix."""

_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

_POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self'",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
_HEADERS = {
    "content-security-policy": "; ".join(_POLICY),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_routes() -> list[BaseRoute]:
    """Return one route for each file of the pages. They are not part of the API, so the OpenAPI document leaves them out."""
    pages = [_route(path, Path(__file__).parent / name) for path, name in PAGE_FILES.items()]
    return [*pages, *(_slash_route(path) for path, name in PAGE_FILES.items() if name.endswith(".html") and path != "/")]


def _route(path: str, file: Path) -> Route:
    content, media_type = file.read_bytes(), _MEDIA_TYPES[file.suffix]

    async def answer(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return Route(path, answer, methods=["GET"], include_in_schema=False)


def _slash_route(path: str) -> Route:
    """Send who adds a slash to the page, whose files are named relative to it. Whatever a proxy calls this host."""

    async def answer(request: Request) -> Response:
        return Response(status_code=307, headers={"location": f"..{path}"})

    return Route(f"{path}/", answer, methods=["GET"], include_in_schema=False)
