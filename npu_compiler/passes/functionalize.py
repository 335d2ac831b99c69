"""Make every op out-of-place, so that later stages may move, merge and split nodes freely.

`torch.export` keeps in-place ops, and an in-place op on a view changes its base and all of the base's other views:

    Given:   v = slice(x, 0, 0, 2);  v2 = add_(v, 1);  y = relu(x)
    Result:  v = slice(x, 0, 0, 2);  v2 = add(v, 1);   x2 = slice_scatter(x, v2, 0, 0, 2);  y = relu(x2)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from npu_compiler.errors import IRError
from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec, unique_name
from npu_compiler.ops.aliases import is_alias, slice_bounds
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.registry import find_op, is_in_place, out_of_place
from npu_compiler.program.target import OpLevelTarget
from npu_compiler.program.views import View, contiguous_strides

MAY_COPY = frozenset({"aten.contiguous", "aten.reshape", "aten.flatten", "aten.reshape_as", "aten.ravel"})
PERMUTATIONS = frozenset(
    {
        "aten.transpose",
        "aten.swapaxes",
        "aten.swapdims",
        "aten.t",
        "aten.mT",
        "aten.mH",
        "aten.adjoint",
        "aten.matrix_H",
        "aten.numpy_T",
        "aten.permute",
        "aten.movedim",
        "aten.moveaxis",
    }
)
SHUFFLES = frozenset({"aten.pixel_shuffle", "aten.pixel_unshuffle", "aten.channel_shuffle"})
UNTRACKED_VIEWS = frozenset({"aten.as_strided", "aten.view_as_real", "aten.view_as_complex", "aten.real", "aten.imag"})


@dataclass(frozen=True)
class _Alias:
    """How a tensor looks into its base: the chain of view nodes from the base to it, and the base's version then."""

    base: str
    chain: tuple[OpNode, ...]
    version: int


def is_same_dtype_cast(node: OpNode, tensors: Mapping[str, TensorSpec]) -> bool:
    """Whether a cast returns its input itself, as `x.float()` does where x is float32."""
    if node.base not in ("aten.to", "aten.type_as", "aten.float") or node.attrs.get("copy"):
        return False
    return tensors[node.inputs[0]].dtype == tensors[node.outputs[0]].dtype


def functionalize(graph: IRGraph) -> IRGraph:
    """Replace in-place ops by their plain twins and redirect every later reader of the memory they changed.

    Raises:
        IRError: an in-place op writes through a view that has no scatter twin (an expanded or overlapping one).
    """
    if not any(is_in_place(node.op_type) for node in graph.nodes):
        return graph
    return _Functionalizer(graph).run()


class _Functionalizer:
    def __init__(self, graph: IRGraph) -> None:
        self.graph = graph
        self.tensors = dict(graph.tensors)
        self.node_names = {node.name for node in graph.nodes}
        self.nodes: list[OpNode] = []
        self.aliases: dict[str, _Alias] = {}
        self.current: dict[str, str] = {}
        self.version: dict[str, int] = {}
        self.makers = graph.producers()

    def run(self) -> IRGraph:
        for node in self.graph.nodes:
            if is_in_place(node.op_type):
                self._mutate(node)
            else:
                self._plain(node)
        outputs = [self._latest(name) for name in self.graph.outputs]
        return replace(self.graph, nodes=self.nodes, tensors=self.tensors, outputs=outputs)

    def _alias(self, name: str) -> _Alias:
        return self.aliases.get(name) or _Alias(name, (), 0)

    def _plain(self, node: OpNode) -> None:
        self.nodes.append(node.rename_inputs({name: self._latest(name) for name in node.inputs}))
        if node.inputs and (is_alias(node) or is_same_dtype_cast(node, self.tensors)):
            self._track_view(node)

    def _track_view(self, node: OpNode) -> None:
        if node.base == "getitem":
            source = node.inputs[node.attrs["index"]]
            parent = self.aliases.get(source)
            if parent is not None:
                self.aliases[node.outputs[0]] = parent
            return
        if node.base == "aten.broadcast_tensors":
            for source, out in zip(node.inputs, node.outputs, strict=True):
                size = list(self.tensors[out].shape)
                self._track_view(OpNode(node.name, "aten.expand.default", (source,), (out,), {"size": size}))
            return
        if node.base in SHUFFLES or (node.base in MAY_COPY and not self._shares(node)):
            return
        parent = self._alias(node.inputs[0])
        version = self.version.get(parent.base, 0)
        for index, out in enumerate(node.outputs):
            step = (
                node if len(node.outputs) == 1 else replace(node, outputs=(out,), attrs={**node.attrs, "_piece": index})
            )
            self.aliases[out] = _Alias(parent.base, (*parent.chain, step), version)

    def _shares(self, node: OpNode) -> bool:
        """Whether a reshape or contiguous returns a view: it does unless its input's strides forbid."""
        window = self._window(self._alias(node.inputs[0]))
        if node.base == "aten.contiguous":
            return window.is_contiguous
        return window.reshape(self.tensors[node.outputs[0]].shape) is not None

    def _window(self, alias: _Alias) -> View:
        """The part of a (dense) base that an alias shows, with its strides."""
        shape = self.tensors[alias.base].shape
        window = View(alias.base, shape, contiguous_strides(shape), 0, "")
        for step in alias.chain:
            if is_same_dtype_cast(step, self.tensors):
                continue
            if "_piece" in step.attrs:
                op_type, attrs = self._piece_window(step)
                step = replace(step, op_type=op_type, attrs=attrs)
            window = self._lower_view(step, window)
        return window

    def _lower_view(self, step: OpNode, source: View) -> View:
        op = find_op(step.op_type)
        assert op is not None, step.op_type
        graph = replace(self.graph, tensors=self.tensors)
        ctx = Lowering(graph, OpLevelTarget(), {step.inputs[0]: source}, node=step)
        op.lower(ctx, step)
        return ctx.view(step.outputs[0])

    def _latest(self, name: str) -> str:
        """The tensor that now holds what `name` refers to; views of a changed base are taken again."""
        alias = self._alias(name)
        version = self.version.get(alias.base, 0)
        if alias.version == version and (alias.chain or version == 0):
            return name
        value = self.current.get(alias.base, alias.base)
        for step in alias.chain:
            value = self._replay(step, value)
        return value

    def _replay(self, step: OpNode, source: str) -> str:
        if "_piece" in step.attrs:
            return self._piece(step, source)
        return self._append(step.op_type, (source, *step.inputs[1:]), self.tensors[step.outputs[0]], step.attrs)

    def _piece(self, step: OpNode, source: str) -> str:
        """One output of split, chunk or unbind, as a slice or select."""
        op, attrs = self._piece_window(step)
        return self._append(op, (source,), self.tensors[step.outputs[0]], attrs)

    def _piece_window(self, step: OpNode) -> tuple[str, dict[str, int]]:
        dim, index = step.attrs.get("dim", 0), step.attrs["_piece"]
        if step.base == "aten.unbind":
            return "aten.select.int", {"dim": dim, "index": index}
        original = next(node for node in self.graph.nodes if node.name == step.name)
        sizes = [self.tensors[out].shape[dim] for out in original.outputs]
        start = sum(sizes[:index])
        return "aten.slice.Tensor", {"dim": dim, "start": start, "end": start + sizes[index]}

    def _mutate(self, node: OpNode) -> None:
        target = node.inputs[0]
        alias = self._alias(target)
        names = {name: self._latest(name) for name in node.inputs}
        inputs = tuple(names[name] for name in node.inputs)
        if is_alias(replace(node, op_type=out_of_place(node.op_type))):
            # unsqueeze_, detach_, … change how the tensor looks, not what it holds.
            plain = replace(node, op_type=out_of_place(node.op_type), inputs=inputs)
            self.nodes.append(plain)
            self._track_view(replace(plain, inputs=node.inputs))
            return
        spec = self.tensors[node.outputs[0]] if node.outputs else self.tensors[target]
        producer = self.makers.get(target)
        if producer is not None and producer.base in UNTRACKED_VIEWS:
            raise IRError(
                f"node '{node.name}': in-place write through '{producer.op_type}' ('{producer.name}') has no "
                "out-of-place form"
            )
        op_type = out_of_place(node.op_type)
        value = self._append(op_type, inputs, spec, node.attrs, node.name, node.outputs)
        self._write_back(alias, value, node)
        for out in node.outputs:
            self.aliases[out] = replace(alias, version=self.version[alias.base]) if alias.chain else alias

    def _write_back(self, alias: _Alias, value: str, node: OpNode) -> None:
        """Make `value` what the view shows, by scattering it into each tensor of the chain up to the base."""
        steps = list(alias.chain)
        sources = [self.current.get(alias.base, alias.base)]
        for step in steps[:-1]:
            sources.append(self._replay(step, sources[-1]))
        for step, source in zip(reversed(steps), reversed(sources[: len(steps)]), strict=True):
            value = self._scatter(step, source, value, node)
        self.current[alias.base] = value
        self.version[alias.base] = self.version.get(alias.base, 0) + 1
        self.aliases[alias.base] = _Alias(alias.base, (), -1)

    def _scatter(self, step: OpNode, source: str, value: str, node: OpNode) -> str:
        spec, attrs = self.tensors[source], step.attrs
        op, window = (step.base, attrs) if "_piece" not in attrs else self._piece_window(step)
        if "aten.slice" in op:
            return self._append("aten.slice_scatter.default", (source, value), spec, window)
        if "aten.select" in op:
            return self._append("aten.select_scatter.default", (source, value), spec, window)
        if op == "aten.diagonal":
            return self._append("aten.diagonal_scatter.default", (source, value), spec, attrs)
        if op == "aten.narrow":
            start, _ = slice_bounds(spec.shape[attrs["dim"]], attrs["start"], None)
            window = {"dim": attrs["dim"], "start": start, "end": start + attrs["length"]}
            return self._append("aten.slice_scatter.default", (source, value), spec, window)
        if op in PERMUTATIONS:
            # Strides that number the dimensions: permuted, they show the order.
            dims = range(len(spec.shape))
            order = self._lower_view(step, View(source, spec.shape, tuple(dims), 0, "")).strides
            return self._append("aten.permute.default", (value,), spec, {"dims": [order.index(d) for d in dims]})
        if self.tensors[value].numel == spec.numel and op != "aten.unfold":
            return self._append("aten.reshape.default", (value,), spec, {"shape": list(spec.shape)})
        raise IRError(
            f"node '{node.name}': in-place write through '{step.op_type}' (node '{step.name}') has no out-of-place form"
        )

    def _append(
        self,
        op_type: str,
        inputs: tuple[str, ...],
        spec: TensorSpec,
        attrs: Mapping[str, Any],
        name: str | None = None,
        outputs: tuple[str, ...] | None = None,
    ) -> str:
        if name is None:
            name = unique_name(f"{inputs[0]}.{op_type.split('.')[1]}", self.node_names | self.tensors.keys())
            self.node_names.add(name)
        if not outputs:
            outputs = (unique_name(name, self.tensors),)
            self.tensors[outputs[0]] = replace(spec, name=outputs[0])
        attrs = {key: value for key, value in attrs.items() if key != "_piece"}
        self.nodes.append(OpNode(name, op_type, inputs, outputs, attrs))
        return outputs[0]
