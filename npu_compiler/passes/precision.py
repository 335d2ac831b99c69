"""Decides each tensor's storage dtype.

A model with 16-bit weights uses float32 on purpose, so its float32 tensors stay float32. A float32 model that is
compiled for 16 bits gives no such hint; there, tensors computed from integers and constants alone (positions, rotary
angles, masks) stay float32, because a position of 3000 has no 16-bit float, and all others get the compute dtype. In a
float32 model that is compiled for float32, tensors that the model casts to 16 bits are stored so, which rounds them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from npu_compiler.errors import NPUError
from npu_compiler.graph.dtypes import COMPUTE_DTYPES, FLOAT_DTYPES, HALF_DTYPES, INT_DTYPES
from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec, unique_name
from npu_compiler.ops.byte_storage import in_bytes
from npu_compiler.ops.registry import find_op
from npu_compiler.passes.integer_ranges import index_bounds


def choose_compute_dtype(graph: IRGraph, requested: str | None = None) -> str:
    """The requested compute dtype; if None, bfloat16 for a model that is mostly bfloat16, else float16.

    Raises:
        NPUError: `requested` is not a compute dtype.
    """
    if requested is not None:
        if requested not in COMPUTE_DTYPES:
            raise NPUError(f"unknown compute dtype '{requested}'; choose one of {', '.join(COMPUTE_DTYPES)}")
        return requested
    return "bfloat16" if native_dtype(graph) == "bfloat16" else "float16"


def native_dtype(graph: IRGraph) -> str:
    """The float dtype of most of the model's weights; if it has none, of its inputs and nodes."""
    if graph.native_dtype:
        return graph.native_dtype
    sizes: Counter[str] = Counter()
    for names in (graph.weights, graph.inputs, graph.tensors):
        for name in names:
            spec = graph.tensors[name]
            if spec.dtype in FLOAT_DTYPES:
                sizes[spec.dtype] += spec.numel
        if sizes:
            return sizes.most_common(1)[0][0]
    return "float32"


def assign_storage(graph: IRGraph, compute_dtype: str) -> IRGraph:
    """Fill in `TensorSpec.storage` for every tensor; a weight that is needed in two dtypes becomes two weights."""
    native = native_dtype(graph)
    if native in HALF_DTYPES or compute_dtype == "float32":
        narrow = {name for name, spec in graph.tensors.items() if spec.dtype in HALF_DTYPES}
    else:
        graph, wide = _split_wide_weights(graph)
        narrow = {name for name in graph.tensors if name not in wide}
    keeps_halves = native not in HALF_DTYPES and compute_dtype == "float32"
    tensors = {}
    for name, spec in graph.tensors.items():
        float_dtype = "float32" if name not in narrow else spec.dtype if keeps_halves else compute_dtype
        tensors[name] = replace(spec, storage=storage_dtype(spec.dtype, float_dtype))
    for name in in_bytes(graph):
        info = np.iinfo(tensors[name].dtype)
        bounds = tensors[name].bounds or (int(info.min), int(info.max))
        tensors[name] = replace(tensors[name], storage=tensors[name].dtype, bounds=bounds)
    return replace(graph, tensors=_with_index_bounds(graph, tensors))


def storage_dtype(dtype: str, float_dtype: str) -> str:
    """The dtype in device memory of a tensor of PyTorch's `dtype`, if floats are stored as `float_dtype`."""
    if dtype in FLOAT_DTYPES:
        return float_dtype
    return "int32" if dtype in INT_DTYPES else dtype


def _is_wide(node: OpNode, graph: IRGraph, wide: set[str], neutral: set[str]) -> bool:
    """Whether a float result stays float32: all its operands are integers, constants, such results, or weights.

    Weights alone are not enough.
    """
    op = find_op(node.op_type)
    if op is not None and (op.float32_parameters or (op.selects and node.inputs[0] not in wide)):
        return False
    floats = [name for name in node.inputs if graph.tensors[name].dtype in FLOAT_DTYPES]
    if any(name not in wide and name not in neutral for name in floats):
        return False
    return not floats or any(name in wide for name in floats)


def _takes_float32(node: OpNode, name: str) -> bool:
    """Whether the node reads a tensor as one of its float32 parameters."""
    op = find_op(node.op_type)
    return op is not None and op.float32_parameters and node.inputs[0] != name


def _split_wide_weights(graph: IRGraph) -> tuple[IRGraph, set[str]]:
    """The graph of a float32 model in which some weights are split, and its tensors that stay float32.

    A weight is split in two if nodes whose results stay float32 read it, and others too.
    """
    wide = {name for name in graph.constants if graph.tensors[name].dtype in FLOAT_DTYPES}
    wide |= {name for name in graph.inputs if graph.tensors[name].storage == "float32"}
    neutral = {name for name in graph.weights if graph.tensors[name].dtype in FLOAT_DTYPES}
    float64 = {name for name, spec in graph.tensors.items() if spec.dtype == "float64"}
    wide_nodes = set()
    for node in graph.nodes:
        if _is_wide(node, graph, wide, neutral):
            wide_nodes.add(node.name)
            wide.update(out for out in node.outputs if graph.tensors[out].dtype in FLOAT_DTYPES)
    tensors, weights = dict(graph.tensors), dict(graph.weights)
    consumers = graph.consumers()
    renames: dict[str, dict[str, str]] = {}
    for name in sorted(neutral):
        readers = consumers.get(name, [])
        users = [node for node in readers if node.name in wide_nodes]
        if readers and all(node.name in wide_nodes or _takes_float32(node, name) for node in readers):
            wide.add(name)
        elif users:
            copy = unique_name(f"{name}.float32", tensors)
            tensors[copy], weights[copy] = replace(tensors[name], name=copy), weights[name]
            wide.add(copy)
            for node in users:
                renames.setdefault(node.name, {})[name] = copy
    nodes = [node.rename_inputs(renames.get(node.name, {})) for node in graph.nodes]
    return replace(graph, nodes=nodes, tensors=tensors, weights=weights), wide | float64


def _with_index_bounds(graph: IRGraph, tensors: dict[str, TensorSpec]) -> dict[str, TensorSpec]:
    """The specs, with the allowed range of indices as bounds of each integer input that is read as an index."""
    bounds = index_bounds(graph)
    noted = {name: replace(tensors[name], bounds=bounds[name]) for name in graph.inputs if name in bounds}
    return {**tensors, **noted}
