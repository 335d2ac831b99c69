"""The interfaces of engines that the HTTP server uses; `npu_sim.serving.engine.Engine` has both."""

from __future__ import annotations

from typing import Protocol

from npu_sim.llm.engine.stats import EngineStats
from npu_sim.serving.request import Request, RequestHandle


class RunningEngine(Protocol):
    """An interface: an engine of any kind, which works on requests until it is closed.

    Attributes:
        failed: The reason why the engine has ended by itself. None: it runs, or has been closed.
    """

    failed: str | None

    def stats(self) -> EngineStats: ...

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait until the running ones have ended.

        Returns whether they ended within `timeout` seconds; None: wait as long as it takes.
        """

    def close(self) -> None:
        """Cancel all requests and end the engine's threads."""


class EngineLike(RunningEngine, Protocol):
    """An interface: an engine that takes requests from any thread and generates their tokens."""

    def submit(self, request: Request) -> RequestHandle:
        """Queue a request.

        Raises:
            InputError: the request can never run, for example because it is longer than the context.
            QueueFullError: the queue is full; the request may be sent again later.
            EngineClosedError: the engine takes no more requests.
        """
