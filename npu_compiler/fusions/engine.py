"""Pattern matching: patterns, written as data, are matched against the graph.

The other files here hold the patterns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec, unique_name
from npu_compiler.ops import OPS
from npu_compiler.ops.registry import Args, find_op

CASTS = " ".join(name for name, op in OPS.items() if op.is_cast)
ACTIVATION_OPS = " ".join(name for name, op in OPS.items() if op.activation is not None)


def activation(node: OpNode) -> str | None:
    """The name of the activation that a node computes, as fused kernels know it; None for any other node."""
    op = find_op(node.op_type)
    return op.activation(node.attrs) if op is not None and op.activation is not None else None


@dataclass(frozen=True)
class Var:
    """A pattern for any tensor; one name must match one tensor everywhere in a pattern."""

    name: str


@dataclass(frozen=True)
class Num:
    """A pattern for a scalar operand, bound under `name`; it must equal `value` (to 0.1%) unless that is None."""

    name: str = "_"
    value: float | None = None


@dataclass(frozen=True)
class P:
    """A pattern for a node of one of `ops` (without overload) whose operands match `args` in schema order.

    Attributes:
        where: Further condition on the node.
        commutes: Whether the first two operands may be swapped.
        bind: Name under which the node itself is kept.
    """

    ops: str
    args: tuple[Pattern, ...] = ()
    where: Callable[[OpNode, IRGraph], bool] | None = None
    commutes: bool = False
    bind: str | None = None


@dataclass(frozen=True)
class Maybe:
    """A pattern that matches the inner pattern, or one node of `ops` (by default a cast) over the inner pattern."""

    inner: Pattern
    ops: str = CASTS


@dataclass(frozen=True)
class Either:
    """A pattern that matches what the first of two patterns matches, or else the second."""

    first: Pattern
    second: Pattern


Pattern: TypeAlias = Var | Num | P | Maybe | Either


def add(left: Pattern, right: Pattern) -> P:
    return P("aten.add", (left, right), commutes=True, where=_plain_alpha)


def sub(left: Pattern, right: Pattern) -> P:
    return P("aten.sub", (left, right), where=_plain_alpha)


def mul(left: Pattern, right: Pattern) -> P:
    return P("aten.mul", (left, right), commutes=True)


def _plain_alpha(node: OpNode, graph: IRGraph) -> bool:
    return bool(node.attrs.get("alpha", 1) == 1)


@dataclass
class Match:
    """A successful match: the bound tensors, scalars and nodes, and every node that the pattern covers."""

    root: OpNode
    tensors: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    bound: dict[str, OpNode] = field(default_factory=dict)
    nodes: dict[str, OpNode] = field(default_factory=dict)

    def copy(self) -> Match:
        return Match(self.root, dict(self.tensors), dict(self.scalars), dict(self.bound), dict(self.nodes))


class Matcher:
    """A graph with the indexes (producers and readers of tensors) that matching needs."""

    def __init__(self, graph: IRGraph) -> None:
        self.graph = graph
        self.producers = graph.producers()
        self.consumers = graph.consumers()
        self.outputs = set(graph.outputs)

    def match(self, pattern: P, root: OpNode) -> Match | None:
        """Match a pattern that ends in `root`; None if it does not match.

        Intermediate results of the match may not be read by other nodes or bound as operands.
        """
        for match in self._node(pattern, root, Match(root)):
            if self._is_closed(match):
                return match
        return None

    def _is_closed(self, match: Match) -> bool:
        made_inside = {out for node in match.nodes.values() for out in node.outputs}
        if not made_inside.isdisjoint(match.tensors.values()):
            return False
        for node in match.nodes.values():
            if node.name == match.root.name:
                continue
            for out in node.outputs:
                if out in self.outputs:
                    return False
                if any(user.name not in match.nodes for user in self.consumers.get(out, [])):
                    return False
        return True

    def _node(self, pattern: P, node: OpNode, state: Match) -> Iterator[Match]:
        if node.base not in pattern.ops.split() or (pattern.where and not pattern.where(node, self.graph)):
            return
        operands = _operands(node)
        orders = [operands]
        if pattern.commutes and len(operands) >= 2:
            orders.append([operands[1], operands[0], *operands[2:]])
        for order in orders:
            start = state.copy()
            start.nodes[node.name] = node
            if pattern.bind:
                start.bound[pattern.bind] = node
            yield from self._args(pattern.args, order, start)

    def _args(self, patterns: tuple[Pattern, ...], operands: list[str | float | None], state: Match) -> Iterator[Match]:
        if not patterns:
            yield state
            return
        if not operands:
            return
        for match in self._value(patterns[0], operands[0], state):
            yield from self._args(patterns[1:], operands[1:], match)

    def _value(self, pattern: Pattern, operand: str | float | None, state: Match) -> Iterator[Match]:
        if isinstance(pattern, Either):
            yield from self._value(pattern.first, operand, state)
            yield from self._value(pattern.second, operand, state)
            return
        if isinstance(pattern, Num):
            if isinstance(operand, (int, float)) and _close(operand, pattern.value):
                match = state.copy()
                match.scalars[pattern.name] = float(operand)
                yield match
            return
        if not isinstance(operand, str):
            return
        if isinstance(pattern, Var):
            if state.tensors.get(pattern.name, operand) == operand:
                match = state.copy()
                match.tensors[pattern.name] = operand
                yield match
            return
        node = self.producers.get(operand)
        if isinstance(pattern, Maybe):
            if node is not None and node.base in pattern.ops.split():
                through = state.copy()
                through.nodes[node.name] = node
                yield from self._value(pattern.inner, node.inputs[0], through)
            yield from self._value(pattern.inner, operand, state)
        elif node is not None:
            yield from self._node(pattern, node, state)


def _close(actual: float, wanted: float | None) -> bool:
    return wanted is None or abs(actual - wanted) <= 1e-3 * max(abs(wanted), 1e-6)


def _operands(node: OpNode) -> list[str | float | None]:
    """The arguments of a node in schema order: names of tensors, and numbers."""
    op = find_op(node.op_type)
    if op is None or any(name.startswith("*") for name in op.tensors):
        return list(node.inputs)
    args = Args(node)
    result: list[str | float | None] = []
    for name in op.tensors:
        tensor = args.tensor(name)
        value = node.attrs.get(name)
        result.append(tensor if tensor is not None else value if isinstance(value, (int, float)) else None)
    return result


@dataclass
class Rewriter:
    """The nodes, tensors and weights that a rewrite function adds to the graph besides the fused node.

    Attributes:
        producers: Tensor → the node of the graph that makes it.
        shared: The nodes that rewrites of other matches added, by what they compute: equal ones are added once.
    """

    graph: IRGraph
    tensors: dict[str, TensorSpec]
    producers: Mapping[str, OpNode]
    added: list[OpNode] = field(default_factory=list)
    shared: dict[tuple[object, ...], OpNode] = field(default_factory=dict)

    def node(
        self, stem: str, op_type: str, inputs: tuple[str, ...], like: str, shape: tuple[int, ...], **attrs: object
    ) -> str:
        """Add a node before the fused one, unless there is an equal one, and return the name of its output tensor.

        Args:
            stem: Name of the node and its output, to which a number is added if it is taken.
            like: The tensor whose dtype the output has.
            shape: Shape of the output.
            attrs: The node's attributes.
        """
        key = (op_type, inputs, self.tensors[like].dtype, shape, repr(sorted(attrs.items())))
        if key not in self.shared:
            name = unique_name(stem, self.tensors)
            self.tensors[name] = replace(self.tensors[like], name=name, shape=shape)
            self.shared[key] = OpNode(name, op_type, inputs, (name,), dict(attrs))
        self.added.append(self.shared[key])
        return self.shared[key].outputs[0]


RewriteFn: TypeAlias = Callable[[Match, Rewriter], OpNode | None]


@dataclass(frozen=True)
class Fusion:
    """A named fusion: patterns (tried in order) that end in the same kind of node, and the rewrite of a match.

    `rewrite` returns the fused node, which takes the outputs of the match's last node, or None to decline.
    """

    name: str
    patterns: tuple[P, ...]
    rewrite: RewriteFn


def apply_fusion(graph: IRGraph, fusion: Fusion, supports: Callable[[OpNode], bool] = lambda node: True) -> IRGraph:
    """Replace every match of a fusion, from the last node to the first, so that the longest chain wins.

    In a float32 model, a match stays as it is if it rounds to 16 bits and widens again: a fused kernel would not round.

    Args:
        supports: Whether the target has a node's op; a match whose rewrite would need another op stays as it is.
    """
    roots = {op for pattern in fusion.patterns for op in pattern.ops.split()}
    if not any(node.base in roots for node in graph.nodes):
        return graph
    matcher = Matcher(graph)
    rounds = graph.native_dtype == "float32"
    tensors = dict(graph.tensors)
    replaced: dict[str, list[OpNode]] = {}
    consumed: set[str] = set()
    shared: dict[tuple[object, ...], OpNode] = {}
    for node in reversed(graph.nodes):
        if node.base not in roots or node.name in consumed:
            continue
        for pattern in fusion.patterns:
            match = matcher.match(pattern, node)
            if match is None or any(name in consumed for name in match.nodes) or (rounds and _widens(match, graph)):
                continue
            rewriter = Rewriter(graph, tensors, matcher.producers, shared=shared)
            fused = fusion.rewrite(match, rewriter)
            if fused is not None and all(map(supports, (*rewriter.added, fused))):
                replaced[node.name] = [*rewriter.added, fused]
                consumed.update(match.nodes)
                break
    nodes: dict[str, OpNode] = {}  # a node that several matches share stands before the first of them
    for node in graph.nodes:
        if node.name in replaced:
            nodes.update({new.name: new for new in replaced[node.name] if new.name not in nodes})
        elif node.name not in consumed:
            nodes[node.name] = node
    return replace(graph, nodes=list(nodes.values()), tensors=tensors)


def _widens(match: Match, graph: IRGraph) -> bool:
    """Whether a 16-bit tensor inside a match is cast to float32 inside that match.

    A float32 model does this to round on purpose, which a fused kernel would not do. In a 16-bit model, it is only
    better not to round.
    """
    halves = {out for node in match.nodes.values() for out in node.outputs if graph.tensors[out].dtype in HALF_DTYPES}
    return any(
        not halves.isdisjoint(node.inputs) and graph.tensors[out].dtype in ("float32", "float64")
        for node in match.nodes.values()
        for out in node.outputs
    )


def fused(op_type: str, match: Match, inputs: tuple[str, ...], **attrs: object) -> OpNode:
    """The node of `op_type` that replaces a match; it has the name and the outputs of the match's last node."""
    return OpNode(match.root.name, op_type, inputs, match.root.outputs, attrs)
