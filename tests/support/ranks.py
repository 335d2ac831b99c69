"""A program's ranks as threads of one process, which exchange tensors in memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from npu_compiler import CompiledProgram
from npu_runtime import Executor, load_weights
from npu_runtime.collectives import HostCollectives
from npu_runtime.cpu.backend import CPUBackend


class ThreadGroup:
    """Memory through which the ranks of a group exchange tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.left: list[np.ndarray] = [np.empty(0, np.uint8)] * size
        self.barrier = threading.Barrier(size, timeout=60)


class ThreadCollectives(HostCollectives):
    def __init__(self, rank: int, group: ThreadGroup) -> None:
        super().__init__(rank, group.size)
        self._group = group

    def all_gather(self, part: np.ndarray, whole: np.ndarray) -> None:
        self._group.left[self.rank] = part
        self._group.barrier.wait()
        whole[...] = np.stack(self._group.left)
        self._group.barrier.wait()

    def abort(self) -> None:
        self._group.barrier.abort()


def run_ranks(
    program: CompiledProgram, size: int, weights: Mapping[str, Any], inputs: list[Mapping[str, np.ndarray]]
) -> list[dict[str, np.ndarray]]:
    """Each rank's outputs for its inputs, with its part of the weights."""
    group = ThreadGroup(size)

    def run(rank: int) -> dict[str, np.ndarray]:
        try:
            backend = CPUBackend(tune=False)
            backend.collectives = ThreadCollectives(rank, group)
            loaded = load_weights(weights, program, backend, strict=False, rank=rank)
            outputs = Executor(program, backend).run(dict(inputs[rank]), loaded)
            return {spec.name: outputs[spec.name].to_numpy() for spec in program.output_specs}
        except BaseException:
            group.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
