"""Rules of the calls that move elements: indexing, padding, filling."""

from __future__ import annotations

from dataclasses import replace

from cuda_compiler.specialization.gpu import MAX_GRID, WARP
from cuda_compiler.specialization.sizes import Size3, groups, vector_width
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View, collapse, numel

_TENSOR_OPS = "movement/tensor_ops.cu"
_BLOCK = 256
_EDGE = 64  # of a square that is transposed
_FEW = 64 * 1024  # elements up to which a copy takes no time to speak of


def _per_element(make: Specializer, call: KernelCall, file: str) -> list[KernelCall]:
    count = call.outputs[0].numel
    return [make.kernel(call, file, grid=(groups(count, _BLOCK), 1, 1), block=(_BLOCK, 1, 1))]


def _tensor_op(make: Specializer, call: KernelCall) -> list[KernelCall]:
    return _per_element(make, call, _TENSOR_OPS)


def _pad(make: Specializer, call: KernelCall) -> list[KernelCall]:
    """The call of padding, whose threads write in the order of memory, vectors along a dimension without padding."""
    pads, (out,) = list(call.params["pads"]), call.outputs
    rank, levels = out.rank, len(pads) // 2
    order = out.order_in_memory if rank <= levels else list(range(rank))
    around = [pads[2 * (rank - 1 - dim) :][:2] for dim in order] if rank <= levels else []
    pads = [each for pair in reversed(around) for each in pair] + pads[2 * len(around) :]
    x, out = (view.permute(order) for view in (*call.inputs, *call.outputs))
    width = 1 if not rank or any(pads[:2]) else _common_vector(x, out)
    padded = replace(call, inputs=(x,), outputs=(out,), params={**call.params, "pads": pads})
    grid = (groups(out.numel // width, _BLOCK), 1, 1)
    return [make.kernel(padded, _TENSOR_OPS, grid=grid, block=(_BLOCK, 1, 1), constants={"pack": width})]


def _flip(make: Specializer, call: KernelCall) -> list[KernelCall]:
    order = call.outputs[0].order_in_memory
    flags = [call.params["dims"][dim] for dim in order]
    params = {**call.params, "dims": flags + [0] * (len(call.params["dims"]) - len(flags))}
    views = (tuple(view.permute(order) for view in side) for side in (call.inputs, call.outputs))
    return _tensor_op(make, replace(call, inputs=next(views), outputs=next(views), params=params))


def _pick(make: Specializer, call: KernelCall) -> list[KernelCall]:
    return _per_element(make, call, "movement/indexing.cu")


def _embedding(make: Specializer, call: KernelCall) -> list[KernelCall]:
    table, ids = call.inputs
    width = _common_vector(table, *call.outputs)
    threads = ids.numel * table.shape[1] // width
    return [_vectors(make, call, threads, width)]


def _index_copy(make: Specializer, call: KernelCall) -> list[KernelCall]:
    _, source, *others = call.inputs
    if source.numel == 0:
        return []
    along_last = call.params["dim"] == source.rank - 1
    width = 1 if along_last else _common_vector(source, *others, *call.outputs)
    return [_vectors(make, call, source.numel // width, width)]


def _vectors(make: Specializer, call: KernelCall, threads: int, width: int) -> KernelCall:
    block = min(_BLOCK, WARP * groups(threads, WARP))
    grid = (groups(threads, block), 1, 1)
    return make.kernel(call, "movement/indexing.cu", grid=grid, block=(block, 1, 1), constants={"VECTOR": width})


def transposing_copy(make: Specializer, call: KernelCall) -> KernelCall | None:
    """The call of a copy between two orders of memory, by square tiles in shared memory.

    None if a plain copy is as fast: for few elements, or if one dimension is contiguous in both; or if the copy
    converts.
    """
    views = _squares(call)
    if views is None:
        return None
    source, target = views
    packs = {"in_pack": _side_by_side(source), "out_pack": _side_by_side(target.transpose(-1, -2))}
    return make.kernel(
        call,
        "movement/transpose.cu",
        function="transpose",
        inputs={"x": source},
        outputs={"out": target},
        grid=_square_counts(source),
        block=(_BLOCK, 1, 1),
        constants=packs,
    )


def is_transposing(call: KernelCall) -> bool:
    """Whether `transposing_copy` has a kernel for a copy."""
    return _squares(call) is not None


def _squares(call: KernelCall) -> tuple[View, View] | None:
    """A copy's operand and result as [..., rows, columns], side by side in memory along columns and rows.

    None if the copy need not go by square tiles.
    """
    (x,), (out,) = call.inputs, call.outputs
    if x.dtype != out.dtype or itemsize(x.dtype) > 4 or x.numel < _FEW:
        return None
    sizes, (x_steps, out_steps) = collapse(out.shape, x.strides, out.strides)
    if 1 not in x_steps or 1 not in out_steps:
        return None
    column, row = x_steps.index(1), out_steps.index(1)
    if column == row or min(sizes[column], sizes[row]) < _EDGE // 4:
        return None
    order = [dim for dim in range(len(sizes)) if dim not in (row, column)] + [row, column]
    source, target = (
        replace(view, shape=tuple(sizes), strides=tuple(steps)).permute(order)
        for view, steps in ((x, x_steps), (out, out_steps))
    )
    fits = all(count <= most for count, most in zip(_square_counts(source), MAX_GRID, strict=True))
    return (source, target) if fits else None


def _square_counts(source: View) -> Size3:
    """The number of squares along columns and rows of a copy's operand, and of its matrices."""
    *outer, rows, columns = source.shape
    return groups(columns, _EDGE), groups(rows, _EDGE), numel(tuple(outer))


def _side_by_side(view: View) -> int:
    """Elements per vector access along the last dimension: a divisor of its size, at most 16 bytes."""
    width = min(vector_width(view), 16 // itemsize(view.dtype))
    while view.shape[-1] % width:
        width //= 2
    return width


def _common_vector(*views: View) -> int:
    """Elements per vector access along the last dimension that all views allow, at most 16 bytes."""
    width = min(16 // max(itemsize(view.dtype) for view in views), *map(vector_width, views))
    while views[0].shape[-1] % width:
        width //= 2
    return width


RULES: dict[str, Rule] = {
    "fill_kernel": _tensor_op,
    "arange_kernel": _tensor_op,
    "pad_kernel": _pad,
    "triangle_kernel": _tensor_op,
    "flip_kernel": _flip,
    "gather_kernel": _pick,
    "index_select_kernel": _pick,
    "index_kernel": _pick,
    "embedding_kernel": _embedding,
    "index_copy_kernel": _index_copy,
    "scatter_kernel": lambda make, call: _per_element(make, call, "movement/scatter.cu"),
    "index_copy_pair_kernel": _index_copy,
}
