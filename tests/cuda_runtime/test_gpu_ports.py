"""`GPUPorts` where there is no GPU: on the CPU device, whose memory stands for a GPU's and which copies by address."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from cuda_runtime.tensor_copies import Copy
from npu_compiler.graph.dtypes import numpy_dtype
from npu_runtime import CPUBackend, Executor, load_weights
from npu_sim.extract import extract_ir
from npu_sim.module import gpu_ports


class HostCopies:
    """Copies between tensors and buffers in host memory, in the place of `cuda_runtime.tensor_copies.TensorCopies`."""

    def __init__(self, copies: Sequence[Copy], inwards: bool) -> None:
        self._copies, self._inwards, self.copies = copies, inwards, self

    def point_to(self, addresses: Sequence[int]) -> None:
        self._addresses = list(addresses)

    def __call__(self) -> None:
        for copy, address in zip(self._copies, self._addresses, strict=True):
            outside, inside = (
                memory_at(address, copy.count, copy.outside),
                memory_at(copy.address, copy.count, copy.inside),
            )
            source, target = (outside, inside) if self._inwards else (inside, outside)
            target[:] = source.astype(target.dtype)


def memory_at(address: int, count: int, dtype: str) -> np.ndarray:
    """The elements that lie at an address."""
    kind = numpy_dtype(dtype)
    return np.frombuffer((ctypes.c_char * (count * kind.itemsize)).from_address(address), kind)


class HostGPU(CPUBackend):
    """The CPU device with the methods that `GPUPorts` calls beside those of every device."""

    def allocate_visible(self, shape: tuple[int, ...], dtype: str) -> Any:
        array = np.zeros(shape, dtype)
        return array, lambda: array

    def tensor_copies(self, copies: Sequence[Copy], inwards: bool, flag: object) -> list[HostCopies]:
        return [HostCopies(copies, inwards)] if copies else []

    def call_on(self, stream: int) -> None:
        pass


class Outputs(nn.Module):
    """Returns a tensor and the places of its largest elements, so outputs of different dtypes."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = torch.relu(x) + 1
        return {"first": y, "best": (y * 2).argmax(-1)}


@pytest.fixture
def _streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(gpu_ports, "_address", lambda buffer: buffer.native_handle.ctypes.data)


@pytest.mark.usefixtures("_streams")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kept", [("first", "best"), ("first",), ("best",)])
def test_outputs_that_the_caller_keeps_are_new_tensors_at_each_call(
    dtype: str, kept: tuple[str, ...], rng: np.random.Generator
) -> None:
    backend = HostGPU(native=False)
    module = Outputs()
    program = npu_compiler.compile(
        extract_ir(module, [torch.zeros(3, 8)]), backend.target, npu_compiler.CompileOptions(compute_dtype=dtype)
    )
    bound = Executor(program, backend).bound(load_weights({}, program, backend))
    ports = gpu_ports.GPUPorts(program, bound, backend, torch.device("cpu", 0), set(kept), set())  # type: ignore[arg-type]
    given = [torch.from_numpy(rng.standard_normal((3, 8), np.float32)) for _ in range(4)]
    results = []
    for x in given:
        ports.fill([x])
        bound.launch()
        results.append(ports.take({program.input_specs[0].name: x}))
    for name in kept:
        assert len({result[name].data_ptr() for result in results}) == len(given), "an output is overwritten"
        for x, result in zip(given, results, strict=True):
            wanted = module(x)[name]
            assert result[name].dtype == wanted.dtype
            torch.testing.assert_close(result[name], wanted, rtol=2e-3, atol=2e-3)
