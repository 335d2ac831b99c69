"""A quantized network as ONNX, for the contenders: `QuantizeLinear` and `DequantizeLinear` with our scales."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_QUANTIZED = "quantized_decomposed."


def write_onnx(ir: Mapping[str, Any], weights: Mapping[str, np.ndarray], path: Path) -> str:
    """Write IR from `npu_sim.quantizing.networks.quantize` as ONNX; return the name of the input.

    Raises:
        ValueError: the IR contains an op that is not one of image classifiers'.
    """
    nodes: list[onnx.NodeProto] = []
    initializers: dict[str, np.ndarray] = {name: weights[key] for name, key in ir["weight_name_mapping"].items()}
    for node in ir["nodes"]:
        nodes += _translate(node, initializers)
    (source,), (result,) = ir["graph_inputs"], ir["graph_outputs"]
    graph = helper.make_graph(
        nodes,
        ir["model_name"],
        [helper.make_tensor_value_info(source["name"], TensorProto.FLOAT, source["shape"])],
        [helper.make_tensor_value_info(result["name"], TensorProto.FLOAT, result["shape"])],
        [numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in initializers.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return str(source["name"])


class _Translation:
    """The translation of one IR node to ONNX; constants become initializers."""

    def __init__(self, node: Mapping[str, Any], initializers: dict[str, np.ndarray]) -> None:
        self.node, self.attrs = node, node["attrs"]
        self.inputs, (self.out,) = [x["name"] for x in node["inputs"]], [x["name"] for x in node["outputs"]]
        self.kind = node["op_type"].removeprefix("aten.").removeprefix(_QUANTIZED).split(".")[0].rstrip("_")
        self._initializers = initializers

    def constant(self, suffix: str, value: np.ndarray) -> str:
        name = f"{self.node['name']}.{suffix}"
        self._initializers[name] = value
        return name

    def pair(self, key: str, default: int) -> list[int]:
        value = self.attrs.get(key, default)
        return [value, value] if isinstance(value, int) else list(value) * (2 // len(value))

    def add(self, op: str, operands: list[str], **fields: Any) -> list[onnx.NodeProto]:
        return [helper.make_node(op, operands, [self.out], name=self.node["name"], **fields)]


def _translate(node: Mapping[str, Any], initializers: dict[str, np.ndarray]) -> list[onnx.NodeProto]:
    """Return the ONNX nodes for an IR node. Raises `ValueError` if there is no translation."""
    to = _Translation(node, initializers)
    for translate in (_translate_quantization, _translate_product, _translate_movement):
        nodes = translate(to)
        if nodes is not None:
            return nodes
    raise ValueError(f"node '{node['name']}': no ONNX for '{node['op_type']}'")


def _translate_quantization(to: _Translation) -> list[onnx.NodeProto] | None:
    if to.kind in ("quantize_per_tensor", "dequantize_per_tensor"):
        scale = to.constant("scale", np.array(to.attrs["scale"], np.float32))
        zero = to.constant("zero_point", np.array(to.attrs["zero_point"], to.attrs["dtype"]))
        return to.add("QuantizeLinear" if to.kind[0] == "q" else "DequantizeLinear", [to.inputs[0], scale, zero])
    if to.kind == "dequantize_per_channel":
        zero = to.constant("zero_point", np.zeros(to.node["inputs"][0]["shape"][0], np.int8))
        return to.add("DequantizeLinear", [*to.inputs[:2], zero], axis=0)
    return None


def _translate_product(to: _Translation) -> list[onnx.NodeProto] | None:
    if to.kind == "conv2d":
        window = {"strides": to.pair("stride", 1), "pads": to.pair("padding", 0) * 2}
        dilations, group = to.pair("dilation", 1), to.attrs.get("groups", 1)
        return to.add("Conv", to.inputs, group=group, dilations=dilations, **window)
    if to.kind == "linear":
        return to.add("Gemm", to.inputs, transB=1)
    if to.kind in ("relu", "add"):
        return to.add(to.kind.capitalize(), to.inputs)
    if to.kind in ("hardtanh", "relu6"):
        ends = (to.attrs.get("min_val", 0.0), to.attrs.get("max_val", 6.0))
        limits = [to.constant(f"end{i}", np.array(x, np.float32)) for i, x in enumerate(ends)]
        return to.add("Clip", [to.inputs[0], *limits])
    return None


def _translate_movement(to: _Translation) -> list[onnx.NodeProto] | None:
    if to.kind == "max_pool2d":
        window = {"strides": to.pair("stride", 1), "pads": to.pair("padding", 0) * 2}
        return to.add("MaxPool", to.inputs, kernel_shape=to.pair("kernel_size", 1), **window)
    if to.kind == "adaptive_avg_pool2d" and list(to.attrs["output_size"]) == [1, 1]:
        return to.add("GlobalAveragePool", to.inputs)
    if to.kind in ("view", "flatten", "reshape"):
        shape = to.constant("shape", np.array(to.node["outputs"][0]["shape"], np.int64))
        return to.add("Reshape", [to.inputs[0], shape])
    if to.kind in ("pad", "constant_pad_nd"):
        left, right, top, bottom = to.attrs["pad"]
        pads = to.constant("pads", np.array([0, 0, top, left, 0, 0, bottom, right], np.int64))
        return to.add("Pad", [to.inputs[0], pads], mode="constant")
    return None
