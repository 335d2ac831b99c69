"""The plan of a traced module's graph for given sizes of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from npu_compiler.graph.dtypes import HALF_DTYPES

if TYPE_CHECKING:
    from npu_compiler.partitioner import PartitionPlan
    from npu_compiler.passes.quantize import Quantization
    from npu_compiler.program.target import CodegenTarget

PROGRAMS = 8  # that a module keeps by default


def plan_for(
    ir: Mapping[str, Any],
    sizes: Mapping[str, int],
    dtype: str | None,
    target: CodegenTarget,
    quantization: Quantization | None = None,
) -> PartitionPlan:
    """The plan of a traced module's graph.

    Args:
        ir: Symbolic where sizes may change.
        sizes: Symbol → its value.
        dtype: Compute dtype. Default: the graph's own, if that is a float of 16 bits, else float32.
        target: The device's.
        quantization: As for `npu_compiler.compile`.

    Raises:
        IRError: the IR is malformed.
    """
    from npu_compiler.graph.reader import read_ir
    from npu_compiler.graph.symbolic import specialize
    from npu_compiler.partitioner import partition
    from npu_compiler.passes.precision import native_dtype

    graph = read_ir(specialize(ir, sizes) if sizes else ir)
    if dtype is None:
        own = native_dtype(graph)
        dtype = own if own in HALF_DTYPES else "float32"
    return partition(graph, target=target, compute_dtype=dtype, quantization=quantization)
