"""Complex tensors inside a graph as pairs of real ones, so that the device computes with them.

    Given:   z = aten.polar(r, a);  w = aten.mul(z, view_as_complex(x));  y = aten.view_as_real(w)
    Result:  c = r * cos(a);  s = r * sin(a);  p = x[..., 0];  q = x[..., 1];  y = stack([c*p - s*q, c*q + s*p], -1)

Each op with a rule here maps pairs to pairs when the graph is read. Where another op needs such a tensor, or the graph
returns it, `aten.complex` makes it of its parts, and PyTorch runs that op on the CPU, as it does with complex inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from npu_sim.module.decompositions import mode_of, operands, trace_plainly
from npu_sim.module.storages import Storages

aten = torch.ops.aten
Rule = TypeVar("Rule", bound=Callable[..., Any])


@dataclass(frozen=True)
class Pair:
    """A complex tensor as two real ones."""

    real: Any
    imaginary: Any


pytree.register_pytree_node(Pair, lambda pair: ([pair.real, pair.imaginary], None), lambda parts, _: Pair(*parts))


@dataclass(frozen=True)
class RealGraph:
    """A call on complex tensors as a graph of real ones.

    Attributes:
        graph_module: The graph; its placeholders are the call's `operands`, two for each pair.
        results: The structure of what it returns, which is flat, as the call's results.
    """

    graph_module: GraphModule
    results: pytree.TreeSpec


def is_complex(value: Any) -> bool:
    """Whether a traced value is a complex tensor, or several values of which one is."""
    return any(isinstance(x, Tensor) and x.is_complex() for x in pytree.tree_leaves(value))


def real_graph(node: Node, values: Mapping[Node, Any]) -> RealGraph | None:
    """The graph that replaces a call which takes or makes complex tensors.

    Args:
        values: Traced values of the call's operands; pairs of them for complex tensors.

    Returns:
        None if there is no rule for the call.
    """
    target, mode = node.target, mode_of(node)
    rule = _rule_of(target)
    if rule is None or mode is None or any(is_complex(value) for value in values.values()):
        return None
    args, structure = pytree.tree_flatten((node.args, node.kwargs))
    parts, given = pytree.tree_flatten([values[x] for x in operands(node)])
    results: list[pytree.TreeSpec] = []

    def run(*arguments: Any) -> list[Any]:
        pairs = dict(zip(operands(node), given.unflatten(arguments), strict=True))
        args_, kwargs = structure.unflatten(pairs[x] if isinstance(x, Node) else x for x in args)
        if target in _ARITHMETIC:
            args_ = pytree.tree_map_only(Tensor, lambda x: _converted(x, node.meta["val"].dtype.to_real()), args_)
        flat, spec = pytree.tree_flatten(rule(*args_, **kwargs))
        results.append(spec)
        return flat

    traced = trace_plainly(run, mode, parts)
    if traced is None or not _is_like(traced, results[0], node.meta["val"]):
        return None
    return RealGraph(traced, results[0])


def writes_complex_memory(graph_module: GraphModule, storages: Storages) -> bool:
    """Whether a graph writes to memory of complex tensors, or returns an input as a view of one.

    Pairs do not share such memory.
    """
    regions = [x for x in graph_module.modules() if isinstance(x, GraphModule)]
    nodes = [node for region in regions for node in region.graph.nodes]
    tensors = [x for node in nodes for x in pytree.tree_leaves(node.meta.get("val")) if is_complex(x)]
    written = [node.args[0] for node in nodes if getattr(getattr(node.target, "_schema", None), "is_mutable", False)]
    inputs = [node for node in nodes if node.op == "placeholder"]
    returned = [x for node in graph_module.graph.nodes if node.op == "output" for x in node.all_input_nodes]

    def shared(given: list[Any]) -> list[Tensor]:
        values = (x.meta.get("val") for x in given if isinstance(x, Node))
        return [x for x in values if isinstance(x, Tensor) and any(storages.are_one(x, y) for y in tensors)]

    if not tensors:
        return False
    return bool(shared(written)) or any(storages.are_one(x, y) for x in shared(inputs) for y in shared(returned))


def _is_pair(x: Any) -> bool:
    return isinstance(x, Pair)


def _converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def _is_like(traced: GraphModule, results: pytree.TreeSpec, value: Any) -> bool:
    """Whether a graph's results have the dtypes and numbers of dimensions of a call's."""
    (output,) = (x for x in traced.graph.nodes if x.op == "output")
    own = pytree.tree_leaves(results.unflatten(x.meta["val"] for x in output.args[0]), _is_pair)
    wanted = pytree.tree_leaves(value)
    return len(own) == len(wanted) and all(
        isinstance(x, Pair) == is_complex(y)
        and all((part.dtype, part.dim()) == (y.dtype.to_real(), y.dim()) for part in pytree.tree_leaves(x))
        if is_complex(y)
        else isinstance(x, Tensor) and x.dtype == y.dtype and x.dim() == y.dim()
        for x, y in zip(own, wanted, strict=True)
    )


_RULES: dict[Any, Callable[..., Any]] = {}


def _computes(*targets: Any) -> Callable[[Rule], Rule]:
    """Decorator: the function does what these ops do, on pairs."""

    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(targets, rule))
        return rule

    return add


def _rule_of(target: Any) -> Callable[..., Any] | None:
    if target in _RULES or not isinstance(target, torch._ops.OpOverload):
        return _RULES.get(target)
    is_view = any(x.alias_info is not None for x in target._schema.returns) and not target._schema.is_mutable
    return _on_each_part(target) if is_view and target not in _OTHER_VIEWS else None


def _on_each_part(target: Any) -> Callable[..., Any]:
    """Return a function that applies an op to the real and to the imaginary parts of its operands.

    It returns a pair, or a list of pairs if the op has several results.
    """

    def rule(*args: Any, **kwargs: Any) -> Any:
        def part(name: str) -> Any:
            def choose(x: Any) -> Any:
                return getattr(x, name) if isinstance(x, Pair) else x

            own = pytree.tree_map(choose, (args, kwargs), is_leaf=_is_pair)
            return target(*own[0], **own[1])

        real, imaginary = part("real"), part("imaginary")
        if isinstance(real, Tensor):
            return Pair(real, imaginary)
        return [Pair(x, y) for x, y in zip(real, imaginary, strict=True)]

    return rule


# Views in other units than elements, or of other values than their base has.
_OTHER_VIEWS = {aten.as_strided.default, aten.view.dtype, aten._neg_view.default}
_ARITHMETIC = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.rsub.Scalar}
for _target in (
    *(aten.neg.default, aten.clone.default, aten.repeat.default, aten.roll.default, aten.flip.default),
    *(aten.index_select.default, aten.index.Tensor, aten.gather.default, aten.embedding.default),
    *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.cumsum.default),
    *(aten.repeat_interleave.self_int, aten._unsafe_view.default, aten.lift_fresh_copy.default),
):
    _RULES[_target] = _on_each_part(_target)


def _pair(x: Any) -> Pair:
    """A real or complex operand as a pair."""
    if isinstance(x, Pair):
        return x
    if isinstance(x, Tensor):
        return Pair(x, torch.zeros_like(x))
    return Pair(x.real, x.imag)


def _is_real(x: Any) -> bool:
    return not isinstance(x, (Pair, complex))


@_computes(aten.complex.default)
def _complex(real: Tensor, imaginary: Tensor) -> Pair:
    return Pair(*torch.broadcast_tensors(real, imaginary))


@_computes(aten.polar.default)
def _polar(length: Tensor, angle: Tensor) -> Pair:
    return Pair(length * torch.cos(angle), length * torch.sin(angle))


@_computes(aten.view_as_complex.default)
def _view_as_complex(x: Tensor) -> Pair:
    return Pair(x.select(-1, 0), x.select(-1, 1))


@_computes(aten.view_as_real.default)
def _view_as_real(x: Pair) -> Tensor:
    return torch.stack([x.real, x.imaginary], -1)


@_computes(aten.real.default)
def _real(x: Pair) -> Any:
    return x.real


@_computes(aten.imag.default)
def _imag(x: Pair) -> Any:
    return x.imaginary


@_computes(aten._conj.default, aten.conj.default, aten._conj_physical.default, aten.conj_physical.default)
def _conj(x: Pair) -> Pair:
    return Pair(x.real, -x.imaginary)


@_computes(aten.resolve_conj.default, aten.resolve_neg.default)
def _itself(x: Pair) -> Pair:
    return x


@_computes(aten.abs.default)
def _abs(x: Pair) -> Tensor:
    return torch.hypot(x.real, x.imaginary)


@_computes(aten.angle.default)
def _angle(x: Pair) -> Tensor:
    return torch.atan2(x.imaginary, x.real)


@_computes(aten.exp.default)
def _exp(x: Pair) -> Pair:
    return _polar(torch.exp(x.real), x.imaginary)


@_computes(aten.add.Tensor)
def _add(x: Any, y: Any, *, alpha: Any = 1) -> Pair:
    x, y = _pair(x), _pair(y if alpha == 1 else _multiply(y, alpha))
    return Pair(x.real + y.real, x.imaginary + y.imaginary)


@_computes(aten.sub.Tensor)
def _sub(x: Any, y: Any, *, alpha: Any = 1) -> Pair:
    x, y = _pair(x), _pair(y if alpha == 1 else _multiply(y, alpha))
    return Pair(x.real - y.real, x.imaginary - y.imaginary)


@_computes(aten.rsub.Scalar)
def _rsub(x: Any, y: Any, alpha: Any = 1) -> Pair:
    return _sub(y, x, alpha=alpha)


def _product(multiply: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return a function that multiplies two operands, real ones or pairs.

    Args:
        multiply: The product of two real operands; it is linear in each of them.
    """

    def rule(x: Any, y: Any) -> Any:
        if _is_real(x) and _is_real(y):
            return multiply(x, y)
        if _is_real(y):
            return Pair(multiply(x.real, y), multiply(x.imaginary, y))
        if _is_real(x):
            y = _pair(y)
            return Pair(multiply(x, y.real), multiply(x, y.imaginary))
        x, y = _pair(x), _pair(y)
        real = multiply(x.real, y.real) - multiply(x.imaginary, y.imaginary)
        return Pair(real, multiply(x.real, y.imaginary) + multiply(x.imaginary, y.real))

    return rule


_multiply = _product(lambda x, y: x * y)
_RULES[aten.mul.Tensor] = _multiply
_RULES.update({op: _product(op) for op in (aten.mm.default, aten.bmm.default, aten.matmul.default)})


@_computes(aten.div.Tensor)
def _div(x: Any, y: Any) -> Any:
    if _is_real(y):
        return Pair(x.real / y, x.imaginary / y)
    if isinstance(y, complex):
        return _multiply(x, 1 / y)
    size = torch.maximum(torch.abs(y.real), torch.abs(y.imaginary))  # squares of what it divides do not overflow
    real, imaginary = y.real / size, y.imaginary / size
    whole = _multiply(x, Pair(real, -imaginary))
    square = (real * real + imaginary * imaginary) * size
    return Pair(whole.real / square, whole.imaginary / square)


@_computes(aten.where.self)
def _where(condition: Tensor, x: Any, y: Any) -> Pair:
    x, y = _pair(x), _pair(y)
    return Pair(torch.where(condition, x.real, y.real), torch.where(condition, x.imaginary, y.imaginary))


def _joined(target: Any) -> Callable[..., Any]:
    """Return a function that applies an op on a list of tensors, such as `cat`, to pairs and real ones.

    It returns a pair. Tensors of several dtypes raise `NotImplementedError`.
    """

    def rule(tensors: list[Any], *args: Any) -> Pair:
        pairs = [_pair(x) for x in tensors]
        dtypes = {x.dtype for pair in pairs for x in (pair.real, pair.imaginary)}
        if len(dtypes) > 1:
            raise NotImplementedError("tensors of several dtypes")
        return Pair(target([x.real for x in pairs], *args), target([x.imaginary for x in pairs], *args))

    return rule


_RULES.update({op: _joined(op) for op in (aten.cat.default, aten.stack.default)})


def _cast(target: Any) -> Callable[..., Any]:
    """Return a function that converts as an op does, from a pair to a real dtype or from either kind to a complex one.

    A real dtype keeps the real part alone. A conversion to bool raises `NotImplementedError`.
    """

    def rule(x: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)), None)
        if dtype == torch.bool:
            raise NotImplementedError("either part makes it true")
        args, kwargs = pytree.tree_map_only(torch.dtype, lambda d: d.to_real() if d.is_complex else d, (args, kwargs))
        if isinstance(x, Pair) and (dtype is None or dtype.is_complex):
            return Pair(target(x.real, *args, **kwargs), target(x.imaginary, *args, **kwargs))
        part = target(_pair(x).real, *args, **kwargs)
        return part if isinstance(x, Pair) else _pair(part)

    return rule


_RULES.update({op: _cast(op) for op in (aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default)})
