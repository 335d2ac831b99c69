"""`Handle`: the reading side of a request, for a thread or an event loop.

Invariants:
1. The writer appends an update before it looks for a waiting event loop; the reader names its loop before it looks for
   updates. So an update is either found by the reader or wakes it.
2. After the update with a finish reason nothing is appended.
"""

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from npu_sim.serving.request import Request, RequestHandle, Update, Usage


class Handle(RequestHandle):
    """A request that the engine has taken. Its updates have one reader.

    Updates that the reader has not taken yet are joined into one, so that a slow reader costs only the memory of its
    tokens.

    Args:
        cancel: Called when the reader cancels the request.
    """

    def __init__(self, request: Request, cancel: Callable[[], None]) -> None:
        self.request = request
        self.cached_tokens = 0
        self.new_tokens = 0
        self._cancel = cancel
        self._updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived = asyncio.Event()
        self._ended = False

    @property
    def usage(self) -> Usage:
        return Usage(len(self.request.prompt), self.cached_tokens, self.new_tokens)

    def cancel(self) -> None:
        self._cancel()

    def __iter__(self) -> Iterator[Update]:
        while not self._ended:
            yield self._joined([self._updates.get()])

    def result(self) -> Update:
        """Wait for the end of the request; return one update with all output that has not been read yet."""
        return _join(list(self))

    async def __aiter__(self) -> AsyncIterator[Update]:
        self._loop = asyncio.get_running_loop()
        while not self._ended:
            self._arrived.clear()
            if self._updates.empty():  # invariant 1: the loop is named
                await self._arrived.wait()
            if not self._updates.empty():
                yield self._joined([])

    def _joined(self, updates: list[Update]) -> Update:
        """Join updates into one update with all of their output."""
        while not self._updates.empty():
            updates.append(self._updates.get_nowait())
        self._ended = updates[-1].finish_reason is not None
        return _join(updates)


def _join(updates: list[Update]) -> Update:
    if len(updates) == 1:
        return updates[0]
    return Update(
        tuple(token for update in updates for token in update.tokens),
        "".join(update.text for update in updates),
        tuple(logprobs for update in updates for logprobs in update.logprobs),
        updates[-1].finish_reason,
        updates[-1].error,
        tuple(logprobs for update in updates for logprobs in update.prompt_logprobs),
    )


def deliver(updates: Iterable[tuple[Handle, Update]]) -> None:
    """Append updates to their handles and wake the readers; each event loop is woken once."""
    waiting: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
    for handle, update in updates:
        handle.new_tokens += len(update.tokens)
        handle._updates.put(update)
        if handle._loop is not None:  # invariant 1: the update is there
            waiting.setdefault(handle._loop, []).append(handle._arrived)
    for loop, events in waiting.items():
        try:
            loop.call_soon_threadsafe(_set_all, events)
        except RuntimeError:  # the reader's loop is closed: nobody reads any more
            continue


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
