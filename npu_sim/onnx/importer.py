"""Conversion of an ONNX graph to the steps of a PyTorch module, node by node.

Each node is run once on tensors that have shapes and dtypes but no values; nodes whose inputs are all constants are run
on the values. So sizes that a graph computes from shapes are known numbers when a converter needs them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from npu_compiler.errors import IRError, NPUError
from npu_sim.onnx import operators as _operators  # noqa: F401  # registers the rows
from npu_sim.onnx.control import CONTROL_FLOW, title_of
from npu_sim.onnx.dtypes import torch_dtype, torch_tensor
from npu_sim.onnx.files import DEFAULT_DOMAINS, check_inside, checked
from npu_sim.onnx.functions import Body, body_of
from npu_sim.onnx.input_sizes import check_sizes, input_shape
from npu_sim.onnx.rows import ROWS, Call, Refusal, Row, shown
from npu_sim.onnx.steps import Attributes, Constant, Env, NeedsValue, Slot, Step, Steps

MOST_FOLDED = 2**16  # elements of a constant that is computed while reading; larger ones are computed by the program
MOST_NODES = 100_000
MOST_ELEMENTS = 2**31  # of an input


class Importer:
    """Converts an ONNX model to steps, which are calls of PyTorch functions.

    Args:
        model: The model.
        sizes: Name of a dynamic dimension → its size, and name of an input → its shape. None: all sizes are in the
            file.
        values: Graph input → its value, which makes it a constant. None: no input is a constant.
    """

    def __init__(
        self,
        model: ir.Model,
        sizes: Mapping[str, int | Sequence[int]] | None = None,
        values: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.model, self.sizes, self.values = model, dict(sizes or {}), dict(values or {})
        self.mode = FakeTensorMode()
        self.made = Steps()
        self.count = self.read_nodes = 0

    def run(self) -> Steps:
        """Convert the model and return its steps.

        Raises:
            IRError: an operator has no converter, or none for these arguments; or the file is malformed.
        """
        check_sizes(self.model, self.sizes)
        graph, env = self.model.graph, Env()
        for name, value in graph.initializers.items():
            env[value] = self.initializer(name, value)
        for value in graph.inputs:
            if value.name not in graph.initializers:
                env[value] = self._input(value)
        self.run_nodes(graph, env, self.model.opset_imports, {})
        for value in graph.outputs:
            slot = self.read(value, env, f"graph output '{value.name}'")
            if slot.value is not None:
                self.made.tensors.setdefault(slot.index, slot)
            self.made.outputs.append((str(value.name), slot.index))
        return self.made

    def slot(
        self, value: torch.Tensor, known: bool, sources: frozenset[str] = frozenset(), key: str | None = None
    ) -> Slot:
        """Return a new slot, which represents a tensor of the module: a constant or a tensor without values.

        Args:
            value: The tensor.
            known: Whether the tensor is a constant.
            sources: Names of the graph inputs that the tensor depends on.
            key: Name of the initializer that the tensor is. None: it is not an initializer.
        """
        self.count += 1
        if known:
            return Slot(self.count, self.mode.from_tensor(value), value, sources, key)
        return Slot(self.count, value, None, sources, key)

    def initializer(self, name: str, value: ir.Value) -> Slot:
        """Return the slot of an initializer, a constant of the file. Raises `IRError` if its data cannot be read."""
        tensor = value.const_value
        if tensor is None:
            raise IRError(f"initializer '{shown(name)}' has no data")
        try:
            return self.slot(self.tensor(tensor, f"initializer '{shown(name)}'"), True, key=name)
        except Refusal as refusal:
            raise IRError(f"initializer '{shown(name)}' {refusal}") from refusal

    def tensor(self, tensor: ir.TensorProtocol, what: str) -> torch.Tensor:
        """Read a tensor's data. Raises `IRError` if that fails, `Refusal` if IR has no such dtype.

        Args:
            what: The tensor's description for the message.
        """
        if tensor.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
            raise Refusal(f"has the dtype {tensor.dtype.name}")

        def read() -> object:
            if isinstance(tensor, ir.ExternalTensor):
                check_inside(tensor.base_dir, tensor.location)
            try:
                return torch_tensor(tensor)
            except Refusal as refusal:
                return refusal

        result = checked(read, what)
        if isinstance(result, Refusal):
            raise result
        assert isinstance(result, torch.Tensor)
        return result

    def _input(self, value: ir.Value) -> Slot:
        name = str(value.name)
        if name in self.values:
            given = self.values[name]
            return self.slot(given, True)
        if not isinstance(value.type, ir.TensorType):
            kind = "no type" if value.type is None else str(value.type).partition("(")[0]
            raise IRError(f"graph input '{shown(name)}' has {kind}; only tensors are read")
        try:
            dtype = torch_dtype(value.dtype)
        except Refusal as refusal:
            raise IRError(f"graph input '{shown(name)}' {refusal}") from refusal
        shape = input_shape(name, value.shape, self.sizes)
        if math.prod(shape) > MOST_ELEMENTS:
            raise IRError(
                f"graph input '{shown(name)}' has {math.prod(shape)} elements; programs have at most {MOST_ELEMENTS}"
            )
        with self.mode:
            fake = torch.empty(shape, dtype=dtype)
        self.made.inputs[name] = slot = self.slot(fake, False, frozenset({name}))
        return slot

    def run_nodes(
        self, graph: Iterable[ir.Node], env: Env, opsets: Mapping[str, int], attrs: Attributes, deep: int = 0
    ) -> None:
        """Convert the nodes of a graph, a subgraph or a function, and add their outputs to `env`.

        Args:
            graph: The nodes, in topological order.
            env: Value → slot.
            opsets: Domain → version of its operators.
            attrs: Attributes of the call whose function the nodes belong to; empty for a graph.
            deep: Number of function calls that these nodes are nested in.
        """
        for node in graph:
            where = title_of(node)
            try:
                results = self._node(node, env, opsets, attrs, deep, where)
            except Refusal as refusal:
                raise IRError(f"{where} {refusal}") from refusal
            wanted = [index for index, value in enumerate(node.outputs) if value.name]
            if any(index >= len(results) or results[index] is None for index in wanted):
                raise IRError(f"{where} has more outputs than are made for these inputs")
            env.update((node.outputs[index], slot) for index in wanted if (slot := results[index]) is not None)
            self.read_nodes += 1
            if self.read_nodes > MOST_NODES:
                raise IRError(f"{where} makes the graph longer than {MOST_NODES} nodes, with those of loops in a row")

    def _node(
        self, node: ir.Node, env: Env, opsets: Mapping[str, int], attrs: Attributes, deep: int, where: str
    ) -> Sequence[Slot | None]:
        inputs = [None if x is None or x.name == "" else self.read(x, env, where) for x in node.inputs]
        domain = "" if node.domain in DEFAULT_DOMAINS else node.domain
        if (domain, node.op_type) in (("", op) for op in CONTROL_FLOW):
            made: list[Slot] = CONTROL_FLOW[node.op_type](self, node, inputs, env, opsets, attrs)
            return made
        opset = opsets.get(domain, opsets.get("ai.onnx", 0) if not domain else 0)
        outputs = len([x for x in node.outputs if x.name])
        call = Call(node.op_type, opset, self.attributes(node, attrs, where), outputs)
        if not domain and node.op_type == "Constant":
            return [self.slot(_constant(call), True)]
        row = ROWS.get(node.op_type) if not domain else None
        function = self.model.functions.get((node.domain, node.op_type, node.overload))
        if function is None and row is not None and (results := self.apply(row, call, inputs, where)) is not None:
            return results
        types = [None if x is None else x.fake for x in inputs]
        body = Body(function) if function is not None else body_of(node, call, domain, types)
        if body is None:
            raise Refusal(f"is an operator{f' of domain {shown(domain)}' if domain else ''} that has no converter")
        if deep > 50:
            raise Refusal("is a function that calls itself")
        return self._expand(body, call, inputs, where, deep)

    def _expand(self, body: Body, call: Call, inputs: list[Slot | None], where: str, deep: int) -> list[Slot | None]:
        """Convert the nodes of a function for these inputs, and return the slots of its outputs."""
        function, env = body.function, Env()
        for parameter, slot in zip(function.inputs, inputs, strict=False):
            if slot is not None:
                env[parameter] = slot
        own = {name: _plain(attr) for name, attr in function.attributes.items() if attr.value is not None}
        attrs = {**own, **body.defaults, **call.attrs}
        missing = frozenset(x for x in function.inputs if x not in env)
        try:
            self.run_nodes(_Without(function, missing), env, function.opset_imports, attrs, deep + 1)
        except NeedsValue as error:
            raise NeedsValue(f"{where}: {error}", error.sources) from error
        except IRError as error:
            raise IRError(f"{where}: {error}") from error
        made = iter(function.outputs)
        return [
            self.read(next(made), env, where) if is_made else None
            for is_made in body.made or [True] * len(function.outputs)
        ]

    def attributes(self, node: ir.Node, attrs: Attributes, where: str) -> dict[str, Any]:
        """Return a node's attributes as plain values; references to attributes of a function call are resolved."""
        found: dict[str, Any] = {}
        for name, attr in node.attributes.items():
            if attr.is_ref():
                if (given := attrs.get(str(attr.ref_attr_name))) is not None:
                    found[name] = given
            elif attr.type == ir.AttributeType.TENSOR:
                found[name] = self.tensor(attr.as_tensor(), f"attribute '{name}' of {where}")
            else:
                found[name] = _plain(attr)
        return found

    def read(self, value: ir.Value, env: Env, where: str) -> Slot:
        """Return the slot of a value that a node reads. Raises `IRError` if no input or earlier node provides it."""
        if value not in env:
            raise IRError(
                f"{where} reads '{shown(str(value.name))}', which is no input, no initializer and no node's output"
            )
        return env[value]

    def apply(self, row: Row, call: Call, inputs: Sequence[Slot | None], where: str) -> list[Slot] | None:
        """Return the outputs of an operator: constants if all its inputs are, else results of a new step.

        None if the operator's definition by other operators has to be used instead.
        """
        call = replace(call, dtypes=tuple(None if slot is None else slot.fake.dtype for slot in inputs))
        sources = frozenset().union(*(slot.sources for slot in inputs if slot is not None))
        given = [self._argument(row, index, slot, inputs, where) for index, slot in enumerate(inputs)]
        is_known = row.folds and all(x is None or x.value is not None and x.fake.numel() <= MOST_FOLDED for x in inputs)
        results = self._without_values(row, call, given, where, is_known)
        if row.of_shape or is_known and (results is None or all(x.numel() <= MOST_FOLDED for x in results)):
            arguments = [x if not isinstance(x, Slot) else x.fake if row.of_shape else x.value for x in given]
            with _disable_current_modes(), torch.no_grad():
                values = _computed(row, call, arguments, where)
            return None if values is None else [self.slot(x, True) for x in values]
        if results is None:
            return None
        slots = [self.slot(x, False, sources) for x in results]
        args: list[int | Constant | None] = []
        for argument in given:
            if isinstance(argument, Slot) and argument.value is not None:
                self.made.tensors.setdefault(argument.index, argument)
            is_tensor = isinstance(argument, Slot)
            args.append(argument.index if is_tensor else None if argument is None else Constant(argument))
        self.made.steps.append(Step(row.convert, call, tuple(args), tuple(slot.index for slot in slots)))
        return slots

    def _without_values(
        self, row: Row, call: Call, given: Sequence[Any], where: str, is_known: bool
    ) -> list[torch.Tensor] | None:
        """Return the results of an operator as tensors without values.

        None if the operator's definition by other operators has to be used, or if `is_known` and the shapes depend on
        the values, so that it must be run on these.
        """
        try:
            with self.mode, torch.no_grad():
                return _computed(row, call, [x.fake if isinstance(x, Slot) else x for x in given], where)
        except Refusal:
            if is_known:
                return None
            raise

    def _argument(self, row: Row, index: int, slot: Slot | None, inputs: Sequence[Slot | None], where: str) -> Any:
        """Return an input in the form that a converter takes: a slot, a number, a list, or None for one left out."""
        if slot is None:
            return None
        if index in row.static:
            return self.constant(slot, f"input {index}", where).tolist()
        if index in row.hints and slot.value is not None and slot.fake.numel() <= MOST_FOLDED:
            return slot.value.tolist()
        is_number = row.scalars and slot.value is not None and not slot.fake.ndim and slot.fake.dtype != torch.bool
        others = [x for place, x in enumerate(inputs) if place != index and x is not None]
        if is_number and any(x.value is None or x.fake.ndim for x in others):
            assert slot.value is not None
            return slot.value.item()
        return slot

    def constant(self, slot: Slot, what: str, where: str) -> torch.Tensor:
        """Return the value of a slot. Raises `NeedsValue` if it is not a constant.

        Args:
            what: The role of the input, for the message.
            where: Description of the node, for the message.
        """
        if slot.value is None:
            names = ", ".join(f"'{shown(name)}'" for name in sorted(slot.sources)) or "weights"
            raise NeedsValue(
                f"{where} needs a constant as its {what}, which decides a shape or a way to go; it depends on {names}",
                slot.sources,
            )
        return slot.value


def initializers_of(model: ir.Model) -> dict[str, torch.Tensor]:
    """Return the tensors of a model that can be weights, by every key under which `OnnxModule` may register them."""
    importer = Importer(model)
    found: dict[str, torch.Tensor] = {}
    for name, value in model.graph.initializers.items():
        slot = importer.initializer(name, value)
        assert slot.value is not None
        found[name] = found[slot.other_key] = slot.value
    return found


class _Without:
    """The nodes of a function, with the inputs that a call leaves out removed from the nodes that read them."""

    def __init__(self, function: ir.Function, missing: frozenset[ir.Value]) -> None:
        self._function, self._missing = function, missing

    def __iter__(self) -> Any:
        if not self._missing:
            return iter(self._function)
        copy = list(self._function)
        for node in copy:
            for index, value in enumerate(node.inputs):
                if value in self._missing:
                    node.replace_input_with(index, None)
        return iter(copy)


def _computed(row: Row, call: Call, arguments: Sequence[Any], where: str) -> list[torch.Tensor] | None:
    """Return a converter's results, or None if it returns None.

    Raises:
        IRError: PyTorch cannot compute the results; the message quotes PyTorch's.
    """
    try:
        results = row.convert(call, *arguments)
    except (Refusal, NPUError):
        raise
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise Refusal("has a result whose size depends on the values of a tensor") from error
    except Exception as error:  # PyTorch's checks of shapes and dtypes, and attributes that are missing
        text = " ".join(str(error).split()) or type(error).__name__
        raise IRError(f"{where} cannot be computed for its inputs: {text[:200]}") from error
    if results is None:
        return None
    return [results] if isinstance(results, torch.Tensor) else list(results)


def _constant(call: Call) -> torch.Tensor:
    """Return the tensor of an ONNX node `Constant`."""
    dtypes = {
        "value_float": torch.float32,
        "value_floats": torch.float32,
        "value_int": torch.int64,
        "value_ints": torch.int64,
    }
    for name, value in call.attrs.items():
        if name == "value":
            return value  # type: ignore[no-any-return]
        if name in dtypes:
            return torch.tensor(value, dtype=dtypes[name])
    raise Refusal(f"has {', '.join(call.attrs) or 'no value'}; known are value, {', '.join(dtypes)}")


def _plain(attr: ir.Attr) -> Any:
    value = attr.value
    if attr.type in (ir.AttributeType.INTS, ir.AttributeType.FLOATS, ir.AttributeType.STRINGS):
        return list(value)
    return value
