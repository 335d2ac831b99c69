"""`EncoderEngine`: serves many requests at once with one encoder.

Texts of similar lengths share a run, whichever requests they belong to.

Invariants:
1. The encoder is used by the engine's thread only. `_queues` and the counts change under `_changed`.
2. Every future that `submit` returns gets a result or an error, unless its reader cancels it: `_accepting` changes
   under `_changed`, and the last thing that the thread does is to fail all waiting requests.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import NPUError
from npu_sim.encoders.text import EncodedText
from npu_sim.llm.engine.stats import EngineStats, Observations, merged
from npu_sim.serving.engine import MOST_FAILURES, EngineClosedError

if TYPE_CHECKING:
    from npu_sim.encoders import TextEncoder

Results = NDArray[np.float32]


@dataclass(eq=False)
class _Job:
    """A request that waits or runs.

    Attributes:
        results: Results of its texts; those not computed yet are missing.
        missing: Number of texts whose results are not known yet.
    """

    missing: int
    results: list[Results]
    future: Future[Results] = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, eq=False)
class _Item:
    """One text of a job, with its index there. `number` increases in the order of arrival."""

    number: int
    job: _Job
    place: int
    text: EncodedText


class EncoderEngine:
    """Encodes the texts of requests until it is closed.

    Attributes:
        failed: The reason why the engine has ended by itself. None: it runs, or has been closed.
    """

    def __init__(self, model: TextEncoder) -> None:
        self._model = model
        self._queues: dict[int, deque[_Item]] = {}  # padded length → texts that wait
        self._numbers = count()
        self._changed = threading.Condition()
        self._accepting, self._closing = True, False
        self._failures = self._jobs = self._finished = self._steps = self._tokens = self._batch = 0
        self._queue_times, self._step_times = Observations(), Observations()
        self.failed: str | None = None
        self._thread = threading.Thread(target=self._run, name="npu-sim-encoder", daemon=True)
        self._thread.start()

    def submit(self, texts: Sequence[EncodedText]) -> Future[Results]:
        """Take a request of at least one text, each within the model's context length. Any thread may call it.

        Returns:
            A future of the results [texts, width]. Cancelling it takes the texts out of the queue.

        Raises:
            EngineClosedError: the engine has been drained or closed, or has failed.
        """
        job = _Job(len(texts), [np.empty(0, np.float32)] * len(texts))
        with self._changed:
            if not self._accepting:
                raise EngineClosedError(self.failed or "the engine takes no more requests")
            self._jobs += 1
            for place, text in enumerate(texts):
                queue = self._queues.setdefault(self._model.length_of(text), deque())
                queue.append(_Item(next(self._numbers), job, place, text))
                self._tokens += len(text.ids)
            self._changed.notify_all()
        job.future.add_done_callback(self._end)
        return job.future

    def stats(self) -> EngineStats:
        """The engine's state and counts. Any thread may call it.

        Texts are not counted as sequences.
        """
        with self._changed:
            return replace(
                merged((), ()),
                waiting=self._jobs,
                batch_size=self._batch,
                steps=self._steps,
                prompt_tokens=self._tokens,
                finished={"stop": self._finished},
                queue_seconds=self._queue_times.histogram(),
                step_seconds=self._step_times.histogram(),
            )

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait until the running ones have ended.

        Returns whether they ended within `timeout` seconds; None: any time.
        """
        with self._changed:
            self._accepting = False
            return self._changed.wait_for(lambda: not self._jobs, timeout)

    def close(self) -> None:
        """Fail all requests and end the thread.

        It may be called several times, from any thread but the engine's own.
        """
        with self._changed:
            self._accepting, self._closing = False, True
            self._changed.notify_all()
        self._thread.join()

    def _end(self, _: Future[Results]) -> None:
        with self._changed:
            self._jobs -= 1
            self._finished += 1
            self._changed.notify_all()

    def _run(self) -> None:
        """Run batches until the engine is closed or has failed; this is the engine's thread."""
        try:
            while batch := self._next_batch():
                self._advance(batch)
                if self._failures >= MOST_FAILURES:
                    self.failed = f"the engine has failed: {MOST_FAILURES} runs have failed one after the other"
                    return
        except BaseException as error:
            self.failed = f"the engine has failed: {error!r}"
            raise
        finally:
            with self._changed:
                self._accepting = False
                waiting = {id(item.job): item.job for queue in self._queues.values() for item in queue}
                self._queues.clear()
            for job in waiting.values():
                _fail(job, NPUError(self.failed or "the engine was closed"))

    def _next_batch(self) -> list[_Item]:
        """The text that has waited for longest, and others of its padded length.

        Empty if the engine is being closed.
        """
        with self._changed:
            while not self._closing:
                waiting = {length: queue for length, queue in self._queues.items() if queue}
                if not waiting:
                    self._batch = 0
                    self._changed.wait()
                    continue
                length = min(waiting, key=lambda length: waiting[length][0].number)
                batch: list[_Item] = []
                queue = waiting[length]
                while queue and len(batch) < self._model.most_rows(length):
                    item = queue.popleft()
                    if not item.job.future.done():  # nobody has cancelled it, and no other of its texts has failed
                        batch.append(item)
                if batch:
                    return batch
        return []

    def _advance(self, batch: list[_Item]) -> None:
        """Run a batch and hand out its results."""
        begun = time.monotonic()
        try:
            results = self._model.run([item.text for item in batch])
        except Exception as error:
            self._failures += 1
            for item in batch:
                _fail(item.job, error)
            return
        now = time.monotonic()
        with self._changed:
            self._failures = 0
            self._steps += 1
            self._batch = len(batch)
            self._step_times.add(now - begun)
            self._queue_times.add_all([begun - item.job.arrived for item in batch])
        for item, result in zip(batch, results, strict=True):
            job = item.job
            job.results[item.place] = result
            job.missing -= 1
            if not job.missing and job.future.set_running_or_notify_cancel():
                job.future.set_result(np.stack(job.results))


def _fail(job: _Job, error: Exception) -> None:
    """End a request with an error, unless it has ended already."""
    if not job.future.done() and job.future.set_running_or_notify_cancel():
        job.future.set_exception(error)
