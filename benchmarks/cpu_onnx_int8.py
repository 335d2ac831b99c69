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
    """Write the IR that `npu_sim.quantizing.networks.quantize` makes as ONNX; returns the name of its input.

    Raises:
        ValueError: it holds an op that is none of those of image classifiers.
    """
    made: list[onnx.NodeProto] = []
    initializers: dict[str, np.ndarray] = {name: weights[key] for name, key in ir["weight_name_mapping"].items()}
    for node in ir["nodes"]:
        made += _translate(node, initializers)
    (source,), (result,) = ir["graph_inputs"], ir["graph_outputs"]
    graph = helper.make_graph(
        made,
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


def _translate(node: Mapping[str, Any], initializers: dict[str, np.ndarray]) -> list[onnx.NodeProto]:
    name, attrs = node["name"], node["attrs"]
    inputs, (out,) = [x["name"] for x in node["inputs"]], [x["name"] for x in node["outputs"]]
    shape = node["inputs"][0]["shape"]

    def constant(suffix: str, value: np.ndarray) -> str:
        initializers[f"{name}.{suffix}"] = value
        return f"{name}.{suffix}"

    def pair(key: str, default: int) -> list[int]:
        value = attrs.get(key, default)
        return [value, value] if isinstance(value, int) else list(value) * (2 // len(value))

    def add(op: str, operands: list[str], **fields: Any) -> list[onnx.NodeProto]:
        return [helper.make_node(op, operands, [out], name=name, **fields)]

    kind = node["op_type"].removeprefix("aten.").removeprefix(_QUANTIZED).split(".")[0].rstrip("_")
    if kind in ("quantize_per_tensor", "dequantize_per_tensor"):
        scale = constant("scale", np.array(attrs["scale"], np.float32))
        zero = constant("zero_point", np.array(attrs["zero_point"], attrs["dtype"]))
        return add("QuantizeLinear" if kind[0] == "q" else "DequantizeLinear", [inputs[0], scale, zero])
    if kind == "dequantize_per_channel":
        zero = constant("zero_point", np.zeros(shape[0], np.int8))
        return add("DequantizeLinear", [*inputs[:2], zero], axis=0)
    if kind == "conv2d":
        window = {"strides": pair("stride", 1), "pads": pair("padding", 0) * 2, "dilations": pair("dilation", 1)}
        return add("Conv", inputs, group=attrs.get("groups", 1), **window)
    if kind == "linear":
        return add("Gemm", inputs, transB=1)
    if kind == "relu":
        return add("Relu", inputs)
    if kind in ("hardtanh", "relu6"):
        ends = (attrs.get("min_val", 0.0), attrs.get("max_val", 6.0))
        return add("Clip", [inputs[0], *(constant(f"end{i}", np.array(x, np.float32)) for i, x in enumerate(ends))])
    if kind == "add":
        return add("Add", inputs)
    if kind == "max_pool2d":
        window = {"strides": pair("stride", 1), "pads": pair("padding", 0) * 2}
        return add("MaxPool", inputs, kernel_shape=pair("kernel_size", 1), **window)
    if kind == "adaptive_avg_pool2d" and list(attrs["output_size"]) == [1, 1]:
        return add("GlobalAveragePool", inputs)
    if kind in ("view", "flatten", "reshape"):
        return add("Reshape", [inputs[0], constant("shape", np.array(node["outputs"][0]["shape"], np.int64))])
    if kind in ("pad", "constant_pad_nd"):
        left, right, top, bottom = attrs["pad"]
        pads = constant("pads", np.array([0, 0, top, left, 0, 0, bottom, right], np.int64))
        return add("Pad", [inputs[0], pads], mode="constant")
    raise ValueError(f"node '{name}': no ONNX for '{node['op_type']}'")
