"""Matrix products, float32 accumulation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from npu_compiler.ops import ELEMENTWISE
from npu_compiler.program.elementwise import ACTIVATIONS
from npu_runtime.cpu.kernels.elementwise import torch_function
from npu_runtime.cpu.kernels.registry import Params, Tensors, cpu_kernel, to_float


def activated(tensor: torch.Tensor, activation: str) -> torch.Tensor:
    """A tensor under one of `npu_compiler`'s `ACTIVATIONS`, or as it is under "none"."""
    return tensor if activation == "none" else torch_function(ELEMENTWISE[ACTIVATIONS[activation]].torch)(tensor)


@cpu_kernel("matmul_kernel", "matmul_notrans_kernel", "matmul_vec_kernel", "matmul_vec_notrans_kernel")
def linear(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """out[M, N] = act(x[M, K] · w[N, K]ᵀ + bias) + residual."""
    x, weight, *rest = (to_float(t) for t in inputs)
    result = x.float() @ weight.float().t()
    if params["has_bias"]:
        result += rest.pop(0)
    result = activated(result, params["activation"])
    if params["has_residual"]:
        result += rest.pop(0)
    outputs[0].copy_(result)


@cpu_kernel("gated_matmul_vec_kernel")
def gated_linear(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """out[1, N] = act(gate) · up, where [gate, up] = x[1, K] · w[2N, K]ᵀ + bias."""
    x, weight, *bias = (to_float(t) for t in inputs)
    gate, up = F.linear(x.float(), weight.float(), *(b.float() for b in bias)).chunk(2, -1)
    outputs[0].copy_(activated(gate, params["activation"]) * up)


@cpu_kernel("linear_epilogue_kernel")
def linear_epilogue(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """out = act(product + bias) + residual: for devices whose matrix library has no epilogue of its own."""
    result, *rest = (to_float(t) for t in inputs)
    if params["has_bias"]:
        result = result + rest.pop(0)
    result = activated(result, params["activation"])
    outputs[0].copy_(result + rest.pop(0) if params["has_residual"] else result)


@cpu_kernel("batched_matmul_kernel")
def batched_matmul(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """out[…, M, N] = scale · a[…, M, K] · b[…, K, N]; integers multiply as integers."""
    a, b = (to_float(t) for t in inputs)
    product = torch.matmul(a, b)
    outputs[0].copy_(product if params["scale"] == 1.0 else product * params["scale"])
