"""Errors in the form of OpenAI's API: an HTTP status, and JSON with a message and the name of the wrong parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    499: "cancelled",
    500: "server_error",
    503: "unavailable_error",
    504: "timeout_error",
}


LONGEST_TEXT = 1000  # characters of a client's that are sent back, or logged


def shortened(text: str) -> str:
    """The text, or its beginning and end if it is too long to be repeated in a message."""
    half = LONGEST_TEXT // 2
    return text if len(text) <= LONGEST_TEXT else f"{text[:half]} … {text[-half:]}"


class APIError(Exception):
    """The error for a request that is refused or has failed; it becomes the response.

    Args:
        status: The HTTP status.
        message: The problem, and what to do. A long message, which repeats what the client has sent, is cut.
        param: The parameter that was wrong, as a path such as `messages.0.role`. None: the error is of no single
            parameter.
        code: Identifier for programs, such as `invalid_api_key`. None: there is none.
        headers: Additional headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.message = shortened(message)
        self.param = None if param is None else shortened(param)
        super().__init__(self.message)
        self.code = code
        self.headers = dict(headers or {})

    @property
    def content(self) -> dict[str, Any]:
        """The JSON body of the response."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.content, self.status, self.headers)


def unsupported(param: str, advice: str = "leave it out") -> APIError:
    """The error for a parameter of OpenAI's API that this server does not support."""
    return APIError(400, f"'{param}' is not supported; {advice}", param=param, code="unsupported_parameter")


def model_not_found(name: str, *served: str) -> APIError:
    """The error for a request whose `model` is not one of those served."""
    message = f"there is no model '{name}' here; this is {' or '.join(served)}"
    return APIError(404, message, param="model", code="model_not_found")
