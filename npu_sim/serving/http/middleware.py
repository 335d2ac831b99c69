"""`GuardMiddleware`: passes every request to the application and sees its response through to the end.

It refuses requests without a valid API key, beyond the limits or while the server drains, ends connections whose
clients do not take their output, and counts and logs requests. As it encloses the application, this happens however a
request ends.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from npu_sim.serving.http.errors import APIError
from npu_sim.serving.http.keys import APIKeys
from npu_sim.serving.http.limits import Admission, Limits
from npu_sim.serving.http.logs import log
from npu_sim.serving.http.metrics import Metrics

# What metrics name; of all others there may be any number.
_PATHS = {
    "/",
    "/health",
    "/health/live",
    "/health/ready",
    "/metrics",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/models",
    "/v1/rerank",
    "/v1/responses",
    "/v1/score",
}
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(?::[0-9]*)?")
_LOOPBACK = {"localhost", "127.0.0.1", "[::1]"}


@dataclass
class CallRecord:
    """Facts about one HTTP request: who sent it, and fields for the log.

    Attributes:
        key: The name of the caller's API key; "" if no keys are used.
        fields: Further fields of the request's log entry.
    """

    key: str = ""
    id: str = field(default_factory=lambda: f"req_{uuid.uuid4().hex}")
    fields: dict[str, Any] = field(default_factory=dict)


class GuardMiddleware:
    """The ASGI middleware around the application.

    Args:
        only_loopback: Whether to refuse requests whose `Host` is no name of the loopback device: a web page whose name
            resolves to this machine (DNS rebinding) would send its own name.

    Attributes:
        draining: Whether new work is refused, which `/health` then reports.
    """

    def __init__(
        self, app: ASGIApp, keys: APIKeys, limits: Limits, metrics: Metrics, *, only_loopback: bool = False
    ) -> None:
        self._app = app
        self._keys = keys
        self._limits = limits
        self._metrics = metrics
        self._admission = Admission(limits)
        self._only_loopback = only_loopback
        self.draining = False
        metrics.active.set_function(lambda: self._admission.active)

    @property
    def active(self) -> int:
        """Number of requests that are being answered and count for the limits."""
        return self._admission.active

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call, response = CallRecord(), _Response(send, scope, self._limits.write_seconds, self._metrics)
        scope.setdefault("state", {})["call"] = call
        response.headers = [(b"x-request-id", call.id.encode())]
        begun = perf_counter()
        try:
            await self._admit(scope, receive, response, call)
        except ClientDisconnect:
            await asyncio.sleep(0)  # uvicorn hears of it now, and does not expect the rest
        except Exception:
            response.failed = True
            raise
        finally:
            self._record(scope, call, response, perf_counter() - begun)

    async def _admit(self, scope: Scope, receive: Receive, response: _Response, call: CallRecord) -> None:
        headers = dict(scope["headers"])
        path, limited = scope["path"], scope["method"] == "POST"
        try:
            if self._only_loopback and _host(headers.get(b"host", b"")) not in _LOOPBACK:
                raise APIError(403, "this server answers to localhost only; give it API keys to use another name")
            if limited or path.startswith("/v1/") or path == "/metrics":
                call.key = self._identify(headers.get(b"authorization"))
            if limited and self.draining:
                raise APIError(503, "the server is stopping", code="draining", headers={"Retry-After": "5"})
            if limited:
                self._admission.enter(call.key)
        except APIError as error:
            error.headers["Connection"] = "close"  # its body, if it has one, is not read
            call.fields["error"] = error.message
            await error.response()(scope, receive, response)
            return
        try:
            await self._app(scope, receive, response)
        finally:
            if limited:
                self._admission.leave(call.key)

    def _identify(self, authorization: bytes | None) -> str:
        name = self._keys.name_of(None if authorization is None else authorization.decode(errors="surrogateescape"))
        if name is None:
            raise APIError(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return name

    def _record(self, scope: Scope, call: CallRecord, response: _Response, seconds: float) -> None:
        path = scope["path"] if scope["path"] in _PATHS else "other"
        # A response that has not ended was broken off by the server's own failure, or by the client.
        status = response.status if response.ended else 500 if response.failed else 499
        self._metrics.requests.labels(path, str(status)).inc()
        if scope["method"] == "POST":
            self._metrics.seconds.observe(seconds)
            client = scope.get("client")
            log(
                "request",
                id=call.id,
                method=scope["method"],
                path=path,
                status=status,
                seconds=round(seconds, 4),
                key=call.key,
                client=client[0] if client else None,
                **call.fields,
            )


def _host(value: bytes) -> str:
    """The name in a `Host` header, without the port; "" if the value is malformed."""
    match = _HOST.fullmatch(value.decode("latin-1").lower())
    return match[1] if match else ""


class _Response:
    """Sends a response, and closes the connection if the client does not take it in time."""

    def __init__(self, send: Send, scope: Scope, seconds: float, metrics: Metrics) -> None:
        self._send = send
        self._scope = scope
        self._seconds = seconds
        self._metrics = metrics
        self.headers: list[tuple[bytes, bytes]] = []
        self.status = 500
        self.ended = self.failed = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", []), *self.headers]}
        if self._scope["state"]["is_closed"]():
            # uvicorn silently discards writes to a closed connection; the sender should stop.
            raise ClientDisconnect
        try:
            async with asyncio.timeout(self._seconds):
                await self._send(message)
        except TimeoutError:
            self._metrics.dropped.labels("slow_reader").inc()
            self._scope["state"]["abort"]()
            raise ClientDisconnect from None
        self.ended = message["type"] == "http.response.body" and not message.get("more_body", False)
