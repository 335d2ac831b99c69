"""Kernels: the ops of a convolutional network, each alone in a program, on the CPU and in the Metal shaders.

A kernel is right when it gives what PyTorch gives in float32, within a rounding of the 16-bit dtype that it stores.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ir_builder import IRBuilder
from metal_harness import CPU_AND_METAL
from torch import Tensor

from npu_compiler import CompiledProgram, CompileOptions, compile
from npu_runtime import Device, Executor

# Op → its arguments as the IR has them (a tuple is a tensor's shape), what PyTorch says, and the kernel that runs.
OPS: dict[str, tuple[list[object], Callable[..., Tensor], str]] = {
    "aten.matmul.default": ([(33, 70), (70, 20)], torch.matmul, "matmul_notrans_kernel"),
    "aten.linear.default": ([(1, 70), (20, 70), (20,)], F.linear, "matmul_vec_kernel"),
    "aten.conv2d.default": ([(1, 3, 9, 9), (8, 3, 3, 3), (8,), [2, 2], [1, 1]], F.conv2d, "conv2d_kernel"),
    "aten.max_pool2d.default": ([(1, 4, 8, 8), [3, 3], [2, 2], [1, 1]], F.max_pool2d, "max_pool2d_kernel"),
    "aten.adaptive_avg_pool2d.default": ([(1, 4, 7, 7), [1, 1]], F.adaptive_avg_pool2d, "adaptive_avg_pool2d_kernel"),
    "aten.add.Tensor": ([(2, 5, 6), (5, 1)], torch.add, "add_broadcast_kernel"),
    "aten.relu.default": ([(3, 7)], torch.relu, "relu_kernel"),
    "aten.softmax.int": ([(4, 50), -1], lambda x, dim: torch.softmax(x, dim), "softmax_kernel"),
}


def program_of(op: str, dtype: str) -> tuple[CompiledProgram, list[np.ndarray]]:
    """A program of one op, and random values for its inputs."""
    g, rng = IRBuilder(), np.random.default_rng(0)
    shapes = [x for x in OPS[op][0] if isinstance(x, tuple)]
    inputs = iter([g.input(f"x{index}", *shape) for index, shape in enumerate(shapes)])
    g.output(g(op, *(next(inputs) if isinstance(x, tuple) else x for x in OPS[op][0]), name="result"))
    values = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    return compile(g.ir(), options=CompileOptions(compute_dtype=dtype)), values


def reference(op: str, values: list[np.ndarray]) -> np.ndarray:
    arguments, function, _ = OPS[op]
    tensors = iter(map(torch.from_numpy, values))
    return function(*(next(tensors) if isinstance(x, tuple) else x for x in arguments)).numpy()


@pytest.mark.parametrize("device", CPU_AND_METAL)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2**-9), ("bfloat16", 2**-6)])
@pytest.mark.parametrize("op", OPS)
def test_a_kernel_gives_what_pytorch_gives(op: str, dtype: str, tolerance: float, device: str) -> None:
    program, values = program_of(op, dtype)
    assert [call.kernel for call in program.kernels if "copy" not in call.kernel] == [OPS[op][2]]
    outputs = Executor(program, Device(device)).run({f"x{index}": value for index, value in enumerate(values)})
    expected = reference(op, values)
    scale = max(1.0, np.abs(expected).max())  # a rounded input moves a sum by as much as the sum is large
    np.testing.assert_allclose(outputs["result"].to_numpy(), expected, atol=4 * tolerance * scale)


def test_a_call_holds_all_that_a_device_has_to_know() -> None:
    program, _ = program_of("aten.linear.default", "float16")
    (call,) = program.kernels
    assert call.params == {"m": 1, "n": 20, "k": 70, "has_bias": 1, "has_residual": 0, "activation": "none"}
    assert [view.shape for view in (*call.inputs, *call.outputs)] == [(1, 70), (20, 70), (20,), (1, 20)]
    assert call.flops == 2 * 20 * 70
