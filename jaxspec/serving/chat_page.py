"""The page at /: a chat in which one sees which tokens were drafted. Its files are in `page/`.

It needs nothing from elsewhere. It asks this server only, in the protocol that all clients speak, so it knows nothing
that they could not know.
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
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    # No inline script or style runs, nothing is loaded from elsewhere, and no other page may frame this one.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def routes() -> list[Route]:
    """Return the routes of the page. Files are read once."""
    return [_route(path, FOLDER / name) for path, name in FILES.items()]


def _route(path: str, file: Path) -> Route:
    body = file.read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": tag}

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=_KINDS[file.suffix])

    return Route(path, send)
