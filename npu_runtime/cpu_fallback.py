"""Run a CPU partition through `torch_ir.IRExecutor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch_ir import IR, IRExecutor
from torch_ir.executor import ExecutionError
from torch_ir.ir import OpNode as TorchNode
from torch_ir.ir import TensorMeta
from torch_ir.ops.registry import register_executor

from npu_compiler.errors import DeviceError
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.conv import BATCH_NORM_OPS
from npu_compiler.ops.elementwise import unclear_bound
from npu_compiler.ops.transformer import is_named, unclear_affine
from npu_runtime.torch_arrays import numpy_to_tensor, tensor_to_numpy

_PREFIX = "npu_fallback::"
_registered: set[str] = set()


class CPUPartition:
    """A graph prepared for the CPU: built once, run many times, by several threads at once if need be.

    Raises:
        DeviceError: the IR does not record which of its optional tensors a node was given.
    """

    def __init__(self, graph: IRGraph, weights: Mapping[str, Any]) -> None:
        self.graph = graph
        self._ir, self._weights = _torch_ir(graph), dict(_weight_tensors(graph, weights))

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Input name → array in, output name → array out, in the graph's own (PyTorch) dtypes.

        Raises:
            DeviceError: an op failed, or PyTorch has none of that name.
        """
        tensors = tuple(numpy_to_tensor(inputs[name]) for name in self.graph.inputs)
        try:
            with torch.no_grad():
                outputs = IRExecutor(self._ir, self._weights).execute(tensors)  # it holds the state of one run
        except ExecutionError as error:
            raise DeviceError(f"CPU partition '{self.graph.name}' failed: {error}") from error
        return {name: tensor_to_numpy(value) for name, value in zip(self.graph.outputs, outputs, strict=True)}


def execute_cpu_partition(
    graph: IRGraph, inputs: Mapping[str, np.ndarray], weights: Mapping[str, Any] | None = None
) -> dict[str, np.ndarray]:
    """Run a graph once on the CPU with PyTorch's own ops; see `CPUPartition.run`."""
    return CPUPartition(graph, weights or {}).run(inputs)


def _weight_tensors(graph: IRGraph, weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, recipe in graph.weights.items():
        value = weights[next(recipe.keys())]
        tensor = value if isinstance(value, torch.Tensor) else numpy_to_tensor(np.asarray(value))
        tensors[name] = tensor.to(getattr(torch, graph.tensors[name].dtype))
    for name, array in graph.constants.items():
        tensors[name] = numpy_to_tensor(array)
    return tensors


def _torch_ir(graph: IRGraph) -> IR:
    """The graph as torch_ir data. Op types get a prefix whose executor is ours, see `_call`."""
    makers = {out: (node.name, index) for node in graph.nodes for index, out in enumerate(node.outputs)}
    makers.update({name: (name, 0) for name in graph.inputs})

    def meta(name: str) -> TensorMeta:
        spec = graph.tensors[name]
        producer, index = makers.get(name, (None, 0))
        return TensorMeta(name, spec.shape, spec.dtype, producer, index)

    nodes = []
    for node in graph.nodes:
        reason = unclear_reason(node, graph)
        if reason is not None:
            raise DeviceError(f"node '{node.name}' ({node.op_type}) cannot run on the CPU either: {reason}")
        _ensure_executor(node.op_type)
        shapes = [graph.tensors[out].shape for out in node.outputs]
        attrs = {"attrs": node.attrs, "dtypes": [graph.tensors[out].dtype for out in node.outputs], "shapes": shapes}
        nodes.append(
            TorchNode(
                node.name,
                _PREFIX + node.op_type,
                [meta(x) for x in node.inputs],
                [meta(x) for x in node.outputs],
                attrs,
            )
        )
    return IR(
        nodes, [meta(x) for x in graph.inputs], [meta(x) for x in graph.outputs], [meta(x) for x in graph.weights]
    )


def _ensure_executor(op_type: str) -> None:
    if op_type in _registered:
        return
    _registered.add(op_type)

    def execute(inputs: list[torch.Tensor], attrs: dict[str, Any]) -> list[torch.Tensor]:
        results = _call(op_type, inputs, attrs["attrs"])
        return [
            value.to(getattr(torch, dtype)).contiguous() for value, dtype in zip(results, attrs["dtypes"], strict=False)
        ]

    register_executor(_PREFIX + op_type)(execute)


def _call(op_type: str, inputs: list[torch.Tensor], attrs: Mapping[str, Any]) -> list[torch.Tensor]:
    if op_type == "<built-in function getitem>":
        return [inputs[attrs["index"]]]
    function = _resolve(op_type)
    args, kwargs = bind_arguments(function._schema, op_type, inputs, attrs)
    try:
        result = function(*args, **kwargs)
    except NotImplementedError:
        # Meta kernels accept integer inputs that some CPU kernels (histc) refuse.
        result = function(*[a.float() if isinstance(a, torch.Tensor) else a for a in args], **kwargs)
    except RuntimeError as error:
        if "not implemented for" not in str(error):
            raise
        result = function(*[a.float() if isinstance(a, torch.Tensor) else a for a in args], **kwargs)
    values = list(result) if isinstance(result, (tuple, list)) else [result]
    return [value if isinstance(value, torch.Tensor) else torch.tensor(value) for value in values if value is not None]


def _resolve(op_type: str) -> Any:
    parts = op_type.split(".")
    namespace, name, overload = (
        (parts[0], parts[1], parts[2] if len(parts) > 2 else "default") if len(parts) > 1 else ("", op_type, "")
    )
    if namespace == "transformers":
        import transformers.integrations.moe  # noqa: F401  (registers the namespace)
    try:
        function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        if any(argument.name == "filename" for argument in function._schema.arguments):
            raise ExecutionError(f"op '{op_type}' reads and writes a file that the IR names, which is not allowed")
        return function
    except (AttributeError, RuntimeError) as error:
        advice = "; extract the IR under torch.no_grad()" if op_type.startswith("wrap_with") else ""
        raise ExecutionError(f"PyTorch has no op '{op_type}', so the CPU cannot run it either{advice}") from error


def unclear_reason(node: OpNode, graph: IRGraph) -> str | None:
    """Why a node's tensors cannot be told apart: the IR does not record which optional ones were omitted."""
    base = node.base.removesuffix("_")
    in_training = base in BATCH_NORM_OPS and (node.attrs.get("training") or node.attrs.get("train"))
    if in_training and len(node.inputs) == 3 and not is_named(node.inputs[1], graph, "running_mean"):
        return "batch_norm in training mode with two tensors: the IR does not record if they are its weight and bias"
    return unclear_bound(node) or unclear_affine(node, graph)


_STATS_ONLY = frozenset({*BATCH_NORM_OPS, "aten.instance_norm"})


def bind_arguments(
    schema: Any, op_type: str, inputs: Sequence[torch.Tensor], attrs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Rebuild an op's arguments from the IR's flat tensor list and attributes.

    The IR does not record which optional tensors were omitted. Where their count tells (normalization with statistics
    but no affine parameters), None stands for them; `unclear_reason` refuses the nodes where it does not.
    """
    remaining = list(inputs)
    sizes, masks = list(attrs.get("_tensor_list_sizes") or []), list(attrs.get("_tensor_list_none_masks") or [])
    stats_only = (
        ".".join(op_type.split(".")[:2]) in _STATS_ONLY and len(inputs) == 3 and not attrs.get("use_input_stats")
    )
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in schema.arguments:
        kind = str(argument.type)
        if "Tensor" in kind and ("[]" in kind or "List" in kind):
            value: Any = _tensor_list(remaining, sizes, masks)
        elif "Tensor" in kind:
            if argument.name in attrs:
                value = attrs[argument.name]
            elif stats_only and argument.name in ("weight", "bias"):
                value = None
            else:
                value = remaining.pop(0) if remaining else None
        elif argument.name in attrs:
            value = decode_attr(argument.name, attrs[argument.name], kind)
        elif argument.has_default_value():
            value = argument.default_value
        else:
            raise ExecutionError(f"argument '{argument.name}' of op '{op_type}' is missing")
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _tensor_list(remaining: list[torch.Tensor], sizes: list[int], masks: list[list[bool]]) -> list[torch.Tensor | None]:
    count = sizes.pop(0) if sizes else len(remaining)
    taken = [remaining.pop(0) for _ in range(count)]
    if masks and count == masks[0].count(False):
        return [None if is_none else taken.pop(0) for is_none in masks.pop(0)]
    return list(taken)


_TORCH_TYPES = {
    name: getattr(torch, name)
    for name in (
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "bool",
        "complex64",
        "complex128",
        "strided",
        "contiguous_format",
        "preserve_format",
        "channels_last",
    )
}


def decode_attr(name: str, value: Any, kind: str) -> Any:
    """Attributes that were torch objects and are now their names; tensors made here are made on the CPU."""
    if name == "device":
        return torch.device("cpu")
    if isinstance(value, str) and value in _TORCH_TYPES and "str" not in kind:
        return _TORCH_TYPES[value]
    if isinstance(value, dict) and value.keys() == {"real", "imag"}:
        return complex(value["real"], value["imag"])
    return value
