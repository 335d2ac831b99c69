"""Results that share memory with an argument, a weight or another result; PyTorch's view ops create them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from npu_compiler.errors import IRError
from npu_compiler.graph.model import base_op
from npu_compiler.graph.symbolic import Sizes, specialize
from npu_compiler.ops.registry import out_of_place
from npu_runtime.cpu_fallback import bind_arguments, resolve_op
from npu_sim.module.fx_reader import ViewStep

Step = Callable[[Any], Any]


@dataclass(frozen=True)
class AliasedView:
    """A result that is a view of another tensor.

    Attributes:
        source: The name of the graph input or weight that owns the memory; None if an output of the graph does.
        output: The index of the graph's output that owns the memory; None if `source` does.
        path: The view steps that lead from the owner to the view, in order.
    """

    source: str | None
    output: int | None
    path: tuple[ViewStep, ...]

    def steps(self, sizes: Sizes, device: torch.device) -> tuple[Step, ...]:
        """Return functions that, applied in turn to the tensor that owns the memory, create the view.

        Args:
            sizes: Symbol → its value.
            device: The torch device of the tensor.
        """
        all_steps = (_step(specialize(step.node, sizes), step.position, device) for step in self.path)
        return tuple(step for step in all_steps if step is not None)


def replay(base: torch.Tensor, steps: Sequence[Step]) -> torch.Tensor:
    value: Any = base
    for step in steps:
        value = step(value)
    assert isinstance(value, torch.Tensor)
    return value


def check_replayable(path: Sequence[ViewStep]) -> None:
    """Check that a view depends on the values of no tensor but the one that owns the memory.

    Raises:
        IRError: a step depends on another tensor's values, such as `torch.narrow` with a tensor as its start.
    """
    for step in path:
        name, op_type = step.node["name"], step.node["op_type"]
        if len(step.node["inputs"]) < 2 or op_type.endswith("getitem>") or base_op(op_type) in _BY_SHAPE:
            continue
        if not resolve_op(op_type)._schema.is_mutable:
            raise IRError(f"node '{name}': '{op_type}' makes a result that is a view as other tensors' values say")


# Ops that take of all tensors but the one that they show only the shape or dtype.
_BY_SHAPE = frozenset(
    f"aten.{name}"
    for name in (
        "view_as",
        "reshape_as",
        "expand_as",
        "type_as",
        "broadcast_tensors",
        "meshgrid",
        "atleast_1d",
        "atleast_2d",
        "atleast_3d",
    )
)


def _step(node: Mapping[str, Any], position: int, device: torch.device) -> Step | None:
    """Return a view node as a function of one input; None for a node that only writes, which the program has done."""
    op_type, attrs = node["op_type"], node["attrs"]
    if op_type.endswith("getitem>"):
        return lambda values: values[attrs["index"]]
    function = resolve_op(op_type)
    if torch.Tag.inplace_view in function.tags:
        function = resolve_op(out_of_place(op_type))
    elif function._schema.is_mutable:
        return None
    # These cost no memory; of other inputs only the shapes count (see `check_replayable`).
    others = [
        torch.empty((), dtype=getattr(torch, x["dtype"]), device=device).expand(x["shape"]) for x in node["inputs"]
    ]

    def make(value: torch.Tensor) -> Any:
        inputs = [*others[:position], value, *others[position + 1 :]]
        args, kwargs = bind_arguments(function._schema, op_type, inputs, attrs, device)
        return function(*args, **kwargs)

    return make
