"""`EngineCore`: the engine without its threads.

It launches the steps that the scheduler plans and reads the tokens chosen in them.

Where the device runs ahead of the host, a step is launched before the result of the previous step is read; its input
tokens are then taken from the device's memory.

Invariants:
1. After step k + 1 has been launched, only the tokens of step k are read, never its logits.
2. A sequence that was added ends once, with one last output: by a token, `end`, its deadline, or a device error.
3. Outputs are delivered in the order of the steps. While a single step is under way, the outputs of the previous step
   are kept until the next one has been launched: their receiver competes with this thread, and the device would soon be
   idle. An eager core delivers them before that launch: its receiver only keeps them for the caller of `advance`, who
   waits for the token.
"""

import heapq
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from npu_compiler.errors import NPUError
from npu_sim.llm.engine.batch import BatchModel, StepResult
from npu_sim.llm.engine.choosing import choose_token, token_logprobs
from npu_sim.llm.engine.planned_step import Choice, PlannedStep
from npu_sim.llm.engine.scheduler import Scheduler
from npu_sim.llm.engine.sequence import FinishReason, Sequence, TokenLogprobs
from npu_sim.llm.engine.stats import EngineStats, Observations
from npu_sim.llm.sampling import NOT_FINITE, Logits, adjusted
from npu_sim.llm.speculation.lookup import Drafter


@dataclass(slots=True)
class SequenceOutput:
    """New tokens of a sequence, or its end.

    Attributes:
        reason: The reason why the sequence has ended. None: it has not.
        error: The error if the reason is "error", else None.
    """

    sequence: Sequence
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that the device runs, or will run, and whose tokens have not been read."""

    step: PlannedStep
    result: StepResult
    time: float
    idle_since: float | None  # when the device had nothing to do, if planning needed results


class EngineCore:
    """Runs sequences on a model. Only one thread may use it.

    Args:
        model, prefill_tokens, drafter: As for `Scheduler`.
        deliver: Called with new outputs of sequences.
        clock: Function that returns the time in seconds, from any start: that of the sequences' `last_time` and
            `deadline`. A model that is only simulated moves a clock of its own.
        eager: Where planning a step has to wait for the tokens of the previous one, `advance` delivers these and
            returns, instead of launching the next step first.

    Attributes:
        sequences: All sequences that have not ended, by their `arrival`.
        failures: Number of steps that have failed since the last one that succeeded.
    """

    def __init__(
        self,
        model: BatchModel,
        prefill_tokens: int | None,
        drafter: Drafter | None,
        deliver: Callable[[list[SequenceOutput]], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        eager: bool = False,
    ) -> None:
        self.scheduler = Scheduler(model, prefill_tokens, drafter)
        self.sequences: dict[int, Sequence] = {}
        self.failures = 0
        self._model = model
        self._deliver = deliver
        self._clock = clock
        self._eager = eager
        self._outputs: list[SequenceOutput] = []  # that are not delivered yet
        self._launched: deque[_Launched] = deque()
        self._read_time = 0.0
        self._deadlines: list[tuple[float, int]] = []
        self._counts: Counter[str] = Counter()
        self._finished: Counter[FinishReason] = Counter()
        self._batch_size = 0
        self._queueing, self._first, self._between, self._steps = (Observations() for _ in range(4))

    @property
    def busy(self) -> bool:
        """Whether there are sequences that have not ended, or steps whose tokens have not been read."""
        return bool(self.sequences or self._launched)

    def stats(self) -> EngineStats:
        """The engine's state and counts. Any thread may call it, so they may stem from slightly different moments."""
        scheduler, pool, counts = self.scheduler, self.scheduler.pool, self._counts
        free, cached = pool.free, pool.cached
        return EngineStats(
            waiting=scheduler.waiting,
            running=len(scheduler.running),
            batch_size=self._batch_size,
            steps=counts["steps"],
            prompt_tokens=counts["prompt_tokens"],
            cached_tokens=counts["cached_tokens"],
            new_tokens=counts["new_tokens"],
            drafted_tokens=counts["drafted_tokens"],
            accepted_tokens=counts["accepted_tokens"],
            blocks_free=free,
            blocks_used=pool.blocks - free - cached,
            blocks_cached=cached,
            rows_empty=sum(sequence.rows - sequence.computed for sequence in scheduler.running.copy()),
            preemptions=scheduler.preemptions,
            finished=dict(self._finished),
            queue_seconds=self._queueing.histogram(),
            first_token_seconds=self._first.histogram(),
            between_tokens_seconds=self._between.histogram(),
            step_seconds=self._steps.histogram(),
        )

    def add(self, sequence: Sequence, computed: int = 0) -> None:
        """Take a sequence into the engine: it waits for admission, and steps compute it from then on.

        Args:
            computed: See `Scheduler.add`.
        """
        self.sequences[sequence.arrival] = sequence
        self._counts["prompt_tokens"] += sequence.prompt_length
        if sequence.deadline is not None:
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.arrival))
        self.scheduler.add(sequence, computed)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence that has not ended out of the engine; it may be added again.

        Its tokens that have not been chosen or delivered yet are dropped.
        """
        if self.sequences.pop(sequence.arrival, None) is not None:
            sequence.ended = True
            self._read(0)
            sequence.ended = False
            self.scheduler.remove(sequence)
            kept = [output for output in self._outputs if output.sequence is not sequence]
            dropped = sum(len(output.tokens) for output in self._outputs) - sum(len(output.tokens) for output in kept)
            del sequence.tokens[len(sequence.tokens) - dropped :]
            self._outputs = kept
        self._deliver_outputs()

    def end(self, sequence: Sequence, reason: FinishReason, error: Exception | None = None) -> None:
        """End a sequence that has not ended yet, with a last output.

        Args:
            error: The error if the reason is "error", else None.
        """
        if sequence.arrival in self.sequences:
            self._forget(sequence, reason)
            self._outputs.append(SequenceOutput(sequence, reason=reason, error=error))
            self._deliver_outputs()

    def cancel(self, arrival: int) -> None:
        """End the sequence with that arrival number as cancelled, unless it has ended already."""
        if sequence := self.sequences.get(arrival):
            self.end(sequence, "cancelled")

    def abandon(self, reason: FinishReason, error: Exception | None = None) -> None:
        """End all sequences with a last output, without the scheduler, which may have failed.

        Args:
            error: The error if the reason is "error", else None.
        """
        self._outputs += [SequenceOutput(x, reason=reason, error=error) for x in self.sequences.values()]
        self._deliver_outputs()
        self._finished[reason] += len(self.sequences)
        self.sequences.clear()

    def advance(self) -> None:
        """End sequences past their deadline, launch the next step, and read all steps that must not run ahead.

        Without a next step, the oldest step under way is read.
        """
        self._expire()
        stops = bool(self._launched) and (self._launched[-1].result.on_host or self.scheduler.must_know())
        if stops:
            self._read(0)
            if self._eager and self._outputs:
                self._deliver_outputs()
                return
        step = self.scheduler.plan()
        self._observe_admitted()
        if step is not None:
            self._launch(step, self._read_time if stops else None)
        elif not self._launched and self.sequences:
            raise NPUError("no request can go on")
        self._deliver_outputs()
        self._read(int(self._model.runs_ahead) if step is not None else max(len(self._launched) - 1, 0))
        if step is None or len(self._launched) != 1:
            self._deliver_outputs()

    def _deliver_outputs(self) -> None:
        """Deliver all outputs that are kept (invariant 3)."""
        outputs, self._outputs = self._outputs, []
        if outputs:
            self._deliver(outputs)

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            _, arrival = heapq.heappop(self._deadlines)
            if sequence := self.sequences.get(arrival):
                late = NPUError(f"the request took longer than its {sequence.timeout} seconds")
                self.end(sequence, "error", late)

    def _launch(self, step: PlannedStep, idle_since: float | None) -> None:
        """Launch a step; if that fails, end its sequences with the error.

        Args:
            idle_since: Time from which on the device had nothing to do. None: it was busy.
        """
        try:
            if step.copies:
                self._model.copy_blocks(step.copies)
            now = self._clock()
            self._launched.append(_Launched(step, self._model.step(step.batch), now, idle_since))
        except Exception as error:
            self._fail(error, [step])
            return
        self.scheduler.launched(step)
        self._counts["steps"] += 1
        self._batch_size = len(step.sequences)

    def _read(self, left: int) -> None:
        """Read the tokens of launched steps, oldest first, until only `left` are unread.

        If a step fails, the sequences of all unread steps end with its error.
        """
        while len(self._launched) > left:
            launched = self._launched.popleft()
            step = launched.step
            try:
                chosen = launched.result.tokens().tolist()
                reads_logits = any(sequence.reads_logits and not sequence.ended for sequence in step.sequences)
                logits = launched.result.logits() if reads_logits else None  # invariant 1: `must_know` was asked
            except Exception as error:
                self._fail(error, [step, *(later.step for later in self._launched)])
                self._launched.clear()
                return
            self.failures = 0
            now = self._clock()
            seconds = now - max(launched.time, self._read_time)
            self._read_time = now
            self._steps.add(seconds)
            since = launched.idle_since
            self.scheduler.learn_duration(step, seconds, None if since is None else now - since)
            self._learn(step, chosen, logits)

    def _learn(self, step: PlannedStep, chosen: list[int], logits: Logits | None) -> None:
        now, outputs, waited = self._clock(), list[SequenceOutput](), list[float]()
        choices = [
            Choice(sequence, output)
            for output, sequence in enumerate(step.singles)
            if not self._append_plain(sequence, chosen[output], now, outputs, waited)
        ]
        self._counts["new_tokens"] += len(waited)
        self._between.add_all(waited)
        for choice in choices + step.choices:
            sequence = choice.sequence
            if sequence.ended:
                self.scheduler.learn(choice, [])
                continue
            output = self._output(choice, chosen, logits)
            self.scheduler.learn(choice, output.tokens)
            self._observe(choice, len(output.tokens), now)
            if output.reason is not None:
                if output.reason == "error":
                    self.scheduler.stop_sharing(sequence)
                self._forget(sequence, output.reason)
            outputs.append(output)
        self._outputs += outputs

    def _append_plain(
        self, sequence: Sequence, token: int, now: float, outputs: list[SequenceOutput], waited: list[float]
    ) -> bool:
        """Append a token in the usual case that it neither ends its sequence nor is chosen by the host.

        Returns False, and does nothing, in all other cases.
        """
        tokens = sequence.tokens
        length = len(tokens) + 1
        if (
            sequence.ended
            or sequence.reads_logits
            or token < 0
            or token in sequence.stop_ids
            or length == sequence.limit
            or length == sequence.prompt_length + 1
        ):
            return False
        tokens.append(token)
        sequence.pending -= 1
        if length // self._model.block_size > sequence.registered:
            self.scheduler.register(sequence)
        waited.append(now - sequence.last_time)
        sequence.last_time = now
        outputs.append(SequenceOutput(sequence, [token]))
        return True

    def _output(self, choice: Choice, chosen: list[int], logits: Logits | None) -> SequenceOutput:
        """The output of a sequence in a step: its next token, and one more for each drafted token that proved right."""
        sequence = choice.sequence
        room = sequence.limit - len(sequence.tokens)
        output = SequenceOutput(sequence)
        tokens = output.tokens
        for index, guess in enumerate((*choice.draft, None)):
            token = chosen[choice.first + index]
            try:
                if token < 0:
                    raise NPUError(NOT_FINITE)
                if logits is not None and sequence.reads_logits:
                    token = self._choose(output, token, logits[choice.first + index])
            except Exception as error:  # grammars and samplers are not ours
                output.reason, output.error = "error", error
                return output
            if token in sequence.stop_ids:
                output.reason = "stop"
                del output.logprobs[len(tokens) :]
                return output
            tokens.append(token)
            if len(tokens) == room:
                output.reason = "length"
                return output
            if token != guess:
                break
        return output

    def _choose(self, output: SequenceOutput, token: int, logits: Logits) -> int:
        """The next token of a sequence: the host's choice from the logits if it has to choose, else the device's.

        The token comes after those of the sequence and of the output so far. If the request wants log probabilities,
        the token's is added to the output.
        """
        sequence = output.sequence
        filter, sampling = sequence.token_filter, sequence.sampling
        if filter is not None or sampling.by_host or sequence.sampler is not None:
            tokens = sequence.tokens + output.tokens
            scores = adjusted(logits, sampling, tokens, sequence.prompt_length)
            if sequence.sampler is not None:
                token = sequence.sampler(scores)
            else:
                new = len(tokens) - sequence.prompt_length
                banned = sequence.stop_ids if new < sampling.min_tokens else ()
                token = choose_token(scores, filter, sampling, sequence.uniform(new), banned)
            if filter is not None and token not in sequence.stop_ids:
                filter.advance(token)
        if sequence.logprobs is not None:
            output.logprobs.append(token_logprobs(logits, token, sequence.logprobs))
        return token

    def _observe_admitted(self) -> None:
        admitted, self.scheduler.admitted = self.scheduler.admitted, []
        for sequence in admitted:
            self._queueing.add(self._clock() - sequence.last_time)
            self._counts["cached_tokens"] += sequence.cached_tokens

    def _observe(self, choice: Choice, tokens: int, now: float) -> None:
        sequence, counts = choice.sequence, self._counts
        counts["new_tokens"] += tokens
        if choice.draft:
            counts["drafted_tokens"] += len(choice.draft)
            counts["accepted_tokens"] += max(0, tokens - 1)
        seconds = now - sequence.last_time
        if len(sequence.tokens) - tokens == sequence.prompt_length:
            self._first.add(seconds)
        else:
            for _ in range(tokens):
                self._between.add(seconds / tokens)
        sequence.last_time = now

    def _fail(self, error: Exception, steps: list[PlannedStep]) -> None:
        """End the sequences of failed steps. All others start over, since the KV pool may hold wrong rows."""
        self.failures += 1
        for sequence in {sequence: None for step in steps for sequence in step.sequences}:
            self.end(sequence, "error", error)
        self.scheduler.start_over()

    def _forget(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.end(sequence)
        del self.sequences[sequence.arrival]
        self._finished[reason] += 1
