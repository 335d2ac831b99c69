"""The division between device and PyTorch of a traced graph, for given sizes of its inputs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from npu_compiler.errors import PrecisionWarning
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_sim.module.report import narrowed_nodes

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
    """Return a plan that runs a traced graph on the device or, if that lacks ops, divides it by estimated times.

    Args:
        ir: The graph's IR, symbolic where sizes may change.
        sizes: Symbol → its value.
        dtype: Compute dtype. Default: the graph's own, if that is a float of 16 bits, else float32.
        target: The device's code generation target.
        quantization: Formats of weights in few bits, as for `npu_compiler.compile`. None: weights are not quantized.

    Warns (`PrecisionWarning`) if a module with float64 inputs or results computes in float32.

    Raises:
        IRError: the IR is malformed.
    """
    from npu_compiler.graph.reader import read_ir
    from npu_compiler.graph.symbolic import specialize
    from npu_compiler.partitioner import partition
    from npu_compiler.partitioning.prices import prices_of
    from npu_compiler.passes.precision import native_dtype

    graph = read_ir(specialize(ir, sizes) if sizes else ir)
    if dtype is None:
        own = native_dtype(graph)
        dtype = own if own in HALF_DTYPES else "float32"
    plan = partition(graph, target=target, compute_dtype=dtype, quantization=quantization)
    if plan.is_open and (prices := prices_of(target)) is not None:
        plan = partition(graph, target=target, compute_dtype=dtype, quantization=quantization, prices=prices)
    if any(graph.tensors[name].dtype == "float64" for name in (*graph.inputs, *graph.outputs)):
        narrowed = narrowed_nodes(plan)
        if narrowed:
            warnings.warn(
                f"the device computes float64 in float32 ({len(narrowed)} nodes, such as {narrowed[0].op_type}); "
                "run the module in PyTorch where that is not enough",
                PrecisionWarning,
                stacklevel=2,
            )
    return plan
