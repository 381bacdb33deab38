"""Middleware for ids of requests, API keys, the request log, and unexpected errors."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import json
import logging
import re
import time
import uuid
from typing import Any

from h11 import LocalProtocolError
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.serving.chat_page import FILES
from jaxspec.serving.errors import ApiError, internal_error
from jaxspec.serving.settings import Settings

LOG = logging.getLogger("jaxspec.serving")
OPEN_PATHS = frozenset({"/health", "/version", "/metrics", *FILES})
"""Paths without a key: monitoring, and the chat page, which asks its reader for the key."""
MAX_LOGGED_PATH = 200
"""Largest number of characters of a path in the log."""
_ID = re.compile(r"[\w.:-]{1,128}")


def log_fields(request: Request) -> dict[str, Any]:
    """Return the dict of further fields that the log shows of a request. Add fields to it."""
    return request.scope.setdefault("jaxspec.log", {})


class Middleware:
    """Checks the API key, logs the request, and replies to unexpected errors.

    A slash at the end of a path is ignored. A reply that is complete before its request is, such as
    that to a body which is too large, does not end before the client has sent the rest. Otherwise
    the connection would be reset, and the client might not see the reply.
    """

    def __init__(self, app: ASGIApp, settings: Settings):
        self._app, self._settings = app, settings
        self._keys = [_digest(key) for key in settings.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request that has a key, and log it when it is over."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        scope["path"] = scope["path"].rstrip("/") or "/"
        # A client that expects a go-ahead does not send a body without it.
        is_read = b"expect" in headers or not _has_body(headers)
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        if not _ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        log: dict[str, Any] = {}
        scope["jaxspec.log"] = log
        begin, status = time.monotonic(), 0

        async def noting_receive() -> Message:
            nonlocal is_read
            message = await receive()
            is_read |= not message.get("more_body", False)
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            elif not is_read and not message.get("more_body", False):
                await send({**message, "more_body": True})
                if status != 408:  # there, the rest does not come
                    await drop_rest()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        async def drop_rest() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.timeout):
                    while not is_read:
                        async with asyncio.timeout(self._settings.client_timeout):
                            await noting_receive()

        try:
            if self._is_allowed(scope, headers):
                await self._app(scope, noting_receive, send_with_id)
            else:
                error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
                challenge = {"WWW-Authenticate": "Bearer"}
                reply = JSONResponse(error.to_json(), 401, headers=challenge)
                await reply(scope, receive, send_with_id)
        except asyncio.CancelledError:  # a second signal ends the server at once
            log["error"] = "the server ended"
            if not status:
                error = ApiError(503, "the server ended the request", code="cancelled")
                await JSONResponse(error.to_json(), 503)(scope, receive, send_with_id)
        except TimeoutError:
            log["error"] = "the client did not read"
        except LocalProtocolError:
            log["error"] = "the client broke HTTP, and the connection is over"
        except Exception:
            LOG.exception("request %s failed", request_id)
            if not status:
                await JSONResponse(internal_error().to_json(), 500)(scope, receive, send_with_id)
        finally:
            self._log(scope, request_id, status, time.monotonic() - begin, log)

    def _is_allowed(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        if not self._keys or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        digest = _digest(key.strip().decode("latin-1"))
        # All keys are compared, each in constant time, so that the time reveals nothing.
        matches = [hmac.compare_digest(digest, known) for known in self._keys]
        return kind.lower() == b"bearer" and any(matches)

    def _log(
        self, scope: Scope, request_id: str, status: int, seconds: float, log: dict[str, Any]
    ) -> None:
        usage = log.pop("usage", None)
        if "param" in log and not self._settings.log_prompts:
            log["error"] = "refused"  # the message may quote a value
        line = {
            "request_id": request_id,
            "method": scope["method"],
            "path": scope["path"][:MAX_LOGGED_PATH],
            "status": status,
            "ms": round(seconds * 1e3, 1),
            **(dataclasses.asdict(usage) if usage is not None else {}),
            **log,
        }
        quiet = scope["path"] in OPEN_PATHS
        LOG.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": line})


def _has_body(headers: dict[bytes, bytes]) -> bool:
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class JsonLines(logging.Formatter):
    """Formats records of the log as lines of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as a line of JSON."""
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
