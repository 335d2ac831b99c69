"""Sums of convolutions of one tensor become one convolution, whose weight is the sum of theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from npu_compiler.graph.dtypes import FLOAT_DTYPES
from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec, unique_name
from npu_compiler.graph.weight_recipe import WeightTransformRecipe
from npu_compiler.ops.conv import conv_window
from npu_compiler.ops.registry import Args

_CONVOLUTIONS = frozenset({"aten.conv1d", "aten.conv2d"})


def sum_convolutions(graph: IRGraph) -> IRGraph:
    """Replace each sum of convolutions of one tensor by a convolution, where that saves work.

    Given:   y = conv2d(x, v, a, padding=1) + conv2d(x, w, b) + x · s + t    with v: [C, 1, 3, 3], w: [C, 1, 1, 1]
    Result:  y = conv2d(x, v + pad(w + s), a + b + t, padding=1)

    These are the branches with which RepVGG, MobileOne, RepViT and FastViT are trained. The summands may also be
    subtracted, and sums multiplied by a factor per channel. Like a convolution that a batch norm is folded into, the
    result stores its weight as float32 in a 16-bit model, since rounding it would shift whole channels.
    """
    sums = _Sums(graph)
    for node in graph.nodes:
        sums.read(node)
    tensors, weights = dict(graph.tensors), dict(graph.weights)
    replaced: dict[str, OpNode] = {}
    dropped: set[str] = set()
    for out, total in sums.totals.items():
        if not total.saves_work:
            continue
        name = unique_name(f"{out}.weight", tensors)
        shape = (*total.channels, *(window.taps for window in total.union))
        tensors[name], weights[name] = TensorSpec(name, shape, "float32"), total.weight
        inputs = [total.source, name]
        if total.bias is not None:
            name = unique_name(f"{out}.bias", tensors)
            tensors[name], weights[name] = TensorSpec(name, shape[:1], "float32"), total.bias
            inputs.append(name)
        attrs = total.attrs(graph.tensors[total.source].shape, graph.tensors[out].shape)
        root = total.nodes[-1]
        replaced[root.name] = OpNode(root.name, total.convolutions[0].op_type, tuple(inputs), (out,), attrs)
        dropped.update(node.name for node in total.nodes[:-1])
    nodes = [replaced.get(node.name, node) for node in graph.nodes if node.name not in dropped]
    return replace(graph, nodes=nodes, tensors=tensors, weights=weights)


@dataclass(frozen=True)
class _Window:
    """The elements along an axis that a convolution reads for one of its own: `taps` of them, `step` apart.

    Attributes:
        first: Place of the first, counted from the stride times the result's place; 0 or less.
    """

    first: int = 0
    taps: int = 1
    step: int = 1

    @property
    def last(self) -> int:
        return self.first + (self.taps - 1) * self.step

    def joined(self, other: _Window) -> _Window | None:
        """The smallest window that has the elements of both; None if they are not the same steps apart."""
        step = self.step if self.taps > 1 else other.step
        if other.taps > 1 and other.step != step or (self.first - other.first) % step:
            return None
        first, last = min(self.first, other.first), max(self.last, other.last)
        return _Window(first, (last - first) // step + 1, step)


@dataclass(frozen=True)
class _Summand:
    """A convolution of the source, or the source itself (`weight` is None), times a factor per channel."""

    windows: tuple[_Window, ...]
    weight: WeightTransformRecipe | None = None
    scale: WeightTransformRecipe | None = None

    def scaled(self, scale: WeightTransformRecipe) -> _Summand:
        if self.weight is not None:
            return replace(self, weight=_scaled(self.weight, scale))
        return replace(self, scale=scale if self.scale is None else _scaled(self.scale, scale))

    def weight_in(self, union: Sequence[_Window], channels: tuple[int, int]) -> WeightTransformRecipe:
        """The weight of a convolution with the windows `union` that computes the summand."""
        weight = self.weight
        if weight is None:
            shape = [*channels, *(1 for _ in union)]
            weight = WeightTransformRecipe("identity_kernel", params={"shape": shape})
            weight = weight if self.scale is None else _scaled(weight, self.scale)
        pairs = list(zip(self.windows, union, strict=True))
        pads = [
            [(own.first - whole.first) // whole.step, (whole.last - own.last) // whole.step] for own, whole in pairs
        ]
        return weight if not any(map(any, pads)) else WeightTransformRecipe("pad", (weight,), {"pads": pads})


@dataclass(frozen=True)
class _Total:
    """A sum of convolutions of `source`, with a bias.

    Attributes:
        channels: Output channels, and input channels of a group; (0, 0) as long as there is no convolution.
        union: Windows that have the elements of all summands.
        nodes: The nodes that compute it, the last of which returns it.
    """

    source: str
    summands: tuple[_Summand, ...]
    union: tuple[_Window, ...]
    bias: WeightTransformRecipe | None = None
    channels: tuple[int, int] = (0, 0)
    stride: tuple[int, ...] = ()
    groups: int = 1
    convolutions: tuple[OpNode, ...] = ()
    nodes: tuple[OpNode, ...] = ()

    @property
    def saves_work(self) -> bool:
        """Whether it has a convolution and another summand than the source alone, which would be its residual."""
        return bool(self.convolutions) and sum(x.weight is not None or x.scale is not None for x in self.summands) > 1

    @property
    def weight(self) -> WeightTransformRecipe:
        return _sum([summand.weight_in(self.union, self.channels) for summand in self.summands])

    def plus(self, other: _Total) -> _Total | None:
        """The sum of two; None if no convolution computes it with as few products as the two."""
        first, second = (self, other) if self.convolutions else (other, self)
        joined = [one.joined(two) for one, two in zip(self.union, other.union, strict=True)]
        union = tuple(window for window in joined if window is not None)
        if self.source != other.source or len(union) < len(joined):
            return None
        if first.convolutions:
            is_alike = (first.channels, first.stride, first.groups) == (second.channels, second.stride, second.groups)
            is_kept = set(first.stride) == {1} and first.channels[0] == first.channels[1] * first.groups
            if not (is_alike if second.convolutions else is_kept):
                return None
        products = [prod(window.taps for window in x.union) for x in (self, other) if x.convolutions]
        if prod(window.taps for window in union) > max(1, sum(products)):
            return None
        biases = [x.bias for x in (self, other) if x.bias is not None]
        return replace(
            first,
            summands=self.summands + other.summands,
            union=union,
            bias=_sum(biases) if biases else None,
            convolutions=self.convolutions + other.convolutions,
            nodes=self.nodes + other.nodes,
        )

    def scaled(self, scale: WeightTransformRecipe) -> _Total:
        bias = None if self.bias is None else _scaled(self.bias, scale)
        return replace(self, summands=tuple(summand.scaled(scale) for summand in self.summands), bias=bias)

    def shifted(self, shift: WeightTransformRecipe) -> _Total:
        return replace(self, bias=shift if self.bias is None else _sum([self.bias, shift]))

    def attrs(self, x: tuple[int, ...], out: tuple[int, ...]) -> dict[str, object]:
        """The attributes of the convolution of a tensor of shape `x` to one of shape `out`."""
        before = [-window.first for window in self.union]
        sizes = list(zip(x[2:], out[2:], self.stride, self.union, strict=True))
        after = [max(0, (n - 1) * step + window.last - size + 1) for size, n, step, window in sizes]
        # Padding that is the same on both sides is what kernels are made for; it may give the same number of results.
        is_even = all(
            n == (size - 1 + begin - window.last) // step + 1
            for begin, (size, n, step, window) in zip(before, sizes, strict=True)
        )
        sides = [side for pair in zip(before, after, strict=True) for side in pair]
        return {
            "stride": list(self.stride),
            "padding": before if is_even else sides,
            "dilation": [window.step for window in self.union],
            "groups": self.groups,
        }


class _Sums:
    """The sums that a graph's tensors are. Those that are parts of others are no longer among `totals`."""

    def __init__(self, graph: IRGraph) -> None:
        self._graph, self._consumers = graph, graph.consumers()
        self.totals: dict[str, _Total] = {}

    def read(self, node: OpNode) -> None:
        """Note what sum a node returns, given those that the nodes before it return."""
        rule = _RULES.get(node.base) or (_convolution if node.base in _CONVOLUTIONS else None)
        names = [name for name in (*node.inputs, *node.outputs) if name not in self._graph.weights]
        dtypes = {self._graph.tensors[name].dtype for name in names}
        if rule is None or len(dtypes) != 1 or not dtypes <= FLOAT_DTYPES:
            return
        total = rule(self, node)
        if total is None:
            return
        for name in node.inputs:
            if self._is_own(name, node):
                self.totals.pop(name, None)
        self.totals[node.outputs[0]] = replace(total, nodes=(*total.nodes, node))

    def of(self, name: str, node: OpNode) -> _Total:
        """The sum that a tensor is, to be a part of that which `node` returns."""
        if name in self.totals and self._is_own(name, node):
            return self.totals[name]
        windows = tuple(_Window() for _ in self.shape(name)[2:])
        return _Total(name, (_Summand(windows),), windows)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._graph.tensors[name].shape

    def recipe(self, name: str) -> WeightTransformRecipe | None:
        return self._graph.weights.get(name)

    def _is_own(self, name: str, node: OpNode) -> bool:
        """Whether only this node reads a tensor."""
        return self._consumers.get(name) == [node] and name not in self._graph.outputs


def _convolution(sums: _Sums, node: OpNode) -> _Total | None:
    source, *names = node.inputs
    recipes = [recipe for recipe in map(sums.recipe, names) if recipe is not None]
    weight = sums.shape(names[0])
    if len(recipes) < len(names) or len(sums.shape(source)) != len(weight):
        return None
    axes = len(weight) - 2
    window = conv_window(node, (1, *weight[2:])[-2:], rank1=axes == 1)
    stride, step, pads = window["stride"][-axes:], window["dilation"][-axes:], window["padding"][-2 * axes :]
    if axes == 1 and pads[0] != pads[1]:
        return None
    windows = tuple(map(_Window, (-before for before in pads[::2]), weight[2:], step))
    bias = recipes[1] if len(recipes) > 1 else None
    channels = (weight[0], weight[1])
    summands = (_Summand(windows, recipes[0]),)
    return _Total(source, summands, windows, bias, channels, tuple(stride), window["groups"], (node,))


def _sum_of(sums: _Sums, node: OpNode) -> _Total | None:
    """Return the sum or difference of two sums, or of a sum and a number."""
    left, right = (Args(node).tensor(name) for name in ("self", "other"))
    shape, sign = sums.shape(node.outputs[0]), -1.0 if node.base == "aten.sub" else 1.0
    if left is None or node.attrs.get("alpha", 1) != 1 or sums.shape(left) != shape or len(shape) not in (3, 4):
        return None
    if right is None:
        return sums.of(left, node).shifted(_fill(shape[1], sign * float(node.attrs["other"])))
    if sums.shape(right) != shape:
        return None
    other = sums.of(right, node)
    return sums.of(left, node).plus(other if sign > 0 else other.scaled(_fill(shape[1], sign)))


def _product(sums: _Sums, node: OpNode) -> _Total | None:
    """Return the product of a sum and a constant factor per channel."""
    shape = sums.shape(node.outputs[0])
    for name, factor in (node.inputs, node.inputs[::-1]) if len(node.inputs) == 2 else ():
        recipe, sizes = sums.recipe(factor), sums.shape(factor)
        places = (*(1 for _ in range(len(shape) - len(sizes))), *sizes)
        if recipe is not None and sums.shape(name) == shape and places == (1, *shape[1:2], *(1 for _ in shape[2:])):
            flat = recipe if len(sizes) == 1 else WeightTransformRecipe("flatten", (recipe,))
            return sums.of(name, node).scaled(flat) if len(shape) in (3, 4) else None
    return None


def _scale_shift(sums: _Sums, node: OpNode) -> _Total | None:
    scale, shift = map(sums.recipe, node.inputs[1:])
    if scale is None or shift is None or len(sums.shape(node.inputs[0])) not in (3, 4):
        return None
    return sums.of(node.inputs[0], node).scaled(scale).shifted(shift)


_RULES: dict[str, Callable[[_Sums, OpNode], _Total | None]] = {
    "aten.add": _sum_of,
    "aten.sub": _sum_of,
    "aten.mul": _product,
    "npu.scale_shift_channels": _scale_shift,
}


def _scaled(values: WeightTransformRecipe, scale: WeightTransformRecipe) -> WeightTransformRecipe:
    return WeightTransformRecipe("scale_axis", (values, scale), {"axis": 0})


def _fill(size: int, value: float) -> WeightTransformRecipe:
    return WeightTransformRecipe("fill", params={"shape": [size], "value": value})


def _sum(summands: Sequence[WeightTransformRecipe]) -> WeightTransformRecipe:
    """The sum of recipes, some of which may be sums."""
    flat = [part for each in summands for part in (each.args if each.op == "sum" else (each,))]
    return flat[0] if len(flat) == 1 else WeightTransformRecipe("sum", tuple(flat))
