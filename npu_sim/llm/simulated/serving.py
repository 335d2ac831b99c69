"""`serve_requests`: let the engine's scheduler serve a trace of requests on a virtual clock."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from npu_compiler.errors import InputError
from npu_sim.llm.engine.core import EngineCore, SequenceOutput
from npu_sim.llm.engine.sequence import Sequence as EngineSequence
from npu_sim.llm.simulated.model import SimulatedModel, VirtualClock
from npu_sim.llm.simulated.requests import TimedRequest
from npu_sim.llm.simulated.result import ServedRequest, ServingResult
from npu_sim.llm.simulated.step_prices import StepPrices

BLOCK_SIZE = 16  # tokens
DEFAULT_CONTEXTS = 8  # in a KV pool of default size


@dataclass(frozen=True)
class PoolSettings:
    """Sizes of the engine; see `npu-sim serve`.

    Attributes:
        context_length: Maximum tokens of a prompt and its reply.
        cache_tokens: Capacity of the KV cache in tokens. None: 8 times `context_length`.
        max_batch: Maximum sequences of a step.
        max_tokens: Maximum tokens of a step.
        prefill_tokens: Maximum prompt tokens of a step. None: as many as delay the other requests little.
        max_requests: Maximum requests at once, including waiting ones; others are refused. None: no limit.
    """

    context_length: int
    cache_tokens: int | None = None
    max_batch: int = 128
    max_tokens: int = 512
    prefill_tokens: int | None = None
    max_requests: int | None = None

    @property
    def blocks(self) -> int:
        """Number of blocks of the KV pool."""
        tokens = DEFAULT_CONTEXTS * self.context_length if self.cache_tokens is None else self.cache_tokens
        return -(-tokens // BLOCK_SIZE)


def serve_requests(
    requests: Sequence[TimedRequest],
    prices: StepPrices,
    settings: PoolSettings,
    *,
    static_watts: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
    step_by_step: bool = False,
) -> ServingResult:
    """Serve requests as the engine would on a chip whose steps cost what `prices` says.

    The host takes no time. A request that arrives during a step is noticed when the step ends.

    Args:
        requests: In order of arrival.
        static_watts: Power that the chip draws all the time, from the first arrival to the last token.
        progress: Called with (requests that have ended, total requests). None: not called.
        step_by_step: Let the scheduler plan every step, even where it could skip over steps that are all alike.

    Raises:
        InputError: a prompt has more tokens than a request can have.
    """
    run = _Run(requests, prices, settings, progress, skips=not step_by_step)
    return run.result(static_watts)


class _Run:
    """The state of serving one trace."""

    def __init__(
        self,
        requests: Sequence[TimedRequest],
        prices: StepPrices,
        settings: PoolSettings,
        progress: Callable[[int, int], None] | None,
        *,
        skips: bool,
    ) -> None:
        self._skips = skips
        self._settings, self._progress = settings, progress
        self._clock = VirtualClock()
        self._model = SimulatedModel(
            prices,
            self._clock,
            self._observe,
            block_size=BLOCK_SIZE,
            blocks=settings.blocks,
            context_length=settings.context_length,
            max_tokens=settings.max_tokens,
            max_sequences=settings.max_batch,
        )
        self._core = EngineCore(self._model, settings.prefill_tokens, None, self._receive, self._clock)
        self._served = [ServedRequest(request) for request in requests]
        self._ended = 0
        self._gaps = array("d")
        self._queue: list[tuple[float, int, int, int]] = []
        rows = self._core.scheduler.max_rows
        for request in requests:
            if request.prompt_tokens > rows:
                raise InputError(
                    f"{request.origin}: its prompt has {request.prompt_tokens} tokens, but a request can have {rows}; "
                    "give the server a longer context and cache, or the trace shorter prompts"
                )
        self._serve()

    def _serve(self) -> None:
        core, clock, coming = self._core, self._clock, 0
        while coming < len(self._served) or core.busy:
            if not core.busy:
                clock.now = max(clock.now, self._served[coming].request.arrival)
            while coming < len(self._served) and self._served[coming].request.arrival <= clock.now:
                self._submit(coming)
                coming += 1
            if core.busy:
                ended = self._ended
                core.advance()
                if not core.sequences:
                    self._observe()
                until = self._served[coming].request.arrival if coming < len(self._served) else math.inf
                if self._skips and ended == self._ended and clock.now < until:
                    self._repeat_decodes(until)

    def _repeat_decodes(self, until: float) -> None:
        """Skip over the coming steps at once if they are like the latest one, in which no request ended.

        Planning each of these steps would take longer than everything else.

        Args:
            until: Time of the next arrival.
        """
        scheduler, model = self._core.scheduler, self._model
        running = scheduler.running
        if not running or model.decoded != len(running):
            return
        steps = scheduler.steps_alike()
        if steps > 0:
            durations = model.repeat(sum(sequence.computed + 1 for sequence in running), steps, until)
            scheduler.repeat(durations)
            self._gaps.extend(durations * len(running))
            for sequence in running:
                sequence.last_time = self._clock.now
                served = self._served[sequence.arrival]
                served.last, served.tokens = self._clock.now, served.tokens + len(durations)

    def _submit(self, index: int) -> None:
        served, most = self._served[index], self._settings.max_requests
        if most is not None and len(self._core.sequences) >= most:
            served.refused = True
            self._end()
            return
        request = served.request
        # The last token needs no row of its own: nothing attends to it.
        limit = min(request.prompt_tokens + request.new_tokens, self._core.scheduler.max_rows + 1)
        tokens = [0] * request.prompt_tokens
        self._core.add(EngineSequence(index, tokens, limit, frozenset(), last_time=request.arrival))

    def _receive(self, outputs: list[SequenceOutput]) -> None:
        now = self._clock.now
        for output in outputs:
            served = self._served[output.sequence.arrival]
            if served.tokens:
                self._gaps.append(now - served.last)
            else:
                served.first = now
            served.last = now
            served.tokens += len(output.tokens)
            if output.reason is not None:
                if output.error is not None:
                    raise output.error
                self._end()

    def _end(self) -> None:
        self._ended += 1
        if self._progress is not None:
            self._progress(self._ended, len(self._served))

    def _observe(self) -> None:
        """Record the numbers of waiting and running requests if they have changed."""
        scheduler = self._core.scheduler
        waiting, running = scheduler.waiting, len(scheduler.running)
        if not self._queue or self._queue[-1][1:3] != (waiting, running):
            blocks = scheduler.pool.blocks - scheduler.pool.available
            self._queue.append((self._clock.now, waiting, running, blocks))

    def result(self, static_watts: float) -> ServingResult:
        """The run's figures as a `ServingResult`."""
        model, start = self._model, self._served[0].request.arrival
        return ServingResult(
            requests=self._served,
            seconds=self._clock.now - start,
            busy_seconds=model.cost.seconds,
            joules=model.cost.joules + static_watts * (self._clock.now - start),
            gaps=np.array(self._gaps),
            queue=self._queue,
            steps=model.steps,
            rows=model.rows,
            preemptions=self._core.scheduler.preemptions,
        )
