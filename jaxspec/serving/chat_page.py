"""The chat page at /. It colours the tokens that were drafted. Its files are in `page/`.

The page loads nothing from other servers. It uses this server's public routes only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "page"
FILES = {
    "/": "index.html",
    **{f"/page/{name}": name for name in ("page.css", "page.js", "reply.js", "api.js", "live.js")},
}
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    # No inline script or style runs, nothing is loaded from other servers, and no other page may
    # frame this one.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def routes() -> list[Route]:
    """Return the routes of the page. The files are read here, not at each request."""
    return [_route(path, FOLDER / name) for path, name in FILES.items()]


def _route(path: str, file: Path) -> Route:
    body = file.read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": tag}

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=_MEDIA_TYPES[file.suffix])

    return Route(path, send)
