"""The interfaces of engines to the server; `npu_sim.serving.engine.Engine` has both."""

from __future__ import annotations

from typing import Protocol

from npu_sim.llm.engine.stats import EngineStats
from npu_sim.serving.request import Request, RequestHandle


class RunningEngine(Protocol):
    """Does the work of requests, whatever it is, until it is closed.

    Attributes:
        failed: The reason why it has ended by itself. None: it has not.
    """

    failed: str | None

    def stats(self) -> EngineStats: ...

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait until those taken have ended; whether they did within `timeout` seconds."""

    def close(self) -> None:
        """Cancel all requests and end the engine's threads."""


class EngineLike(RunningEngine, Protocol):
    """Takes requests from any thread and generates their tokens."""

    def submit(self, request: Request) -> RequestHandle:
        """Queue a request.

        Raises:
            InputError: it can never run, for example because it is longer than the context.
            QueueFullError: the queue is full; it may be sent again later.
            EngineClosedError: the engine takes no more requests.
        """
