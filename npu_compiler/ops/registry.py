"""The op table: one row per op. Support checks, the constraint checker, the partitioner and codegen all read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, TypedDict, Unpack

from npu_compiler.errors import MALFORMED, IRError
from npu_compiler.graph.dtypes import INT32_MAX, INT32_MIN
from npu_compiler.graph.mesh import Split
from npu_compiler.graph.model import Attrs, IRGraph, OpNode, TensorSpec, base_op
from npu_compiler.ops.lowering import Lowering
from npu_compiler.program.views import MAX_RANK, View

Scalar: TypeAlias = float | int | bool | str
LowerFn: TypeAlias = Callable[[Lowering, OpNode], None]
SupportFn: TypeAlias = Callable[[OpNode, IRGraph], str | None]
ViewFn: TypeAlias = Callable[[OpNode, View, TensorSpec], View | None]
Range: TypeAlias = tuple[int, int]
RangeFn: TypeAlias = Callable[[OpNode, IRGraph, Mapping[str, Range]], Range | tuple[Range, ...]]

NARROW_INTS = frozenset({"int8", "int16", "uint8"})
UNSUPPORTED_DTYPES = frozenset({"complex64", "complex128"})


class Layout(Enum):
    """The way an op handles 4-D activations whose channels are padded in memory."""

    DENSE = "its outputs are not padded"
    CONVOLUTION = "its outputs are padded, and so is a graph input that it convolves"
    IMAGE = "its outputs are padded"
    ELEMENTWISE = "its output is padded where an input of the same shape is"


class ByteStorage(Enum):
    """Whether an op can read and write int8 and uint8 tensors that are stored in one byte per element."""

    NONE = "they are int32"
    ALLOWED = "they may be"
    REQUIRED = "they must be"


@dataclass(frozen=True)
class WriteBack:
    """The op that writes a changed view back into its base.

    Attributes:
        keeps_rest: Whether the view shows only a part of the base, so that the op takes (base, view); else it takes
            (view,).
    """

    op_type: str
    attrs: Attrs
    keeps_rest: bool


@dataclass(frozen=True)
class ViewRule:
    """The rule by which an op's output is a view of the memory of its first input.

    Attributes:
        window: Function (node, its input's view, its output's spec) → the output's view; None if no strides express it.
        may_copy: Whether PyTorch copies if `window` gives None; an op without this always returns a view.
        part: Function (node, graph, index) → the node that computes output `index` alone, or that reads only input
            `index`; None for an op without such parts.
        write_back: Function (node, the base's spec, its output's spec) → the op that writes a changed output back, or
            None if there is none; None for an op that has none at all.
    """

    window: ViewFn
    may_copy: bool = False
    part: Callable[[OpNode, IRGraph, int], OpNode] | None = None
    write_back: Callable[[OpNode, TensorSpec, TensorSpec], WriteBack | None] | None = None


@dataclass(frozen=True)
class Shards:
    """The division of a node's tensors among ranks; tensors that are not named are whole.

    A sharding rule returns None instead if the ranks could not each compute a part independently.

    Attributes:
        splits: Tensor → (dimension, number of parts) for each of its dimensions that is divided.
        is_sum: Whether the output is a sum of which each rank has a summand.
        once: Inputs that only the first rank may add to that sum.
    """

    splits: Mapping[str, Split]
    is_sum: bool = False
    once: frozenset[str] = frozenset()


TableFn: TypeAlias = Callable[
    [OpNode, IRGraph, str, int, Mapping[str, TensorSpec]], tuple[list[OpNode], dict[str, TensorSpec]]
]
ShardFn: TypeAlias = Callable[[OpNode, IRGraph, str, Split], Shards | None]
"""A sharding rule (node, graph, a tensor of the node, its split) → the splits of the node's other tensors.

It returns None if the ranks could not each compute a part.
"""


@dataclass(frozen=True)
class QuantizedRule:
    """The variant of an op that reads a quantized weight.

    Attributes:
        input: The weight's position among the inputs.
        op: The op that has inputs for the parts of the weight in its place.
        is_table: Whether it looks up rows of the weight instead of multiplying with all of it.
    """

    input: int
    op: str
    is_table: bool = False


@dataclass(frozen=True)
class Op:
    """A row of the op table: everything that passes, fusions and checks need to know of an op.

    Attributes:
        name: ATen name without overload (`aten.add`), with one where overloads differ (`aten.max.dim`), or a fused
            op's own (`npu.rms_norm`).
        tensors: Names of the schema's tensor arguments, in order; a leading `*` marks a tensor list.
        lower: Emits the node's kernel calls and views.
        unsupported: Function (node, graph) → the reason why the device cannot run the node; None if it can.
        view: Rule by which its output shares memory with its input in PyTorch; None for an op that writes new memory.
        moves: Whether it only moves elements: it computes nothing, so elements of any dtype stay unchanged.
        is_cast: Whether it does nothing but change the dtype.
        identity: Function (node, its first input's dtype) → whether the op returns that input, if shape and dtype are
            equal; None for an op that never does.
        is_pure: Whether equal nodes have equal results.
        layout: Treatment of channel padding.
        channel_axis: Function of a node → its weight's axis of output channels, for folding a factor per channel; None
            for a node, or an op, for which that is impossible.
        index_bound: Function (node, graph) → its index inputs with the lowest and highest index allowed; None for an op
            without indices.
        selects: Whether its elements are some of the first input's, chosen by the other inputs.
        activation: Function of an activation's attributes → its name in `ACTIVATIONS`, or None; None for an op that is
            no activation.
        one_dtype: Whether PyTorch requires all its float operands to have one dtype, instead of promoting them.
        float32_parameters: Whether its inputs beyond the first stay float32 whatever the compute dtype.
        by_name: Whether its lowering asks for tensors by name, so that an earlier one may be left out.
        integer_range: Function of its inputs' ranges → the lowest and highest integer that it may return, or a range
            for each output. None for an op that moves elements or returns no int32 or int64.
        quantized: Variant that reads a quantized weight; None if there is none.
        byte_storage: Whether its int8 and uint8 tensors may, or must, be stored in one byte per element.
        shard: Rule for tensors that are divided among ranks; None for an op that needs them whole.
        shard_table: Function that replaces a table lookup by nodes that look up a part of the rows (see
            `shard_embedding`); None for an op that is none.
        saturates: Whether its results in a narrow integer dtype never exceed that dtype's range.
    """

    name: str
    tensors: tuple[str, ...]
    lower: LowerFn
    unsupported: SupportFn
    view: ViewRule | None = None
    moves: bool = False
    is_cast: bool = False
    identity: Callable[[OpNode, str], bool] | None = None
    is_pure: bool = True
    layout: Layout = Layout.DENSE
    channel_axis: Callable[[OpNode], int | None] | None = None
    index_bound: Callable[[OpNode, IRGraph], Mapping[str, Range]] | None = None
    selects: bool = False
    activation: Callable[[Attrs], str | None] | None = None
    one_dtype: bool = False
    float32_parameters: bool = False
    by_name: bool = False
    integer_range: RangeFn | None = None
    quantized: QuantizedRule | None = None
    byte_storage: ByteStorage = ByteStorage.NONE
    saturates: bool = False
    shard: ShardFn | None = None
    shard_table: TableFn | None = None


OPS: dict[str, Op] = {}


def supported(node: OpNode, graph: IRGraph) -> str | None:
    """Return None, as the default of `Op.unsupported`: the device can run every node of the op."""
    return None


class OpFacts(TypedDict, total=False):
    """The attributes of `Op` that have defaults."""

    view: ViewRule | None
    moves: bool
    is_cast: bool
    identity: Callable[[OpNode, str], bool] | None
    is_pure: bool
    layout: Layout
    channel_axis: Callable[[OpNode], int | None] | None
    index_bound: Callable[[OpNode, IRGraph], Mapping[str, Range]] | None
    selects: bool
    activation: Callable[[Attrs], str | None] | None
    one_dtype: bool
    float32_parameters: bool
    by_name: bool
    integer_range: RangeFn | None
    quantized: QuantizedRule | None
    byte_storage: ByteStorage
    saturates: bool
    shard: ShardFn | None
    shard_table: TableFn | None


def register_op(
    names: str, *, tensors: tuple[str, ...] = ("self",), unsupported: SupportFn = supported, **facts: Unpack[OpFacts]
) -> Callable[[LowerFn], LowerFn]:
    """Return a decorator that adds a row for each name, lowered by the decorated function.

    Args:
        names: Separated by spaces.
        facts: Further attributes of `Op`.
    """

    def add(lower: LowerFn) -> LowerFn:
        for name in names.split():
            if name in OPS:
                raise ValueError(f"op '{name}' is registered twice")
            OPS[name] = Op(name, tensors, lower, unsupported, **facts)
        return lower

    return add


def always(node: OpNode, dtype: str) -> bool:
    """An `Op.identity` rule: the op returns its input whenever shape and dtype are equal."""
    return True


def find_op(op_type: str) -> Op | None:
    """The row of an op type: of the exact overload, else of the op without overload; None if there is none.

    In-place ops have the row of their out-of-place variant.
    """
    base = base_op(op_type)
    for name in (op_type, base):
        if name in OPS:
            return OPS[name]
    if is_in_place(op_type):
        return find_op(out_of_place(op_type))
    return None


_OPERATORS = {f"aten.__i{name}__": f"aten.__{name}__" for name in ("and", "or", "xor", "lshift", "rshift")}


def is_in_place(op_type: str) -> bool:
    """Whether the op mutates its first argument (`aten.add_` and `aten.__iand__`; `aten.__and__` does not)."""
    base = base_op(op_type)
    return base in _OPERATORS or (base.startswith("aten.") and base.endswith("_") and not base.endswith("__"))


def out_of_place(op_type: str) -> str:
    """The op type of an in-place op's out-of-place variant: `aten.add.Tensor` for `aten.add_.Tensor`."""
    base = base_op(op_type)
    return _OPERATORS.get(base, base[:-1]) + op_type[len(base) :]


def is_assertion(op_type: str) -> bool:
    """Whether the op only checks something at run time; assertions are dropped."""
    return base_op(op_type).split(".")[-1].startswith("_assert")


def unsupported_reason(node: OpNode, graph: IRGraph) -> str | None:
    """The reason why the device cannot run a node, in words that name the shape or attribute; None if it can."""
    op = find_op(node.op_type)
    if op is None:
        return f"op '{node.op_type}' is not in the op table"
    for name in (*node.inputs, *node.outputs):
        spec = graph.tensors[name]
        if spec.dtype in UNSUPPORTED_DTYPES:
            return f"tensor '{name}' has dtype {spec.dtype}"
        if len(spec.shape) > MAX_RANK:
            return f"tensor '{name}' has rank {len(spec.shape)}; at most {MAX_RANK} is supported"
    if not node.outputs:
        return f"op '{node.op_type}' has no tensor output"
    for name in node.outputs[:1]:
        if graph.tensors[name].dtype in NARROW_INTS and not (op.saturates or _keeps_dtype(node, graph)):
            return f"tensor '{name}' has dtype {graph.tensors[name].dtype}: the device does not wrap it on overflow"
    for name, value in node.attrs.items():
        if isinstance(value, int) and not INT32_MIN <= value <= INT32_MAX and name not in _UNBOUNDED_ATTRS:
            return f"attribute '{name}' = {value} does not fit in int32"
    given = node.tensor_names
    if given is not None and given != [x.lstrip("*") for x in op.tensors][: len(given)] and not op.by_name:
        return f"of its optional tensors only {' and '.join(given[1:])} was given"
    with well_formed(node):
        return op.unsupported(node, graph)


@contextmanager
def well_formed(node: OpNode) -> Iterator[None]:
    """Context that turns errors of reading a malformed node into an `IRError` that names the node."""
    try:
        yield
    except MALFORMED as error:
        reason = str(error) or "its inputs, attributes and outputs are inconsistent"
        if isinstance(error, KeyError):
            reason = f"argument {error} is missing or unknown"
        raise IRError(f"node '{node.name}' ({node.op_type}): {reason}") from error


def _keeps_dtype(node: OpNode, graph: IRGraph) -> bool:
    """Whether the node only moves elements, and its output has the dtype of its input."""
    op = find_op(node.op_type)
    same = all(graph.tensors[x].dtype == graph.tensors[node.outputs[0]].dtype for x in node.inputs[:1])
    return op is not None and op.moves and same


_UNBOUNDED_ATTRS = frozenset({"end", "start", "dim_size"})


class Args:
    """A node's arguments by schema name: tensors as their names, the rest from attributes."""

    def __init__(self, node: OpNode) -> None:
        op = find_op(node.op_type)
        assert op is not None, node.op_type
        self.node, self._names = node, op.tensors
        self._tensors: dict[str, str | list[str] | None] = {}
        remaining, given = list(node.inputs), node.tensor_names
        for name in op.tensors:
            if given is not None and name.lstrip("*") not in given:
                continue
            if name.startswith("*"):
                self._tensors[name[1:]], remaining = remaining, []
            elif name in node.attrs:
                continue
            else:
                self._tensors[name] = remaining.pop(0) if remaining else None

    def tensor(self, name: str) -> str | None:
        """The name of a tensor argument; None if it was omitted or is a number."""
        value = self._tensors.get(name)
        assert not isinstance(value, list)
        return value

    def tensors(self, name: str) -> list[str]:
        value = self._tensors[name]
        assert isinstance(value, list)
        return value

    def ranges(self, operands: Mapping[str, Range], of_scalar: Callable[[float], Range]) -> list[Range | None]:
        """The range of each tensor argument in the schema's order, computed by `of_scalar` if it is a number.

        An omitted argument has None.
        """
        values = ((self.tensor(name), self.attr(name)) for name in self._names)
        return [operands[x] if x is not None else None if y is None else of_scalar(y) for x, y in values]

    def attr(self, name: str, default: Any = None) -> Any:
        value = self.node.attrs.get(name)
        return default if value is None else value


def operand(ctx: Lowering, args: Args, name: str) -> View | Scalar:
    """An argument that may be a tensor, as a view, or a number."""
    tensor = args.tensor(name)
    if tensor is not None:
        return ctx.view(tensor)
    value: Scalar = args.node.attrs[name]
    return value
