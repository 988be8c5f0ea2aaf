"""Errors as clients see them: one shape on every endpoint, the one of OpenAI's API.

A fault of the client is 400 (a wrong model name 404, a missing key 401) and nothing else: routers turn other 4xx into a
500 and retry them five times (facts/router §0.7). Must never carry a prompt or a token.
"""

from __future__ import annotations

from typing import Any

from pdjax.core.errors import PDError
from pdjax.sched.request import Failure


class ApiError(Exception):
    """What a request is answered with instead of tokens. param: the field of the body that is at fault."""

    def __init__(
        self, status: int, message: str, *, reason: str = "bad_request", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.status,
                "reason": self.reason,
            }
        }


def bad(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param)


def from_pd(error: PDError) -> ApiError:
    return ApiError(error.status, str(error), reason=error.reason)


def from_failure(failure: Failure) -> ApiError:
    """The reason is in the text too: routers pass on error.message only (facts/router §3.2)."""
    return ApiError(failure.status, f"{failure.reason}: {failure.message}", reason=failure.reason)
