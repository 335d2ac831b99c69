"""The choices (alternative replies) of one HTTP request: requests to the engine whose updates arrive as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from time import monotonic

from npu_compiler.errors import InputError, NPUError
from npu_sim.serving.engine import QueueFullError
from npu_sim.serving.http.errors import APIError
from npu_sim.serving.http.interface import EngineLike
from npu_sim.serving.request import GRAMMAR_FAILED, Request, RequestHandle, Update, Usage

_WAITING_UPDATES = 64  # of all choices of a request; beyond it, their handles keep them


class Choices:
    """Running requests of the engine that belong to one HTTP request. `close` must be called in any case.

    Raises:
        APIError: the engine does not take one of the requests; the others are then cancelled.
    """

    def __init__(self, engine: EngineLike, requests: Sequence[Request]) -> None:
        self._begun = monotonic()
        self._timeout = min((request.timeout for request in requests if request.timeout is not None), default=None)
        self._handles: list[RequestHandle] = []
        self._ended: set[int] = set()
        self._tasks: list[asyncio.Task[None]] = []
        try:
            for request in requests:
                self._handles.append(engine.submit(request))
        except NPUError as error:
            self.close()
            raise refusal(error) from error

    def __len__(self) -> int:
        return len(self._handles)

    @property
    def usages(self) -> list[Usage]:
        """Token counts of each choice so far, in order."""
        return [handle.usage for handle in self._handles]

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """Yield (number of the choice, update) in order of arrival, until all choices have finished.

        Raises:
            APIError: a choice ended with an error.
        """
        if len(self._handles) == 1:
            async for update in self._handles[0]:
                yield 0, self._seen(0, update)
            return
        queue: asyncio.Queue[tuple[int, Update | Exception]] = asyncio.Queue(_WAITING_UPDATES)
        self._tasks = [asyncio.create_task(self._forward(index, queue)) for index in range(len(self))]
        while len(self._ended) < len(self):
            index, arrived = await queue.get()
            if isinstance(arrived, Exception):
                raise arrived
            yield index, self._seen(index, arrived)

    async def _forward(self, index: int, queue: asyncio.Queue[tuple[int, Update | Exception]]) -> None:
        try:
            async for update in self._handles[index]:
                await queue.put((index, update))
        except Exception as error:
            await queue.put((index, error))

    def _seen(self, index: int, update: Update) -> Update:
        if update.finish_reason is not None:
            self._ended.add(index)
        if update.finish_reason == "cancelled":
            raise APIError(503, "the server ended this request because it is stopping", code="cancelled")
        if update.finish_reason == "error":
            late = self._timeout is not None and monotonic() - self._begun >= self._timeout
            status, code = (504, "timeout") if late else (500, "generation_failed")
            if update.error is not None and update.error.startswith(GRAMMAR_FAILED):
                status, code = 400, "grammar_failed"
            raise APIError(status, update.error or "the engine failed", code=code)
        return update

    def close(self) -> None:
        """Cancel all choices that have not finished."""
        for task in self._tasks:
            task.cancel()
        for index, handle in enumerate(self._handles):
            if index not in self._ended:
                self._ended.add(index)
                handle.cancel()


def refusal(error: NPUError) -> APIError:
    """The HTTP error for the error with which an engine has refused a request."""
    if isinstance(error, QueueFullError):
        return APIError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, InputError):
        return APIError(400, str(error))
    return APIError(503, str(error), code="engine_unavailable", headers={"Retry-After": "5"})
