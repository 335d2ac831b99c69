"""A TFLite file of an int8 network: enough of the format for a compiler to estimate the network's time.

The schema's classes are those that Vela ships (`pip install ethos-u-vela`). Weights are arbitrary and scales are equal:
the file is for estimates, not for values.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from npu_compiler.errors import InputError
from npu_compiler.graph.model import IRGraph, OpNode

_INT8, _INT32 = 9, 2  # TensorType
_SAME, _VALID = 0, 1  # Padding
_NONE, _RELU, _RELU6 = 0, 1, 3  # ActivationFunctionType
_ADD, _AVERAGE, _CONV, _DEPTHWISE, _FULL, _MAX, _RESHAPE = 0, 1, 3, 4, 9, 17, 22  # BuiltinOperator
_OPTIONS = {  # op → the type of its options, and its number
    _ADD: ("AddOptions", 11),
    _AVERAGE: ("Pool2DOptions", 5),
    _CONV: ("Conv2DOptions", 1),
    _DEPTHWISE: ("DepthwiseConv2DOptions", 2),
    _FULL: ("FullyConnectedOptions", 8),
    _MAX: ("Pool2DOptions", 5),
    _RESHAPE: ("ReshapeOptions", 17),
}
_ACTIVATIONS = {"aten.relu": _RELU, "aten.hardtanh": _RELU6, "aten.relu6": _RELU6}


@dataclass(frozen=True)
class Operator:
    """An operator of the file.

    Attributes:
        name: The node of the graph that it computes.
        op: Number of the operator in the schema.
        inputs: Numbers of its input tensors.
        output: Number of its output tensor.
        options: Fields of its options, by their names in the schema.
    """

    name: str
    op: int
    inputs: tuple[int, ...]
    output: int
    options: dict[str, int]


@dataclass
class Network:
    """The operators and tensors of a file, with dimensions in the file's order: images are [n, h, w, c]."""

    tensors: list[tuple[str, tuple[int, ...], int, np.ndarray | None]] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def tensor(self, name: str, shape: Sequence[int], dtype: int = _INT8, data: np.ndarray | None = None) -> int:
        """Add a tensor and return its number.

        Args:
            data: The values of a constant. None: the tensor is computed.
        """
        self.tensors.append((name, tuple(shape), dtype, data))
        return len(self.tensors) - 1


def network_of(graph: IRGraph) -> Network:
    """Convert a normalized graph of convolutions, additions, poolings and linear layers.

    Activations become fields of the operators before them, and paddings fields of the convolutions after them.

    Raises:
        InputError: the graph holds another op.
    """
    return _Converter(graph).run()


class _Converter:
    def __init__(self, graph: IRGraph) -> None:
        self._graph, self._consumers, self._network = graph, graph.consumers(), Network()
        self._number: dict[str, int] = {}
        self._makers: dict[str, int] = {}
        self._random = np.random.default_rng(0)

    def run(self) -> Network:
        for name in self._graph.inputs:
            self._number[name] = self._network.tensor(name, _nhwc(self._graph.tensors[name].shape))
        for node in self._graph.nodes:
            self._add(node)
        self._network.inputs = [self._number[name] for name in self._graph.inputs]
        self._network.outputs = [self._number[name] for name in self._graph.outputs]
        return self._network

    def _add(self, node: OpNode) -> None:
        shape = self._graph.tensors[node.outputs[0]].shape
        source = self._number.get(node.inputs[0], -1)
        match node.base:
            case "aten.pad":
                self._number[node.outputs[0]] = source
            case "aten.relu" | "aten.hardtanh" | "aten.relu6" if self._fuses(node):
                self._number[node.outputs[0]] = source
            case "aten.conv2d":
                self._convolution(node, source)
            case "aten.linear":
                inner, filters = self._graph.tensors[node.inputs[1]].shape[::-1]
                operands = (source, self._weight(node, (filters, inner)), self._bias(node, filters))
                self._operator(node, _FULL, operands, shape, FusedActivationFunction=_NONE)
            case "aten.add":
                self._operator(node, _ADD, (source, self._number[node.inputs[1]]), shape, FusedActivationFunction=_NONE)
            case "aten.max_pool2d" | "aten.adaptive_avg_pool2d":
                self._pooling(node, source)
            case "aten.flatten" | "aten.view":
                self._operator(node, _RESHAPE, (source, self._constant(node, shape)), shape)
            case _:
                raise InputError(f"node '{node.name}' ({node.op_type}) has no form in such a TFLite file")

    def _fuses(self, node: OpNode) -> bool:
        """Make an activation a field of the operator before it; return False if that operator has other consumers."""
        maker = self._makers.get(node.inputs[0])
        if maker is None or len(self._consumers[node.inputs[0]]) > 1:
            return False
        self._network.operators[maker].options["FusedActivationFunction"] = _ACTIVATIONS[node.base]
        return True

    def _convolution(self, node: OpNode, source: int) -> None:
        filters, channels, *kernel = self._graph.tensors[node.inputs[1]].shape
        stride = node.attrs.get("stride", [1, 1])
        is_depthwise = node.attrs.get("groups", 1) == filters and channels == 1
        weight = (1, *kernel, filters) if is_depthwise else (filters, *kernel, channels)
        before = self._graph.producers().get(node.inputs[0])
        is_padded = any(node.attrs.get("padding", [0])) or (before is not None and before.base == "aten.pad")
        self._operator(
            node,
            _DEPTHWISE if is_depthwise else _CONV,
            (source, self._weight(node, weight), self._bias(node, filters)),
            self._graph.tensors[node.outputs[0]].shape,
            Padding=_SAME if is_padded else _VALID,
            StrideW=stride[1],
            StrideH=stride[0],
            FusedActivationFunction=_NONE,
            DilationWFactor=1,
            DilationHFactor=1,
            **({"DepthMultiplier": 1} if is_depthwise else {}),
        )

    def _pooling(self, node: OpNode, source: int) -> None:
        is_max = node.base == "aten.max_pool2d"
        window = node.attrs["kernel_size"] if is_max else self._graph.tensors[node.inputs[0]].shape[2:]
        stride = node.attrs["stride"] if is_max else (1, 1)
        self._operator(
            node,
            _MAX if is_max else _AVERAGE,
            (source,),
            self._graph.tensors[node.outputs[0]].shape,
            Padding=_SAME if is_max and any(node.attrs.get("padding", [0])) else _VALID,
            StrideW=stride[1],
            StrideH=stride[0],
            FilterWidth=window[1],
            FilterHeight=window[0],
            FusedActivationFunction=_NONE,
        )

    def _operator(self, node: OpNode, op: int, inputs: tuple[int, ...], shape: Sequence[int], **options: int) -> None:
        number = self._network.tensor(node.outputs[0], _nhwc(shape))
        self._number[node.outputs[0]] = number
        self._makers[node.outputs[0]] = len(self._network.operators)
        self._network.operators.append(Operator(node.name, op, inputs, number, dict(options)))

    def _weight(self, node: OpNode, shape: tuple[int, ...]) -> int:
        values = np.clip(np.rint(30 * self._random.standard_normal(shape)), -127, 127).astype(np.int8)
        return self._network.tensor(f"{node.name}.weight", shape, data=values)

    def _bias(self, node: OpNode, filters: int) -> int:
        return self._network.tensor(f"{node.name}.bias", (filters,), _INT32, np.zeros(filters, np.int32))

    def _constant(self, node: OpNode, shape: Sequence[int]) -> int:
        return self._network.tensor(f"{node.name}.shape", (len(shape),), _INT32, np.array(shape, np.int32))


def _nhwc(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape with its dimensions in the file's order."""
    return (shape[0], *shape[2:], shape[1]) if len(shape) == 4 else tuple(shape)


def written(network: Network) -> bytes:
    """Return the content of the TFLite file."""
    import flatbuffers

    return _Writer(flatbuffers.Builder(0), network).write()


class _Writer:
    """Writes the tables of the file's schema by the classes that Vela generated from the schema."""

    def __init__(self, builder: Any, network: Network) -> None:
        self._builder, self._network = builder, network

    def write(self) -> bytes:
        network, builder = self._network, self._builder
        data = [None, *(values for *_, values in network.tensors if values is not None)]
        buffers = [
            self._table("Buffer", Data=0 if x is None else builder.CreateNumpyVector(x.view(np.uint8).ravel()))
            for x in data
        ]
        codes = sorted({each.op for each in network.operators})
        filled = iter(range(1, len(data)))
        tensors = [
            self._tensor(name, shape, dtype, 0 if values is None else next(filled))
            for name, shape, dtype, values in network.tensors
        ]
        operators = [self._operator(each, codes.index(each.op)) for each in network.operators]
        graph = self._table(
            "SubGraph",
            Tensors=self._offsets(tensors),
            Inputs=self._integers(network.inputs),
            Outputs=self._integers(network.outputs),
            Operators=self._offsets(operators),
        )
        known = [self._table("OperatorCode", DeprecatedBuiltinCode=code, Version=1, BuiltinCode=code) for code in codes]
        model = self._table(
            "Model",
            Version=3,
            OperatorCodes=self._offsets(known),
            Subgraphs=self._offsets([graph]),
            Buffers=self._offsets(buffers),
        )
        builder.Finish(model, file_identifier=b"TFL3")
        return bytes(builder.Output())

    def _tensor(self, name: str, shape: Sequence[int], dtype: int, buffer: int) -> int:
        scale = self._builder.CreateNumpyVector(np.array([0.05 if dtype == _INT8 else 0.0025], np.float32))
        zero = self._builder.CreateNumpyVector(np.zeros(1, np.int64))
        quantization = self._table("QuantizationParameters", Scale=scale, ZeroPoint=zero)
        text = self._builder.CreateString(name)
        return self._table(
            "Tensor", Shape=self._integers(shape), Type=dtype, Buffer=buffer, Name=text, Quantization=quantization
        )

    def _operator(self, operator: Operator, code: int) -> int:
        kind, number = _OPTIONS[operator.op]
        return self._table(
            "Operator",
            OpcodeIndex=code,
            Inputs=self._integers(operator.inputs),
            Outputs=self._integers([operator.output]),
            BuiltinOptionsType=number,
            BuiltinOptions=self._table(kind, **operator.options),
        )

    def _table(self, kind: str, **fields: int) -> int:
        module = importlib.import_module(f"ethosu.vela.tflite.{kind}")
        getattr(module, f"{kind}Start")(self._builder)
        for name, value in fields.items():
            add: Callable[[Any, int], None] = getattr(module, f"{kind}Add{name}")
            add(self._builder, value)
        end: int = getattr(module, f"{kind}End")(self._builder)
        return end

    def _integers(self, values: Sequence[int]) -> int:
        vector: int = self._builder.CreateNumpyVector(np.array(values, np.int32))
        return vector

    def _offsets(self, values: Sequence[int]) -> int:
        self._builder.StartVector(4, len(values), 4)
        for value in reversed(values):
            self._builder.PrependUOffsetTRelative(value)
        end: int = self._builder.EndVector()
        return end


__all__ = ["Network", "network_of", "written"]
