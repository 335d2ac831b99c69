"""What a device offers to those who run programs on it: memory and prepared kernels."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self, TypeAlias

from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.target import CodegenTarget, OpLevelTarget
from npu_compiler.program.views import View
from npu_compiler.target_config import TargetConfig
from npu_runtime.buffer import DeviceBuffer, DeviceMemory

Launch: TypeAlias = Callable[[], None]


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


class Hardware(DeviceMemory, ABC):
    """A device without its executor, which is what an executor works with; `Backend` adds the executor.

    Attributes:
        lock: Held by the thread that binds and launches a program, so that runs do not mix.
    """

    lock: AbstractContextManager[bool]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        self.lock = threading.RLock()
        return self

    config: TargetConfig
    runs_ahead = 1
    """How many runs to launch before reading the first one's result; 1 where launching a run also completes it."""

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

    def compile(self, calls: Iterable[KernelCall], sources: Mapping[str, str] = MappingProxyType({})) -> None:
        """Do all that can be done for calls before their memory is known; an executor asks once, at init.

        Args:
            sources: The program's source texts by the name that calls give as their `source`, where the target
                generates kernels.
        """

    def prepare(self, call: KernelCall, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> Launch:
        """Do all that can be done ahead of time for one call on fixed memory; the result launches it.

        A device whose `create_executor` returns an executor of its own does not need it.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no prepare(), which makes a kernel call ready to run")

    def sequence(self, launches: Sequence[Launch]) -> Launch:
        """One callable that runs the launches in order; a device may batch them."""
        fixed = tuple(launches)

        def run() -> None:
            for launch in fixed:
                launch()

        return run

    def without_trials(self) -> AbstractContextManager[object]:
        """Meanwhile launches are prepared by what is known of their speed, without timing any; the caller holds the
        lock."""
        return nullcontext()

    def mover(self, launches: Sequence[tuple[Launch, int]], buffer: DeviceBuffer) -> Callable[[int], None] | None:
        """A function that has prepared launches use memory at another address in a buffer's place.

        Args:
            launches: All that touch the buffer, each with the number of its operands there.

        Returns:
            None where the device cannot do that.
        """
        return None

    def marker(self) -> Callable[[], None]:
        """A place in the order of what is launched; calling it waits until everything before has finished."""
        return self.synchronize

    def synchronize(self) -> None:
        """Wait until everything launched has finished."""

    def timed(self, launch: Launch) -> float:
        """Run one launch to its end; returns the seconds it took, by the device's own clock if it has one."""
        start = time.perf_counter()
        launch()
        self.synchronize()
        return time.perf_counter() - start


_BEST: list[Callable[[], Hardware]] = []


def offer_best_hardware(find: Callable[[], Hardware]) -> None:
    """Have `best_hardware` ask this function, which knows the devices; they know executors, which ask for the best."""
    _BEST[:] = [find]


def best_hardware() -> Hardware:
    """The best device on this machine."""
    return _BEST[0]()
