"""The Metal device by pyobjc's calls: memory, libraries and pipelines (each created once), command buffers.

`api` is what `import Metal` and `import MetalPerformanceShaders` give on a Mac, or the emulator's objects of that name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from metal_kernels import shader_source
from npu_compiler.errors import DeviceError
from npu_compiler.files import working_folder, write_atomically
from npu_compiler.installing import install_command
from npu_compiler.target_config import TargetConfig
from npu_runtime.cache_folder import warn_of_cache

_CONSTANT = re.compile(r"^constant\s+(bool|uint)\s+(\w+)\s*\[\[function_constant\(\d+\)\]\]", re.MULTILINE)
_SMALLEST_BUFFER = 16


@dataclass(frozen=True)
class MetalAPI:
    """The framework modules that the backend calls.

    Attributes:
        autorelease_pool: The context of every run. Command buffers and encoders are autoreleased: without a pool for
            each run, a process would keep all of them until it ends.
    """

    Metal: Any
    MPS: Any
    Foundation: Any
    autorelease_pool: Callable[[], AbstractContextManager[Any]] = nullcontext


def load_api() -> MetalAPI:
    """Import pyobjc's bindings of Metal.

    Raises:
        DeviceError: this is no Mac, or pyobjc is not installed.
    """
    try:
        import Foundation
        import Metal
        import MetalPerformanceShaders
        import objc
    except ImportError as error:
        raise DeviceError(f"Metal needs macOS and pyobjc ({error}); on a Mac: {install_command('metal')}") from error
    # pyobjc has no metadata for this method's `const void *`, and would take an address instead of bytes.
    value = {"type": b"^v", "type_modifier": b"n", "c_array_of_variable_length": True}
    objc.registerMetaDataForSelector(b"NSObject", b"setConstantValue:type:withName:", {"arguments": {2: value}})
    return MetalAPI(Metal, MetalPerformanceShaders, Foundation, objc.autorelease_pool)


@cache
def _constant_kinds(filename: str) -> dict[str, str]:
    """Function constant → its type, for those in a shader file."""
    return {name: kind for kind, name in _CONSTANT.findall(shader_source(filename))}


class MetalDevice:
    """One GPU, with the objects that Metal creates for it.

    Attributes:
        counters: Counts of buffers, libraries, pipelines, command buffers and encoders created, and of dispatches and
            MPS products encoded.
    """

    def __init__(self, api: MetalAPI, config: TargetConfig, archive: Path | None = None) -> None:
        self.api = api
        self.counters: Counter[str] = Counter()
        self.handle = api.Metal.MTLCreateSystemDefaultDevice()
        if self.handle is None:
            raise DeviceError("this machine has no Metal device")
        if not self.handle.supportsFamily_(api.Metal.MTLGPUFamilyApple7):
            raise DeviceError(f"{self.name} lacks SIMD-group matrices; Metal kernels need an Apple M1 or later")
        self.queue = self.handle.newCommandQueue()
        self._macros = {"TILE": str(config.matmul_tile), "VEC_TPG": str(config.max_threadgroup_1d)}
        self._threads = config.max_threadgroup_1d
        self._libraries: dict[tuple[str, str], Any] = {}
        self._pipelines: dict[tuple[Any, ...], Any] = {}
        self._archive = PipelineArchive(self, archive) if archive is not None else None

    @property
    def name(self) -> str:
        return str(self.handle.name())

    def allocate(self, size: int) -> Any:
        """A new `MTLBuffer` in memory that CPU and GPU share.

        Raises:
            MemoryError: it would exceed the GPU's working set as Metal reports it.
        """
        size = max(size, _SMALLEST_BUFFER)
        used, budget = self.handle.currentAllocatedSize(), self.handle.recommendedMaxWorkingSetSize()
        if used + size > budget:
            raise MemoryError(f"{size} bytes asked for, {max(budget - used, 0)} of {budget} free on {self.name}")
        buffer = self.handle.newBufferWithLength_options_(size, self.api.Metal.MTLResourceStorageModeShared)
        if buffer is None:
            largest = self.handle.maxBufferLength()
            raise MemoryError(f"{self.name} refused {size} bytes; its largest buffer has {largest}")
        self.counters["buffers"] += 1
        return buffer

    def pipeline(
        self, filename: str, function: str, dtype: str | None, constants: Mapping[str, int], macros: Mapping[str, str]
    ) -> Any:
        """The pipeline of a function with its constants compiled in, created on the first call.

        Args:
            dtype: The compute dtype; None if no operand has it, so that any library of the file serves.
            macros: Preprocessor macros of that file, beyond the target's.

        Raises:
            DeviceError: Metal refused the source, with its message.
        """
        if dtype is None:
            dtype = next((stored for name, stored in self._libraries if name == filename), "float32")
        kinds = _constant_kinds(filename)
        chosen = tuple((name, constants[name]) for name in kinds if name in constants)
        key = (filename, function, dtype, chosen)
        if key not in self._pipelines:
            library = self._library(filename, dtype, macros)
            values = self.api.Metal.MTLFunctionConstantValues.alloc().init()
            for name, value in chosen:
                self._set_constant(values, name, kinds[name], value)
            kernel, error = library.newFunctionWithName_constantValues_error_(function, values, None)
            _require(kernel, f"function '{function}' of {filename}", error)
            self._pipelines[key] = self._make_pipeline(kernel, function)
            self.counters["pipelines"] += 1
        return self._pipelines[key]

    def _library(self, filename: str, dtype: str, macros: Mapping[str, str]) -> Any:
        key = (filename, dtype)
        if key not in self._libraries:
            defined = {**self._macros, **macros}
            defined.update({"bfloat16": {"USE_BFLOAT": "1"}, "float32": {"USE_FLOAT": "1"}}.get(dtype, {}))
            # Not by setPreprocessorMacros_: it hands them on as compiler flags, where spaces in a value may split it.
            defines = "".join(f"#define {name} {value}\n" for name, value in defined.items())
            options = self.api.Metal.MTLCompileOptions.alloc().init()
            options.setLanguageVersion_(self.api.Metal.MTLLanguageVersion3_1)
            # Masks hold infinities, and NaN has to stay NaN.
            options.setFastMathEnabled_(False)
            source = defines + shader_source(filename)
            library, error = self.handle.newLibraryWithSource_options_error_(source, options, None)
            self._libraries[key] = _require(library, filename, error)
            self.counters["libraries"] += 1
        return self._libraries[key]

    def _set_constant(self, values: Any, name: str, kind: str, value: int) -> None:
        if kind == "bool":
            values.setConstantValue_type_withName_(bytes([value]), self.api.Metal.MTLDataTypeBool, name)
        else:
            values.setConstantValue_type_withName_(value.to_bytes(4, "little"), self.api.Metal.MTLDataTypeUInt, name)

    def _make_pipeline(self, function: Any, label: str) -> Any:
        metal = self.api.Metal
        descriptor = metal.MTLComputePipelineDescriptor.alloc().init()
        descriptor.setComputeFunction_(function)
        descriptor.setLabel_(label)
        # A kernel that uses many registers could be given fewer threads than it is dispatched with.
        descriptor.setMaxTotalThreadsPerThreadgroup_(self._threads)
        make = self.handle.newComputePipelineStateWithDescriptor_options_reflection_error_
        if self._archive is not None:
            self._archive.attach(descriptor)
            pipeline, *_ = make(descriptor, metal.MTLPipelineOptionFailOnBinaryArchiveMiss, None, None)
            if pipeline is not None:
                return pipeline
        pipeline, *_, error = make(descriptor, metal.MTLPipelineOptionNone, None, None)
        _require(pipeline, f"pipeline of '{label}'", error)
        if self._archive is not None:
            self._archive.add(descriptor)
        return pipeline

    def save_archive(self) -> None:
        """Store the pipelines created so far on disk, for the next process."""
        if self._archive is not None:
            self._archive.save()

    def run(self, encode: Sequence[Callable[[CommandEncoder], None]], batch: int) -> float:
        """Encode calls, commit them and wait; returns the GPU's seconds.

        Args:
            batch: Maximum number of calls per command buffer.

        Raises:
            DeviceError: a command buffer failed, with Metal's message.
        """
        with self.api.autorelease_pool():
            return self._run(encode, batch)

    def _run(self, encode: Sequence[Callable[[CommandEncoder], None]], batch: int) -> float:
        buffers = []
        for start in range(0, len(encode), batch):
            encoder = CommandEncoder(self)
            try:
                for call in encode[start : start + batch]:
                    call(encoder)
            except BaseException:
                encoder.end()  # Metal aborts the process where an encoder is released before endEncoding
                raise
            buffers.append(encoder.commit())
        seconds = 0.0
        for buffer in buffers:
            buffer.waitUntilCompleted()
            if buffer.status() == self.api.Metal.MTLCommandBufferStatusError:
                raise DeviceError(f"{self.name} failed: {_message(buffer.error())}")
            seconds += buffer.GPUEndTime() - buffer.GPUStartTime()
        return seconds


class CommandEncoder:
    """A command buffer under construction.

    Its compute encoder stays open from call to call and is ended only for MPS.
    """

    def __init__(self, device: MetalDevice) -> None:
        self._device = device
        self._buffer = device.queue.commandBuffer()
        self._compute: Any = None
        device.counters["command_buffers"] += 1

    def compute(self) -> Any:
        """The open compute encoder; creates one if there is none."""
        if self._compute is None:
            self._compute = self._buffer.computeCommandEncoder()
            self._device.counters["encoders"] += 1
        return self._compute

    def command_buffer(self) -> Any:
        """The command buffer itself, for calls that encode into it directly; ends the compute encoder."""
        self.end()
        return self._buffer

    def end(self) -> None:
        """End the compute encoder, if one is open."""
        if self._compute is not None:
            self._compute.endEncoding()
            self._compute = None

    def commit(self) -> Any:
        self.end()
        self._buffer.commit()
        return self._buffer


class PipelineArchive:
    """An archive of compiled pipelines on disk (`MTLBinaryArchive`), so that a second process need not compile them."""

    def __init__(self, device: MetalDevice, path: Path) -> None:
        self._path = path
        self._url = device.api.Foundation.NSURL.fileURLWithPath_
        descriptor = device.api.Metal.MTLBinaryArchiveDescriptor.alloc().init()
        if path.exists():
            descriptor.setUrl_(self._url(str(path)))
        self._archive, _ = device.handle.newBinaryArchiveWithDescriptor_error_(descriptor, None)
        if self._archive is None:  # written by another system version: start anew
            descriptor = device.api.Metal.MTLBinaryArchiveDescriptor.alloc().init()
            self._archive, error = device.handle.newBinaryArchiveWithDescriptor_error_(descriptor, None)
            _require(self._archive, "binary archive", error)
        self._added = 0

    def attach(self, descriptor: Any) -> None:
        descriptor.setBinaryArchives_([self._archive])

    def add(self, descriptor: Any) -> None:
        done, _ = self._archive.addComputePipelineFunctionsWithDescriptor_error_(descriptor, None)
        self._added += bool(done)

    def save(self) -> None:
        """Write the archive if it has grown. A failure to write only warns, as the next start is slower."""
        if not self._added:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with working_folder(self._path.parent) as folder:
                done, _ = self._archive.serializeToURL_error_(self._url(str(folder / "archive")), None)
                if done:
                    write_atomically(self._path, (folder / "archive").read_bytes())
        except OSError as error:
            warn_of_cache(self._path.parent, error)
        else:
            self._added = 0


def _require(created: Any, what: str, error: Any) -> Any:
    if created is None:
        raise DeviceError(f"Metal cannot make the {what}: {_message(error)}")
    return created


def _message(error: Any) -> str:
    return "no reason given" if error is None else str(error.localizedDescription())
