"""`quantized_from_shapes`: a network in int8 without values, to simulate its time before it is calibrated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from npu_compiler.compiler import normalize
from npu_compiler.errors import InputError
from npu_compiler.fusions.quantization_points import ActivationRange, IntegerWeight, Points, quantized_graph
from npu_compiler.graph.model import IRGraph
from npu_compiler.graph.weight_recipe import UNCALIBRATED, from_key
from npu_compiler.passes.batch_norm import fold_batch_norm
from npu_compiler.passes.dead_code import eliminate_dead_code

_PLACEHOLDER = ActivationRange(1.0, 0)


def quantized_from_shapes(graph: IRGraph) -> IRGraph:
    """Return the graph that `quantize_network` would make, with 1 for every scale and no weights.

    Its name and the keys of its weights contain `UNCALIBRATED`; no checkpoint has such keys, so nothing can run it by
    mistake.

    Raises:
        InputError: the network has no layer to quantize.
    """
    folded = eliminate_dead_code(fold_batch_norm(normalize(graph)))
    named = {name: from_key(f"{name} ({UNCALIBRATED})") for name in folded.weights}
    folded = replace(folded, name=f"{graph.name} (int8, {UNCALIBRATED})", weights=named)
    points = Points(folded)
    if not points.layers:
        raise InputError(f"{graph.name} has no convolution or linear of float32 weights to quantize")
    integers = {layer.weight: _zero_weight(folded.tensors[layer.weight].shape) for layer in points.layers}
    return quantized_graph(folded, dict.fromkeys(points.tensors, _PLACEHOLDER), integers)[0]


def _zero_weight(shape: tuple[int, ...]) -> IntegerWeight:
    """Return zeros of a weight's shape, as broadcast views that take no memory."""
    return IntegerWeight(np.broadcast_to(np.int8(0), shape), np.broadcast_to(np.float32(0), shape[:1]))


__all__ = ["quantized_from_shapes"]
