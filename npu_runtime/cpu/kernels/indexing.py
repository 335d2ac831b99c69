"""Kernels that pick elements by index."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from npu_runtime.cpu.kernels.registry import Params, Tensors, cpu_kernel, to_float


@cpu_kernel("embedding_kernel")
def embedding(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    table, ids = inputs
    outputs[0].copy_(F.embedding(ids, table))


@cpu_kernel("index_select_kernel")
def index_select(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    source, index = inputs
    outputs[0].copy_(source.index_select(params["dim"], index))


@cpu_kernel("gather_kernel")
def gather(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    source, index = inputs
    outputs[0].copy_(source.gather(params["dim"], index.long()))


@cpu_kernel("index_kernel")
def index(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """NumPy's advanced indexing on adjacent dimensions from `first` on; negative indices count from the back."""
    source, *indices = inputs
    outputs[0].copy_(source[(slice(None),) * params["first"] + tuple(i.long() for i in indices)])


@cpu_kernel("index_copy_kernel", "index_copy_pair_kernel")
def index_copy(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """out[…, index[i], …] = source[…, i, …], in place, for each pair of source and out."""
    positions, *sources = inputs
    for source, out in zip(sources, outputs, strict=True):
        out.index_copy_(params["dim"], positions.long(), source.to(out.dtype))


@cpu_kernel("scatter_kernel")
def scatter(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """Elements of `source` that name a place of a row of `base`, put there or joined with what is there.

    Of several with the mode `last` the last one counts, in order of the last dimension.
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


@cpu_kernel("argsort_kernel")
def argsort(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """Where the elements of each row come from when it is sorted; equal ones keep their order."""
    outputs[0].copy_(torch.argsort(inputs[0], dim=-1, descending=bool(params["descending"]), stable=True))
