"""What a device must offer: memory (`DeviceBuffer`) and prepared kernels (`Backend`). Everything else is shared."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import DeviceError
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.graph.model import TensorSpec
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.target import CodegenTarget, OpLevelTarget
from npu_compiler.program.views import View, numel
from npu_compiler.target_config import TargetConfig

if TYPE_CHECKING:
    from npu_runtime.executor import Executor

Launch: TypeAlias = Callable[[], None]
Shape: TypeAlias = tuple[int, ...]
Size3: TypeAlias = tuple[int, int, int]
BufferT = TypeVar("BufferT", bound="DeviceBuffer")


class DeviceBuffer(ABC):
    """Memory on a device, dense in `alloc_shape`; `shape` is the part that holds data.

    Attributes:
        dtype: Storage dtype name.
        native_handle: The device's own object; two buffers with the same handle are the same memory.
        prepared: The content in other layouts, for buffers that stay constant; filled in by the backend.
    """

    def __init__(self, shape: Shape, alloc_shape: Shape | None, dtype: str, native_handle: Any) -> None:
        self.shape = tuple(shape)
        self.alloc_shape = tuple(alloc_shape) if alloc_shape is not None else self.shape
        self.dtype = dtype
        self.native_handle = native_handle
        self.prepared: dict[Any, Any] = {}
        self._writes = [0]  # a list, so that all handles share it
        self._is_current: Callable[[], bool] | None = None

    @property
    def size_bytes(self) -> int:
        return numel(self.alloc_shape) * itemsize(self.dtype)

    def guarded(self: BufferT, is_current: Callable[[], bool]) -> BufferT:
        """A handle to the same memory that refuses to be read once `is_current()` is false."""
        handle = copy.copy(self)
        handle._is_current = is_current
        return handle

    def check_current(self) -> None:
        """Raise a `DeviceError` if a later run has overwritten what this handle stood for."""
        if self._is_current is not None and not self._is_current():
            raise DeviceError(
                "this output was overwritten by a later run(); read it, or copy() it, before running again"
            )

    def copy(self) -> DeviceBuffer:
        """A new buffer with the same content, which later runs leave alone."""
        self.check_current()
        return self._clone()

    def to_numpy(self, spec: TensorSpec | None = None) -> np.ndarray:
        """Download, without channel padding.

        Args:
            spec: If given, the result has the spec's (PyTorch) dtype; else the storage dtype.
        """
        from npu_runtime.buffer import unpack_array

        self.check_current()
        return unpack_array(self._download(), self.shape, spec)

    def write(self, data: np.ndarray, spec: TensorSpec | None = None) -> None:
        """Overwrite the content in place, with the checks, cast and padding of `NPUBuffer.from_numpy`."""
        from npu_runtime.buffer import pack_array

        spec = spec or TensorSpec("buffer", self.shape, self.dtype, self.dtype, self.alloc_shape)
        self._upload(pack_array(data, spec))
        self.prepared.clear()
        self._writes[0] += 1

    @property
    def version(self) -> int:
        """How often `write` has replaced the content, through whatever handle."""
        return self._writes[0]

    @abstractmethod
    def _download(self) -> np.ndarray:
        """The whole memory as an array of `alloc_shape` in the storage dtype."""

    @abstractmethod
    def _upload(self, data: np.ndarray) -> None:
        """Overwrite the whole memory from an array of `alloc_shape` in the storage dtype."""

    @abstractmethod
    def _clone(self) -> DeviceBuffer: ...


@dataclass(frozen=True)
class Operand:
    """A view of a kernel call, bound to memory.

    Attributes:
        byte_offset: Where the buffer starts in `memory`; the view's own offset comes on top.
        is_constant: Whether the content stays the same from run to run (weights and what is made of them).
    """

    memory: DeviceBuffer
    view: View
    byte_offset: int
    is_constant: bool


class DispatchStrategy(ABC):
    """Computes the grid of a kernel call, for devices that launch threadgroups (blocks, workgroups)."""

    @abstractmethod
    def compute_dispatch(self, call: KernelCall) -> tuple[Size3, Size3]:
        """(threadgroups, threads per threadgroup), each along x, y and z."""


class Backend(ABC):
    """A device. `prepare` is called once per kernel call and set of buffers; what it returns is called every run."""

    config: TargetConfig
    runs_ahead = 1
    """How many runs it pays to launch before the first one's result is looked at; 1 where a launch is all of a run."""

    @property
    def runs_targets(self) -> tuple[str, ...]:
        """Names of the targets whose programs this device runs."""
        return (self.config.name,)

    @property
    @abstractmethod
    def device(self) -> str:
        """What the device is, in words."""

    @property
    def target(self) -> CodegenTarget:
        """What to compile programs for this device with; by default the op-level target."""
        return OpLevelTarget()

    @abstractmethod
    def allocate_buffer(
        self, data: np.ndarray, alloc_shape: Shape | None = None, spec: TensorSpec | None = None
    ) -> DeviceBuffer:
        """Upload an array; with a spec, checked, cast and padded as it says."""

    def allocate_joined(self, parts: Sequence[np.ndarray], spec: TensorSpec) -> DeviceBuffer:
        """Upload arrays that follow each other along the first dimension of what the spec describes."""
        return self.allocate_buffer(parts[0] if len(parts) == 1 else np.concatenate(parts), spec=spec)

    @abstractmethod
    def allocate_zeros(self, shape: Shape, dtype: str, alloc_shape: Shape | None = None) -> DeviceBuffer:
        """A zero-filled buffer of a storage dtype."""

    def allocate_visible(self, shape: Shape, dtype: str) -> tuple[DeviceBuffer, Callable[[], np.ndarray]]:
        """A zero-filled buffer for small results, and a function by which the host looks at it at any time.

        Looking waits for nothing: what a run wrote is sure to be there once a `marker` of after it was waited for.
        """
        buffer = self.allocate_zeros(shape, dtype)
        return buffer, buffer.to_numpy

    def marker(self) -> Callable[[], None]:
        """A place in the order of what is launched; calling it waits until everything before has finished."""
        return self.synchronize

    def compile(  # noqa: B027  (a device may have nothing to compile)
        self, calls: Iterable[KernelCall], sources: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Do all that can be done for calls before their memory is known; an executor asks once, at init.

        Args:
            sources: The program's source texts by the name that calls give as their `source`, where the target
                generates kernels.
        """

    @abstractmethod
    def prepare(self, call: KernelCall, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> Launch:
        """Do all that can be done ahead of time for one call; the result launches it."""

    def sequence(self, launches: Sequence[Launch]) -> Launch:
        """One callable that runs the launches in order; a device may batch them."""
        fixed = tuple(launches)

        def run() -> None:
            for launch in fixed:
                launch()

        return run

    def synchronize(self) -> None:  # noqa: B027  (a device that runs at once has nothing to wait for)
        """Wait until everything launched has finished."""

    def timed(self, launch: Launch) -> float:
        """Run one launch to its end; returns the seconds it took, by the device's own clock if it has one."""
        start = time.perf_counter()
        launch()
        self.synchronize()
        return time.perf_counter() - start

    def create_executor(self, program: CompiledProgram) -> Executor:
        from npu_runtime.executor import Executor

        return Executor(program, self)

    def execute(
        self, program: CompiledProgram, inputs: Mapping[str, DeviceBuffer], weights: Mapping[str, DeviceBuffer]
    ) -> dict[str, DeviceBuffer]:
        """Run a program once; keep an `Executor` to run it again."""
        return self.create_executor(program).run(inputs, weights)
