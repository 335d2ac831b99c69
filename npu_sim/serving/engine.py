"""`Engine`: serves many requests at once with one model, by continuous batching.

One thread drives the device: it calls the functions that other threads have left in `_inbox`, then lets `EngineCore`
advance by a step. Another thread turns tokens into text (`text_thread`).

docs/engine.md follows a request through the files ("From a request to its tokens"), and names the file of each part
("Where everything is").

Invariants:
1. The core is used by the engine's thread only; other threads put functions into `_inbox`. Its `stats` only reads.
2. Every sequence that `submit` puts into `_inbox` ends with exactly one last update. `_accepting` and `_closed` change
   under `_lock`, so nothing is put there after the engine's thread has looked for the last time.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Literal

from npu_compiler.errors import DeviceError, InputError, NPUError
from npu_sim.llm import Checkpoint
from npu_sim.llm.engine.batch import BatchModel
from npu_sim.llm.engine.core import EngineCore
from npu_sim.llm.engine.stats import EngineStats
from npu_sim.llm.sampling import check_sampling
from npu_sim.llm.speculation.lookup import Drafter, PromptLookup
from npu_sim.serving.handle import Handle
from npu_sim.serving.request import Request, Update
from npu_sim.serving.text import TextOutput
from npu_sim.serving.text_thread import ServedSequence, TextThread

MOST_FAILURES = 8  # steps that fail one after the other, after which the device counts as lost


class QueueFullError(NPUError):
    """The error for a request that comes while the maximum number of requests waits."""


class EngineClosedError(NPUError):
    """The error for a request that comes after the engine has been drained or closed, or has failed."""


class Engine:
    """Serves requests until it is closed.

    Args:
        model: The model that computes steps; nothing else may use it.
        checkpoint: Source of the tokenizer and of the end-of-sequence ids. None: updates have no text, and there are no
            such ids.
        max_waiting: Maximum number of requests that wait for admission. None: no limit.
        prefill_tokens: Maximum number of prompt tokens of a step. None: learned from the durations of steps, so that
            prompts delay other requests little; the model's maximum while no request waits for a token.
        speculate: Speculative decoding, which guesses tokens and verifies several in one step: `ngram` guesses from the
            request's own text; a `Drafter` guesses in its own way. None: no speculative decoding.

    Attributes:
        failed: The reason why the engine has ended by itself: its thread has failed, or its device is lost. None: it
            runs, or has been closed.
    """

    def __init__(
        self,
        model: BatchModel,
        checkpoint: Checkpoint | None = None,
        *,
        max_waiting: int | None = None,
        prefill_tokens: int | None = None,
        speculate: Literal["ngram"] | Drafter | None = None,
    ) -> None:
        if max_waiting is not None and max_waiting < 0:
            raise InputError(f"max_waiting must be at least 0, not {max_waiting}")
        if prefill_tokens is not None and prefill_tokens < 1:
            raise InputError(f"prefill_tokens must be at least 1, not {prefill_tokens}")
        self._model = model
        self._tokenizer = None if checkpoint is None else checkpoint.tokenizer
        self._stop_ids = frozenset[int]() if checkpoint is None else checkpoint.end_ids()
        self._penalty = 1.0 if checkpoint is None else checkpoint.repetition_penalty
        self._adapters = {} if checkpoint is None else {name: n for n, name in enumerate(checkpoint.adapters)}
        self._max_waiting = max_waiting
        drafter = PromptLookup() if speculate == "ngram" else speculate
        self._arrivals = count()
        self._lock = threading.Lock()
        self._accepting = True
        self.failed: str | None = None
        self._closing = self._closed = False
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._when_empty: list[Callable[[], None]] = []
        self._text = TextThread(lambda sequence: self._inbox.put(partial(self._core.end, sequence, "stop")))
        self._core = EngineCore(model, prefill_tokens, drafter, self._text.put)
        self._thread = threading.Thread(target=self._run, name="npu-sim-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, request: Request) -> Handle:
        """Take a request, and return the handle to read its tokens by. Any thread may call it.

        Raises:
            InputError: the request is wrong in itself, or too long for the model's context or KV pool.
            QueueFullError: too many requests wait.
            EngineClosedError: the engine has been drained or closed, or has failed.
        """
        sequence = self._sequence(request)
        with self._lock:  # invariant 2
            if not self._accepting:
                raise EngineClosedError(self.failed or "the engine takes no more requests")
            if self._max_waiting is not None and self._core.scheduler.waiting + self._inbox.qsize() > self._max_waiting:
                raise QueueFullError(f"more than {self._max_waiting} requests are waiting; try again later")
            self._inbox.put(partial(self._core.add, sequence))
        return sequence.handle

    def generate(self, requests: Iterable[Request]) -> list[Update]:
        """Run requests to their ends; return one update for each, with all of its output.

        Raises:
            InputError, QueueFullError, EngineClosedError: for the reasons of `submit`; then all of the requests are
                cancelled.
        """
        handles: list[Handle] = []
        try:
            handles.extend(map(self.submit, requests))
            return [handle.result() for handle in handles]
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise

    def stats(self) -> EngineStats:
        """The engine's state and counts. Any thread may call it, so they may stem from slightly different moments."""
        return self._core.stats()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests and wait for the running and waiting ones to end.

        Args:
            timeout: Seconds to wait. None: as long as it takes.

        Returns:
            Whether all requests have ended.
        """
        empty = threading.Event()
        with self._lock:
            self._accepting = False
            if self._closed:
                return True
            self._inbox.put(partial(self._when_empty.append, empty.set))
        return empty.wait(timeout)

    def close(self) -> None:
        """Cancel all requests and end the threads.

        It may be called several times, from any thread but the engine's own.
        """
        with self._lock:
            self._accepting = False
        self._inbox.put(self._close)
        self._thread.join()
        self._text.close()

    def _sequence(self, request: Request) -> ServedSequence:
        """Check a request and return its sequence. Raises InputError if it can never run."""
        prompt, rows, vocabulary = request.prompt, self._core.scheduler.max_rows, self._model.vocab_size
        if not prompt:
            raise InputError("the prompt is empty; give at least one token")
        if len(prompt) > rows:
            raise InputError(f"the prompt has {len(prompt)} tokens, but a request can have {rows}")
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            bad = next(token for token in prompt if not 0 <= token < vocabulary)
            raise InputError(f"token id {bad} is outside the vocabulary, 0 to {vocabulary - 1}")
        if request.max_new_tokens is not None and request.max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1, not {request.max_new_tokens}")
        if request.logprobs is not None and not 0 <= request.logprobs <= vocabulary:
            raise InputError(f"logprobs must be from 0 to {vocabulary}, not {request.logprobs}")
        if request.timeout is not None and not request.timeout > 0:
            raise InputError(f"the timeout must be above 0 seconds, not {request.timeout}")
        if request.stop and self._tokenizer is None:
            raise InputError("stop strings need a tokenizer, which this engine does not have")
        if request.adapter is not None and request.adapter not in self._adapters:
            raise InputError(f"there is no adapter {request.adapter!r:.80} here")
        if "" in request.stop:
            raise InputError("a stop string is empty")
        sampling = request.sampling
        if sampling.repetition_penalty is None:
            sampling = replace(sampling, repetition_penalty=self._penalty)
        check_sampling(sampling, vocabulary)
        stop_ids = self._stop_ids if request.stop_ids is None else request.stop_ids
        if wrong := [token for token in request.stop_token_ids if not 0 <= token < vocabulary]:
            raise InputError(f"stop_token_ids names token {wrong[0]}, but the vocabulary is 0 to {vocabulary - 1}")
        stop_ids = (frozenset() if request.ignore_eos else stop_ids) | request.stop_token_ids
        # The last token needs no row of its own: nothing attends to it.
        limit = rows + 1 if request.max_new_tokens is None else min(len(prompt) + request.max_new_tokens, rows + 1)
        now, arrival = time.monotonic(), next(self._arrivals)
        return ServedSequence(
            arrival=arrival,
            tokens=[int(token) for token in prompt],
            limit=limit,
            stop_ids=stop_ids,
            sampling=sampling,
            token_filter=request.token_filter,
            logprobs=request.logprobs,
            tenant=request.tenant,
            adapter=request.adapter,
            adapter_place=-1 if request.adapter is None else self._adapters[request.adapter],
            deadline=None if request.timeout is None else now + request.timeout,
            timeout=request.timeout,
            last_time=now,
            handle=Handle(request, partial(self._cancel, arrival)),
            text=TextOutput(self._tokenizer, request.stop),
        )

    def _cancel(self, arrival: int) -> None:
        self._inbox.put(partial(self._core.cancel, arrival))

    def _run(self) -> None:
        """Run steps until the engine is closed or has failed; this is the engine's thread."""
        try:
            while not self._closing:
                self._take_messages()
                if self._core.busy:
                    self._core.advance()
                if self._core.failures:
                    self._model.check()
                if self._core.failures >= MOST_FAILURES:
                    raise DeviceError(f"{MOST_FAILURES} steps have failed one after the other")
        except BaseException as error:
            self.failed = f"the engine has failed: {error!r}"
            self._core.abandon("error", NPUError(self.failed))
            raise
        finally:
            with self._lock:  # invariant 2
                self._accepting, self._closed = False, True
            while not self._inbox.empty():
                self._inbox.get_nowait()()
            self._core.abandon("error" if self.failed else "cancelled", NPUError(self.failed) if self.failed else None)
            self._call_when_empty()

    def _take_messages(self) -> None:
        """Call the functions in `_inbox`, which other threads left; wait for one if there is nothing else to do."""
        if not self._core.busy:
            self._call_when_empty()
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get_nowait()()

    def _call_when_empty(self) -> None:
        while self._when_empty:
            self._text.put(self._when_empty.pop())

    def _close(self) -> None:
        self._closing = True
