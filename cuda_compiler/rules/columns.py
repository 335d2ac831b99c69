"""Rule of a softmax over a dimension across which neighbours in memory lie side by side, as the columns of a matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cuda_compiler.rules.reductions import FILLING, Walk, power_of_two, walk_of
from cuda_compiler.specialization.gpu import MULTIPROCESSORS
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KernelCall

_KERNELS = ("softmax_kernel", "log_softmax_kernel")
_THREADS, _MOST_THREADS = 256, 1024  # of a block
_SECTOR = 32  # bytes that memory reads at least
_HELD = 16  # elements that a thread reads before it needs any


def is_by_columns(call: KernelCall) -> bool:
    """Whether a call over rows is a softmax whose rows lie as columns, both before and after."""
    if call.kernel not in _KERNELS or not call.outputs[0].numel:
        return False
    walk, step = _walk(call), call.outputs[0].strides[-1]
    return walk.kept > 0 and not walk.along and 0 < walk.out.strides[-1] < step


def _walk(call: KernelCall) -> Walk:
    """The walk over the operand; its `out` is the result's first row."""
    out = call.outputs[0]
    first = replace(out, shape=out.shape[:-1], strides=out.strides[:-1])
    return walk_of(call.inputs[0], first, out.rank - 1, has_order=True)


def softmax_by_columns(make: Specializer, call: KernelCall) -> KernelCall:
    """The call of a softmax whose threads read neighbouring columns together; `walkers` threads share a column."""
    walk, width = _walk(call), call.outputs[0].shape[-1]
    step = call.outputs[0].strides[-1]
    out = replace(walk.out, shape=(*walk.out.shape, width), strides=(*walk.out.strides, step))
    columns_of_all, beside = out.numel // width // walk.pack, walk.beside
    while beside * walk.pack * itemsize(walk.x.dtype) > _SECTOR and groups(columns_of_all, beside) < MULTIPROCESSORS:
        beside //= 2
    walkers = min(power_of_two(min(groups(FILLING, columns_of_all), width)), _MOST_THREADS // beside)
    threads = max(_THREADS, walkers * beside)
    columns = threads // walkers
    constants: Mapping[str, bool | int | float] = {
        "pack": walk.pack,
        "columns": columns,
        "walkers": walkers,
        "turns": max(1, _HELD // walk.pack),
        "stores_packs": vector_width(out.permute((-1, *range(out.rank - 1)))) >= walk.pack,
    }
    return make.kernel(
        call,
        "norms/softmax_columns.cu",
        function=f"{call.kernel.removesuffix('_kernel')}_columns",
        inputs={"x": walk.x},
        outputs={"out": out},
        grid=(groups(columns_of_all, columns), 1, 1),
        block=(threads, 1, 1),
        constants=constants,
    )
