"""The reference values: a graph run by PyTorch on the CPU, in float32 and in the compute dtype.

Outputs are compared with the graph as it was read, run in float32. Two more references are the normalized graph in both
dtypes: they show how large PyTorch's own rounding error is, and which kernel is wrong. All run node by node through
`npu_runtime.cpu_fallback`, with weights, inputs and constants cast. In the compute dtype, a tensor has the dtype in
which the compiler stores it, so what the compiler keeps in float32 (rotary angles, norms) is float32 here too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from npu_compiler.graph.dtypes import FLOAT_DTYPES, HALF_DTYPES, saturate, saturating_cast
from npu_compiler.graph.model import IRGraph, OpNode, unique_name
from npu_compiler.graph.weight_recipe import from_key
from npu_compiler.ops.elementwise import cast_node
from npu_compiler.ops.without_rows import wants_one_dtype
from npu_compiler.passes.precision import assign_storage
from npu_runtime.cpu_fallback import execute_cpu_partition
from npu_runtime.weight_loader import to_numpy


@dataclass(frozen=True)
class Reference:
    """A graph whose float tensors have been given other dtypes, and its weights.

    Attributes:
        graph: The graph.
        state: `state_dict` key → array or tensor.
        keys: Weight tensor name → `state_dict` key.
    """

    graph: IRGraph
    state: Mapping[str, Any]
    keys: Mapping[str, str]

    @cached_property
    def casts(self) -> frozenset[str]:
        """Names of the casts that `retype` added; each is named like its output, `<tensor>.<dtype>`."""
        return frozenset(
            node.name
            for node in self.graph.nodes
            if node.outputs == (node.name,) and node.inputs and node.name.startswith(f"{node.inputs[0]}.")
        )

    def run(self, inputs: Mapping[str, np.ndarray], graph: IRGraph | None = None) -> dict[str, np.ndarray]:
        """Run the graph by PyTorch and return output tensor name → value.

        Args:
            inputs: Graph input name → array.
            graph: A part of the graph, from `part`. None: the whole graph.
        """
        graph = graph or self.graph
        cast = {name: saturating_cast(np.asarray(inputs[name]), graph.tensors[name].dtype) for name in graph.inputs}
        weights = {
            name: saturating_cast(to_numpy(self.state[self.keys[name]]), graph.tensors[name].dtype)
            for name in graph.weights
        }
        return execute_cpu_partition(graph, cast, weights)

    def part(self, target: str, stored: Collection[str]) -> IRGraph:
        """Return the subgraph that computes a tensor from stored tensors, graph inputs and weights.

        Args:
            target: The tensor.
            stored: Tensors whose values are given, so that the subgraph ends at them.
        """
        graph = self.graph
        producers = graph.producers()
        wanted, leaves, nodes, pending = {target}, set(), set(), [target]
        while pending:
            name = pending.pop()
            if name not in producers or (name in stored and name != target):
                leaves.add(name)
                continue
            node = producers[name]
            nodes.add(node.name)
            fresh = set(node.inputs) - wanted
            wanted |= fresh
            pending.extend(fresh)
        return replace(
            graph,
            nodes=[node for node in graph.nodes if node.name in nodes],
            inputs=[name for name in sorted(leaves) if name not in graph.weights and name not in graph.constants],
            outputs=[target],
            output_names=[target],
            weights={name: recipe for name, recipe in graph.weights.items() if name in leaves},
            constants={name: value for name, value in graph.constants.items() if name in leaves},
        )


def original_reference(graph: IRGraph, state: Mapping[str, Any]) -> Reference:
    """Return the float32 reference of a graph as it was read, before any stage of the compiler."""
    keys = {name: next(recipe.keys()) for name, recipe in graph.weights.items()}
    named = replace(graph, weights={name: from_key(name) for name in graph.weights})
    return Reference(retype(named, _wide(named)), state, keys)


def references(graph: IRGraph, state: Mapping[str, Any], compute_dtype: str) -> tuple[Reference, Reference]:
    """Return the references of a normalized graph: in float32, and in the compute dtype.

    Args:
        graph: Result of `npu_compiler.compiler.normalize`.
        state: `state_dict` key → array or tensor.
        compute_dtype: The compute dtype.
    """
    stored = assign_storage(graph, compute_dtype)
    keys = {name: next(recipe.keys()) for name, recipe in stored.weights.items()}
    recipes = {name: from_key(name) for name in stored.weights}
    stored = replace(stored, weights=recipes)
    narrow = {name: spec.storage for name, spec in stored.tensors.items() if spec.dtype in FLOAT_DTYPES}
    return Reference(retype(stored, _wide(stored)), state, keys), Reference(retype(stored, narrow), state, keys)


def _wide(graph: IRGraph) -> dict[str, str]:
    """Return float tensor → its dtype in a float32 reference; float64 stays."""
    return {
        name: "float32" if spec.dtype in HALF_DTYPES else spec.dtype
        for name, spec in graph.tensors.items()
        if spec.dtype in FLOAT_DTYPES
    }


def retype(graph: IRGraph, dtypes: Mapping[str, str]) -> IRGraph:
    """Return the graph with other float dtypes in specs, constants and attributes.

    Casts are inserted before ops whose operands must have one dtype.

    Args:
        dtypes: Tensor name → new dtype; other tensors keep theirs.
    """
    tensors = {name: replace(spec, dtype=dtypes.get(name, spec.dtype)) for name, spec in graph.tensors.items()}
    nodes: list[OpNode] = []
    for node in graph.nodes:
        result = tensors[node.outputs[0]].dtype if node.outputs else "float32"
        attrs = {key: _retype_attr(key, value, result) for key, value in node.attrs.items()}
        inputs = list(node.inputs)
        if wants_one_dtype(node) and result in FLOAT_DTYPES:
            for index, name in enumerate(inputs):
                if tensors[name].dtype in FLOAT_DTYPES and tensors[name].dtype != result:
                    cast = unique_name(f"{name}.{result}", tensors)
                    tensors[cast] = replace(tensors[name], name=cast, dtype=result)
                    nodes.append(cast_node(name, cast, result))
                    inputs[index] = cast
        nodes.append(replace(node, inputs=tuple(inputs), attrs=attrs))
    constants = {name: saturating_cast(value, tensors[name].dtype) for name, value in graph.constants.items()}
    return replace(graph, nodes=nodes, tensors=tensors, constants=constants)


def _retype_attr(key: str, value: Any, result: str) -> Any:
    if key == "dtype" and value in FLOAT_DTYPES and result in FLOAT_DTYPES:
        return result
    return saturate(value, result) if isinstance(value, float) and result in HALF_DTYPES else value
