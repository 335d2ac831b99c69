"""Conversion to IR of a graph that TorchDynamo captured; sizes that may change stay symbolic."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import tracing as with_context
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from npu_compiler.errors import IRError
from npu_compiler.graph.symbolic import KEY, is_symbolic
from npu_sim.module.fx_reader import Nodes, Reference, constant_of, plain_number, sizes_of
from npu_sim.module.trace import LARGE, Trace, problem_of, read_results, tracing

_LEAF = pytree.tree_structure(0)


@dataclass(frozen=True)
class Captured:
    """A captured graph in PyTorch's ops. Its placeholders are the arguments of a call, followed by the constants.

    Attributes:
        graph_module: The graph.
        names: Names of the arguments, in order.
        values: The arguments in the trace: tensors without data, and numbers, which may be symbolic.
        static: Positions of the module's parameters and buffers, which TorchDynamo passes as arguments.
        constants: Tensors created while tracing, by name.
        sizes: Symbol → (position of an argument, dimension with the symbol's value); the dimension is None if the
            argument itself is the number.
        device: The torch device of the tensors.
        symbols: The symbols of `sizes`, in order.
    """

    graph_module: GraphModule
    names: tuple[str, ...]
    values: tuple[Any, ...]
    static: frozenset[int]
    constants: Mapping[str, torch.Tensor]
    sizes: Mapping[str, tuple[int, int | None]]
    device: torch.device
    symbols: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "symbols", tuple(self.sizes))

    def trace(self, static: frozenset[int], name: str) -> Trace:
        """Return the graph as IR.

        Args:
            static: Positions of the arguments to read as weights, except for those that the graph changes.
            name: Name of the model.

        Raises:
            IRError: the graph contains an op that IR cannot express.
        """
        nodes = Nodes.of(self.graph_module)
        for argument in (*self.names, *self.constants):
            nodes.take_name(argument)
        given: list[Any] = []
        for position, (argument, value) in enumerate(zip(self.names, self.values, strict=True)):
            if isinstance(value, torch.Tensor):
                given.append(Reference(argument, value, None if position in static else argument))
            else:
                given.append(plain_number(value, f"argument '{argument}'"))
        given += [Reference(constant, value, None) for constant, value in self.constants.items()]
        returned = nodes.read(self.graph_module, given)
        written = {position for position in static if self.names[position] in nodes.written}
        if written:
            return self.trace(static - written, name)
        read = read_results(nodes, returned, given)
        small = {key: value for key, value in self.constants.items() if value.numel() <= LARGE}
        large = {key: value for key, value in self.constants.items() if key not in small}
        weights = [x for x in given if isinstance(x, Reference) and x.producer is None]
        ir: dict[str, Any] = {
            "model_name": name,
            "pytorch_version": torch.__version__,
            "graph_inputs": [
                x.meta(as_input=False) for x in given if isinstance(x, Reference) and x.producer is not None
            ],
            "graph_outputs": [x.meta() for x in read.outputs],
            "weights": [x.meta(as_input=False) for x in weights],
            "weight_name_mapping": {x.name: x.name for x in weights},
            "nodes": nodes.described(),
            "composites": nodes.composites,
            "constants": {key: constant_of(value) for key, value in small.items()},
        }
        return Trace(
            ir=ir,
            weights=large,
            constants=small,
            inputs=(),
            in_spec=_LEAF,
            outputs=read.leaves,
            out_spec=_LEAF,
            written=read.written,
            ranges=dict.fromkeys(self.sizes, (0, None)),
            example_sizes={},
            example_device=self.device,
            passed=read.passed,
            views=read.views,
        )


def capture(graph_module: GraphModule) -> Captured:
    """Trace a graph that TorchDynamo captured into PyTorch's ops; call it while that graph is being compiled.

    Raises:
        IRError: the graph uses several devices, sparse tensors, or numbers that are not sizes, which programs cannot.
    """
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("example_value") for node in placeholders]
    names = tuple(node.name for node in placeholders)
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, (torch.Tensor, torch.SymInt, int)):
            raise IRError(f"input '{name}' is a {type(value).__name__}, which is neither a tensor nor a size")
    traced = _trace(graph_module, values)
    device = _device(traced)
    return Captured(
        traced,
        names,
        tuple(values),
        frozenset(position for position, node in enumerate(placeholders) if _is_static(node)),
        _lift_constants(traced, names),
        _sizes(values),
        device,
    )


def _trace(graph_module: GraphModule, values: Sequence[Any]) -> GraphModule:
    """Return the graph in the ops in which `torch.export` would leave it.

    A graph under autocast gets explicit casts, and its ops are decomposed further. The trace reuses the tensors without
    data that TorchDynamo made, since TorchDynamo's guards (the conditions on sizes) refer to their symbols.
    """
    nodes = graph_module.graph.nodes
    has_autocast = any(node.target is torch.amp.autocast_mode._enter_autocast for node in nodes)
    kinds = {x.device.type for x in values if isinstance(x, torch.Tensor)}
    has_autocast |= any(torch.is_autocast_enabled(kind) for kind in kinds if kind != "meta")
    modes = [x.fake_mode for x in values if isinstance(x, FakeTensor)]
    shapes = [x.node.shape_env for x in values if isinstance(x, torch.SymInt)]
    mode = modes[0] if modes else FakeTensorMode(shape_env=shapes[0] if shapes else None)
    try:
        with with_context(None), tracing(), mode, enable_python_dispatcher() if shapes else nullcontext():
            traced: GraphModule = make_fx(graph_module, pre_dispatch=not has_autocast)(*values)
    except Exception as error:  # whatever PyTorch's tracing raises
        raise IRError(f"PyTorch cannot trace the graph: {problem_of(error)}") from error
    for node in list(traced.graph.nodes):
        if node.target is torch._C._set_grad_enabled:
            traced.graph.erase_node(node)
    return traced


def _is_static(placeholder: Node) -> bool:
    """Whether a placeholder of the graph is a parameter, a buffer or another tensor that belongs to a module."""
    source = getattr(placeholder, "_dynamo_source", None)
    value = placeholder.meta.get("example_value")
    if isinstance(value, nn.Parameter):
        return True
    if not isinstance(value, torch.Tensor) or source is None:
        return False
    kind = source.guard_source() if callable(source.guard_source) else source.guard_source  # a method up to PyTorch 2.9
    return bool(kind.is_unspecialized_nn_module())


def _device(traced: GraphModule) -> torch.device:
    """Return the device of a graph's tensors.

    Raises `IRError` if there are several, or a tensor is sparse or quantized.

    A CPU tensor without dimensions is accepted beside tensors on a GPU.
    """
    devices: dict[torch.device, str] = {}
    for node in traced.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if not isinstance(value, torch.Tensor):
                continue
            if value.layout is not torch.strided or value.is_quantized:
                raise IRError(f"node '{node.name}' is a sparse or quantized tensor")
            is_number = value.dim() == 0 and node.op == "placeholder" and value.device.type == "cpu"
            if node.op != "get_attr" and not is_number:
                devices.setdefault(value.device, node.name)
    if len(devices) > 1:
        listed = ", ".join(f"'{name}' on {device}" for device, name in devices.items())
        raise IRError(f"the graph has tensors on several devices: {listed}")
    return next(iter(devices), torch.device("cpu"))


def _lift_constants(traced: GraphModule, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Replace tensors that the graph holds by placeholders after the others; return these tensors by name."""
    lifted: dict[str, torch.Tensor] = {}
    placeholders: dict[str, Node] = {}
    graph = traced.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        value = operator.attrgetter(str(node.target))(traced)
        if not isinstance(value, torch.Tensor):
            continue
        if isinstance(value, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise IRError(f"node '{node.name}' exists only inside a function that PyTorch maps or differentiates")
        name = f"constant_{len(placeholders)}" if str(node.target) not in placeholders else ""
        if name:
            while name in names:
                name += "_"
            with graph.inserting_after(last[0]) if last else graph.inserting_before(next(iter(graph.nodes))):
                placeholders[str(node.target)] = graph.placeholder(name)
            placeholders[str(node.target)].meta["val"] = node.meta.get("val", value)
            last = [placeholders[str(node.target)]]
            lifted[name] = value.detach()
        node.replace_all_uses_with(placeholders[str(node.target)])
        graph.erase_node(node)
    return lifted


def _sizes(values: Sequence[Any]) -> dict[str, tuple[int, int | None]]:
    """Map each symbol to the argument, and its dimension, that has the symbol's value."""
    origins: dict[str, tuple[int, int | None]] = {}
    for position, value in enumerate(values):
        places: list[tuple[Any, int | None]] = [(plain_number(value, f"argument {position}"), None)]
        if isinstance(value, torch.Tensor):
            places = [(size, dim) for dim, size in enumerate(sizes_of(value))]
        for size, dim in places:
            if is_symbolic(size) and size[KEY].isidentifier():
                origins.setdefault(size[KEY], (position, dim))
    return origins
