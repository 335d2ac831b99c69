"""The op table. Importing the package registers every op, and fills the tables of kernels and element-wise ops."""

from npu_compiler.ops import aliases, conv, elementwise, indexing, matmul, reductions, sorting, tensor, transformer
from npu_compiler.ops.registry import OPS, Args, Op, find_op, register_op, unsupported_reason
from npu_compiler.program.elementwise import ELEMENTWISE, declaration, elementwise_kernel
from npu_compiler.program.kernels import KERNELS

__all__ = [
    "ELEMENTWISE",
    "KERNELS",
    "OPS",
    "Args",
    "Op",
    "aliases",
    "conv",
    "declaration",
    "elementwise",
    "elementwise_kernel",
    "find_op",
    "indexing",
    "matmul",
    "reductions",
    "register_op",
    "sorting",
    "tensor",
    "transformer",
    "unsupported_reason",
]
