"""Prepared kernels, and lists of them that become a CUDA graph."""

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


class CUDALaunch:
    """A prepared kernel or product; calling it runs it alone.

    Args:
        start: Enqueues it on the current stream.
        keep: Objects to keep alive with it: its operands' memory, its argument arrays.
    """

    def __init__(self, device: CUDADevice, call: KernelCall, start: Callable[[], object], keep: object) -> None:
        self._device = device
        self._name = f"kernel '{call.kernel}' of node '{call.node}' does not start"
        self._start = start
        self._keep = keep

    def enqueue(self) -> None:
        """Enqueue it on the stream, which the caller has made the current one."""
        try:
            self._start()
        except self._device.failures as error:
            raise DeviceError(f"{self._name}: {error}") from error

    def __call__(self) -> None:
        with self._device.active(self._name):
            self.enqueue()
        self._device.counters["launches"] += 1


class MovingLaunch(CUDALaunch):
    """Copies whose outside addresses change from run to run.

    Attributes:
        copies: Where they are set.
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
    """

    def __init__(self, device: CUDADevice, launches: Sequence[CUDALaunch]) -> None:
        self._device = device
        self._launches = tuple(launches)
        self._moving = [launch for launch in launches if isinstance(launch, MovingLaunch)]
        self._updates: list[Callable[[], None]] = []
        self._has_run = False
        self._graph: Any = None

    def __call__(self) -> None:
        device = self._device
        if self._graph is not None and device.caller_stream is not None:
            try:
                device.continue_on(device.caller_stream)
                for update in self._updates:
                    update()
                self._graph.launch(device.caller_stream)
            except device.failures as error:
                raise DeviceError(f"the program does not start: {error}") from error
            device.counters["graph_launches"] += 1
            return
        with self._device.active("the program does not start"):
            if not self._has_run:
                self._enqueue()
                self._device.counters["launches"] += len(self._launches)
                self._has_run = True
                return
            if self._graph is None:
                self._graph = self._capture()
                self._updates = self._found(self._graph)
            for update in self._updates:
                update()
            self._graph.launch(self._device.stream)
        self._device.counters["graph_launches"] += 1

    def _found(self, graph: Any) -> list[Callable[[], None]]:
        if not self._moving:
            return []
        return argument_updates(graph, self._moving[0].function.ptr, [x.copies.argument for x in self._moving])

    def _enqueue(self) -> None:
        for launch in self._launches:
            launch.enqueue()

    def _capture(self) -> Any:
        stream = self._device.stream
        stream.begin_capture()
        try:
            self._enqueue()
        except BaseException:
            with suppress(*self._device.failures):
                stream.end_capture()  # otherwise the stream stays in capture mode
            raise
        self._device.counters["captures"] += 1
        return stream.end_capture()
