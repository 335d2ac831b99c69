"""Matrix products, and the activations after them."""

from __future__ import annotations

import torch

from npu_compiler.ops import ELEMENTWISE
from npu_compiler.program.elementwise import ACTIVATIONS
from npu_runtime.cpu.torch_kernels.elementwise import torch_function
from npu_runtime.cpu.torch_kernels.registry import Params, Tensors, to_float, torch_kernel


def activated(tensor: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation of a tensor, by its name in `npu_compiler`'s `ACTIVATIONS`, or "none"."""
    return tensor if activation == "none" else torch_function(ELEMENTWISE[ACTIVATIONS[activation]].torch)(tensor)


@torch_kernel("batched_matmul_kernel")
def batched_matmul(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """out[…, M, N] = scale · a[…, M, K] · b[…, K, N]; integers multiply as integers."""
    a, b = (to_float(t) for t in inputs)
    product = torch.matmul(a, b)
    outputs[0].copy_(product if params["scale"] == 1.0 else product * params["scale"])
