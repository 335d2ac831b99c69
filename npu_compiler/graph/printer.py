"""Prints a graph as text, one node per line; tests of passes compare this text."""

from __future__ import annotations

from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec


def print_graph(graph: IRGraph, *, types: bool = True) -> str:
    """The graph as text, in lines such as `%out: f16[1, 8] = aten.relu(%x)`; without `types`, shapes are left out."""

    def tensor(name: str) -> str:
        return f"%{name}: {tensor_type(graph.tensors[name])}" if types else f"%{name}"

    lines = [f"graph {graph.name}({', '.join(tensor(name) for name in graph.inputs)})"]
    lines += [f"  weight {tensor(name)} = {recipe}" for name, recipe in graph.weights.items()]
    lines += [f"  constant {tensor(name)}" for name in graph.constants]
    for node in graph.nodes:
        outputs = ", ".join(tensor(name) for name in node.outputs) or "()"
        lines.append(f"  {outputs} = {_call(node)}")
    lines.append(f"  return {', '.join(f'%{name}' for name in graph.outputs)}")
    return "\n".join(lines)


def _call(node: OpNode) -> str:
    inputs = ", ".join(f"%{name}" for name in node.inputs)
    attrs = attributes(node)
    return f"{node.base}({inputs})" + (f" {{{attrs}}}" if attrs else "")


def attributes(node: OpNode) -> str:
    """A node's scalars and flags as text: `dim=-1, keepdim=True`."""
    return ", ".join(f"{key}={value}" for key, value in sorted(node.attrs.items()) if not key.startswith("_"))


_SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64"}


def tensor_type(spec: TensorSpec) -> str:
    """A tensor's dtype and shape as text: `f16[1, 3, 8, 8] in [1, 32, 8, 8]` for one with padded channels."""
    dtype = spec.storage or spec.dtype
    text = _SHORT.get(dtype, dtype) + str(list(spec.shape))
    text += f" in {list(spec.alloc_shape)}" if spec.alloc_shape else ""
    return f"{text} as {spec.quantized}" if spec.quantized else text
