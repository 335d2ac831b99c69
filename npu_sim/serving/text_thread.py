"""`TextThread`: turns chosen tokens into updates, so that the thread that drives the device does not have to.

Invariant: the fields `text`, `held_logprobs`, `held_scores` and `written` of `ServedSequence` are used by this thread
only.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from npu_sim.llm.engine.core import SequenceOutput
from npu_sim.llm.engine.sequence import Sequence as EngineSequence
from npu_sim.llm.engine.sequence import TokenLogprobs
from npu_sim.serving.handle import Handle, deliver
from npu_sim.serving.request import Update
from npu_sim.serving.text import TextOutput


@dataclass(eq=False, slots=True, kw_only=True)
class ServedSequence(EngineSequence):
    """A request in the engine: its sequence, its text and the handle that gets its updates.

    Attributes:
        handle: The handle through which the client reads updates.
        text: Turns the sequence's tokens into text.
        held_logprobs: Log probabilities of tokens whose text is held back.
        held_scores: Log probabilities of the prompt's tokens that no update has yet.
        written: Whether the last update has been delivered.
    """

    handle: Handle
    text: TextOutput
    held_logprobs: deque[TokenLogprobs] = field(default_factory=deque)
    held_scores: tuple[TokenLogprobs, ...] = ()
    written: bool = False


class TextThread:
    """A thread that turns outputs of sequences into updates and delivers them.

    Args:
        stopped: Called with a sequence that must be ended, since its text contains a stop string or cannot be decoded.
    """

    def __init__(self, stopped: Callable[[EngineSequence], None]) -> None:
        self._stopped = stopped
        self._queue: queue.SimpleQueue[Sequence[SequenceOutput] | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="npu-sim-text", daemon=True)
        self._thread.start()

    def put(self, entry: Sequence[SequenceOutput] | Callable[[], None]) -> None:
        """Queue outputs to deliver, or a function to call after all that was queued before."""
        self._queue.put(entry)

    def close(self) -> None:
        """Deliver all queued outputs, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            if callable(entry):
                entry()
            else:
                deliver(update for output in entry for update in self._updates(output))

    def _updates(self, output: SequenceOutput) -> list[tuple[Handle, Update]]:
        sequence = output.sequence
        assert isinstance(sequence, ServedSequence)
        if sequence.written:
            return []
        sequence.handle.cached_tokens = sequence.cached_tokens
        try:
            update = _update(sequence, output)
        except Exception as error:  # the tokenizer is not ours
            update = Update(finish_reason="error", error=f"the text of the tokens cannot be made: {error}")
        if update.finish_reason is not None:
            sequence.written = True
            if output.reason is None:
                self._stopped(sequence)
        if not (update.tokens or update.text or update.finish_reason is not None):
            return []
        scores, sequence.held_scores = sequence.held_scores, ()
        return [(sequence.handle, replace(update, prompt_logprobs=scores) if scores else update)]


def _update(sequence: ServedSequence, output: SequenceOutput) -> Update:
    pieces = [sequence.text.push(token) for token in output.tokens]
    if output.reason is not None:
        pieces.append(sequence.text.finish())
    tokens = tuple(token for ready, _ in pieces for token in ready)
    text = "".join(piece for _, piece in pieces)
    sequence.held_logprobs.extend(output.logprobs)
    sequence.held_scores += tuple(output.scores)
    logprobs = tuple(sequence.held_logprobs.popleft() for _ in tokens) if sequence.held_logprobs else ()
    if sequence.text.stopped and output.reason != "error":
        return Update(tokens, text, logprobs, "stop")
    error = None if output.error is None else str(output.error) or type(output.error).__name__
    return Update(tokens, text, logprobs, output.reason, error)
