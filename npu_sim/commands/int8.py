"""`--dtype int8`: time a network as if it were quantized, from shapes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npu_compiler.graph.dtypes import COMPUTE_DTYPES

if TYPE_CHECKING:
    from npu_compiler.graph.model import IRGraph

INT8 = "int8"
DTYPES = (*COMPUTE_DTYPES, INT8)


def for_timing(graph: IRGraph, dtype: str | None) -> tuple[IRGraph, str | None]:
    """The graph to simulate, and its compute dtype.

    Raises:
        InputError: it is to be int8, and has no layer to quantize.
    """
    if dtype != INT8:
        return graph, dtype
    from npu_sim.quantizing.networks.uncalibrated import quantized_from_shapes

    return quantized_from_shapes(graph), None


__all__ = ["DTYPES", "INT8", "for_timing"]
