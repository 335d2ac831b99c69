"""The interface of a device for executors: memory and prepared kernels."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from npu_compiler.errors import DeviceError
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.target import CodegenTarget, OpLevelTarget
from npu_compiler.program.views import View
from npu_compiler.target_config import TargetConfig
from npu_runtime.buffer import DeviceBuffer, DeviceMemory
from npu_runtime.collectives import Collectives, Share
from npu_runtime.forks import call_lock

if TYPE_CHECKING:
    from npu_compiler.compiled_program import CompiledProgram

Launch: TypeAlias = Callable[[], None]


@dataclass(frozen=True)
class Operand:
    """A view of a kernel call, bound to memory.

    Attributes:
        byte_offset: Start of the buffer in `memory`; the view's own offset is added to it.
        is_constant: Whether the content stays the same from run to run (weights, and values computed from them alone).
    """

    memory: DeviceBuffer
    view: View
    byte_offset: int
    is_constant: bool


@dataclass(frozen=True)
class Ceilings:
    """The peak bandwidth and rates of a device, for rooflines.

    Attributes:
        bandwidth: Bytes per second from and to its memory; None if it is unknown.
        flops: Floating-point operations per second, by the dtype of the operands, as far as they are known.
    """

    bandwidth: float | None = None
    flops: Mapping[str, float] = field(default_factory=dict)

    def least_seconds(self, call: KernelCall) -> tuple[float, str] | None:
        """The least time that a call can take and what limits it, "memory" or "compute"; None if nothing is known.

        That is the roofline of Williams, Waterman and Patterson (doi.org/10.1145/1498765.1498785) with each byte
        counted once, so data that caches hold can be faster.
        """
        limits = []
        if self.bandwidth and call.bytes_moved:
            limits.append((call.bytes_moved / self.bandwidth, "memory"))
        dtypes = [view.dtype for view in (*call.inputs, *call.outputs) if view.dtype in self.flops]
        if dtypes and call.flops:
            limits.append((call.flops / self.flops[dtypes[0]], "compute"))
        return max(limits, default=None)


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Activity of one part of a device during a kernel.

    Attributes:
        part: Name of the part, such as "multiprocessor 3".
        start: Nanoseconds since the kernel's beginning.
        duration: Nanoseconds.
    """

    part: str
    name: str
    start: float
    duration: float


class Hardware(DeviceMemory, ABC):
    """A device without its executor, in the form that executors use; `Backend` adds the executor.

    Attributes:
        lock: Held by the thread that binds and launches a program, so that runs do not mix.
        collectives: The group that the device has joined, for programs that are divided among several devices; None if
            it has joined none.
        simulated_seconds: Time of all runs so far on the device that this one simulates; None if it simulates none.
    """

    lock: AbstractContextManager[bool]
    collectives: Collectives | None = None
    simulated_seconds: float | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        self.lock = call_lock(self)
        return self

    config: TargetConfig
    runs_in_flight = 1
    """Number of runs to launch before reading the first one's result; 1 if launching a run also completes it."""

    first_runs = 0
    """Number of first runs of a program that take longer than all later ones, since they prepare it."""

    joins_groups = False
    """Whether the device exchanges tensors with others, so that a model can be divided among them."""

    @property
    def runs_targets(self) -> tuple[str, ...]:
        """Names of the targets whose programs this device runs."""
        return (self.config.name,)

    @property
    @abstractmethod
    def device(self) -> str:
        """A text that describes the device."""

    @property
    def target(self) -> CodegenTarget:
        """The code generation target of programs for this device; by default the op-level target."""
        return OpLevelTarget()

    def compile(self, calls: Iterable[KernelCall], sources: Mapping[str, str] = MappingProxyType({})) -> None:
        """Do all work for calls that does not depend on their memory, such as compiling; executors call this once.

        Args:
            sources: The program's source texts by the name that calls give as their `source`, if the target generates
                kernels.
        """

    def laid_out(self, plan: ExecutionPlan) -> ExecutionPlan:
        """The plan with the views of its arena's buffers in the layouts that are the fastest on this device.

        Executors call this once, after `compile`. Buffers keep their sizes; the arena's may have other places, or
        none if nothing touches them.
        """
        return plan

    @property
    def kernels_version(self) -> int:
        """A number that changes when better kernels become available, for which calls should be prepared again."""
        return 0

    def early_start(self) -> AbstractContextManager[object]:
        """Context in which programs may run on slower kernels while better ones are being compiled.

        Afterwards `compile` waits for them again.
        """
        return nullcontext()

    def prepare(self, call: KernelCall, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> Launch:
        """Do all work for a call on fixed memory that can be done ahead of time; the result launches the call.

        A device whose `create_executor` returns an executor of its own does not need it.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no prepare(), which makes a kernel call ready to run")

    def join(self, rank: int, size: int, share: Share) -> None:
        """Join a group of devices, one per process, that run a program together; all ranks of the group call this.

        Raises:
            DeviceError: the device exchanges nothing with others (see `joins_groups`), or they cannot be reached.
        """
        raise DeviceError(f"{self.device} cannot share a model with other devices")

    def sequence(self, launches: Sequence[Launch], plan: ExecutionPlan) -> Launch:
        """One function that runs the launches of a plan's calls in order; a device may batch them.

        The caller may add launches of its own before and after them.
        """
        fixed = tuple(launches)

        def run() -> None:
            for launch in fixed:
                launch()

        return run

    @property
    def makes_trials(self) -> bool:
        """Whether alternatives are timed to choose the fastest; not if `NPU_SIM_TUNE=0`."""
        return os.environ.get("NPU_SIM_TUNE", "1") != "0"

    def without_trials(self) -> AbstractContextManager[object]:
        """Context in which launches are prepared without timing trials. The caller holds the lock."""
        return nullcontext()

    def mover(self, launches: Sequence[tuple[Launch, int]], buffer: DeviceBuffer) -> Callable[[int], None] | None:
        """A function that makes prepared launches use memory at another address in place of a buffer.

        Args:
            launches: All launches that touch the buffer, each with the number of its operands there.

        Returns:
            The function; None if the device cannot do that.
        """
        return None

    def marker(self) -> Callable[[], None]:
        """A function that waits until everything launched before this call has finished."""
        return self.synchronize

    def synchronize(self) -> None:
        """Wait until everything launched has finished."""

    def clock(self) -> float:
        """Seconds since some moment, by the wall clock or by the clock of the device that this one simulates."""
        return time.perf_counter()

    def ran(self, program: CompiledProgram) -> None:
        """Notification that an executor has launched a run of this program; the lock is held."""

    def waited(self, seconds: float) -> None:
        """Notification that a plan spent this time outside the device, for a simulated clock."""

    def timed(self, launch: Launch) -> float:
        """Run one launch to its end; returns the seconds it took, by the device's own clock if it has one."""
        start = time.perf_counter()
        launch()
        self.synchronize()
        return time.perf_counter() - start

    @property
    def ceilings(self) -> Ceilings:
        """The peak bandwidth and rates of the device; by default unknown."""
        return Ceilings()

    def phases(self, call: KernelCall, memory: Mapping[str, DeviceBuffer]) -> Sequence[PhaseTime]:
        """Activity of the device's parts in the latest launch of a call; empty unless its program records that.

        Args:
            memory: Buffer name → memory, for the call's operands.
        """
        return ()


_BEST: list[Callable[[], Hardware]] = []


def offer_best_hardware(find: Callable[[], Hardware]) -> None:
    """Set the function that `best_hardware` calls.

    It breaks a circle of imports: devices import executors, which ask for the best device.
    """
    _BEST[:] = [find]


def best_hardware() -> Hardware:
    """The best device on this machine."""
    return _BEST[0]()
