"""Results that share memory with an argument, a weight or another result: made by PyTorch's view ops, as in eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from npu_compiler.errors import DeviceError
from npu_compiler.graph.model import base_op
from npu_compiler.graph.symbolic import Sizes, specialize
from npu_compiler.ops.registry import out_of_place
from npu_runtime.cpu_fallback import bind_arguments, resolve_op

Step = Callable[[Any], Any]


@dataclass(frozen=True)
class AliasedView:
    """A result that is a view.

    Attributes:
        source: The name of the graph input or weight whose memory it shares; None where that is an output's.
        output: The index of the graph's output whose memory it shares.
        nodes: The IR's nodes that lead from there to the view, in order.
    """

    source: str | None
    output: int | None
    nodes: tuple[Mapping[str, Any], ...]

    def steps(self, sizes: Sizes, device: torch.device) -> tuple[Step, ...]:
        """The functions that make the view out of the tensor whose memory it shares.

        Args:
            sizes: Symbol → its value.
        """
        made = (_step(specialize(node, sizes), device) for node in self.nodes)
        return tuple(step for step in made if step is not None)


def replay(base: torch.Tensor, steps: Sequence[Step]) -> torch.Tensor:
    value: Any = base
    for step in steps:
        value = step(value)
    assert isinstance(value, torch.Tensor)
    return value


def _step(node: Mapping[str, Any], device: torch.device) -> Step | None:
    """A node as a function of its first tensor; None for one that only writes to it, which has happened by then."""
    op_type, attrs = node["op_type"], node["attrs"]
    if op_type.endswith("getitem>"):
        return lambda values: values[attrs["index"]]
    shape, like = node["outputs"][0]["shape"], base_op(op_type).endswith("_as")
    function = resolve_op(op_type.replace("_as.", ".") if like else op_type)
    if like:  # the second tensor only says which shape
        return lambda value: function(value, shape)
    if torch.Tag.inplace_view in function.tags:
        function = resolve_op(out_of_place(op_type))
    elif function._schema.is_mutable:
        return None
    if len(node["inputs"]) != 1:
        raise DeviceError(f"op '{op_type}' makes a view of several tensors, which cannot be made again")
    args, kwargs = bind_arguments(function._schema, op_type, [torch.empty(0)], attrs, device)
    return lambda value: function(value, *args[1:], **kwargs)
