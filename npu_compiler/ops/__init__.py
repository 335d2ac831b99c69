"""The op table. Importing the package registers every op, and fills the tables of kernels and element-wise ops."""

from npu_compiler.ops import (
    affine,
    aliases,
    comparing,
    conv,
    conv3d,
    elementwise,
    experts,
    indexing,
    integer,
    kv_cache,
    matmul,
    quantized,
    reductions,
    scattering,
    sorting,
    tensor,
    transformer,
)
from npu_compiler.ops.registry import OPS, Args, Op, find_op, register_op, unsupported_reason
from npu_compiler.program.elementwise import ELEMENTWISE, declaration, elementwise_kernel
from npu_compiler.program.kernels import KERNELS

__all__ = [
    "ELEMENTWISE",
    "KERNELS",
    "OPS",
    "Args",
    "Op",
    "affine",
    "aliases",
    "comparing",
    "conv",
    "conv3d",
    "declaration",
    "elementwise",
    "elementwise_kernel",
    "experts",
    "find_op",
    "indexing",
    "integer",
    "kv_cache",
    "matmul",
    "quantized",
    "reductions",
    "register_op",
    "scattering",
    "sorting",
    "tensor",
    "transformer",
    "unsupported_reason",
]
