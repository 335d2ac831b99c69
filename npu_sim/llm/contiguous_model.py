"""`ContiguousModel`: a compiled language model with a contiguous KV cache for one sequence."""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import InputError
from npu_sim.llm.checkpoint import Checkpoint
from npu_sim.llm.compiled_model import CompiledModel, Report
from npu_sim.llm.context import context_length
from npu_sim.llm.engine.batch import Batch, StepResult
from npu_sim.llm.graph import compile_decode_loop, compile_prompt, has_prompt, layer_states, state_form
from npu_sim.llm.prefill_plan import CPU_CHUNKS, CPU_RUN, GPU_CHUNKS, GPU_RUN, divide
from npu_sim.llm.sampling import Logits, choose_by
from npu_sim.llm.state import is_recurrent
from npu_sim.llm.step_program import ProgramName, StepProgram

if TYPE_CHECKING:
    from npu_compiler import CompiledProgram
    from npu_runtime import Device

DEFAULT_CHUNK = 128
DECODE, SAMPLING = "decode", "sampling"  # names of programs; that of a prefill program is its number of tokens

_log = logging.getLogger(__name__)


class ContiguousModel(CompiledModel):
    """A `BatchModel` for one sequence, whose pool is a single block as long as the context.

    A step is one token, or a piece of the prompt as `piece` divides it: `chunks` tokens. Since tracing takes
    seconds, the program for a size is compiled, or read from the cache, when a prompt first needs it; all programs
    share the weights and the state. On devices that run ahead of the host (GPUs), compiling a program's kernels takes
    seconds more and a large run costs hardly more than a small one, so that prompts are divided into few large pieces.

    The outputs of a decode step are the inputs of the next one, so that consecutive decode steps need no upload.

    See `BatchModel` for the attributes.

    Attributes:
        chunks: Sizes, in tokens per run, of the prefill programs that may be compiled.
        end: Number of tokens of the sequence whose keys and values are in the cache after the last step.
    """

    blocks = max_sequences = max_outputs = 1
    read_window = 0  # the one block is never released
    shares_prefixes = False  # the rows of a sequence are reused by their number: see `Scheduler.add`

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: "Device | str | None" = None,
        cache_length: int | None = None,
        chunk: int | None = None,
        progress: Report | None = None,
        tensor_parallel: int = 1,
        rank: int = 0,
    ) -> None:
        """Compile the decode program, or find it in the cache, and upload the weights.

        Arguments as in `LanguageModel`.
        """
        self._fixed_chunk, length = context_length(checkpoint, cache_length, DEFAULT_CHUNK if chunk is None else chunk)
        self.context_length = self.block_size = self.max_tokens = length
        settings = {"cache_length": length, "chunk": chunk}
        super().__init__(checkpoint, device, settings, tensor_parallel=tensor_parallel, rank=rank)
        self.runs_ahead = self.device.backend.runs_in_flight - 1
        self.rewinds, self.end = not is_recurrent(layer_states(checkpoint)), 0
        sizes = (GPU_CHUNKS if self.runs_ahead else CPU_CHUNKS) if chunk is None else (self._fixed_chunk,)
        self.chunks = tuple(size for size in sizes if size <= length)
        if not state_form(checkpoint).takes_pieces:
            self.chunks, self._fixed_chunk = (), 1
        self._has_fixed_chunk = chunk is not None
        self._last: _TokenResult | None = None
        self._divide = lru_cache(maxsize=64)(divide)  # asked thrice for each prompt
        self._begin(DECODE, length, progress)
        target = self.device.backend.target
        self._compiled = {x for x in self.chunks if has_prompt(checkpoint, x, length, target, self._mesh)}
        if self._has_fixed_chunk and self._fixed_chunk > 1 and rank == 0:  # which tells the others
            self.prefill_program(self._fixed_chunk)

    def compile(self, name: ProgramName) -> "CompiledProgram":
        length, target = self.context_length, self.device.backend.target
        if not isinstance(name, int):
            return compile_decode_loop(self.checkpoint, length, target, self._mesh, sampling=name == SAMPLING)
        return compile_prompt(self.checkpoint, name, length, target, self._mesh)

    def prepare(self, tokens: int, *, sampling: bool = False) -> None:
        """Compile now the programs that a prompt of `tokens` tokens and decoding need, not at the first step.

        Args:
            sampling: Whether the device samples the tokens.
        """
        self.program(SAMPLING if sampling else DECODE)
        for size in dict.fromkeys(self.sizes(min(tokens, self.context_length))):
            if size > 1:
                self.prefill_program(size)

    def prefill_program(self, size: int) -> StepProgram:
        """The program that computes `size` tokens of a prompt in a run."""
        if size not in self._compiled and not self._has_fixed_chunk:
            _log.info("compiling prefill for %d tokens at a time; later starts find it in the cache", size)
        program = self.program(size)
        self._compiled.add(size)
        return program

    def sizes(self, count: int) -> list[int]:
        """Sizes of the runs that prefill `count` tokens, in order: 1 means a decode step, else a prefill program."""
        if self._has_fixed_chunk:
            whole, rest = divmod(count, self._fixed_chunk)
            singly = rest < 2 or not self.rewinds
            return whole * [self._fixed_chunk] + (rest * [1] if singly else [self._fixed_chunk])
        run = GPU_RUN if self.runs_ahead else CPU_RUN
        return self._divide(count, frozenset(self._compiled), self.chunks, run, may_pad=self.rewinds)

    def piece(self, start: int, end: int) -> tuple[int, int]:
        """The next piece of a prompt of which the tokens `start` to `end` are left, as (first, last + 1).

        Where a prefill run would extend beyond the end of the cache, it begins earlier and computes some tokens again.
        """
        size = self.sizes(end - start)[0]
        return min(start, self.context_length - size), min(start + size, end)

    def step(self, batch: Batch) -> StepResult:
        """Launch one token of the sequence, or one piece of its prompt, and return its result; see `BatchModel`."""
        result = self._decode(batch) if len(batch.tokens) == 1 else self._prefill(batch)
        self._last = result
        self.end = int(batch.positions[-1]) + 1
        return result

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Raise InputError unless `pairs` is empty: the pool has a single block, so no copy is possible."""
        if pairs:
            raise InputError("a contiguous cache has one block")

    def _decode(self, batch: Batch) -> "_TokenResult":
        token, position = int(batch.tokens[0]), int(batch.positions[0])
        draws = len(batch.outputs) > 0 and bool(batch.settings[0, 0] > 0)
        samples = draws and self.runs_ahead > 0
        program = self.program(SAMPLING if samples else DECODE)
        last = self._last
        if token < 0 and last is not None and last.on_host:
            token = int(last.tokens()[0])
        # The program's last run has left its token and the next position on the device.
        follows = last is not None and last.leaves(token, program, position)
        if token >= 0 and not (follows and not samples):
            program.write(token=[token], position=[position])
            if samples:
                assert batch.upcoming is not None
                upcoming = batch.upcoming(self.context_length - position)
                program.write(settings=batch.settings[0], uniforms=np.pad(upcoming, (position, 0)))
        program.run()
        return _TokenResult(self, program, batch, None if draws and not samples else position, feeds=True)

    def _prefill(self, batch: Batch) -> "_TokenResult":
        """Run the smallest prefill program that holds the batch, padded.

        The padding writes keys and values beyond the end of the sequence. No query reads them: a query attends only to
        rows up to its own position, and a later token at such a position overwrites its row before attending to it.
        """
        count, start = len(batch.tokens), int(batch.positions[0])
        sizes = self._compiled if any(size >= count for size in self._compiled) else self.chunks
        size = min(size for size in sizes if size >= count)
        program = self.prefill_program(size)
        program.fill("input_ids", batch.tokens[None])
        program.fill("positions", np.arange(start, start + size))
        program.fill("last", np.array([count - 1]))
        program.run()
        draws = bool((batch.settings[:, 0] > 0).any())
        return _TokenResult(self, program, batch, None if draws else start + count - 1, feeds=False)


class _TokenResult:
    """The token that a step of a `ContiguousModel` chose, as a `StepResult`.

    Args:
        position: Index in the history of the token that the device chose. None: the host chooses from the logits.
        feeds: Whether the step has left the device's token as the next step's input. Otherwise the host has to write
            it there.
    """

    def __init__(
        self, model: ContiguousModel, program: StepProgram, batch: Batch, position: int | None, *, feeds: bool
    ) -> None:
        self.on_host = position is None or not feeds
        self._model, self._program, self._batch, self._position = model, program, batch, position
        self._marker = model.device.backend.marker()
        self._read_logits = program.reader()
        self._tokens: NDArray[np.int32] | None = None

    def leaves(self, token: int, program: StepProgram, position: int) -> bool:
        """Whether `program`'s inputs on the device already hold `token` and `position`, left by this step."""
        return (
            program is self._program
            and self._position == position - 1
            and self._tokens is not None
            and self._tokens.tolist() == [token]
        )

    def tokens(self) -> NDArray[np.int32]:
        """The chosen token, [R] for R outputs, of which there is one or none; -1 where its logits are not finite."""
        if self._tokens is None:
            self._tokens = np.zeros(0, np.int32) if not len(self._batch.outputs) else self._chosen()
        return self._tokens

    def _chosen(self) -> NDArray[np.int32]:
        if self._position is None:
            return choose_by(self.logits(), self._batch.settings, self._batch.uniforms)
        self._model.wait_for(self._marker)
        return np.array(self._model._look()[self._position : self._position + 1])

    def logits(self) -> Logits:
        """The logits [R, vocab] of the outputs; to be read before the next step is launched."""
        return self._read_logits()[None]
