"""Quantized weights: marks the tensors to store so, and later replaces each by a tensor for each of its parts.

`mark_quantized_weights` runs before the fusions, which are not affected; `split_quantized_weights` runs after storage
dtypes are assigned.

    Given:   y = linear(x, w)                      w: bfloat16[256, 128], stored as int4 in groups of 64
    Result:  y = npu.quantized_linear(x, w.codes, w.scales)       uint8[256, 64], float16[256, 2]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from npu_compiler.errors import InputError
from npu_compiler.graph.dtypes import FLOAT_DTYPES
from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec, unique_name
from npu_compiler.graph.quantization import NAMED_FORMATS, PARTS, QuantizedFormat, named_format
from npu_compiler.graph.weight_recipe import WeightTransformRecipe, part_recipe
from npu_compiler.ops.registry import QuantizedRule, find_op
from npu_compiler.target_config import TargetConfig

Quantization: TypeAlias = str | QuantizedFormat | Mapping[str, QuantizedFormat]
"""The formats of quantized weights: a format, or its name, for all linear layers; or `state_dict` key → format."""

_GROUPS = (128, 64, 32)  # tried in this order where the rows of a weight are not a whole number of the first


def find_formats(graph: IRGraph, quantization: Quantization) -> dict[str, QuantizedFormat]:
    """`state_dict` key → format, for the weights that `quantization` selects.

    A named format is for linear layers: groups are as large as the rows allow, up to its own size. A weight is int8 if
    no group fits, or if an embedding shares it, which 4 bits would harm most. Other embeddings are not quantized unless
    their key is given.

    Raises:
        InputError: there is no such named format; or a format does not fit the shape of its weight.
    """
    keys = {name: recipe.params["key"] for name, recipe in graph.weights.items() if recipe.op == "key"}
    if isinstance(quantization, Mapping):
        for name, key in keys.items():
            if key in quantization and (problem := quantization[key].problem(graph.tensors[name].shape)):
                raise InputError(f"'{key}' cannot be stored as {quantization[key]}: {problem}")
        return dict(quantization)
    wanted = named_format(quantization) if isinstance(quantization, str) else quantization
    formats = {}
    for name, role in _roles(graph).items():
        if "linear" not in role or name not in keys:
            continue
        shape = graph.tensors[name].shape
        candidates = [wanted]
        if isinstance(quantization, str) and wanted.group:
            sizes = _GROUPS if role == {"linear"} else ()
            bytes_each = replace(NAMED_FORMATS["int8"], activations=wanted.activations)
            candidates = [*(replace(wanted, group=size) for size in sizes), bytes_each]
        fitting = next((format for format in candidates if format.problem(shape) is None), None)
        if fitting is None:
            raise InputError(f"'{keys[name]}' cannot be stored as {wanted}: {wanted.problem(shape)}")
        formats[keys[name]] = fitting
    return formats


def mark_quantized_weights(graph: IRGraph, quantization: Quantization | None, config: TargetConfig) -> IRGraph:
    """Record the format of each quantized weight in its spec, if nodes that can read that format read it.

    A weight that other nodes read too becomes two: for these nodes it is dequantized when it is loaded.

    Raises:
        InputError: a format does not fit its weight, has codes that the target's kernels do not know, or rounds
            activations, which the target does not.
    """
    if not quantization:
        return graph
    formats = find_formats(graph, quantization)
    rounded = next((key for key, format in formats.items() if format.activations != "none"), None)
    if rounded is not None and not config.rounds_activations:
        raise InputError(
            f"the target {config.name} does not round activations, as the format of '{rounded}' asks for; choose "
            "activations 'none' to keep them in the compute dtype, or another device"
        )
    tensors, weights = dict(graph.tensors), dict(graph.weights)
    renames: dict[str, str] = {}
    for name, roles in _roles(graph).items():
        recipe = graph.weights[name]
        format = formats.get(recipe.params["key"]) if recipe.op == "key" else None
        if format is None or not roles & {"linear", "table"}:
            continue
        if format.codes not in config.weight_codes:
            raise InputError(
                f"the target {config.name} has no kernels for weights in {format.codes}, the codes of "
                f"'{recipe.params['key']}'; it knows {', '.join(config.weight_codes) or 'none'}: store the weight in "
                "one of these, or leave it in the compute dtype"
            )
        tensors[name] = replace(tensors[name], quantized=format)
        if "other" in roles:
            dense = unique_name(f"{name}.dequantized", tensors)
            tensors[dense], weights[dense] = replace(graph.tensors[name], name=dense), recipe
            renames[name] = dense
    nodes = []
    for node in graph.nodes:
        at = _quantizable(node, graph)
        kept = set() if at is None else {node.inputs[at.input]}
        nodes.append(node.rename_inputs({name: other for name, other in renames.items() if name not in kept}))
    return replace(graph, nodes=nodes, tensors=tensors, weights=weights)


def _roles(graph: IRGraph) -> dict[str, set[str]]:
    """Weight → the roles in which nodes read it: `linear`, `table` (of an embedding) or `other`."""
    roles: dict[str, set[str]] = {name: set() for name in graph.weights}
    for node in graph.nodes:
        rule = _quantizable(node, graph)
        for index, name in enumerate(node.inputs):
            if name in roles:
                as_weight = rule is not None and index == rule.input
                roles[name].add("other" if rule is None or not as_weight else "table" if rule.is_table else "linear")
    for name in graph.outputs:
        roles.get(name, set()).add("other")
    return roles


def _quantizable(node: OpNode, graph: IRGraph) -> QuantizedRule | None:
    """The rule by which the node reads a quantized weight; None if it cannot."""
    op = find_op(node.op_type)
    rule = None if op is None else op.quantized
    if rule is None or rule.input >= len(node.inputs) or node.inputs.count(node.inputs[rule.input]) != 1:
        return None
    is_float = all(graph.tensors[name].dtype in FLOAT_DTYPES for name in (node.inputs[rule.input], *node.outputs))
    return rule if is_float and len(graph.tensors[node.inputs[rule.input]].shape) == 2 else None


def split_quantized_weights(graph: IRGraph) -> IRGraph:
    """Replace each quantized weight by a tensor for each of its parts, and its readers by nodes that read the parts."""
    if not any(graph.tensors[name].quantized for name in graph.weights):
        return graph
    tensors, weights = dict(graph.tensors), dict(graph.weights)
    parts: dict[str, list[str]] = {}
    for name, recipe in graph.weights.items():
        spec = graph.tensors[name]
        if spec.quantized is not None:
            parts[name] = _split(spec, recipe, tensors, weights)
            del weights[name], tensors[name]
    nodes = [_reading_parts(node, graph, parts) for node in graph.nodes]
    return replace(graph, nodes=nodes, tensors=tensors, weights=weights)


def _split(
    spec: TensorSpec,
    recipe: WeightTransformRecipe,
    tensors: dict[str, TensorSpec],
    weights: dict[str, WeightTransformRecipe],
) -> list[str]:
    format = spec.quantized
    assert format is not None
    names = []
    shapes = format.parts((spec.shape[0], spec.shape[1]))
    for part in PARTS:
        if part in shapes:
            part_weight = part_recipe(recipe, format, part)
            assert part_weight is not None, "only joined tensors are marked"
            name = unique_name(f"{spec.name}.{part}", tensors)
            shape, dtype = shapes[part]
            # A scale for each row costs little; in float32, products of codes take it as it is.
            by_row = part == "scales" and shape[1] == 1 and format.activations != "none" and format.offsets == "none"
            tensors[name], weights[name] = TensorSpec(name, shape, dtype, "float32" if by_row else dtype), part_weight
            names.append(name)
    return names


def _reading_parts(node: OpNode, graph: IRGraph, parts: Mapping[str, list[str]]) -> OpNode:
    if not any(name in parts for name in node.inputs):
        return node
    op = find_op(node.op_type)
    assert op is not None and op.quantized is not None
    format = next(spec.quantized for name in node.inputs if (spec := graph.tensors[name]).quantized is not None)
    inputs = tuple(part for name in node.inputs for part in parts.get(name, [name]))
    return replace(node, op_type=op.quantized.op, inputs=inputs, attrs={**node.attrs, "format": format})
