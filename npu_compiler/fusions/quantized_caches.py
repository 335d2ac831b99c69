"""KV caches of one byte per element: each becomes a tensor of codes and a tensor of scales, one per token and head.

Runs after storage dtypes are assigned, on the ops that the fusions have made of attention and of cache updates.

    Given:   k1 = index_copy(k0, 2, index, k);  v1 = index_copy(v0, 2, index, v)       k0, v0: bfloat16[1, H, S, D]
             y = attention(q, k1, v1, mask)
    Result:  k1, k1.scales = npu.quantized_index_copy(k0, index, k, k0.scales)         k0: uint8[1, H, S, D]
             v1, v1.scales = npu.quantized_index_copy(v0, index, v, v0.scales)         k0.scales: float32[1, H, S]
             y = npu.quantized_attention(q, k1, k1.scales, v1, v1.scales, mask)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from npu_compiler.errors import InputError
from npu_compiler.fusions.attention import ATTENTION_OPS
from npu_compiler.graph.dtypes import FLOAT_DTYPES
from npu_compiler.graph.model import TENSOR_NAMES, IRGraph, OpNode, TensorSpec, unique_name
from npu_compiler.graph.quantization import row_format
from npu_compiler.ops.registry import well_formed
from npu_compiler.target_config import TargetConfig

_TOKENS = 2  # the dimension of a cache that counts them


def quantize_caches(graph: IRGraph, kv_cache: str | None, config: TargetConfig) -> IRGraph:
    """Store the KV caches that are inputs of the graph as `int8` or `fp8`; None leaves them as they are.

    Raises:
        InputError: there is no such format, the target has no kernels for it, or the graph has no KV cache.
    """
    if kv_cache is None:
        return graph
    format = row_format(kv_cache, "a KV cache")
    if not config.rounds_caches:
        raise InputError(
            f"the target {config.name} has no kernels for a KV cache in {kv_cache}; only programs for the CPU and for "
            "simulated chips have"
        )
    caches = _find_caches(graph)
    if not caches:
        raise InputError(
            "the graph has no KV cache that could be quantized: an input [batch, heads, tokens, width] that index_copy "
            "updates along its tokens, and that nothing but attention reads"
        )
    tensors = dict(graph.tensors)
    scales = {name: _add_scales(name, tensors) for update in caches.values() for name in (update.cache, update.result)}
    nodes: list[OpNode] = []
    for node in graph.nodes:
        updates = [caches[name] for name in node.outputs if name in caches]
        nodes += [update.quantized(scales, format) for update in updates] or [_attending(node, scales, format)]
    inputs = [part for name in graph.inputs for part in _parts(name, scales)]
    outputs = [part for name in graph.outputs for part in _parts(name, scales)]
    names = [
        part
        for tensor, name in zip(graph.outputs, graph.output_names, strict=True)
        for part in ((name, f"{name}.scales") if tensor in scales else (name,))
    ]
    return replace(graph, nodes=nodes, tensors=tensors, inputs=inputs, outputs=outputs, output_names=names)


@dataclass(frozen=True)
class _Update:
    """The update of one cache with new rows: result = index_copy(cache, 2, index, source)."""

    cache: str
    index: str
    source: str
    result: str

    def quantized(self, scales: dict[str, str], format: str) -> OpNode:
        inputs = (self.cache, self.index, self.source, scales[self.cache])
        outputs = (self.result, scales[self.result])
        return OpNode(self.result, "npu.quantized_index_copy", inputs, outputs, {"format": format})


def _find_caches(graph: IRGraph) -> dict[str, _Update]:
    """Updated cache → its update, for inputs that only the update reads, and whose result only attention reads."""
    consumers = graph.consumers()
    updates = [update for node in graph.nodes for update in _updates(node, graph)]
    caches = {x.result: x for x in updates if x.cache in graph.inputs and len(consumers[x.cache]) == 1}

    def reads_both(node: OpNode) -> bool:
        others = (*node.inputs[:1], *node.inputs[3:])
        return node.base in ATTENTION_OPS and set(node.inputs[1:3]) <= caches.keys() and not caches.keys() & set(others)

    while wrong := [name for name in caches if not all(map(reads_both, consumers.get(name, [])))]:
        for name in wrong:
            del caches[name]
    # Of a call that updates two caches, both are or none is.
    whole = {name for node in graph.nodes if set(node.outputs) <= caches.keys() for name in node.outputs}
    return {name: update for name, update in caches.items() if name in whole}


def _updates(node: OpNode, graph: IRGraph) -> list[_Update]:
    if node.base not in ("aten.index_copy", "npu.index_copy_pair"):
        return []
    cache, index, source, *other = node.inputs
    spec = graph.tensors[cache]
    with well_formed(node):
        if len(spec.shape) != 4 or node.attrs["dim"] % 4 != _TOKENS or spec.dtype not in FLOAT_DTYPES:
            return []
    first = _Update(cache, index, source, node.outputs[0])
    return [first, _Update(other[0], index, other[1], node.outputs[1])] if other else [first]


def _add_scales(name: str, tensors: dict[str, TensorSpec]) -> str:
    """Turn a tensor into one of codes, add a tensor for its scales, and return the latter's name."""
    spec = tensors[name]
    tensors[name] = replace(spec, dtype="uint8", storage="uint8", bounds=(0, 255))
    scales = unique_name(f"{name}.scales", tensors)
    tensors[scales] = TensorSpec(scales, spec.shape[:-1], "float32", "float32")
    return scales


def _attending(node: OpNode, scales: dict[str, str], format: str) -> OpNode:
    """The node, changed to read codes and scales if it is attention over a quantized cache.

    Args:
        scales: Tensor of keys or values that is now codes → the tensor of its scales.
        format: The cache's format, one of `ROW_FORMATS`.
    """
    if node.base not in ATTENTION_OPS or node.inputs[1] not in scales:
        return node
    query, key, value, *others = node.inputs
    attrs = {**node.attrs, "format": format}
    if names := node.tensor_names:
        attrs[TENSOR_NAMES] = ["query", "key", "key_scales", "value", "value_scales", *names[3:]]
    inputs = (query, key, scales[key], value, scales[value], *others)
    return replace(node, op_type="npu.quantized_attention", inputs=inputs, attrs=attrs)


def _parts(name: str, scales: dict[str, str]) -> tuple[str, ...]:
    return (name, scales[name]) if name in scales else (name,)
