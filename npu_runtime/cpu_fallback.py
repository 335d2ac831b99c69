"""Runs a partition with PyTorch's own ops, on the CPU, or on the GPU that holds its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeAlias

import numpy as np
import torch

from npu_compiler.errors import DeviceError
from npu_compiler.graph.model import TENSOR_NAMES, IRGraph, OpNode
from npu_compiler.ops.conv import BATCH_NORM_OPS
from npu_compiler.ops.elementwise import unclear_bound
from npu_compiler.ops.transformer import is_named, unclear_affine
from npu_runtime.packing import to_numpy
from npu_runtime.torch_arrays import numpy_to_tensor, tensor_to_numpy

Watch: TypeAlias = Callable[..., AbstractContextManager[None]]
"""A function that is called for each op of a partition, and returns the context in which the op runs.

It gets the op's name and, by keyword, the facts of its entry in a trace.
"""


class CPUPartition:
    """A graph that PyTorch runs: prepared once, run many times, also by several threads at once.

    Args:
        weights: Checkpoint key → array or torch tensor, for every weight of the graph.
        device: Name of the torch device that runs it and holds its weights.

    Raises:
        DeviceError: the IR does not record which of its optional tensors a node was given, or PyTorch has no such op.
    """

    def __init__(self, graph: IRGraph, weights: Mapping[str, Any], device: str = "cpu") -> None:
        self.graph, self._device = graph, torch.device(device)
        last = {name: index for index, node in enumerate(graph.nodes) for name in node.inputs}
        kept = {*graph.outputs, *graph.weights, *graph.constants}
        free: list[list[str]] = [[] for _ in graph.nodes]
        for name, index in last.items():
            if name not in kept:
                free[index].append(name)
        self._steps = [_Step(node, graph, self._device, over) for node, over in zip(graph.nodes, free, strict=True)]
        self._fixed = {name: value.to(self._device) for name, value in _weight_tensors(graph, weights)}

    def run(self, inputs: Mapping[str, np.ndarray], watch: Watch | None = None) -> dict[str, np.ndarray]:
        """Run the partition on arrays by input name; returns arrays by output name, in the graph's (PyTorch) dtypes.

        Args:
            watch: Called for each op, it returns the context in which that runs; None for none.

        Raises:
            DeviceError: an op failed.
        """
        results = self.run_tensors({name: numpy_to_tensor(inputs[name]) for name in self.graph.inputs}, watch)
        return {name: tensor_to_numpy(value) for name, value in results.items()}

    def run_tensors(self, inputs: Mapping[str, torch.Tensor], watch: Watch | None = None) -> dict[str, torch.Tensor]:
        """Run the partition on tensors of its device; return its outputs by name, which stay there.

        Raises:
            DeviceError: an op failed.
        """
        values = {**self._fixed, **inputs}
        step = None
        try:
            with torch.no_grad():
                for step in self._steps:
                    if watch is None:
                        step.run(values)
                    else:
                        with watch(step.node.op_type, **self._facts(step.node)):
                            step.run(values)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            assert step is not None
            where = f"node '{step.node.name}' ({step.node.op_type}): {error}"
            raise DeviceError(f"CPU partition '{self.graph.name}' failed: {where}") from error
        return {name: values[name] for name in self.graph.outputs}

    def _facts(self, node: OpNode) -> dict[str, Any]:
        """A node's entry in a trace: its name, and its inputs and outputs as texts such as `float32[2, 3]`."""
        inputs, outputs = ([self.graph.tensors[name] for name in names] for names in (node.inputs, node.outputs))
        return {
            "node": node.name,
            "inputs": [f"{spec.dtype}{list(spec.shape)}" for spec in inputs],
            "outputs": [f"{spec.dtype}{list(spec.shape)}" for spec in outputs],
        }


def execute_cpu_partition(
    graph: IRGraph, inputs: Mapping[str, np.ndarray], weights: Mapping[str, Any] | None = None
) -> dict[str, np.ndarray]:
    """Run a graph once on the CPU with PyTorch's ops; return its outputs by name. See `CPUPartition.run`."""
    return CPUPartition(graph, weights or {}).run(inputs)


def _weight_tensors(graph: IRGraph, weights: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, recipe in graph.weights.items():
        value = weights[next(recipe.keys())]
        tensor = value.detach() if isinstance(value, torch.Tensor) else numpy_to_tensor(to_numpy(value))
        yield name, tensor.to(getattr(torch, graph.tensors[name].dtype))
    for name, array in graph.constants.items():
        yield name, numpy_to_tensor(array)


class _Name(str):
    """The name of a tensor, where it stands among the arguments of an op."""


class _Step:
    """A node as a function on named tensors, with its other arguments bound once.

    Args:
        free: Tensors that no later node reads.
    """

    def __init__(self, node: OpNode, graph: IRGraph, device: torch.device, free: Sequence[str]) -> None:
        self.node, self._device, self._free = node, device, free
        reason = unclear_reason(node, graph)
        if reason is not None:
            raise DeviceError(f"node '{node.name}' ({node.op_type}) cannot run on the CPU either: {reason}")
        self._outputs = [(name, getattr(torch, graph.tensors[name].dtype)) for name in node.outputs]
        self._function = None if node.base == "getitem" else resolve_op(node.op_type)
        if self._function is not None:
            names = [_Name(name) for name in node.inputs]
            self._args, self._kwargs = bind_arguments(
                self._function._schema, node.op_type, names, node.attrs, self._device
            )
            self._tensors = [(index, value) for index, value in enumerate(self._args) if _has_name(value)]
            self._named_tensors = [(key, value) for key, value in self._kwargs.items() if _has_name(value)]

    def run(self, values: dict[str, torch.Tensor]) -> None:
        """Add the node's outputs to the tensors, and take out those that nothing reads any more."""
        if self._function is None:
            values[self.node.outputs[0]] = values[self.node.inputs[self.node.attrs["index"]]]
        else:
            args, kwargs = self._args.copy(), self._kwargs
            for index, value in self._tensors:
                args[index] = _filled(value, values)
            if self._named_tensors:
                kwargs = {**kwargs, **{key: _filled(value, values) for key, value in self._named_tensors}}
            result = self._result(args, kwargs)
            results = [x for x in result if x is not None] if isinstance(result, (tuple, list)) else [result]
            for (name, dtype), x in zip(self._outputs, results, strict=False):
                tensor = x if isinstance(x, torch.Tensor) else torch.tensor(x)
                values[name] = tensor.to(self._device, dtype).contiguous()
        for name in self._free:
            del values[name]

    def _result(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        assert self._function is not None
        try:
            return self._function(*args, **kwargs)
        except RuntimeError as error:
            # Meta kernels accept integer inputs that some kernels (histc) refuse.
            if not isinstance(error, NotImplementedError) and "not implemented for" not in str(error):
                raise
            return self._function(*[a.float() if isinstance(a, torch.Tensor) else a for a in args], **kwargs)


def _has_name(value: Any) -> bool:
    return type(value) is _Name or (isinstance(value, list) and any(type(x) is _Name for x in value))


def _filled(value: _Name | list[Any], values: Mapping[str, torch.Tensor]) -> Any:
    """The tensor of a name, or a list with those of the names in it."""
    if isinstance(value, list):
        return [values[x] if type(x) is _Name else x for x in value]
    return values[value]


def resolve_op(op_type: str) -> Any:
    """PyTorch's op of that name.

    Raises:
        DeviceError: there is none, or it reads or writes files.
    """
    parts = op_type.split(".")
    namespace, name, overload = (
        (parts[0], parts[1], parts[2] if len(parts) > 2 else "default") if len(parts) > 1 else ("", op_type, "")
    )
    with suppress(ImportError):  # PyTorch then says that it has no such op
        _register(namespace)
    try:
        function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        if any(argument.name == "filename" for argument in function._schema.arguments):
            raise DeviceError(f"op '{op_type}' reads and writes a file that the IR names, which is not allowed")
        return function
    except (AttributeError, RuntimeError) as error:
        advice = "; extract the IR under torch.no_grad()" if op_type.startswith("wrap_with") else ""
        raise DeviceError(f"PyTorch has no op '{op_type}', so the CPU cannot run it either{advice}") from error


def _register(namespace: str) -> None:
    """Import the module that registers the ops of a namespace."""
    if namespace == "transformers":
        import transformers.integrations.moe  # noqa: F401
    elif namespace == "quantized_decomposed":
        import torch.ao.quantization.fx._decomposed  # noqa: F401
    elif namespace == "torchao":
        import torchao.quantization  # noqa: F401


def unclear_reason(node: OpNode, graph: IRGraph) -> str | None:
    """The reason why a node's tensors are ambiguous; None if they are not.

    They are if the IR does not record which optional ones were omitted.
    """
    if node.tensor_names is not None:
        return None
    base = node.base.removesuffix("_")
    in_training = base in BATCH_NORM_OPS and (node.attrs.get("training") or node.attrs.get("train"))
    if in_training and len(node.inputs) == 3 and not is_named(node.inputs[1], graph, "running_mean"):
        return "batch_norm in training mode with two tensors: the IR does not record if they are its weight and bias"
    return unclear_bound(node) or unclear_affine(node, graph)


_STATS_ONLY = frozenset({*BATCH_NORM_OPS, "aten.instance_norm"})


def bind_arguments(
    schema: Any,
    op_type: str,
    inputs: Sequence[Any],
    attrs: Mapping[str, Any],
    device: torch.device | None = None,
) -> tuple[list[Any], dict[str, Any]]:
    """Rebuild an op's arguments from the IR's flat tensor list and attributes.

    Not all IR records which optional tensors were omitted. If their count tells (normalization with statistics but
    no affine parameters), None stands for them; `unclear_reason` refuses the nodes for which it does not.

    Args:
        inputs: Tensors, or what stands for them.
        device: Device of the tensors that the op makes; default: the CPU.
    """
    remaining, given = list(inputs), attrs.get(TENSOR_NAMES)
    sizes, masks = list(attrs.get("_tensor_list_sizes") or []), list(attrs.get("_tensor_list_none_masks") or [])
    stats_only = (
        ".".join(op_type.split(".")[:2]) in _STATS_ONLY and len(inputs) == 3 and not attrs.get("use_input_stats")
    )
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in schema.arguments:
        kind = str(argument.type)
        if "Tensor" in kind and given is not None and argument.name not in given:
            value: Any = attrs.get(argument.name)
        elif "Tensor" in kind and ("[]" in kind or "List" in kind):
            value = _tensor_list(remaining, sizes, masks)
        elif "Tensor" in kind:
            if argument.name in attrs:
                value = decode_attr(argument.name, attrs[argument.name], kind, device)  # a number
            elif stats_only and argument.name in ("weight", "bias"):
                value = None
            else:
                value = remaining.pop(0) if remaining else None
        elif argument.name in attrs:
            value = decode_attr(argument.name, attrs[argument.name], kind, device)
        elif argument.has_default_value():
            value = argument.default_value
        else:
            raise DeviceError(f"argument '{argument.name}' of op '{op_type}' is missing")
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _tensor_list(remaining: list[Any], sizes: list[int], masks: list[list[bool]]) -> list[Any]:
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


def decode_attr(name: str, value: Any, kind: str, device: torch.device | None = None) -> Any:
    """An attribute as torch expects it: torch objects from their names, complex numbers from their parts.

    Args:
        name, value: The attribute in the IR.
        kind: Its type in the op's schema, as text; where that is a string, names of torch objects stay text.
        device: Device of the tensors that the op creates; None means the CPU.
    """
    if name == "device":
        return device or torch.device("cpu")
    if isinstance(value, str) and value in _TORCH_TYPES and "str" not in kind:
        return _TORCH_TYPES[value]
    if isinstance(value, dict) and value.keys() == {"real", "imag"}:
        return complex(value["real"], value["imag"])
    return value
