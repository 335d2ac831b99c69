"""The Metal device: its capabilities, and the objects that it creates."""

from __future__ import annotations

from pathlib import Path

from metal_emulator import compiler
from metal_emulator.commands import MTLCommandQueue
from metal_emulator.emulator import Emulator
from metal_emulator.enums import METAL
from metal_emulator.library import LIBRARY_ERRORS, MTLCompileOptions, MTLFunction, MTLLibrary
from metal_emulator.objc import (
    BYTES,
    NSSTRING,
    NSUINTEGER,
    OUT_ERROR,
    Either,
    MTLSize,
    NSError,
    NSObject,
    Object,
    selector,
)
from metal_emulator.pipeline import (
    ARCHIVE_ERRORS,
    MAX_THREADS,
    MTLBinaryArchive,
    MTLBinaryArchiveDescriptor,
    MTLComputePipelineDescriptor,
    MTLComputePipelineState,
    read_archive,
)
from metal_emulator.resources import MTLBuffer, Storage

MAX_THREADGROUP_MEMORY = 32 << 10
CACHE_MODES = (0, METAL["MTLResourceCPUCacheModeWriteCombined"])
STORAGE_MODES = tuple(METAL[f"MTLResourceStorageMode{mode}"] for mode in ("Shared", "Managed", "Private"))
TRACKING_MODES = (0, METAL["MTLResourceHazardTrackingModeTracked"])
RESOURCE_OPTIONS = Either(
    "MTLResourceOptions with tracked hazards",
    *(cache | storage | tracking for cache in CACHE_MODES for storage in STORAGE_MODES for tracking in TRACKING_MODES),
)
PIPELINE_OPTIONS = Either("MTLPipelineOption", 0, METAL["MTLPipelineOptionFailOnBinaryArchiveMiss"])
FAMILIES = frozenset({*range(1001, 1009), *range(3001, 3004), METAL["MTLGPUFamilyMac2"], METAL["MTLGPUFamilyMetal3"]})


class MTLDevice(NSObject):
    """The emulated GPU; there is one per `api()`, as there is one per Mac."""

    __slots__ = ("_emulator",)

    def __init__(self, emulator: Emulator) -> None:
        super().__init__(self)
        self._emulator = emulator

    @selector()
    def name(self) -> str:
        return "emulated GPU" if self._emulator.checks else "emulated GPU, unchecked"

    @selector()
    def hasUnifiedMemory(self) -> bool:
        return True

    @selector(NSUINTEGER)
    def supportsFamily_(self, family: int) -> bool:
        return family in FAMILIES

    @selector()
    def recommendedMaxWorkingSetSize(self) -> int:
        return self._emulator.memory

    @selector()
    def currentAllocatedSize(self) -> int:
        return self._emulator.allocated

    @selector()
    def maxBufferLength(self) -> int:
        return self._emulator.memory * 3 // 4

    @selector()
    def maxThreadgroupMemoryLength(self) -> int:
        return MAX_THREADGROUP_MEMORY

    @selector()
    def maxThreadsPerThreadgroup(self) -> MTLSize:
        return MTLSize(MAX_THREADS, MAX_THREADS, MAX_THREADS)

    @selector()
    def newCommandQueue(self) -> MTLCommandQueue:
        return MTLCommandQueue(self)

    @selector(NSUINTEGER, RESOURCE_OPTIONS)
    def newBufferWithLength_options_(self, length: int, options: int) -> MTLBuffer | None:
        self._check(length > 0, "newBufferWithLength_options_", "a buffer of 0 bytes")
        return self._buffer(length, options, clean=not self._emulator.poison)

    @selector(BYTES, NSUINTEGER, RESOURCE_OPTIONS)
    def newBufferWithBytes_length_options_(self, data: memoryview, length: int, options: int) -> MTLBuffer | None:
        method = "newBufferWithBytes_length_options_"
        self._check(length > 0, method, "a buffer of 0 bytes")
        self._check(length <= data.nbytes, method, f"{length} bytes of a pointer to {data.nbytes}")
        self._check(_mode(options) != METAL["MTLStorageModePrivate"], method, "the CPU cannot fill a private buffer")
        buffer = self._buffer(length, options, clean=True)
        if buffer is not None:
            buffer._memory.memory[:] = data[:length]
        return buffer

    def _buffer(self, length: int, options: int, *, clean: bool) -> MTLBuffer | None:
        """A new buffer; None, which is Metal's nil, if there is no memory for it.

        Args:
            clean: Whether the buffer begins with zeros, else with poison (see `Storage`).
        """
        self._emulator.check()
        if length > self.maxBufferLength():
            return None
        try:
            storage = Storage(self._emulator, length, clean=clean)
        except (MemoryError, OSError):
            return None
        self._emulator.buffers += 1
        return MTLBuffer(self, storage, _mode(options))

    @selector(NSSTRING, Object("MTLCompileOptions", nullable=True), OUT_ERROR)
    def newLibraryWithSource_options_error_(
        self, source: str, options: MTLCompileOptions | None, error: None
    ) -> tuple[MTLLibrary | None, NSError | None]:
        macros = options._macros if options else {}
        try:
            core = compiler.compile_source(
                source, macros, checks=self._emulator.checks, mutants=self._emulator.mutants is not None
            )
        except compiler.CompileError as failure:
            return None, NSError(LIBRARY_ERRORS, METAL["MTLLibraryErrorCompileFailure"], str(failure))
        self._emulator.libraries += 1
        if self._emulator.mutants is not None:
            self._emulator.mutants.extend(core.mutants)
        return MTLLibrary(self, core, source, macros), None

    @selector(Object("MTLFunction"), OUT_ERROR)
    def newComputePipelineStateWithFunction_error_(
        self, function: MTLFunction, error: None
    ) -> tuple[MTLComputePipelineState | None, NSError | None]:
        self._emulator.pipelines += 1
        return MTLComputePipelineState(self, function._specialized), None

    @selector(Object("MTLComputePipelineDescriptor"), PIPELINE_OPTIONS, OUT_ERROR, OUT_ERROR)
    def newComputePipelineStateWithDescriptor_options_reflection_error_(
        self, descriptor: MTLComputePipelineDescriptor, options: int, reflection: None, error: None
    ) -> tuple[MTLComputePipelineState | None, NSError | None]:
        """The pipeline and the error, one of which is None; as in pyobjc, the reflection is not among the results."""
        if descriptor._function is None:
            method = "newComputePipelineStateWithDescriptor_options_reflection_error_"
            self._fail(method, "the descriptor has no compute function")
        specialized = descriptor._function._specialized
        hit = any(specialized.key in archive._keys for archive in descriptor._archives)
        if options and not hit:
            miss = METAL["MTLBinaryArchiveErrorInvalidFile"]
            return None, NSError(ARCHIVE_ERRORS, miss, f"no archive holds {specialized.core.name}")
        self._emulator.archive_hits += hit
        self._emulator.pipelines += 1
        limits = descriptor._max_threads, descriptor._whole_simdgroups
        pipeline = MTLComputePipelineState(self, specialized, descriptor._label, *limits)
        return pipeline, None

    @selector(Object("MTLBinaryArchiveDescriptor"), OUT_ERROR)
    def newBinaryArchiveWithDescriptor_error_(
        self, descriptor: MTLBinaryArchiveDescriptor, error: None
    ) -> tuple[MTLBinaryArchive | None, NSError | None]:
        if descriptor._url is None:
            return MTLBinaryArchive(self, set()), None
        keys, problem = read_archive(Path(descriptor._url.path()))
        return (None, problem) if problem else (MTLBinaryArchive(self, keys), None)


def _mode(options: int) -> int:
    """The MTLStorageMode that MTLResourceOptions contain."""
    return options >> 4 & 0xF
