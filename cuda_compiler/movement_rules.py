"""What the calls that move elements, pool or convolve become."""

from __future__ import annotations

from cuda_compiler.cuda_templates import WARP, Specializer, groups, template_rule, vector_width
from npu_compiler.codegen_core import KernelCall
from npu_compiler.dtypes import itemsize
from npu_compiler.views import View

_BLOCK = 256
_CONV_BLOCK = 64  # channels and pixels of a block of the matrix form


def _per_element(make: Specializer, call: KernelCall, file: str) -> list[KernelCall]:
    count = call.outputs[0].numel
    return [make.kernel(call, file, grid=(groups(count, _BLOCK), 1, 1), block=(_BLOCK, 1, 1))]


@template_rule("fill_kernel", "arange_kernel", "pad_kernel", "triangle_kernel", "flip_kernel")
def _tensor_op(make: Specializer, call: KernelCall) -> list[KernelCall]:
    return _per_element(make, call, "tensor_ops.cu")


@template_rule("gather_kernel", "index_select_kernel", "index_kernel")
def _pick(make: Specializer, call: KernelCall) -> list[KernelCall]:
    return _per_element(make, call, "indexing.cu")


@template_rule("upsample_nearest_kernel", "upsample_bilinear_kernel")
def _upsample(make: Specializer, call: KernelCall) -> list[KernelCall]:
    return _per_element(make, call, "upsample.cu")


@template_rule("max_pool2d_kernel", "avg_pool2d_kernel")
def _pool(make: Specializer, call: KernelCall) -> list[KernelCall]:
    return _per_element(make, call, "pool.cu")


@template_rule("adaptive_avg_pool2d_kernel")
def _adaptive_pool(make: Specializer, call: KernelCall) -> list[KernelCall]:
    grid = (groups(call.outputs[0].numel, _BLOCK // WARP), 1, 1)
    return [make.kernel(call, "pool.cu", grid=grid, block=(_BLOCK, 1, 1))]


@template_rule("embedding_kernel")
def _embedding(make: Specializer, call: KernelCall) -> list[KernelCall]:
    table, ids = call.inputs
    width = _common_vector(table, *call.outputs)
    threads = ids.numel * table.shape[1] // width
    return [_vectors(make, call, threads, width)]


@template_rule("index_copy_kernel", "index_copy_pair_kernel")
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
    return make.kernel(call, "indexing.cu", grid=grid, block=(block, 1, 1), constants={"VECTOR": width})


def _common_vector(*views: View) -> int:
    """How many elements of the last dimension one access may move from view to view."""
    width = min(16 // max(itemsize(view.dtype) for view in views), *map(vector_width, views))
    while views[0].shape[-1] % width:
        width //= 2
    return width


@template_rule("conv2d_kernel")
def _conv(make: Specializer, call: KernelCall) -> list[KernelCall]:
    images, channels, rows, columns = call.outputs[0].shape
    pixels, count = rows * columns, call.params["groups"]
    if call.params["direct"]:
        block = min(_BLOCK, WARP * groups(pixels, WARP))
        grid = (groups(pixels, block), channels, images)
        return [make.kernel(call, "conv.cu", function="direct_conv2d_kernel", grid=grid, block=(block, 1, 1))]
    grid = (groups(pixels, _CONV_BLOCK), count * groups(channels // count, _CONV_BLOCK), images)
    return [make.kernel(call, "conv.cu", grid=grid, block=(_BLOCK, 1, 1))]


@template_rule("conv_transpose2d_kernel")
def _conv_transpose(make: Specializer, call: KernelCall) -> list[KernelCall]:
    return _per_element(make, call, "conv.cu")
