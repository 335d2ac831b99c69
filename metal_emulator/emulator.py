"""State of one emulated device: its settings, counters of created objects, and errors that are yet to be raised."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from metal_emulator.objc import MetalUsageError

if TYPE_CHECKING:
    from metal_emulator.compiler import KernelFault, Mutant


@dataclass(kw_only=True)
class Counters:
    """Number of objects created and of commands encoded, by kind."""

    buffers: int = 0
    libraries: int = 0
    functions: int = 0
    pipelines: int = 0
    archive_hits: int = 0
    command_buffers: int = 0
    compute_encoders: int = 0
    blit_encoders: int = 0
    mps_encodes: int = 0
    dispatches: int = 0
    set_bytes: int = 0

    def counts(self) -> dict[str, int]:
        """A snapshot of all counters, to compare with a later one."""
        return {item.name: getattr(self, item.name) for item in fields(Counters)}


@dataclass(kw_only=True)
class Emulator(Counters):
    """The emulated device's settings and state.

    `seed` shuffles threads, threadgroups and the dispatches between the barriers of a concurrent encoder. With
    `deferred`, a command buffer runs not at `commit()` but when something waits for it or a later one, which shows a
    missing `waitUntilCompleted()`. Both may be set at any time. `order_dependent` counts the dispatches whose result
    may depend on `seed`.

    If the device was created with `mutants`, `mutants` lists the barriers and bounds guards of all libraries so far,
    and `mutant` is the number of the one that all kernels run without; 0 for none.
    """

    checks: bool
    poison: bool
    seed: int
    deferred: bool
    memory: int
    allocated: int = 0
    order_dependent: int = 0
    mutants: list[Mutant] | None = None
    mutant: int = 0
    last_fault: KernelFault | None = None
    _complaints: list[str] = field(default_factory=list)
    _outlived: list[tuple[mmap.mmap, str]] = field(default_factory=list)

    def complain(self, message: str) -> None:
        """Record an error where no exception can be raised; the next call raises it."""
        self._complaints.append(message)

    def reclaim(self, memory: mmap.mmap, name: str) -> None:
        """Free a released buffer's memory, or keep it for `check` if a Python view of it still exists."""
        self.allocated -= len(memory)
        try:
            memory.close()
        except BufferError:
            self._outlived.append((memory, name))

    def check(self) -> None:
        """Raise the errors recorded since the last call.

        A view that dies together with its buffer may do so a moment later, so views that outlive their buffer are
        judged here.
        """
        if self._outlived:
            outlived, self._outlived = self._outlived, []
            for memory, name in outlived:
                try:
                    memory.close()
                except BufferError:
                    self.complain(f"a view of {name}, from contents().as_buffer(), outlived it")
        if self._complaints:
            complaints, self._complaints = self._complaints, []
            raise MetalUsageError("; ".join(complaints))
