"""Serves the chat page: an HTML file, its style, its scripts and its icon, read once and kept in memory.

The page is a client of /v1 like any other. It holds nothing secret, so it is served to everybody, with keys or without. What it
may do is little: it loads nothing from other hosts, talks to none, has no inline code, and no text becomes HTML.
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
}
"""Paths to files beside this one. The HTML names the others relative to itself, so a proxy may put all of it under a prefix."""

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
    """Return one route for each file of the page. They are not part of the API, so the OpenAPI document leaves them out."""
    return [_route(path, Path(__file__).with_name(name)) for path, name in PAGE_FILES.items()]


def _route(path: str, file: Path) -> Route:
    content, media_type = file.read_bytes(), _MEDIA_TYPES[file.suffix]

    async def answer(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return Route(path, answer, methods=["GET"], include_in_schema=False)
