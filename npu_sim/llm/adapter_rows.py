"""LoRA adapters in traced modules: a linear layer adds to each row the output of that row's adapter."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from npu_sim.llm.adapters import STACKED_A, STACKED_B
from npu_sim.llm.experts import expert_linear


class AdapterRows:
    """The adapter of each row of the current step, which the hooks of `add_adapters` read while a module runs.

    Attributes:
        rows: [N], the index of each token's adapter in the stacked matrices; -1 for no adapter.
        outputs: [R], indices of the tokens whose rows reach the output head. None: all do.
    """

    rows: torch.Tensor
    outputs: torch.Tensor | None = None


def add_adapters(causal: Any, ranks: Mapping[str, int], count: int) -> AdapterRows:
    """Let linear layers of a module on the meta device add the outputs of LoRA adapters, chosen for each row.

    The stacked matrices become parameters of the layers. The result says which adapter each row has; set it before a
    run.

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
    """Output and input size of a linear layer, whose weight may be transposed."""
    outputs, inputs = module.weight.shape
    return (outputs, inputs) if isinstance(module, nn.Linear) else (inputs, outputs)


def _adding(chosen: AdapterRows, is_head: bool) -> Any:
    """A forward hook that adds the outputs of the rows' adapters to those of a linear layer.

    Args:
        is_head: Whether the layer is the output embeddings, which see only the rows whose logits are wanted.
    """

    def add(module: Any, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        rows = chosen.rows
        if is_head and chosen.outputs is not None:
            rows = rows.index_select(0, chosen.outputs)
        return output + _product(_product(arguments[0], module.lora_a, rows), module.lora_b, rows)

    return add


def _product(x: torch.Tensor, stack: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The product of each row of x [..., in] with its adapter's matrix in `stack` [adapters, out, in].

    The product is 0 for adapter -1.
    """
    count, outputs, inputs = stack.shape
    matrices = stack.view(count * outputs, inputs)
    product: torch.Tensor = expert_linear(x.reshape(-1, inputs), matrices, rows, None, count)
    return product.view(*x.shape[:-1], outputs)
