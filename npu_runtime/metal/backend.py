"""`MetalBackend`: the Apple GPU. Kernels are the shaders in `metal_kernels`; plain matrix products go to MPS."""

from __future__ import annotations

import platform
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from npu_compiler.graph.dtypes import itemsize, numpy_dtype
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.target import CodegenTarget, MetalCodegenTarget
from npu_compiler.target_config import METAL_GPU, OP_LEVEL, TargetConfig
from npu_runtime.backend import Backend, DeviceBuffer, Launch, Operand, Shape
from npu_runtime.dispatch import Size3
from npu_runtime.metal.binding import Binding, bind, compute_half
from npu_runtime.metal.device import CommandEncoder, MetalAPI, MetalDevice, load_api
from npu_runtime.metal.dispatch import VEC_COLUMNS, MetalDispatchStrategy
from npu_runtime.metal.elementwise import elementwise_macro
from npu_runtime.metal.mps_accel import MPSLaunch, Product, addend_of, as_product, epilogue_of


class MetalBuffer(DeviceBuffer):
    """Memory in an `MTLBuffer` (`native_handle`) that the CPU and the GPU share."""

    dlpack_copies = True

    def __init__(
        self, device: MetalDevice, shape: Shape, alloc_shape: Shape | None, dtype: str, native_handle: Any = None
    ) -> None:
        super().__init__(shape, alloc_shape, dtype, native_handle)
        self._device = device
        if native_handle is None:
            self.native_handle = device.allocate(self.size_bytes)

    def _bytes(self) -> np.ndarray:
        """The memory as an array, for immediate use: the array does not keep the buffer alive."""
        whole = self.native_handle.contents().as_buffer(self.native_handle.length())
        return np.frombuffer(whole, np.uint8)[: self.size_bytes]

    def _download(self) -> np.ndarray:
        data: np.ndarray = self._bytes().copy().view(numpy_dtype(self.dtype))
        return data.reshape(self.alloc_shape)

    def _upload(self, data: np.ndarray) -> None:
        self._bytes()[:] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)

    def _clone(self) -> MetalBuffer:
        copied = MetalBuffer(self._device, self.shape, self.alloc_shape, self.dtype)
        copied._bytes()[:] = self._bytes()
        return copied

    def _copy_from(self, other: DeviceBuffer) -> None:
        """Copy on the host, which is safe at any time: `MetalDevice.run` returns when the GPU has finished."""
        self._upload(other._bytes() if isinstance(other, MetalBuffer) else other._download())

    def _clear(self) -> None:
        self._bytes()[:] = 0

    def __dlpack__(self, **kwargs: Any) -> Any:
        """A DLPack capsule of a copy in host memory; a view could outlive the buffer, as it does not keep it alive."""
        from npu_runtime.torch_arrays import numpy_to_tensor

        return numpy_to_tensor(self.to_numpy()).__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[Any, int]:
        return np.empty(0).__dlpack_device__()


@dataclass(frozen=True)
class Dispatch:
    """A dispatch of one of our kernels: its arguments, pipeline and grid."""

    binding: Binding
    pipeline: Any
    grid: tuple[Size3, Size3]


@dataclass(frozen=True)
class CompiledCall:
    """The part of a call that does not depend on memory: an MPS product, a dispatch of a kernel of ours, or both.

    If there are both, the dispatch comes first if the product is added to its result, and last otherwise.
    """

    product: Product | None
    dispatch: Dispatch | None


class ComputeLaunch:
    """A dispatch on fixed memory: a (buffer, byte offset) for each operand that is present."""

    def __init__(self, device: MetalDevice, dispatch: Dispatch, memory: Sequence[tuple[Any, int]]) -> None:
        self._device = device
        self._pipeline = dispatch.pipeline
        operands, present = dispatch.binding.operands, iter(memory)
        self._buffers = [(*next(present), index) for index, view in enumerate(operands) if view is not None]
        packed = ((dispatch.binding.params, len(operands)), (dispatch.binding.geometry, len(operands) + 1))
        self._bytes = [(data, len(data), index) for data, index in packed if data]
        self._grid = [device.api.Metal.MTLSizeMake(*size) for size in dispatch.grid]

    def encode(self, encoder: CommandEncoder) -> None:
        compute = encoder.compute()
        compute.setComputePipelineState_(self._pipeline)
        for buffer, offset, index in self._buffers:
            compute.setBuffer_offset_atIndex_(buffer, offset, index)
        for data, length, index in self._bytes:
            compute.setBytes_length_atIndex_(data, length, index)
        compute.dispatchThreadgroups_threadsPerThreadgroup_(*self._grid)
        self._device.counters["dispatches"] += 1


class MetalLaunch:
    """A prepared call; calling it runs it by itself, while `MetalBackend.sequence` puts many into one command buffer.

    Attributes:
        encode: Functions that each encode one product or dispatch into a command buffer.
    """

    def __init__(self, device: MetalDevice, work: Sequence[ComputeLaunch | MPSLaunch]) -> None:
        self._device = device
        self.encode: list[Callable[[CommandEncoder], None]] = [part.encode for part in work]

    def __call__(self) -> None:
        self.timed()

    def timed(self) -> float:
        """Run the call by itself; returns the GPU's seconds."""
        return self._device.run(self.encode, len(self.encode))


class MetalBackend(Backend):
    """A backend that runs op-level programs on an Apple GPU.

    Args:
        api: The Metal API to call: pyobjc's if None, or `metal_emulator.api()`.
        mps: Use Metal Performance Shaders for matrix products; else our kernels compute all of them.

    Attributes:
        counters: Counts of objects created, parameters packed and commands encoded so far (see `MetalDevice.counters`).
    """

    config: TargetConfig = METAL_GPU
    runs_targets = (METAL_GPU.name, OP_LEVEL.name)

    def __init__(self, api: Any = None, mps: bool = True) -> None:
        self._mps = mps
        chosen = load_api() if api is None else MetalAPI(api.Metal, api.MPS, api.Foundation)
        archive = _archive_path() if api is None else None
        self._device = MetalDevice(chosen, self.config, archive)
        self._strategy = MetalDispatchStrategy(self.config)
        self._target = MetalCodegenTarget()
        self._compiled: dict[int, tuple[weakref.ref[KernelCall], CompiledCall]] = {}

    @property
    def device(self) -> str:
        return f"Metal, {self._device.name}"

    @property
    def target(self) -> CodegenTarget:
        """Metal's own target, without the integer kernels and quantized activations that the op-level target has."""
        return self._target

    @property
    def counters(self) -> Counter[str]:
        """Counts of command buffers, dispatches and the like since the backend was opened."""
        return self._device.counters

    def allocate(self, shape: Shape, dtype: str, alloc_shape: Shape | None = None) -> MetalBuffer:
        return MetalBuffer(self._device, shape, alloc_shape, dtype)

    def compile(self, calls: Iterable[KernelCall], sources: Mapping[str, str] = MappingProxyType({})) -> None:
        """Create the pipelines and pack the parameters of a program's calls, first those that need a certain dtype."""
        for call in sorted(calls, key=lambda call: compute_half(call) is None):
            self._compile(call)
        self._device.save_archive()

    def _compile(self, call: KernelCall) -> CompiledCall:
        entry = self._compiled.get(id(call))
        if entry is not None:
            return entry[1]
        product = as_product(call) if self._mps else None
        rest = call if product is None else addend_of(call) or epilogue_of(call)
        compiled = CompiledCall(product, None if rest is None else self._dispatch(rest))
        self.counters["packed"] += 1
        key = id(call)
        self._compiled[key] = (weakref.ref(call, lambda _: self._compiled.pop(key, None)), compiled)
        return compiled

    def _dispatch(self, call: KernelCall) -> Dispatch:
        binding = bind(call)
        filename = self._target.source(call.kernel)
        macros = {"VEC_COLUMNS": str(VEC_COLUMNS), "ELEMENTWISE_OPS": elementwise_macro(filename)}
        function = self._strategy.function(binding.call)
        pipeline = self._device.pipeline(filename, function, compute_half(call), binding.constants, macros)
        return Dispatch(binding, pipeline, self._strategy.compute_dispatch(binding.call, pipeline))

    def prepare(self, call: KernelCall, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> MetalLaunch:
        compiled = self._compile(call)
        sources, results = [_place(x) for x in inputs], [_place(x) for x in outputs]
        work: list[ComputeLaunch | MPSLaunch] = []
        product, dispatch = compiled.product, compiled.dispatch
        if product is not None:
            work.append(MPSLaunch(self._device, product, [*sources[:2], *results]))
            sources = sources[2:] if product.beta else [*results, *sources[2:]]
        if dispatch is not None:
            kernel = ComputeLaunch(self._device, dispatch, [*sources, *results])
            work.insert(0 if product is not None and product.beta else len(work), kernel)
        return MetalLaunch(self._device, work)

    def sequence(self, launches: Sequence[Launch], plan: ExecutionPlan) -> Launch:
        """One function that runs all launches in one command buffer, or more if `max_dispatches_per_batch` is less."""
        encode = [part for launch in launches if isinstance(launch, MetalLaunch) for part in launch.encode]

        def run() -> None:
            self._device.run(encode, self.config.max_dispatches_per_batch)

        return run

    def timed(self, launch: Launch) -> float:
        assert isinstance(launch, MetalLaunch)
        return launch.timed()


def _place(operand: Operand) -> tuple[Any, int]:
    """The Metal buffer in which an operand lies, and the byte at which its view begins."""
    view = operand.view
    first = view.offset * itemsize(view.dtype) if view.numel else 0
    return operand.memory.native_handle, operand.byte_offset + first


def _archive_path() -> Path:
    version = platform.mac_ver()[0] or "unknown"
    return Path.home() / "Library" / "Caches" / "npu-simulation" / f"pipelines-{version}.metallib"
