"""`ContiguousModel`: a compiled language model whose pool is one block as long as the context, for one sequence."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import InputError
from npu_sim.llm.checkpoint import Checkpoint
from npu_sim.llm.compiled_model import CompiledModel, Report
from npu_sim.llm.context import context_length
from npu_sim.llm.engine.batch import Batch, StepResult
from npu_sim.llm.graph import compile_decode_loop, compile_prefill, has_prefill, layer_states, state_form
from npu_sim.llm.prefill_plan import CHUNKS, CPU_RUN, GPU_RUN, divide
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
    """A `BatchModel` for one sequence at a time, whose keys and values lie in one piece.

    A step is one token, or a piece of the prompt as `piece` divides it: 16, 128 or 512 tokens. A program for a size is
    compiled, or read from the cache, when the first prompt needs it, since tracing takes seconds; all of them share the
    weights and the state. On devices that run ahead of the host (GPUs), where compiling a program's kernels takes
    seconds more and a large run costs hardly more than a small one, the choice falls on few large sizes.

    A decode program's outputs are the inputs of the next one, so that steps behind each other need no upload.

    See `BatchModel` for the attributes.

    Attributes:
        chunks: Tokens per run of the prefill programs that may be compiled.
        end: Number of tokens of the sequence that the last step has left in the state.
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
        """Compile the decode program, or find it in the cache, and upload the weights; see `LanguageModel`."""
        self._fixed_chunk, length = context_length(checkpoint, cache_length, DEFAULT_CHUNK if chunk is None else chunk)
        self.context_length = self.block_size = self.max_tokens = length
        settings = {"cache_length": length, "chunk": chunk}
        super().__init__(checkpoint, device, settings, tensor_parallel=tensor_parallel, rank=rank)
        self.runs_ahead = self.device.backend.runs_in_flight - 1
        self.rewinds, self.end = not is_recurrent(layer_states(checkpoint)), 0
        self.chunks = tuple(size for size in CHUNKS if size <= length) if chunk is None else (self._fixed_chunk,)
        if not state_form(checkpoint).takes_pieces:
            self.chunks, self._fixed_chunk = (), 1
        self._has_fixed_chunk = chunk is not None
        self._last: _TokenResult | None = None
        self._begin(DECODE, length, progress)
        target = self.device.backend.target
        self._compiled = {x for x in self.chunks if has_prefill(checkpoint, x, length, target, self._mesh)}
        if self._has_fixed_chunk and self._fixed_chunk > 1 and rank == 0:  # which tells the others
            self.prefill_program(self._fixed_chunk)

    def compile(self, name: ProgramName) -> "CompiledProgram":
        length, target = self.context_length, self.device.backend.target
        if not isinstance(name, int):
            return compile_decode_loop(self.checkpoint, length, target, self._mesh, sampling=name == SAMPLING)
        return compile_prefill(self.checkpoint, name, length, target, self._mesh)

    def prepare(self, tokens: int, *, sampling: bool = False) -> None:
        """Compile now what a prompt of that many tokens needs, and a decode step; else the first such step does.

        Args:
            sampling: Whether the device samples the tokens.
        """
        self.program(SAMPLING if sampling else DECODE)
        for size in dict.fromkeys(self.sizes(min(tokens, self.context_length))):
            if size > 1:
                self.prefill_program(size)

    def prefill_program(self, size: int) -> StepProgram:
        """The program for `size` tokens of a prompt."""
        if size not in self._compiled and not self._has_fixed_chunk:
            _log.info("compiling prefill for %d tokens at a time; later starts find it in the cache", size)
        program = self.program(size)
        self._compiled.add(size)
        return program

    def sizes(self, count: int) -> list[int]:
        """Tokens of each run that prefills `count` tokens: 1 is a decode step, else it is a prefill program's size."""
        if self._has_fixed_chunk:
            whole, rest = divmod(count, self._fixed_chunk)
            singly = rest < 2 or not self.rewinds
            return whole * [self._fixed_chunk] + (rest * [1] if singly else [self._fixed_chunk])
        run = GPU_RUN if self.runs_ahead else CPU_RUN
        return divide(count, self._compiled, self.chunks, run, may_pad=self.rewinds)

    def piece(self, start: int, end: int) -> tuple[int, int]:
        """The next piece of a prompt whose tokens from `start` to `end` are not computed: where it starts and ends.

        Where a run would extend beyond the end of the cache, it starts earlier and recomputes rows that are there.
        """
        size = self.sizes(end - start)[0]
        return min(start, self.context_length - size), min(start + size, end)

    def step(self, batch: Batch) -> StepResult:
        """Launch one token of the sequence, or one piece of its prompt; see `BatchModel`."""
        result = self._decode(batch) if len(batch.tokens) == 1 else self._prefill(batch)
        self._last = result
        self.end = int(batch.positions[-1]) + 1
        return result

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, each (from, to): there is one only, so nothing can be copied."""
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
        return _TokenResult(self, program, batch, None if draws and not samples else position)

    def _prefill(self, batch: Batch) -> "_TokenResult":
        """Run the smallest prefill program that holds the batch, padded.

        The padding writes keys and values beyond the end of the sequence. No query reads them: each attends to rows up
        to its own position only, and the token that later gets a padded position writes its row before attending to it.
        """
        count, start = len(batch.tokens), int(batch.positions[0])
        sizes = self._compiled if any(size >= count for size in self._compiled) else self.chunks
        size = min(size for size in sizes if size >= count)
        program = self.prefill_program(size)
        program.fill("input_ids", batch.tokens[None])
        program.fill("positions", np.arange(start, start + size))
        program.fill("last", np.array([count - 1]))
        program.run()
        return _TokenResult(self, program, batch, None)


class _TokenResult:
    """The token that a step chose.

    Args:
        position: Index in the history of the token that a decode step chose. None: the host chooses from the logits.
    """

    def __init__(self, model: ContiguousModel, program: StepProgram, batch: Batch, position: int | None) -> None:
        self.on_host = position is None
        self._model, self._program, self._batch, self._position = model, program, batch, position
        self._marker = model.device.backend.marker()
        self._read_logits = program.reader()
        self._tokens: NDArray[np.int32] | None = None

    def leaves(self, token: int, program: StepProgram, position: int) -> bool:
        """Whether this step has left that token, for that position, in the inputs of that program."""
        return (
            program is self._program
            and self._position == position - 1
            and self._tokens is not None
            and self._tokens.tolist() == [token]
        )

    def tokens(self) -> NDArray[np.int32]:
        """[R]: the chosen token of each output, of which there is one or none; -1 where its logits are not finite."""
        if self._tokens is None:
            self._tokens = np.zeros(0, np.int32) if not len(self._batch.outputs) else self._chosen()
        return self._tokens

    def _chosen(self) -> NDArray[np.int32]:
        if self._position is None:
            return choose_by(self.logits(), self._batch.settings, self._batch.uniforms)
        self._model.wait_for(self._marker)
        return np.array(self._model._look()[self._position : self._position + 1])

    def logits(self) -> Logits:
        """[R, vocab]: the logits of each output; to be read before the next step is launched."""
        return self._read_logits()[None]
