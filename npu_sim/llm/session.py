"""`LanguageModel`: a language model on a device, compiled once, with its KV cache kept there."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from npu_compiler.errors import InputError, NPUError
from npu_sim.llm.checkpoint import Checkpoint, as_ids
from npu_sim.llm.graph import compile_decode_loop, compile_prefill, compile_sampling_loop, state_with_buffers
from npu_sim.llm.sampling import NOT_FINITE, Drawing, Logits, Sampler, greedy

if TYPE_CHECKING:
    from npu_compiler import CompiledProgram
    from npu_runtime import Device, DeviceBuffer, Executor

DEFAULT_CACHE_LENGTH = 2048
DEFAULT_CHUNK = 128

FinishReason = Literal["stop", "length"]


@dataclass
class GenerationStats:
    """What a generation did and how long it took.

    Attributes:
        prompt_tokens: Tokens of the prompt; `reused_tokens` of them were in the KV cache already.
        new_tokens: Tokens generated, the stop token not counted.
        decode_steps: Runs of the decode program: the first new token comes from the prefill.
        prefill_seconds, decode_seconds: Time spent in those programs and in sampling, not in the consumer.
        finish_reason: `stop` at a stop token, `length` at the asked length or the end of the cache, None before.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    decode_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    finish_reason: FinishReason | None = None

    @property
    def prefill_tokens_per_second(self) -> float:
        return (self.prompt_tokens - self.reused_tokens) / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        return self.decode_steps / self.decode_seconds if self.decode_seconds else 0.0


class LanguageModel:
    """A model with one KV cache: a sequence of tokens that grows by `prefill` and `decode`.

    Attributes:
        cache_length: How many tokens the cache holds, a multiple of `chunk`.
        tokens: The tokens whose keys and values are in the cache, in order.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: "Device | str | None" = None,
        cache_length: int | None = None,
        chunk: int = DEFAULT_CHUNK,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compile (or find in the cache) both programs and upload the weights, each once.

        Args:
            cache_length: Tokens that the KV cache shall hold, rounded up to whole chunks. By default 2048, or what
                the model was trained for where that is less.
            chunk: Tokens that one run of the prefill program takes; less where the cache is smaller.
            progress: Called with (weights done, weights in all).

        Raises:
            InputError: lengths that make no sense for this model, or a model that cannot be compiled.
            WeightError: the checkpoint does not fit its own config.
        """
        from npu_runtime import Device, Executor, NPUBuffer, load_weights

        self.checkpoint = checkpoint
        self.chunk, self.cache_length = _lengths(checkpoint, cache_length, chunk)
        self.device = device if isinstance(device, Device) else Device(device) if device else Device()
        target = self.device.backend.target
        self.prefill_program = (
            compile_prefill(checkpoint, self.chunk, self.cache_length, target) if self.chunk > 1 else None
        )
        self.decode_program = compile_decode_loop(checkpoint, self.cache_length, target)
        state = state_with_buffers(checkpoint)
        shared: dict[str, DeviceBuffer] = {}
        self._kv = {
            spec.name: NPUBuffer.zeros(spec.shape, self.device, spec.storage, spec.alloc_shape)
            for spec in self.decode_program.input_specs
            if spec.name.startswith(("k_", "v_"))
        }
        history, self._look = self.device.backend.allocate_visible((self.cache_length,), "int32")

        def stepper(
            program: "CompiledProgram", kept: "dict[str, DeviceBuffer]", report: Callable[[int, int], None] | None
        ) -> _Step:
            weights = load_weights(state, program, self.device, cache=shared, progress=report)
            return _Step(program, Executor(program, self.device), weights, kept, self.device)

        def sampling_step() -> _Step:
            program = compile_sampling_loop(checkpoint, self.cache_length, target)
            return stepper(program, {**self._kv, "history": history}, None)

        prefill = self.prefill_program
        self._prefill_step = stepper(prefill, self._kv, progress) if prefill is not None else None
        self._decode_step = stepper(self.decode_program, {**self._kv, "history": history}, progress)
        self._make_sampling_step = sampling_step
        self._user: object = None
        self.tokens: list[int] = []

    def prepare(self, sampler: Sampler) -> None:
        """Make ready what only generating with this sampler needs; else the first generation does."""
        self._self_feeding_step(sampler)

    def _self_feeding_step(self, sampler: Sampler) -> "_Step | None":
        """The step that chooses as the sampler does; None where the host chooses."""
        if sampler is greedy:
            return self._decode_step
        return self._sampling_step if isinstance(sampler, Drawing) and self.device.backend.runs_ahead > 1 else None

    @cached_property
    def _sampling_step(self) -> "_Step":
        return self._make_sampling_step()

    @property
    def vocab_size(self) -> int:
        return int(self.checkpoint.config.vocab_size)

    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a reply: the model's, and the tokenizer's where there is one."""
        try:
            return self.checkpoint.eos_ids | as_ids(self.checkpoint.tokenizer.eos_token_id)
        except InputError:
            return self.checkpoint.eos_ids

    def reset(self) -> None:
        """Forget the sequence. What is left in the cache is overwritten before it is ever attended to."""
        self._user, self.tokens = None, []

    def prefill(self, token_ids: Sequence[int]) -> Logits:
        """Append tokens to the sequence, in chunks; the logits [vocab] that follow the last one, in float32.

        Raises InputError for no tokens, more than the cache has room for, or an id outside the vocabulary.
        """
        ids = [int(token) for token in token_ids]
        self._check_prompt(ids, len(self.tokens))
        logits: Logits | None = None
        while ids:
            piece, ids = ids[: self.chunk], ids[self.chunk :]
            logits = self.decode(piece[0]) if len(piece) == 1 else self._prefill_chunk(piece)
        assert logits is not None
        return logits

    def _check_prompt(self, ids: Sequence[int], start: int) -> None:
        if not ids:
            raise InputError("the prompt is empty; give at least one token")
        if start + len(ids) > self.cache_length:
            room = f"{self.cache_length - start} of the cache's {self.cache_length} tokens are free"
            raise InputError(f"the prompt has {len(ids)} tokens, but {room}")
        self._check_ids(ids)

    def _check_ids(self, ids: Sequence[int]) -> None:
        if bad := next((token for token in ids if not 0 <= token < self.vocab_size), None):
            raise InputError(f"token id {bad} is outside the vocabulary, 0..{self.vocab_size - 1}")

    def _prefill_chunk(self, piece: list[int]) -> Logits:
        """Run the prefill program on 2 to `chunk` tokens, padded to the whole chunk.

        The padding writes keys and values beyond the sequence. No query sees them: each attends to rows up to its
        own position only, and the token that later takes a padded position writes that row before attending to it.

        Where the chunk would stick out of the cache, it starts earlier, on tokens that are in the cache already,
        whose rows are then written again.
        """
        assert self._prefill_step is not None
        start = min(len(self.tokens), self.cache_length - self.chunk)
        known = self.tokens[start:] + piece
        padded = known + [0] * (self.chunk - len(known))
        self._user = None
        self._prefill_step.write(input_ids=[padded], positions=range(start, start + self.chunk), last=[len(known) - 1])
        self._prefill_step.run()
        self.tokens += piece
        return self._prefill_step.logits()

    def decode(self, token: int) -> Logits:
        """Append one token; the logits [vocab] that follow it. Raises InputError for a full cache or a bad id."""
        if len(self.tokens) >= self.cache_length:
            raise InputError(f"the cache is full: it holds {self.cache_length} tokens")
        self._check_ids([token])
        self._user = None
        self._decode_step.write(token=[token], position=[len(self.tokens)])
        self._decode_step.run()
        self.tokens.append(int(token))
        return self._decode_step.logits()

    def follow(self, token: int, steps: int, sampler: Sampler = greedy) -> Iterator[int]:
        """Append a token, then each that the sampler chooses next, and so on; the up to `steps` tokens chosen.

        It ends early when the cache is full. A token joins the sequence when the one after it is asked for.

        Raises InputError for a token outside the vocabulary, NPUError for logits that are not finite.
        """
        self._check_ids([token])
        step = self._self_feeding_step(sampler)
        if step is None:
            return self._follow(token, steps, sampler)
        return self._follow_on_device(step, token, steps, sampler if isinstance(sampler, Drawing) else None)

    def _follow(self, token: int, steps: int, sampler: Sampler) -> Iterator[int]:
        for _ in range(steps):
            if len(self.tokens) == self.cache_length:
                return
            token = sampler(self.decode(token))
            yield token

    def _follow_on_device(self, step: "_Step", token: int, steps: int, drawing: Drawing | None = None) -> Iterator[int]:
        """`_follow` with a step that chooses itself: several are launched before the first one's choice is looked at,
        and none waits for the host. The numbers that decide what is drawn are there before the first one.

        Steps that turn out not to be wanted have written rows beyond the sequence, which does no harm (see
        `_prefill_chunk`). Where someone else has used the cache since the last token, they are launched anew.
        """
        backend, me = self.device.backend, object()
        under_way: deque[Callable[[], None]] = deque()
        for done in range(steps):
            position = len(self.tokens)
            if position == self.cache_length:
                return
            if self._user is not me:
                self._user = me
                under_way.clear()
                step.write(token=[token], position=[position])
                if drawing is not None:
                    upcoming = drawing.upcoming(self.cache_length - position)
                    step.write(settings=drawing.settings, uniforms=np.pad(upcoming, (position, 0)))
            while len(under_way) < min(backend.runs_ahead, steps - done, self.cache_length - position):
                step.run()
                under_way.append(backend.marker())
            under_way.popleft()()
            self.tokens.append(token)
            token = int(self._look()[position])
            if token < 0:
                raise NPUError(NOT_FINITE)
            if drawing is not None:
                drawing.skip()
            yield token

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int | None = None,
        sampler: Sampler = greedy,
        stop: frozenset[int] | None = None,
    ) -> "Generation":
        """Tokens that continue a prompt, made while they are iterated over.

        What the cache holds of the prompt's beginning is not computed again, so a conversation that grows costs only
        what is new in it.

        Args:
            max_new_tokens: By default, until the cache is full.
            sampler: `greedy` and what `make_sampler` makes are done by a device that runs ahead of the host, which then
                never waits for it. Any other is called with the logits of every step.
            stop: Tokens that end it and are not returned; by default `eos_ids()`.

        Raises:
            InputError: the prompt is empty, longer than the cache, or holds an id outside the vocabulary.
        """
        ids = [int(token) for token in prompt_ids]
        self._check_prompt(ids, 0)
        if max_new_tokens is not None and max_new_tokens < 0:
            raise InputError(f"max_new_tokens must not be negative, not {max_new_tokens}")
        return Generation(self, ids, max_new_tokens, sampler, self.eos_ids() if stop is None else stop)

    def rewind(self, ids: Sequence[int]) -> int:
        """Shorten the sequence to what it has in common with the beginning of `ids`, less than all of them, so that
        there is a token left to compute logits from; how many that is."""
        common = 0
        while common < min(len(self.tokens), len(ids) - 1) and self.tokens[common] == ids[common]:
            common += 1
        self._user = None
        del self.tokens[common:]
        return common


class Generation(Iterator[int]):
    """Token ids as they are made; `stats` is complete when the iteration has ended."""

    def __init__(
        self,
        model: LanguageModel,
        prompt: list[int],
        max_new_tokens: int | None,
        sampler: Sampler,
        stop: frozenset[int],
    ) -> None:
        self.stats = GenerationStats(prompt_tokens=len(prompt))
        self._tokens = self._run(model, prompt, max_new_tokens, sampler, stop)

    def __next__(self) -> int:
        return next(self._tokens)

    def _run(
        self, model: LanguageModel, prompt: list[int], limit: int | None, sampler: Sampler, stop: frozenset[int]
    ) -> Iterator[int]:
        stats, start = self.stats, time.perf_counter()
        stats.reused_tokens = model.rewind(prompt)
        logits = model.prefill(prompt[stats.reused_tokens :])
        stats.prefill_seconds = time.perf_counter() - start
        if limit == 0:
            stats.finish_reason = "length"
            return
        start = time.perf_counter()
        first = sampler(logits)
        stats.decode_seconds += time.perf_counter() - start
        following = model.follow(first, model.cache_length if limit is None else limit - 1, sampler)
        token: int | None = first
        while token is not None:
            if token in stop:
                stats.finish_reason = "stop"
                return
            stats.new_tokens += 1
            yield token
            start = time.perf_counter()
            token = next(following, None)
            stats.decode_steps += token is not None
            stats.decode_seconds += time.perf_counter() - start
        stats.finish_reason = "length"


class _Step:
    """One program with its executor and the buffers that every run of it reads and writes.

    Args:
        kept: Inputs that others share; the rest are made here.
    """

    def __init__(
        self,
        program: "CompiledProgram",
        executor: "Executor",
        weights: "dict[str, DeviceBuffer]",
        kept: "dict[str, DeviceBuffer]",
        device: "Device",
    ) -> None:
        from npu_runtime import NPUBuffer

        self.executor = executor
        self._weights = weights
        self._specs = {spec.name: spec for spec in program.input_specs if spec.name not in kept}
        self._inputs = {name: NPUBuffer.zeros(spec.shape, device, spec.storage) for name, spec in self._specs.items()}
        self._bound = {**self._inputs, **kept}
        self._logits = program.output_specs[0].name
        self._outputs: dict[str, DeviceBuffer] = {}

    def write(self, **values: "Sequence[Any] | np.ndarray") -> None:
        """Set inputs that are not kept, by name."""
        for name, value in values.items():
            self._inputs[name].write(np.asarray(value), self._specs[name])

    def run(self) -> None:
        self._outputs = self.executor.run(self._bound, self._weights)

    def logits(self) -> Logits:
        """The last run's first output, in float32, flat."""
        return np.asarray(self._outputs[self._logits].to_numpy(), np.float32).reshape(-1)


def _lengths(checkpoint: Checkpoint, cache_length: int | None, chunk: int) -> tuple[int, int]:
    """(chunk, cache length) that fit each other and the model."""
    trained = getattr(checkpoint.config, "max_position_embeddings", None) or DEFAULT_CACHE_LENGTH
    length = min(DEFAULT_CACHE_LENGTH, trained) if cache_length is None else cache_length
    if length < 1 or chunk < 1:
        raise InputError(f"cache length and chunk must be at least 1, not {length} and {chunk}")
    if length > trained:
        raise InputError(f"a cache of {length} tokens is more than {checkpoint.name} was trained for, {trained}")
    window = getattr(checkpoint.config, "sliding_window", None)
    chunk = min(chunk, length)
    length = -(-length // chunk) * chunk
    if window and length > window:
        raise InputError(f"{checkpoint.name} attends to a sliding window of {window}; ask for a cache within that")
    return chunk, length
