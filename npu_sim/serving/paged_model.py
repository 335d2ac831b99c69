"""`PagedModel`: a compiled language model on a device that computes batches of sequences over a paged KV cache."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import InputError
from npu_sim.llm.checkpoint import Checkpoint
from npu_sim.llm.compiled_model import CompiledModel, Report
from npu_sim.llm.context import cache_capacity, trained_length
from npu_sim.llm.engine.batch import Batch, StepResult
from npu_sim.llm.graph import PagedShape, compile_copy_rows, compile_paged, layer_states, state_form
from npu_sim.llm.sampling import choose_by
from npu_sim.llm.state import is_recurrent, lane_bytes, read_window, row_bytes
from npu_sim.llm.step_program import ProgramName, StepProgram
from npu_sim.parallel.group import LocalWorker, StartWorker
from npu_sim.serving.batch_check import check_batch, check_pairs
from npu_sim.serving.recurrent_runs import PIECES, check_lanes, divide_step

if TYPE_CHECKING:
    from npu_compiler import CompiledProgram
    from npu_runtime import Device, DeviceBuffer

MAX_TOKENS = 512
MAX_OUTPUTS = 128
# A chunk of a prompt has few outputs, and each row of logits costs as much as a fifth of a small model's layers.
FEW_OUTPUTS = 16
KEPT_STEPS = 8  # steps whose chosen tokens stay on the device
COPIED_BLOCKS = 8  # by one run of the program that copies blocks
COPIED_ROWS = 2**14  # of the pool by a step, where attention cannot read them in place: limits its sequences
COPY = "copy"  # the name of that program
DEFAULT_SEQUENCES = 8  # whole contexts in a pool of default size


class PagedModel(CompiledModel):
    """A language model with a pool of KV blocks. Each sequence of a batch has blocks of its own, and may share some.

    A step runs the program for the next power of two of its number of tokens, padded. Programs are compiled, or read
    from the cache, by `prepare` or when a step first needs them; all share the weights and the pool. Padding tokens
    write to a spare block at the end of the pool. Tokens are chosen on the device; on devices that do not run ahead of
    the host, the host chooses those with a temperature above 0, since sorting all logits on the device would take
    longer.

    If the model has recurrent states, a step is several runs (see `recurrent_runs`), and each sequence has a lane,
    which is memory for its states; padding has a spare lane.

    See `BatchModel` for the attributes. One thread at a time may use a model.

    Attributes:
        block_bytes: Memory of a block, over all layers.
        lane_bytes: Memory of a sequence's recurrent states, over all layers.
    """

    def __init__(  # noqa: PLR0913 -- an argument is a user's option
        self,
        checkpoint: Checkpoint,
        *,
        device: "Device | str | None" = None,
        block_size: int = 16,
        blocks: int | None = None,
        context_length: int | None = None,
        max_tokens: int = MAX_TOKENS,
        max_sequences: int = MAX_OUTPUTS,
        progress: Report | None = None,
        tensor_parallel: int = 1,
        rank: int = 0,
        start_worker: StartWorker = LocalWorker,
    ) -> None:
        """Compile the program for one token, or find it in the cache, upload the weights and allocate the pool.

        Args:
            device: A device or its name. None: the best one on this machine.
            block_size: Tokens per block.
            blocks: Blocks in the pool. None: as many as eight sequences of the maximum length need.
            context_length: Maximum number of tokens of a sequence. None: 2048, or the model's maximum context length if
                that is less.
            max_tokens: Maximum number of tokens of a step, at most 512.
            max_sequences: Maximum number of sequences of a step, and of its outputs, at most 128.
            progress: Called with (weights loaded, total weights). None: not called.
            tensor_parallel: Divide the model among this many devices, as in `CompiledModel`.
            rank: Number of this process in the group: 0 for the leading process.
            start_worker: Starts the other processes.

        Raises:
            InputError: a size does not fit the model, or the model cannot be compiled, or not be divided among so many
                devices.
            WeightError: the checkpoint does not fit its own config.
            DeviceError: the device is unknown, cannot be used, or is out of memory.
        """
        _check_options(checkpoint, block_size, blocks, max_tokens, max_sequences)
        self.context_length = _context_length(checkpoint, context_length)
        self.block_size, self.max_tokens, self.max_sequences = block_size, max_tokens, max_sequences
        per_sequence = -(-self.context_length // block_size)
        form, states = state_form(checkpoint), layer_states(checkpoint)
        self.rewinds = not is_recurrent(states)
        _check_adapters(checkpoint, tensor_parallel, self.rewinds)
        if not form.takes_sequences:
            max_sequences = self.max_sequences = 1
        if not form.is_paged:
            max_sequences = self.max_sequences = min(max_sequences, max(1, COPIED_ROWS // (per_sequence * block_size)))
        self.max_outputs = min(max_tokens, max_sequences)
        self.blocks = DEFAULT_SEQUENCES * per_sequence if blocks is None else blocks
        settings = {
            "block_size": block_size,
            "blocks": self.blocks,
            "context_length": self.context_length,
            "max_tokens": max_tokens,
            "max_sequences": max_sequences,
        }
        group = {"tensor_parallel": tensor_parallel, "rank": rank}
        super().__init__(checkpoint, device, settings, **group, start_worker=start_worker)
        self.runs_ahead = int(self.device.backend.runs_in_flight > 1)
        self.shares_prefixes = all(state.kind.shares_prefixes for state in states)
        self.read_window = read_window(states)
        self.block_bytes = block_size * row_bytes(states, checkpoint.dtype)
        self.lane_bytes = lane_bytes(states, checkpoint.dtype)
        self._pieces = PIECES if form.takes_pieces else ()
        lanes = 0 if self.rewinds else max_sequences + 1
        history = KEPT_STEPS * self.max_outputs + 1
        self._smallest = PagedShape(1, 1, 1, per_sequence, self.blocks + 1, block_size, history, lanes)
        self._places = _history_places(self.max_outputs)
        self._launched = 0
        self._kept: list[_BatchResult | None] = [None] * KEPT_STEPS
        self._begin((self._smallest, False), history, progress)

    def compile(self, name: ProgramName) -> "CompiledProgram":
        target = self.device.backend.target
        if name == COPY:
            rows, ranks = self._smallest.blocks * self.block_size, self._mesh.ranks if self._mesh else 1
            return compile_copy_rows(self.checkpoint, COPIED_BLOCKS * self.block_size, rows, target, ranks)
        shape, sampling = cast(tuple[PagedShape, bool], name)
        return compile_paged(self.checkpoint, shape, target, self._mesh, sampling=sampling)

    def _shared_inputs(self, name: ProgramName, program: "CompiledProgram") -> "dict[str, DeviceBuffer]":
        if name != COPY:
            return super()._shared_inputs(name, program)
        pools = [buffer for name, buffer in self.state.items() if name != "history"]
        inputs = [spec.name for spec in program.input_specs if spec.name not in ("source", "target")]
        return dict(zip(inputs, pools, strict=True))

    def prepare(self, tokens: int, outputs: int, *, sampling: bool = False) -> None:
        """Compile now the program for a step of that many tokens and outputs, not at the first such step.

        The first runs of a program may still be slow; see `warm_up`.

        Args:
            sampling: Whether some output has a temperature above 0.
        """
        sequences = min(tokens, outputs)
        shape = self._shape_for(tokens, outputs) if self.rewinds else self._shape_of(sequences, 1, outputs)
        self.program((shape, bool(sampling and self.runs_ahead)))
        for size in () if self.rewinds else self._pieces:
            if size <= tokens:
                self.program((self._shape_of(1, size, 0), False))

    def warm_up(self) -> None:
        """Run all prepared programs with padding only, until they are as fast as they will be."""
        place, empty = self._launched % KEPT_STEPS, np.zeros((0,) if self.rewinds else (0, 1), np.int32)
        if (next_overwritten := self._kept[place]) is not None:
            next_overwritten.tokens()
        for name, program in self._programs.items():
            for _ in range(self.device.backend.first_runs if name != COPY else 0):
                for x in ("tokens", "positions", "sequences", *(["adapters"] if self.checkpoint.adapters else [])):
                    program.fill(x, empty)
                program.fill("outputs", empty.reshape(-1))
                program.fill("slots", empty, rest=self.blocks * self.block_size)
                if not self.rewinds:
                    program.fill("lanes", empty.reshape(-1), rest=self.max_sequences)
                program.fill("places", self._places[place][: cast(tuple[PagedShape, bool], name)[0].outputs])
                program.run()

    def prepare_copies(self) -> StepProgram:
        """Compile now the program of `copy_blocks`, not at the first copy, and return it."""
        return self.program(COPY)

    def _shape_for(self, tokens: int, outputs: int) -> PagedShape:
        """The sizes of the smallest program that holds a step with so many tokens and outputs."""
        size = _power_of_two(tokens)
        most = min(size, _power_of_two(self.max_outputs))
        rows = FEW_OUTPUTS if outputs <= FEW_OUTPUTS < most else most
        return replace(self._smallest, tokens=size, outputs=rows, sequences=min(size, self.max_sequences))

    def _shape_of(self, sequences: int, each: int, outputs: int) -> PagedShape:
        """The sizes of the smallest program that holds a run of `sequences` sequences with `each` tokens each."""
        size = _power_of_two(sequences)
        rows = self._shape_for(size, outputs).outputs if each == 1 else 1
        return replace(self._smallest, tokens=size * each, outputs=rows, sequences=size)

    def piece(self, start: int, end: int) -> tuple[int, int]:
        """The tokens (first, last + 1) of a prompt that the next step computes: all that are left, of any number."""
        return start, end

    def step(self, batch: Batch) -> StepResult:
        """Launch one step without waiting for it, and return the result, which is read later.

        The next step may be launched before that.

        Raises:
            InputError: the batch exceeds the model's limits or refers to blocks outside the pool.
        """
        last = self._kept[(self._launched - 1) % KEPT_STEPS]
        check_batch(batch, self, 0 if last is None else last.count)
        tokens = batch.tokens
        if last is not None and (tokens < 0).any():
            tokens = np.where(tokens < 0, last.stand_in(-1 - tokens), tokens)
        place = self._launched % KEPT_STEPS
        if (old := self._kept[place]) is not None:
            old.tokens()  # its place in the history is about to be overwritten
        runs = [replace(batch, tokens=tokens)]
        if not self.rewinds:
            check_lanes(batch, self.max_sequences)
            runs = [*divide_step(runs[0], self._pieces)]
        program = [self._run(run, place) for run in runs][-1]
        result = _BatchResult(self, program, place * self.max_outputs, len(batch.outputs))
        if not self.runs_ahead and (batch.settings[:, 0] > 0).any():
            result.choose(batch)
        self._kept[place] = result
        self._launched += 1
        return result

    def _run(self, batch: Batch, place: int) -> StepProgram:
        """Launch the program of the smallest size that holds a batch, without waiting for it; return that program.

        Args:
            batch: The tokens of a step, or of one of its runs if the model has recurrent states.
            place: Number of the step among the `KEPT_STEPS` in the history, which is where its chosen tokens go.
        """
        sequences, tables = batch.sequences, batch.tables
        if self.rewinds:
            shape = self._shape_for(len(batch.tokens), len(batch.outputs))
        else:
            count, each = batch.tokens.shape
            shape = self._shape_of(count, each, len(batch.outputs))
        if len(tables) > shape.sequences:
            used, order = np.unique(sequences, return_inverse=True)
            sequences, tables = order.astype(np.int32), tables[used]
        samples = self.runs_ahead > 0 and bool((batch.settings[:, 0] > 0).any())
        program = self.program((shape, samples))
        spare = self.blocks * self.block_size
        blocks = tables[sequences, batch.positions // self.block_size]
        program.fill("tokens", batch.tokens)
        program.fill("positions", batch.positions)
        program.fill("sequences", sequences)
        program.fill("slots", blocks * self.block_size + batch.positions % self.block_size, rest=spare)
        # Nothing is read of what else is there: blocks of earlier steps.
        program.fill("tables", tables[:, : shape.blocks_per_sequence], rest=None)
        program.fill("outputs", batch.outputs)
        program.fill("places", self._places[place][: shape.outputs])
        if (chosen := self._adapters_of(batch)) is not None:
            program.fill("adapters", chosen, rest=-1)
        if batch.lanes is not None and not self.rewinds:
            program.fill("lanes", batch.lanes, rest=self.max_sequences)
        if samples:
            program.fill("settings", batch.settings)
            program.fill("uniforms", batch.uniforms)
        program.run()
        return program

    def _adapters_of(self, batch: Batch) -> NDArray[np.int32] | None:
        """The index of each token's adapter, [N], -1 for none; None if the model has no adapters.

        Raises:
            InputError: an index is not that of an adapter.
        """
        chosen, count = batch.adapters, len(self.checkpoint.adapters)
        if chosen is not None and chosen.size and not -1 <= chosen.min() <= chosen.max() < count:
            raise InputError(f"the batch's adapters must be from -1 to {count - 1}")
        if not count:
            return None
        places = np.full(len(batch.tables), -1, np.int32) if chosen is None else chosen
        return places[batch.sequences]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, each (from, to), in all layers, after the steps launched so far.

        Raises:
            InputError: a block is outside the pool, or is copied to twice, or both from and to.
        """
        check_pairs(pairs, self.blocks)
        if not pairs:
            return
        copier = self.prepare_copies()
        for start in range(0, len(pairs), COPIED_BLOCKS):
            blocks = np.full((COPIED_BLOCKS, 2), self.blocks)
            blocks[: len(pairs[start : start + COPIED_BLOCKS])] = pairs[start : start + COPIED_BLOCKS]
            moved = blocks[:, None] * self.block_size + np.arange(self.block_size)[:, None]
            copier.write(source=moved[..., 0].reshape(-1), target=moved[..., 1].reshape(-1))
            copier.run()


class _BatchResult:
    """The tokens that a step chose and its logits, which are lost at the next step.

    The tokens lie in the model's history from index `first` on.
    """

    on_host = False

    def __init__(self, model: PagedModel, program: StepProgram, first: int, count: int) -> None:
        self.count = count
        self._model, self._first = model, first
        self._marker = model.device.backend.marker()
        self._read_logits = program.reader()
        self._tokens: NDArray[np.int32] | None = None
        self._host_chose = False

    def tokens(self) -> NDArray[np.int32]:
        """The chosen token of each output, [R]; -1 where its logits are not finite."""
        if self._tokens is None:
            self._model.wait_for(self._marker)
            self._tokens = np.array(self._model._look()[self._first : self._first + self.count])
        return self._tokens

    def logits(self) -> NDArray[np.float32]:
        """The logits [R, vocab] of the outputs; to be read before the next step is launched.

        Raises:
            DeviceError: a later step has overwritten the logits.
        """
        return self._read_logits().reshape(-1, self._model.vocab_size)[: self.count]

    def choose(self, batch: Batch) -> None:
        """Choose, on the host, the tokens of those outputs that have a temperature above 0."""
        rows = np.flatnonzero(batch.settings[:, 0] > 0)
        tokens, logits = self.tokens().copy(), self.logits()
        tokens[rows] = choose_by(logits[rows], batch.settings[rows], batch.uniforms[rows])
        self._tokens, self._host_chose = tokens, True

    def stand_in(self, outputs: NDArray[np.int32]) -> NDArray[np.int32]:
        """Input tokens for the next step's program that stand for these outputs of this step.

        They are the tokens themselves if the host chose them, else references to their indices in the history.
        """
        outputs = np.maximum(outputs, 0).astype(np.int32)
        if self._host_chose:
            return np.maximum(self.tokens(), 0)[np.minimum(outputs, self.count - 1)]
        return -1 - self._first - outputs


def _power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def _context_length(checkpoint: Checkpoint, requested: int | None) -> int:
    """Maximum number of tokens of a sequence: as requested, or (None) the default.

    Raises InputError if the model does not take as many.
    """
    capacity = cache_capacity(checkpoint, requested)
    trained = trained_length(checkpoint.config) or capacity
    return min(capacity, trained) if requested is None else requested


def _history_places(outputs: int) -> NDArray[np.int32]:
    """The index in the history of each output's token, [kept steps, outputs]; padding has a spare index."""
    columns = np.arange(_power_of_two(outputs), dtype=np.int32)
    places = np.arange(KEPT_STEPS, dtype=np.int32)[:, None] * outputs + columns
    return np.where(columns < outputs, places, KEPT_STEPS * outputs).astype(np.int32)


def _check_adapters(checkpoint: Checkpoint, tensor_parallel: int, rewinds: bool) -> None:
    """Raise InputError for adapters that requests choose, if the model is divided or has recurrent states."""
    if checkpoint.adapters and tensor_parallel != 1:
        raise InputError(
            "adapters that requests choose are not divided among devices; merge one into the weights (--adapter "
            "DIR), or leave out --tensor-parallel"
        )
    if checkpoint.adapters and not rewinds:
        raise InputError(
            "adapters cannot be chosen by the request where a model has recurrent states; "
            "add one to the weights: --adapter DIR"
        )


def _check_options(
    checkpoint: Checkpoint, block_size: int, blocks: int | None, max_tokens: int, max_sequences: int
) -> None:
    """Raise InputError for a checkpoint whose KV cache cannot be paged, or for sizes that are out of range."""
    if checkpoint.kv_cache is not None:
        raise InputError(f"a paged KV cache in {checkpoint.kv_cache} is not supported; leave out --kv-cache")
    if block_size < 1:
        raise InputError(f"a block must hold at least 1 token, not {block_size}")
    if not 1 <= max_tokens <= MAX_TOKENS or not 1 <= max_sequences <= MAX_OUTPUTS:
        raise InputError(
            f"a step has 1 to {MAX_TOKENS} tokens and 1 to {MAX_OUTPUTS} sequences, not {max_tokens} and "
            f"{max_sequences}"
        )
    if blocks is not None and blocks < 1:
        raise InputError(f"the pool must have at least 1 block, not {blocks}")
