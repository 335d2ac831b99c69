"""One NVIDIA GPU through CuPy: its stream, its memory, and copies between it and the host."""

from __future__ import annotations

import ctypes
import platform
import queue
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np

from npu_compiler.errors import DeviceError
from npu_compiler.installing import install_command
from npu_runtime.pieces import in_pieces

_GIB = 2**30
_STAGING_BYTES = 4 * 2**20
_STAGING_SLOTS = 16
_SEPARATOR_BYTES = 256
_DLPACK_CUDA = 2  # DLPack's number for CUDA's devices
_FAILED = "the GPU failed, perhaps in a kernel launched earlier (CUDA_LAUNCH_BLOCKING=1 in the environment shows which)"


def load_cupy() -> Any:
    """CuPy, through which this package calls CUDA.

    Raises:
        DeviceError: it is not installed, or does not load.
    """
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(
            f"the CUDA device needs CuPy ({error}); install it with: {install_command('cuda13')} "
            "(or [cuda12] for a CUDA 12 driver)"
        ) from error
    return cupy


def load_driver() -> Any:
    """Load the CUDA driver's own library. Raises `OSError` if there is none."""
    return ctypes.CDLL("nvcuda.dll" if platform.system() == "Windows" else "libcuda.so.1")


def load_nvrtc(cupy: Any) -> Any:
    """CuPy's module for NVRTC, CUDA's run-time compiler.

    Raises:
        DeviceError: it does not load.
    """
    try:
        nvrtc = cupy.cuda.nvrtc
        nvrtc.getVersion()
    except (ImportError, AttributeError, RuntimeError) as error:
        major = cupy.cuda.runtime.runtimeGetVersion() // 1000
        raise DeviceError(
            f"NVRTC, CUDA's run-time compiler, does not load ({error}); it comes with the CUDA toolkit, or with: "
            f"pip install 'cupy-cuda{major}x[ctk]'"
        ) from error
    return nvrtc


@contextmanager
def waking_driver(device_id: int) -> Iterator[None]:
    """Context that initializes the CUDA driver in a thread while the caller's block, which imports CuPy, runs.

    That takes as long as importing CuPy and does not hold the GIL. Nothing is done if CuPy is not installed.
    """
    if find_spec("cupy") is None:
        yield
        return
    thread = threading.Thread(target=wake_driver, args=(device_id,), name="wake-driver")
    thread.start()
    try:
        yield
    finally:
        thread.join()


@cache
def wake_driver(device_id: int) -> None:
    """Create the GPU's primary context, which CuPy uses.

    Errors are ignored: CuPy meets them again and reports them.
    """
    try:
        driver = load_driver()
    except OSError:
        return
    gpu, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(gpu), ctypes.c_int(device_id)) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)


class CUDADevice:
    """A GPU and the stream on which a backend enqueues all its work, in order.

    Attributes:
        stream: The device's own stream. Graphs run on the caller's stream instead, once `call_on` has named it.
        second_stream: A stream for work that runs at the same time as that of `stream` (see `fork` and `join`).
        counters: Counts of allocations, uploads, downloads, launches (one by one), captures, graph_launches, tuned
            products, and what the kernel cache counts.
        arch: Compute capability as CUDA writes it: 90 is 9.0.
        failures: The exceptions that CuPy raises when CUDA reports an error.

    Raises:
        DeviceError: no CuPy, no GPU, or none of this number.
    """

    def __init__(self, device_id: int = 0) -> None:
        with waking_driver(int(device_id)):
            self.cupy = load_cupy()
        cuda = self.cupy.cuda
        self.runtime, self.driver = cuda.runtime, cuda.driver
        self.failures: tuple[type[Exception], ...] = (self.runtime.CUDARuntimeError, self.driver.CUDADriverError)
        self.counters: Counter[str] = Counter()
        self._gpu = cuda.Device(self._checked(device_id))
        self.properties: dict[str, Any] = self.runtime.getDeviceProperties(device_id)
        self.arch = 10 * int(self.properties["major"]) + int(self.properties["minor"])
        with self._gpu:
            self.stream, self.second_stream = cuda.Stream(non_blocking=True), cuda.Stream(non_blocking=True)
            self._forked, self._joined = (cuda.Event(disable_timing=True) for _ in range(2))
        self.caller_stream: Any = None
        self._latest = self.stream
        self._callers: dict[int, Any] = {}
        self._lock = threading.RLock()
        self._staging: Staging | None = None
        self._staging_lock = threading.Lock()

    def _checked(self, device_id: int) -> int:
        try:
            count = self.runtime.getDeviceCount()
        except self.failures as error:
            raise DeviceError(f"no NVIDIA GPU is usable here: {error}") from error
        if not 0 <= device_id < count:
            raise DeviceError(f"there is no GPU {device_id}: this machine has {count}, counted from 0")
        return device_id

    @property
    def name(self) -> str:
        memory = self.properties["totalGlobalMem"] / _GIB
        return f"{self.properties['name'].decode()}, compute capability {self.arch / 10}, {memory:.1f} GiB"

    @property
    def attributes(self) -> Mapping[str, int]:
        """CUDA's attributes of the device by name, such as clocks in kHz."""
        attributes: Mapping[str, int] = self._gpu.attributes
        return attributes

    @contextmanager
    def active(self, doing: str) -> Iterator[None]:
        """Context in which this GPU and its stream are current; CUDA's errors inside become a `DeviceError`.

        Only one thread at a time may be inside: what another one enqueued during a graph capture would become part of
        the graph.

        Args:
            doing: The beginning of the error's message.
        """
        try:
            with self._lock, self._gpu, self.stream:
                self.continue_on(self.stream)
                yield
        except self.failures as error:
            raise DeviceError(f"{doing}: {error}") from error

    def continue_on(self, stream: Any) -> None:
        """Continue on a stream: work enqueued there starts after all work of the stream used before."""
        if stream is not self._latest:
            with self._gpu:
                event = self.cupy.cuda.Event(disable_timing=True)
                event.record(self._latest)
                stream.wait_event(event)
            self._latest = stream

    def fork(self) -> None:
        """Let later work of the second stream wait for the work of the first one so far."""
        self._forked.record(self.stream)
        self.second_stream.wait_event(self._forked)

    def join(self) -> None:
        """Let later work of the first stream wait for the work of the second one so far."""
        self._joined.record(self.second_stream)
        self.stream.wait_event(self._joined)

    def separate(self) -> None:
        """Let later work of the stream start when all earlier work has ended, even kernels made to overlap it."""
        self.clear(self._separator)

    @cached_property
    def _separator(self) -> Any:
        """Memory to clear between two kernels, since kernels overlap only where nothing else stands between them."""
        return self.allocate(_SEPARATOR_BYTES, "what separates kernels")

    def call_on(self, pointer: int) -> None:
        """Run graphs on a caller's stream from now on, after all work enqueued on other streams.

        Args:
            pointer: The stream's handle; 0 is the default stream.
        """
        stream = self._callers.get(pointer)
        if stream is None:
            stream = self._callers[pointer] = self._external(pointer)
        self.continue_on(stream)
        self.caller_stream = stream

    def _external(self, pointer: int) -> Any:
        """A CuPy object for a stream that another library created and must keep alive."""
        cuda = self.cupy.cuda
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # CuPy 14 prefers an object to a handle
            return cuda.ExternalStream(pointer) if pointer else cuda.Stream.null

    def synchronize(self) -> None:
        with self.active(_FAILED):
            self.stream.synchronize()

    def allocate(self, size: int, what: str) -> Any:
        """Uninitialized memory as a CuPy array of `size` bytes, aligned to 256 or more.

        Args:
            what: Purpose of the memory, for the error message.
        """
        with self.active(f"cannot allocate {what}"):
            try:
                memory = self.cupy.ndarray((size,), np.uint8)
            except self.cupy.cuda.memory.OutOfMemoryError as error:
                free, total = self.runtime.memGetInfo()
                raise DeviceError(
                    f"out of memory: {what} takes {_amount(size)}, but {_amount(free)} of the GPU's {_amount(total)} "
                    "are free"
                ) from error
        self.counters["allocations"] += 1
        return memory

    def allocate_visible(self, size: int) -> tuple[Any, np.ndarray]:
        """Zeroed pinned host memory, as a CuPy array for kernels and as a NumPy array for the host."""
        cuda = self.cupy.cuda
        with self.active("cannot allocate pinned memory"):
            pinned = cuda.alloc_pinned_memory(size)
            address = cuda.UnownedMemory(pinned.ptr, size, pinned, self._gpu.id)
            memory = self.cupy.ndarray((size,), np.uint8, cuda.MemoryPointer(address, 0))
        host = np.frombuffer(pinned, np.uint8, size)
        host[:] = 0
        self.counters["allocations"] += 1
        return memory, host

    def marker(self) -> Callable[[], None]:
        """Record an event on the stream and return a function that waits for it."""
        with self.active(_FAILED):
            event = self.cupy.cuda.Event(disable_timing=True)
            event.record(self.stream)

        def wait() -> None:
            with self.active(_FAILED):
                event.synchronize()

        return wait

    def clear(self, memory: Any) -> None:
        if memory.nbytes:
            with self.active("cannot clear memory"):
                self.runtime.memsetAsync(memory.data.ptr, 0, memory.nbytes, self.stream.ptr)

    def clone(self, memory: Any) -> Any:
        copied = self.allocate(memory.nbytes, "a copy")
        if memory.nbytes:
            with self.active("cannot copy memory"):
                kind = self.runtime.memcpyDeviceToDevice
                self.runtime.memcpyAsync(copied.data.ptr, memory.data.ptr, memory.nbytes, kind, self.stream.ptr)
        return copied

    def holds(self, tensor: Any, dtype: str) -> bool:
        """Whether an object is a dense torch tensor of dtype `dtype` on this GPU."""
        is_here = getattr(tensor, "is_cuda", False) and tensor.get_device() == self._gpu.id
        return is_here and str(tensor.dtype) == f"torch.{dtype}" and tensor.is_contiguous()

    def holds_exported(self, value: Any) -> bool:
        """Whether an object that supports DLPack is on this GPU."""
        kind, index = value.__dlpack_device__()
        return (int(kind), int(index)) == (_DLPACK_CUDA, self._gpu.id)

    def foreign(self, tensor: Any) -> Any:
        """The bytes of a torch tensor on this GPU as a CuPy array, which keeps it alive."""
        size, cuda = tensor.numel() * tensor.element_size(), self.cupy.cuda
        memory = cuda.UnownedMemory(tensor.data_ptr(), size, tensor, self._gpu.id)
        return self.cupy.ndarray((size,), np.uint8, cuda.MemoryPointer(memory, 0))

    def copy(self, target: Any, source: Any) -> None:
        """Copy the bytes of `source` to `target`, both on the GPU."""
        with self.active("cannot copy memory"):
            target.data.copy_from_device_async(source.data, source.nbytes)

    def upload(self, memory: Any, data: np.ndarray) -> None:
        """Copy an array's bytes to the beginning of `memory`; the array may be changed as soon as this returns."""
        self.counters["uploads"] += 1
        source = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        with self._staging_lock:
            if self._staging is None:
                with self.active("cannot allocate pinned memory"):
                    self._staging = Staging(self)
        self._staging.copy(memory.data.ptr, source)

    def download(self, memory: Any) -> np.ndarray:
        """The bytes of `memory`, after all work enqueued before has finished."""
        self.counters["downloads"] += 1
        result = np.empty(memory.nbytes, np.uint8)
        if result.size:
            with self.active(_FAILED):
                kind = self.runtime.memcpyDeviceToHost
                self.runtime.memcpyAsync(result.ctypes.data, memory.data.ptr, result.nbytes, kind, self.stream.ptr)
                self.stream.synchronize()
        return result


@dataclass(frozen=True)
class _Slot:
    """A piece of pinned memory, and the event that marks the end of the latest copy from it."""

    memory: np.ndarray
    read: Any


class Staging:
    """Pinned staging buffers for uploads: while the GPU reads some, threads of the host fill others.

    The driver would stage copies from pageable memory with a single thread, which is slower than the bus.
    """

    def __init__(self, device: CUDADevice) -> None:
        self._device = device
        cuda = device.cupy.cuda
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        pinned = cuda.alloc_pinned_memory(_STAGING_SLOTS * _STAGING_BYTES)
        whole = np.frombuffer(pinned, np.uint8, _STAGING_SLOTS * _STAGING_BYTES)
        for memory in np.split(whole, _STAGING_SLOTS):
            self._free.put(_Slot(memory, cuda.Event(disable_timing=True)))

    def copy(self, target: int, source: np.ndarray) -> None:
        """Enqueue a copy of an array's bytes to a device address."""

        def copy_piece(piece: slice) -> None:
            self._copy_piece(target + piece.start, source[piece])

        in_pieces(copy_piece, source.size, _STAGING_BYTES)

    def _copy_piece(self, target: int, source: np.ndarray) -> None:
        runtime, stream = self._device.runtime, self._device.stream
        slot = self._free.get()
        try:
            slot.read.synchronize()
            slot.memory[: source.size] = source
            with self._device.active(_FAILED):
                kind = runtime.memcpyHostToDevice
                runtime.memcpyAsync(target, slot.memory.ctypes.data, source.size, kind, stream.ptr)
                slot.read.record(stream)
        finally:
            self._free.put(slot)


def _amount(size: int) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB // 100 else f"{size} bytes"
