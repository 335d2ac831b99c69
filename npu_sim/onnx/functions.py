"""Operators that ONNX defines by a graph of other operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnx_ir as ir
import torch

from npu_sim.onnx.dtypes import TORCH_DTYPES
from npu_sim.onnx.rows import Call

_ONNX_DTYPES = {dtype: int(kind) for kind, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Body:
    """The definition of an operator by other operators.

    Attributes:
        function: The graph of other operators.
        defaults: Values of attributes that a call may leave out.
        made: Whether the function computes each output of the operator; empty if it computes all.
    """

    function: ir.Function
    defaults: Mapping[str, Any] = field(default_factory=dict)
    made: tuple[bool, ...] = ()


def body_of(node: ir.Node, call: Call, domain: str, types: Sequence[torch.Tensor | None]) -> Body | None:
    """Return the definition of an operator by other operators; None if ONNX has none for this call."""
    try:
        schema = onnx.defs.get_schema(node.op_type, call.opset, domain)
    except onnx.defs.SchemaError:
        return None
    content = _content(schema, node, call.opset, types)
    if not content:
        return None
    proto = onnx.FunctionProto()
    proto.ParseFromString(content)
    defaults = {
        name: _default(attribute) for name, attribute in schema.attributes.items() if attribute.default_value.type
    }
    values = {*proto.input, *(name for inner in proto.node for name in inner.output)}
    made = tuple(name in values for name in proto.output)
    kept = [name for name in proto.output if name in values]
    del proto.output[:]
    proto.output.extend(kept)
    return Body(ir.serde.deserialize_function(proto), defaults, made)


def _default(attribute: onnx.defs.OpSchema.Attribute) -> Any:
    value = onnx.helper.get_attribute_value(attribute.default_value)
    return value.decode() if isinstance(value, bytes) else value


def _content(schema: Any, node: ir.Node, opset: int, types: Sequence[torch.Tensor | None]) -> bytes:
    if schema.has_context_dependent_function:
        versions = [version for version in schema.context_dependent_function_opset_versions if version <= opset]
        if versions:
            described = [b"" if x is None else _type(x).SerializeToString() for x in types]
            data = ir.serde.serialize_node(node).SerializeToString()
            content: bytes = schema.get_context_dependent_function_with_opset_version(versions[-1], data, described)
            return content
    if schema.has_function:
        versions = [version for version in schema.function_opset_versions if version <= opset]
        if versions:
            body = schema.get_function_with_opset_version(versions[-1])
            return body if isinstance(body, bytes) else bytes(body.SerializeToString())
    return b""


def _type(tensor: torch.Tensor) -> onnx.TypeProto:
    return onnx.helper.make_tensor_type_proto(_ONNX_DTYPES[tensor.dtype], list(tensor.shape))
