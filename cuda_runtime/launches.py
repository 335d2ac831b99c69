"""Prepared kernel launches, and sequences of them that become a CUDA graph."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from cuda_runtime.cuda_device import CUDADevice
from cuda_runtime.graph_nodes import argument_updates
from cuda_runtime.tensor_copies import THREADS, TensorCopies
from npu_compiler.errors import DeviceError
from npu_compiler.program.kernels import KernelCall

_FIRST_PART = 32  # launches, or a few more, of the first of two graphs


class CUDALaunch:
    """A prepared kernel or product; calling it enqueues it by itself, outside a graph.

    Args:
        start: Function that enqueues it on the current stream.
        keep: Objects to keep alive with it: its operands' memory, its argument arrays.
        branches: 1 if the launch starts work on the second stream that later launches do not wait for, -1 if it waits
            for that work, else 0.
        written: Address ranges that it writes, in bytes.
        early: Address ranges that it may read while the launches before it still run: it does not wait for them itself.
    """

    def __init__(
        self,
        device: CUDADevice,
        call: KernelCall,
        start: Callable[[], object],
        keep: object,
        branches: int = 0,
        *,
        written: Sequence[range] = (),
        early: Sequence[range] = (),
    ) -> None:
        self._device = device
        self.branches, self.written, self.early = branches, written, early
        self._name = f"kernel '{call.kernel}' of node '{call.node}' does not start"
        self._start = start
        self._keep = keep

    def enqueue(self) -> None:
        """Enqueue the kernel on the current stream."""
        try:
            self._start()
        except self._device.failures as error:
            raise DeviceError(f"{self._name}: {error}") from error

    def __call__(self) -> None:
        with self._device.active(self._name):
            if self.early:
                self._device.separate()
            self.enqueue()
        self._device.counters["launches"] += 1


class MovingLaunch(CUDALaunch):
    """A launch of copies to or from addresses that the caller changes from run to run.

    Attributes:
        copies: The copies, whose addresses `TensorCopies.point_to` sets.
    """

    def __init__(self, device: CUDADevice, call: KernelCall, function: Any, copies: TensorCopies) -> None:
        self.copies, self.function = copies, function
        place = ctypes.c_uint64(copies.argument[0])
        launch = device.driver.launchKernel
        start = partial(
            launch, function.ptr, *copies.grid, THREADS, 1, 1, 0, device.stream.ptr, ctypes.addressof(place), 0
        )
        super().__init__(device, call, start, (place, copies, function))


class GraphSequence:
    """Launches in order: the first call runs them one by one, the second captures a CUDA graph, the rest replay it.

    Capturing does not pay for a list that is run once. And in a first run CUDA and cuBLAS may still load code lazily,
    which not every version of them can do during a capture.

    A list with launches on the second stream becomes two graphs, since starting such a graph takes the host a
    microsecond or more for each launch: the GPU already works on the first graph meanwhile.
    """

    def __init__(self, device: CUDADevice, launches: Sequence[CUDALaunch]) -> None:
        self._device = device
        self._launches = tuple(launches)
        self._moving = [launch for launch in launches if isinstance(launch, MovingLaunch)]
        self._updates: list[Callable[[], None]] = []
        self._has_run = False
        self._graphs: list[Any] = []

    def __call__(self) -> None:
        device = self._device
        if self._graphs and device.caller_stream is not None:
            try:
                device.continue_on(device.caller_stream)
                self._replay(device.caller_stream)
            except device.failures as error:
                raise DeviceError(f"the program does not start: {error}") from error
            device.counters["graph_launches"] += 1
            return
        with self._device.active("the program does not start"):
            if not self._has_run:
                self._enqueue(self._launches)
                self._device.counters["launches"] += len(self._launches)
                self._has_run = True
                return
            if not self._graphs:
                self._graphs = [self._capture(part) for part in self._parts()]
                self._updates = self._find_updates()
            self._replay(self._device.stream)
        self._device.counters["graph_launches"] += 1

    def _replay(self, stream: Any) -> None:
        for update in self._updates:
            update()
        for graph in self._graphs:
            graph.launch(stream)

    def _parts(self) -> list[Sequence[CUDALaunch]]:
        """The launches divided into one or two lists, each of which becomes a graph."""
        under_way = 0
        if any(launch.branches for launch in self._launches[_FIRST_PART:]) and not self._moving:
            for index, launch in enumerate(self._launches):
                if index >= _FIRST_PART and not under_way:
                    return [self._launches[:index], self._launches[index:]]
                under_way += launch.branches
        return [self._launches]

    def _find_updates(self) -> list[Callable[[], None]]:
        if not self._moving:
            return []
        (graph,) = self._graphs
        return argument_updates(graph, self._moving[0].function.ptr, [x.copies.argument for x in self._moving])

    def _enqueue(self, launches: Sequence[CUDALaunch]) -> None:
        running: list[CUDALaunch] = []  # those that may not have ended when the next one starts
        for launch in launches:
            if any(_meet(read, written) for read in launch.early for other in running for written in other.written):
                self._device.separate()
                running = []
            launch.enqueue()
            # One that reads early may let the next one start before its own wait; all others do so behind it.
            running = [*running, launch] if launch.early else [launch]

    def _capture(self, launches: Sequence[CUDALaunch]) -> Any:
        stream = self._device.stream
        stream.begin_capture()
        try:
            self._enqueue(launches)
        except BaseException:
            with suppress(*self._device.failures):
                stream.end_capture()  # otherwise the stream stays in capture mode
            raise
        self._device.counters["captures"] += 1
        return stream.end_capture()


def _meet(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop
