"""Command queues and command buffers: which commands are encoded, which objects they keep alive, and when they run."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from metal_emulator import compiler
from metal_emulator.encoders import BytesArena, CommandEncoder, MTLBlitCommandEncoder, MTLComputeCommandEncoder
from metal_emulator.enums import METAL
from metal_emulator.objc import HANDLER, Either, Labelled, MetalUsageError, NSError, selector

if TYPE_CHECKING:
    from metal_emulator.device import MTLDevice

Command: TypeAlias = Callable[[], None]

DISPATCH_TYPE = Either("an MTLDispatchType", 0, 1)
NOT_ENQUEUED = METAL["MTLCommandBufferStatusNotEnqueued"]
COMMITTED = METAL["MTLCommandBufferStatusCommitted"]
COMPLETED = METAL["MTLCommandBufferStatusCompleted"]
FAILED = METAL["MTLCommandBufferStatusError"]


class MTLCommandQueue(Labelled):
    """A queue that runs command buffers in the order of their commits."""

    __slots__ = ("_committed",)
    _device: MTLDevice

    def __init__(self, device: MTLDevice) -> None:
        super().__init__(device)
        self._committed: list[MTLCommandBuffer] = []

    @selector()
    def commandBuffer(self) -> MTLCommandBuffer:
        return self._buffer(retained=True)

    @selector()
    def commandBufferWithUnretainedReferences(self) -> MTLCommandBuffer:
        return self._buffer(retained=False)

    def _buffer(self, *, retained: bool) -> MTLCommandBuffer:
        emulator = self._device._emulator
        emulator.check()
        emulator.command_buffers += 1
        return MTLCommandBuffer(self, retained=retained)

    def _run_until(self, last: MTLCommandBuffer) -> None:
        """Run the committed command buffers in order, up to and including `last`."""
        while last in self._committed:
            self._committed.pop(0)._run()


class References:
    """The objects that a command buffer's commands use.

    They are retained, or only watched if the caller has promised to retain them.
    """

    def __init__(self, *, retained: bool) -> None:
        self.retained = retained
        self._held: set[object] = set()
        self._watched: dict[weakref.ref[object], str] = {}

    def add(self, thing: object) -> None:
        if self.retained:
            self._held.add(thing)
        else:
            reference = weakref.ref(thing)
            if reference not in self._watched:
                self._watched[reference] = str(thing)

    def gone(self) -> list[str]:
        """Return the names of watched objects that no longer exist."""
        return [name for reference, name in self._watched.items() if reference() is None]


class MTLCommandBuffer(Labelled):
    """A list of commands, encoded once and committed once.

    The commands run at commit; if the emulator is deferred, they run when a caller waits for this or a later buffer.
    """

    __slots__ = (
        "_bytes",
        "_commands",
        "_encoder",
        "_error",
        "_finished",
        "_handlers",
        "_queue",
        "_references",
        "_started",
        "_status",
    )
    _device: MTLDevice

    def __init__(self, queue: MTLCommandQueue, *, retained: bool) -> None:
        super().__init__(queue._device)
        self._queue = queue
        self._references = References(retained=retained)
        self._bytes = BytesArena()
        self._commands: list[Command] = []
        self._encoder: CommandEncoder | None = None
        self._handlers: list[Callable[[MTLCommandBuffer], object]] = []
        self._status = NOT_ENQUEUED
        self._error: NSError | None = None
        self._started = self._finished = 0.0

    def __del__(self) -> None:
        if getattr(self, "_encoder", None) is not None:
            self._device._emulator.complain(f"an {type(self._encoder).__name__} was released without endEncoding")

    @selector()
    def retainedReferences(self) -> bool:
        return self._references.retained

    @selector()
    def commandQueue(self) -> MTLCommandQueue:
        return self._queue

    @selector()
    def computeCommandEncoder(self) -> MTLComputeCommandEncoder:
        return self._compute_encoder("computeCommandEncoder", METAL["MTLDispatchTypeSerial"])

    @selector(DISPATCH_TYPE)
    def computeCommandEncoderWithDispatchType_(self, dispatch_type: int) -> MTLComputeCommandEncoder:
        return self._compute_encoder("computeCommandEncoderWithDispatchType_", dispatch_type)

    @selector()
    def blitCommandEncoder(self) -> MTLBlitCommandEncoder:
        self._require_encodable("blitCommandEncoder")
        self._device._emulator.blit_encoders += 1
        self._encoder = encoder = MTLBlitCommandEncoder(self)
        return encoder

    def _compute_encoder(self, method: str, dispatch_type: int) -> MTLComputeCommandEncoder:
        self._require_encodable(method)
        self._device._emulator.compute_encoders += 1
        self._encoder = encoder = MTLComputeCommandEncoder(self, dispatch_type == METAL["MTLDispatchTypeConcurrent"])
        return encoder

    def _require_uncommitted(self, method: str) -> None:
        self._check(self._status == NOT_ENQUEUED, method, "the command buffer was committed")

    def _require_encodable(self, method: str) -> None:
        self._require_uncommitted(method)
        if self._encoder is not None:
            self._fail(method, f"an {type(self._encoder).__name__} is open; endEncoding comes first")

    @selector(HANDLER)
    def addCompletedHandler_(self, handler: Callable[[MTLCommandBuffer], object]) -> None:
        self._require_uncommitted("addCompletedHandler_")
        self._handlers.append(handler)

    @selector()
    def commit(self) -> None:
        self._require_encodable("commit")
        emulator = self._device._emulator
        emulator.check()
        self._status = COMMITTED
        self._queue._committed.append(self)
        if not emulator.deferred:
            self._queue._run_until(self)

    @selector()
    def waitUntilCompleted(self) -> None:
        self._check(self._status != NOT_ENQUEUED, "waitUntilCompleted", "waits forever: commit comes first")
        self._queue._run_until(self)

    @selector()
    def status(self) -> int:
        return self._status

    @selector()
    def error(self) -> NSError | None:
        return self._error

    @selector()
    def GPUStartTime(self) -> float:
        return self._started

    @selector()
    def GPUEndTime(self) -> float:
        return self._finished

    def _run(self) -> None:
        gone = self._references.gone()
        if gone:
            self._status = FAILED
            raise MetalUsageError(
                f"-[MTLCommandBuffer commit]: {', '.join(gone)}, used with unretained references, was gone before the "
                "command buffer completed"
            )
        self._started = time.perf_counter()
        try:
            for command in self._commands:
                command()
        except compiler.KernelFault as fault:
            self._device._emulator.last_fault = fault
            self._error = NSError("MTLCommandBufferErrorDomain", METAL["MTLCommandBufferErrorPageFault"], str(fault))
        self._finished = time.perf_counter()
        self._status = FAILED if self._error else COMPLETED
        self._commands.clear()
        self._bytes = BytesArena()
        self._references = References(retained=self._references.retained)
        for handler in self._handlers:
            handler(self)
