"""`Writer`: the thread that turns chosen tokens into updates, so that the thread that drives the device need not.

Invariant: what belongs to a sequence's text (`Sequence.text`, `Sequence.logprobs`) is used by this thread only.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from npu_sim.serving.handle import Handle, deliver
from npu_sim.serving.request import FinishReason, TokenLogprobs, Update
from npu_sim.serving.sequence import Sequence


@dataclass(slots=True)
class News:
    """What has become known of a sequence; the last one has a reason."""

    sequence: Sequence
    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None
    error: str | None = None


class Writer:
    """Makes updates in a thread of its own.

    Args:
        stopped: Called with a sequence whose text has come to a stop string, before its tokens ended it, or whose text
            cannot be made.
    """

    def __init__(self, stopped: Callable[[Sequence], None]) -> None:
        self._stopped = stopped
        self._queue: queue.SimpleQueue[list[News] | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="npu-sim-writer", daemon=True)
        self._thread.start()

    def put(self, news: list[News] | Callable[[], None]) -> None:
        """Deliver news, or call a function after all that was put before."""
        self._queue.put(news)

    def close(self) -> None:
        """Deliver what was put, and end."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            if callable(entry):
                entry()
            else:
                deliver(update for news in entry for update in self._updates(news))

    def _updates(self, news: News) -> list[tuple[Handle, Update]]:
        sequence = news.sequence
        if sequence.written:
            return []
        try:
            update = _update(news)
        except Exception as error:  # the tokenizer is not ours
            update = Update(finish_reason="error", error=f"the text of the tokens cannot be made: {error}")
        if update.finish_reason is not None:
            sequence.written = True
            if news.reason is None:
                self._stopped(sequence)
        return [(sequence.handle, update)] if update.tokens or update.text or update.finish_reason is not None else []


def _update(news: News) -> Update:
    sequence = news.sequence
    tokens: list[int] = []
    text = ""
    for token in news.tokens:
        more, piece = sequence.text.push(token)
        tokens += more
        text += piece
    reason = news.reason
    if reason is not None:
        more, piece = sequence.text.finish()
        tokens += more
        text += piece
    sequence.logprobs.extend(news.logprobs)
    logprobs = tuple(sequence.logprobs.popleft() for _ in tokens) if sequence.logprobs else ()
    if sequence.text.stopped and reason != "error":
        return Update(tuple(tokens), text, logprobs, "stop")
    return Update(tuple(tokens), text, logprobs, reason, news.error)
