"""`LanguageModel`: a compiled language model on a device that continues one sequence with the engine."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import InputError
from npu_runtime.profile_trace import Span
from npu_sim.llm.checkpoint import Checkpoint
from npu_sim.llm.compiled_model import Report
from npu_sim.llm.contiguous_model import DECODE, ContiguousModel
from npu_sim.llm.engine import sequence as engine
from npu_sim.llm.engine.batch import Batch
from npu_sim.llm.engine.core import EngineCore, SequenceOutput
from npu_sim.llm.engine.sequence import GREEDY, FinishReason
from npu_sim.llm.sampling import Drawing, Logits, Sampler, SamplingSettings, check_penalty, greedy

if TYPE_CHECKING:
    from npu_compiler import CompiledProgram
    from npu_runtime import Device

USUAL_PROMPT = 32  # tokens


@dataclass
class GenerationStats:
    """Counts and times of a generation.

    Attributes:
        prompt_tokens: Tokens of the prompt, of which `reused_tokens` were already in the KV cache.
        new_tokens: Tokens generated, not counting the stop token.
        decode_steps: Number of tokens after the first one, including a stop token. The first new token comes from the
            prefill.
        prefill_seconds, decode_seconds: Time until the first token, and for all others, without the time of the
            caller's own code. All times are by the device's clock.
        first_token_seconds: Time from the beginning of the prefill until the first new token was known.
        token_seconds: Time that the caller waited for each token after the first, including a stop token.
        finish_reason: `stop` after a stop token, `length` after the requested number of tokens or when the cache is
            full, None before the end.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    decode_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_token_seconds: float = 0.0
    token_seconds: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens computed for each second of prefill, without those reused from the cache; 0 without any."""
        return (self.prompt_tokens - self.reused_tokens) / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Decode steps for each second of decoding; 0 without any."""
        return self.decode_steps / self.decode_seconds if self.decode_seconds else 0.0


class LanguageModel:
    """A language model on a device with a KV cache for one sequence.

    `generate` continues a prompt: each token is a step of the engine (`EngineCore`) over a `ContiguousModel`. Below
    that, `prefill` and `decode` append tokens to the sequence and return logits.

    Attributes:
        model: The `ContiguousModel` that runs the steps.
        cache_length: Capacity of the KV cache in tokens, a multiple of `chunk`.
        repetition_penalty: The checkpoint's repetition penalty; see `sampling.penalized`. Other values than 1 make the
            host choose the tokens.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: "Device | str | None" = None,
        cache_length: int | None = None,
        chunk: int | None = None,
        progress: Report | None = None,
        tensor_parallel: int = 1,
    ) -> None:
        """Compile the decode program, or find it in the cache, and upload the weights.

        Args:
            device: A device or its name. Default: the best one on this machine.
            cache_length: Capacity of the KV cache in tokens, rounded to a multiple of `chunk`. Default: 2048, or the
                model's maximum context length if that is less.
            chunk: Tokens per run of the only prefill program, which is compiled at once; reduced to the length of a
                smaller cache. None: programs of several sizes are compiled when prompts need them, and the cache's
                length is a multiple of 128, or less than that.
            progress: Called with (weights loaded, total weights). None: not called.
            tensor_parallel: Divide the model among this many devices (see `CompiledModel`).

        Raises:
            InputError: a length does not fit the model, or the model cannot be compiled, or not be divided among so
                many devices.
            WeightError: the checkpoint does not fit its own config.
            DeviceError: the device is unknown, cannot be used, or is out of memory.
        """
        check_penalty(checkpoint.repetition_penalty)
        if checkpoint.adapters:
            raise InputError("adapters with names are for an engine's requests; give one as `adapter`, to be merged")
        self.checkpoint = checkpoint
        self.repetition_penalty = checkpoint.repetition_penalty
        self.model = ContiguousModel(
            checkpoint,
            device=device,
            cache_length=cache_length,
            chunk=chunk,
            progress=progress,
            tensor_parallel=tensor_parallel,
        )
        self.cache_length = self.model.context_length
        self.device, self.group, self.vocab_size = self.model.device, self.model.group, self.model.vocab_size
        self._arrivals = count()
        self._start_over()

    def _start_over(self) -> None:
        """Begin with an empty cache and a new engine."""
        self._core = EngineCore(self.model, None, None, self._receive, eager=True)
        self._current: Generation | None = None  # the one whose sequence is in the cache
        self._tokens: list[int] = []  # of the cache, where there is none

    def _receive(self, outputs: list[SequenceOutput]) -> None:
        if self._current is not None:
            self._current._outputs += outputs

    @property
    def tokens(self) -> list[int]:
        """The tokens whose keys and values are in the cache, in order.

        The latest new token is missing until the next one is requested.
        """
        return self._tokens if self._current is None else self._current._cached_tokens()

    @property
    def decode_program(self) -> "CompiledProgram":
        """The compiled program of a greedy decode step."""
        return self.model.program(DECODE).executor.program

    @property
    def prefill_programs(self) -> "dict[int, CompiledProgram]":
        """Tokens per run → compiled prefill program, of those loaded so far."""
        return {name: program for name, program in self.model.loaded_programs().items() if isinstance(name, int)}

    def prepare(self, sampler: Sampler, prompt_tokens: int = USUAL_PROMPT) -> None:
        """Compile now the programs that generating with this sampler needs, not at the first generation.

        Args:
            prompt_tokens: Length of the first prompt.
        """
        self.model.prepare(prompt_tokens, sampling=self._samples_on_device(sampler))

    def _samples_on_device(self, sampler: Sampler) -> bool:
        return self.repetition_penalty == 1 and isinstance(sampler, Drawing) and self.model.runs_ahead > 0

    def close(self) -> None:
        """End the processes that this model started for other devices, if any. The model cannot be used afterwards."""
        self.model.close()

    def eos_ids(self) -> frozenset[int]:
        """The checkpoint's end-of-sequence token ids."""
        return self.checkpoint.end_ids()

    def reset(self) -> None:
        """Start an empty sequence. Old rows in the cache are overwritten before anything attends to them."""
        self._release()
        self._tokens = []

    def prefill(self, token_ids: Sequence[int]) -> Logits:
        """Append tokens to the sequence, in the cheapest runs of prefill programs and decode steps.

        Returns:
            The logits [vocab] for the token after the last one, in float32.

        Raises:
            InputError: there are no tokens, more than fit in the cache, or an id is outside the vocabulary.
        """
        self._release()
        ids = self._checked_prompt(token_ids, len(self._tokens))
        tokens = np.concatenate((np.array(self._tokens, np.int64), ids))
        del self._tokens[self._continued() :]
        while len(self._tokens) < len(tokens):
            start, end = self.model.piece(len(self._tokens), len(tokens))
            logits = self._append(tokens[start:end], start)
            self._tokens += tokens[len(self._tokens) : end].tolist()
        return logits

    def decode(self, token: int) -> Logits:
        """Append one token and return the logits [vocab] for the next one, in float32.

        Raises:
            InputError: the cache is full, or the id is outside the vocabulary.
        """
        self._release()
        if len(self._tokens) >= self.cache_length:
            raise InputError(f"the cache is full: it holds {self.cache_length} tokens")
        self._check_ids(token)
        if self._continued() < len(self._tokens):
            return self.prefill([token])
        logits = self._append(np.array([token]), len(self._tokens))
        self._tokens.append(int(token))
        return logits

    def _append(self, tokens: NDArray[np.int64], start: int) -> Logits:
        """Run a step of these tokens, at positions from `start` on; return the logits after the last token."""
        ids, positions = tokens.astype(np.int32), np.arange(start, start + len(tokens), dtype=np.int32)
        table, last, uniform = (
            np.zeros((1, 1), np.int32),
            np.array([len(tokens) - 1], np.int32),
            np.zeros(1, np.float32),
        )
        batch = Batch(ids, positions, np.zeros_like(ids), table, last, np.array([GREEDY], np.float32), uniform)
        logits: Logits = self.model.step(batch).logits()[0]
        return logits

    def _checked_prompt(self, token_ids: Sequence[int], start: int) -> NDArray[np.int64]:
        """The ids as an array, after checking them and the room for them in the cache. Raises InputError.

        They are checked at once: one by one takes long in Python, while the device idles.
        """
        try:
            ids = np.asarray(token_ids if isinstance(token_ids, list) else list(map(int, token_ids)))
        except (TypeError, ValueError) as error:
            raise InputError("a prompt is a list of token ids, which are integers") from error
        if not len(ids):
            raise InputError("the prompt is empty; give at least one token")
        if ids.ndim != 1 or ids.dtype.kind not in "iuO":  # O: integers of more than 64 bits
            raise InputError(f"a prompt is a list of token ids, not {ids.dtype} of the shape {list(ids.shape)}")
        if start + len(ids) > self.cache_length:
            room = f"only {self.cache_length - start} of the cache's {self.cache_length} tokens are free"
            raise InputError(f"the prompt has {len(ids)} tokens, but {room}")
        self._check_ids(ids.min(), ids.max())
        return ids.astype(np.int64, copy=False)

    def _check_ids(self, *ids: int) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise InputError(f"token id {token} is outside the vocabulary, 0 to {self.vocab_size - 1}")

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int | None = None,
        sampler: Sampler = greedy,
        stop: frozenset[int] | None = None,
    ) -> "Generation":
        """Generate tokens that continue a prompt; they are computed as the result is iterated over.

        The longest prefix that the prompt shares with the sequence in the cache is not computed again, so each turn of
        a conversation costs only its new tokens. Several generations may take turns: each continues its own prompt, and
        computes again the tokens that another one has overwritten in the cache.

        Args:
            max_new_tokens: Maximum number of new tokens. Default: until the cache is full.
            sampler: Chooses each token. `greedy` and the results of `make_sampler` are computed on the device if it can
                run ahead of the host; any other function is called with the logits [vocab] of each step.
            stop: Token ids that end the generation and are not returned. Default: `eos_ids()`.

        Raises:
            InputError: the prompt is empty, longer than the cache, or has an id outside the vocabulary; or
                max_new_tokens is negative.
        """
        prompt = self._checked_prompt(prompt_ids, 0).tolist()
        if max_new_tokens is not None and max_new_tokens < 0:
            raise InputError(f"max_new_tokens must be at least 0, not {max_new_tokens}")
        room = self.cache_length + 1  # the last token needs no row of its own: nothing attends to it
        limit = room if max_new_tokens is None else min(len(prompt) + max_new_tokens, room)
        drawing = sampler if isinstance(sampler, Drawing) and self._samples_on_device(sampler) else None
        by_host = drawing is None and (sampler is not greedy or self.repetition_penalty != 1)
        sequence = engine.Sequence(
            next(self._arrivals),
            prompt,
            limit,
            self.eos_ids() if stop is None else stop,
            sampling=drawing.sampling if drawing else SamplingSettings(repetition_penalty=self.repetition_penalty),
            sampler=sampler if by_host else None,
        )
        return Generation(self, sequence, drawing)

    def rewind(self, ids: Sequence[int]) -> int:
        """Truncate the sequence to its longest common prefix with `ids`, and return the length of this prefix.

        The prefix does not include the last of `ids`, so that a token is left to compute logits from. A recurrent state
        cannot be truncated: it is kept only if `ids` continue the whole sequence.
        """
        self._release()
        common = 0
        while common < min(len(self._tokens), len(ids) - 1) and self._tokens[common] == ids[common]:
            common += 1
        del self._tokens[common if self.model.rewinds or common == self._continued() else 0 :]
        return len(self._tokens)

    def _continued(self) -> int:
        """Number of the sequence's first tokens that its next step may build on.

        It is all of them, or 0 if a recurrent state belongs to another number of tokens.
        """
        tokens = len(self._tokens)
        return tokens if self.model.rewinds or self.model.end == tokens else 0

    def _release(self) -> None:
        """Take the cache from the generation that owns it, if any; its tokens stay in the cache."""
        if self._current is not None:
            self._core.remove(self._current._sequence)
            self._tokens, self._current = self._current._cached_tokens(), None

    def _claim(self, generation: "Generation") -> None:
        """Let a generation own the cache, unless it does already, and forget the tokens that are not its own."""
        if self._current is not generation:
            sequence = generation._sequence
            computed = self.rewind(sequence.tokens)
            self._current = generation
            if generation._drawing is not None:
                sequence.draw_from(generation._drawing.generator())
            self._core.add(sequence, computed)

    def _advance(self) -> None:
        """Run a step of the generation that owns the cache.

        After an error, the contents of the cache are not used any more.
        """
        try:
            self._core.advance()
        except BaseException:
            self._start_over()
            raise


class Generation(Iterator[int]):
    """The token ids of one generation, as an iterator that computes them; `stats` and `spans` are complete at its end.

    Attributes:
        spans: Times of the prefill, of its runs and of each token, to be shown in a trace.
    """

    def __init__(self, model: LanguageModel, sequence: engine.Sequence, drawing: Drawing | None) -> None:
        """Begin a generation. `drawing` is the sampler if its choice is computed on the device, else None."""
        self.stats = GenerationStats(prompt_tokens=len(sequence.tokens))
        self.spans: list[Span] = []
        self._model, self._sequence, self._drawing = model, sequence, drawing
        self._outputs: deque[SequenceOutput] = deque()
        self._clock = model.device.backend.clock
        self._tokens = self._run()

    def __next__(self) -> int:
        return next(self._tokens)

    def _run(self) -> Iterator[int]:
        stats, sequence, model = self.stats, self._sequence, self._model
        stats.reused_tokens = model.rewind(sequence.tokens)
        model.model.prepare(stats.prompt_tokens - stats.reused_tokens, sampling=self._drawing is not None)
        if sequence.limit == sequence.prompt_length:
            start = self._clock()
            model.prefill(sequence.tokens[stats.reused_tokens :])
            stats.prefill_seconds = self._span("prefill", start)
            stats.finish_reason = "length"
            return
        reason = None
        while reason is None:
            output = self._next_output()
            if output.error is not None:
                model._start_over()
                raise output.error
            if self._drawing is not None:
                self._drawing.skip()
            reason = output.reason
            for token in output.tokens:
                stats.new_tokens += 1
                yield token
        stats.finish_reason = reason

    def _cached_tokens(self) -> list[int]:
        """The tokens of this generation whose keys and values are in the cache; empty if it does not own the cache."""
        sequence, new = self._sequence, self.stats.new_tokens
        length = sequence.prompt_length + new - (new > 0 and self.stats.finish_reason != "stop")
        return sequence.tokens[: min(length, sequence.computed)]

    def _next_output(self) -> SequenceOutput:
        """Run steps until the next token is known, and return it."""
        stats, sequence, start = self.stats, self._sequence, self._clock()
        while not self._outputs:
            self._model._claim(self)
            before, computed = self._clock(), sequence.computed
            self._model._advance()
            if computed < sequence.prompt_length:
                self._span(f"prefill {sequence.computed - computed} tokens", before, position=computed)
        if stats.new_tokens == 0:
            stats.prefill_seconds = self._span("prefill", start, tokens=stats.prompt_tokens - stats.reused_tokens)
            stats.first_token_seconds = stats.prefill_seconds
        else:
            seconds = self._span(
                f"token {stats.new_tokens + 1}", start, position=sequence.prompt_length + stats.new_tokens
            )
            stats.decode_steps += 1
            stats.decode_seconds += seconds
            stats.token_seconds.append(seconds)
        return self._outputs.popleft()

    def _span(self, name: str, start: float, **arguments: int) -> float:
        """Note a span from `start` until now, with arguments for the trace; return its seconds."""
        end = self._clock()
        self.spans.append(Span(name, start, end, arguments))
        return end - start
