"""Reading a request's body as JSON, within limits on size, time and nesting depth."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, NoReturn

from starlette.requests import Request

from npu_sim.serving.http.errors import APIError
from npu_sim.serving.http.limits import Limits

# Python's own limit on recursion is far above, but not that of all who read the values later.
_DEEPEST = 64
# No request needs as many, and each could be an error of its own.
_MOST_KEYS = 1000
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(request: Request, limits: Limits) -> bytes:
    """The bytes of a request's body, which should be JSON.

    Raises:
        APIError: 408: the body did not arrive in time; 413: it is too large; 415: its declared type is not JSON, as in
            requests that a page of another site can send without permission (CORS).
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise _refused(415, f"the content type is '{kind}'; send application/json")
    try:
        async with asyncio.timeout(limits.body_seconds):
            return await _read(request, limits.body_bytes)
    except TimeoutError:
        raise _refused(408, f"the body did not arrive within {limits.body_seconds:g} s") from None


async def _read(request: Request, most: int) -> bytes:
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > most:
        raise _too_large(most)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise _too_large(most)
    return bytes(body)


def _too_large(most: int) -> APIError:
    return _refused(413, f"the body is larger than {most} bytes")


def _refused(status: int, message: str) -> APIError:
    """An error before the body was read, after which the connection is closed."""
    return APIError(status, message, headers={"Connection": "close"})


def parse_json(body: bytes) -> Any:
    """Parse JSON in UTF-8, without NaN, infinities, lone surrogates, very deep nesting and huge objects.

    Raises:
        APIError: 400: the body is not such JSON.
    """
    try:
        text = body.decode()
        value = json.loads(text, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise APIError(400, f"the body is not UTF-8: byte {error.start} is {body[error.start]:#04x}") from None
    except json.JSONDecodeError as error:
        raise APIError(400, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # an integer of thousands of digits, or one of the constants
        raise APIError(400, f"the body is not JSON: {error}") from None
    _check_shape(value)
    if _SURROGATE.search(body):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise APIError(400, "the body has half of a surrogate pair, which is no character") from None
    return value


def _too_deep() -> APIError:
    return APIError(400, f"the body's JSON is nested more than {_DEEPEST} deep")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _check_shape(value: Any) -> None:
    """Raise APIError for arrays and objects nested too deep, or an object with too many keys.

    The check needs no recursion.
    """
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list) and item]:
        depth += 1
        if depth > _DEEPEST:
            raise _too_deep()
        if any(isinstance(item, dict) and len(item) > _MOST_KEYS for item in level):
            raise APIError(400, f"an object in the body has more than {_MOST_KEYS} keys")
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]


async def wait_for_disconnect(request: Request) -> None:
    """Return when the client has closed the connection. To be called after the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
