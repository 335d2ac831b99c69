"""The contenders of the CPU benchmark for a network: ours, PyTorch, ONNX Runtime and OpenVINO, on the same weights."""

from __future__ import annotations

import copy
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.cpu.contender import DTYPES, Array, Contender, Factory, torch_contender
from benchmarks.cpu.machine import Floor, Rates, has_bfloat16_products
from benchmarks.cpu.onnx import export, onnx_runtime, openvino
from benchmarks.figures import OURS
from benchmarks.peers import compiled
from benchmarks.timing import wall_time

if TYPE_CHECKING:
    from npu_compiler import CompiledProgram


class NetworkContenders:
    """The contenders for one network and one input.

    Args:
        module: The network.
        x: The input.
        threads: Number of threads.
        folder: Folder for exported files.
    """

    def __init__(self, module: nn.Module, x: Tensor, threads: int, folder: Path) -> None:
        self.module, self.x, self.threads, self.folder = module, x, threads, folder

    def factories(self) -> dict[str, Factory]:
        """Return the contenders' factories by name."""
        dtypes = {"float32": torch.float32}
        if has_bfloat16_products():
            dtypes["bfloat16"] = torch.bfloat16
        return {
            **{f"{OURS} {dtype}": partial(self.ours, dtype) for dtype in DTYPES},
            **{f"PyTorch eager {name}": partial(self.eager, dtype) for name, dtype in dtypes.items()},
            **{f"torch.compile {name}": partial(self.compiled, dtype) for name, dtype in dtypes.items()},
            "ONNX Runtime float32": self.onnx_runtime,
            "OpenVINO float32": partial(self.openvino, "f32"),
            "OpenVINO default": partial(self.openvino, "default"),
        }

    def reference(self) -> Array:
        return self.eager(torch.float32).output()

    @cached_property
    def ir(self) -> dict[str, Any]:
        from npu_sim.extract import extract_ir

        return extract_ir(self.module, (self.x,))

    def program(self, compute_dtype: str) -> CompiledProgram:
        """Return our program for the network."""
        import npu_compiler

        return npu_compiler.compile(self.ir, options=npu_compiler.CompileOptions(compute_dtype=compute_dtype))

    def state(self) -> dict[str, Tensor]:
        both = (*self.module.named_parameters(remove_duplicate=False), *self.module.named_buffers())
        return {name: value.detach() for name, value in both}

    def floor(self, rates: Rates) -> Floor:
        return rates.multiplying(sum(call.flops for call in self.program("float32").kernels))

    def ours(self, compute_dtype: str) -> Contender:
        from npu_runtime import Device, Executor, NPUBuffer, load_weights

        program, device = self.program(compute_dtype), Device("cpu")
        executor, weights = Executor(program, device), load_weights(self.state(), program, device, strict=False)
        (spec,), (result,) = program.input_specs, program.output_specs
        inputs = {spec.name: NPUBuffer.from_numpy(self.x.numpy(), device, spec=spec)}
        return Contender(
            wall_time(lambda: executor.run(inputs, weights)),
            lambda: np.asarray(executor.run(inputs, weights)[result.name].to_numpy(spec=result), np.float32),
        )

    def eager(self, dtype: torch.dtype) -> Contender:
        module, x = self._in_dtype(dtype)
        return torch_contender(lambda: module(x))

    def compiled(self, dtype: torch.dtype) -> Contender:
        module, x = self._in_dtype(dtype)
        call = compiled(module, (x,), mode="default", freezing=True)
        return torch_contender(lambda: call(x))

    def _in_dtype(self, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
        if dtype == torch.float32:
            return self.module, self.x
        return copy.deepcopy(self.module).to(dtype), self.x.to(dtype) if self.x.is_floating_point() else self.x

    @cached_property
    def _exported(self) -> tuple[Path, dict[str, Array]]:
        path = self.folder / "model.onnx"
        return path, export(self.module, (self.x,), path)

    def onnx_runtime(self) -> Contender:
        return onnx_runtime(*self._exported, self.threads)

    def openvino(self, precision: str) -> Contender:
        return openvino(*self._exported, self.threads, precision)
