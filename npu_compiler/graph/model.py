"""The graph that every stage reads and returns: tensors, operations, weights, constants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from npu_compiler.graph.dtypes import SignedInt
from npu_compiler.graph.quantization import QuantizedFormat
from npu_compiler.graph.weight_recipe import WeightTransformRecipe

Attrs = dict[str, Any]
TENSOR_NAMES = "_tensor_names"
SHARES = "_shares"  # attribute: for each output the index of the input whose memory it shares, or -1 for its own


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor, and how a device stores it.

    Attributes:
        name: Unique in its graph.
        shape: Static shape, in elements.
        dtype: The dtype PyTorch gives it.
        storage: The dtype it has in device memory; empty until the precision stage has run.
        alloc_shape: Shape in device memory if channels are padded; None if the tensor is dense.
        bounds: Smallest and largest value that an integer input or weight may hold; None if the graph sets no limit. An
            index counts rows, from 0 or, if negative, from the end; other bounds keep int64 results computed from it
            within 32 bits.
        quantized: Format of a quantized weight, until `split_quantized_weights` replaces it by a tensor for each part;
            None if it is not quantized.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    storage: str = ""
    alloc_shape: tuple[int, ...] | None = None
    bounds: tuple[SignedInt, SignedInt] | None = None
    quantized: QuantizedFormat | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def is_index(self) -> bool:
        """Whether the tensor's bounds are those of an index: from 0, or from minus the number of rows."""
        return self.bounds is not None and self.bounds[0] in (0, -self.bounds[1] - 1)


@dataclass(frozen=True)
class OpNode:
    """One operation. `inputs` and `outputs` are tensor names; scalars and flags are in `attrs`."""

    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Attrs = field(default_factory=dict)

    @property
    def tensor_names(self) -> list[str] | None:
        """The schema's names of the arguments that `inputs` are, in order; None if the IR does not record them.

        IR records them for ops with several optional tensor arguments, some of which were omitted.
        """
        names, sizes = self.attrs.get(TENSOR_NAMES), self.attrs.get("_tensor_list_sizes") or []
        is_complete = names is not None and len(names) - len(sizes) + sum(sizes) == len(self.inputs)
        return list(names) if names is not None and is_complete else None

    @property
    def base(self) -> str:
        """The op without its overload: `aten.add` of `aten.add.Tensor`."""
        return base_op(self.op_type)

    def rename_inputs(self, names: Mapping[str, str]) -> OpNode:
        """This node reading `names[x]` wherever it read `x`."""
        if not any(x in names for x in self.inputs):
            return self
        return replace(self, inputs=tuple(names.get(x, x) for x in self.inputs))


@dataclass(frozen=True)
class Composite:
    """An op that was decomposed into several nodes, since the device has no kernel for it as a whole.

    Attributes:
        node: The op as it was written; its outputs are the tensors of its parts that other nodes read.
        parts: The nodes that compute it, as a graph of their own.
    """

    node: OpNode
    parts: IRGraph


@dataclass
class IRGraph:
    """A static-shape dataflow graph in topological order.

    Attributes:
        tensors: Every tensor by name.
        outputs: Tensors that the graph returns; a pass may replace them.
        output_names: The names under which they are returned, unique and never changed.
        weights: Weight tensor name → the recipe that computes it from the checkpoint.
        constants: Constant tensor name → its value, known at compile time.
        native_dtype: The float dtype of the model that this graph is a part of; empty for a whole model.
        composites: Ops that may replace the nodes that compute them, as they were written.
    """

    name: str
    nodes: list[OpNode]
    tensors: dict[str, TensorSpec]
    inputs: list[str]
    outputs: list[str]
    output_names: list[str]
    weights: dict[str, WeightTransformRecipe]
    constants: dict[str, np.ndarray]
    native_dtype: str = ""
    composites: tuple[Composite, ...] = ()

    def spec(self, name: str) -> TensorSpec:
        """Return the spec of a tensor by its name."""
        return self.tensors[name]

    def producers(self) -> dict[str, OpNode]:
        """Tensor name → the node that computes it."""
        return {out: node for node in self.nodes for out in node.outputs}

    def consumers(self) -> dict[str, list[OpNode]]:
        """Tensor name → the nodes that read it, in order, once per node."""
        users: dict[str, list[OpNode]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                users.setdefault(name, []).append(node)
        return users

    def with_nodes(self, nodes: list[OpNode], tensors: Mapping[str, TensorSpec] | None = None) -> IRGraph:
        """A copy with other nodes and, if given, further or changed tensors."""
        merged = {**self.tensors, **tensors} if tensors else self.tensors
        return replace(self, nodes=nodes, tensors=merged)

    def __iter__(self) -> Iterator[OpNode]:
        return iter(self.nodes)


@cache
def base_op(op_type: str) -> str:
    """The op without its overload, for `aten` and `npu` ops: `aten.add` for `aten.add.Tensor`; other ops are unchanged.

    The built-in `getitem` is shortened to that name.
    """
    if op_type == "<built-in function getitem>":
        return "getitem"
    if op_type.startswith(("aten.", "npu.")):
        return ".".join(op_type.split(".")[:2])
    return op_type


def unique_name(stem: str, taken: Iterable[str]) -> str:
    taken = taken if isinstance(taken, (set, dict, frozenset)) else set(taken)
    if stem not in taken:
        return stem
    suffix = 1
    while f"{stem}__{suffix}" in taken:
        suffix += 1
    return f"{stem}__{suffix}"


def unique_names(names: list[str]) -> list[str]:
    result: list[str] = []
    for name in names:
        result.append(unique_name(name, result))
    return result
