"""Command encoders: they bind buffers and encode dispatches, copies and fills, with checks at encoding time."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metal_emulator.objc import (
    BYTES,
    NSSTRING,
    NSUINTEGER,
    RANGE,
    SIZE,
    Either,
    Labelled,
    MTLSize,
    NSRange,
    Object,
    selector,
)
from metal_emulator.resources import MTLBuffer, Storage, outside

if TYPE_CHECKING:
    from metal_emulator.commands import MTLCommandBuffer
    from metal_emulator.device import MTLDevice
    from metal_emulator.pipeline import MTLComputePipelineState

BUFFER_SLOTS = 31
MAX_BYTES = 4096
CONSTANT_ALIGNMENT = 256  # what every Mac grants; Apple silicon alone would ask for 4
BLIT_ALIGNMENT = 4
BARRIER_SCOPE = Either("MTLBarrierScope", 1, 2, 3)
ARENA_SIZE = 1 << 16


class BytesArena:
    """Memory of a command buffer for copies of the bytes that callers pass to `setBytes`."""

    def __init__(self) -> None:
        self._chunks: list[bytearray] = []
        self._address = 0
        self._left = 0

    def copy(self, data: memoryview) -> int:
        """The address of a new copy of `data`, aligned as the constant address space requires."""
        size = -(-data.nbytes // CONSTANT_ALIGNMENT) * CONSTANT_ALIGNMENT
        if self._left < size:
            chunk = bytearray(ARENA_SIZE + CONSTANT_ALIGNMENT)
            self._chunks.append(chunk)
            start = ctypes.addressof(ctypes.c_char.from_buffer(chunk))
            self._address = -(-start // CONSTANT_ALIGNMENT) * CONSTANT_ALIGNMENT
            self._left = ARENA_SIZE
        address = self._address
        ctypes.memmove(address, data.tobytes(), data.nbytes)
        self._address += size
        self._left -= size
        return address


@dataclass(slots=True)
class Binding:
    """The content of one buffer slot: a buffer and an offset, or copied bytes if `storage` is None."""

    storage: Storage | None
    offset: int
    address: int
    length: int


class CommandEncoder(Labelled):
    """Base class of compute and blit encoders, which encode into one command buffer until they are ended."""

    __slots__ = ("_command_buffer", "_depth", "_open")
    _device: MTLDevice

    def __init__(self, command_buffer: MTLCommandBuffer) -> None:
        super().__init__(command_buffer._device)
        self._command_buffer = command_buffer
        self._open = True
        self._depth = 0

    def _require_open(self, method: str) -> None:
        self._check(self._open, method, "the encoder has ended")

    @selector()
    def endEncoding(self) -> None:
        self._require_open("endEncoding")
        self._flush()
        self._open = False
        self._command_buffer._encoder = None

    def _flush(self) -> None:
        """Append commands to the command buffer whose order was not decided yet."""

    @selector(NSSTRING)
    def pushDebugGroup_(self, name: str) -> None:
        self._require_open("pushDebugGroup_")
        self._depth += 1

    @selector()
    def popDebugGroup(self) -> None:
        self._require_open("popDebugGroup")
        self._check(self._depth > 0, "popDebugGroup", "no group was pushed")
        self._depth -= 1


class MTLComputeCommandEncoder(CommandEncoder):
    """An encoder that binds pipelines and buffers, and dispatches threadgroups."""

    __slots__ = ("_bindings", "_concurrent", "_pipeline", "_unordered")

    def __init__(self, command_buffer: MTLCommandBuffer, concurrent: bool) -> None:
        super().__init__(command_buffer)
        self._pipeline: MTLComputePipelineState | None = None
        self._bindings: dict[int, Binding] = {}
        self._concurrent = concurrent
        self._unordered: list[Callable[[], None]] = []

    @selector(Object("MTLComputePipelineState"))
    def setComputePipelineState_(self, pipeline: MTLComputePipelineState) -> None:
        self._require_open("setComputePipelineState_")
        self._command_buffer._references.add(pipeline)
        self._pipeline = pipeline

    @selector(Object("MTLBuffer", nullable=True), NSUINTEGER, NSUINTEGER)
    def setBuffer_offset_atIndex_(self, buffer: MTLBuffer | None, offset: int, index: int) -> None:
        method = "setBuffer_offset_atIndex_"
        self._require_slot(method, index)
        if buffer is None:
            self._bindings.pop(index, None)
        else:
            self._bind(method, buffer._memory, offset, index)

    @selector(NSUINTEGER, NSUINTEGER)
    def setBufferOffset_atIndex_(self, offset: int, index: int) -> None:
        method = "setBufferOffset_atIndex_"
        self._require_slot(method, index)
        bound = self._bindings.get(index)
        if bound is None or bound.storage is None:
            self._fail(method, f"no buffer is bound at {index}")
        self._bind(method, bound.storage, offset, index)

    @selector(BYTES, NSUINTEGER, NSUINTEGER)
    def setBytes_length_atIndex_(self, data: memoryview, length: int, index: int) -> None:
        method = "setBytes_length_atIndex_"
        self._require_slot(method, index)
        if not 0 < length <= MAX_BYTES:
            self._fail(method, f"{length} bytes; 1 to {MAX_BYTES} are allowed")
        if length > data.nbytes:
            self._fail(method, f"{length} bytes of a pointer to {data.nbytes}")
        self._device._emulator.set_bytes += 1
        self._bindings[index] = Binding(None, 0, self._command_buffer._bytes.copy(data[:length]), length)

    def _require_slot(self, method: str, index: int) -> None:
        self._require_open(method)
        if index >= BUFFER_SLOTS:
            self._fail(method, f"index {index}; there are {BUFFER_SLOTS} buffer slots")

    def _bind(self, method: str, storage: Storage, offset: int, index: int) -> None:
        if offset >= storage.length:
            self._fail(method, f"offset {offset} is not within {storage}")
        self._command_buffer._references.add(storage)
        self._bindings[index] = Binding(storage, offset, storage.address + offset, storage.length - offset)

    @selector(BARRIER_SCOPE)
    def memoryBarrierWithScope_(self, scope: int) -> None:
        self._require_open("memoryBarrierWithScope_")
        self._flush()

    @selector(SIZE, SIZE)
    def dispatchThreadgroups_threadsPerThreadgroup_(self, groups: MTLSize, threads: MTLSize) -> None:
        self._dispatch("dispatchThreadgroups_threadsPerThreadgroup_", groups, threads, None)

    @selector(SIZE, SIZE)
    def dispatchThreads_threadsPerThreadgroup_(self, grid: MTLSize, threads: MTLSize) -> None:
        groups = MTLSize(*(-(-size // max(group, 1)) for size, group in zip(grid, threads, strict=True)))
        self._dispatch("dispatchThreads_threadsPerThreadgroup_", groups, threads, grid)

    def _dispatch(self, method: str, groups: MTLSize, threads: MTLSize, grid: MTLSize | None) -> None:
        self._require_open(method)
        pipeline = self._pipeline
        if pipeline is None:
            self._fail(method, "no pipeline state is set")
        core, constants = pipeline._specialized.core, pipeline._specialized.constants
        width, height, depth = threads
        count = width * height * depth
        if not (count and groups.width and groups.height and groups.depth):
            self._fail(method, f"{core.name}: an empty grid, {tuple(grid or groups)} of {tuple(threads)}")
        if count > pipeline._max_threads:
            self._fail(method, f"{core.name}: {count} threads a threadgroup, at most {pipeline._max_threads}")
        if pipeline._whole_simdgroups and count % 32:
            self._fail(method, f"{core.name}: {count} threads; the pipeline was promised whole SIMD groups")
        buffers = {}
        for index, name, constant in pipeline._needed:
            binding = self._bindings.get(index)
            if binding is None:
                self._fail(method, f"{core.name}: nothing is bound at {index} ({name})")
            if constant and binding.offset % CONSTANT_ALIGNMENT:
                self._fail(
                    method,
                    f"{core.name}: {name} at {index} is in the constant address space, where offsets are multiples of "
                    f"{CONSTANT_ALIGNMENT}; {binding.offset} came",
                )
            buffers[index] = binding.address, binding.length
        emulator = self._device._emulator
        emulator.dispatches += 1
        emulator.order_dependent += core.threads_communicate

        def run() -> None:
            core.dispatch(
                groups, threads, buffers, constants, seed=emulator.seed, mutant=emulator.mutant, grid_threads=grid
            )

        (self._unordered if self._concurrent else self._command_buffer._commands).append(run)

    def _flush(self) -> None:
        emulator = self._device._emulator
        if len(self._unordered) > 1:
            emulator.order_dependent += len(self._unordered)
            random.Random(emulator.seed).shuffle(self._unordered)
        self._command_buffer._commands.extend(self._unordered)
        self._unordered.clear()


class MTLBlitCommandEncoder(CommandEncoder):
    """An encoder of commands that copy from buffer to buffer, or fill a buffer."""

    __slots__ = ()

    @selector(Object("MTLBuffer"), NSUINTEGER, Object("MTLBuffer"), NSUINTEGER, NSUINTEGER)
    def copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size_(
        self, source: MTLBuffer, source_offset: int, destination: MTLBuffer, destination_offset: int, size: int
    ) -> None:
        method = "copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size_"
        start = self._range(method, source, source_offset, size)
        target = self._range(method, destination, destination_offset, size)
        overlap = source is destination and abs(source_offset - destination_offset) < size
        self._check(not overlap, method, "source and destination overlap")
        self._command_buffer._commands.append(lambda: _discard(ctypes.memmove(target, start, size)))

    @selector(Object("MTLBuffer"), RANGE, NSUINTEGER)
    def fillBuffer_range_value_(self, buffer: MTLBuffer, filled: NSRange, value: int) -> None:
        method = "fillBuffer_range_value_"
        self._check(value < 256, method, f"the value {value} is no byte")
        target = self._range(method, buffer, filled.location, filled.length)
        self._command_buffer._commands.append(lambda: _discard(ctypes.memset(target, value, filled.length)))

    def _range(self, method: str, buffer: MTLBuffer, offset: int, size: int) -> int:
        """The address of a checked range of a buffer, which the command buffer then references."""
        self._require_open(method)
        storage = buffer._memory
        problem = outside(storage, offset, size)
        self._check(not problem, method, problem)
        aligned = offset % BLIT_ALIGNMENT == size % BLIT_ALIGNMENT == 0
        self._check(aligned, method, f"offset {offset} and size {size} are not multiples of {BLIT_ALIGNMENT}")
        self._command_buffer._references.add(storage)
        return storage.address + offset


def _discard(result: object) -> None:
    """Ignore the value that a C function returns."""
