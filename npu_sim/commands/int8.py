"""The option value `--dtype int8`: the time of a network as if it were quantized, which needs only its shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npu_compiler.graph.dtypes import COMPUTE_DTYPES

if TYPE_CHECKING:
    from npu_compiler.graph.model import IRGraph

INT8 = "int8"
DTYPES = (*COMPUTE_DTYPES, INT8)


def for_timing(graph: IRGraph, dtype: str | None) -> tuple[IRGraph, str | None]:
    """Return the graph to simulate and its compute dtype; for `int8`, a quantized graph and None.

    Raises:
        InputError: `dtype` is `int8`, and the graph has no layer that can be quantized.
    """
    if dtype != INT8:
        return graph, dtype
    from npu_sim.quantizing.networks.uncalibrated import quantized_from_shapes

    return quantized_from_shapes(graph), None


__all__ = ["DTYPES", "INT8", "for_timing"]
