"""Error replies in the protocol's form: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.options import FieldError
from jaxspec.serving.open_engine import NotAccepted, QueueFull

_PARAMS = {
    "max_new_tokens": "max_tokens",
    "prompt_ids": "prompt",
    "stop_ids": "stop_token_ids",
}
"""The protocol's names for fields of `engine.request.Request`."""
RETRY_AFTER_S = 1


class ApiError(Exception):
    """An error reply.

    Attributes:
      status: HTTP status.
      param: the wrong field of the request.
      code: name of the error, for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def to_json(self) -> dict[str, Any]:
        """Return the reply's body."""
        types = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        error_type = types.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {
                "message": self.message,
                "type": error_type,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid_value(error: FieldError) -> ApiError:
    """Return the reply for a field whose value cannot be used."""

    def name(field: str, value: object = None, /) -> str:
        shown = _PARAMS.get(field, field)
        return shown if value is None else f"{shown} {value}"

    return ApiError(400, error.format_message(name), param=_PARAMS.get(error.field, error.field))


def not_accepted(error: NotAccepted) -> ApiError:
    """Return the reply for a request that the engine does not take now."""
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    if isinstance(error, QueueFull):
        message = "too many requests are waiting; try again later"
        return ApiError(429, message, code="queue_full", headers=headers)
    return ApiError(503, str(error), code="unavailable", headers=headers)


def internal_error() -> ApiError:
    """Return the reply for a failure of the server. It does not reveal the cause."""
    return ApiError(500, "internal error; the server's log says more", code="internal_error")
