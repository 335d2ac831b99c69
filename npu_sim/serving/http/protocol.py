"""uvicorn's HTTP protocol with limits on what comes before a request: connections, the head's size, and time.

The application never sees a request whose head does not arrive, so these limits cannot be kept there.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from npu_sim.serving.http.errors import APIError
from npu_sim.serving.http.limits import Limits
from npu_sim.serving.http.metrics import Metrics


def limited_protocol(limits: Limits, metrics: Metrics) -> type[HttpToolsProtocol]:
    """The protocol class for these limits; uvicorn makes one object of it per connection."""

    class LimitedProtocol(HttpToolsProtocol):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._head_bytes = 0
            self._timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            # Each request's scope has a copy of this.
            self.app_state = {**self.app_state, "abort": transport.abort, "is_closed": transport.is_closing}
            metrics.connections.set(len(self.connections))
            if len(self.connections) > limits.connections:
                self._refuse(
                    APIError(503, f"the server has {limits.connections} connections, its maximum"), "connections"
                )
            else:
                self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop_timer()
            metrics.connections.set(len(self.connections))

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if self._in_request():
                self._stop_timer()
                self._head_bytes = 0
                return
            self._head_bytes += len(data)
            if self._head_bytes > limits.header_bytes:
                message = f"the request's head is longer than {limits.header_bytes} bytes"
                self._refuse(APIError(431, message), "large_head")
            elif self._timer is None and not self.transport.is_closing():
                self._await_head()

        def _in_request(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _await_head(self) -> None:
            self._timer = self.loop.call_later(limits.header_seconds, self._give_up)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _give_up(self) -> None:
            self._timer = None
            if self.transport is not None and not self._in_request():
                metrics.dropped.labels("slow_head").inc()
                self.transport.abort()

        def send_400_response(self, msg: str) -> None:
            metrics.dropped.labels("invalid_http").inc()
            self._answer(APIError(400, msg.rstrip(".").lower()))

        def _refuse(self, error: APIError, reason: str) -> None:
            metrics.dropped.labels(reason).inc()
            self._answer(error)

        def _answer(self, error: APIError) -> None:
            """Answer without the application, and close the connection."""
            self._stop_timer()
            body = bytes(error.response().body)
            lines = [
                f"HTTP/1.1 {error.status} Refused",
                "content-type: application/json",
                f"content-length: {len(body)}",
                "connection: close",
            ]
            self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
            self.transport.close()

    return LimitedProtocol
