"""The memory from which an executor's launches read the program's inputs: the caller's buffers, or copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from npu_compiler.errors import InputError, WeightError
from npu_compiler.graph.model import TensorSpec
from npu_runtime.buffer import DeviceBuffer, DeviceMemory

SETTLED = 8  # runs with the same buffer after which it is worth preparing launches for it


class InputPlaces:
    """Chooses the memory for each input of a run.

    Launches are prepared for fixed memory. An input is read in the caller's own buffer as long as it comes in the same
    one. When it comes in another buffer, or as an array, it is copied into a buffer that is kept here, so that launches
    are prepared once for that one, and not for every new buffer. An input that comes in the same buffer for more than
    `SETTLED` runs is read there again. A donated input (one that its output overwrites) is never copied: the caller
    gets its buffer back.

    Args:
        counters: Counts by name; "buffers" counts the buffers that are allocated here.
    """

    def __init__(
        self, specs: Mapping[str, TensorSpec], donated: Collection[str], memory: DeviceMemory, counters: Counter[str]
    ) -> None:
        self._specs = specs
        self._donated = donated
        self._memory = memory
        self._counters = counters
        self._own: dict[str, DeviceBuffer] = {}
        self._last: dict[str, tuple[Any, int]] = {}  # the handle copied from, and for how many runs in a row

    def place(self, name: str, value: DeviceBuffer | np.ndarray, bound: DeviceBuffer | None) -> DeviceBuffer:
        """The memory that holds an input's value in this run, for an input in other memory than the last time.

        Args:
            bound: The memory for which launches are prepared; None before the first run.
        """
        if isinstance(value, np.ndarray):
            return self._uploaded(name, value)
        if name in self._donated or bound is None or self._has_settled(name, value):
            return value
        return self._copied(name, value)

    def _uploaded(self, name: str, value: np.ndarray) -> DeviceBuffer:
        spec = self._specs[name]
        if name in self._own:
            self._own[name].write(value, spec)  # in order after the run before: invariant 1 of the executor
            return self._own[name]
        buffer = self._memory.allocate_buffer(value, spec=spec)
        self._counters["buffers"] += 1
        if name not in self._donated:
            self._own[name] = buffer
        return buffer

    def _copied(self, name: str, value: DeviceBuffer) -> DeviceBuffer:
        if name not in self._own:
            self._own[name] = value.copy()
            self._counters["buffers"] += 1
        else:
            self._own[name].copy_from(value)  # likewise
        return self._own[name]

    def _has_settled(self, name: str, value: DeviceBuffer) -> bool:
        handle, runs = self._last.get(name, (None, 0))
        runs = runs + 1 if handle is value.native_handle else 1
        self._last[name] = (value.native_handle, runs)
        return runs > SETTLED


def check_fits(buffer: DeviceBuffer, spec: TensorSpec, what: str, error: type[InputError] | type[WeightError]) -> None:
    """Raise `error` if a buffer has another layout or dtype than the program's spec."""
    memory = spec.alloc_shape or spec.shape
    if buffer.alloc_shape != memory or buffer.dtype != spec.storage:
        raise error(
            f"{what} is {buffer.dtype}{list(buffer.alloc_shape)} in memory, but the program expects "
            f"{spec.storage}{list(memory)}; make it with NPUBuffer.from_numpy(data, device, spec=spec)"
        )
