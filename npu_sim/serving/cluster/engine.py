"""`RemoteEngine`: presents the replicas of a deployment to the HTTP server as one engine.

Invariants:
1. Every handle ends with exactly one update that has a finish reason, even if its replica is lost.
2. A handle is in `_open` from `submit` until that last update has been read or the handle has been cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from npu_compiler.errors import InputError
from npu_sim.llm.engine.stats import EngineStats, merged
from npu_sim.serving.cluster.messages import Output, RemoteRequest, ReplicaStats
from npu_sim.serving.engine import EngineClosedError, QueueFullError
from npu_sim.serving.request import Request, RequestHandle, Update, Usage

_REFRESH = 1.0  # seconds between questions for the replicas' counts
_PATIENCE = 5.0  # seconds that a replica has to answer one
LOST = "the replica that ran this request is lost; send it again"


class RemoteEngine:
    """An engine that sends each request to one of several replicas.

    Args:
        replicas: Handle of the deployment of `Replica`s.
        capacity: Maximum number of requests at once; more are refused.

    Attributes:
        failed: Always None, since a replica that fails is replaced.
    """

    failed: str | None = None

    def __init__(self, replicas: DeploymentHandle[Any], capacity: int) -> None:
        self._replicas = replicas
        self._streams = replicas.options(stream=True).generate
        self._capacity = capacity
        self._changed = threading.Condition()
        self._open: set[RemoteHandle] = set()
        self._accepting = True
        self._latest: dict[str, ReplicaStats] = {}  # what each replica has answered last, former ones included
        self._present: set[str] = set()
        self._ended = threading.Event()
        self.refresh()
        self._asking = threading.Thread(target=self._keep_asking, name="replica-stats", daemon=True)
        self._asking.start()

    def submit(self, request: Request) -> RemoteHandle:
        """Send a request to the replica that the router chooses; return its handle. Any thread may call it.

        Raises the errors of `EngineLike.submit`.
        """
        asked = RemoteRequest.of(request)
        with self._changed:
            if not self._accepting:
                raise EngineClosedError("the engine takes no more requests")
            if len(self._open) >= self._capacity:
                raise QueueFullError(f"{self._capacity} requests are under way; try again later")
            handle = RemoteHandle(request, self._streams.remote(asked), self._forget)
            self._open.add(handle)
        return handle

    def replicas(self) -> list[ReplicaStats]:
        """Counts of the replicas that answered when they were last asked."""
        with self._changed:
            return [self._latest[replica] for replica in self._present]

    def stats(self) -> EngineStats:
        """The stats of all replicas together, as of when they were last asked.

        The state, such as running requests, is that of the present replicas; counts include those of ended ones.
        """
        with self._changed:
            there = {name: one.stats for name, one in self._latest.items() if name in self._present}
            return merged(there.values(), [one.stats for name, one in self._latest.items() if name not in there])

    def refresh(self) -> None:
        """Ask all replicas for their counts and wait for the answers. Not to be called in an event loop."""
        try:
            answers = self._replicas.broadcast("stats").results(timeout_s=_PATIENCE, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError):
            answers = []  # no replica is there at the moment
        current = {one.replica: one for one in answers if isinstance(one, ReplicaStats)}
        with self._changed:
            self._latest |= current
            self._present = set(current)

    def drain(self, timeout: float | None = None) -> bool:
        with self._changed:
            self._accepting = False
            return self._changed.wait_for(lambda: not self._open, timeout)

    def close(self) -> None:
        with self._changed:
            self._accepting = False
            handles = list(self._open)
        for handle in handles:
            handle.cancel()
        self._ended.set()
        self._asking.join(2 * _PATIENCE)  # before the connection to the cluster ends

    def _forget(self, handle: RemoteHandle) -> None:
        with self._changed:
            self._open.discard(handle)
            self._changed.notify_all()

    def _keep_asking(self) -> None:
        while not self._ended.wait(_REFRESH):
            self.refresh()


class RemoteHandle(RequestHandle):
    """A request that a replica runs. Its updates have one reader, in an event loop.

    Args:
        stream: Asynchronous stream of the replica's `Output`s.
        ended: Called when the request is cancelled or its reader has stopped.
    """

    def __init__(self, request: Request, stream: Any, ended: Callable[[RemoteHandle], None]) -> None:
        self._request = request
        self._stream = stream
        self._ended = ended
        self._usage = Usage(len(request.prompt), 0, 0)
        self._deadline = None if request.timeout is None else time.monotonic() + request.timeout

    @property
    def usage(self) -> Usage:
        return self._usage

    def cancel(self) -> None:
        try:
            with contextlib.suppress(RayError, RayServeException):  # of a replica that is lost
                self._stream.cancel()
        finally:
            self._ended(self)

    def __iter__(self) -> Iterator[Update]:
        raise InputError("updates of a replica are read in an event loop: async for")

    async def __aiter__(self) -> AsyncIterator[Update]:
        try:
            reason = None
            while reason is None:
                update = await self._next()
                reason = update.finish_reason
                yield update
        finally:
            self._ended(self)

    async def _next(self) -> Update:
        """Wait for the next update of the replica and return it.

        If the request's time is over, the replica is lost or the request has been cancelled, the result is a last
        update that says so (invariant 1).
        """
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        try:
            async with asyncio.timeout(left):
                output: Output = await anext(self._stream)
        except TimeoutError:
            with contextlib.suppress(RayError, RayServeException):
                self._stream.cancel()
            return Update(finish_reason="error", error=f"the request took longer than {self._request.timeout} seconds")
        except RequestCancelledError:
            return Update(finish_reason="cancelled")
        except (RayError, RayServeException, StopAsyncIteration):
            return Update(finish_reason="error", error=LOST)
        self._usage = output.usage
        return output.update
