"""`LanguageModel`: a compiled language model with its KV cache on a device, and the token generation loop."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import InputError, NPUError
from npu_runtime.profile_trace import Span
from npu_sim.llm.checkpoint import Checkpoint
from npu_sim.llm.families import attention_window
from npu_sim.llm.generation_config import check_generation
from npu_sim.llm.graph import (
    compile_decode_loop,
    compile_prefill,
    compile_sampling_loop,
    has_prefill,
    state_with_buffers,
)
from npu_sim.llm.prefill_plan import CHUNKS, CPU_RUN, GPU_RUN, divide
from npu_sim.llm.sampling import NOT_FINITE, Drawing, Logits, Sampler, check_penalty, greedy, penalized
from npu_sim.llm.step import DECODE, SAMPLING, Step, StepName

if TYPE_CHECKING:
    from npu_compiler import CompiledProgram
    from npu_runtime import Device, DeviceBuffer
    from npu_sim.parallel.group import RankGroup

DEFAULT_CACHE_LENGTH = 2048
DEFAULT_CHUNK = 128
USUAL_PROMPT = 32  # tokens

_log = logging.getLogger(__name__)

FinishReason = Literal["stop", "length"]


@dataclass
class GenerationStats:
    """What a generation did and how long it took.

    Attributes:
        prompt_tokens: Tokens of the prompt, of which `reused_tokens` were already in the KV cache.
        new_tokens: Tokens generated, not counting the stop token.
        decode_steps: Runs of the decode program. The first new token comes from the prefill.
        prefill_seconds, decode_seconds: Time spent in those programs and in sampling, not in the caller's code. All
            times are by the device's clock.
        first_token_seconds: From the beginning of the prefill until the first new token was known.
        token_seconds: For each token after it, a stop token included, how long the caller waited.
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
        """Rate of prompt tokens computed, without those reused from the cache; 0 before any."""
        return (self.prompt_tokens - self.reused_tokens) / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Rate of decode steps; 0 before any."""
        return self.decode_steps / self.decode_seconds if self.decode_seconds else 0.0


class LanguageModel:
    """A language model on a device with a KV cache for one sequence, which `prefill` and `decode` extend.

    A prompt is prefilled in runs of 16, 128 or 512 tokens and decode steps, as `prefill_plan.divide` chooses. A program
    for a size is compiled, or read from the cache, when the first prompt needs it, since tracing takes seconds; all of
    them share the weights and the KV cache. On devices that run ahead of the host (GPUs), where compiling a program's
    kernels takes seconds more and a large run costs hardly more than a small one, the choice falls on few large sizes.

    Attributes:
        cache_length: The capacity of the KV cache in tokens, a multiple of `chunk`.
        tokens: The tokens whose keys and values are in the cache, in order.
        prefill_programs: Tokens per run → program, of those that were needed so far.
        repetition_penalty: That of the checkpoint; see `sampling.penalized`. Other values than 1 make the host choose
            the tokens.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: "Device | str | None" = None,
        cache_length: int | None = None,
        chunk: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        tensor_parallel: int = 1,
        rank: int = 0,
    ) -> None:
        """Compile the decode program, or find it in the cache, and upload the weights.

        Args:
            device: A device or its name. Default: the best one on this machine.
            cache_length: Capacity of the KV cache in tokens, rounded up to a multiple of `chunk`. Default: 2048, or the
                model's maximum context length if that is less.
            chunk: Tokens per run of the only prefill program, which is then compiled at once; reduced to the length of
                a smaller cache. Default: sizes that fit the prompts; the cache's length is a multiple of 128, or less.
            progress: Called with (weights loaded, total weights).
            tensor_parallel: Divide the model among this many devices: this process starts a process for each of the
                others (see `npu_sim.llm.ranks`). On GPUs they are those from `device` on.
            rank: Of a process that was started so: its place in the group, which `device` has joined.

        Raises:
            InputError: a length does not fit the model, the model cannot be compiled, or not be divided so.
            WeightError: the checkpoint does not fit its own config.
            DeviceError: the device is unknown, cannot be used, or is out of memory.
        """
        from npu_runtime import Device, Executor, NPUBuffer, load_weights

        check_generation(checkpoint)
        check_penalty(checkpoint.repetition_penalty)
        self.checkpoint = checkpoint
        self.repetition_penalty = checkpoint.repetition_penalty
        fixed, self.cache_length = _lengths(checkpoint, cache_length, DEFAULT_CHUNK if chunk is None else chunk)
        self._fixed_chunk = None if chunk is None else fixed
        self.device = device if isinstance(device, Device) else Device(device) if device else Device()
        self.group: RankGroup | None = None
        mesh = None
        if tensor_parallel != 1:
            from npu_compiler.graph.mesh import Mesh
            from npu_sim.llm.ranks import start_group

            if rank == 0:
                settings = {"cache_length": self.cache_length, "chunk": chunk}
                self.group = start_group(checkpoint, self.device, tensor_parallel, type(self), settings)
            mesh = Mesh(tensor_parallel)
        target = self.device.backend.target  # which may depend on the group
        state = state_with_buffers(checkpoint)  # before seconds of compiling: it may refuse the files
        self.decode_program = compile_decode_loop(checkpoint, self.cache_length, target, mesh)
        shared: dict[str, DeviceBuffer] = {}
        self._kv = {
            spec.name: NPUBuffer.zeros(spec.shape, self.device, spec.storage, spec.alloc_shape)
            for spec in self.decode_program.input_specs
            if spec.name.startswith(("k_", "v_"))
        }
        history, self._look = self.device.backend.allocate_visible((self.cache_length,), "int32")

        def stepper(
            program: "CompiledProgram", kept: "dict[str, DeviceBuffer]", report: Callable[[int, int], None] | None
        ) -> Step:
            weights = load_weights(state, program, self.device, cache=shared, progress=report, rank=rank)
            return Step(program, Executor(program, self.device), weights, kept, self.device)

        def sampling_step() -> Step:
            program = compile_sampling_loop(checkpoint, self.cache_length, target, mesh)
            return stepper(program, {**self._kv, "history": history}, None)

        def prefill_step(size: int) -> Step:
            program = self.prefill_programs[size] = compile_prefill(checkpoint, size, self.cache_length, target, mesh)
            return stepper(program, self._kv, None)

        self.prefill_programs: dict[int, CompiledProgram] = {}
        self._prefill_steps: dict[int, Step] = {}
        self._make_prefill_step = prefill_step
        decode_step = stepper(self.decode_program, {**self._kv, "history": history}, progress)
        self._decode_step = self._led(DECODE, lambda: decode_step)
        self._make_sampling_step = sampling_step
        self._chunks = tuple(size for size in CHUNKS if size <= self.cache_length)
        self._made = {size for size in self._chunks if has_prefill(checkpoint, size, self.cache_length, target, mesh)}
        if self._fixed_chunk is not None and self._fixed_chunk > 1 and rank == 0:  # which tells the others
            self._prefill_step(self._fixed_chunk)
        self._user: object = None
        self.tokens: list[int] = []

    def prepare(self, sampler: Sampler, prompt_tokens: int = USUAL_PROMPT) -> None:
        """Compile now what generating with this sampler needs; otherwise the first generation does.

        Args:
            prompt_tokens: The length of the first prompt.
        """
        self._self_feeding_step(sampler)
        self._prepare_prefill(min(prompt_tokens, self.cache_length))

    def _prepare_prefill(self, count: int) -> None:
        """Compile what prefilling that many tokens needs and no earlier prompt needed."""
        for size in dict.fromkeys(self._sizes(count)):
            if size > 1:
                self._prefill_step(size)

    def _sizes(self, count: int) -> list[int]:
        """The tokens of each run that prefills `count` tokens: a decode step for 1, else a prefill program's size."""
        if self._fixed_chunk is not None:
            whole, rest = divmod(count, self._fixed_chunk)
            return whole * [self._fixed_chunk] + ([1] if rest == 1 else [self._fixed_chunk] if rest else [])
        run = GPU_RUN if self.device.backend.runs_ahead > 1 else CPU_RUN
        return divide(count, self._made, self._chunks, run)

    def _prefill_step(self, size: int) -> Step:
        if size not in self._prefill_steps:
            if size not in self._made and self._fixed_chunk is None:
                _log.info("compiling prefill for %d tokens at a time; later starts find it in the cache", size)
            self._prefill_steps[size] = self._led(size, lambda: self._make_prefill_step(size))
            self._made.add(size)
        return self._prefill_steps[size]

    def _self_feeding_step(self, sampler: Sampler) -> "Step | None":
        """The decode step that chooses the token on the device as the sampler does; None if the host must choose."""
        if self.repetition_penalty != 1:
            return None
        if sampler is greedy:
            return self._decode_step
        return self._sampling_step if isinstance(sampler, Drawing) and self.device.backend.runs_ahead > 1 else None

    @cached_property
    def _sampling_step(self) -> "Step":
        return self._led(SAMPLING, self._make_sampling_step)

    def named_step(self, which: StepName) -> Step:
        """A step by its name, made if need be: how a process of a group finds what it is told to run."""
        if which == DECODE:
            return self._decode_step
        return self._sampling_step if which == SAMPLING else self._prefill_step(cast(int, which))

    def _led(self, which: StepName, make: Callable[[], Step]) -> Step:
        """The step that `make` makes, on all devices of the group."""
        if self.group is None:
            return make()
        from npu_sim.llm.ranks import LedStep

        return LedStep(self.group, which, make)

    def close(self) -> None:
        """End the processes that this model started for other devices, if any; it cannot be used afterwards."""
        if self.group is not None:
            self.group.close()

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the vocabulary."""
        return int(self.checkpoint.config.vocab_size)

    def eos_ids(self) -> frozenset[int]:
        """End-of-sequence token ids: those of the checkpoint."""
        return self.checkpoint.end_ids()

    def reset(self) -> None:
        """Start an empty sequence. Rows that remain in the cache are overwritten before anything attends to them."""
        self._user, self.tokens = None, []

    def prefill(self, token_ids: Sequence[int]) -> Logits:
        """Append tokens to the sequence, in as few and as small runs as fit them.

        Returns:
            The logits [vocab] for the token after the last one, in float32.

        Raises:
            InputError: there are no tokens, more than fit in the cache, or an id is outside the vocabulary.
        """
        ids = self._checked_prompt(token_ids, len(self.tokens))
        *_, logits = self._prefill_runs(ids)
        return logits

    def _prefill_runs(self, ids: NDArray[np.int64]) -> Iterator[Logits]:
        """`prefill` one run at a time: the logits after each."""
        for size in self._sizes(len(ids)):
            piece, ids = ids[:size], ids[size:]
            yield self.decode(int(piece[0])) if size == 1 else self._prefill_chunk(piece, size)

    def _checked_prompt(self, token_ids: Sequence[int], start: int) -> NDArray[np.int64]:
        """The ids as an array: to check them one by one in Python takes long, and the device idles meanwhile."""
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
        size = self.vocab_size  # looked up once: transformers' configs take a microsecond each time
        for token in ids:
            if not 0 <= token < size:
                raise InputError(f"token id {token} is outside the vocabulary, 0 to {size - 1}")

    def _prefill_chunk(self, piece: NDArray[np.int64], size: int) -> Logits:
        """Run the prefill program for `size` tokens on that many or fewer, padded.

        The padding writes keys and values beyond the end of the sequence. No query reads them: each attends to rows up
        to its own position only, and the token that later gets a padded position writes its row before attending to it.

        Where a run would extend beyond the end of the cache, it starts earlier and recomputes the rows of tokens that
        are already in the cache.
        """
        start = min(len(self.tokens), self.cache_length - size)
        known = np.concatenate((np.array(self.tokens[start:], np.int64), piece))
        step = self._prefill_step(size)
        self._user = None
        step.fill("input_ids", known[None])
        step.fill("positions", np.arange(start, start + size))
        step.fill("last", np.array([len(known) - 1]))
        step.run()
        self.tokens += piece.tolist()
        return step.logits()

    def decode(self, token: int) -> Logits:
        """Append one token and return the logits [vocab] for the next one, in float32.

        Raises:
            InputError: the cache is full, or the id is outside the vocabulary.
        """
        if len(self.tokens) >= self.cache_length:
            raise InputError(f"the cache is full: it holds {self.cache_length} tokens")
        self._check_ids(token)
        self._user = None
        self._decode_step.write(token=[token], position=[len(self.tokens)])
        self._decode_step.run()
        self.tokens.append(int(token))
        return self._decode_step.logits()

    def follow(self, token: int, steps: int, sampler: Sampler = greedy) -> Iterator[int]:
        """Continue the sequence with `token` and yield up to `steps` tokens that the sampler chooses.

        The iteration ends early when the cache is full. A yielded token is appended to the sequence when the next one
        is requested.

        Raises:
            InputError: the token is outside the vocabulary.
            NPUError: the logits are not finite.
        """
        self._check_ids(token)
        step = self._self_feeding_step(sampler)
        if step is None:
            return self._follow(token, steps, sampler)
        return self._follow_on_device(step, token, steps, sampler if isinstance(sampler, Drawing) else None)

    def _follow(self, token: int, steps: int, sampler: Sampler) -> Iterator[int]:
        for _ in range(steps):
            if len(self.tokens) == self.cache_length:
                return
            token = self._chosen(self.decode(token), sampler)
            yield token

    def _chosen(self, logits: Logits, sampler: Sampler) -> int:
        """The token that the sampler chooses after the sequence in the cache."""
        return sampler(penalized(logits, self.tokens, self.repetition_penalty))

    def _follow_on_device(self, step: "Step", token: int, steps: int, drawing: Drawing | None = None) -> Iterator[int]:
        """`_follow` with a step that chooses the token on the device.

        Several steps are launched before the host reads the first one's token, so the device never waits for the host.
        The random numbers for sampling are written before the first step.

        Steps launched beyond the last requested token have written rows beyond the end of the sequence, which no query
        reads (see `_prefill_chunk`). If other calls have used the cache since the last token, the steps are launched
        again.
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
            if self.group is not None:
                self.group.check()
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
        """Generate tokens that continue a prompt; they are computed as the result is iterated over.

        The longest prefix that the prompt shares with the sequence in the cache is not computed again, so each turn of
        a conversation costs only its new tokens.

        Args:
            max_new_tokens: Maximum number of new tokens. Default: until the cache is full.
            sampler: Chooses each token. `greedy` and the results of `make_sampler` run on the device if it can run
                ahead of the host; any other function is called with the logits [vocab] of every step.
            stop: Token ids that end the generation and are not returned. Default: `eos_ids()`.

        Raises:
            InputError: the prompt is empty, longer than the cache, or has an id outside the vocabulary; or
                max_new_tokens is negative.
        """
        ids = self._checked_prompt(prompt_ids, 0)
        if max_new_tokens is not None and max_new_tokens < 0:
            raise InputError(f"max_new_tokens must be at least 0, not {max_new_tokens}")
        return Generation(self, ids, max_new_tokens, sampler, self.eos_ids() if stop is None else stop)

    def rewind(self, ids: Sequence[int]) -> int:
        """Truncate the sequence to its longest common prefix with `ids` and return the length of that.

        At least the last of `ids` is left out, so that there is a token to compute logits from.
        """
        common = 0
        while common < min(len(self.tokens), len(ids) - 1) and self.tokens[common] == ids[common]:
            common += 1
        self._user = None
        del self.tokens[common:]
        return common


class Generation(Iterator[int]):
    """The token ids of one generation, computed as they are iterated over; `stats` and `spans` are complete at the end.

    Attributes:
        spans: What took how long, for a trace: the prefill and its runs, the decoding and its tokens.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompt: NDArray[np.int64],
        max_new_tokens: int | None,
        sampler: Sampler,
        stop: frozenset[int],
    ) -> None:
        self.stats = GenerationStats(prompt_tokens=len(prompt))
        self.spans: list[Span] = []
        self._clock = model.device.backend.clock
        self._tokens = self._run(model, prompt, max_new_tokens, sampler, stop)

    def __next__(self) -> int:
        return next(self._tokens)

    def _run(
        self, model: LanguageModel, prompt: NDArray[np.int64], limit: int | None, sampler: Sampler, stop: frozenset[int]
    ) -> Iterator[int]:
        stats, clock = self.stats, self._clock
        stats.reused_tokens = model.rewind(prompt.tolist())
        model._prepare_prefill(len(prompt) - stats.reused_tokens)
        logits = self._prefill(model, prompt[stats.reused_tokens :])
        if limit == 0:
            stats.finish_reason = "length"
            return
        start = clock()
        first = model._chosen(logits, sampler)
        stats.decode_seconds += self._took("choose the first token", start)
        stats.first_token_seconds = stats.prefill_seconds + stats.decode_seconds
        following = model.follow(first, model.cache_length if limit is None else limit - 1, sampler)
        token: int | None = first
        while token is not None:
            if token in stop:
                stats.finish_reason = "stop"
                return
            stats.new_tokens += 1
            yield token
            start = clock()
            token = next(following, None)
            seconds = clock() - start
            stats.decode_seconds += seconds
            if token is not None:
                stats.decode_steps += 1
                stats.token_seconds.append(seconds)
                self._took(f"token {stats.new_tokens + 1}", start, position=len(model.tokens))
        stats.finish_reason = "length"

    def _prefill(self, model: LanguageModel, ids: NDArray[np.int64]) -> Logits:
        start = before = self._clock()
        known = len(model.tokens)
        for result in model._prefill_runs(ids):
            logits = result
            self._took(f"prefill {len(model.tokens) - known} tokens", before, position=known)
            before, known = self._clock(), len(model.tokens)
        self.stats.prefill_seconds = self._took("prefill", start, tokens=len(ids))
        return logits

    def _took(self, what: str, start: float, **args: int) -> float:
        """Seconds since the start, which become a span."""
        end = self._clock()
        self.spans.append(Span(what, start, end, args))
        return end - start


def _lengths(checkpoint: Checkpoint, cache_length: int | None, chunk: int) -> tuple[int, int]:
    """(chunk, cache length), the latter a multiple of the former. Raises InputError if they do not fit the model."""
    trained = getattr(checkpoint.config, "max_position_embeddings", None) or DEFAULT_CACHE_LENGTH
    length = min(DEFAULT_CACHE_LENGTH, trained) if cache_length is None else cache_length
    if length < 1 or chunk < 1:
        raise InputError(f"cache length and chunk must be at least 1, not {length} and {chunk}")
    if length > trained:
        raise InputError(
            f"a cache of {length} tokens exceeds the context length that {checkpoint.name} was trained for, {trained}"
        )
    window = attention_window(checkpoint.config.to_dict())
    chunk = min(chunk, length)
    length = -(-length // chunk) * chunk
    if window and length > window:
        raise InputError(
            f"{checkpoint.name} uses a sliding attention window of {window} tokens; choose a cache no longer than that "
            "(--cache-length, or --context-length of a server)"
        )
    return chunk, length


def cache_capacity(checkpoint: Checkpoint, cache_length: int | None = None) -> int:
    """The tokens that the KV cache of a `LanguageModel` with these arguments holds.

    Raises:
        InputError: the length does not fit the model.
    """
    return _lengths(checkpoint, cache_length, DEFAULT_CHUNK)[1]
