"""`CPUBackend`: any CPU as a device. Kernels mean what `kernels` says; native ones take over where they exist."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import numel
from npu_compiler.target_config import METAL_GPU, OP_LEVEL, TargetConfig
from npu_runtime.backend import Backend, DeviceBuffer, Launch, Operand, Shape
from npu_runtime.cpu.kernels import reference_launch
from npu_runtime.cpu.kernels.accelerated import native_candidates
from npu_runtime.cpu.kernels.bound_call import BoundCall, Candidate
from npu_runtime.cpu.kernels.prepacked import prepacked_candidates
from npu_runtime.cpu.levels import forced_level
from npu_runtime.cpu.native import NativeLaunch, NativeSequence, failure_reason
from npu_runtime.cpu.native import available as native_available
from npu_runtime.cpu.native.bindings import pointers
from npu_runtime.cpu.tuning import ChoiceTable, Tuner, default_launch, machine
from npu_runtime.pieces import in_pieces
from npu_runtime.torch_arrays import tensor_to_numpy

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "bool": torch.bool,
    "uint8": torch.uint8,
}
_PIECE = 4 * 2**20  # bytes
_SMALL = 2**18  # elements of all operands


class CPUBuffer(DeviceBuffer):
    """Memory in a torch tensor; `native_handle` is the flat tensor of `alloc_shape`'s elements."""

    native_handle: torch.Tensor

    def _download(self) -> np.ndarray:
        return tensor_to_numpy(self.native_handle).reshape(self.alloc_shape).copy()

    def _upload(self, data: np.ndarray) -> None:
        _copy_bytes(_bytes(self.native_handle), np.ascontiguousarray(data).reshape(-1).view(np.uint8))

    def _clone(self) -> CPUBuffer:
        return CPUBuffer(self.shape, self.alloc_shape, self.dtype, self.native_handle.clone())

    def _copy_from(self, other: DeviceBuffer) -> None:
        _copy_bytes(_bytes(self.native_handle), _bytes(other.native_handle))

    def _clear(self) -> None:
        _bytes(self.native_handle).fill(0)  # not by `Tensor.zero_`, for the reason that `_copy_bytes` gives

    def tensor(self) -> torch.Tensor:
        """The data as a torch tensor of `shape` that shares this memory."""
        whole = self.native_handle.reshape(self.alloc_shape)
        return whole[tuple(slice(size) for size in self.shape)]

    def __dlpack__(self, **kwargs: Any) -> Any:
        self.check_current()
        return self.tensor().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self.tensor().__dlpack_device__()


def _build_kernels() -> None:
    with contextlib.suppress(Exception):  # which whoever asks for the kernels meets again
        native_available()


class CPUBackend(Backend):
    """Runs the op-level program on the CPU.

    Args:
        native: Use the native kernels where they exist; by default unless `NPU_SIM_NATIVE=0`. Without them PyTorch's
            optimized kernels run on float32 copies of the weights.
        tune: Choose between native and PyTorch's kernels by measuring them; by default unless `NPU_SIM_TUNE=0`.
    """

    config: TargetConfig = OP_LEVEL
    runs_targets = (OP_LEVEL.name, METAL_GPU.name)

    def __init__(self, native: bool | None = None, tune: bool | None = None) -> None:
        self._wants_native = os.environ.get("NPU_SIM_NATIVE", "1") != "0" if native is None else native
        self.tune = os.environ.get("NPU_SIM_TUNE", "1") != "0" if tune is None else tune
        if self._wants_native:
            forced_level()  # which may be none that can be had
            # The first process on a machine compiles the native kernels; it can trace and compile a model meanwhile.
            threading.Thread(target=_build_kernels, daemon=True).start()

    @functools.cached_property
    def native(self) -> bool:
        """Whether there are native kernels and they are wanted; waits for their compilation."""
        return self._wants_native and native_available()

    @functools.cached_property
    def choices(self) -> ChoiceTable:
        """The table of what was measured on this machine."""
        return ChoiceTable(machine(self.native))

    @functools.cached_property
    def _tuner(self) -> Tuner:
        return Tuner(self.choices)

    @property
    def device(self) -> str:
        kernels = "native and torch kernels" if self.native else "torch kernels"
        return f"CPU, {torch.get_num_threads()} threads, {kernels}"

    def allocate(self, shape: Shape, dtype: str, alloc_shape: Shape | None = None) -> CPUBuffer:
        memory = alloc_shape if alloc_shape is not None else shape
        try:
            flat = torch.empty(numel(memory), dtype=TORCH_DTYPES[dtype])
        except RuntimeError as error:
            raise MemoryError(str(error)) from error
        return CPUBuffer(shape, alloc_shape, dtype, flat)

    def compile(self, calls: Iterable[KernelCall], sources: Mapping[str, str] = MappingProxyType({})) -> None:
        """Waits for the native kernels, so that no run does."""
        _ = self.native

    def prepare(self, call: KernelCall, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> Launch:
        sources, targets = [bind(x) for x in inputs], [bind(x) for x in outputs]
        if self._wants_native and not self.native:
            _warn_of_missing_kernels()
        bound = BoundCall(call, sources, targets, inputs)
        implementations = candidates(bound, self.native)
        choose = self._tuner.launch if self.tune else default_launch
        launch = choose(bound, implementations)
        if launch is not None:
            return launch
        reference = reference_launch(call, sources, targets)
        is_small = sum(x.numel() for x in (*sources, *targets)) <= _SMALL
        return _on_one_thread(reference) if self.native and is_small else reference

    def mover(self, launches: Sequence[tuple[Launch, int]], buffer: DeviceBuffer) -> Callable[[int], None] | None:
        """For native launches, whose argument blocks hold addresses."""
        address = buffer.native_handle.data_ptr()
        fields = []
        for launch, operands in launches:
            found = pointers(launch.args, address, buffer.size_bytes) if isinstance(launch, NativeLaunch) else []
            if len(found) != operands:
                return None
            fields += found

        def move(to: int) -> None:
            for field, offset in fields:
                field.value = to + offset

        return move

    def sequence(self, launches: Sequence[Launch]) -> Launch:
        """Runs of native launches become one foreign call each."""
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


def candidates(call: BoundCall, native: bool) -> list[Candidate]:
    """The implementations of a call besides the reference, the default first.

    Args:
        native: Whether native kernels are among them.
    """
    return [*(native_candidates(call) if native else ()), *prepacked_candidates(call)]


@functools.cache
def _warn_of_missing_kernels() -> None:
    """Once, however many backends there are, and only where something is about to run."""
    reason = (failure_reason() or "no reason given").splitlines()[0]
    warnings.warn(
        f"the native CPU kernels are not built ({reason}); PyTorch's kernels run on float32 copies of the "
        "weights instead. With a C++ compiler (such as g++, or another in $CXX), 16-bit weights take half that memory "
        "and are read as they are, so language models answer faster",
        stacklevel=3,
    )


def _bytes(flat: torch.Tensor) -> np.ndarray:
    array: np.ndarray = flat.view(torch.uint8).numpy()
    return array


def _on_one_thread(launch: Launch) -> Launch:
    """PyTorch's threads help little with a small call, and keep spinning beside the native kernels' for a while."""

    def run() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            launch()
        finally:
            torch.set_num_threads(threads)

    return run


def _copy_bytes(target: np.ndarray, source: np.ndarray) -> None:
    """Not by `Tensor.copy_`: its OpenMP threads keep spinning for a while and delay the native kernels that follow."""

    def copy(piece: slice) -> None:
        target[piece] = source[piece]

    in_pieces(copy, target.size, _PIECE)


def bind(operand: Operand) -> torch.Tensor:
    """The operand's view as a torch tensor over its buffer's memory."""
    view = operand.view
    flat: torch.Tensor = operand.memory.native_handle
    dtype = TORCH_DTYPES[view.dtype]
    if flat.dtype != dtype:
        flat = flat[operand.byte_offset :].view(torch.uint8)
        usable = flat.numel() // dtype.itemsize * dtype.itemsize
        flat = flat[:usable].view(dtype)
    return flat.as_strided(view.shape, view.strides, flat.storage_offset() + view.offset)
