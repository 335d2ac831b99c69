"""Capabilities of a chip: the ops that its file's `[ops]` table allows, and their limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from npu_compiler.graph.model import IRGraph, OpNode, base_op
from npu_compiler.ops.registry import find_op
from npu_compiler.partitioning.lone_nodes import LoneNodes
from npu_compiler.passes.precision import storage_dtype
from npu_compiler.program.elementwise import declaration
from npu_compiler.program.kernels import KERNELS, Family
from npu_model.chip import Chip, Limits, Ops

# What a kernel of a family computes besides: a chip that lacks the one lacks the other.
_CONTAINS = {Family.ATTENTION: (Family.SOFTMAX,)}


class Capabilities:
    """The ops that a chip supports, and their limits."""

    def __init__(self, chip: Chip, lone: LoneNodes) -> None:
        self.chip, self._lone = chip, lone

    @property
    def is_limited(self) -> bool:
        """Whether the chip's file restricts the ops at all."""
        return self.chip.ops != Ops()

    def refusal(self, node: OpNode, graph: IRGraph, compute_dtype: str) -> str | None:
        """The reason why the chip does not support a node.

        None if it does, or if the node computes nothing (a view).
        """
        op = find_op(node.op_type)
        if not self.is_limited or op is None or op.view is not None or node.base == "getitem":
            return None
        families = self.families(node, graph, compute_dtype)
        return self.missing(short_name(node.op_type), families) or self._exceeded(node, graph, compute_dtype, families)

    def families(self, node: OpNode, graph: IRGraph, compute_dtype: str) -> tuple[Family, ...]:
        """The families of the kernels that compute a node."""
        plan = self._lone.plan(node, graph, compute_dtype)
        calls = () if plan is None else plan.calls
        return tuple(dict.fromkeys(declaration(call).family for call in calls))

    def missing(self, name: str, families: tuple[Family, ...]) -> str | None:
        """The reason why the chip lacks an op of that name, computed by kernels of these families.

        None if it supports the op.
        """
        ops = self.chip.ops
        if name in ops.also:
            return None
        for family in families:
            for part in _CONTAINS.get(family, ()):
                reason = self._lacks(part.value)
                if reason is not None and name != part.value:
                    return f"it contains {part.value}, and {reason}"
        for each in (name, *(family.value for family in families)):
            if each in ops.without:
                return f"chip '{self.chip.name}' lacks {each} ([ops] without)"
        if ops.only is None or name in ops.only or (families and all(f.value in ops.only for f in families)):
            return None
        return f"chip '{self.chip.name}' has no {name} (it is not in [ops] only)"

    def _lacks(self, family: str) -> str | None:
        ops = self.chip.ops
        lacks = family in ops.without and family not in ops.also
        return f"chip '{self.chip.name}' lacks {family} ([ops] without)" if lacks else None

    def has_fused(self, op_type: str) -> bool:
        """Whether the chip supports an op that the compiler fuses from several, such as `npu.attention`."""
        name = short_name(op_type)
        kernels = (f"{stem}_kernel" for stem in (name, name.replace("_", "")))
        families = tuple({KERNELS[kernel].family for kernel in kernels if kernel in KERNELS})
        return not families or self.missing(name, families) is None

    def limits(self, name: str, families: tuple[Family, ...]) -> list[tuple[str, Limits]]:
        """The limits that apply to an op, each with its key in the chip file: `all`, a family, or the op's name."""
        names = dict.fromkeys(("all", *(family.value for family in families), name))
        return [(each, self.chip.ops.limits[each]) for each in names if each in self.chip.ops.limits]

    def _exceeded(self, node: OpNode, graph: IRGraph, compute_dtype: str, families: tuple[Family, ...]) -> str | None:
        name = short_name(node.op_type)
        for _, limits in self.limits(name, families):
            problem = _problem(limits, node, graph, compute_dtype, families)
            if problem is not None:
                return f"chip '{self.chip.name}' takes {name} {problem}"
        return None


def with_ops(chip: Chip, names: Iterable[str]) -> Chip:
    """The chip as if it also supported these ops (named as in chip files), without limits specific to them."""
    names, own = tuple(names), chip.ops
    limits = {name: limits for name, limits in own.limits.items() if name not in names}
    return replace(chip, ops=replace(own, also=(*own.also, *names), limits=limits))


def short_name(op_type: str) -> str:
    """The name of an op in chip files: `softmax` for `aten._softmax.default`."""
    name = base_op(op_type).removeprefix("aten.").removeprefix("npu.").strip("_")
    return name.removeprefix("quantized_").removeprefix("integer_")


def _problem(
    limits: Limits, node: OpNode, graph: IRGraph, compute_dtype: str, families: tuple[Family, ...]
) -> str | None:
    """The limit that a node exceeds, as an ending of "chip X takes OP …"; None if it exceeds none."""
    dtype = _dtype(node, graph, compute_dtype)
    if limits.dtypes is not None and dtype not in limits.dtypes:
        return f"in {' or '.join(limits.dtypes) or 'no dtype'}, not in {dtype}"
    for tensor in dict.fromkeys((*node.inputs, *node.outputs)):
        shape = graph.tensors[tensor].shape
        measured = {
            "rank": (len(shape), "of rank at most"),
            "size": (max(shape, default=1), "with axes of at most"),
            "elements": (graph.tensors[tensor].numel, "with tensors of at most"),
        }
        for limit, (value, words) in measured.items():
            most = getattr(limits, limit)
            if most is not None and value > most:
                unit = "" if limit == "rank" else " elements"
                return f"{words} {most}{unit}; tensor '{tensor}' is {list(shape)}"
    window, stride = _window(node, graph, families), _longest(node.attrs.get("stride"))
    if limits.window is not None and window is not None and window > limits.window:
        return f"with windows of at most {limits.window} along an axis, not {window}"
    if limits.stride is not None and stride is not None and stride > limits.stride:
        return f"with strides of at most {limits.stride}, not {stride}"
    return None


def _dtype(node: OpNode, graph: IRGraph, compute_dtype: str) -> str:
    """Storage dtype of a node's first input.

    If that is a dequantization's result, the dtype of the integers before it.
    """
    names = (*node.inputs[:1], *node.outputs[:1])
    producer = graph.producers().get(names[0])
    if producer is not None and "dequantize" in producer.op_type:
        return graph.tensors[producer.inputs[0]].dtype
    return storage_dtype(graph.tensors[names[0]].dtype, compute_dtype)


def _window(node: OpNode, graph: IRGraph, families: tuple[Family, ...]) -> int | None:
    """The largest extent of a node's window along an axis; None if the op has no window."""
    if Family.CONV in families:
        return max(graph.tensors[node.inputs[1]].shape[2:], default=None)
    return _longest(node.attrs.get("kernel_size"))


def _longest(value: object) -> int | None:
    """The largest integer of an attribute that is a number or a list; None if it has no integer."""
    numbers = value if isinstance(value, (list, tuple)) else [value]
    return max((number for number in numbers if isinstance(number, int)), default=None)


__all__ = ["Capabilities", "short_name", "with_ops"]
