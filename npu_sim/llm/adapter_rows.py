"""Adapters in traced modules: to the product of each row of a linear layer, that of its sequence's adapter is added."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from npu_sim.llm.adapters import STACKED_A, STACKED_B
from npu_sim.llm.experts import expert_linear


class AdapterRows:
    """The adapter of each row while a module runs; see `add_adapters`.

    Attributes:
        rows: [N], the adapter's place in the stacks for each token of the step, -1 for the base alone.
        outputs: [R], the tokens whose rows reach the head. None: all do.
    """

    rows: torch.Tensor
    outputs: torch.Tensor | None = None


def add_adapters(causal: Any, ranks: Mapping[str, int], count: int) -> AdapterRows:
    """Let linear layers of a module on the meta device add the products of adapters, by rows.

    Args:
        ranks: Path of each layer that some adapter changes → the rank of its stacks.
        count: Number of adapters.
    """
    chosen, head = AdapterRows(), causal.get_output_embeddings()
    for layer, rank in ranks.items():
        module = causal.get_submodule(layer)
        outputs, inputs = _sizes(module)
        for name, shape in ((STACKED_A, (count, rank, inputs)), (STACKED_B, (count, outputs, rank))):
            stack = torch.empty(shape, dtype=module.weight.dtype, device=module.weight.device)
            module.register_parameter(name, nn.Parameter(stack, requires_grad=False))
        module.register_forward_hook(_adding(chosen, is_head=module is head))
    return chosen


def _sizes(module: Any) -> tuple[int, int]:
    """Elements of a row after and before a linear layer, whose weight may be transposed."""
    outputs, inputs = module.weight.shape
    return (outputs, inputs) if isinstance(module, nn.Linear) else (inputs, outputs)


def _adding(chosen: AdapterRows, is_head: bool) -> Any:
    """A forward hook."""

    def add(module: Any, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        rows = chosen.rows
        if is_head and chosen.outputs is not None:
            rows = rows.index_select(0, chosen.outputs)
        return output + _product(_product(arguments[0], module.lora_a, rows), module.lora_b, rows)

    return add


def _product(x: torch.Tensor, stack: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The product of each row of x [..., in] with its own of the matrices [adapters, out, in]; 0 for adapter -1."""
    count, outputs, inputs = stack.shape
    matrices = stack.view(count * outputs, inputs)
    product: torch.Tensor = expert_linear(x.reshape(-1, inputs), matrices, rows, None, count)
    return product.view(*x.shape[:-1], outputs)
