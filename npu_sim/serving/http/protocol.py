"""uvicorn's HTTP protocol with limits on a connection's memory (heads, trailers, waiting requests) and time.

The application never sees a request whose head does not arrive, so it cannot enforce these limits.

1. A connection's data goes to the parser in pieces of at most `_PIECE` bytes. The parser keeps data only until it
   completes something: a head, a part of a body, or a request. Between two such events it is given at most
   `Limits.header_bytes` and one piece; so a head, trailers, or empty lines before a head are no longer than that.
2. While a request waits for the previous one on the same connection, the parser is given nothing, and the connection is
   not read: at most the data of a single read is kept.
3. Trailers are dropped: the application gets only the headers that came before the body, which it has checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from npu_sim.serving.http.errors import APIError
from npu_sim.serving.http.limits import Limits
from npu_sim.serving.http.metrics import Metrics

_PIECE = 4096


class _FlowControl(FlowControl):
    """uvicorn's flow control, changed so that nothing is read while a request waits (invariant 2)."""

    def __init__(self, transport: asyncio.Transport, waits: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._waits = waits

    def resume_reading(self) -> None:
        if not self._waits():
            super().resume_reading()


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol object of one connection, with limits on heads, trailers and waiting requests.

    Attributes:
        limits: Limits on the number of connections, and on the size and time of heads.
        metrics: Counts connections, and those that are closed early.
    """

    limits: ClassVar[Limits]
    metrics: ClassVar[Metrics]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._unread = bytearray()  # what came behind a request that waits
        self._incomplete_bytes = 0  # given to the parser since it completed something
        self._completed = False  # whether it did so in this piece
        self._in_head = False
        self._is_upgrade = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _FlowControl(transport, lambda: bool(self.pipeline))
        # Each request's scope has a copy of this.
        self.app_state = {**self.app_state, "abort": transport.abort, "is_closed": transport.is_closing}
        self.metrics.connections.set(len(self.connections))
        if len(self.connections) > self.limits.connections:
            self._refuse(
                APIError(503, f"the server has {self.limits.connections} connections, its maximum"), "connections"
            )
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()
        self.metrics.connections.set(len(self.connections))

    def data_received(self, data: bytes) -> None:
        self._unread += data
        self._parse()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._unread:
            self._parse()

    def _parse(self) -> None:
        """Give received data to the parser until a request has to wait (invariants 1 and 2)."""
        while self._unread and not self.pipeline and not self.transport.is_closing():
            piece = bytes(self._unread[:_PIECE])
            del self._unread[:_PIECE]
            self._completed = self._is_upgrade = False
            super().data_received(piece)
            if self._is_upgrade:  # uvicorn takes nothing that came with such a request
                self._unread.clear()
            self._incomplete_bytes = 0 if self._completed else self._incomplete_bytes + len(piece)
            self._limit_head()
        if self.transport.is_closing():
            self._unread.clear()

    def _limit_head(self) -> None:
        if self.transport.is_closing():
            return
        if self._incomplete_bytes > self.limits.header_bytes:
            part = "head" if self._in_head or not self._in_request() else "end"
            message = f"the request's {part} is longer than {self.limits.header_bytes} bytes"
            self._refuse(APIError(431, message), "large_head")
        elif self._in_request():
            self._stop_timer()
        elif self._timer is None:
            self._await_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # invariant 3
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._completed = False, True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._completed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._completed = True
        super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        self._is_upgrade = True
        super()._unsupported_upgrade_warning()

    def _in_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._timer = self.loop.call_later(self.limits.header_seconds, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self.transport is not None and not self._in_request():
            self.metrics.dropped.labels("slow_head").inc()
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self.metrics.dropped.labels("invalid_http").inc()
        self._answer(APIError(400, msg.rstrip(".").lower()))

    def _refuse(self, error: APIError, reason: str) -> None:
        self.metrics.dropped.labels(reason).inc()
        self._answer(error)

    def _answer(self, error: APIError) -> None:
        """Send an error without the application, and close the connection.

        If a reply has begun, or a request waits for the previous one, the connection is closed without an answer.
        """
        self._stop_timer()
        if self.pipeline or (self._in_request() and self.cycle.response_started):
            self.transport.abort()
            return
        body = bytes(error.response().body)
        lines = [
            f"HTTP/1.1 {error.status} Refused",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
        ]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()


def limited_protocol(limits: Limits, metrics: Metrics) -> type[HttpToolsProtocol]:
    """The protocol class for these limits; uvicorn makes an object of it for each connection."""
    return type("ServerProtocol", (LimitedProtocol,), {"limits": limits, "metrics": metrics})
