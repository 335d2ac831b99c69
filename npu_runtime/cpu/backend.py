"""`CPUBackend`: any CPU as a device.

Kernels are native if there is one, else PyTorch's, else the reference in NumPy.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.graph.dtypes import numpy_dtype
from npu_compiler.installing import install_command
from npu_compiler.ops.quantized import is_quantized
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import numel
from npu_compiler.target_config import METAL_GPU, OP_LEVEL, TargetConfig
from npu_runtime.backend import Backend, DeviceBuffer, Launch, Operand, Shape
from npu_runtime.buffer import reporting_shortage
from npu_runtime.collectives import Share
from npu_runtime.cpu.arrays import HUGE_PAGE, host_memory, huge_pages
from npu_runtime.cpu.batch_pieces import run_in_pieces
from npu_runtime.cpu.bound_call import ArrayCall, BoundCall, Candidate
from npu_runtime.cpu.ceilings import measured_ceilings
from npu_runtime.cpu.channels_last import channels_last
from npu_runtime.cpu.exchange import COLLECTIVE_KERNELS, collective_launch
from npu_runtime.cpu.kernels import bound_reference
from npu_runtime.cpu.levels import forced_level
from npu_runtime.cpu.native import NativeLaunch, NativeSequence, failure_reason
from npu_runtime.cpu.native import available as native_available
from npu_runtime.cpu.native.bindings import layout as native_layout
from npu_runtime.cpu.native.bindings import pointers
from npu_runtime.cpu.native.build import is_compiling, yield_to_programs
from npu_runtime.cpu.native.candidates import native_candidates
from npu_runtime.cpu.native.threads import usable_threads
from npu_runtime.cpu.placed_parts import place_parts
from npu_runtime.cpu.residuals import write_over_residuals
from npu_runtime.cpu.torch_candidates import torch_candidates
from npu_runtime.cpu.tuning import ChoiceTable, Tuner, default_launch, machine
from npu_runtime.hardware import Ceilings
from npu_runtime.pieces import in_pieces
from npu_runtime.pytorch import find_torch, torch_threads, torch_version

if TYPE_CHECKING:
    import torch

_PIECE = 4 * 2**20  # bytes

_log = logging.getLogger(__name__)


class CPUBuffer(DeviceBuffer):
    """Memory in a NumPy array; `native_handle` is the flat array with the elements of `alloc_shape`."""

    native_handle: np.ndarray

    def _download(self) -> np.ndarray:
        return self.native_handle.reshape(self.alloc_shape).copy()

    def _upload(self, data: np.ndarray) -> None:
        _copy_bytes(self.native_handle.view(np.uint8), np.ascontiguousarray(data).reshape(-1).view(np.uint8))

    def _clone(self) -> CPUBuffer:
        handle = self.native_handle
        clone = host_memory(handle.size, handle.dtype)
        _copy_bytes(clone.view(np.uint8), handle.view(np.uint8))
        return CPUBuffer(self.shape, self.alloc_shape, self.dtype, clone)

    def _copy_from(self, other: DeviceBuffer) -> None:
        _copy_bytes(self.native_handle.view(np.uint8), other.native_handle.view(np.uint8))

    def _clear(self) -> None:
        self.native_handle.view(np.uint8).fill(0)

    def array(self) -> np.ndarray:
        """The data as an array of `shape` that shares this memory."""
        whole = self.native_handle.reshape(self.alloc_shape)
        return whole[tuple(slice(size) for size in self.shape)]

    def tensor(self) -> torch.Tensor:
        """The data as a torch tensor of `shape` that shares this memory."""
        from npu_runtime.torch_arrays import view_tensor

        return view_tensor(self.array())

    def __dlpack__(self, **kwargs: Any) -> Any:
        """A DLPack capsule, by torch if it is installed, as NumPy does not support bfloat16.

        Raises:
            BufferError: torch is not installed, and the buffer holds bfloat16.
        """
        self.check_current()
        if find_torch() is not None:
            return self.tensor().__dlpack__(**kwargs)
        if self.dtype == "bfloat16":
            raise BufferError(f"NumPy exchanges no bfloat16 through DLPack; PyTorch does: {install_command('torch')}")
        return self.array().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self.native_handle.__dlpack_device__()


def _build_kernels() -> None:
    with contextlib.suppress(Exception):  # which whoever asks for the kernels meets again
        native_available()


class CPUBackend(Backend):
    """A backend that runs op-level programs on the CPU.

    Args:
        native: Use native kernels if they exist; None means unless `NPU_SIM_NATIVE=0`. Without them PyTorch's optimized
            kernels run on float32 copies of the weights, or NumPy if PyTorch is not installed.
        tune: Choose between native and PyTorch's kernels by measuring them; None means unless `NPU_SIM_TUNE=0`.
        pytorch: Use PyTorch's kernels if it is installed.
    """

    config: TargetConfig = OP_LEVEL
    runs_targets = (OP_LEVEL.name, METAL_GPU.name)
    joins_groups = True

    def __init__(self, native: bool | None = None, tune: bool | None = None, pytorch: bool = True) -> None:
        self._wants_native = os.environ.get("NPU_SIM_NATIVE", "1") != "0" if native is None else native
        self.tune = os.environ.get("NPU_SIM_TUNE", "1") != "0" if tune is None else tune
        self._wants_pytorch = pytorch
        self._starts_early = False
        self._read_early: list[DeviceBuffer] = []  # constants that may hold layouts that native kernels do not need
        # The first process on a machine compiles the native kernels; it can trace and compile a model meanwhile.
        self._builder = threading.Thread(target=_build_kernels, daemon=True)
        if self._wants_native:
            forced_level()  # which may be none that can be had
            self._builder.start()

    @property
    def native(self) -> bool:
        """Whether native kernels are wanted and available; except within `early_start`, waits for their compilation."""
        return self._wants_native and not self._is_early and native_available()

    @property
    def _is_early(self) -> bool:
        """Whether programs run on other kernels because the native ones are being compiled."""
        if not self._starts_early:
            return False
        while self._builder.is_alive() and not is_compiling():
            self._builder.join(0.01)  # a library is being looked for or loaded
        return self._builder.is_alive()

    @property
    def kernels_version(self) -> int:
        return 0 if self._is_early else 1

    @contextlib.contextmanager
    def early_start(self) -> Iterator[None]:
        self._starts_early = True
        yield_to_programs()
        try:
            yield
        finally:
            self._starts_early = False

    @functools.cached_property
    def pytorch(self) -> bool:
        """Whether PyTorch is installed and wanted; it is imported when a call is prepared on one of its kernels."""
        return self._wants_pytorch and torch_version() is not None

    @functools.cached_property
    def choices(self) -> ChoiceTable:
        """The table of choices that were measured on this machine."""
        return ChoiceTable(machine(self.native))

    @functools.cached_property
    def _tuner(self) -> Tuner:
        return Tuner(self.choices)

    @property
    def device(self) -> str:
        threads, library = (torch_threads(), "torch") if self.pytorch else (usable_threads(), "NumPy")
        return f"CPU, {threads} threads, {'native and ' * self.native}{library} kernels"

    @property
    def ceilings(self) -> Ceilings:
        """The peak bandwidth and rate of this CPU, measured at the first use, in some tenths of a second."""
        return measured_ceilings()

    def allocate(self, shape: Shape, dtype: str, alloc_shape: Shape | None = None) -> CPUBuffer:
        memory = alloc_shape if alloc_shape is not None else shape
        return CPUBuffer(shape, alloc_shape, dtype, host_memory(numel(memory), numpy_dtype(dtype)))

    def allocate_arena(self, size: int) -> DeviceBuffer:
        if size < HUGE_PAGE:
            return self.allocate_zeros((size,), "uint8")
        with reporting_shortage("uint8", (size,)):
            return CPUBuffer((size,), None, "uint8", huge_pages(size))

    def compile(self, calls: Iterable[KernelCall], sources: Mapping[str, str] = MappingProxyType({})) -> None:
        """Wait for the native kernels, so that no run has to."""
        _ = self.native

    def laid_out(self, plan: ExecutionPlan) -> ExecutionPlan:
        if self._is_early or not self.native:
            return plan
        alignment = self.config.buffer_alignment
        plan = place_parts(channels_last(plan, native_layout().has_pairs), alignment)
        return write_over_residuals(run_in_pieces(plan, usable_threads(), alignment), alignment)

    def prepare(self, call: KernelCall, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> Launch:
        early = self._is_early
        native = not early and self.native
        if early:
            self._read_early += [operand.memory for operand in inputs if operand.is_constant]
            _say_what_runs(self.pytorch)
        else:
            while self._read_early:
                self._read_early.pop().prepared.clear()
            if self._wants_native and not native:
                _warn_of_missing_kernels(self.pytorch)
        bound = BoundCall(call, [bind(x) for x in inputs], [bind(x) for x in outputs], inputs)
        if call.kernel in COLLECTIVE_KERNELS:
            return collective_launch(bound, self.collectives)
        implementations = candidates(bound, native, self.pytorch)
        choose = self._tuner.launch if self.tune and not early else default_launch
        launch = choose(bound, implementations)
        if isinstance(launch, NativeLaunch):
            launch.origin = f", for kernel '{call.kernel}' (node '{call.node}')"
        return launch or fallback(bound, native, self.pytorch)

    def join(self, rank: int, size: int, share: Share) -> None:
        from npu_runtime.cpu.gloo import GlooCollectives

        self.collectives = GlooCollectives(rank, size, share)

    @property
    def makes_trials(self) -> bool:
        return self.tune

    @contextlib.contextmanager
    def without_trials(self) -> Iterator[None]:
        """Context in which the table of choices is read, but no trials add to it."""
        if self._is_early:  # there are none, and the table will be another one
            yield
            return
        allowed = self._tuner.seconds_left
        try:
            self._tuner.seconds_left = 0.0
            yield
        finally:
            self._tuner.seconds_left = allowed

    def mover(self, launches: Sequence[tuple[Launch, int]], buffer: DeviceBuffer) -> Callable[[int], None] | None:
        """A function that makes native launches use other memory in place of `buffer`.

        None if other launches use it too.
        """
        address = buffer.native_handle.ctypes.data
        fields = []
        for launch, operands in launches:
            addresses = pointers(launch.args, address, buffer.size_bytes) if isinstance(launch, NativeLaunch) else []
            if len(addresses) != operands:
                return None
            fields += addresses

        def move(to: int) -> None:
            for field, offset in fields:
                field.value = to + offset

        return move

    def sequence(self, launches: Sequence[Launch], plan: ExecutionPlan) -> Launch:
        """One function that runs all launches; native launches that follow each other become one foreign call."""
        steps: list[Launch] = []
        run: list[NativeLaunch] = []
        for launch in (*launches, None):
            if isinstance(launch, NativeLaunch):
                run.append(launch)
                continue
            if run:
                steps.append(NativeSequence(run) if len(run) > 1 else run[0])
                run = []
            if launch is not None:
                steps.append(launch)
        fixed = tuple(steps)

        def execute() -> None:
            for step in fixed:
                step()

        return execute


def candidates(call: ArrayCall, native: bool, pytorch: bool = True) -> list[Candidate]:
    """The implementations of a call besides its `fallback`, the default first; possibly none.

    Args:
        native: Whether to include native kernels.
        pytorch: Whether to include PyTorch's.
    """
    possible = native_candidates(call) if native else []
    if pytorch and not (possible and is_quantized(call.call)):  # which PyTorch's kernels would widen
        possible += torch_candidates(call, native)
    return possible


@functools.cache
def _say_what_runs(pytorch: bool) -> None:
    """Log, once in a process, that a program runs before the native kernels are there."""
    _log.info("until they are compiled, %s's kernels run, which are slower", "PyTorch" if pytorch else "NumPy")


@functools.cache
def _warn_of_missing_kernels(pytorch: bool) -> None:
    """Warn that there are no native kernels, once in a process, before a program runs.

    Args:
        pytorch: Whether PyTorch's kernels run instead; otherwise NumPy's do, which are far slower.
    """
    reason = (failure_reason() or "no reason given").splitlines()[0]
    library = "PyTorch" if pytorch else "NumPy"
    warnings.warn(
        f"the native CPU kernels are not built ({reason}); {library}'s kernels run on float32 copies of the "
        "weights instead. With a C++ compiler (such as g++, or another in $CXX), 16-bit weights take half that memory "
        "and are read as they are, so language models answer faster",
        stacklevel=3,
    )


def _copy_bytes(target: np.ndarray, source: np.ndarray) -> None:
    def copy(piece: slice) -> None:
        target[piece] = source[piece]

    in_pieces(copy, target.size, _PIECE)


def bind(operand: Operand) -> np.ndarray:
    """The operand's view as an array over its buffer's memory."""
    view, dtype = operand.view, numpy_dtype(operand.view.dtype)
    size = dtype.itemsize
    strides = [step * size for step in view.strides]
    memory = operand.memory.native_handle.view(np.uint8)
    return np.ndarray(view.shape, dtype, memory, operand.byte_offset + view.offset * size, strides)


def fallback(call: ArrayCall, among_native: bool, pytorch: bool) -> Launch:
    """The launch of a call that no candidate handles: PyTorch's kernel if it has a faster one, else the reference.

    A call without inputs, which fills its output, is the reference's.

    Args:
        among_native: Whether native kernels run before and after it.
        pytorch: Whether to use torch.

    Raises:
        DeviceError: there is no kernel of that name.
    """
    launch = None
    if pytorch and call.inputs and find_torch() is not None:
        from npu_runtime.cpu.torch_kernels import torch_launch

        launch = torch_launch(call, among_native)
    return launch or bound_reference(call)
