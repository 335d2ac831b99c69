"""Conversion of a graph of `torch.export` to IR: the schema of torch_ir, with extensions.

Beyond torch_ir's own converter, this module reads keyword tensors, regions under `no_grad` and `autocast`, symbolic
sizes, optional tensors that a call left out, and in-place changes of inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from npu_compiler.errors import IRError
from npu_compiler.graph.model import SHARES, TENSOR_NAMES, unique_name
from npu_compiler.graph.reader import normalize_attr
from npu_compiler.graph.symbolic import symbolic
from npu_compiler.ops.registry import find_op, is_in_place
from npu_runtime.torch_arrays import tensor_to_numpy
from npu_sim.module.complex_numbers import Pair, is_complex, real_graph, writes_complex_memory
from npu_sim.module.decompositions import Decompositions, operands
from npu_sim.module.promotions import computed_value
from npu_sim.module.storages import Storages, overlaps_itself, returns_its_argument, storages_of

ADVICE = 'use torch.compile(backend="npu_sim"), which runs such a part in PyTorch'
UNBACKED = ("u", "zuf", "zf")  # how the names of numbers begin that are no sizes of inputs, but depend on data
_GETITEM = "<built-in function getitem>"
_NUMBERS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
_ASSERTIONS = ("_assert", "sym_constrain_range")
_BY_STRIDES = (
    torch.ops.aten.as_strided.default,
)  # beside the ops that may copy: it counts in the memory that strides speak of


@dataclass(frozen=True)
class Reference:
    """A tensor of the IR and its origin.

    Attributes:
        name: The tensor's name.
        value: The traced tensor, without data.
        producer: The node that returns it, or its own name for a graph input. None: it is a weight.
        index: The position among the producer's outputs.
    """

    name: str
    value: torch.Tensor
    producer: str | None
    index: int = 0

    def meta(self, *, as_input: bool = True) -> dict[str, Any]:
        origin = {"producer_node": self.producer, "producer_output_idx": self.index} if as_input else {}
        return {"name": self.name, "shape": sizes_of(self.value), "dtype": dtype_of(self.value), **origin}


@dataclass(frozen=True)
class ViewStep:
    """A node of the IR whose output is a view of one of its inputs.

    Attributes:
        node: The node in the IR's form.
        position: The input's position.
    """

    node: dict[str, Any]
    position: int


# What a node of the FX graph stands for: a tensor, a pair, several, or a number, flag, string or None.
Value: TypeAlias = Any


@dataclass
class Nodes:
    """The nodes of an IR graph, collected while FX graphs are read.

    Attributes:
        nodes: Node descriptions in the IR's form.
        storages: Groups of traced tensors that share memory.
        root: For a view or the result of an in-place op: tensor name → the tensor that owns the memory.
        parent: For the same tensors: tensor name → (the step that makes the view, the name of the tensor viewed).
        references: Tensor name → the tensor, for all outputs of nodes.
        written: Names of the tensors whose memory the graph changes, each represented by its root.
        numbers: Expression of a number that depends on data → the one-element tensor that holds it.
        by_strides: (source, output), both as roots, for each op that returns a view or a copy depending on the source's
            strides.
        composites: Calls that were read as their decompositions, in the IR's form.
        has_pairs: Whether complex tensors are pairs of real ones where possible.
    """

    nodes: list[dict[str, Any]] = field(default_factory=list)
    storages: Storages = field(default_factory=Storages)
    root: dict[str, str] = field(default_factory=dict)
    parent: dict[str, tuple[ViewStep, str]] = field(default_factory=dict)
    references: dict[str, Reference] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    numbers: dict[str, Reference] = field(default_factory=dict)
    by_strides: list[tuple[str, str]] = field(default_factory=list)
    composites: list[dict[str, Any]] = field(default_factory=list)
    has_pairs: bool = False
    _shares: dict[str, list[int]] = field(default_factory=dict)
    _bases: dict[str, Reference] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)
    _decompositions: Decompositions = field(default_factory=lambda: Decompositions(describe_call))

    @classmethod
    def of(cls, graph_module: GraphModule) -> Nodes:
        """Return an empty collection for the nodes of a graph that is read next, with that graph's shared memory."""
        storages = storages_of(graph_module)
        return cls(storages=storages, has_pairs=not writes_complex_memory(graph_module, storages))

    def read(self, graph_module: GraphModule, arguments: Sequence[Value], prefix: str = "") -> Value:
        """Add a graph's nodes; return the value of the graph's output node.

        Args:
            graph_module: The graph.
            arguments: The values of the graph's placeholders, in order.
            prefix: Prefix of the new nodes' names.

        Raises:
            IRError: the graph contains control flow that depends on data, or an op that IR cannot express.
        """
        values: dict[Node, Value] = {}
        given = iter(arguments)
        result: Value = None
        for node in graph_module.graph.nodes:
            match node.op:
                case "placeholder":
                    values[node] = next(given)
                case "get_attr":
                    values[node] = _attribute(graph_module, str(node.target))
                case "call_function":
                    values[node] = self._call(node, values, prefix)
                case "output":
                    result = _resolve(node.args[0], values)
                case _:
                    raise IRError(f"node '{node.name}': torch.export left a {node.op} in the graph")
        return result

    def described(self) -> list[dict[str, Any]]:
        """Return the nodes in the IR's form.

        If the graph writes in place, nodes get the attribute `SHARES`, which tells the input whose memory an output
        shares, unless the op's definition says so.
        """
        if not self.written:
            return self.nodes
        return [
            {**node, "attrs": {**node["attrs"], SHARES: self._shares[node["name"]]}}
            if node["name"] in self._shares
            else node
            for node in self.nodes
        ]

    def fixed_strides(self) -> set[str]:
        """Return the tensors whose strides decide which memory the graph writes or sees written, by their roots' names.

        A root is the tensor that owns the memory of a view. The result includes every written root: `contiguous()` of a
        contiguous tensor leaves no node in a trace, so its effect cannot be told from the tensor itself.
        """
        return self.written | {source for source, out in self.by_strides if out in self.written}

    def take_name(self, stem: str) -> str:
        """Return an unused name that begins with `stem`, and reserve it; tensors and nodes share one set of names."""
        name = unique_name(stem, self._names)
        self._names.add(name)
        return name

    def _call(self, node: Node, values: Mapping[Node, Value], prefix: str) -> Value:
        value, target = node.meta.get("val"), node.target
        args, kwargs = _resolve(node.args, values), _resolve(node.kwargs, values)
        if target is operator.getitem and not _is_references(args[0]):
            return args[0][args[1]]
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._region(node, args, kwargs)
        if value is not None and target in _NUMBERS and depends_on_data(value) and isinstance(args[0], Reference):
            # A copy, since the tensor may be written later.
            name = self.take_name(node.name)
            copy = Reference(name, args[0].value, name)
            self._append(_description(name, str(torch.ops.aten.clone.default), [args[0]], [copy], {}), [copy])
            self.numbers[str(value.node.expr)] = copy
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
            # What depends on data may be there only to be asserted; an op that reads it is refused.
            return value if depends_on_data(value) else plain_number(value, f"node '{node.name}'")
        if value is None and any(part in str(target) for part in _ASSERTIONS):
            return None
        if target is operator.getitem:
            return self._element(node, args[0], args[1], prefix)
        if self.has_pairs and any(is_complex(x.meta.get("val")) for x in (node, *operands(node))):
            result = self._on_pairs(node, values, prefix)
            if result is not None:
                return result
            values = {**values, **{x: self.whole(values[x]) for x in operands(node)}}
            args, kwargs = _resolve(node.args, values), _resolve(node.kwargs, values)
        return self._op(node, args, kwargs, values, prefix)

    def _op(
        self, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any], values: Mapping[Node, Value], prefix: str
    ) -> Value:
        """Add a call of one of PyTorch's ops; return the value or values of its outputs."""
        value, target = node.meta.get("val"), node.target
        if not isinstance(target, torch._ops.OpOverload):
            raise IRError(f"node '{node.name}': {target} is not an op of PyTorch, and IR has no form for it")
        if target is torch.ops.aten.as_strided.default and not _is_packed(args[0].value):
            raise IRError(f"node '{node.name}': as_strided of a tensor that is itself a view, whose strides IR drops")
        if torch.Tag.inplace_view in target.tags and args[0].name not in self.references:
            raise IRError(
                f"node '{node.name}': '{target}' gives argument '{args[0].name}' another shape; do so to a view"
            )
        value = computed_value(node)
        inputs, attrs = _bind(node.name, target._schema, args, kwargs)
        name = unique_name(prefix + node.name, self._names)
        outputs = _outputs(name, value)
        references = [x for x in outputs if x is not None]
        description = _description(name, str(target), inputs, references, attrs)
        weights = frozenset(x.name for x in inputs if x.producer is None)
        decomposition = self._decompositions.find(node, description, weights)
        if decomposition is not None:
            first, known = len(self.nodes), len(self.composites)
            result = self._decomposed(node, decomposition, [values[x] for x in operands(node)], prefix)
            self._note_composite(target, description, outputs, result, first, known)
            return result
        self._names.add(name)
        self._append(description, references)
        self._note_writes(node.name, target, args, kwargs)
        self._note_memory(target, args, inputs, outputs)
        if isinstance(value, torch.Tensor):
            return references[0]
        return outputs if outputs else None

    def _decomposed(self, node: Node, decomposition: GraphModule, arguments: Sequence[Value], prefix: str) -> Value:
        """Add the nodes of a call's decomposition in its place; return their results with the call's traced values."""
        result = self._inlined(decomposition, arguments, f"{prefix}{node.name}_")
        value = node.meta["val"]
        if isinstance(result, Reference):
            return replace(result, value=value)
        if isinstance(result, (list, tuple)):
            pairs = zip(result, value, strict=True)
            return type(result)(replace(x, value=own) if isinstance(x, Reference) else x for x, own in pairs)
        return result

    def _inlined(self, graph_module: GraphModule, arguments: Sequence[Value], prefix: str) -> Value:
        """Read a graph that was traced by itself in the place of a call."""
        placeholders = (x.meta.get("val") for x in graph_module.graph.nodes if x.op == "placeholder")
        for placeholder, argument in zip(placeholders, arguments, strict=True):
            if isinstance(placeholder, torch.Tensor) and isinstance(argument, Reference):
                self.storages.substitute(placeholder, argument.value)
        return self.read(graph_module, arguments, prefix)

    def _on_pairs(self, node: Node, values: Mapping[Node, Value], prefix: str) -> Value:
        """Read a call on complex tensors, which are pairs of real ones (`Pair`), as ops on their parts.

        None if the call has no such form, or an output that is None.

        Args:
            values: Node of PyTorch's graph → its value here, for all nodes before this one.
            prefix: Beginning of the names of nodes that are added.
        """
        given = [values[x] for x in operands(node)]
        if not isinstance(node.target, torch._ops.OpOverload):
            return None
        traced = {
            x: Pair(value.real.value, value.imaginary.value) if isinstance(value, Pair) else x.meta.get("val")
            for x, value in zip(operands(node), given, strict=True)
        }
        graph = real_graph(node, traced)
        if graph is None:
            return None
        arguments = [x for value in given for x in (pytree.tree_leaves(value) if isinstance(value, Pair) else [value])]
        results = self._inlined(graph.graph_module, arguments, f"{prefix}{node.name}_")
        result = graph.results.unflatten(results)
        return replace(result, value=node.meta["val"]) if isinstance(result, Reference) else result

    def whole(self, value: Value) -> Value:
        """A value as it is, and a pair as the complex tensor that it stands for."""
        if isinstance(value, list):
            return [self.whole(x) for x in value]
        if not isinstance(value, Pair):
            return value
        parts = [value.real, value.imaginary]
        real = parts[0].value
        traced = real.new_empty(real.shape, dtype=real.dtype.to_complex())
        name = self.take_name("complex")
        out = Reference(name, traced, name)
        self._append(_description(name, str(torch.ops.aten.complex.default), parts, [out], {}), [out])
        return out

    def _note_composite(
        self,
        target: Any,
        description: dict[str, Any],
        outputs: Sequence[Reference | None],
        result: Value,
        first: int,
        known: int,
    ) -> None:
        """Record a call that was decomposed, with the names of its results; it replaces records of calls within it.

        Only a call that decomposes into several nodes, and neither aliases nor writes its arguments, is recorded.

        Args:
            first: Number of nodes before those of its decomposition.
            known: Number of composites before those within it.
        """
        results = result if isinstance(result, (list, tuple)) else [result]
        made = [x for x, output in zip(results, outputs, strict=True) if output is not None]
        parts = [node["name"] for node in self.nodes[first:]]
        roots = {self._root(x.name) for x in made if isinstance(x, Reference)}
        owners = {x["name"] for node in self.nodes[first:] for x in node["outputs"]}
        is_pure = not any(x.alias_info for x in (*target._schema.arguments, *target._schema.returns))
        if len(parts) < 2 or not is_pure or len(roots) < len(made) or not roots <= owners:
            return
        name = self.take_name(description["name"])
        self.composites[known:] = [
            {"node": {**description, "name": name, "outputs": [x.meta() for x in made]}, "parts": parts}
        ]

    def _element(self, node: Node, sources: Sequence[Reference | None], index: int, prefix: str) -> Reference | None:
        if sources[index] is None:
            return None
        name = self.take_name(prefix + node.name)
        out = Reference(name, node.meta["val"], name)
        source = sources[index]
        assert source is not None
        inputs = [x for x in sources if x is not None]
        self._append(_description(name, _GETITEM, inputs, [out], {"index": source.index}), [out])
        self._note_shared(out.name, source, source.index)
        return out

    def lineage(self, name: str) -> tuple[ViewStep, ...]:
        """Return the chain of view steps, in order, from the tensor that owns the memory to the named one."""
        steps: list[ViewStep] = []
        while name in self.parent:
            step, name = self.parent[name]
            steps.append(step)
        return tuple(reversed(steps))

    def _root(self, name: str) -> str:
        return self.root.get(name, name)

    def _note_shared(self, name: str, source: Reference, position: int) -> None:
        """Record that the last node's output is a view of the node's input at a position."""
        self._bases[name] = self._bases.get(source.name, source)
        self.root[name] = self._bases[name].name
        self.parent[name] = (ViewStep(self.nodes[-1], position), source.name)

    def _append(self, description: dict[str, Any], outputs: Sequence[Reference]) -> None:
        self.nodes.append(description)
        self.references.update({x.name: x for x in outputs})

    def _note_writes(self, where: str, target: Any, args: Sequence[Value], kwargs: Mapping[str, Value]) -> None:
        """Record which tensors an op writes, according to its schema.

        Raises:
            IRError: it writes arguments other than the first, for which there is no out-of-place form.
        """
        arguments = target._schema.arguments
        values = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)
        written = [
            x.name
            for x in arguments
            if x.alias_info is not None and x.alias_info.is_write and isinstance(values.get(x.name), (Reference, list))
        ]
        if not written or target is torch.ops.aten.detach_.default:  # it changes no values; `torch.tensor()` calls it
            return
        first = values.get(arguments[0].name)
        if written != [arguments[0].name] or not isinstance(first, Reference) or not is_in_place(str(target)):
            raise IRError(
                f"node '{where}': '{target}' writes to its argument '{written[0]}' in a way that has no out-of-place "
                "form; write it without in-place ops"
            )
        base = self._bases.get(first.name, first)
        if overlaps_itself(base.value):
            raise IRError(
                f"node '{where}': '{base.name}' is written in place, but its elements share memory; clone it first"
            )
        self.written.add(base.name)

    def _note_memory(
        self, target: Any, args: Sequence[Value], inputs: Sequence[Reference], outputs: Sequence[Reference | None]
    ) -> None:
        """Record which outputs of the last node share an input's memory, as they do in the trace."""
        shares = []
        for out in outputs:
            if out is None:
                continue
            position = 0 if returns_its_argument(target, args) else self._shared_input(inputs, out)
            shares.append(-1 if position is None else position)
            if position is not None:
                self._note_shared(out.name, inputs[position], position)
            op = find_op(str(target))
            if inputs and (target in _BY_STRIDES or (op is not None and op.view and op.view.may_copy)):
                self.by_strides.append((self._root(inputs[0].name), self._root(out.name)))
        op = find_op(str(target))
        if not is_in_place(str(target)) and (any(x >= 0 for x in shares) or (op is not None and op.view is not None)):
            self._shares[self.nodes[-1]["name"]] = shares

    def _shared_input(self, inputs: Sequence[Reference], out: Reference) -> int | None:
        sharing = [place for place, x in enumerate(inputs) if self.storages.are_one(x.value, out.value)]
        return out.index if out.index in sharing else next(iter(sharing), None)

    def _region(self, node: Node, args: Sequence[Value], kwargs: Mapping[str, Value]) -> Value:
        """Add the nodes of a subgraph that runs under `no_grad` or `autocast`, in place of the call to it."""
        kind = str(node.target)
        if kind.endswith("wrap_with_set_grad_enabled"):
            return self.read(args[1], args[2:])
        if kind.endswith("wrap_with_autocast"):
            device, dtype, enabled, _, region, *operands = args
            if not enabled:
                return self.read(region, operands)
            given = [self.whole(x) for x in operands]
            return self.read(_with_casts(region, given, device, dtype), given)
        raise IRError(
            f"node '{node.name}': '{kind}' is control flow that depends on data, or another op that runs a function; "
            "a program is a fixed sequence of ops"
        )


def describe_call(node: Node) -> dict[str, Any]:
    """Return a single call of an op as IR; its inputs are named after the FX nodes that produce them.

    Raises:
        IRError: IR cannot express the call.
    """
    values: dict[Node, Value] = {x: _value_of(x) for x in operands(node)}
    target: Any = node.target
    args, kwargs = _resolve(node.args, values), _resolve(node.kwargs, values)
    inputs, attrs = _bind(node.name, target._schema, args, kwargs)
    outputs = [x for x in _outputs(node.name, node.meta.get("val")) if x is not None]
    return _description(node.name, str(target), inputs, outputs, attrs)


def _value_of(node: Node) -> Value:
    """Return the tensor, tensors or number that an FX node stands for, from its traced value alone."""
    value = node.meta.get("val")
    if isinstance(value, (torch.Tensor, list, tuple)):
        outputs = _outputs(node.name, value)
        return outputs[0] if isinstance(value, torch.Tensor) else outputs
    return plain_number(value, f"node '{node.name}'")


def _description(
    name: str, op_type: str, inputs: Sequence[Reference], outputs: Sequence[Reference], attrs: dict[str, Any]
) -> dict[str, Any]:
    """Return a node in the IR's form."""
    described = [x.meta(as_input=False) for x in outputs]
    return {
        "name": name,
        "op_type": op_type,
        "inputs": [x.meta() for x in inputs],
        "outputs": described,
        "attrs": attrs,
    }


def _is_packed(value: torch.Tensor) -> bool:
    """Whether a tensor occupies all of its memory in row-major order."""
    return value.is_contiguous() and value.storage_offset() == 0


def sizes_of(value: torch.Tensor) -> list[Any]:
    return [plain_number(size, "a tensor's shape") for size in value.shape]


def constant_of(value: torch.Tensor) -> dict[str, Any]:
    """Return a constant in the IR's form, with its data as an array."""
    return {"data": tensor_to_numpy(value.cpu()), "dtype": dtype_of(value), "shape": sizes_of(value)}


def dtype_of(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def depends_on_data(value: Any) -> bool:
    """Whether a number is symbolic and depends on the values of a tensor, such as `x.max().item()`."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    return any(str(symbol).startswith(UNBACKED) for symbol in value.node.expr.free_symbols)


def plain_number(value: Any, where: str) -> Any:
    """Return a number as it is; a symbolic one as an expression in the IR's form.

    Args:
        where: The owner of the number, as the first words of the error message.

    Raises:
        IRError: the number depends on the values of a tensor.
    """
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    expression = value.node.expr
    if depends_on_data(value):
        raise IRError(
            f"{where}: a size depends on the values of a tensor, so no program of static shapes exists; {ADVICE}"
        )
    if not expression.free_symbols:
        if isinstance(value, torch.SymBool):
            return bool(expression)
        return float(expression) if isinstance(value, torch.SymFloat) else int(expression)
    return symbolic(str(expression))


def _attribute(graph_module: GraphModule, path: str) -> Any:
    value: Any = graph_module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _resolve(value: Any, values: Mapping[Node, Value]) -> Value:
    if isinstance(value, Node):
        return values[value]
    if isinstance(value, (list, tuple)):
        return [_resolve(item, values) for item in value]
    if isinstance(value, Mapping):
        return {key: _resolve(item, values) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_resolve(x, values) for x in (value.start, value.stop, value.step)))
    return value


def _is_references(value: Value) -> bool:
    """Whether a value is a tuple of tensors: the outputs of one IR node, with None for outputs that are no tensors."""
    if not isinstance(value, tuple):
        return False
    return all(isinstance(x, Reference) for x in value if x is not None)


def _outputs(name: str, value: Any) -> tuple[Reference | None, ...]:
    """Return an op's outputs in order, with None for those that are not tensors.

    Raises:
        IRError: one of several results is a list of tensors.
    """
    if isinstance(value, torch.Tensor):
        return (Reference(name, value, name),)
    outputs: list[Reference | None] = []
    index = 0
    for position, item in enumerate(value if isinstance(value, (list, tuple)) else ()):
        if isinstance(item, (list, tuple)) and any(isinstance(x, torch.Tensor) for x in item):
            raise IRError(f"node '{name}': the op returns a list of tensors beside others, which IR has no form for")
        is_tensor = isinstance(item, torch.Tensor)
        outputs.append(Reference(f"{name}_{position}", item, name, index) if is_tensor else None)
        index += is_tensor
    return tuple(outputs)


def _bind(
    where: str, schema: Any, args: Sequence[Value], kwargs: Mapping[str, Value]
) -> tuple[list[Reference], dict[str, Any]]:
    """Return an op's tensor arguments in the schema's order, and its other arguments as attributes."""
    inputs: list[Reference] = []
    attrs: dict[str, Any] = {}
    given: list[str] = []
    sizes: list[int] = []
    masks: list[list[bool]] = []
    tensors = [argument.name for argument in schema.arguments if "Tensor" in str(argument.type)]
    optional = {argument.name for argument in schema.arguments if str(argument.type) == "Optional[Tensor]"}
    for position, argument in enumerate(schema.arguments):
        if position < len(args):
            value = args[position]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        else:
            continue
        is_list = "Tensor" in str(argument.type) and isinstance(value, (list, tuple))
        if isinstance(value, Reference):
            inputs.append(value)
            given.append(argument.name)
        elif is_list and all(x is None or isinstance(x, Reference) for x in value):
            present = [x for x in value if x is not None]
            inputs += present
            given.append(argument.name)
            sizes.append(len(present))
            if len(present) < len(value):
                masks.append([x is None for x in value])
        elif value is not None or argument.name not in tensors:
            attrs[argument.name] = _plain(value, f"node '{where}': argument '{argument.name}'")
    if sizes:
        attrs["_tensor_list_sizes"] = sizes
    if masks:
        attrs["_tensor_list_none_masks"] = masks
    if 0 < len(optional.intersection(given)) < len(optional):
        attrs[TENSOR_NAMES] = given  # or nobody could tell which
    return inputs, attrs


def _plain(value: Value, where: str) -> Any:
    if isinstance(value, Reference):
        raise IRError(f"{where} depends on the values of a tensor")
    if isinstance(value, Mapping):
        return dict(value)  # a symbolic size
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    return normalize_attr(plain_number(value, where))


def _with_casts(region: GraphModule, operands: Sequence[Value], device: str, dtype: torch.dtype | None) -> GraphModule:
    """Trace a region under autocast again, so that the casts, which `torch.export` leaves out, become explicit ops."""
    from torch.fx.experimental.proxy_tensor import make_fx

    fakes = [x.value if isinstance(x, Reference) else x for x in operands]

    def run(*tensors: Any) -> Any:
        with torch.autocast(device, dtype, enabled=True, cache_enabled=False):
            return region(*tensors)

    modes = [x.fake_mode for x in fakes if isinstance(x, torch._subclasses.FakeTensor)]
    with modes[0] if modes else torch.no_grad():
        traced: GraphModule = make_fx(run)(*fakes)
    return traced
