"""Kernels that make or rearrange tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from npu_runtime.cpu.kernels.registry import Params, Tensors, cpu_kernel, to_float


@cpu_kernel("fill_kernel")
def fill(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    outputs[0].fill_(params["value"])


@cpu_kernel("arange_kernel")
def arange(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """out[i] = start + i · step."""
    out = outputs[0]
    steps = torch.arange(out.numel(), dtype=torch.float64 if out.is_floating_point() else torch.int64)
    out.copy_(params["start"] + steps * params["step"])


@cpu_kernel("pad_kernel")
def pad(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """Grow the trailing dimensions; `pads` lists (before, after) from the last dimension on."""
    x, out, mode = inputs[0], outputs[0], params["mode"]
    pairs = params["pads"][: 2 * x.dim()]
    if mode == "constant":
        out.fill_(params["value"])
        inner = out
        for index in range(0, len(pairs), 2):
            dim = x.dim() - 1 - index // 2
            inner = inner.narrow(dim, pairs[index], x.shape[dim])
        inner.copy_(x)
        return
    used = pairs
    while used and not any(used[-2:]):
        used = used[:-2]
    rank = len(used) // 2
    flat = to_float(x).reshape(1, -1, *x.shape[x.dim() - rank :])
    out.copy_(F.pad(flat, used, mode=mode).reshape(out.shape))


@cpu_kernel("triangle_kernel")
def triangle(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    keep = torch.triu if params["upper"] else torch.tril
    outputs[0].copy_(keep(inputs[0], params["diagonal"]))


@cpu_kernel("flip_kernel")
def flip(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    outputs[0].copy_(inputs[0].flip([dim for dim, flag in enumerate(params["dims"]) if flag]))
