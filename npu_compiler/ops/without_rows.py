"""Facts about ops without a row in the op table, which only the CPU runs."""

from __future__ import annotations

from npu_compiler.graph.model import OpNode
from npu_compiler.ops.registry import find_op

# Views of memory that is not tracked: what an in-place op on one of them changes is not known.
UNTRACKED_VIEWS = frozenset({"aten.as_strided", "aten.view_as_real", "aten.view_as_complex", "aten.real", "aten.imag"})

_ONE_DTYPE = frozenset({"aten.grid_sampler", "aten.masked_scatter"})


def wants_one_dtype(node: OpNode) -> bool:
    """Whether PyTorch requires all float operands of the node to have one dtype, instead of promoting them."""
    op = find_op(node.op_type)
    return node.base in _ONE_DTYPE if op is None else op.one_dtype
