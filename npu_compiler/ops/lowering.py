"""`Lowering`: the context with which an op's lowering function turns its node into kernel calls and views."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from npu_compiler.errors import ConstraintError, IRError
from npu_compiler.graph.dtypes import saturate
from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec
from npu_compiler.program.elementwise import ELEMENTWISE, elementwise_kernel_name
from npu_compiler.program.kernels import KernelCall, distinct_bytes
from npu_compiler.program.target import CodegenTarget
from npu_compiler.program.views import MAX_RANK, Shape, View, collapse, contiguous_strides

_MOST_SLICES = 4096  # launches of one copy


@dataclass
class Lowering:
    """The state of lowering a graph, node by node.

    Attributes:
        views: Tensor name → the view of its elements in a buffer.
        allocs: Buffer name → (shape in memory, storage dtype), for buffers that calls write.
        donations: Graph output's name → the graph input whose buffer it updates in place.
    """

    graph: IRGraph
    target: CodegenTarget
    views: dict[str, View] = field(default_factory=dict)
    allocs: dict[str, tuple[Shape, str]] = field(default_factory=dict)
    calls: list[KernelCall] = field(default_factory=list)
    donations: dict[str, str] = field(default_factory=dict)
    node: OpNode | None = None

    def view(self, name: str) -> View:
        """The view of a tensor: its buffer, and where its elements are in that buffer.

        Raises:
            IRError: the node that should compute it lists more outputs than its op has.
        """
        if name not in self.views:
            raise IRError(f"tensor '{name}': the op of the node that returns it has fewer outputs")
        return self.views[name]

    def spec(self, name: str) -> TensorSpec:
        return self.graph.tensors[name]

    def alias(self, name: str, view: View) -> None:
        """Make a tensor a view of an existing buffer, which costs nothing at run time."""
        self.views[name] = view

    def donate(self, source: str, result: str) -> bool:
        """Let the node compute `result` in the memory of the graph input `source`; returns whether that is possible.

        It is if `result` is a graph output of the same dtype, and neither a later node nor the caller reads the old
        value under any name (existing views of the input count).
        """
        graph, node = self.graph, self.node
        assert node is not None
        if (
            source not in graph.inputs
            or source in self.donations.values()
            or graph.outputs.count(result) != 1
            or node.inputs.count(source) != 1
            or graph.tensors[source].storage != graph.tensors[result].storage
        ):
            return False
        windows = {name for name, view in self.views.items() if view.buffer == source}
        position = next(index for index, other in enumerate(graph.nodes) if other is node)
        later = {name for other in graph.nodes[position + 1 :] for name in other.inputs}
        if windows & (later | set(graph.outputs)) or (windows - {source}) & set(node.inputs):
            return False
        self.donations[graph.output_names[graph.outputs.index(result)]] = source
        self.alias(result, self.view(source))
        return True

    def output(self, index: int = 0, order: Sequence[int] | None = None) -> View:
        """A new buffer for an output of the current node, with padded channels if the layout says so.

        Args:
            order: Dimensions from outermost to innermost in memory, if another order than the shape's saves later ops a
                copy; None for row-major.
        """
        assert self.node is not None
        name = self.node.outputs[index]
        spec = self.spec(name)
        view = self._allocate(name, spec.shape, spec.storage, spec.alloc_shape, order)
        self.views[name] = view
        return view

    def temp(self, shape: Shape, dtype: str) -> View:
        """A new buffer for a value that passes between two calls of one node."""
        assert self.node is not None
        return self._allocate(self._fresh(f"{self.node.name}.tmp"), shape, dtype, None, None)

    def _allocate(
        self, name: str, shape: Shape, dtype: str, alloc_shape: Shape | None, order: Sequence[int] | None
    ) -> View:
        memory = alloc_shape or shape
        if order is None:
            strides = contiguous_strides(memory)
        else:
            packed = contiguous_strides([memory[d] for d in order])
            strides = tuple(packed[list(order).index(d)] for d in range(len(shape)))
            memory = tuple(memory[d] for d in order)
        self.allocs[name] = (memory, dtype)
        return View(name, shape, strides, 0, dtype)

    def _fresh(self, stem: str) -> str:
        index = 0
        while f"{stem}{index}" in self.allocs:
            index += 1
        return f"{stem}{index}"

    def emit(
        self,
        kernel: str,
        inputs: Sequence[View],
        outputs: Sequence[View],
        params: Mapping[str, Any] | None = None,
        flops: int = 0,
        source: str | None = None,
        bytes_moved: int | None = None,
    ) -> None:
        """Append a kernel call, unless it would write no elements.

        Args:
            kernel: Name of an op-level kernel, for which the target names its own; or, with `source`, the target's.
            flops: Floating-point operations, for reports.
            source: Name of the target's source file. None: as the target says for the kernel.
            bytes_moved: Bytes that the kernel touches, if that is only a part of a view (a row of a table); None means
                all of its views.
        """
        assert self.node is not None
        if all(view.numel == 0 for view in outputs):
            return
        if source is None:
            kernel, source = self.target.fused_kernel(kernel)
        if bytes_moved is None:
            bytes_moved = sum(distinct_bytes(view) for view in (*inputs, *outputs))
        views = (tuple(inputs), tuple(outputs))
        self.calls.append(KernelCall(kernel, source, *views, dict(params or {}), self.node.name, flops, bytes_moved))

    def elementwise(
        self, op: str, operands: Sequence[View | float | int | bool], out: View, params: Mapping[str, Any] | None = None
    ) -> None:
        """Append an element-wise call; tensors broadcast to the output's shape, and numbers become parameters."""
        inputs = [x.expand(out.shape) for x in operands if isinstance(x, View)]
        masks = ELEMENTWISE[op].masks
        scalars = [
            None if isinstance(x, View) else saturate(x, out.dtype, masks=masks) if isinstance(x, float) else x
            for x in operands
        ]
        dense = all(view.is_contiguous for view in (*inputs, out))
        has_scalars = any(x is not None for x in scalars)
        kernel = elementwise_kernel_name(op, has_scalars=has_scalars, is_strided=not dense)
        name, source = self.target.elementwise_kernel(kernel)
        merged = {"scalars": scalars, **ELEMENTWISE[op].attrs, **(params or {})}
        self.emit(name, inputs, [out], merged, flops=out.numel, source=source)

    def copy(self, source: View, out: View) -> None:
        """Copy elements of one shape, converting the dtype; the source may broadcast.

        Views with more than MAX_RANK dimensions are copied slice by slice.
        """
        source = source.expand(out.shape)
        dims, _ = collapse(out.shape, source.strides, out.strides)
        if len(dims) > MAX_RANK:
            slices = math.prod(sorted(dims)[: len(dims) - MAX_RANK])
            if slices > _MOST_SLICES:
                assert self.node is not None
                where = f"node '{self.node.name}' ({self.node.op_type})"
                raise ConstraintError([f"{where}: it copies {len(dims)} dimensions in {slices} parts"])
            dim = min((dim for dim, size in enumerate(out.shape) if size > 1), key=out.shape.__getitem__)
            for index in range(out.shape[dim]):
                self.copy(source.select(dim, index), out.select(dim, index))
            return
        self.elementwise("copy", [source], out)

    def contiguous(self, view: View) -> View:
        """The view itself if it is row-major without gaps, else a packed copy."""
        if view.is_contiguous:
            return view
        packed = self.temp(view.shape, view.dtype)
        self.copy(view, packed)
        return packed

    def inner_contiguous(self, view: View, dims: int = 1) -> View:
        """The view itself if its last `dims` dimensions are packed, else a packed copy."""
        inner = replace(view, shape=view.shape[view.rank - dims :], strides=view.strides[view.rank - dims :])
        return view if inner.is_contiguous and 0 not in inner.strides else self.contiguous(view)

    def reshaped(self, view: View, shape: Shape) -> View:
        """The view in another shape; copies only if no strides express it."""
        direct = view.reshape(shape)
        if direct is None:
            packed = self.temp(view.shape, view.dtype)
            self.copy(view, packed)
            direct = packed.reshape(shape)
            assert direct is not None
        return direct

    def cast(self, view: View, dtype: str) -> View:
        """The view itself if it is stored in that dtype, else a converted copy."""
        if view.dtype == dtype:
            return view
        converted = self.temp(view.shape, dtype)
        self.copy(view, converted)
        return converted

    def finish(self, view: View, index: int = 0) -> None:
        """Make a view the node's output: an alias if it has the right shape and storage dtype, else a copy.

        Args:
            index: Number of the output among the node's outputs.
        """
        assert self.node is not None
        name = self.node.outputs[index]
        spec = self.spec(name)
        if view.dtype == spec.storage and view.shape == spec.shape:
            self.alias(name, view)
        else:
            self.copy(self.reshaped(view, spec.shape), self.output(index))
