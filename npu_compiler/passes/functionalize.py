"""Makes every op out-of-place, so that later stages may move, merge and split nodes freely.

`torch.export` keeps in-place ops, and an in-place op on a view changes its base and all of the base's other views:

    Given:   v = slice(x, 0, 0, 2);  v2 = add_(v, 1);  y = relu(x)
    Result:  v = slice(x, 0, 0, 2);  v2 = add(v, 1);   x2 = slice_scatter(x, v2, 0, 0, 2);  y = relu(x2)

Whether an op such as `reshape` returned a view or a copy depends on strides, which IR does not have. IR that PyTorch
traced records it for each node (the attribute `SHARES`); for other IR, every tensor but a view is assumed to be
contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from npu_compiler.errors import InPlaceError, IRError
from npu_compiler.graph.model import SHARES, IRGraph, OpNode, TensorSpec, unique_name
from npu_compiler.ops.aliases import single_output, view_rule, window
from npu_compiler.ops.registry import find_op, is_in_place, out_of_place
from npu_compiler.ops.without_rows import UNTRACKED_VIEWS
from npu_compiler.program.views import View, contiguous_strides


@dataclass(frozen=True)
class _Step:
    """A node with one output, and the position of the input whose memory that output shares."""

    node: OpNode
    position: int = 0


@dataclass(frozen=True)
class _Alias:
    """A tensor that is a view: its base, the view ops from the base to it, and the base's version when it was computed.

    If the base has a later version, an in-place op has changed the base since.
    """

    base: str
    chain: tuple[_Step, ...]
    version: int


def functionalize(graph: IRGraph) -> IRGraph:
    """Replace in-place ops by their out-of-place variants, and redirect later readers of the memory that they change.

    Raises:
        InPlaceError: an in-place op writes through a view that has no scatter variant (an expanded or overlapping one),
            or the changed memory is read through a view that cannot be recomputed.
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
        attrs = {key: value for key, value in node.attrs.items() if key != SHARES}
        self.nodes.append(replace(node, attrs=attrs).rename_inputs({name: self._latest(name) for name in node.inputs}))
        if node.inputs:
            self._track_views(node)

    def _track_views(self, node: OpNode) -> None:
        for index, out in enumerate(node.outputs):
            step = single_output(node, self._graph_so_far(), index)
            if node.base == "getitem":
                if step.inputs[0] in self.aliases:
                    self.aliases[out] = self.aliases[step.inputs[0]]
                continue
            position = self._shared_input(node, index, step)
            if position is not None:
                parent = self._alias(step.inputs[position])
                version = self.version.get(parent.base, 0)
                self.aliases[out] = _Alias(parent.base, (*parent.chain, _Step(step, position)), version)

    def _shared_input(self, node: OpNode, index: int, step: OpNode) -> int | None:
        """The position of the input whose memory an output shares; None if the output has new memory.

        Raises:
            IRError: the IR names an input that does not exist.
        """
        rule, shares = view_rule(step), node.attrs.get(SHARES)
        if shares is not None:
            position = shares[index] if isinstance(shares, list) and len(shares) == len(node.outputs) else None
            if type(position) is not int or not -1 <= position < len(node.inputs):
                raise IRError(f"node '{node.name}': its attribute '{SHARES}' names no inputs: {shares!r:.80}")
            return None if position < 0 else position if step is node else 0
        if step.base in UNTRACKED_VIEWS:
            return 0
        if rule is None:
            return None
        copies = rule.may_copy and window(
            step, self._window(self._alias(step.inputs[0])), self.tensors[step.outputs[0]]
        )
        return None if copies is None else 0

    def _graph_so_far(self) -> IRGraph:
        return replace(self.graph, tensors=self.tensors)

    def _window(self, alias: _Alias) -> View:
        """An alias as a strided view of its base, which is taken to be contiguous."""
        base = self.tensors[alias.base]
        view = View(base.name, base.shape, contiguous_strides(base.shape), 0, base.dtype)
        for step in alias.chain:
            out = self.tensors[step.node.outputs[0]]
            shown = window(step.node, view, out) if view_rule(step.node) is not None else None
            view = View(base.name, out.shape, contiguous_strides(out.shape), 0, out.dtype) if shown is None else shown
        return view

    def _latest(self, name: str) -> str:
        """The tensor that now holds the value of `name`.

        Adds nodes that recompute it if it is a view of a changed base.
        """
        alias = self._alias(name)
        version = self.version.get(alias.base, 0)
        if alias.version == version and (alias.chain or version == 0):
            return name
        value = self.current.get(alias.base, alias.base)
        for step in alias.chain:
            value = self._replay(step, value)
        return value

    def _replay(self, step: _Step, source: str) -> str:
        node, place = step.node, step.position
        if len(node.outputs) > 1:
            raise InPlaceError(
                f"node '{node.name}': an in-place op changes what '{node.op_type}' gave several views of; "
                "there is no out-of-place form"
            )
        inputs = (*node.inputs[:place], source, *node.inputs[place + 1 :])
        attrs = {key: value for key, value in node.attrs.items() if key != SHARES}
        return self._append(node.op_type, inputs, self.tensors[node.outputs[0]], attrs)

    def _mutate(self, node: OpNode) -> None:
        target = node.inputs[0]
        alias = self._alias(target)
        names = {name: self._latest(name) for name in node.inputs}
        inputs = tuple(names[name] for name in node.inputs)
        plain = replace(node, op_type=out_of_place(node.op_type), inputs=inputs)
        op = find_op(plain.op_type)
        if op is not None and op.view is not None and op.is_pure:
            # unsqueeze_, detach_, … change how the tensor looks, not what it holds.
            self.nodes.append(plain)
            self._track_views(replace(plain, inputs=node.inputs))
            return
        spec = self.tensors[node.outputs[0]] if node.outputs else self.tensors[target]
        op_type = out_of_place(node.op_type)
        value = self._append(op_type, inputs, spec, node.attrs, node.name, node.outputs)
        self._write_back(alias, value, node)
        for out in node.outputs:
            self.aliases[out] = replace(alias, version=self.version[alias.base]) if alias.chain else alias

    def _write_back(self, alias: _Alias, value: str, node: OpNode) -> None:
        """Write `value` to the base of a view, by scattering it into each view of the chain and then into the base."""
        steps = list(alias.chain)
        sources = [self.current.get(alias.base, alias.base)]
        for step in steps[:-1]:
            sources.append(self._replay(step, sources[-1]))
        for step, source in zip(reversed(steps), reversed(sources[: len(steps)]), strict=True):
            value = self._scatter(step, source, value, node)
        self.current[alias.base] = value
        self.version[alias.base] = self.version.get(alias.base, 0) + 1
        self.aliases[alias.base] = _Alias(alias.base, (), -1)

    def _scatter(self, step: _Step, source: str, value: str, node: OpNode) -> str:
        view, rule, spec, new = step.node, view_rule(step.node), self.tensors[source], self.tensors[value]
        update = None
        if rule is not None and rule.write_back is not None and step.position == 0 and new.dtype == spec.dtype:
            update = rule.write_back(view, spec, new)
        if update is not None:
            inputs = (source, value) if update.keeps_rest else (value,)
            return self._append(update.op_type, inputs, spec, update.attrs)
        raise InPlaceError(
            f"node '{node.name}': in-place write through '{view.op_type}' (node '{view.name}') has no out-of-place form"
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
        self.nodes.append(OpNode(name, op_type, inputs, outputs, dict(attrs)))
        return outputs[0]
