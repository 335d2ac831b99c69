"""`PagedModel`: a compiled language model on a device that runs batches over a paged KV cache."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import InputError
from npu_compiler.graph.dtypes import itemsize
from npu_sim.llm.checkpoint import Checkpoint
from npu_sim.llm.generation_config import check_generation
from npu_sim.llm.graph import PagedShape, compile_copy_rows, compile_paged, kv_shape, state_with_buffers
from npu_sim.llm.sampling import choose
from npu_sim.llm.session import cache_capacity
from npu_sim.llm.step import Step, StepName
from npu_sim.parallel.group import LocalWorker, RankGroup, StartWorker
from npu_sim.serving.batch import Batch, StepResult
from npu_sim.serving.batch_check import check_batch, check_pairs

if TYPE_CHECKING:
    from npu_compiler import CompiledProgram
    from npu_runtime import Device, DeviceBuffer

MAX_TOKENS = 512
MAX_OUTPUTS = 128
# A chunk of a prompt has few outputs, and each row of logits costs as much as a fifth of a small model's layers.
FEW_OUTPUTS = 16
KEPT_STEPS = 8  # steps whose chosen tokens stay on the device
COPIED_BLOCKS = 8  # by one run of the program that copies blocks
COPY = "copy"  # the name of that step
DEFAULT_SEQUENCES = 8  # whole contexts in a pool of default size


class PagedModel:
    """A language model with one pool of KV blocks, of which each sequence of a batch has its own or shares some.

    A step runs the program for the next power of two of its number of tokens, padded. Programs are compiled, or read
    from the cache, when the first step needs them or by `prepare`; all share the weights and the pool. Padding tokens
    write to a spare block at the end of the pool. Tokens are chosen on the device; only where launching a step also
    completes it does the host choose those with a temperature above 0, since sorting all logits takes longer there.

    See `BatchModel` for the attributes. One thread at a time may use a model.

    Attributes:
        block_bytes: Memory of a block over all layers.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: "Device | str | None" = None,
        block_size: int = 16,
        blocks: int | None = None,
        context_length: int | None = None,
        max_tokens: int = MAX_TOKENS,
        max_sequences: int = MAX_OUTPUTS,
        progress: Callable[[int, int], None] | None = None,
        tensor_parallel: int = 1,
        rank: int = 0,
        start_worker: StartWorker = LocalWorker,
    ) -> None:
        """Compile the program for one token, or find it in the cache, upload the weights and allocate the pool.

        Args:
            device: A device or its name. Default: the best one on this machine.
            block_size: Tokens per block.
            blocks: Blocks in the pool. Default: those of eight sequences of the maximum length.
            context_length: Maximum number of tokens of a sequence. Default: 2048, or the model's maximum context length
                if that is less.
            max_tokens: Maximum number of tokens of a step, at most 512.
            max_sequences: Maximum number of sequences of a step, and of its outputs, at most 128.
            progress: Called with (weights loaded, total weights).
            tensor_parallel: Divide the model among this many devices, as in `LanguageModel`.
            rank: Of a process that was started so.
            start_worker: Starts the other processes.

        Raises:
            InputError: a size does not fit the model, or the model cannot be compiled, or not be divided so.
            WeightError: the checkpoint does not fit its own config.
            DeviceError: the device is unknown, cannot be used, or is out of memory.
        """
        from npu_runtime import Device, Executor, NPUBuffer, load_weights
        from npu_runtime.program_run import Arena

        if checkpoint.kv_cache is not None:
            raise InputError(f"a paged KV cache in {checkpoint.kv_cache} is not supported; leave out --kv-cache")
        check_generation(checkpoint)
        capacity = cache_capacity(checkpoint, context_length)
        trained = getattr(checkpoint.config, "max_position_embeddings", None) or capacity
        self.context_length = min(capacity, trained) if context_length is None else context_length
        self.block_size, self.max_tokens, self.max_sequences = block_size, max_tokens, max_sequences
        self.max_outputs = min(max_tokens, max_sequences)
        if block_size < 1:
            raise InputError(f"a block must hold at least 1 token, not {block_size}")
        if not 1 <= max_tokens <= MAX_TOKENS or not 1 <= max_sequences <= MAX_OUTPUTS:
            raise InputError(
                f"a step has 1 to {MAX_TOKENS} tokens and 1 to {MAX_OUTPUTS} sequences, not {max_tokens} and "
                f"{max_sequences}"
            )
        per_sequence = -(-self.context_length // block_size)
        self.blocks = DEFAULT_SEQUENCES * per_sequence if blocks is None else blocks
        if self.blocks < 1:
            raise InputError(f"the pool must have at least 1 block, not {self.blocks}")
        self.vocab_size = int(checkpoint.config.vocab_size)
        self.checkpoint = checkpoint
        self.device = device if isinstance(device, Device) else Device(device) if device else Device()
        backend = self.device.backend
        self.runs_ahead = backend.runs_ahead > 1
        _, heads, _, width = kv_shape(checkpoint.config, 1)
        layers = checkpoint.config.num_hidden_layers
        self.block_bytes = 2 * layers * block_size * heads * width * itemsize(checkpoint.dtype)
        self._shape = PagedShape(
            1, 1, 1, per_sequence, self.blocks + 1, block_size, history=KEPT_STEPS * self.max_outputs
        )
        self._history, self._look = backend.allocate_visible((self._shape.history,), "int32")
        columns = np.minimum(np.arange(_power_of_two(self.max_outputs), dtype=np.int32), self.max_outputs - 1)
        self._places = np.arange(KEPT_STEPS, dtype=np.int32)[:, None] * self.max_outputs + columns  # in the history
        self._launched = 0
        self._kept: list[_Result | None] = [None] * KEPT_STEPS
        self.group: RankGroup | None = None
        mesh = None
        if tensor_parallel != 1:
            from npu_compiler.graph.mesh import Mesh
            from npu_sim.llm.ranks import start_group

            if rank == 0:
                settings = {
                    "block_size": block_size,
                    "blocks": self.blocks,
                    "context_length": self.context_length,
                    "max_tokens": max_tokens,
                    "max_sequences": max_sequences,
                }
                self.group = start_group(checkpoint, self.device, tensor_parallel, type(self), settings, start_worker)
            mesh = Mesh(tensor_parallel)
        self._mesh = mesh
        state, arena = state_with_buffers(checkpoint), Arena(backend)
        shared: dict[str, DeviceBuffer] = {}
        self._pools: dict[str, DeviceBuffer] = {}

        def stepper(
            program: "CompiledProgram", kept: "dict[str, DeviceBuffer]", report: Callable[[int, int], None] | None
        ) -> Step:
            weights = load_weights(state, program, self.device, cache=shared, progress=report, rank=rank)
            return Step(program, Executor(program, self.device, arena=arena), weights, kept, self.device)

        self._make_step = stepper
        self._steps: dict[tuple[PagedShape, bool], Step] = {}
        first = compile_paged(checkpoint, self._shape, backend.target, mesh)
        for spec in first.input_specs:
            if spec.name.startswith(("k_", "v_")):
                self._pools[spec.name] = NPUBuffer.zeros(spec.shape, self.device, spec.storage, spec.alloc_shape)
        smallest = stepper(first, {**self._pools, "history": self._history}, progress)
        self._steps[self._shape, False] = self._led((self._shape, False), lambda: smallest)
        self._copier: Step | None = None

    def close(self) -> None:
        """End the processes that this model started for other devices, if any; it cannot be used afterwards."""
        if self.group is not None:
            self.group.close()

    def check(self) -> None:
        """Raise the reason (`NPUError`) if a process of this model's group is lost."""
        if self.group is not None:
            self.group.check()

    def named_step(self, which: StepName) -> Step:
        """A step by its name, made if need be: how a process of a group finds what it is told to run."""
        if which == COPY:
            return self.prepare_copies()
        return self._step(*cast(tuple[PagedShape, bool], which))

    def _led(self, which: StepName, make: Callable[[], Step]) -> Step:
        """The step that `make` makes, on all devices of the group."""
        if self.group is None:
            return make()
        from npu_sim.llm.ranks import LedStep

        return LedStep(self.group, which, make)

    def prepare(self, tokens: int, outputs: int, *, sampling: bool = False) -> None:
        """Compile now what a step of that many tokens and outputs needs; otherwise the first such step does.

        The first runs of a program may still be slow; see `warm_up`.

        Args:
            sampling: Whether some output has a temperature above 0.
        """
        self._step(self._shape_for(tokens, outputs), sampling and self.runs_ahead)

    def warm_up(self) -> None:
        """Run all steps that were prepared on padding alone, until they are as fast as they will be."""
        place, empty = self._launched % KEPT_STEPS, np.zeros(0, np.int32)
        if (next_overwritten := self._kept[place]) is not None:
            next_overwritten.tokens()
        for (shape, _), step in self._steps.items():
            for _ in range(self.device.backend.first_runs):
                for name in ("tokens", "positions", "sequences", "outputs"):
                    step.fill(name, empty)
                step.fill("slots", empty, rest=self.blocks * self.block_size)
                step.fill("places", self._places[place][: shape.outputs])
                step.run()

    def prepare_copies(self) -> Step:
        """Compile now what `copy_blocks` needs, and return it; otherwise the first copy does."""
        if self._copier is None:
            self._copier = self._led(COPY, self._made_copier)
        return self._copier

    def _shape_for(self, tokens: int, outputs: int) -> PagedShape:
        """The sizes of the smallest program that holds a step."""
        size = _power_of_two(tokens)
        most = min(size, _power_of_two(self.max_outputs))
        rows = FEW_OUTPUTS if outputs <= FEW_OUTPUTS < most else most
        sequences = min(size, self.max_sequences)
        fixed = self._shape
        return PagedShape(
            size, rows, sequences, fixed.blocks_per_sequence, fixed.blocks, fixed.block_size, fixed.history
        )

    def _step(self, shape: PagedShape, sampling: bool) -> Step:
        key = shape, sampling
        if key not in self._steps:
            self._steps[key] = self._led(key, lambda: self._made_step(shape, sampling))
        return self._steps[key]

    def _made_step(self, shape: PagedShape, sampling: bool) -> Step:
        program = compile_paged(self.checkpoint, shape, self.device.backend.target, self._mesh, sampling=sampling)
        return self._make_step(program, {**self._pools, "history": self._history}, None)

    def _made_copier(self) -> Step:
        from npu_runtime import Executor

        rows, heads, _ = next(iter(self._pools.values())).shape
        moved = COPIED_BLOCKS * self.block_size
        program = compile_copy_rows(self.checkpoint, moved, rows, heads, self.device.backend.target)
        names = (spec.name for spec in program.input_specs if spec.name.startswith("pools_"))
        pools = dict(zip(names, self._pools.values(), strict=True))
        return Step(program, Executor(program, self.device), {}, pools, self.device)

    def step(self, batch: Batch) -> StepResult:
        """Run one step. It is launched, not waited for; the next step may be launched before this one's result is read.

        Raises:
            InputError: the batch exceeds the model's limits or refers to blocks outside the pool.
        """
        last = self._kept[(self._launched - 1) % KEPT_STEPS]
        check_batch(batch, self, 0 if last is None else last.count)
        tokens, sequences, tables = batch.tokens, batch.sequences, batch.tables
        if last is not None and (tokens < 0).any():
            tokens = np.where(tokens < 0, last.stand_in(-1 - tokens), tokens)
        shape = self._shape_for(len(tokens), len(batch.outputs))
        if len(tables) > shape.sequences:
            used, order = np.unique(sequences, return_inverse=True)
            sequences, tables = order.astype(np.int32), tables[used]
        drawing = bool((batch.settings[:, 0] > 0).any())
        step = self._step(shape, drawing and self.runs_ahead)
        place = self._launched % KEPT_STEPS
        if (old := self._kept[place]) is not None:
            old.tokens()  # its place in the history is about to be overwritten
        first = place * self.max_outputs
        spare = self.blocks * self.block_size
        blocks = tables[sequences, batch.positions // self.block_size]
        step.fill("tokens", tokens)
        step.fill("positions", batch.positions)
        step.fill("sequences", sequences)
        step.fill("slots", blocks * self.block_size + batch.positions % self.block_size, rest=spare)
        # Nothing is read of what else is there: blocks of earlier steps.
        step.fill("tables", tables[:, : shape.blocks_per_sequence], rest=None)
        step.fill("outputs", batch.outputs)
        step.fill("places", self._places[place][: shape.outputs])
        if drawing and self.runs_ahead:
            step.fill("settings", batch.settings)
            step.fill("uniforms", batch.uniforms)
        step.run()
        result = _Result(self, step, first, len(batch.outputs))
        if drawing and not self.runs_ahead:
            result.choose(batch)
        self._kept[place] = result
        self._launched += 1
        return result

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


class _Result:
    """The tokens that a step chose, in the model's history from `first` on, and its logits until the next step."""

    def __init__(self, model: PagedModel, step: Step, first: int, count: int) -> None:
        self.count = count
        self._model, self._step, self._first = model, step, first
        self._wait = model.device.backend.marker()
        self._read_logits = step.reader()
        self._tokens: NDArray[np.int32] | None = None
        self._on_host = False

    def tokens(self) -> NDArray[np.int32]:
        """[R]: the chosen token of each output; -1 where its logits are not finite."""
        if self._tokens is None:
            with self._model.group.together() if self._model.group else nullcontext():
                self._wait()
            self._tokens = np.array(self._model._look()[self._first : self._first + self.count])
        return self._tokens

    def logits(self) -> NDArray[np.float32]:
        """[R, vocab]: the logits of each output; to be read before the next step is launched.

        Raises:
            DeviceError: a later step has overwritten them.
        """
        return self._read_logits().reshape(-1, self._model.vocab_size)[: self.count]

    def choose(self, batch: Batch) -> None:
        """Choose the tokens of those outputs that have a temperature above 0."""
        tokens, logits = self.tokens().copy(), self.logits()
        for row in np.flatnonzero(batch.settings[:, 0] > 0):
            temperature, top_k, top_p = map(float, batch.settings[row])
            if np.isfinite(logits[row]).all():
                top = None if math.isinf(top_k) else int(top_k), None if top_p == 1 else top_p
                tokens[row] = choose(logits[row], float(batch.uniforms[row]), temperature, top_k=top[0], top_p=top[1])
        self._tokens, self._on_host = tokens, True

    def stand_in(self, outputs: NDArray[np.int32]) -> NDArray[np.int32]:
        """What the next step's program takes for the tokens of these outputs: themselves, or where they will be."""
        outputs = np.maximum(outputs, 0).astype(np.int32)
        if self._on_host:
            return np.maximum(self.tokens(), 0)[np.minimum(outputs, self.count - 1)]
        return -1 - self._first - outputs


def _power_of_two(count: int) -> int:
    """The smallest that is at least `count`."""
    return 1 << (count - 1).bit_length()
