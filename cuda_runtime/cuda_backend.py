"""`CUDABackend`: an NVIDIA GPU. A program contains its kernels as CUDA C; matrix products go to cuBLASLt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np

from cuda_compiler.cuda_program import (
    CollectiveLaunch,
    ConvolutionLaunch,
    CUDAProgram,
    GemmLaunch,
    KernelLaunch,
    LaunchKind,
    PeerExchange,
    kernel_launch_of,
    launch_of,
    peer_exchange_of,
)
from cuda_compiler.resident.clocks import has_clocks, intervals
from cuda_compiler.specialization.gpu import GPU
from cuda_compiler.specialization.sizes import groups
from cuda_compiler.target import CUDACodegenTarget
from cuda_runtime.ceilings import gpu_ceilings
from cuda_runtime.cublaslt import SCALES_BY_ROW
from cuda_runtime.cuda_device import CUDADevice, load_nvrtc
from cuda_runtime.cuda_executor import CUDAExecutor
from cuda_runtime.cudnn import open_cudnn
from cuda_runtime.dlpack import carrier, retag
from cuda_runtime.kernel_cache import KernelCache
from cuda_runtime.launches import CUDALaunch, GraphSequence, MovingLaunch
from cuda_runtime.nccl import NCCLCollectives
from cuda_runtime.overlapping import overlapping_launch
from cuda_runtime.tensor_copies import MOST, SOURCE, THREADS, Copy, TensorCopies
from cuda_runtime.tensor_maps import encoded
from cuda_runtime.tuned_convolutions import TunedConvolutions
from cuda_runtime.tuned_products import TunedProducts
from npu_compiler.errors import DeviceError, InputError
from npu_compiler.graph.dtypes import INT32_MAX, itemsize, numpy_dtype
from npu_compiler.graph.model import TensorSpec
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.target import CodegenTarget
from npu_compiler.program.views import numel
from npu_compiler.target_config import CUDA_GPU, TargetConfig
from npu_runtime.backend import Backend, DeviceBuffer, Launch, Operand, Shape
from npu_runtime.background import background_work
from npu_runtime.buffer import StagedInputs
from npu_runtime.cache_folder import cache_folder
from npu_runtime.collectives import Share, no_group
from npu_runtime.hardware import Ceilings, PhaseTime
from npu_runtime.packing import storage_name

_ALIGNMENT = 256  # bytes, which kernels may rely on


class CUDABuffer(DeviceBuffer):
    """Memory on the GPU; `native_handle` is a CuPy array of its bytes.

    Copies are enqueued on the backend's stream, so a buffer can be read right after a run.
    """

    def __init__(
        self, device: CUDADevice, shape: Shape, alloc_shape: Shape | None, dtype: str, native_handle: Any = None
    ) -> None:
        super().__init__(shape, alloc_shape, dtype, native_handle)
        self._device = device
        if native_handle is None:
            self.native_handle = device.allocate(self.size_bytes, f"{dtype}{list(self.alloc_shape)}")

    def _download(self) -> np.ndarray:
        data: np.ndarray = self._device.download(self.native_handle).view(numpy_dtype(self.dtype))
        return data.reshape(self.alloc_shape)

    def _upload(self, data: np.ndarray) -> None:
        self._device.upload(self.native_handle, data)

    def _clone(self) -> CUDABuffer:
        return CUDABuffer(
            self._device, self.shape, self.alloc_shape, self.dtype, self._device.clone(self.native_handle)
        )

    def _copy_from(self, other: DeviceBuffer) -> None:
        with self._device.active("cannot copy memory"):
            self.native_handle.data.copy_from_device_async(other.native_handle.data, self.size_bytes)

    def _clear(self) -> None:
        self._device.clear(self.native_handle)

    def array(self) -> Any:
        """The data as a CuPy array of `shape` that shares this memory; bool as uint8, bfloat16 as uint16."""
        with self._device.active("cannot view memory"):
            whole = self.native_handle.view(carrier(self.dtype)).reshape(self.alloc_shape)
            return whole[tuple(slice(size) for size in self.shape)]

    def __dlpack__(self, **kwargs: Any) -> Any:
        """A capsule that shares this memory; the consumer's stream waits for the work enqueued so far."""
        self.check_current()
        array = self.array()
        with self._device.active("cannot export memory"):
            return retag(array.__dlpack__(**kwargs), self.dtype)

    def __dlpack_device__(self) -> tuple[Any, int]:
        device: tuple[Any, int] = self.native_handle.__dlpack_device__()
        return device


class CUDABackend(Backend):
    """Runs programs compiled for `cuda_gpu` on an NVIDIA GPU.

    Args:
        device_id: Number of the GPU, counted from 0.

    Attributes:
        counters: Counts of what was allocated, copied, compiled, captured and launched (see `CUDADevice.counters`).

    Raises:
        DeviceError: CuPy is missing, or there is no such GPU.
    """

    config: TargetConfig = CUDA_GPU
    runs_in_flight = 4
    first_runs = 2  # see `GraphSequence`
    joins_groups = True

    def __init__(self, device_id: int = 0) -> None:
        self._device = CUDADevice(device_id)
        self._sources: dict[str, str] = {}
        self._modules: dict[str, Any] = {}

    @property
    def device(self) -> str:
        return f"CUDA, {self._device.name}"

    @property
    def ceilings(self) -> Ceilings:
        return gpu_ceilings(self._device.attributes, self._device.arch)

    @property
    def target(self) -> CodegenTarget:
        group = self.collectives
        gpu = GPU(
            capability=self._device.arch,
            shared_memory=int(self._device.properties["sharedMemPerBlockOptin"]),
            multiprocessors=int(self._device.properties["multiProcessorCount"]),
            has_scaled_gemm=self._device.runtime.runtimeGetVersion() >= SCALES_BY_ROW,
            reaches_peers=isinstance(group, NCCLCollectives) and group.peers is not None,
        )
        return CUDACodegenTarget(gpu)

    @property
    def counters(self) -> Counter[str]:
        """Counts of launches, compilations and other events since the backend was opened (see `CUDADevice`)."""
        return self._device.counters

    @cached_property
    def _cache(self) -> KernelCache:
        nvrtc = load_nvrtc(self._device.cupy)
        return KernelCache(nvrtc, self._device.arch, cache_folder() / "cuda", self.counters)

    @cached_property
    def _products(self) -> TunedProducts:
        return TunedProducts(self._device, cache_folder() / "cuda")

    @cached_property
    def _convolutions(self) -> TunedConvolutions:
        return TunedConvolutions(self._device, cache_folder() / "cuda", self._start_form, open_cudnn(self._device))

    def allocate(self, shape: Shape, dtype: str, alloc_shape: Shape | None = None) -> CUDABuffer:
        return CUDABuffer(self._device, shape, alloc_shape, dtype)

    def allocate_joined(self, parts: Sequence[np.ndarray], spec: TensorSpec) -> DeviceBuffer:
        """A buffer of joined arrays, each of which is uploaded to its own offset if it needs no cast and no padding.

        Concatenating them on the host first would be one more copy.
        """
        stored = numpy_dtype(spec.storage or spec.dtype)
        whole = (sum(len(part) for part in parts), *parts[0].shape[1:]) if parts[0].ndim else ()
        if len(parts) == 1 or any(part.dtype != stored for part in parts) or whole != (spec.alloc_shape or spec.shape):
            return super().allocate_joined(parts, spec)
        buffer = CUDABuffer(self._device, spec.shape, spec.alloc_shape, stored.name)
        start = 0
        for part in parts:
            self._device.upload(buffer.native_handle[start : start + part.nbytes], part)
            start += part.nbytes
        return buffer

    def allocate_visible(self, shape: Shape, dtype: str) -> tuple[CUDABuffer, Callable[[], np.ndarray]]:
        """Allocate pinned host memory, which kernels write over the bus, so that reading a result needs no copy.

        Returns:
            The buffer, and a function that returns its contents as an array.
        """
        memory, host = self._device.allocate_visible(numel(shape) * itemsize(dtype))
        seen = host.view(numpy_dtype(dtype)).reshape(shape)
        return CUDABuffer(self._device, shape, None, dtype, memory), lambda: seen

    def allocate_staged(self, specs: Iterable[TensorSpec]) -> StagedInputs:
        """Allocate all inputs in one piece of memory, so that a run uploads them with a single copy."""
        layouts, size = dict[str, tuple[TensorSpec, int, int]](), 0
        for spec in specs:
            taken = numel(spec.alloc_shape or spec.shape) * itemsize(spec.storage or spec.dtype)
            layouts[spec.name] = spec, size, size + taken
            size = groups(size + taken, _ALIGNMENT) * _ALIGNMENT
        memory, host = self._device.allocate(size, "a step's inputs"), np.zeros(size, np.uint8)
        self._device.clear(memory)
        buffers, arrays = dict[str, DeviceBuffer](), dict[str, np.ndarray]()
        for name, (spec, start, end) in layouts.items():
            dtype = spec.storage or spec.dtype
            buffers[name] = CUDABuffer(self._device, spec.shape, spec.alloc_shape, dtype, memory[start:end])
            arrays[name] = host[start:end].view(numpy_dtype(dtype)).reshape(spec.alloc_shape or spec.shape)
        return StagedInputs(buffers, arrays, lambda: self._device.upload(memory, host))

    def marker(self) -> Callable[[], None]:
        return self._device.marker()

    def compile(self, calls: Iterable[KernelCall], sources: Mapping[str, str] = MappingProxyType({})) -> None:
        """Compile the sources that the calls need, all at once, and tune the products and convolutions that are new.

        Raises:
            DeviceError: a source is missing, does not compile, or differs from an earlier one of the same name.
        """
        needed: dict[str, str] = {}
        products: list[KernelCall] = []
        convolutions: list[KernelCall] = []
        kernels: list[KernelCall] = []
        for call in calls:
            match launch_of(call):
                case GemmLaunch():
                    products.append(call)
                case ConvolutionLaunch():
                    convolutions.append(call)
                    kernels += self._convolutions.kernels(call)
                    products += self._convolutions.products(call)
                case KernelLaunch():
                    kernels.append(call)
        for call in kernels:
            text = sources.get(call.source, self._sources.get(call.source))
            if text is None:
                raise DeviceError(f"the program contains no source '{call.source}' for kernel '{call.kernel}'")
            if self._sources.get(call.source, text) != text:
                raise DeviceError(f"two programs have different kernel sources with the name '{call.source}'")
            if call.source not in self._modules:
                needed[call.source] = text
        with background_work("compiling kernels for this GPU"):
            images = self._cache.images(needed)
        for name, image in images.items():
            module = self._device.cupy.cuda.function.Module()
            with self._device.active(f"kernel source '{name}' does not load"):
                module.load(image)
            self._modules[name] = module
            self._sources[name] = needed[name]
        with background_work("measuring which kernels are the fastest here"):
            if products:
                self._products.tune(products)
            if convolutions:
                self._convolutions.tune(convolutions)

    def prepare(self, call: KernelCall, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> CUDALaunch:
        operands = [*inputs, *outputs]
        addresses = [_address(operand) for operand in operands]
        memory = [operand.memory.native_handle for operand in operands]
        others = self._connect(call, exchange, addresses, memory) if (exchange := peer_exchange_of(call)) else []
        written = [_extent(operand) for operand in outputs]
        launch_with = partial(CUDALaunch, self._device, written=written)
        match launch_of(call):
            case KernelLaunch(kind=LaunchKind.RESIDENT) as launch:
                return self._prepare_resident(call, launch, addresses, memory, written)
            case KernelLaunch(kind=LaunchKind.PEER_COPY):
                return launch_with(call, self._copy_beside(call, addresses, others), memory, 1)
            case KernelLaunch(kind=LaunchKind.AFTER_COPIES):
                return launch_with(call, self._after_copies(self._start(call, addresses)), memory, -1)
            case CollectiveLaunch() as collective:
                start = self._exchange(call, collective, inputs[0].view.dtype, addresses)
                return launch_with(call, start, memory)
            case ConvolutionLaunch():
                form = self._convolutions.form(call)
                if not isinstance(form, KernelCall):
                    # cuDNN's kernels start before the one before has ended, and do not wait for bias and residual.
                    early = [_extent(operand) for operand in inputs[1:]]
                    return launch_with(call, form.launch(addresses), (memory, form), early=early)
                call = form
        return launch_with(call, self._start_form(call, addresses), memory)

    def _start_form(self, call: KernelCall, addresses: Sequence[int]) -> Callable[[], object]:
        """A function that enqueues the call's kernel, or its product of cuBLASLt, on operands at addresses."""
        if isinstance(launch_of(call), GemmLaunch):
            return self._products.launch(call, addresses)
        return self._start(call, addresses)

    def _connect(
        self, call: KernelCall, exchange: PeerExchange, addresses: Sequence[int], memory: Sequence[Any]
    ) -> list[int]:
        """Write the addresses of the other ranks' memory to the operand of a kernel that exchanges values with them.

        All ranks must call this together.

        Returns:
            The addresses on the other ranks, in order, of the operand that ranks read of each other.
        """
        if not isinstance(self.collectives, NCCLCollectives):
            raise no_group(call)
        self.collectives.check(call)
        if self.collectives.peers is None:
            raise DeviceError("these GPUs do not reach each other's memory; compile the program with their own target")
        read = addresses[exchange.read] if exchange.read >= 0 else None
        table = self.collectives.peers.table(exchange.exchange_bytes, memory[exchange.peers], read)
        self._device.upload(memory[exchange.peers], table)
        read_at = table[exchange.ranks + 2 :].tolist()
        return [address for rank, address in enumerate(read_at) if rank != self.collectives.rank]

    def _copy_beside(self, call: KernelCall, addresses: Sequence[int], others: Sequence[int]) -> Callable[[], object]:
        """A function that enqueues the call's kernel and then peer copies on the second stream.

        The kernel waits for the other ranks. Each copied part is as large as the first input, and the parts stand one
        after the other, by rank, in the first output.
        """
        device, target, copied = self._device, addresses[len(call.inputs)], call.inputs[0]
        size = copied.numel * itemsize(copied.dtype)
        wait = self._start(call, addresses, device.second_stream)
        copy, kind, stream = device.runtime.memcpyAsync, device.runtime.memcpyDefault, device.second_stream.ptr

        def start() -> None:
            device.fork()
            wait()
            for place, source in enumerate(others):
                copy(target + place * size, source, size, kind, stream)

        return start

    def _after_copies(self, kernel: Callable[[], object]) -> Callable[[], object]:
        """A function that enqueues a kernel to start after all work of the second stream so far."""

        def start() -> None:
            self._device.join()
            kernel()

        return start

    def _exchange(
        self, call: KernelCall, collective: CollectiveLaunch, dtype: str, addresses: Sequence[int]
    ) -> Callable[[], object]:
        if not isinstance(self.collectives, NCCLCollectives):
            raise no_group(call)
        self.collectives.check(call)
        return self.collectives.launch(collective, dtype, addresses)

    def join(self, rank: int, size: int, share: Share) -> None:
        self.collectives = NCCLCollectives(self._device, rank, size, share)

    def _start(self, call: KernelCall, addresses: Sequence[int], stream: Any = None) -> Callable[[], object]:
        """A function that enqueues a kernel on operands at these addresses, inputs first.

        Args:
            stream: The stream to enqueue it on; None means the device's own.
        """
        plan = kernel_launch_of(call)
        grid, block, shared = plan.grid, plan.block, plan.shared
        function = self._function(call, numel(block), shared)
        arguments = np.array(addresses, np.uint64)
        maps = [encoded(each, addresses[each.operand]) for each in plan.maps]
        pointers_at = arguments.ctypes.data + 8 * np.arange(len(addresses), dtype=np.uint64)
        places = np.array([*pointers_at.tolist(), *(each.ctypes.data for each in maps)], np.uint64)
        handle, pointers = (stream or self._device.stream).ptr, places.ctypes.data
        launch: Callable[[], object]
        if plan.kind is LaunchKind.OVERLAPPING and self._device.arch >= 90:
            launch = overlapping_launch(function.ptr, grid, block, shared, handle, pointers)
        elif plan.kind is LaunchKind.COOPERATIVE:
            start_together = self._device.driver.launchCooperativeKernel
            launch = partial(start_together, function.ptr, *grid, *block, shared, handle, pointers)
        else:
            launch = partial(self._device.driver.launchKernel, function.ptr, *grid, *block, shared, handle, pointers, 0)

        def start(keep: object = (function, arguments, places, maps)) -> None:
            launch()

        return start

    def _prepare_resident(
        self, call: KernelCall, launch: KernelLaunch, addresses: list[int], memory: list[Any], written: list[range]
    ) -> CUDALaunch:
        """A cooperative launch: one block on every multiprocessor, with all the shared memory that a block may have.

        The kernel's only parameter is a struct with all operands. It may start before the preceding kernel has ended.
        """
        block, least, properties = launch.block, launch.shared, self._device.properties
        shared = int(properties["sharedMemPerBlockOptin"])
        if shared < least:
            raise DeviceError(
                f"kernel '{call.kernel}' needs {least} bytes of shared memory a block, but this GPU has {shared}; "
                "compile the program with this device's target"
            )
        function = self._function(call, numel(block), shared)
        arguments = np.array(addresses, np.uint64)
        places = np.array([arguments.ctypes.data], np.uint64)
        grid = (int(properties["multiProcessorCount"]), 1, 1)
        stream, pointers = self._device.stream.ptr, places.ctypes.data
        start: Callable[[], object]
        if self._device.arch >= 90:
            start = overlapping_launch(function.ptr, grid, block, shared, stream, pointers, cooperative=True)
        else:
            start_together = self._device.driver.launchCooperativeKernel
            start = partial(start_together, function.ptr, *grid, *block, shared, stream, pointers)
        return CUDALaunch(self._device, call, start, (memory, function, arguments, places), written=written)

    def _function(self, call: KernelCall, threads: int, shared: int) -> Any:
        """The loaded function of a call's kernel, configured for its block size and shared memory.

        Raises:
            DeviceError: the source has no such kernel, or the GPU cannot run it with so many threads or so much memory.
        """
        name = f"kernel '{call.kernel}' of source '{call.source}'"
        if call.source not in self._modules:
            raise DeviceError(f"{name} was not compiled: Backend.compile() comes before prepare()")
        driver = self._device.driver
        with self._device.active(f"{name} cannot be used"):
            function = self._modules[call.source].get_function(call.kernel)
            # Querying an attribute makes CUDA load the code now instead of at the first launch (lazy loading).
            limit = driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function.ptr)
            allowed = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            if shared > driver.funcGetAttribute(allowed, function.ptr):
                driver.funcSetAttribute(function.ptr, allowed, shared)
        if threads > limit:
            raise DeviceError(f"{name} is launched with {threads} threads a block, but its registers allow {limit}")
        return function

    def sequence(self, launches: Sequence[Launch], plan: ExecutionPlan) -> Launch:
        """All launches in order as one CUDA graph launch."""
        own = [launch for launch in launches if isinstance(launch, CUDALaunch)]
        assert len(own) == len(launches), "a launch of another backend"
        return GraphSequence(self._device, own)

    def synchronize(self) -> None:
        self._device.synchronize()

    def create_executor(self, program: CUDAProgram) -> CUDAExecutor:
        """Return an executor of a program on this GPU."""
        return CUDAExecutor(program, self, config=CUDA_GPU)

    def call_on(self, stream: int) -> None:
        """Run programs on the caller's stream with this handle from now on, after all work enqueued before."""
        try:
            self._device.call_on(stream)
        except self._device.failures as error:
            raise DeviceError(f"the caller's stream cannot be used: {error}") from error

    def adopt(self, parts: Sequence[Any], spec: TensorSpec) -> DeviceBuffer | None:
        """A buffer over tensors that are on this GPU: one tensor's own memory, or a copy that joins several.

        None if their shapes or dtypes are not those of `spec`, or a tensor is on another device.
        """
        stored = spec.storage or spec.dtype
        whole = (sum(len(part) for part in parts), *parts[0].shape[1:]) if parts[0].ndim else ()
        if whole != (spec.alloc_shape or spec.shape) or any(not self._device.holds(part, stored) for part in parts):
            return None
        self._device.runtime.deviceSynchronize()  # what another library enqueued for these tensors
        if len(parts) == 1 and parts[0].data_ptr() % _ALIGNMENT == 0:
            return CUDABuffer(self._device, spec.shape, spec.alloc_shape, stored, self._device.foreign(parts[0]))
        buffer = CUDABuffer(self._device, spec.shape, spec.alloc_shape, stored)
        start = 0
        for part in parts:
            source = self._device.foreign(part)
            self._device.copy(buffer.native_handle[start : start + source.nbytes], source)
            start += source.nbytes
        return buffer

    def from_dlpack(self, value: Any) -> DeviceBuffer | None:
        """A copy of an array that is on this GPU, made on this device's stream after the work its library has enqueued.

        None if the array is elsewhere, or cannot be exported.
        """
        if not self._device.holds_exported(value):
            return None
        cupy = self._device.cupy
        try:
            with self._device.active("cannot import memory"):
                array = cupy.from_dlpack(value)
                stored = storage_name(array)
                if array.size and array.dtype == np.int64 and abs(array).max() > INT32_MAX:
                    raise InputError("an integer does not fit in 32 bits, in which the device computes")
                dense = cupy.ascontiguousarray(array, dtype=stored)
                buffer = CUDABuffer(self._device, dense.shape, None, stored)
                self._device.copy(buffer.native_handle, dense.reshape(-1).view(np.uint8))
                self._device.runtime.deviceSynchronize()  # the copy is done before the caller's memory changes
        except (BufferError, TypeError, ValueError):
            return None
        return buffer

    def borrow(self, tensor: Any, buffer: DeviceBuffer) -> DeviceBuffer:
        """A buffer of the shape and dtype of `buffer` in the memory of a tensor of that size on this GPU."""
        return CUDABuffer(self._device, buffer.shape, buffer.alloc_shape, buffer.dtype, self._device.foreign(tensor))

    def tensor_copies(self, copies: Sequence[Copy], inwards: bool, flag: DeviceBuffer) -> list[MovingLaunch]:
        """Prepare copies between a caller's tensors and buffers of programs.

        Args:
            inwards: Whether the copies go to the buffers, rather than from them.
            flag: An int32 that receives the number of a copy, from 1, that met an integer out of bounds.
        """
        placeholder = KernelLaunch((1, 1, 1), (THREADS, 1, 1), 0, LaunchKind.KERNEL)
        call = KernelCall("tensor_copies", "tensor_copies", (), (), placeholder.params(), "tensor_copies")
        self.compile([call], {"tensor_copies": SOURCE})
        function, flagged = self._function(call, THREADS, 0), int(flag.native_handle.data.ptr)
        groups = [copies[start : start + MOST] for start in range(0, len(copies), MOST)]
        return [MovingLaunch(self._device, call, function, TensorCopies(x, inwards, flagged)) for x in groups]

    @cached_property
    def _hold(self) -> Callable[[], object]:
        launch = KernelLaunch((1, 1, 1), (1, 1, 1), 0, LaunchKind.KERNEL)
        call = KernelCall("hold", "hold", (), (), launch.params(), "hold")
        self.compile([call], {"hold": _HOLD})
        return self._start(call, ())

    def timed(self, launch: Launch) -> float:
        """Seconds that a launch takes, measured with events.

        A delay kernel occupies the GPU until everything is enqueued, so the launch never waits for the host.
        """
        event, hold = self._device.cupy.cuda.Event, self._hold
        with self._device.active("cannot time a launch"):
            start, end = event(), event()
            hold()
            start.record(self._device.stream)
            launch()
            end.record(self._device.stream)
            end.synchronize()
            milliseconds: float = self._device.cupy.cuda.get_elapsed_time(start, end)
        return milliseconds / 1000

    def phases(self, call: KernelCall, memory: Mapping[str, DeviceBuffer]) -> Sequence[PhaseTime]:
        """The recorded steps of each multiprocessor in the latest run of a resident kernel.

        There are none unless the program was compiled with `phase_clocks`.
        """
        if not has_clocks(call):
            return ()
        return [
            PhaseTime(
                f"multiprocessor {interval.multiprocessor:3}",
                interval.name,
                interval.start,
                interval.end - interval.start,
            )
            for interval in intervals(call, memory[call.outputs[-1].buffer].to_numpy())
        ]


_HOLD = """
extern "C" __global__ void hold() {
    for (int i = 0; i < 100; i++) {
        __nanosleep(1000);
    }
}
"""


def _address(operand: Operand) -> int:
    """Address of an operand's first element in GPU memory."""
    view = operand.view
    first = view.offset * itemsize(view.dtype) if view.numel else 0
    return int(operand.memory.native_handle.data.ptr) + operand.byte_offset + first


def _extent(operand: Operand) -> range:
    """The addresses from an operand's first element to its last."""
    view, first = operand.view, _address(operand)
    return range(first, first + (view.span + 1) * itemsize(view.dtype) if view.numel else first)


CudaBackend, CudaBuffer = CUDABackend, CUDABuffer
