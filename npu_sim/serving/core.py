"""`Core`: the engine without its threads: launches the scheduler's steps and learns what they chose.

Where the device runs ahead of the host, a step is launched before the result of the one before is read; its
tokens are taken on the device.

Invariants:
1. After step k + 1 has been launched, only the tokens of step k are read, never its logits.
2. A sequence that was added ends once, with one last `News`: by a token, `end`, its deadline, or a device error.
3. News are told in the order in which they became known. Where the device runs ahead, those of a step are kept until
   the next one has been launched: whoever is told competes with this thread, which then waits for the device.
"""

import heapq
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from npu_compiler.errors import NPUError
from npu_sim.llm.sampling import NOT_FINITE, Logits, penalized
from npu_sim.serving.batch import BatchModel, StepResult
from npu_sim.serving.choosing import choose_token, token_logprobs
from npu_sim.serving.request import FinishReason, TokenLogprobs
from npu_sim.serving.scheduler import Scheduler
from npu_sim.serving.sequence import Sequence
from npu_sim.serving.speculation import Drafter
from npu_sim.serving.stats import EngineStats, Observations
from npu_sim.serving.step import Choice, Step
from npu_sim.serving.writer import News


@dataclass(frozen=True, slots=True)
class _Launched:
    step: Step
    result: StepResult
    time: float
    idle_since: float | None  # when the device had nothing to do, if planning needed results


class Core:
    """Runs sequences on a model; for one thread.

    Args:
        model, prefill_tokens, drafter: As for `Scheduler`.
        tell: Called with what becomes known of sequences.

    Attributes:
        sequences: All that have not ended, by arrival.
        failures: Steps that have failed since one did not.
    """

    def __init__(
        self,
        model: BatchModel,
        prefill_tokens: int | None,
        drafter: Drafter | None,
        tell: Callable[[list[News]], None],
    ) -> None:
        self.scheduler = Scheduler(model, prefill_tokens, drafter)
        self.sequences: dict[int, Sequence] = {}
        self.failures = 0
        self._model = model
        self._tell = tell
        self._news: list[News] = []  # that are still to be told
        self._launched: deque[_Launched] = deque()
        self._read_time = 0.0
        self._deadlines: list[tuple[float, int]] = []
        self._counts: Counter[str] = Counter()
        self._finished: Counter[FinishReason] = Counter()
        self._batch_size = 0
        self._queueing, self._first, self._between, self._steps = (Observations() for _ in range(4))

    @property
    def busy(self) -> bool:
        """Whether `advance` has anything to do."""
        return bool(self.sequences or self._launched)

    def stats(self) -> EngineStats:
        """The state and the counts, from any thread; they may be of slightly different moments."""
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

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.arrival] = sequence
        self._counts["prompt_tokens"] += sequence.prompt_length
        if sequence.deadline is not None:
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.arrival))
        self.scheduler.add(sequence)

    def end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """End a sequence that has not ended yet, and say so."""
        if sequence.arrival in self.sequences:
            self._forget(sequence, reason)
            self._news.append(News(sequence, [], [], reason, error))
            self._tell_news()

    def cancel(self, arrival: int) -> None:
        if sequence := self.sequences.get(arrival):
            self.end(sequence, "cancelled")

    def abandon(self, reason: FinishReason, error: str | None = None) -> None:
        """Say to all sequences that they have ended, without the scheduler, which may have failed."""
        self._news += [News(sequence, [], [], reason, error) for sequence in self.sequences.values()]
        self._tell_news()
        self._finished[reason] += len(self.sequences)
        self.sequences.clear()

    def advance(self) -> None:
        """End what is too late, launch the next step, and read all before it or, if it is not to run ahead, it too."""
        self._expire()
        stops = self.scheduler.must_know() and bool(self._launched)
        if stops:
            self._read(0)
        step = self.scheduler.plan()
        self._observe_admitted()
        if step is not None:
            self._launch(step, self._read_time if stops else None)
        elif not self._launched and self.sequences:
            raise NPUError("no request can go on")
        self._tell_news()
        self._read(1 if step is not None and self._model.runs_ahead else 0)
        if not self._launched:
            self._tell_news()

    def _tell_news(self) -> None:
        """Tell all that were kept (invariant 3)."""
        news, self._news = self._news, []
        if news:
            self._tell(news)

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            _, arrival = heapq.heappop(self._deadlines)
            if sequence := self.sequences.get(arrival):
                seconds = sequence.handle.request.timeout
                self.end(sequence, "error", f"the request took longer than its {seconds} seconds")

    def _launch(self, step: Step, idle_since: float | None) -> None:
        """Launch a step; if that fails, end its sequences."""
        try:
            if step.copies:
                self._model.copy_blocks(step.copies)
            now = time.perf_counter()
            self._launched.append(_Launched(step, self._model.step(step.batch), now, idle_since))
        except Exception as error:
            self._fail(error, [step])
            return
        self.scheduler.launched(step)
        self._counts["steps"] += 1
        self._batch_size = len(step.sequences)

    def _read(self, left: int) -> None:
        """Learn what steps chose, in order, until `left` are under way. One that fails ends them all."""
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
            now = time.perf_counter()
            seconds = now - max(launched.time, self._read_time)
            self._read_time = now
            self._steps.add(seconds)
            since = launched.idle_since
            self.scheduler.learn_duration(step, seconds, None if since is None else now - since)
            self._learn(step, chosen, logits)

    def _learn(self, step: Step, chosen: list[int], logits: Logits | None) -> None:
        now, news, waited = time.monotonic(), list[News](), list[float]()
        choices = [
            Choice(sequence, output)
            for output, sequence in enumerate(step.singles)
            if not self._simple(sequence, chosen[output], now, news, waited)
        ]
        self._counts["new_tokens"] += len(waited)
        self._between.add_all(waited)
        for choice in choices + step.choices:
            sequence = choice.sequence
            if sequence.ended:
                self.scheduler.learn(choice, [])
                continue
            found = self._found(choice, chosen, logits)
            self.scheduler.learn(choice, found.tokens)
            self._observe(choice, len(found.tokens), now)
            if found.reason is not None:
                if found.reason == "error":
                    self.scheduler.distrust(sequence)
                self._forget(sequence, found.reason)
            news.append(found)
        self._news += news

    def _simple(self, sequence: Sequence, token: int, now: float, news: list[News], waited: list[float]) -> bool:
        """Append a token of which there is nothing to consider, which nearly all are; False of others."""
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
        news.append(News(sequence, [token]))
        return True

    def _found(self, choice: Choice, chosen: list[int], logits: Logits | None) -> News:
        """What the outputs of a sequence say: its next token, and one more for each draft that was right before it."""
        sequence = choice.sequence
        room = sequence.limit - len(sequence.tokens)
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for index, guess in enumerate((*choice.draft, None)):
            token = chosen[choice.first + index]
            try:
                if token < 0:
                    raise NPUError(NOT_FINITE)
                if logits is not None and sequence.reads_logits:
                    token = self._consider(sequence, tokens, token, logits[choice.first + index], logprobs)
            except Exception as error:  # grammars are not ours
                return News(sequence, tokens, logprobs, "error", str(error))
            if token in sequence.stop_ids:
                return News(sequence, tokens, logprobs[: len(tokens)], "stop")
            tokens.append(token)
            if len(tokens) == room:
                return News(sequence, tokens, logprobs, "length")
            if token != guess:
                break
        return News(sequence, tokens, logprobs)

    def _consider(
        self, sequence: Sequence, new: list[int], token: int, logits: Logits, logprobs: list[TokenLogprobs]
    ) -> int:
        """The token after the sequence and some new ones, as the request's grammar and penalty want it; its log
        probability is added to the list."""
        request, penalty = sequence.handle.request, sequence.penalty
        filter = request.token_filter
        if filter is not None or penalty != 1:
            uniform = sequence.uniform(len(sequence.tokens) + len(new) - sequence.prompt_length)
            scores = penalized(logits, sequence.tokens + new, penalty)
            token = choose_token(scores, filter, request.sampling, uniform)
            if filter is not None and token not in sequence.stop_ids:
                filter.advance(token)
        if request.logprobs is not None:
            logprobs.append(token_logprobs(logits, token, request.logprobs))
        return token

    def _observe_admitted(self) -> None:
        admitted, self.scheduler.admitted = self.scheduler.admitted, []
        for sequence in admitted:
            self._queueing.add(time.monotonic() - sequence.last_time)
            self._counts["cached_tokens"] += sequence.handle.cached_tokens

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

    def _fail(self, error: Exception, steps: list[Step]) -> None:
        """Steps have failed: end their sequences. What the pool holds cannot be trusted, so the others start over."""
        self.failures += 1
        for sequence in {sequence: None for step in steps for sequence in step.sequences}:
            self.end(sequence, "error", str(error) or type(error).__name__)
        self.scheduler.start_over()

    def _forget(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.end(sequence)
        del self.sequences[sequence.arrival]
        self._finished[reason] += 1
