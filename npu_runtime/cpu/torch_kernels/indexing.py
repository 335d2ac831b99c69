"""Kernels that select or store elements by index."""

from __future__ import annotations

import torch

from npu_runtime.cpu.torch_kernels.registry import Params, Tensors, to_float, torch_kernel


@torch_kernel("gather_kernel")
def gather(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    source, index = inputs
    outputs[0].copy_(source.gather(params["dim"], index.long()))


@torch_kernel("scatter_kernel")
def scatter(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """out = base, with each element of `source` stored at its index within a row, or reduced with the element there.

    With the mode `last`, the last of several elements for one place is kept, in order of the last dimension.
    """
    base, index, source = inputs
    if params["reduce"] == "last":
        outputs[0].copy_(base.to(outputs[0].dtype).scatter(-1, index.long(), source.to(outputs[0].dtype)))
        return
    joined = base.new_empty(base.shape, dtype=torch.promote_types(to_float(base).dtype, to_float(source).dtype))
    joined.copy_(base)
    joined.scatter_reduce_(
        -1, index.long(), source.to(joined.dtype), params["reduce"], include_self=bool(params["include_self"])
    )
    outputs[0].copy_(joined)


@torch_kernel("argsort_kernel")
def argsort(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """Positions of each row's elements in sorted order; equal elements keep their order."""
    outputs[0].copy_(torch.argsort(inputs[0], dim=-1, descending=bool(params["descending"]), stable=True))
