"""Refusals in the protocol's own form: {"error": {"message", "type", "param", "code"}}."""

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
"""Fields of ours, by what the protocol calls them."""

RETRY_S = 1


class ApiError(Exception):
    """A reply that is an error.

    Attributes:
      status: of HTTP.
      param: the field of the request that is wrong.
      code: a word that programs may look for.
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
        """Return the body of the reply."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def wrong_value(error: FieldError) -> ApiError:
    """Return the reply for a value that cannot be used."""

    def name(field: str, value: object = None, /) -> str:
        shown = _PARAMS.get(field, field)
        return shown if value is None else f"{shown} {value}"

    return ApiError(400, error.format_message(name), param=_PARAMS.get(error.field, error.field))


def not_accepted(error: NotAccepted) -> ApiError:
    """Return the reply for a request that may come again later."""
    headers = {"Retry-After": str(RETRY_S)}
    if isinstance(error, QueueFull):
        message = "too many requests are waiting; try again later"
        return ApiError(429, message, code="queue_full", headers=headers)
    return ApiError(503, str(error), code="unavailable", headers=headers)
